"""The round, on one screen."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedveil.errors import BudgetExhausted
from fedveil.privacy.claims import PrivacyClaim
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
    metrics: dict[str, float]
    seconds: float
    spent: Callable[[], PrivacyClaim | None]

    @property
    def claim(self) -> PrivacyClaim | None:
        """What all rounds up to this one have cost, from above; found when somebody asks."""
        return self.spent()

    @property
    def epsilon(self) -> float | None:
        """The number of that claim, which means nothing without it."""
        claim = self.claim
        return None if claim is None else claim.epsilon

    def numbers(self, *, diagnostics: bool = True) -> dict[str, Any]:
        """For the metrics file; without `diagnostics` nothing that clients' data tell."""
        private = {
            "clients": self.clients,
            "clipped": self.clipped,
            "snr": self.snr,
            "refused": len(self.refused),
        }
        claim = self.claim
        return {
            "round": self.round,
            **(private if diagnostics else dict.fromkeys(private)),
            "bound": self.bound,
            "epsilon": claim and claim.epsilon,
            "claim": claim and claim.told,
            **self.metrics,
            "seconds": self.seconds,
        }


class Course:
    """A training on its way: `ask` begins a round, `take` ends it with what the cohort came to.

    Guarantee: a round is charged, durably, before any client works on it. An empty cohort is
    charged and noised like any other; refused reports change neither charge, noise nor divisor.
    """

    def __init__(
        self,
        state: ServerState,
        plan: PrivacyPlan,
        server: ServerOptimizer,
        ledger: Ledger,
        streams: Streams,
        measure: Callable[[ServerState], dict[str, float]],
    ) -> None:
        self.state, self.streams = state, streams
        self._plan, self._server, self._ledger, self._measure = plan, server, ledger, measure
        self._most = int(ledger.turns(state.round).max()) if plan.counted else 0

    def ask(self) -> npt.NDArray[np.int64] | None:
        """Who works in the next round, which is charged; None at the end of plan or budget."""
        plan, ledger, before = self._plan, self._ledger, self.state.round
        if before >= plan.rounds:
            return None
        self._began = time.perf_counter()
        turns = ledger.turns(before) if plan.counted else None
        self._ids = plan.sampler.cohort(plan.population, before + 1, self.streams, turns)
        if turns is not None:
            self._most = max(self._most, int(turns[self._ids].max(initial=-1)) + 1)
        try:
            ledger.charge(before + 1, self._ids if plan.counted else None)
        except BudgetExhausted:
            return None
        return self._ids

    def take(self, cohort: CohortSum) -> RoundResult:
        """Noise, step and measure."""
        plan, before, ids = self._plan, self.state, self._ids
        number = before.round + 1
        bound, strength = plan.bound(before.moving, number), cohort.strength
        plan.release_(cohort.total, bound, number, self.streams)
        mean = cohort.total.div_(plan.divisor(cohort.weight))
        if cohort.weight < plan.least_reports:
            mean = torch.zeros_like(mean)
        state = self._server.step(before, mean)
        moving = plan.move(
            before.moving, cohort.watched, before.params, state.params, number, self.streams
        )
        self.state = state = replace(state, moving=moving)
        noise = plan.noise_length(ids, before.moving, number, len(mean))
        turns = self._most if plan.counted else None
        return RoundResult(
            round=number,
            state=state,
            clients=cohort.clients,
            clipped=cohort.clipped / max(cohort.clients, 1),
            bound=_on_updates(plan, bound),
            snr=strength / noise if noise else None,
            refused=cohort.refused,
            metrics=self._measure(state),
            seconds=time.perf_counter() - self._began,
            spent=partial(plan.told, number, turns, self._ledger.again),
        )


def rounds(course: Course, engine: Engine) -> Generator[RoundResult, None, None]:
    """Train to the end of the plan, one result per round; stops at the budget."""
    while (ids := course.ask()) is not None:
        yield course.take(engine.run(course.state.round + 1, ids, course.state))


def _on_updates(plan: PrivacyPlan, bound: Bound | None) -> float | None:
    """The bound that `clipped` is about; DP-SGD bounds examples, of which no share is kept."""
    if bound is None or plan.where is Where.TRAINING:
        return None
    return bound.gradient or bound.value
