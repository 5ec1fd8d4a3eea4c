"""What the owner of a site agrees to, and whether a plan is within it."""

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
class Spending:
    """A run that the site has been asked for: what it may cost in all, and its last turn."""

    cost: tuple[PrivacyClaim, ...]
    last: date


@dataclass(frozen=True)
class Beyond:
    """Why a run does not fit: what a server may be told, and what only the owner is told.

    What other runs have cost is nothing that a server has to know.
    """

    told: str
    why: str = ""

    @property
    def whole(self) -> str:
        """Both, for the owner."""
        return f"{self.told}: {self.why}" if self.why else self.told


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

    Guarantee: whatever servers ask, the runs that had a turn within any period of `days` cost,
    each at what it may come to in all and added up, no more than `epsilon` of each unit and
    `delta`; none of them trusts anybody whom the owner does not.

    | edge | behaviour |
    |---|---|
    | a unit for which no epsilon is given | refused |
    | a recipe that claims nothing | refused unless `unprotected` |
    | noise from a seed, wherever it is added | refused unless `seeded` |
    | `noise` is given and the noise has no multiplier | refused unless `report_epsilon` is |
    | a run that costs the site and protects clients | counts for a record as well |
    | the clock goes back | more runs count, never fewer |
    """

    section: PolicySection

    def objections(self, offer: Offer) -> Iterator[str]:
        """Why the site takes no part in a recipe, whatever was spent; nothing if it does."""
        policy, plan = self.section, offer.plan
        if policy.recipes is not None and not {offer.name, offer.digest} & set(policy.recipes):
            yield f"the recipe {offer.name!r} is not one of policy.recipes"
        if not plan.private and not policy.unprotected:
            yield "the recipe claims nothing, and policy.unprotected is false"
        for line in offer.terms.charged:
            if str(line.trust) not in policy.trust:
                yield f"the claim needs {line.trust} trust, which policy.trust does not have"
            if line.noise is NoiseSource.SEEDED and not policy.seeded:
                yield "the noise is seeded, and policy.seeded is false"
            yield from self._noise(line)
        if policy.steps is not None and offer.steps > policy.steps:
            yield f"a round takes {offer.steps} local steps, and policy.steps is {policy.steps}"

    def _noise(self, line: BudgetLine) -> Iterator[str]:
        policy, report, noise = self.section, _report_epsilon(line.event), noise_in(line.event)
        if report is None:
            if policy.noise is not None and noise < policy.noise * (1 - _ROUNDING):
                yield f"the noise multiplier is {noise:.4g}, and policy.noise is {policy.noise:g}"
        elif policy.report_epsilon is not None:
            if report > policy.report_epsilon * (1 + _ROUNDING):
                yield "a report alone costs more than policy.report_epsilon allows"
        elif policy.noise is not None:
            yield "the noise has no multiplier, and policy.noise asks for one"

    def too_much(self, terms: Terms, others: list[Spending], today: date) -> Beyond | None:
        """Why a run is beyond what is left of the period; None if it fits.

        `others` are all other runs that the site was charged for.
        """
        counted = [claim for run in self.counted(others, today) for claim in run.cost]
        for claim in terms.cost:
            if not claim.vouched:
                return Beyond(f"the run would cost {claim.short}")
            if getattr(self.section.epsilon, claim.unit) is None:
                unit = claim.unit
                return Beyond(f"the claim is per {unit}, and policy.epsilon.{unit} is not given")
            for unit in (Unit.CLIENT, Unit.RECORD):
                most = getattr(self.section.epsilon, unit)
                if most is None or not _counts_for(claim, unit):
                    continue
                spent = math.fsum(c.epsilon for c in counted if _counts_for(c, unit))
                if spent + claim.epsilon > most * (1 + _ROUNDING):
                    return Beyond(
                        f"the run may cost {claim.short}, more than policy.epsilon.{unit} leaves",
                        f"it is {most:g}{self._period}, of which other runs may cost "
                        f"{rendered(spent)}",
                    )
        spent = math.fsum(claim.delta for claim in counted)
        if spent + math.fsum(c.delta for c in terms.cost) > self.section.delta * (1 + _ROUNDING):
            return Beyond(
                "the run's delta is more than policy.delta leaves",
                f"it is {self.section.delta:g}{self._period}, of which other runs have {spent:g}",
            )
        return None

    def counted(self, runs: list[Spending], today: date) -> list[Spending]:
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
    """What costs the whole site costs each of its records as well, and not the other way round."""
    return claim.unit is unit or claim.unit is Unit.CLIENT


def trusted(trust: Trust) -> str:
    """Whom one trusts, in plain words."""
    match trust:
        case Trust.LOCAL:
            return "nobody: what leaves this site has its noise already"
        case Trust.SHUFFLED:
            return (
                "the mixer: it must forget who sent which report and not side with the server; "
                "what leaves this site has noise already, which alone is worth less"
            )
        case Trust.CENTRAL:
            return (
                "the server: it sees this site's update without noise, and adds the noise to the "
                "sum; nothing is claimed against the server itself"
            )
        case Trust.CURATOR:
            return "a curator who is not the server"
