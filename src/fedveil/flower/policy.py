"""The owner's policy of a site, what a plan costs the site, and whether the policy allows it.

A plan covers all clients of a run, but a site knows only its own turns (`Terms`). The proof note is
docs/proofs/site.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date, timedelta
from decimal import ROUND_CEILING, Context
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from fedveil.base.checks import BUDGET, DELTA, MULTIPLIER, REPORT_EPSILON, STEPS, number
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import NoiseSource, PrivacyClaim, Trust, Unit, rendered
from fedveil.privacy.accounting.composition import covers, noise_in
from fedveil.privacy.accounting.events import PureReport, Shuffled, TwoPoint
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.site_metrics import SiteMetrics
from fedveil.runs.build import build
from fedveil.runs.recipe import Recipe, toml_value
from fedveil.runs.sections.section import Section, setting
from fedveil.training.engines.engine import Engine, Job
from fedveil.training.session import Training
from fedveil.training.work import ClientDpSgd, ClientSgd, ClientWork

_DAYS = number(lambda v: 1 <= v <= 1_000_000, "1 to 1,000,000 is needed", whole=True)
_REPEATS = number(lambda v: 0 <= v <= 1_000_000, "0 to 1,000,000 is needed", whole=True)


@dataclass(frozen=True)
class Terms:
    """The budget lines and the number of turns of one site in a run.

    Attributes:
        lines: The plan's budget lines that apply to this site.
        planned_turns: The turns of this site in the plan.
        permitted_turns: The most turns that a run may charge this site for: the planned ones and
            the owner's `repeats`, as far as the run's budget goes.
        at_once: Whether all turns are charged when the site is first asked. Amplification by a
            secret cohort also counts the rounds to which the server does not invite the site.
        measurements: The terms of measurements at this site, each of which is a turn. None: the
            site measures nothing.
    """

    lines: tuple[BudgetLine, ...]
    planned_turns: int
    permitted_turns: int
    at_once: bool
    measurements: "Terms | None" = None

    @property
    def charged_lines(self) -> tuple[BudgetLine, ...]:
        """Return the lines that are charged for turns: all but other readings of a release."""
        return tuple(line for line in self.lines if not line.reading)

    @property
    def every_charged_line(self) -> tuple[BudgetLine, ...]:
        """Return the lines that are charged for turns, and for measurements."""
        return (*self.charged_lines, *(self.measurements.lines if self.measurements else ()))

    @cached_property
    def turn_costs(self) -> tuple[PrivacyClaim, ...]:
        """Return what all permitted turns cost this site: one claim for each charged line."""
        return tuple(line.claims(self.permitted_turns)[0] for line in self.charged_lines)

    @cached_property
    def costs(self) -> tuple[PrivacyClaim, ...]:
        """Return what a run costs this site in all: its turns, and its measurements."""
        return (*self.turn_costs, *(self.measurements.turn_costs if self.measurements else ()))

    @cached_property
    def alone(self) -> tuple[PrivacyClaim, ...]:
        """Return what all permitted turns cost against a server with all other sites.

        Empty unless a secure sum makes `costs` smaller: a site's own noise is all that counts then.
        """
        if all(line.trust is not Trust.SECURE_SUM for line in self.charged_lines):
            return ()
        lines = [line for line in self.lines if line.trust is Trust.SITE]
        return tuple(line.claims(self.permitted_turns)[0] for line in lines)


def terms_of(plan: PrivacyPlan, number: int | None, repeats: int) -> Terms:
    """Return the terms of one site of a plan: its budget lines and its turns.

    `number` is the client that the site is, from 0. Only clients' own budgets need it. The owner
    permits `repeats` turns beyond the plan's, as far as the run's budget goes.

    Guarantee: docs/proofs/site.md. Charges for the turns that the site has, on the lines of these
    terms, are never fewer than the releases that depend on its records.

    | edge | behaviour |
    |---|---|
    | nothing is claimed | no lines |
    | a formula as published, which guarantees nothing | BadInput |
    | what a clip watches goes to a curator | BadInput: in a federation that is the server |
    | what a clip watches goes through a secure sum, and reports do not | BadInput |
    | a secure sum | its line is charged; that about all others together is shown beside it |
    | clients have budgets of their own, and `number` is None | BadInput |
    | something is claimed, and no line is about this client | BadInput: nothing would be charged |
    | a cohort drawn in secret by a trusted server | every round is charged, asked or not |
    | any other cohort | the site's own turns are charged, without amplification |
    | the site measures | each measurement is charged by itself, as often as the plan has them |
    """
    if any(line.as_published and not line.reading for line in plan.lines):
        raise BadInput(
            "budget.as_published guarantees nothing, and a site takes no part in that: omit it"
        )
    if any(line.trust is Trust.CURATOR for line in plan.lines):
        raise BadInput(
            "the recipe's clip needs a curator who sees bits or norms and is not the server, and a "
            "federation has none: use clip.bit_epsilon, or a clip that does not look at clients"
        )
    release = plan.release
    if release.statistic_channel.divisor and release.statistic_channel is not release.channel:
        raise BadInput(
            "the recipe's clip sends bits or norms through a secure sum beside reports that are "
            "not masked, which is for simulations: use clip.bit_epsilon and leave [sum] out"
        )
    lines = tuple(line for line in plan.lines if _applies_to(line, plan, number))
    charged = [line for line in lines if not line.reading]
    if plan.private and not charged:
        raise BadInput("no line of the plan is about this site, which would be charged for nothing")
    most = min((line.participations(plan.permitted) for line in charged), default=plan.rounds)
    own = tuple(
        line if line.as_published else replace(line, share=Fraction(1), cap=None, members=None)
        for line in lines
    )
    within = (line.permitted_rounds(most + repeats) for line in own if not line.reading)
    permitted, measurements = min(within, default=most + repeats), None
    if isinstance(plan.metrics, SiteMetrics):
        line, count = plan.metrics.line, len(plan.metrics.rounds)
        measurements = Terms((replace(line, rounds=()),), count, count, at_once=False)
    return Terms(own, most, permitted, plan.secret_cohort, measurements)


def _applies_to(line: BudgetLine, plan: PrivacyPlan, number: int | None) -> bool:
    """Return whether a line applies to client `number`. Some lines are about a group of clients.

    Raises BadInput if clients have budgets of their own and `number` is None.
    """
    each = getattr(plan.release, "multipliers", None)
    if line.members is None or each is None:
        return True
    if number is None:
        raise BadInput(
            "clients have budgets of their own (budget.epsilons): say which client this site is "
            "(number)"
        )
    own, claimed = float(each[number]), noise_in(line.event)
    return covers(own, claimed) and covers(claimed, own)


_ROUNDING = 1e-9


@dataclass(frozen=True)
class RunCost:
    """The claims that a run may cost the site in all turns, and the day of its last turn."""

    costs: tuple[PrivacyClaim, ...]
    last_day: date


@dataclass(frozen=True)
class Objection:
    """A reason for which the site does not take part in a run.

    Attributes:
        reason: The part that a server may learn.
        details: The part for the owner only: what other runs cost, and numbers that depend on how
            many records the site has.
    """

    reason: str
    details: str = ""

    def __str__(self) -> str:
        """Return both parts, for the owner."""
        return f"{self.reason}: {self.details}" if self.details else self.reason


def local_steps(work: ClientWork, records: int) -> int:
    """Return the number of local steps of one round for a client with `records` records."""
    match work:
        case ClientDpSgd():
            return work.noisy.steps
        case ClientSgd():
            steps_per_epoch = math.ceil(records / work.records_per_step(records))
            return work.batches.steps or (work.batches.epochs or 1) * steps_per_epoch
    return 1


class EpsilonSection(Section):
    """`epsilon` of a policy: what all runs of a period may cost together, by what they protect."""

    client: float | None = setting(BUDGET, None)
    """The most that all runs may cost the whole site. Default: no run is taken that protects
    clients."""
    person: float | None = setting(BUDGET, None)
    """The most that all runs may cost one person. Default: no run is taken that protects
    people."""
    record: float | None = setting(BUDGET, None)
    """The most that all runs may cost one record. Default: no run is taken that protects
    records."""


class Policy(Section):
    """`policy.toml`: the owner's limits, whatever servers ask.

    Guarantee: whatever servers ask, the total cost of the runs that had a turn within any period of
    `days`, each counted at what it may cost in all, is at most `epsilon` of each unit and `delta`.
    None of them trusts anybody whom the owner does not trust.

    | edge | behaviour |
    |---|---|
    | a unit for which no epsilon is given | refused |
    | a recipe that claims nothing | refused unless `unprotected` |
    | noise from a seed, wherever it is added | refused unless `seeded` |
    | `noise` is given and the noise has no multiplier | refused unless `report_epsilon` is |
    | a run that costs the site and protects clients | counts for a person and a record as well |
    | a run that protects persons | counts for a record as well |
    | a run that protects records | counts for records alone, whoever has several of them |
    | a run with several claims | they are added up, as those of different runs are |
    | the clock goes back | more runs count, never fewer |
    """

    epsilon: EpsilonSection = EpsilonSection()
    """What all runs may cost together."""
    delta: float = setting(DELTA, 1e-4)
    """The most that the deltas of all runs may add up to."""
    days: int | None = setting(_DAYS, None)
    """The period that epsilon and delta are for: runs that were last charged longer ago do not
    count. Default: all runs count for ever."""
    trust: list[Literal["local", "shuffled", "secure-sum", "central"]] = ["local"]
    """Whom the owner is ready to trust: 'local' nobody else; 'shuffled' a mixer; 'secure-sum' so
    many of the other sites as the recipe takes to be honest; 'central' the server, which then sees
    updates without noise."""
    recipes: list[str] | None = None
    """Which recipes may be taken part in, by name or by digest (fedveil site check tells it).
    Default: whichever `recipe` is."""
    noise: float | None = setting(MULTIPLIER, None)
    """The least noise multiplier; Gaussian and Laplace noise have one. Default: epsilon alone
    decides."""
    report_epsilon: float | None = setting(REPORT_EPSILON, None)
    """The largest epsilon of one report, for noise without a multiplier (two-point, priv-unit).
    Default: no such noise where `noise` is given; else epsilon alone decides."""
    steps: int | None = setting(STEPS, None)
    """The most local steps in one round. Default: no limit."""
    seeded: bool = False
    """Whether noise may come from a seeded stream. Where this site adds it, the seed is then the
    operating system's and never leaves; where the server does, it knows the seed."""
    unprotected: bool = False
    """Whether recipes that claim nothing may be taken part in: what is sent then has no
    protection."""
    repeats: int = setting(_REPEATS, 0)
    """How many more turns than planned a run may have, for rounds that the server has to do again;
    each is charged, and is within the run's budget."""

    def objections(
        self, recipe: str, digest: str, plan: PrivacyPlan, terms: Terms, steps: int
    ) -> Iterator[Objection]:
        """Yield the reasons why the policy forbids a recipe, whatever was spent.

        Nothing if it does not.

        Args:
            recipe: The name in the recipe.
            digest: The digest that identifies the plan on both sides (`plan_digest`).
            plan: The plan for all sites.
            terms: The budget lines and turns of this site.
            steps: Local steps in one round, on this site's records.
        """
        if self.recipes is not None and not {recipe, digest} & set(self.recipes):
            yield Objection(f"the recipe {recipe!r} is not one of policy.recipes")
        yield from self.objections_to_plan(plan, terms)
        if self.steps is not None and steps > self.steps:
            yield Objection(
                "a round takes more local steps than policy.steps allows",
                f"it takes {steps} on this site's records, and policy.steps is {self.steps}",
            )

    def objections_to_plan(self, plan: PrivacyPlan, terms: Terms) -> Iterator[Objection]:
        """Yield the reasons why the policy forbids a plan on these terms, whatever the recipe.

        Costs are not looked at (`objection_to_cost`).
        """
        if not plan.private and not self.unprotected:
            yield Objection("the recipe claims nothing, and policy.unprotected is false")
        for line in terms.every_charged_line:
            if _relied_on(line.trust) not in self.trust:
                yield Objection(
                    f"the claim needs {line.trust} trust, which policy.trust does not have"
                )
            if line.noise is NoiseSource.SEEDED and not self.seeded:
                yield Objection("the noise is seeded, and policy.seeded is false")
            yield from self._objections_to_noise(line)

    def _objections_to_noise(self, line: BudgetLine) -> Iterator[Objection]:
        """Yield an objection if a line's noise is too small, or is of a kind that has no limit.

        Nothing if neither `noise` nor `report_epsilon` limits it.
        """
        noise = noise_in(line.event)
        report: float | None = None  # the epsilon of one report, where noise has no multiplier
        match line.event:
            case TwoPoint(epsilon) | PureReport(epsilon) | Shuffled(TwoPoint(epsilon), _):
                report = epsilon
        if report is None:
            if self.noise is not None and noise < self.noise * (1 - _ROUNDING):
                yield Objection(
                    "the noise multiplier is below policy.noise",
                    f"it is {noise:.4g}, and policy.noise is {self.noise:g}",
                )
        elif self.report_epsilon is not None:
            if report > self.report_epsilon * (1 + _ROUNDING):
                yield Objection("a report alone costs more than policy.report_epsilon allows")
        elif self.noise is not None:
            yield Objection("the noise has no multiplier, and policy.noise asks for one")

    def objection_to_cost(
        self, terms: Terms, others: list[RunCost], today: date
    ) -> Objection | None:
        """Return the first reason why a run would exceed the period's epsilon or delta, or None.

        Args:
            terms: The budget lines and turns of the run.
            others: All other runs that the site was charged for.
            today: The last day of the period.
        """
        period = "" if self.days is None else f" in {self.days} days"
        before = [claim for run in self.runs_in_period(others, today) for claim in run.costs]
        for claim in terms.costs:
            unit = claim.unit
            if not claim.vouched:
                return Objection("the run's claim is not vouched for", claim.short)
            if getattr(self.epsilon, unit, None) is None:
                return Objection(f"the claim is per {unit}, and policy.epsilon.{unit} is not given")
        for unit in UNITS:
            most = getattr(self.epsilon, unit)
            own = [claim for claim in terms.costs if counts_for(claim, unit)]
            if most is None or not own:
                continue
            spent = math.fsum(c.epsilon for c in before if counts_for(c, unit))
            if spent + math.fsum(c.epsilon for c in own) > most * (1 + _ROUNDING):
                return Objection(
                    f"the run may cost more than policy.epsilon.{unit} leaves",
                    f"it may cost {' and '.join(c.short for c in own)}; the limit is "
                    f"{most:g}{period}, of which other runs may cost {rendered(spent)}",
                )
        spent = math.fsum(claim.delta for claim in before)
        if spent + math.fsum(c.delta for c in terms.costs) > self.delta * (1 + _ROUNDING):
            return Objection(
                "the run's delta is more than policy.delta leaves",
                f"it is {self.delta:g}{period}, of which other runs have {spent:g}",
            )
        return None

    def runs_in_period(self, runs: list[RunCost], today: date) -> list[RunCost]:
        """Return the runs whose last turn is within the `days` that end today.

        All if `days` is None.
        """
        if self.days is None:
            return runs
        return [run for run in runs if run.last_day > today - timedelta(days=self.days)]


