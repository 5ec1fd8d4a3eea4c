"""Central DP: Gaussian noise that a trusted server adds to the sum of clipped updates."""

import math
from dataclasses import dataclass, replace

import torch

from fedveil.base.checks import CLIENTS, MULTIPLIER, ROUNDS
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import (
    BOTH,
    SEEDED,
    TRUSTED_SERVER,
    NoiseSource,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.composition import covers, epsilon, noise_in
from fedveil.privacy.accounting.events import Event, Gaussian, PoissonSampled, WithMetrics, kind_of
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.clip_statistic import ClipStatistic
from fedveil.privacy.noise.grid import LARGEST_SUM
from fedveil.privacy.noise.mechanisms import GaussianMechanism, add_to_sum_
from fedveil.privacy.plan import PrivacyPlan, check_clip_schedule, check_deltas, check_uncapped
from fedveil.privacy.priced_metrics import PricedMetrics
from fedveil.privacy.release import (
    NOISE_IS_FOR_THE_SUM,
    SERVER,
    PlanParts,
    Release,
    Requirements,
    Round,
    check_clipped,
    misnamed,
)
from fedveil.privacy.sampling import FixedSize, Poisson, RoundRobin, Sampler
from fedveil.privacy.secure import check_grid


@dataclass(frozen=True)
class CentralNoise(Release):
    """The server adds N(0, (multiplier x sensitivity)^2) to every coordinate of the sum.

    `relation` is the one whose sensitivity scales the noise. The divisor is the expected cohort,
    which is public: the realised weight is not.
    """

    mechanism: GaussianMechanism
    relation: Relation

    @property
    def identity(self) -> Stated:
        return (("release", "central"), ("mechanism", self.mechanism), ("relation", self.relation))

    @property
    def multiplier(self) -> float:
        return self.mechanism.multiplier

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        shared = schedule is not None and schedule.statistic is not None
        return {} if shared else {"multiplier": self.multiplier}

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        return f"Gaussian noise, multiplier {self.multiplier:.4g}, at the server"

    @property
    def requires(self) -> Requirements:
        return Requirements(
            equal_weights="under central DP, where a client of many records would exceed the clip",
            only_sum=NOISE_IS_FOR_THE_SUM,
        )

    def check(self, plan: PlanParts) -> None:
        """Refuse a plan without a clip and, with secure noise, sums that do not fit the grid."""
        check_clipped(plan)
        if not plan.secure or plan.parameters is None:
            return
        check_grid(plan.schedule, self.multiplier, self.relation, plan.parameters)
        step = self.mechanism.grid(self.multiplier, plan.parameters).spacing
        # Rows as long as the clip, all in one coordinate. A clip that is no power of two has up to
        # twice as many steps.
        if plan.population * 2.0 / step > LARGEST_SUM:
            raise BadArgument(
                f"{{source}} is 'secure', {{multiplier}} {self.multiplier:.4g} and "
                f"{plan.population:,} clients: their sum is too long for the grid; raise the "
                "multiplier",
                "source",
                "multiplier",
            )

    def difference(self, plan: PlanParts, line: BudgetLine) -> str | None:
        relation = plan.sampler.relation
        wrong = misnamed(line, Unit.CLIENT, relation, Trust.CENTRAL)
        if wrong is not None:
            return wrong
        if not isinstance(self.mechanism, GaussianMechanism) or self.relation is not relation:
            return f"the noise is that of {self.mechanism} under {self.relation}"
        own = line.event.event if isinstance(line.event, WithMetrics) else line.event
        added, claimed = _joint(self.multiplier, plan.statistic, relation), noise_in(own)
        if not covers(added, claimed):
            return f"noise of {added:g} sensitivities is added"
        event = plan.sampler.event(Gaussian(claimed), plan.population)
        if own != event:
            return f"the sampler makes it {event}"
        if own != Gaussian(claimed) and type(plan.sampler) not in (Poisson, FixedSize):
            return f"cohorts are drawn by {type(plan.sampler).__name__}, whose law nobody knows"
        if line.share < 1 and type(plan.sampler) is not RoundRobin:  # no ledger counts turns here
            return f"turns are given by {type(plan.sampler).__name__}, whose order nobody knows"
        return None

    def read_(self, rows: torch.Tensor, round: Round) -> torch.Tensor:
        """With secure noise rows are cut to its grid, so that their float64 sum is exact.

        docs/proofs/secure.md.
        """
        if round.streams.secure and round.clip is not None:
            self.mechanism.grid(self.scale(round.clip), rows.shape[1]).cut_(rows)
        return super().read_(rows, round)

    def noise_(self, total: torch.Tensor, round: Round) -> None:
        if round.clip is None:
            raise AssertionError("noise on a sum needs a clip")
        keys = round.server_streams.keys("noise", round.number, SERVER)
        add_to_sum_(self.mechanism, total, self.scale(round.clip), keys)

    def divisor(self, weight: float, expected: float) -> float:
        return expected

    def noise_length(self, round: Round, size: int) -> float:
        return 0.0 if round.clip is None else math.sqrt(size) * self.scale(round.clip)

    def scale(self, clip: Clip) -> float:
        """The standard deviation of the noise on a sum: multiplier times the clip's sensitivity."""
        return self.multiplier * clip.sensitivity(self.relation)


def central(
    sampler: Sampler,
    population: int,
    schedule: ClipSchedule,
    *,
    rounds: int,
    budget: Budget,
    multiplier: float | None = None,
    metrics: PricedMetrics | None = None,
) -> PrivacyPlan:
    """Client-level central DP: Gaussian noise at a trusted server (Naseri et al., algorithm 1).

    Guarantee: docs/proofs/central.md. Without `multiplier` the noise is the least that lets
    `rounds` rounds fit into the budget; with it, the budget says how many rounds may run. With a
    clip that watches clients, what it watches and the updates are one joint Gaussian release of
    that multiplier, of which the updates get z_delta = (z^-2 - z_bits^-2)^(-1/2). With `metrics` of
    the clients themselves, budget and claim are for updates and metrics together.

    | edge | behaviour |
    |---|---|
    | neither multiplier nor a finite epsilon | BadInput |
    | multiplier 0 | BadInput: no finite epsilon exists |
    | multiplier whose first round exceeds the budget | BadInput |
    | delta >= 1 / clients | BadInput |
    | a clip that watches with z >= z_bits (2 sigma_b under zero-out) | BadInput: no split exists |
    | metrics of clients that cost as much as the budget, or a cohort of fixed size | BadInput |

    >>> from fedveil.privacy.sampling import Everyone
    >>> from fedveil.privacy.clip_schedules import Fixed
    >>> plan = central(Everyone(), 100, Fixed(1.0), rounds=1, budget=Budget(1.0, 1e-5))
    >>> round(plan.release.multiplier, 2)
    3.73
    """
    CLIENTS.check("clients", population)
    ROUNDS.check("rounds", rounds)
    if multiplier is not None:
        MULTIPLIER.check("multiplier", multiplier)
    sampler.check(population)
    check_uncapped(sampler)
    check_clip_schedule(schedule)
    _check_schedule(schedule)
    if multiplier == 0:
        raise BadArgument(
            "{multiplier} is 0: no finite epsilon exists; use {mechanism} = 'none'",
            "multiplier",
            "mechanism",
        )

    def event(m: float) -> Event:
        one = sampler.event(Gaussian(m), population)
        return one if metrics is None else _with_metrics(one, metrics, budget)

    line = BudgetLine(
        event=event(1.0),
        share=sampler.participation_share(population),
        budget=budget,
        unit=Unit.CLIENT,
        relation=sampler.relation,
        trust=Trust.CENTRAL,
        noise=NoiseSource.SEEDED,
        assumptions=(
            TRUSTED_SERVER,
            sampler.assumption,
            f"the number of clients, {population}, is public",
            _PUBLISHED if metrics is None else _PUBLISHED_WITH_METRICS,
            SEEDED,
        ),
        covers="updates" if metrics is None else BOTH,
    )
    check_deltas((line,), population)
    if multiplier is None:
        count = line.participations(rounds)
        multiplier = least_noise(event, count, budget, sampler.relation)
    own = _updates_part(multiplier, schedule, sampler.relation)
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        schedule=schedule,
        release=CentralNoise(GaussianMechanism(own), sampler.relation),
        lines=(replace(line, event=event(multiplier)),),
    )
    plan.check_affordable(multiplier)
    return plan


