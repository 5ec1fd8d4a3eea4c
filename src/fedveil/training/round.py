"""A round on one screen: `begin` samples and charges, clients work, `end` adds noise and steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedveil.base.errors import BudgetExhausted
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.round import Round
from fedveil.privacy.sampling import check_cohort
from fedveil.training.adversary import Adversary, attacked_cohort
from fedveil.training.aggregates import Aggregate
from fedveil.training.server import ServerOptimizer, ServerState
from fedveil.training.sums import CohortSum


@dataclass(frozen=True)
class RoundResult:
    """One finished round, as a `Gate` lets it out.

    `clients`, `clipped`, `snr`, `refused`, `over_clients`, `attack` and `seconds` come from private
    data: they are diagnostics and no releases, and empty or None where those are off. `clipped` is
    None also where clients do not tell. `snr` is the length of the sum over the expected length of
    its noise, None without noise, or where only clients know the sum; `clip` the clip on updates or
    local gradients, None without one; `metrics` is empty in rounds that were not measured. `attack`
    is what an adversary did: how many clients cheated, their share of the cohort, and the mean
    lengths of honest and cheating reports as they arrived; empty without an adversary.
    """

    round: int
    state: ServerState
    clients: int | None
    clipped: float | None
    clip: float | None
    snr: float | None
    refused: tuple[int, ...]
    metrics: dict[str, float]
    seconds: float | None
    spent: Callable[[], PrivacyClaim | None]
    quoted: Callable[[], PrivacyClaim | None]
    over_clients: dict[str, float] = field(default_factory=dict)
    attack: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Without the state, and without anything that comes from private data."""
        measured = [f"{name} {value:.4g}" for name, value in self.metrics.items()]
        claim = "no claim" if self.claim is None else self.claim.short
        return f"RoundResult(round {self.round}, {', '.join([*measured, claim])})"

    @property
    def claim(self) -> PrivacyClaim | None:
        """What to quote if the training ends with this round, whoever ends it and why.

        An upper bound, found when somebody asks. `spent()` is what the rounds so far have cost: it
        is smaller, and holds if what was released does not decide when to end.
        """
        return self.quoted()

    @property
    def epsilon(self) -> float | None:
        """The number of that claim, which means nothing without it."""
        claim = self.claim
        return None if claim is None else claim.epsilon

    def numbers(self) -> dict[str, Any]:
        """For the metrics file; None for what was not let out."""
        spent = self.spent()
        return {
            "round": self.round,
            "clients": self.clients,
            "clipped": self.clipped,
            "snr": self.snr,
            "refused": None if self.clients is None else len(self.refused),
            "clip": self.clip,
            "epsilon": spent and spent.epsilon,
            "claim": spent and spent.context,
            **self.metrics,
            **self.over_clients,
            **self.attack,
            "seconds": self.seconds,
        }


def begin(
    plan: PrivacyPlan,
    streams: Streams,
    ledger: Ledger,
    state: ServerState,
    adversary: Adversary | None = None,
) -> Round | None:
    """Sample and charge the round after `state`; None at the end of the plan or of the budget.

    Clients that cheat, as `adversary` says, may join uninvited. Who was drawn is charged, and
    nobody else.

    Guarantee: the round is charged, durably, before any client works on it. An empty cohort is
    charged like any other. A round that is charged again draws a new cohort and new noise.
    """
    number = state.round + 1
    if number > plan.rounds:
        return None
    # sample
    local, attempt = plan.release.counted, ledger.attempt(number)
    turns = ledger.turns(state.round) if local else None
    drawn = plan.sampler.cohort(plan.population, number, streams.for_attempt(attempt), turns)
    ids = drawn if adversary is None else attacked_cohort(adversary, number, drawn)
    check_cohort(ids, plan.population)
    clip = plan.clip(state.moving, number)
    # charge
    try:
        ledger.charge(number, drawn if local else None)
    except BudgetExhausted:
        return None
    return Round(number, ids, state.params, clip, state.moving, streams, attempt)


def end(
    plan: PrivacyPlan,
    server: ServerOptimizer,
    ledger: Ledger,
    state: ServerState,
    round: Round,
    cohort: CohortSum,
    aggregate: Aggregate | None = None,
) -> RoundResult:
    """Add noise to the sum of a round's reports, divide it, and move the model and the clip.

    `aggregate`, where there is one, takes the place of the mean. The result has no metrics, and is
    for a `Gate` to let out.

    Guarantee: an empty cohort gets noise like any other. Refused reports change neither noise nor
    divisor. Where too few reports came to hand anything on, the model and the charge stay.
    """
    release, drawing = plan.release, round.streams.for_attempt(round.attempt)
    strength = cohort.strength
    # noise
    release.noise_(cohort.total, round.clip, round.number, drawing)
    # divide
    if aggregate is None or not cohort.weight:
        mean = cohort.total.div_(release.divisor(cohort.weight, plan.expected))
    else:
        mean = aggregate.of(cohort.updates)
    # step, and move what adapts
    after = replace(state, round=round.number)
    if cohort.enough and cohort.weight >= release.minimum:
        after = server.step(state, mean)
        moving = plan.move(
            state.moving, cohort.watched, state.params, after.params, round.number, drawing
        )
        after = replace(after, moving=moving)
    noise = release.noise_length(round.ids, round.clip, round.moving, len(mean))
    known = cohort.told or not release.randomises
    most = int(ledger.turns(round.number).max()) if release.counted else None
    return RoundResult(
        round=round.number,
        state=after,
        clients=cohort.clients,
        clipped=cohort.clipped / max(cohort.clients, 1) if cohort.told else None,
        clip=release.clip_of_updates(round.clip),
        snr=strength / noise if noise and known else None,
        refused=cohort.refused,
        metrics={},
        seconds=time.perf_counter() - round.began,
        spent=partial(plan.spent, round.number, most, ledger.extra_attempts),
        quoted=partial(plan.quoted, round.number, most, ledger.extra_attempts),
    )
