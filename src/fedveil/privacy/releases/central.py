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
from fedveil.privacy.accounting.events import (
    KINDS,
    Event,
    Gaussian,
    PoissonSampled,
    WithMetrics,
)
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.clip_statistic import ClipStatistic
from fedveil.privacy.noise.grid import LARGEST_SUM
from fedveil.privacy.noise.mechanisms import GaussianMechanism, add_to_sum_
from fedveil.privacy.plan import PrivacyPlan, check_clip_schedule
from fedveil.privacy.priced_metrics import PricedMetrics
from fedveil.privacy.release import (
    NOISE_IS_FOR_THE_SUM,
    SERVER,
    Release,
    Requirements,
    Round,
    wrong_terms,
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

    needs_clip = True
    requires = Requirements(
        equal_weights="under central DP, where a client of many records would exceed the clip",
        only_sum=NOISE_IS_FOR_THE_SUM,
    )

    @property
    def identity(self) -> Stated:
        """Identity pairs: release "central", mechanism, relation."""
        return (("release", "central"), ("mechanism", self.mechanism), ("relation", self.relation))

    @property
    def multiplier(self) -> float:
        """The noise multiplier of the updates: standard deviation / sensitivity."""
        return self.mechanism.multiplier

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        """{"multiplier": ...}, or {} if an adaptive schedule's statistic shares the noise."""
        shared = schedule is not None and schedule.statistic is not None
        return {} if shared else {"multiplier": self.mechanism.multiplier}

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        """The phrase "Gaussian noise, multiplier ..., at the server". `lines` are not used."""
        return f"Gaussian noise, multiplier {self.mechanism.multiplier:.4g}, at the server"

    def check(self, plan: PrivacyPlan) -> None:
        """With secure noise on a known number of parameters, raise BadInput if no grid fits.

        Refuses noise that is too large for the grid, and sums of so many clients that they exceed
        it.
        """
        if not plan.secure or plan.parameters is None:
            return
        check_grid(plan.clip_schedule, self.mechanism.multiplier, self.relation, plan.parameters)
        step = self.mechanism.grid(self.mechanism.multiplier, plan.parameters).spacing
        # Rows as long as the clip, all in one coordinate. A clip that is no power of two has up to
        # twice as many steps.
        if plan.population * 2.0 / step > LARGEST_SUM:
            raise BadArgument(
                f"{{source}} is 'secure', {{multiplier}} {self.mechanism.multiplier:.4g} and "
                f"{plan.population:,} clients: their sum is too long for the grid; raise the "
                "multiplier",
                "source",
                "multiplier",
            )

    def difference(self, plan: PrivacyPlan, line: BudgetLine) -> str | None:
        """How the plan falls short of what a strict line claims, as a clause, None if it does not.

        Compares unit, relation, trust, noise (a clip's statistic included), event and sampler.
        """
        relation = plan.sampler.relation
        wrong = wrong_terms(line, Unit.CLIENT, relation, Trust.CENTRAL)
        if wrong is not None:
            return wrong
        if not isinstance(self.mechanism, GaussianMechanism) or self.relation is not relation:
            return f"the noise is that of {self.mechanism} under {self.relation}"
        own = line.event.event if isinstance(line.event, WithMetrics) else line.event
        added, claimed = self.mechanism.multiplier, noise_in(own)
        if plan.statistic is not None:
            added = joint_multiplier(added, plan.statistic, relation)
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
        """With secure noise, round rows [K, P] towards zero to its grid in place.

        float64 sums of them are then exact. Returns False for each row, bool [K]: none is refused.
        docs/proofs/secure.md.
        """
        if round.streams.secure and round.clip is not None:
            self.mechanism.grid(self.scale(round.clip), rows.shape[1]).cut_(rows)
        return super().read_(rows, round)

    def noise_(self, total: torch.Tensor, round: Round) -> None:
        """total [P] += Gaussian noise of `scale`, in place.

        Raises AssertionError without a clip.
        """
        if round.clip is None:
            raise AssertionError("noise on a sum needs a clip")
        keys = round.server_streams.keys("noise", round.number, SERVER)
        add_to_sum_(self.mechanism, total, self.scale(round.clip), keys)

    def divisor(self, weight: float, expected: float) -> float:
        """`expected`: the realised `weight` is not public."""
        return expected

    def noise_length(self, round: Round, size: int) -> float:
        """sqrt(size) x `scale`, 0 without a clip."""
        return 0.0 if round.clip is None else math.sqrt(size) * self.scale(round.clip)

    def scale(self, clip: Clip) -> float:
        """The standard deviation of the noise on a sum: multiplier times the clip's sensitivity."""
        return self.mechanism.multiplier * clip.sensitivity(self.relation)


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
    """A plan with client-level central DP: Gaussian noise at a trusted server.

    It is algorithm 1 of Naseri et al.

    Guarantee: docs/proofs/central.md. With a clip that watches clients, what it watches and the
    updates are one joint Gaussian release of that multiplier, of which the updates get z_delta =
    (z^-2 - z_bits^-2)^(-1/2). With `metrics` of the clients themselves, budget and claim are for
    updates and metrics together.

    Args:
        sampler: Who takes part in a round.
        population: The number of clients, which is public.
        schedule: The clip on updates, in L2.
        rounds: The number of planned rounds.
        budget: The epsilon that may be spent, and delta.
        multiplier: The noise multiplier. The budget then says how many rounds may run. None: the
            least noise with which all rounds fit the budget.
        metrics: Priced metrics of the clients themselves, to be counted in the noise. The plan
            measures them only after `PrivacyPlan.measuring`.

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
    check_central_clip(schedule)
    if multiplier == 0:
        raise BadArgument(
            "{multiplier} is 0: no finite epsilon exists; use {mechanism} = 'none'",
            "multiplier",
            "mechanism",
        )

    def event(m: float) -> Event:
        one = sampler.event(Gaussian(m), population)
        return one if metrics is None else _event_with_metrics(one, metrics, budget)

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
    calibrated = multiplier is None
    if multiplier is None:
        count = line.participations(rounds)
        multiplier = least_noise(event, count, budget, sampler.relation)
    own = multiplier
    if schedule.statistic is not None:
        own = update_multiplier(multiplier, schedule.statistic, sampler.relation)
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        clip_schedule=schedule,
        release=CentralNoise(GaussianMechanism(own), sampler.relation),
        lines=(replace(line, event=event(multiplier)),),
    )
    if not calibrated:  # calibrated noise lets all rounds fit
        plan.check_affordable(multiplier)
    return plan


_PUBLISHED = "only models are published; metrics on clients' data are outside the claim"
_PUBLISHED_WITH_METRICS = (
    "only models and the metrics that this claim covers are published; other numbers computed from "
    "clients' data are outside the claim"
)


def _event_with_metrics(updates: Event, metrics: PricedMetrics, budget: Budget) -> WithMetrics:
    """The event of updates and metrics of the same clients.

    Raises BadInput for metrics of held-out owners, for updates that are neither plain nor
    Poisson-sampled Gaussians, and for metrics that alone cost as much as the budget.
    """
    if not metrics.of_clients:
        raise BadInput("metrics of held-out owners have a line of their own: use plan.measuring")
    if not isinstance(updates, Gaussian | PoissonSampled):
        raise BadInput(
            "evaluate.epsilon would measure the clients themselves, and no accountant knows that "
            f"beside {KINDS[type(updates)]}: use sample.kind 'poisson' or 'all', or hold owners "
            "out (data.test = 'by-client')"
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


def check_central_clip(schedule: ClipSchedule) -> None:
    """Raise BadInput for a schedule that central DP has no account for.

    Refuses clips in L1, clips of each gradient, bits by randomised response (`flip`), and
    statistics without noise or not collected in every round.
    """
    check_clip_schedule(schedule)
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


def update_multiplier(z: float, statistic: ClipStatistic, relation: Relation) -> float:
    """The noise multiplier of the updates in a joint release with a clip's statistic.

    `z` is the multiplier of the joint release. Raises BadArgument if the statistic alone reveals as
    much as that.
    """
    z_bits = statistic.noise / statistic.sensitivity(relation)
    if z >= z_bits:
        raise BadArgument(
            f"{{noise}} {statistic.noise:g} is too small for the noise multiplier {z:.4g}: "
            f"the bits alone would spend more than a round's budget; raise it above "
            f"{statistic.noise * z / z_bits:.4g}",
            "noise",
        )
    return float((z**-2 - z_bits**-2) ** -0.5)


def joint_multiplier(z: float, statistic: ClipStatistic, relation: Relation) -> float:
    """The noise multiplier of one Gaussian that reveals as much as a sum and a statistic together.

    `z` is the multiplier of the sum, `statistic` that of an adaptive clip. 0 if the statistic has
    no noise or is not sent every round.
    """
    if z == 0:
        return z
    if not statistic.noise or statistic.every != 1:
        return 0.0
    return float((z**-2 + (statistic.noise / statistic.sensitivity(relation)) ** -2) ** -0.5)
