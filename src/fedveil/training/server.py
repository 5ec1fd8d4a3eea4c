"""The server: it accepts reports, bounds them again, and takes a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from fedveil.errors import BadInput
from fedveil.privacy.clipping import Bound
from fedveil.privacy.rows import row_norms


class Weights(StrEnum):
    """How clients count in the mean."""

    UNIFORM = "uniform"
    EXAMPLES = "examples"


@dataclass(frozen=True)
class Accepted:
    """Reports as the server takes them: bounded rows [K, P], and which ones it refused."""

    rows: torch.Tensor
    clipped: torch.Tensor
    refused: torch.Tensor


def accept(
    reports: torch.Tensor | Sequence[torch.Tensor], size: int, bound: Bound | None
) -> Accepted:
    """Turn what clients sent into rows that are finite, of the right length, and bounded.

    A matrix of reports is changed in place: from here on it is the server's.

    Guarantee: whatever a client sends, its row has an L2 norm of at most the bound, so that it
    moves the sum by at most the bound's sensitivity. Clients are not trusted to have bounded.

    | edge | behaviour |
    |---|---|
    | NaN or infinity in a report | the row is zero, refused[k] is true |
    | report of another length or shape | the row is zero, refused[k] is true |
    | report 1000 times too long | scaled to the bound, clipped[k] is true |
    | no bound | only refusals apply |
    | no reports | no rows |
    """
    rows = _rows(reports, size)
    norms = row_norms(rows) if bound is None else row_norms(rows, bound.norm)
    refused = ~torch.isfinite(norms)
    if bool(refused.any()):
        rows[refused] = 0.0
        norms = torch.where(refused, 0.0, norms)
    if bound is None:
        return Accepted(rows, torch.zeros_like(refused), refused)
    return Accepted(rows, bound.apply_(rows, norms).clipped, refused)


def _rows(reports: torch.Tensor | Sequence[torch.Tensor], size: int) -> torch.Tensor:
    if isinstance(reports, torch.Tensor):
        if reports.shape[1:] == (size,) and reports.is_floating_point():
            return reports.to(torch.float32)
        reports = list(reports)
    return _stack(reports, size)


def _stack(reports: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """One row per report; a report of the wrong shape becomes a row of NaN, to be refused."""
    rows = torch.full((len(reports), size), math.nan)
    for row, report in zip(rows, reports, strict=True):
        if report.shape == (size,) and report.dtype.is_floating_point:
            row.copy_(report)
    return rows


@dataclass(frozen=True)
class ServerState:
    """Everything a run is after `round` rounds.

    `params` [P] is the model, `memory` what the optimiser remembers, `moving` the bound's value or
    the ranges of the next round. How often clients took part is the ledger's to know.
    """

    round: int
    params: torch.Tensor
    memory: dict[str, torch.Tensor]
    moving: torch.Tensor


@dataclass(frozen=True)
class SgdServer:
    """params += lr x velocity, velocity = momentum x velocity + mean update."""

    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        if not 0 <= self.momentum < 1:
            raise BadInput(f"server.momentum is {self.momentum}: a number in [0, 1) is needed")

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """One round's step along the mean update (float64 [P])."""
        memory = state.memory
        if self.momentum:
            mean = mean + self.momentum * memory.get("velocity", torch.zeros_like(mean))
            memory = {"velocity": mean}
        return _moved(state, self.lr * mean, memory)


@dataclass(frozen=True)
class AdamServer:
    """Adam on the mean update, seen as minus a gradient (Reddi et al. 2021)."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    floor: float = 1e-3

    def __post_init__(self) -> None:
        _check_rate(self.lr)

    def step(self, state: ServerState, mean: torch.Tensor) -> ServerState:
        """One round's step along the mean update (float64 [P])."""
        zero = torch.zeros_like(mean)
        first = self.beta1 * state.memory.get("first", zero) + (1 - self.beta1) * mean
        second = self.beta2 * state.memory.get("second", zero) + (1 - self.beta2) * mean**2
        rounds = state.round + 1
        unbiased = first / (1 - self.beta1**rounds)
        scale = (second / (1 - self.beta2**rounds)).sqrt() + self.floor
        return _moved(state, self.lr * unbiased / scale, {"first": first, "second": second})


ServerOptimizer = SgdServer | AdamServer


def _moved(state: ServerState, by: torch.Tensor, memory: dict[str, torch.Tensor]) -> ServerState:
    params = (state.params.to(torch.float64) + by).to(torch.float32)
    return replace(state, round=state.round + 1, params=params, memory=memory)


def _check_rate(lr: float) -> None:
    if not (lr > 0 and math.isfinite(lr)):
        raise BadInput(f"server.lr is {lr}: a positive number is needed")
