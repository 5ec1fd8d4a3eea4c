"""The round, on one screen: sample, charge, exchange with the clients, noise, step, measure."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedveil.errors import BudgetExhausted
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.sampling import check_cohort
from fedveil.training.adversary import Adversary, attacked_cohort
from fedveil.training.aggregates import Aggregate
from fedveil.training.server import ServerOptimizer, ServerState
from fedveil.training.sums import CohortSum

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ask:
    """What a round asks an engine for: the sum over the cohort `ids`, starting from `state`.

    `attempt` counts the times that the round was charged before.
    """

    round: int
    ids: Ids
    state: ServerState
    streams: Streams
    attempt: int = 0


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


class Leaving(Protocol):
    """What a round needs of a `Gate`."""

    def metrics(self, state: ServerState, ledger: Ledger, streams: Streams) -> dict[str, float]:
        """Numbers by name of the model after a round; none in rounds that are not measured."""
        ...

    def over_clients(self, state: ServerState) -> dict[str, float]:
        """The same across clients."""
        ...

    def result(self, result: RoundResult) -> RoundResult:
        """What of a round's result may be seen."""
        ...


Rounds = Generator[Ask | RoundResult, CohortSum | None, None]
"""Hands out an `Ask`, is sent the sum, hands out the result; and so on to the end."""


def rounds(
    plan: PrivacyPlan,
    server: ServerOptimizer,
    streams: Streams,
    gate: Leaving,
    ledger: Ledger,
    state: ServerState,
    aggregate: Aggregate | None = None,
    adversary: Adversary | None = None,
) -> Rounds:
    """Train to the end of the plan or of the budget, from `state`.

    `aggregate`, where there is one, takes the place of the mean. Clients that cheat, as `adversary`
    says, may join a round uninvited; who was drawn is charged, and nobody else.

    Guarantee: a round is charged, durably, before any client works on it. An empty cohort is
    charged and noised like any other; refused reports change neither charge, noise nor divisor.
    A round that is charged again draws a new cohort and new noise. All that is yielded beside the
    model has passed `gate`. Where too few reports came to
    hand anything on, the charge stays, and so does the model.
    """
    counted, release, expected = plan.release.counted, plan.release, plan.expected
    most = int(ledger.turns(state.round).max()) if counted else 0
    while state.round < plan.rounds:
        number, before, began = state.round + 1, state, time.perf_counter()
        # sample
        turns = ledger.turns(before.round) if counted else None
        attempt = ledger.attempt(number)
        drawing = streams.for_attempt(attempt)
        ids = drawn = plan.sampler.cohort(plan.population, number, drawing, turns)
        if adversary is not None:
            ids = attacked_cohort(adversary, number, drawn)
        check_cohort(ids, plan.population)
        clip = plan.clip(before.moving, number)
        # charge
        try:
            ledger.charge(number, drawn if counted else None)
        except BudgetExhausted:
            return
        # train, clip, randomise (client_report); shuffle, accept, sum (server_sum): exchange.py
        cohort = yield Ask(number, ids, before, drawing, attempt)
        if cohort is None:
            raise AssertionError("a round continues when it is sent the sum it asked for")
        signal = cohort.strength
        # noise
        release.noise_(cohort.total, clip, number, drawing)
        # step
        if aggregate is None or not cohort.weight:
            mean = cohort.total.div_(release.divisor(cohort.weight, expected))
        else:
            mean = aggregate.of(cohort.updates)
        state = replace(before, round=number)
        if cohort.enough and cohort.weight >= release.minimum:
            state = server.step(before, mean)
            moving = plan.move(
                before.moving, cohort.watched, before.params, state.params, number, drawing
            )
            state = replace(state, moving=moving)
        # measure
        if turns is not None:
            most = max(most, int(turns[drawn].max(initial=-1)) + 1)
        noise = release.noise_length(ids, clip, before.moving, len(mean))
        known = cohort.told or not release.randomises
        result = RoundResult(
            round=number,
            state=state,
            clients=cohort.clients,
            clipped=cohort.clipped / max(cohort.clients, 1) if cohort.told else None,
            clip=release.clip_of_updates(clip),
            snr=signal / noise if noise and known else None,
            refused=cohort.refused,
            metrics=gate.metrics(state, ledger, drawing),
            over_clients=gate.over_clients(state),
            seconds=time.perf_counter() - began,
            spent=partial(plan.spent, number, most if counted else None, ledger.extra_attempts),
            quoted=partial(plan.quoted, number, most if counted else None, ledger.extra_attempts),
            attack={} if adversary is None else cohort.cheated,
        )
        yield gate.result(result)


class Summing(Protocol):
    """As much of an engine as a round needs."""

    def run(self, round: int, ids: Ids, state: ServerState, attempt: int = 0) -> CohortSum: ...


def driven(course: Rounds, engine: Summing) -> Generator[RoundResult, None, None]:
    """One training on one engine: what each round asks for is computed, and its result told."""
    for ask in course:
        if not isinstance(ask, Ask):
            raise AssertionError("a round begins with what it asks for")
        result = course.send(engine.run(ask.round, ask.ids, ask.state, ask.attempt))
        if not isinstance(result, RoundResult):
            raise AssertionError("a round that was sent its sum has a result")
        yield result
