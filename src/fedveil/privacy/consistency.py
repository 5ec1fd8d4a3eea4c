"""Whether what a plan's lines account for is what its parts do.

The builders (`central`, `local_updates`, `local_steps`, `two_point`) make lines and parts from the
same numbers. A plan that was put together or changed by hand may say one thing and do another.
"""

import math

from fedveil.errors import BadInput
from fedveil.privacy.accounting import noise_of
from fedveil.privacy.central import joint_multiplier
from fedveil.privacy.claims import Relation, Unit
from fedveil.privacy.events import (
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    PoissonSampled,
    Shuffled,
    TwoPoint,
)
from fedveil.privacy.mechanisms import GaussianMechanism, LaplaceMechanism, TwoPointMechanism
from fedveil.privacy.plan import PrivacyPlan, Where
from fedveil.privacy.rows import Norm
from fedveil.privacy.rules import Median, Quantile, Rule
from fedveil.privacy.sampling import FixedSize, Poisson
from fedveil.privacy.terms import Terms

_ROUNDING = 1e-9


def check_lines(plan: PrivacyPlan) -> None:
    """Refuse a plan of which a strict line accounts for less than its parts release.

    | line about | refused unless |
    |---|---|
    | a sum at the server | the event is the sampler's, with at most the noise that is added |
    | clients' own noise | kind and size of the noise, share and cap are those of the parts |
    | DP-SGD | rate, steps and noise are those of the steps |
    | two-point reports | epsilon, weights and shuffled reports are those of the parts |
    | anything, without a mechanism | never |
    """
    for line in plan.lines:
        if line.as_published:
            continue
        found = _difference(plan, line)
        if found is not None:
            raise BadInput(
                f"the plan's line about {line.covers} accounts for {line.event} and {found}: make "
                "plans with central, local_updates, local_steps or two_point, and do not change "
                "them"
            )


def _difference(plan: PrivacyPlan, line: Terms) -> str | None:
    """What the plan does otherwise than the line says, in words."""
    if plan.mechanism is None:
        return "no noise is added"
    if line.share < plan.sampler.share(plan.population):
        return f"clients take part in {plan.sampler.share(plan.population)} of the rounds"
    cap = getattr(plan.sampler, "max_participations", None)
    if line.unit is not Unit.WEIGHT and line.cap is not None and line.cap != cap:
        return f"the cap on participations is {cap}"
    if line.every != 1:
        return "there is a release in every round"
    match plan.mechanism:
        case TwoPointMechanism():
            return _two_point(plan, line, plan.mechanism)
        case GaussianMechanism() | LaplaceMechanism():
            return _additive(plan, line)


def _additive(plan: PrivacyPlan, line: Terms) -> str | None:
    own, theirs = (2 if r is Relation.REPLACE else 1 for r in (plan.relation, line.relation))
    added = _added(plan, line) * own / theirs
    claimed = _claimed(line)
    if not claimed <= added * (1 + _ROUNDING):
        return f"noise of {added:g} sensitivities is added"
    norm = None if plan.rule is None else plan.rule.norm
    if isinstance(plan.mechanism, LaplaceMechanism) and norm is not Norm.L1:
        return f"rows are clipped in {norm}"
    if plan.where is Where.SERVER:
        return _at_server(plan, line, claimed)
    if plan.steps is not None:
        event = PoissonSampled(plan.steps.rate, Gaussian(claimed))
        right = (event, Gaussian(claimed)) if plan.steps.rate == 1 else (event,)
        if line.event not in right or line.per != plan.steps.steps:
            return f"clients take {plan.steps}"
        return None
    match line.event:
        case Laplace():
            kind: type = LaplaceMechanism
        case Gaussian():
            kind = GaussianMechanism
        case GaussianWithCurator(_, curator, _):
            kind = GaussianMechanism
            if not curator.multiplier <= _watching(plan.rule) * (1 + _ROUNDING):
                return f"a curator publishes what {plan.rule} watches"
        case GaussianWithBit(_, bit):
            kind = GaussianMechanism
            if not isinstance(plan.rule, Quantile) or plan.rule.flip > bit.epsilon:
                return f"bits are flipped by {plan.rule}"
        case _:
            return "clients add noise"
    if not isinstance(plan.mechanism, kind):
        return f"the noise is that of {plan.mechanism}"
    watched = isinstance(line.event, GaussianWithCurator | GaussianWithBit)
    if plan.rule is not None and plan.rule.width and not watched:
        return "an adaptive bound watches clients beside it"
    return None


def _at_server(plan: PrivacyPlan, line: Terms, claimed: float) -> str | None:
    if not isinstance(plan.mechanism, GaussianMechanism):
        return f"the noise is that of {plan.mechanism}"
    if plan.rule is not None and plan.rule.width and type(plan.rule) is not Quantile:
        return "an adaptive bound watches clients beside it"
    event = plan.sampler.event(Gaussian(claimed), plan.population)
    if line.event != event:
        return f"the sampler makes it {event}"
    if line.event != Gaussian(claimed) and type(plan.sampler) not in (Poisson, FixedSize):
        return f"cohorts are drawn by {type(plan.sampler).__name__}, whose law nobody knows"
    return None


def _added(plan: PrivacyPlan, line: Terms) -> float:
    """The noise multiplier under the plan's own relation, that of the line's own clients.

    Where clients have budgets of their own, nobody has less noise than some line claims for as
    many clients.
    """
    if plan.where is Where.SERVER:
        return joint_multiplier(plan.multiplier, plan.rule, plan.relation)
    if plan.steps is not None:
        return min(plan.multiplier, plan.steps.multiplier)
    if plan.multipliers is None:
        return plan.multiplier
    least = _claimed(line) * (1 - _ROUNDING)
    weaker = int((plan.multipliers < least).sum())
    strict = [one for one in plan.lines if not one.as_published]
    others = sum(one.members or 0 for one in strict if _claimed(one) < least)
    return _claimed(line) if weaker <= others else float(plan.multipliers.min())


def _claimed(line: Terms) -> float:
    """The noise multiplier of the updates that the line's event speaks of."""
    event = line.event
    return noise_of(event.gaussian if isinstance(event, GaussianWithCurator) else event)


def _watching(rule: Rule | None) -> float:
    """The noise multiplier of what a curator publishes, under replacement."""
    match rule:
        case Quantile():
            return rule.noise
        case Median():
            return rule.noise / math.sqrt(2)
    return 0.0


def _two_point(plan: PrivacyPlan, line: Terms, mechanism: TwoPointMechanism) -> str | None:
    weights = 0 if plan.ranges is None else sum(plan.ranges.sizes)
    match line.event:
        case TwoPoint(epsilon):
            pass
        case Shuffled(TwoPoint(epsilon), reports):
            if reports > plan.least_reports:
                return f"a round is handed on with {plan.least_reports} reports"
        case _:
            return f"reports are those of {mechanism}"
    if epsilon < mechanism.epsilon or (line.unit is Unit.CLIENT and line.per < weights):
        return f"{weights} weights are reported by {mechanism}"
    return None
