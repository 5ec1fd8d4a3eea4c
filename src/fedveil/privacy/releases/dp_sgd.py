"""DP-SGD inside every client: record-level DP against the server."""

from dataclasses import dataclass, replace

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
    Release,
    Requirements,
    check_multiplier,
    check_sampler,
    line_of,
    wrong_terms,
)
from fedveil.privacy.sampling import Sampler
from fedveil.privacy.secure import check_grid


@dataclass(frozen=True)
class DpSgdSteps(Release):
    """Clients take noisy local steps, so that their reports are private already.

    The clip is on each example's gradient.

    Attributes:
        noisy: The steps and their noise.
        relation: The relation whose sensitivity scales the noise.
    """

    noisy: NoisySteps
    relation: Relation

    local = True
    needs_clip = True

    @property
    def identity(self) -> Stated:
        """Identity pairs: release "dp-sgd", steps, relation."""
        return (("release", "dp-sgd"), ("steps", self.noisy), ("relation", self.relation))

    @property
    def multiplier(self) -> float:
        """The noise multiplier of each step: standard deviation / clip."""
        return self.noisy.multiplier

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        """{"multiplier": ...}, with every schedule."""
        return {"multiplier": self.multiplier}

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        """The phrase "Gaussian noise, multiplier ..., in every local step".

        `lines` are not used.
        """
        return f"Gaussian noise, multiplier {self.multiplier:.4g}, in every local step"

    @property
    def requires(self) -> Requirements:
        """The noisy steps and, with a nominal number of records, equal weights of clients.

        The claim then covers how many records a client has.
        """
        if self.noisy.nominal is None:
            return Requirements(noisy_steps=self.noisy)
        return replace(super().requires, noisy_steps=self.noisy)

    def check(self, plan: PrivacyPlan) -> None:
        """Raise BadInput or BadArgument for secure noise for which there is no grid."""
        if plan.secure and plan.parameters is not None:
            check_grid(plan.clip_schedule, self.multiplier, Relation.ADD_REMOVE, plan.parameters)

    def difference(self, plan: PrivacyPlan, line: BudgetLine) -> str | None:
        """How the plan falls short of what a strict line claims, as a clause, None if it does not.

        Compares unit, relation, trust, noise, rate and number of steps. An adaptive clip is a
        difference.
        """
        relation = relation_of(self.noisy.nominal)
        wrong = wrong_terms(line, self.noisy.protected, relation, Trust.LOCAL)
        if wrong is not None:
            return wrong
        claimed = noise_in(line.event)
        if self.relation is not relation or not covers(self.multiplier, claimed):
            return f"noise of {self.multiplier:g} sensitivities is added under {self.relation}"
        if line.event not in accounts_of(self.noisy, claimed) or line.per != self.noisy.steps:
            return f"clients take {self.noisy}"
        if plan.clip_schedule is None or plan.statistic is not None:
            return "an adaptive clip watches clients beside it"
        return None


def accounts_of(noisy: NoisySteps, multiplier: float) -> tuple[Event, ...]:
    """The events that account for one of these steps with noise of `multiplier` clips."""
    event = noisy.event(multiplier)
    if isinstance(event, Gaussian):
        return event, PoissonSampled(1.0, event)
    return (event,)


def relation_of(nominal: int | None) -> Relation:
    """The neighbouring relation of DP-SGD: zero-out if `nominal` is None, otherwise add-remove.

    Without a nominal number, clients' numbers of records or people are public: a neighbour keeps
    the record or person and zeroes its gradient. With one they are private, and a neighbour lacks
    it.
    """
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
    unit: Unit = Unit.RECORD,
    cap: int | None = None,
) -> PrivacyPlan:
    """A plan with DP-SGD inside every client: record-level or person-level DP against the server.

    It is algorithm 2 of Naseri et al.

    Guarantee: docs/proofs/local.md, docs/proofs/persons.md. Each participation is `steps`
    Poisson-sampled Gaussians on the client's own records; one account per client over all its
    participations. It protects single records, or persons with a cap, and not whole clients.

    Args:
        sampler: Who takes part in a round.
        population: The number of clients.
        clip: The L2 norm to which the gradient of each unit is clipped.
        rate: The probability with which a unit joins a local step.
        steps: The number of local steps in a round.
        nominal: The number of units that every client counts as. None: its own, which is public.
        rounds: The number of planned rounds.
        budget: The epsilon that may be spent, and delta.
        multiplier: The noise multiplier. None: the least with which all rounds fit the budget.
        unit: What joins a step and is clipped, a record or a person.
        cap: The most records of a person that count. None: the claim is about a record.

    | edge | behaviour |
    |---|---|
    | rate outside (0, 1], steps < 1 | BadInput |
    | neither multiplier nor a finite epsilon | BadInput |
    | multiplier 0, or one whose first round exceeds the budget | BadInput |
    | sizes public (`nominal` left out) | zero-out neighbours |
    | one public nominal size for all | add-remove neighbours |
    | secure noise (`with_secure_noise`) | docs/proofs/secure-dp-sgd.md |
    """
    unnoised = NoisySteps(rate, steps, 0.0, nominal, unit, cap)
    check_sampler(sampler, population, rounds)
    check_multiplier(multiplier)
    relation, event = relation_of(nominal), unnoised.event
    units = "people" if unit is Unit.PERSON else "records"
    base = replace(
        line_of(sampler, population, budget),
        unit=unnoised.protected,
        relation=relation,
        per=steps,
        assumptions=(
            "the server is not trusted; each client runs DP-SGD honestly on its own records",
            f"clients' numbers of {units} are public"
            if nominal is None
            else f"a nominal number of {units} is used for every client",
            TURNS,
            *unnoised.rules("client"),
            SEEDED,
        ),
    )
    if multiplier is None:
        multiplier = least_noise(event, steps * base.participations(rounds), budget, relation)
    plan = PrivacyPlan(
        sampler=sampler,
        population=population,
        rounds=rounds,
        clip_schedule=Fixed(clip),
        release=DpSgdSteps(replace(unnoised, multiplier=multiplier), relation),
        lines=(replace(base, event=event(multiplier)),),
    )
    plan.check_affordable(multiplier)
    return plan
