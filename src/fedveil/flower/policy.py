"""The owner's policy of a site, and whether a plan is within it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta

from fedveil.flower.site_file import PolicySection
from fedveil.flower.terms import Terms
from fedveil.privacy.accounting.budget_line import BudgetLine
from fedveil.privacy.accounting.claims import NoiseSource, PrivacyClaim, Trust, Unit, rendered
from fedveil.privacy.accounting.composition import noise_in
from fedveil.privacy.accounting.events import Event, PureReport, Shuffled, TwoPoint
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.dp_sgd import ClientDpSgd
from fedveil.training.work import ClientSgd, ClientWork

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