UNITS = tuple(Unit(name) for name in EpsilonSection.model_fields)
"""The units that a policy limits, each of which consists of units after it: what protects a whole
client protects each of its records."""


def counts_for(claim: PrivacyClaim, unit: Unit) -> bool:
    """Return whether a claim costs this unit: it is about it, or about what it is a part of."""
    return claim.unit in UNITS[: UNITS.index(unit) + 1]


def _relied_on(trust: Trust) -> str:
    """Return the word of `Policy.trust` for a line's trust.

    Where people trust the institution that has their records, the institution itself trusts nobody.
    """
    return str(Trust.LOCAL if trust is Trust.SITE else trust)


def accepted(policy: Policy, terms: Terms, plan: PrivacyPlan) -> Policy:
    """Return the policy with which an owner accepts a run: the old one, and what the run costs.

    The run's cost is added to the limits that there are, whatever was spent of them, so that what
    was accepted before is still possible. Whom the plan trusts, and seeded or no noise, are
    allowed. Everything else that the owner has ruled (recipes, least noise, steps) stays.
    """
    limits: dict[str, float] = {}
    for unit in UNITS:
        before = getattr(policy.epsilon, unit)
        own = [claim.epsilon for claim in terms.costs if claim.unit is unit]
        if before is not None:  # a limit for records counts what is claimed for clients
            own = [claim.epsilon for claim in terms.costs if counts_for(claim, unit)]
        if own:
            limits[unit] = (before or 0.0) + _rounded_up(math.fsum(own))
    deltas = _rounded_up(math.fsum(claim.delta for claim in terms.costs))
    limited = any(getattr(policy.epsilon, unit) is not None for unit in UNITS)
    given = limited or "delta" in policy.model_fields_set
    trust = {_relied_on(line.trust) for line in terms.every_charged_line}
    seeded = any(line.noise is NoiseSource.SEEDED for line in terms.every_charged_line)
    changes: dict[str, Any] = {
        "epsilon": policy.epsilon.model_copy(update=limits),
        "trust": [*policy.trust, *sorted(trust - {*policy.trust})],
        "seeded": policy.seeded or seeded,
        "unprotected": policy.unprotected or not plan.private,
    }
    if terms.costs:
        changes["delta"] = (policy.delta if given else 0.0) + deltas
    return policy.model_copy(update=changes)


def policy_text(policy: Policy) -> str:
    """Return the content of a policy.toml with this policy: keys that are not the default's."""
    keys = policy.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    keys |= {f"epsilon.{unit}": value for unit, value in keys.pop("epsilon", {}).items()}
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in keys.items())


def _rounded_up(number: float) -> float:
    """Return a number rounded up to four significant digits."""
    if not math.isfinite(number):
        return number
    return float(Context(4, ROUND_CEILING).create_decimal(repr(number)))


def build_for_plan(recipe: Recipe, data: FederatedData, *, allow_code: bool = False) -> Training:
    """Build a training for its plan and its checks only. Training with it is an AssertionError.

    Raises BadInput for a recipe that is refused.

    Args:
        recipe: The recipe.
        data: The sites as clients, whose records are elsewhere.
        allow_code: Whether the code that the recipe names may be run.
    """

    def no_engine(job: Job) -> Engine:
        """Raise AssertionError, since the training has no records."""
        raise AssertionError("a training that is made for its plan alone was started")

    return build(recipe, data=data, allow_code=allow_code, make_engine=no_engine)
