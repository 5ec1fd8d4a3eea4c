"""DP-SGD inside every client: record-level DP against the server."""

from dataclasses import dataclass, replace

from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import least_noise
from fedveil.privacy.accounting.claims import SEEDED, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import covers, noise_in
from fedveil.privacy.accounting.events import Event, Gaussian, PoissonSampled
from fedveil.privacy.clip_schedules import ClipSchedule, Fixed
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import (
    TURNS,
    NoisySteps,
    PlanParts,
    Release,
    Requirements,
    check_clipped,
    check_multiplier,
    check_sampler,
    line_of,
    misnamed,
)
from fedveil.privacy.sampling import Sampler


@dataclass(frozen=True)
class DpSgdSteps(Release):
    """Clients take noisy local steps, so that their reports are private already.

    The clip is one of each example's gradient.
    """

    noisy: NoisySteps
    relation: Relation

    local = True

    @property
    def identity(self) -> Stated:
        return (("release", "dp-sgd"), ("steps", self.noisy), ("relation", self.relation))

    @property
    def multiplier(self) -> float:
        return self.noisy.multiplier

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        return {"multiplier": self.multiplier}

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        return f"Gaussian noise, multiplier {self.multiplier:.4g}, in every local step"

    @property
    def requires(self) -> Requirements:
        """With one nominal number of records, how many a client has is part of the claim."""
        if self.noisy.nominal is None:
            return Requirements(steps=self.noisy)
        return replace(super().requires, steps=self.noisy)

    def check(self, plan: PlanParts) -> None:
        check_clipped(plan)
        if plan.secure:
            raise BadArgument(
                "{source} = 'secure' is not for noise in every local step, whose sums are "
                "rounded to float32 before it: use 'seeded'",
                "source",
            )

    def difference(self, plan: PlanParts, line: BudgetLine) -> str | None:
        relation = relation_of(self.noisy.nominal)
        wrong = misnamed(line, Unit.RECORD, relation, Trust.LOCAL)
        if wrong is not None:
            return wrong
        claimed = noise_in(line.event)
        if self.relation is not relation or not covers(self.multiplier, claimed):
            return f"noise of {self.multiplier:g} sensitivities is added under {self.relation}"
        event = PoissonSampled(self.noisy.rate, Gaussian(claimed))
        right = (event, Gaussian(claimed)) if self.noisy.rate == 1 else (event,)
        if line.event not in right or line.per != self.noisy.steps:
            return f"clients take {self.noisy}"
        if plan.schedule is None or plan.statistic is not None:
            return "an adaptive clip watches clients beside it"
        return None


def relation_of(nominal: int | None) -> Relation:
    """A record is zeroed where numbers of records are public, and removed where they are not."""
    return Relation.ZERO_OUT if nominal is None else Relation.ADD_REMOVE


def dp_sgd(
    sampler: Sampler,
    population: int,
    clip: float,
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
    check_sampler(sampler, population, rounds)
    check_multiplier(multiplier)
    relation = relation_of(nominal)

    def event(m: float) -> Event:
        return Gaussian(m) if rate == 1 else PoissonSampled(rate, Gaussian(m))

    base = replace(
        line_of(sampler, population, budget),
        unit=Unit.RECORD,
        relation=relation,
        per=steps,
        assumptions=(
            "the server is not trusted; each client runs DP-SGD honestly on its own records",
            "clients' numbers of records are public"
            if nominal is None
            else "a nominal number of records is used for every client",
            TURNS,
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
        schedule=Fixed(clip),
        release=DpSgdSteps(replace(unnoised, multiplier=multiplier), relation),
        lines=(replace(base, event=event(multiplier)),),
    )
    plan.check_affordable(multiplier)
    return plan
