"""The round, on one screen."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedveil.errors import BudgetExhausted
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.randomness import Streams
from fedveil.training.engines.local import CohortSum
from fedveil.training.server import ServerOptimizer, ServerState


class Engine(Protocol):
    """Where train, bound and sum happen."""

    def run(self, round: int, ids: npt.NDArray[np.int64], params: torch.Tensor) -> CohortSum:
        """The sum over the cohort `ids` of `round`, starting from `params` [P]."""
        ...


@dataclass(frozen=True)
class RoundResult:
    """One finished round. `clipped` and `snr` come from private data: diagnostics, not releases.

    `snr` is the length of the sum over the expected length of its noise, None without noise.
    `metrics` is empty in rounds that were not measured.
    """

    round: int
    state: ServerState
    clients: int
    clipped: float
    snr: float | None
    refused: tuple[int, ...]
    epsilon: float | None
    metrics: dict[str, float]
    seconds: float

    def numbers(self) -> dict[str, Any]:
        """What goes into the metrics file."""
        return {
            "round": self.round,
            "clients": self.clients,
            "clipped": self.clipped,
            "snr": self.snr,
            "refused": len(self.refused),
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
) -> Iterator[RoundResult]:
    """Train from `state` to the end of the plan, one result per round; stops at the budget.

    Guarantee: a round is charged, durably, before any client works on it. An empty cohort is
    charged and noised like any other; refused reports change neither charge, noise nor divisor.
    """
    spent = plan.spent
    while state.round < plan.rounds:
        began = time.perf_counter()
        number = state.round + 1
        ids = plan.sampler.cohort(plan.population, number, streams)
        try:
            ledger.charge(number)
        except BudgetExhausted:
            return
        cohort = engine.run(number, ids, state.params)
        noised = plan.release(cohort.total, number, streams)
        divisor = plan.divisor if plan.private else max(cohort.weight, 1.0)
        state = server.step(state, noised / divisor)
        yield RoundResult(
            round=number,
            state=state,
            clients=cohort.clients,
            clipped=cohort.clipped / max(cohort.clients, 1),
            snr=_snr(cohort.total, plan.noise_std),
            refused=cohort.refused,
            epsilon=spent[number],
            metrics=measure(state),
            seconds=time.perf_counter() - began,
        )


def _snr(total: torch.Tensor, std: float) -> float | None:
    if std == 0:
        return None
    return float(total.norm()) / (std * math.sqrt(len(total)))
