"""Local DP: plans in which clients protect themselves from the server.

Any two inputs of a client are neighbours (replacement), a client is charged for the rounds in
which it takes part, and no sampling amplifies anything: the server knows who reported.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedveil.checks import check
from fedveil.errors import BadInput
from fedveil.privacy.central import SEEDED, a_little_more, check_affordable, least_noise
from fedveil.privacy.claims import NoiseSource, Relation, Trust, Unit
from fedveil.privacy.curators import Curator, curator_of, with_noise
from fedveil.privacy.events import (
    Event,
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    Laplace,
    PoissonSampled,
    Shuffled,
    TwoPoint,
)
from fedveil.privacy.mechanisms import GaussianMechanism, LaplaceMechanism, TwoPointMechanism
from fedveil.privacy.plan import PrivacyPlan, Where
from fedveil.privacy.ranges import Ranges
from fedveil.privacy.rules import Fixed, PerGradient, Quantile, Rule
from fedveil.privacy.sampling import FixedSize, Sampler
from fedveil.privacy.steps import NoisySteps
from fedveil.privacy.terms import Budget, Terms

_TURNS = "who takes part, and how often, is public"


@dataclass(frozen=True)
class Published:
    """A paper's own formula instead of the strict one; c2 is what Fu's Gaussian leaves open."""

    c2: float | None = None
    unit: Unit = Unit.CLIENT


def local_updates(
    sampler: Sampler,
    population: int,
    rule: Rule,
    *,
    laplace: bool,
    rounds: int,
    budgets: tuple[Budget, ...],
    group_of: npt.NDArray[np.int64] | None = None,
    multiplier: float | None = None,
    published: Published | None = None,
) -> PrivacyPlan:
    """Every client adds noise to its bounded update: LDP-SGD, and Fu's DP-FedAvg.

    Guarantee: docs/proofs/local.md. A report is an additive-noise release of sensitivity 2 C (any
    two inputs), charged for each participation, at most the sampler's share or cap. Without
    `multiplier` the noise is the least that fits the budget at that number. Clients may have
    budgets of their own: client k has budgets[group_of[k]], and lines are listed worst first. With
    a bound that a curator watches, what it publishes is composed with the reports into each line.

    | edge | behaviour |
    |---|---|
    | every client at its cap before the last round | BadInput |
    | Laplace with an L2 bound, Gaussian with an L1 bound (strict) | BadInput |
    | Laplace with an adaptive bound | BadInput |
    | a curator that alone uses up the budget | BadInput |
    | published Gaussian of Fu without c2 | BadInput |
    | several budgets and a multiplier | BadInput |
    """
    _check_sampler(sampler, population, rounds)
    _check_multiplier(multiplier)
    _check_norm(rule, laplace, published)
    if multiplier is not None and len(budgets) > 1:
        raise BadInput("noise.multiplier is one number and budget.epsilons are several: give one")
    anyone = _terms(sampler, population, budgets[0])
    rule = with_noise(rule, anyone, rounds)
    curator = curator_of(rule, anyone, rounds)
    groups = np.zeros(1, dtype=np.int64) if group_of is None else group_of
    grouped = groups.shape == (population,) or (group_of is None and len(budgets) == 1)
    if not grouped or not np.isin(groups, np.arange(len(budgets))).all():
        raise BadInput(f"group_of must name one of {len(budgets)} budgets for each client")
    noise, lines = np.zeros(len(groups)), []
    for group in sorted(range(len(budgets)), key=lambda g: -budgets[g].epsilon):
        here = groups == group
        base = _terms(sampler, population, budgets[group])
        if len(budgets) > 1:
            members = int(here.sum())
            covers = f"updates of {members} clients, group {group + 1}"
            base = replace(base, covers=covers, members=members)
        count = base.participations(rounds)
        m = multiplier
        if m is None:
            m = _calibrated(base, rule, curator, laplace, count, published)
        elif curator is not None and published is None:
            curator.check(base, 1)
        noise[here] = m
        lines += _readings(base, rule, curator, laplace, m, published)
    first = float(noise[0])
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        where=Where.CLIENT,
        rule=rule,
        mechanism=LaplaceMechanism(first) if laplace else GaussianMechanism(first),
        multipliers=noise if len(budgets) > 1 else None,
        relation=Relation.ADD_REMOVE if published else Relation.REPLACE,
        lines=tuple(lines),
    )
    check_affordable(plan, first)
    return plan


def local_steps(
    sampler: Sampler,
    population: int,
    bound: float,
    *,
    rate: float,
    steps: int,
    nominal: int | None = None,
    rounds: int,
    budget: Budget,
    multiplier: float | None = None,
) -> PrivacyPlan:
    """DP-SGD inside every client: record-level DP against the server (Naseri, algorithm 2).

    Guarantee: docs/proofs/local.md. Each participation is `steps` Poisson-sampled Gaussians on the
    client's own records; one account per client over all its participations. It protects records,
    not clients: a client of k records has k of them.

    | edge | behaviour |
    |---|---|
    | rate outside (0, 1], steps < 1 | BadInput |
    | sizes public (`nominal` left out) | zero-out neighbours |
    | one public nominal size for all | add-remove neighbours |
    """
    unnoised = NoisySteps(rate, steps, 0.0, nominal)
    _check_sampler(sampler, population, rounds)
    _check_multiplier(multiplier)
    relation = Relation.ZERO_OUT if nominal is None else Relation.ADD_REMOVE

    def event(m: float) -> Event:
        return Gaussian(m) if rate == 1 else PoissonSampled(rate, Gaussian(m))

    base = replace(
        _terms(sampler, population, budget),
        unit=Unit.RECORD,
        relation=relation,
        per=steps,
        assumptions=(
            "the server is not trusted; each client runs DP-SGD honestly on its own records",
            "clients' numbers of records are public"
            if nominal is None
            else "a nominal number of records is used for every client",
            _TURNS,
            "one record per person and client",
            SEEDED,
        ),
    )
    if multiplier is None:
        multiplier = least_noise(event, steps * base.participations(rounds), budget, relation)
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        where=Where.TRAINING,
        rule=Fixed(bound),
        mechanism=GaussianMechanism(multiplier),
        steps=replace(unnoised, multiplier=multiplier),
        relation=relation,
        lines=(replace(base, event=event(multiplier)),),
    )
    check_affordable(plan, multiplier)
    return plan


def two_point(
    sampler: Sampler,
    population: int,
    ranges: Ranges,
    *,
    epsilon: float,
    rounds: int,
    budget: Budget,
    shuffled: int = 0,
) -> PrivacyPlan:
    """LDP-FL: every weight of every client as one of two values, shuffled or not (Sun et al.).

    Guarantee: docs/proofs/ldp-fl.md. One round is one two-valued report per weight, all about the
    same client, so a client's claim composes all weights and all its rounds. Four readings of
    the same reports: composed behind an ideal shuffler with at least `shuffled` honest reports
    per position (when it is > 0), composed exactly without one, composed by adding epsilons, and
    the published epsilon of one weight in one round, which is no guarantee for anybody.

    | edge | behaviour |
    |---|---|
    | epsilon <= 0 | BadInput |
    | fewer clients per round than `shuffled` | BadInput |
    | budget that one round of all weights exceeds | BadInput |
    """
    _check_sampler(sampler, population, rounds)
    if shuffled < 0:
        raise BadInput(f"shuffle.minimum is {shuffled}: at least 1 report is needed")
    if shuffled > sampler.expected(population):
        raise BadInput(
            f"shuffle.minimum is {shuffled} and a round has "
            f"{sampler.expected(population):g} clients: lower it or ask more clients"
        )
    mechanism = TwoPointMechanism(epsilon)
    alone = replace(
        _terms(sampler, population, budget),
        event=mechanism.release,
        per=sum(ranges.sizes),
    )
    lines = [alone]
    if shuffled:
        behind = replace(
            alone,
            event=Shuffled(TwoPoint(epsilon), shuffled),
            trust=Trust.SHUFFLED,
            assumptions=(
                "an ideal shuffler: per position the server sees a multiset of reports and nothing "
                "about their senders; random delays alone are no such thing",
                f"at least {shuffled} honest reports per position in every round",
                *alone.assumptions,
            ),
        )
        unlimited = Budget(math.inf, budget.delta)
        lines = [behind, replace(alone, reading=True, budget=unlimited)]
    weight = replace(
        alone,
        unit=Unit.WEIGHT,
        per=1,
        cap=1,
        budget=Budget(math.inf, budget.delta),
        as_published=True,
        reading=True,
        covers="one weight in one round",
    )
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        where=Where.CLIENT,
        ranges=ranges,
        mechanism=mechanism,
        lines=(*lines, weight),
        least_reports=shuffled,
        parameters=sum(ranges.sizes),
    )
    if plan.permitted < 1:
        raise BadInput(
            f"budget.epsilon is {budget.epsilon:g} and one round of {alone.per:,} weights costs "
            f"{lines[0].claims(1)[0].short}: raise it, or leave it out to be told"
        )
    return plan


def _terms(sampler: Sampler, population: int, budget: Budget) -> Terms:
    """The line of a client's own reports, its event still to be filled in."""
    return Terms(
        event=Gaussian(1.0),
        share=sampler.share(population),
        cap=sampler.max_participations if isinstance(sampler, FixedSize) else None,
        budget=budget,
        unit=Unit.CLIENT,
        relation=Relation.REPLACE,
        trust=Trust.LOCAL,
        noise=NoiseSource.SEEDED,
        assumptions=(
            "the server is not trusted; each client randomises its own report honestly",
            _TURNS,
            SEEDED,
        ),
    )


