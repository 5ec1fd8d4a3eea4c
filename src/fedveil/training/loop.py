"""The round, on one screen."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedveil.errors import BudgetExhausted
from fedveil.privacy.clipping import Bound
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.plan import PrivacyPlan, Where
from fedveil.privacy.randomness import Streams
from fedveil.training.server import ServerOptimizer, ServerState
from fedveil.training.sums import CohortSum


class Engine(Protocol):
    """Where train, bound, randomise and sum happen."""

    def run(self, round: int, ids: npt.NDArray[np.int64], state: ServerState) -> CohortSum:
        """The sum over the cohort `ids` of `round`, starting from `state`."""
        ...


@dataclass(frozen=True)
class RoundResult:
    """One finished round. `clipped` and `snr` come from private data: diagnostics, not releases.

    `snr` is the length of the sum over the expected length of its noise, None without noise;
    `bound` the bound on updates or local gradients, None without one; `metrics` is empty in
    rounds that were not measured.
    """

    round: int
    state: ServerState
    clients: int
    clipped: float
    bound: float | None
    snr: float | None
    refused: tuple[int, ...]
    epsilon: float | None
    metrics: dict[str, float]
    seconds: float

    def numbers(self, *, diagnostics: bool = True) -> dict[str, Any]:
        """For the metrics file; without `diagnostics` nothing that clients' data tell."""
        private = {
            "clients": self.clients,
            "clipped": self.clipped,
            "snr": self.snr,
            "refused": len(self.refused),
        }
        return {
            "round": self.round,
            **(private if diagnostics else dict.fromkeys(private)),
            "bound": self.bound,
            "epsilon": self.epsilon,
            **self.metrics,
            "seconds": self.seconds,
        }


def rounds(
    state: ServerState,
    plan: PrivacyPlan,
    engine: Engine,
    server: ServerOptimizer,
    ledger: Ledger,
    streams: Streams,
    measure: Callable[[ServerState], dict[str, float]],
) -> Generator[RoundResult, None, None]:
    """Train from `state` to the end of the plan, one result per round; stops at the budget.

    Guarantee: a round is charged, durably, before any client works on it. An empty cohort is
    charged and noised like any other; refused reports change neither charge, noise nor divisor.
    """
    plan.spent(0)  # found once, before the first round: accounting stays off the hot path
    most = int(ledger.turns(state.round).max()) if plan.counted else 0
    while state.round < plan.rounds:
        began = time.perf_counter()
        number = state.round + 1
        turns = ledger.turns(state.round) if plan.counted else None
        ids = plan.sampler.cohort(plan.population, number, streams, turns)
        most = 0 if turns is None else max(most, int(turns[ids].max(initial=-1)) + 1)
        try:
            ledger.charge(number, ids if plan.counted else None)
        except BudgetExhausted:
            return
        cohort = engine.run(number, ids, state)
        bound, strength = plan.bound(state.moving, number), cohort.strength
        plan.release_(cohort.total, bound, number, streams)
        mean = cohort.total.div_(plan.divisor(cohort.weight))
        if cohort.weight < plan.least_reports:
            mean = torch.zeros_like(mean)
        before, state = state, server.step(state, mean)
        moving = plan.move(
            before.moving, cohort.watched, before.params, state.params, number, streams
        )
        state = replace(state, moving=moving)
        noise = plan.noise_length(ids, before.moving, number, len(mean))
        yield RoundResult(
            round=number,
            state=state,
            clients=cohort.clients,
            clipped=cohort.clipped / max(cohort.clients, 1),
            bound=_on_updates(plan, bound),
            snr=strength / noise if noise else None,
            refused=cohort.refused,
            epsilon=plan.spent(number, most if plan.counted else None, ledger.again),
            metrics=measure(state),
            seconds=time.perf_counter() - began,
        )


def _on_updates(plan: PrivacyPlan, bound: Bound | None) -> float | None:
    """The bound that `clipped` is about; DP-SGD bounds examples, of which no share is kept."""
    if bound is None or plan.where is Where.TRAINING:
        return None
    return bound.gradient or bound.value
