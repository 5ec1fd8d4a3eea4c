"""What a plan costs one site, the owner's policy, and whether the plan is within it.

A plan is about all clients of a run, but a site knows only its own turns (`Terms`). The proof note
is docs/proofs/site.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date, timedelta
from decimal import ROUND_CEILING, Context
from fractions import Fraction
from functools import cached_property

from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.flower.federation_files import PolicySection
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import NoiseSource, PrivacyClaim, Trust, Unit, rendered
from fedveil.privacy.accounting.composition import covers, noise_in
from fedveil.privacy.accounting.events import PureReport, Shuffled, TwoPoint
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.build import build
from fedveil.runs.recipe import Recipe
from fedveil.training.engines.engine import Engine, Job
from fedveil.training.session import Training
from fedveil.training.work import ClientDpSgd, ClientSgd, ClientWork


@dataclass(frozen=True)
class Terms:
    """The budget lines of one site, and the number of its turns.

    Attributes:
        lines: The plan's lines that concern this site.
        planned_turns: The turns that the plan has for this site.
        permitted_turns: The turns that a run may charge it for: those and the owner's `repeats`,
            as far as the run's budget goes.
        at_once: Whether all turns are charged when the site is first asked. Amplification by a
            secret cohort also counts the rounds to which the server does not invite the site.
    """

    lines: tuple[BudgetLine, ...]
    planned_turns: int
    permitted_turns: int
    at_once: bool

    @property
    def charged_lines(self) -> tuple[BudgetLine, ...]:
        """The lines that are charged."""
        return tuple(line for line in self.lines if not line.reading)

    @cached_property
    def costs(self) -> tuple[PrivacyClaim, ...]:
        """What all permitted turns cost this site: one claim for each charged line."""
        return tuple(line.claims(self.permitted_turns)[0] for line in self.charged_lines)

    def needed_charges(self, turns: int, last_round: int, extra_attempts: int) -> int:
        """How many charges there must be before an answer.

        Args:
            turns: How many asks were answered, with this one.
            last_round: The last round that the site was asked for.
            extra_attempts: The attempts beyond each round's first that the site knows of.
        """
        if self.at_once:
            return max(self.permitted_turns, last_round + extra_attempts)
        return turns


def terms_of(plan: PrivacyPlan, number: int | None, repeats: int) -> Terms:
    """The terms on which client `number` of a plan takes part, with `repeats` turns to spare.

    Guarantee: docs/proofs/site.md. Charges for the turns that the site has, on the lines of these
    terms, are never fewer than the releases that depend on its records.

    | edge | behaviour |
    |---|---|
    | nothing is claimed | no lines |
    | a formula as published, which guarantees nothing | BadInput |
    | what a clip watches goes to a curator | BadInput: in a federation that is the server |
    | clients have budgets of their own, and `number` is None | BadInput |
    | something is claimed, and no line is about this client | BadInput: nothing would be charged |
    | a cohort drawn in secret by a trusted server | every round is charged, asked or not |
    | any other cohort | the site's own turns are charged, without amplification |
    """
    if any(line.as_published and not line.reading for line in plan.lines):
        raise BadInput(
            "budget.as_published guarantees nothing, and a site takes no part in that: leave it out"
        )
    if any(line.trust is Trust.CURATOR for line in plan.lines):
        raise BadInput(
            "the recipe's clip needs a curator who sees bits or norms and is not the server, and a "
            "federation has none: use clip.bit_epsilon, or a clip that does not look at clients"
        )
    lines = tuple(line for line in plan.lines if _concerns(line, plan, number))
    charged = [line for line in lines if not line.reading]
    if plan.private and not charged:
        raise BadInput("no line of the plan is about this site, which would be charged for nothing")
    most = min((line.participations(plan.permitted) for line in charged), default=plan.rounds)
    own = tuple(
        line if line.as_published else replace(line, share=Fraction(1), cap=None, members=None)
        for line in lines
    )
    within = (line.permitted_rounds(most + repeats) for line in own if not line.reading)
    return Terms(own, most, min(within, default=most + repeats), at_once=plan.secret_cohort)


def _concerns(line: BudgetLine, plan: PrivacyPlan, number: int | None) -> bool:
    """Whether a line is about this client: some are about a group of them."""
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
    """What a run may cost the site in all, and the day of its last turn."""

    costs: tuple[PrivacyClaim, ...]
    last_day: date


@dataclass(frozen=True)
class Objection:
    """Why the site does not take part in a run.

    Attributes:
        reason: What a server may learn.
        details: What only the owner may learn: what other runs cost, and numbers that depend on
            how many records the site has.
    """

    reason: str
    details: str = ""

    def __str__(self) -> str:
        """Both parts, for the owner."""
        return f"{self.reason}: {self.details}" if self.details else self.reason


@dataclass(frozen=True)
class Offer:
    """A recipe as a site sees it.

    Attributes:
        recipe_name: The name in the recipe.
        digest: What identifies the plan on both sides (`plan_digest`).
        plan: The plan for all sites.
        terms: What it means for this site.
        local_steps: Local steps in one round, on this site's records.
    """

    recipe_name: str
    digest: str
    plan: PrivacyPlan
    terms: Terms
    local_steps: int


def local_steps(work: ClientWork, records: int) -> int:
    """The local steps that a client with so many records takes in one round."""
    match work:
        case ClientDpSgd():
            return work.noisy.steps
        case ClientSgd():
            steps_per_epoch = math.ceil(records / work.records_per_step(records))
            return work.batches.steps or (work.batches.epochs or 1) * steps_per_epoch
    return 1


@dataclass(frozen=True)
class Policy:
    """The owner's limits.

    Guarantee: whatever servers ask, the total cost of the runs that had a turn within any period of
    `days`, each counted at what it may cost in all, is at most `epsilon` of each unit and `delta`.
    None of them trusts anybody whom the owner does not trust.

    | edge | behaviour |
    |---|---|
    | a unit for which no epsilon is given | refused |
    | a recipe that claims nothing | refused unless `unprotected` |
    | noise from a seed, wherever it is added | refused unless `seeded` |
    | `noise` is given and the noise has no multiplier | refused unless `report_epsilon` is |
    | a run that costs the site and protects clients | counts for a record as well |
    | a run with several claims | they are added up, as those of different runs are |
    | the clock goes back | more runs count, never fewer |
    """

    limits: PolicySection

    def objections(self, offer: Offer) -> Iterator[Objection]:
        """Why the site takes no part in a recipe, whatever was spent. Empty if it does."""
        policy = self.limits
        names = {offer.recipe_name, offer.digest}
        if policy.recipes is not None and not names & set(policy.recipes):
            yield Objection(f"the recipe {offer.recipe_name!r} is not one of policy.recipes")
        yield from self.objections_to_plan(offer.plan, offer.terms)
        if policy.steps is not None and offer.local_steps > policy.steps:
            yield Objection(
                "a round takes more local steps than policy.steps allows",
                f"it takes {offer.local_steps} on this site's records, and policy.steps is "
                f"{policy.steps}",
            )

    def objections_to_plan(self, plan: PrivacyPlan, terms: Terms) -> Iterator[Objection]:
        """Why nobody takes part in a plan on these terms, whatever recipe it comes from."""
        policy = self.limits
        if not plan.private and not policy.unprotected:
            yield Objection("the recipe claims nothing, and policy.unprotected is false")
        for line in terms.charged_lines:
            if str(line.trust) not in policy.trust:
                yield Objection(
                    f"the claim needs {line.trust} trust, which policy.trust does not have"
                )
            if line.noise is NoiseSource.SEEDED and not policy.seeded:
                yield Objection("the noise is seeded, and policy.seeded is false")
            yield from self._objections_to_noise(line)

    def _objections_to_noise(self, line: BudgetLine) -> Iterator[Objection]:
        policy, noise = self.limits, noise_in(line.event)
        report: float | None = None  # the epsilon of one report, where noise has no multiplier
        match line.event:
            case TwoPoint(epsilon) | PureReport(epsilon) | Shuffled(TwoPoint(epsilon), _):
                report = epsilon
        if report is None:
            if policy.noise is not None and noise < policy.noise * (1 - _ROUNDING):
                yield Objection(
                    "the noise multiplier is below policy.noise",
                    f"it is {noise:.4g}, and policy.noise is {policy.noise:g}",
                )
        elif policy.report_epsilon is not None:
            if report > policy.report_epsilon * (1 + _ROUNDING):
                yield Objection("a report alone costs more than policy.report_epsilon allows")
        elif policy.noise is not None:
            yield Objection("the noise has no multiplier, and policy.noise asks for one")

    def too_much(self, terms: Terms, others: list[RunCost], today: date) -> Objection | None:
        """Why a run exceeds what is left of the period, or None if it fits.

        `others` are all other runs that the site was charged for.
        """
        period = "" if self.limits.days is None else f" in {self.limits.days} days"
        before = [claim for run in self.runs_in_period(others, today) for claim in run.costs]
        for claim in terms.costs:
            unit = claim.unit
            if not claim.vouched:
                return Objection("the run's claim is not vouched for", claim.short)
            if getattr(self.limits.epsilon, unit) is None:
                return Objection(f"the claim is per {unit}, and policy.epsilon.{unit} is not given")
        for unit in (Unit.CLIENT, Unit.RECORD):
            most = getattr(self.limits.epsilon, unit)
            own = [claim for claim in terms.costs if _counts_for(claim, unit)]
            if most is None or not own:
                continue
            spent = math.fsum(c.epsilon for c in before if _counts_for(c, unit))
            if spent + math.fsum(c.epsilon for c in own) > most * (1 + _ROUNDING):
                return Objection(
                    f"the run may cost more than policy.epsilon.{unit} leaves",
                    f"it may cost {' and '.join(c.short for c in own)}; the limit is "
                    f"{most:g}{period}, of which other runs may cost {rendered(spent)}",
                )
        spent = math.fsum(claim.delta for claim in before)
        if spent + math.fsum(c.delta for c in terms.costs) > self.limits.delta * (1 + _ROUNDING):
            return Objection(
                "the run's delta is more than policy.delta leaves",
                f"it is {self.limits.delta:g}{period}, of which other runs have {spent:g}",
            )
        return None

    def runs_in_period(self, runs: list[RunCost], today: date) -> list[RunCost]:
        """The runs that had a turn within the period that ends today."""
        days = self.limits.days
        if days is None:
            return runs
        return [run for run in runs if run.last_day > today - timedelta(days=days)]


def _counts_for(claim: PrivacyClaim, unit: Unit) -> bool:
    """Whether a claim counts for a unit: a cost to the whole site is one to each of its records."""
    return claim.unit is unit or claim.unit is Unit.CLIENT


_UNPROTECTED = "unprotected = true  # the recipe claims nothing: what this site sends is not hidden"
_SEEDED = "seeded = true  # the recipe has no secure noise, or does not ask for it"


def policy_text(recipe: Recipe, plan: PrivacyPlan | None, number: int) -> str:
    """The keys of the first [policy] of site `number`, a line each: what the recipe needs.

    What taking part costs follows from the plan if it is known, or else from the recipe's budget.
    What does not follow from either is left to the owner.
    """
    if plan is None:
        return "\n".join(_policy_for_recipe(recipe))
    terms = terms_of(plan, number, repeats=0)
    if not terms.costs:
        return _UNPROTECTED
    lines = []
    for unit in (Unit.CLIENT, Unit.RECORD):
        epsilons = [claim.epsilon for claim in terms.costs if claim.unit is unit]
        if epsilons:
            total = _rounded_up(math.fsum(epsilons))
            lines.append(f"epsilon.{unit} = {total}  # what this recipe costs in all")
    lines.append(f"delta = {_rounded_up(math.fsum(claim.delta for claim in terms.costs))}")
    lines += _trust_and_seed(
        {claim.trust for claim in terms.costs},
        any(line.noise is NoiseSource.SEEDED for line in terms.charged_lines),
    )
    return "\n".join(lines)


def _policy_for_recipe(recipe: Recipe) -> list[str]:
    """The lines of a policy for a recipe whose plan is not known yet."""
    if recipe.noise.kind == "none" or recipe.budget is None:
        return [_UNPROTECTED]
    inside = recipe.client.kind == "dp-sgd"
    unit = Unit.RECORD if inside else Unit.CLIENT
    epsilon = getattr(recipe.budget, "epsilon", None)
    lines = [f"# epsilon.{unit} = ...  # the most that all runs may cost; nothing is taken without"]
    if epsilon is not None and math.isfinite(epsilon):
        lines = [f"epsilon.{unit} = {epsilon}  # the recipe's budget"]
    lines.append(f"delta = {recipe.budget.delta}")
    central = not inside and getattr(recipe.noise, "where", None) == "server"
    seeded = getattr(recipe.noise, "source", "seeded") == "seeded"
    return [*lines, *_trust_and_seed({Trust.CENTRAL if central else Trust.LOCAL}, seeded)]


def _trust_and_seed(trust: set[Trust], seeded: bool) -> list[str]:
    lines = []
    if trust != {Trust.LOCAL}:
        names = ", ".join(f'"{name}"' for name in sorted(map(str, trust)))
        lines.append(f"trust = [{names}]  # whom this site relies on beside itself")
    return [*lines, _SEEDED] if seeded else lines


def _rounded_up(number: float) -> str:
    """A number in four digits that is not smaller."""
    if not math.isfinite(number):
        return repr(number)
    return repr(float(Context(4, ROUND_CEILING).create_decimal(repr(number))))


def build_for_plan(recipe: Recipe, data: FederatedData, *, allow_code: bool = False) -> Training:
    """Build a training for its plan and its checks only. It cannot be started.

    Args:
        recipe: The recipe.
        data: The sites as clients, whose records are elsewhere.
        allow_code: Whether the code that the recipe names may be run.
    """

    def no_engine(job: Job) -> Engine:
        raise AssertionError("a training that is made for its plan alone was started")

    return build(recipe, data=data, allow_code=allow_code, make_engine=no_engine)
