"""Central DP without a trusted server: clients add shares of the noise, behind a secure sum."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedveil.base.checks import CLIENTS, ROUNDS
from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import SEEDED, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import covers, noise_in
from fedveil.privacy.accounting.events import Event, Gaussian
from fedveil.privacy.clip import Clip
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import (
    TURNS,
    Channel,
    Release,
    Requirements,
    Round,
    check_multiplier,
    check_sampler,
    line_of,
    wrong_terms,
)
from fedveil.privacy.releases.central import (
    check_central_clip,
    joint_multiplier,
    update_multiplier,
)
from fedveil.privacy.releases.secure_sum import (
    EVERY_SITE,
    SecureSum,
    check_shares,
    check_statistic_shares,
)
from fedveil.privacy.sampling import Everyone, OwnCoins, Poisson, Sampler


@dataclass(frozen=True)
class ClientShares(Release):
    """Every client adds a share of the noise to its clipped update, and a secure sum adds them up.

    Guarantee: docs/proofs/central-sum.md. A client changes the sum by at most the clip. Every sum
    that is handed on has noise of `multiplier` clips or more, of which a client's own share is the
    part `report_noise`. The statistic of an adaptive clip has its noise in the same way.

    Attributes:
        multiplier: The noise of the updates in the smallest sum, in clips.
        clients: The number of clients.
        threshold: The least number of clients in a sum.
        honest: How many clients are taken to be honest.
        masks: Whether a simulation masks the reports.
        channel: The `SecureSum`.
        statistic_channel: The same.
    """

    multiplier: float
    clients: int
    threshold: int
    honest: int
    masks: bool = False
    channel: Channel = field(init=False, repr=False, compare=False)
    statistic_channel: Channel = field(init=False, repr=False, compare=False)

    local = True
    wide = True
    needs_clip = True
    requires = Requirements(
        equal_weights="and a client of many records would exceed the clip",
        only_sum=SecureSum.hides_reports,
        all_honest=EVERY_SITE,
    )

    def __post_init__(self) -> None:
        """Raise BadArgument for numbers with which a secure sum does not protect."""
        check_multiplier(self.multiplier)
        channel = SecureSum(self.clients, self.threshold, self.honest, self.masks)
        object.__setattr__(self, "channel", channel)
        object.__setattr__(self, "statistic_channel", channel)

    @property
    def identity(self) -> Stated:
        """Identity pairs: release "client-shares", multiplier, clients, threshold, honest."""
        names = "multiplier", "clients", "threshold", "honest"
        return (("release", "client-shares"), *named_values(self, *names))

    @property
    def report_noise(self) -> float:
        """The noise multiplier of one client's update, `multiplier` / sqrt(`channel.divisor`)."""
        return self.multiplier / math.sqrt(self.channel.divisor)

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        """{"multiplier": ...}, or {} if an adaptive schedule's statistic shares the noise."""
        shared = schedule is not None and schedule.statistic is not None
        return {} if shared else {"multiplier": self.multiplier}

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        """The noise of a client and of the smallest sum, as a phrase. `lines` are not used."""
        return (
            f"Gaussian noise, multiplier {self.report_noise:.4g}, at each of {self.clients} "
            f"clients, {self.multiplier:.4g} or more in every sum of {self.threshold} or more"
        )

    def check(self, plan: PrivacyPlan) -> None:
        """Raise BadInput for cohorts below the threshold, and for secure noise without a grid.

        Also for sums that would be too long for a grid.
        """
        if plan.asked < self.threshold:
            raise BadArgument(
                f"a round asks {plan.asked:g} clients and {{threshold}} is "
                f"{self.threshold}: no sum would be handed on; ask more (sample.kind = 'poisson' "
                "asks all of them)",
                "threshold",
            )
        check_shares(plan, self.report_noise, self.clients, self.clients, "clients")
        check_statistic_shares(plan, self.clients)

    def difference(self, plan: PrivacyPlan, line: BudgetLine) -> str | None:
        """How the plan falls short of what a strict line claims, as a clause, None if it does not.

        Compares unit, relation, trust, number of clients, noise (a clip's statistic included),
        event and sampler.
        """
        trusts = Trust.SECURE_SUM, Trust.SITE
        wrong = wrong_terms(line, Unit.CLIENT, Relation.ZERO_OUT, *trusts)
        if wrong is not None:
            return wrong
        if line.trust is Trust.SECURE_SUM and all(o.trust is not Trust.SITE for o in plan.lines):
            return "the line about a server with all other clients is missing"
        if plan.population != self.clients:
            return f"{self.clients} clients add noise"
        added, claimed = self.multiplier, noise_in(line.event)
        if plan.statistic is not None:
            added = joint_multiplier(added, plan.statistic, Relation.ZERO_OUT)
        if line.trust is Trust.SITE:
            added /= math.sqrt(self.channel.divisor)
        if not covers(added, claimed):
            return f"noise of {added:g} sensitivities is added"
        event = _event(plan.sampler, plan.population, claimed)
        return None if line.event == event else f"the sampler makes it {event}"

    def randomise_(self, rows: torch.Tensor, round: Round) -> None:
        """Add each client's share of the noise to its row of updates [K, P], in place.

        Raises AssertionError without a clip.
        """
        if round.clip is None:
            raise AssertionError("additive noise needs a clip")
        keys = round.streams.keys("client-noise", round.number, round.ids)
        scales = np.full(len(rows), self.scale(round.clip))
        GaussianMechanism(self.report_noise).add_(rows, scales, keys)

    def scale(self, clip: Clip) -> float:
        """The standard deviation of one client's share."""
        return self.report_noise * clip.sensitivity(Relation.ZERO_OUT)

    def divisor(self, weight: float, expected: float) -> float:
        """`expected`: however coins fall, and whoever answers."""
        return expected

    def noise_length(self, round: Round, size: int) -> float:
        """The length of the noise of all clients of the round. 0 without a clip."""
        if round.clip is None:
            return 0.0
        return math.sqrt(len(round.ids) * size) * self.scale(round.clip)