def _event(rule: Rule, curator: Curator | None, laplace: bool, m: float) -> Event:
    if laplace:
        return Laplace(m)
    if isinstance(rule, Quantile) and rule.flip:
        return GaussianWithBit(Gaussian(m), TwoPoint(rule.flip))
    return Gaussian(m) if curator is None else curator.beside(Gaussian(m))


def _calibrated(
    base: Terms,
    rule: Rule,
    curator: Curator | None,
    laplace: bool,
    count: int,
    published: Published | None,
) -> float:
    """The least noise multiplier for `count` participations, by the strict or published rule."""
    budget = base.budget
    if published is not None and published.c2 is not None:
        spread = math.sqrt(count * math.log(1 / budget.delta))
        return a_little_more(published.c2 * spread / budget.epsilon)
    if isinstance(rule, Quantile) and rule.flip and count * rule.flip >= budget.epsilon:
        raise BadInput(
            f"bound.bit_epsilon {rule.flip:g} over {count} participations uses up the budget of "
            f"epsilon {budget.epsilon:g}: lower it"
        )
    if published is not None:
        curator = None
    if curator is not None:
        curator.check(base, count)
    relation = Relation.REPLACE
    return least_noise(lambda m: _event(rule, curator, laplace, m), count, budget, relation)


def _readings(
    base: Terms,
    rule: Rule,
    curator: Curator | None,
    laplace: bool,
    m: float,
    published: Published | None,
) -> list[Terms]:
    """The line that is charged and, as published, what the same reports are worth strictly."""
    seen = base if curator is None else curator.on(base)
    if published is None:
        return [replace(seen, event=_event(rule, curator, laplace, m))]
    plain = _event(rule, None, laplace, m)
    strict = replace(
        seen,
        event=_event(rule, curator, laplace, m / 2),
        budget=Budget(math.inf, base.budget.delta),
        reading=True,
    )
    label = replace(
        base,
        event=plain if published.c2 is None else FuGaussian(m, published.c2),
        unit=published.unit,
        relation=Relation.ADD_REMOVE,
        as_published=True,
        assumptions=("the paper's sensitivity, half of what two inputs can differ by", SEEDED),
    )
    return [label, strict]