_PUBLISHED = "only models are published; metrics on clients' data are outside the claim"
_PUBLISHED_WITH_METRICS = (
    "only models and the metrics that this claim covers are published; other numbers computed from "
    "clients' data are outside the claim"
)


def _with_metrics(updates: Event, metrics: PricedMetrics, budget: Budget) -> WithMetrics:
    """Updates and metrics of the same clients as one event."""
    if not metrics.of_clients:
        raise BadInput("metrics of held-out owners have a line of their own: use plan.measuring")
    if not isinstance(updates, Gaussian | PoissonSampled):
        raise BadInput(
            "evaluate.epsilon would measure the clients themselves, and no accountant knows that "
            f"beside {kind_of(updates)}: use sample.kind 'poisson' or 'all', or hold owners out "
            "(data.test = 'by-client')"
        )
    alone = metrics.line.event
    cost = epsilon(alone, len(metrics.rounds), budget.delta, metrics.line.relation)
    if cost >= budget.epsilon:
        spent = metrics.line.claim(cost).short
        raise BadArgument(
            f"{spent} leaves nothing of budget.epsilon {budget.epsilon:g} for the training: lower "
            "{metrics}, or raise the budget",
            "metrics",
        )
    return WithMetrics(updates, *metrics.beside)


def _check_schedule(schedule: ClipSchedule) -> None:
    if schedule.norm is not Norm.L2:
        raise BadArgument(
            f"{{norm}} is {schedule.norm} and the noise needs l2: set {{norm}} = 'l2'", "norm"
        )
    statistic = schedule.statistic
    if statistic is not None and statistic.flip:
        raise BadArgument("{flip} is for local DP: give {noise} under central DP", "flip", "noise")
    if (
        schedule.rates_allowed(1) is not None
        or schedule.needs_raw_gradients
        or (statistic is not None and (statistic.every != 1 or not statistic.noise))
    ):
        raise BadInput("central DP takes a fixed, decaying or quantile clip on the whole update")


def _updates_part(z: float, schedule: ClipSchedule, relation: Relation) -> float:
    """z for the updates alone, or what is left of it when a clip's bits share the release."""
    statistic = schedule.statistic
    if statistic is None:
        return z
    z_bits = statistic.noise / statistic.sensitivity(relation)
    if z >= z_bits:
        raise BadArgument(
            f"{{noise}} {statistic.noise:g} is too small for the noise multiplier {z:.4g}: "
            f"the bits alone would spend more than a round's budget; raise it above "
            f"{statistic.noise * z / z_bits:.4g}",
            "noise",
        )
    return float((z**-2 - z_bits**-2) ** -0.5)


def _joint(z: float, statistic: ClipStatistic | None, relation: Relation) -> float:
    """Of a sum with noise z and what a clip releases beside it, as one Gaussian."""
    if statistic is None or z == 0:
        return z
    if not statistic.noise or statistic.every != 1:
        return 0.0
    return float((z**-2 + (statistic.noise / statistic.sensitivity(relation)) ** -2) ** -0.5)
