"""The terms of a plan for one site: its budget lines, its turns, and what they cost in all.

A plan is about all clients of a run, but a site knows only its own turns. The proof note is
docs/proofs/site.md.
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
from fedveil.flower.site_file import PolicySection
from fedveil.privacy.accounting.budget_line import BudgetLine
from fedveil.privacy.accounting.claims import NoiseSource, PrivacyClaim, Trust, Unit, rendered
from fedveil.privacy.accounting.composition import covers, noise_in
from fedveil.privacy.accounting.events import Event, PureReport, Shuffled, TwoPoint
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.build import build
from fedveil.runs.recipe import Recipe
from fedveil.training.dp_sgd import ClientDpSgd
from fedveil.training.engines.engine import Engine, Job
from fedveil.training.session import Training
from fedveil.training.work import ClientSgd, ClientWork


@dataclass(frozen=True)
class Terms:
    """The budget lines of one site, and the number of its turns.

    Attributes:
        lines: The plan's lines that concern this site.
        planned: The turns that the plan has for this site.
        permitted: The turns that a run may charge it for: those and the owner's `repeats`, as far
            as the run's budget goes.
        at_once: Whether all turns are charged when the site is first asked. Amplification by a
            secret cohort also counts the rounds to which the server does not invite the site.
    """

    lines: tuple[BudgetLine, ...]
    planned: int
    permitted: int
    at_once: bool

    @property
    def charged(self) -> tuple[BudgetLine, ...]:
        """The lines that are charged."""
        return tuple(line for line in self.lines if not line.reading)

    @cached_property
    def cost(self) -> tuple[PrivacyClaim, ...]:
        """What all permitted turns cost this site: one claim for each charged line."""
        return tuple(line.claims(self.permitted)[0] for line in self.charged)

    def needed(self, turns: int, rounds: int, again: int) -> int:
        """How many charges there must be before an answer.

        `turns` is how many asks were answered with this one; `rounds` and `again` are the last
        round that was asked for and the attempts beyond each round's first that the site knows of.
        """
        return max(self.permitted, rounds + again) if self.at_once else turns


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
    within = (line.permitted(most + repeats) for line in own if not line.reading)
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

    cost: tuple[PrivacyClaim, ...]
    last: date


@dataclass(frozen=True)
class Objection:
    """Why the site does not take part in a run.

    Attributes:
        public: The reason that a server may learn.
        private: What only the owner may learn: what other runs cost, and numbers that depend on
            how many records the site has.
    """

    public: str
    private: str = ""

    @property
    def whole(self) -> str:
        """Both parts, for the owner."""
        return f"{self.public}: {self.private}" if self.private else self.public


@dataclass(frozen=True)
class Offer:
    """What a recipe asks of the site: its plan, its work, and what that means for this site."""

    name: str
    digest: str
    plan: PrivacyPlan
    terms: Terms
    work: ClientWork
    records: int

    @property
    def steps(self) -> int:
        """Local steps in one round, on this site's records."""
        match self.work:
            case ClientDpSgd():
                return self.work.noisy.steps
            case ClientSgd():
                batches = self.work.batches
                each = math.ceil(self.records / self.work.at_once(self.records))
                return batches.steps or (batches.epochs or 1) * each
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

    section: PolicySection

    def objections(self, offer: Offer) -> Iterator[Objection]:
        """Why the site takes no part in a recipe, whatever was spent. Empty if it does."""
        policy = self.section
        if policy.recipes is not None and not {offer.name, offer.digest} & set(policy.recipes):
            yield Objection(f"the recipe {offer.name!r} is not one of policy.recipes")
        yield from self.to_plan(offer.plan, offer.terms)
        if policy.steps is not None and offer.steps > policy.steps:
            yield Objection(
                "a round takes more local steps than policy.steps allows",
                f"it takes {offer.steps} on this site's records, and policy.steps is "
                f"{policy.steps}",
            )

    def to_plan(self, plan: PrivacyPlan, terms: Terms) -> Iterator[Objection]:
        """Why nobody takes part in a plan on these terms, whatever recipe it comes from."""
        policy = self.section
        if not plan.private and not policy.unprotected:
            yield Objection("the recipe claims nothing, and policy.unprotected is false")
        for line in terms.charged:
            if str(line.trust) not in policy.trust:
                yield Objection(
                    f"the claim needs {line.trust} trust, which policy.trust does not have"
                )
            if line.noise is NoiseSource.SEEDED and not policy.seeded:
                yield Objection("the noise is seeded, and policy.seeded is false")
            yield from self._noise(line)

    def _noise(self, line: BudgetLine) -> Iterator[Objection]:
        policy, report, noise = self.section, _report_epsilon(line.event), noise_in(line.event)
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
        counted = [claim for run in self.counted(others, today) for claim in run.cost]
        for claim in terms.cost:
            unit = claim.unit
            if not claim.vouched:
                return Objection("the run's claim is not vouched for", claim.short)
            if getattr(self.section.epsilon, unit) is None:
                return Objection(f"the claim is per {unit}, and policy.epsilon.{unit} is not given")
        for unit in (Unit.CLIENT, Unit.RECORD):
            most = getattr(self.section.epsilon, unit)
            own = [claim for claim in terms.cost if _counts_for(claim, unit)]
            if most is None or not own:
                continue
            spent = math.fsum(c.epsilon for c in counted if _counts_for(c, unit))
            if spent + math.fsum(c.epsilon for c in own) > most * (1 + _ROUNDING):
                return Objection(
                    f"the run may cost more than policy.epsilon.{unit} leaves",
                    f"it may cost {' and '.join(c.short for c in own)}; the limit is "
                    f"{most:g}{self._period}, of which other runs may cost {rendered(spent)}",
                )
        spent = math.fsum(claim.delta for claim in counted)
        if spent + math.fsum(c.delta for c in terms.cost) > self.section.delta * (1 + _ROUNDING):
            return Objection(
                "the run's delta is more than policy.delta leaves",
                f"it is {self.section.delta:g}{self._period}, of which other runs have {spent:g}",
            )
        return None

    def counted(self, runs: list[RunCost], today: date) -> list[RunCost]:
        """The runs that had a turn within the period that ends today."""
        days = self.section.days
        if days is None:
            return runs
        return [run for run in runs if run.last > today - timedelta(days=days)]

    @property
    def _period(self) -> str:
        days = self.section.days
        return "" if days is None else f" in {days} days"