def _check_multiplier(multiplier: float | None) -> None:
    if multiplier is not None:
        check("noise.multiplier", multiplier)
    if multiplier == 0:
        raise BadInput("noise.multiplier is 0: a positive number is needed")


def _check_sampler(sampler: Sampler, population: int, rounds: int) -> None:
    check("clients", population)
    check("rounds", rounds)
    sampler.check(population)
    if not isinstance(sampler, FixedSize) or sampler.max_participations is None:
        return
    cap = sampler.max_participations
    if sampler.size * rounds > population * cap:
        last = population * cap // sampler.size
        raise BadInput(
            f"sample.max_participations is {cap}: after round {last} of {rounds} every one of "
            f"{population} clients would be at its cap; raise it or run fewer rounds"
        )


def _check_norm(rule: Rule, laplace: bool, published: Published | None) -> None:
    wanted = "l1" if laplace else "l2"
    if laplace and not (isinstance(rule, PerGradient) or rule.width == 0):
        raise BadInput("an adaptive bound is in L2: use Gaussian noise with it")
    if published is not None and isinstance(rule, Quantile) and rule.flip:
        raise BadInput("bound.bit_epsilon has no published account: leave out as_published")
    if laplace and published is not None and published.c2 is not None:
        raise BadInput("noise.c2 is for Fu's Gaussian formula: leave it out with Laplace noise")
    if isinstance(rule, PerGradient) and not laplace and published and published.c2 is None:
        raise BadInput("noise.c2 is missing: Fu's Gaussian formula leaves it open; 1.0 is common")
    if rule.norm != wanted and not (published is not None and published.c2 is not None):
        raise BadInput(
            f"bound.norm is {rule.norm} and the noise needs {wanted}: set bound.norm = '{wanted}'"
        )
