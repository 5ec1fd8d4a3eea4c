"""Central DP: Gaussian noise that a trusted server adds to the sum of bounded updates."""

import math
from collections.abc import Callable

from fedveil.checks import check
from fedveil.errors import BadInput
from fedveil.privacy.accounting import supports
from fedveil.privacy.calibration import noise_for
from fedveil.privacy.claims import Accountant, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.events import Event, Gaussian
from fedveil.privacy.mechanisms import GaussianMechanism
from fedveil.privacy.plan import PrivacyPlan, Where
from fedveil.privacy.rows import Norm
from fedveil.privacy.rules import Median, PerGradient, Quantile, Rule
from fedveil.privacy.sampling import Sampler
from fedveil.privacy.terms import Budget, Terms

SEEDED = "seeded noise: whoever knows the seed can remove it, so this is a simulation"


def central(
    sampler: Sampler,
    population: int,
    rule: Rule,
    *,
    rounds: int,
    budget: Budget,
    multiplier: float | None = None,
) -> PrivacyPlan:
    """Client-level central DP: Gaussian noise at a trusted server (Naseri et al., algorithm 1).

    Guarantee: docs/proofs/central.md. Without `multiplier` the noise is the least that lets
    `rounds` rounds fit into the budget; with it, the budget says how many rounds may run. With a
    quantile rule the bits and the updates are one joint Gaussian release of that multiplier, of
    which the updates get z_delta = (z^-2 - z_bits^-2)^(-1/2).

    | edge | behaviour |
    |---|---|
    | neither multiplier nor a finite epsilon | BadInput |
    | multiplier 0 | BadInput: no finite epsilon exists |
    | multiplier whose first round exceeds the budget | BadInput |
    | delta >= 1 / clients | BadInput |
    | quantile rule with z >= z_bits (2 sigma_b under zero-out) | BadInput: no split exists |

    >>> from fedveil.privacy.sampling import Everyone
    >>> from fedveil.privacy.rules import Fixed
    >>> plan = central(Everyone(), 100, Fixed(1.0), rounds=1, budget=Budget(1.0, 1e-5))
    >>> round(plan.mechanism.multiplier, 2)
    3.73
    """
    check("clients", population)
    check("rounds", rounds)
    if multiplier is not None:
        check("noise.multiplier", multiplier)
    sampler.check(population)
    if rule.norm is not Norm.L2:
        raise BadInput(f"bound.norm is {rule.norm} and the noise needs l2: set bound.norm = 'l2'")
    if isinstance(rule, Median | PerGradient):
        raise BadInput("central DP takes a fixed, decaying or quantile bound on the whole update")
    if rule.width and type(rule) is not Quantile:
        raise BadInput(
            f"the bound {type(rule).__name__} watches clients and central DP accounts for no such "
            "release: use Quantile, or a bound that watches nobody"
        )
    if isinstance(rule, Quantile) and rule.flip:
        raise BadInput("bound.bit_epsilon is for local DP: give bound.bit_noise under central DP")
    if multiplier == 0:
        raise BadInput("noise.multiplier is 0: no finite epsilon exists; use noise.kind = 'none'")
    relation = sampler.relation

    def terms(m: float) -> Terms:
        return Terms(
            event=sampler.event(Gaussian(m), population),
            share=sampler.share(population),
            budget=budget,
            unit=Unit.CLIENT,
            relation=relation,
            trust=Trust.CENTRAL,
            noise=NoiseSource.SEEDED,
            assumptions=(
                "the server is trusted: it sees true updates and adds the noise",
                sampler.assumption,
                f"the number of clients, {population}, is public",
                "only models are published; metrics on clients' data are outside the claim",
                SEEDED,
            ),
        )

    unprotected = PrivacyPlan(sampler, population, rounds, lines=(terms(1.0),))
    if multiplier is None:
        multiplier = least_noise(
            lambda m: sampler.event(Gaussian(m), population),
            unprotected.lines[0].participations(rounds),
            budget,
            relation,
        )
    line = terms(multiplier)
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        where=Where.SERVER,
        rule=rule,
        mechanism=GaussianMechanism(_update_multiplier(multiplier, rule, relation)),
        relation=relation,
        lines=(line,),
    )
    check_affordable(plan, multiplier)
    return plan


def least_noise(
    make_event: Callable[[float], Event], count: int, budget: Budget, relation: Relation
) -> float:
    """The noise with which `count` events meet the budget, by the accountant that counts."""
    if math.isinf(budget.epsilon):
        raise BadInput("give noise.multiplier or budget.epsilon: one follows from the other")
    accountant = next((a for a in Accountant if supports(make_event(1.0), relation, a)), None)
    if accountant is None:
        raise BadInput(f"no accountant knows {make_event(1.0)} under {relation}")
    delta = 0.0 if accountant is Accountant.PURE else budget.delta
    if accountant is Accountant.PURE:
        return a_little_more(count / budget.epsilon)
    return noise_for(make_event, count, budget.epsilon, delta, relation, accountant)


def a_little_more(noise: float) -> float:
    """A little more, so that the epsilon computed back from it is not one rounding too large."""
    return noise * (1 + 1e-12)


def check_affordable(plan: PrivacyPlan, multiplier: float) -> None:
    """Refuse noise and budget that do not even go together for one round."""
    if plan.permitted >= 1:
        return
    line = plan.lines[0]
    raise BadInput(
        f"noise.multiplier {multiplier:g} and budget.epsilon {line.budget.epsilon:g} contradict "
        f"each other: one round alone costs {line.claims(1)[0].short}; raise either"
    )


def _update_multiplier(z: float, rule: Rule, relation: Relation) -> float:
    """z for the updates alone, or what is left of it when bits share the release."""
    if not isinstance(rule, Quantile):
        return z
    z_bits = _bits_multiplier(rule, relation)
    if z >= z_bits:
        raise BadInput(
            f"bound.bit_noise {rule.noise:g} is too small for the noise multiplier {z:.4g}: the "
            f"bits alone would spend more than a round's budget; raise it above "
            f"{rule.noise * z / z_bits:.4g}"
        )
    return float((z**-2 - z_bits**-2) ** -0.5)


def joint_multiplier(z: float, rule: Rule | None, relation: Relation) -> float:
    """Of a sum with noise z and the bits that a rule releases beside it, as one Gaussian."""
    if type(rule) is not Quantile or z == 0:
        return z
    return float((z**-2 + _bits_multiplier(rule, relation) ** -2) ** -0.5)


def _bits_multiplier(rule: Quantile, relation: Relation) -> float:
    """Noise over sensitivity of a sum of bits that are centred to +-1/2."""
    return rule.noise / (1.0 if relation is Relation.REPLACE else 0.5)