def _report_epsilon(event: Event) -> float | None:
    """The epsilon of one report, where noise has no multiplier."""
    match event:
        case TwoPoint(epsilon) | PureReport(epsilon) | Shuffled(TwoPoint(epsilon), _):
            return epsilon
    return None


def _counts_for(claim: PrivacyClaim, unit: Unit) -> bool:
    """Whether a claim counts for a unit: a cost to the whole site is one to each of its records."""
    return claim.unit is unit or claim.unit is Unit.CLIENT


def trusted(trust: Trust) -> str:
    """Whom one trusts, in plain words."""
    match trust:
        case Trust.LOCAL:
            return "nobody: what leaves this site has its noise already"
        case Trust.SHUFFLED:
            return (
                "the mixer: it must forget who sent which report and not side with the server; and "
                "the other sites, of which no more than shuffle.dishonest may side with the "
                "server; what leaves this site has noise already, which alone is worth less"
            )
        case Trust.CENTRAL:
            return (
                "the server: it sees this site's update without noise, and adds the noise to the "
                "sum; nothing is claimed against the server itself"
            )
        case Trust.CURATOR:
            return "a curator who is not the server"


_DIGITS = 4


def policy_text(recipe: Recipe, plan: PrivacyPlan | None, number: int) -> str:
    """The keys of a policy, a line each, that site `number` can take part with.

    What taking part costs follows from the plan if it is known, or else from the recipe's budget.
    What does not follow from either is left to the owner.
    """
    if plan is None:
        return "\n".join(_of_recipe(recipe))
    return "\n".join(_of_terms(terms_of(plan, number, repeats=0)))


def training_for(recipe: Recipe, data: FederatedData) -> Training:
    """A recipe over sites that have these clients' records: its plan, and nothing to train on."""
    everyone = data.at_sites([str(k) for k in range(data.clients)], data.sizes.tolist())
    return build(recipe, data=everyone, make_engine=no_engine)


def _of_terms(terms: Terms) -> list[str]:
    claims = terms.cost
    if not claims:
        return [_UNPROTECTED]
    lines = []
    for unit in (Unit.CLIENT, Unit.RECORD):
        costs = [claim.epsilon for claim in claims if claim.unit is unit]
        if costs:
            lines.append(
                f"epsilon.{unit} = {_up(math.fsum(costs))}  # what this recipe costs in all"
            )
    lines.append(f"delta = {_up(math.fsum(claim.delta for claim in claims))}")
    trust = {claim.trust for claim in claims}
    seeded = any(line.noise is NoiseSource.SEEDED for line in terms.charged)
    return [*lines, *_trusting(trust), *([_SEEDED] if seeded else [])]


def _of_recipe(recipe: Recipe) -> list[str]:
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
    trust = {Trust.CENTRAL if central else Trust.LOCAL}
    return [*lines, *_trusting(trust), *([_SEEDED] if seeded else [])]


_UNPROTECTED = "unprotected = true  # the recipe claims nothing: what this site sends is not hidden"
_SEEDED = "seeded = true  # the recipe has no secure noise, or does not ask for it"


def _trusting(trust: set[Trust]) -> list[str]:
    if trust == {Trust.LOCAL}:
        return []
    listed = ", ".join(f'"{one}"' for one in sorted(map(str, trust)))
    return [f"trust = [{listed}]  # whom this site relies on beside itself"]


def _up(number: float) -> str:
    """A number in few digits that is not smaller."""
    if not math.isfinite(number):
        return repr(number)
    return repr(float(Context(_DIGITS, ROUND_CEILING).create_decimal(repr(number))))


def no_engine(job: Job) -> Engine:
    """The engine of a training that is built for its plan only, and never started."""
    raise AssertionError("a training that is made for its plan alone was started")