def central_sum(
    sampler: Sampler,
    population: int,
    schedule: ClipSchedule,
    *,
    threshold: int,
    honest: int,
    masks: bool = False,
    rounds: int,
    budget: Budget,
    multiplier: float | None = None,
) -> PrivacyPlan:
    """A plan of central DP whose noise comes from the clients, in shares behind a secure sum.

    Guarantee: docs/proofs/central-sum.md. The server sees one noisy sum in a round, and need not be
    trusted. The first line holds if `honest` clients follow the protocol. The second is about a
    server with all other clients: a client's own share alone. With a clip that watches clients,
    what it watches is a part of the same masked report, and both are one joint Gaussian release.

    Args:
        sampler: Who contributes to a round. `Poisson` becomes `OwnCoins`: every client reports in
            every round, and its own coin decides what. Cohorts that the server draws are accounted
            without amplification.
        population: The number of clients, which is public.
        schedule: The clip on updates, in L2.
        threshold: The least number of clients in a sum. Each adds enough noise for that many.
        honest: How many clients the first line takes to be honest.
        masks: Whether a simulation masks the reports, which takes secure noise. The sum is the same
            to the last bit.
        rounds: The number of planned rounds.
        budget: The budget of the first line.
        multiplier: The noise of the first line. None: the least that fits the budget.

    | edge | behaviour |
    |---|---|
    | fewer than three clients, or numbers that `SecureSum` refuses | BadInput |
    | a cohort smaller than the threshold | BadInput |
    | fewer clients report than the threshold | charged, and model and clip stay |
    | multiplier 0, or one whose first round exceeds the budget | BadInput |
    | a clip that watches with z >= z_bits (2 sigma_b) | BadInput: no split exists |
    """
    CLIENTS.check("clients", population)
    ROUNDS.check("rounds", rounds)
    check_multiplier(multiplier)
    check_central_clip(schedule)
    if isinstance(sampler, Poisson):
        sampler = OwnCoins(sampler.rate) if sampler.rate < 1 else Everyone()
    check_sampler(sampler, population, rounds)
    channel = SecureSum(population, threshold, honest, masks)

    def event(m: float) -> Event:
        return _event(sampler, population, m)

    base = replace(
        line_of(sampler, population, budget, event(1.0)),
        relation=Relation.ZERO_OUT,
        noise=NoiseSource.SEEDED,
    )
    if multiplier is None:
        multiplier = least_noise(event, base.participations(rounds), budget, Relation.ZERO_OUT)
    own = multiplier
    if schedule.statistic is not None:
        own = update_multiplier(multiplier, schedule.statistic, Relation.ZERO_OUT)
    others = (
        "each client clips its update and adds its noise honestly",
        sampler.assumption if type(sampler) in (OwnCoins, Everyone) else TURNS,
        f"the number of clients, {population}, is public",
        "only models are published; metrics on clients' data are outside the claim",
        SEEDED,
    )
    first = replace(
        base,
        event=event(multiplier),
        trust=Trust.SECURE_SUM,
        assumptions=(*channel.assumptions, *others),
    )
    second = replace(
        base,
        event=event(multiplier / math.sqrt(channel.divisor)),
        trust=Trust.SITE,
        assumptions=others,
        reading=True,
        budget=Budget(math.inf, budget.delta),
    )
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        clip_schedule=schedule,
        release=ClientShares(own, population, threshold, honest, masks),
        lines=(first, second),
    )
    plan.check_affordable(multiplier)
    return plan


def _event(sampler: Sampler, population: int, multiplier: float) -> Event:
    """The event of one round for a client. Only coins of the clients' own amplify it."""
    gaussian = Gaussian(multiplier)
    return sampler.event(gaussian, population) if type(sampler) is OwnCoins else gaussian
