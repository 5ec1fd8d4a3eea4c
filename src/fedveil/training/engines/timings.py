"""Which execution mode is faster for a training: measured once, before it begins."""

import time
from contextlib import suppress

import numpy as np
import torch

from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip
from fedveil.training.batches import Whole
from fedveil.training.cohort import CohortData
from fedveil.training.dp_sgd import ClientDpSgd
from fedveil.training.engines.chunks import fitting_chunk
from fedveil.training.engines.housekeeping import one_thread
from fedveil.training.gradients.choice import Mode, gradients_of
from fedveil.training.work import ClientWork

_CLIENTS = 32
_RECORDS = 64
_LONG = 0.5
_WORTHWHILE = 4


def timings(task: Task, data: FederatedData, work: ClientWork, memory: int) -> dict[Mode, float]:
    """Seconds per client of one local step in each mode; one that is out of the question is absent.

    Vectorised is when a module has an operation without a schedule, or `memory` holds few clients.

    The records are made up: how long a step takes is written down with the run, so nothing about
    the clients but their usual number of records goes into it.
    """
    with one_thread():
        found: dict[Mode, float] = {}
        if fitting_chunk(task, data, work, Mode.VECTORISED, memory) >= _WORTHWHILE:
            with suppress(RuntimeError):  # vmap has no rule for one of the module's operations
                found[Mode.VECTORISED] = _seconds(task, data, work, Mode.VECTORISED, memory)
        return {**found, Mode.LOOPED: _seconds(task, data, work, Mode.LOOPED, memory)}


def _seconds(task: Task, data: FederatedData, work: ClientWork, mode: Mode, memory: int) -> float:
    clients = min(_CLIENTS, data.clients, fitting_chunk(task, data, work, mode, memory))
    records = min(_RECORDS, work.at_once(int(np.median(data.sizes))))
    made_up = _made_up(data, clients, records)
    cohort, batch = CohortData(made_up, np.arange(clients)), Whole(made_up.sizes, records)
    gradients = gradients_of(task, mode, made_up, whole=work.whole(records))
    private = isinstance(work, ClientDpSgd)
    walk = gradients.walk(task.parameters, cohort, spanned=not private)

    def step(moved: torch.Tensor | None) -> torch.Tensor:
        if private:
            return walk.clipped_sum(moved, batch, Clip(1.0))
        return walk.mean(moved, batch)

    moved, best = step(None).mul_(-1e-3), float("inf")
    for _ in range(3):
        began = time.perf_counter()
        step(moved)
        best = min(best, time.perf_counter() - began)
        if best > _LONG:
            break
    return best / clients


def _made_up(data: FederatedData, clients: int, records: int) -> FederatedData:
    """Records of the right shape that are nobody's."""
    shape = (clients * records, *data.record_shape)
    x = np.zeros(shape, dtype=data.x.dtype)
    if data.x.dtype.kind == "f":
        x[:] = torch.randn(shape, generator=torch.Generator().manual_seed(0)).numpy()
    y = np.zeros(len(x), dtype=data.y.dtype)
    offsets = np.arange(clients + 1, dtype=np.int64) * records
    return FederatedData(x, y, offsets, x[:1], y[:1], data.classes)
