"""The execution mode of a training: by a rule, or, where that is asked for, by a race."""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from fedveil.base.inputs import mapped, taken
from fedveil.data.federated import Array, FederatedData
from fedveil.models.task import Task
from fedveil.models.trial import goes_together
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.streams import Streams
from fedveil.training.cohort import Batch, CohortData, Draws, FullBatch, tensors
from fedveil.training.engines.chunks import fitting_chunk, multiplications
from fedveil.training.engines.housekeeping import one_thread
from fedveil.training.gradients.linear_chains import linear_chain
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.work import ClientDpSgd, ClientWork

Trial = Callable[[int, int], float]
"""(clients, records of each) -> seconds per client and record of one local step."""

_SIZES = ((2, 1), (2, 4), (8, 16), (32, 64))
_CLIENTS, _RECORDS = _SIZES[-1]
_LONG = 0.2
_LONGEST = 1.0
_CLEARLY = 4
_OVERHEAD = 0.05
_A_CLIENTS = 0.002
_WORTHWHILE = 4
_LITTLE, _WIDE = 1 << 20, 1 << 20


def mode_of(task: Task, data: FederatedData, work: ClientWork, memory: int) -> Mode:
    """The mode by a rule of model, numbers of records and recipe: no clock has a part in it.

    | model | mode |
    |---|---|
    | a chain of linear layers of at most 2^20 parameters, on real numbers | vectorised |
    | any other, not recurrent, whose step takes at most 2^20 multiplications | vectorised |
    | one that vmap cannot compute, or of which `memory` holds fewer than 4 clients | looped |
    | all others | looped |

    A chain is batched algebra side by side. Of anything else a step of few multiplications is all
    overhead, which vmap shares between clients; of longer steps it makes slower operations. A step
    is that of a client with the median number of records.
    """
    layers = task.module.modules()
    if any(isinstance(layer, nn.RNNBase | nn.RNNCellBase) for layer in layers):
        return Mode.LOOPED
    chain = (
        not isinstance(data.x, dict) and data.x.dtype.kind == "f" and bool(linear_chain(task)[1])
    )
    usual = work.records_per_step(int(np.median(data.sizes)))
    short = task.size <= _WIDE if chain else multiplications(task, data) * usual <= _LITTLE
    if not short or fitting_chunk(task, data, work, Mode.VECTORISED, memory) < _WORTHWHILE:
        return Mode.LOOPED
    examples, targets = data.examples(2)
    few = np.arange(2) % len(targets)
    x, y = tensors(taken(examples, few)), torch.from_numpy(targets[few])
    return Mode.VECTORISED if chain or goes_together(task, x, y) else Mode.LOOPED


def timings(task: Task, data: FederatedData, work: ClientWork, memory: int) -> dict[Mode, float]:
    """Seconds per client of one local step in each mode.

    A mode that is out of the question is absent: vectorised, if an operation has no rule for vmap
    or `memory` holds few clients.

    The records are made up or tested on: how long a step takes is written down with the run, so
    nothing about the clients but their usual number of records goes into it.
    """
    usual = work.records_per_step(int(np.median(data.sizes)))
    chunk = fitting_chunk(task, data, work, Mode.VECTORISED, memory)
    most = min(_CLIENTS, data.clients), min(_RECORDS, usual)
    modes = [Mode.VECTORISED] if chunk >= _WORTHWHILE else []
    with one_thread():
        made_up = _made_up(data, *most)
        trials = {mode: _trial(task, made_up, work, mode) for mode in (*modes, Mode.LOOPED)}
        sizes = [(min(most[0], chunk, c), min(most[1], r)) for c, r in _SIZES]
        found = raced(trials, list(dict.fromkeys(sizes)))
    return {mode: seconds * most[1] for mode, seconds in found.items()}


def raced(trials: dict[Mode, Trial], sizes: list[tuple[int, int]]) -> dict[Mode, float]:
    """What the trials say at the largest size, or at the largest that takes about a second.

    Sizes ascend. A mode that has clearly lost is not tried any further; but with little to do all
    of it is overhead, so that none has lost before a step takes a while. Looped, the overhead is
    a client's: with so many times more records, a record costs so many times less at best.
    """
    found: dict[Mode, float] = {}
    running = dict(trials)
    for number, (clients, records) in enumerate(sizes):
        for mode in list(running):
            try:
                found[mode] = running[mode](clients, records)
            except RuntimeError:  # vmap has no rule for one of the module's operations
                if mode is Mode.LOOPED:
                    raise
                del running[mode]
        best = min(found.values())
        for mode in list(running):
            taken_by = found[mode] * clients * records
            behind = found[mode] / best
            lost = taken_by > _OVERHEAD and behind > _CLEARLY
            if (
                mode is Mode.LOOPED
                and taken_by > _A_CLIENTS
                and behind > 2 * sizes[-1][1] / records
            ):
                lost = True
            if lost:
                del running[mode]
        if len(running) == 1 or number + 1 == len(sizes):
            break
        more = sizes[number + 1][0] * sizes[number + 1][1]
        if more * max(found[mode] for mode in running) > _LONGEST:
            break
    return found


def _trial(task: Task, made_up: FederatedData, work: ClientWork, mode: Mode) -> Trial:
    longest = int(made_up.sizes[0])
    private = isinstance(work, ClientDpSgd)
    whole = work.full_batches(longest)
    gradients = gradients_of(task, mode, made_up, full_batches=whole, private=private)
    loaded = False

    def seconds(clients: int, records: int) -> float:
        nonlocal loaded
        if not loaded:  # the first step of a process loads what it needs, which may take seconds
            loaded = True
            seconds(clients, records)
        cohort = CohortData(made_up, np.arange(clients))
        walk = gradients.trajectory(task.parameters, cohort, spanned=not private)
        moved, best, began = torch.zeros(clients, walk.width), float("inf"), time.perf_counter()
        batch = Batch(torch.arange(records).expand(clients, -1), torch.ones(clients, records))
        if records == longest:
            batch = FullBatch(cohort.sizes, longest)
        batch = batch.with_draws(Draws(Streams(0), 0, cohort.ids, 0))
        for _ in range(3):
            before = time.perf_counter()
            if private:
                walk.clipped_sum(moved, batch, Clip(1.0))
            else:
                walk.mean(moved, batch)
            best = min(best, time.perf_counter() - before)
            if time.perf_counter() - began > _LONG:
                break
        return best / (clients * records)

    return seconds


def _made_up(data: FederatedData, clients: int, records: int) -> FederatedData:
    """Records of the right shape that are no client's; whole numbers are those of test records."""
    number = clients * records

    def some(values: Array) -> Array:
        if values.dtype.kind != "f":  # whole numbers that a module can take, such as lengths
            return values[np.arange(number) % len(values)]
        drawn = torch.randn((number, *values.shape[1:]), generator=torch.Generator().manual_seed(0))
        return drawn.numpy().astype(values.dtype, copy=False)

    x = mapped(some, data.examples(number)[0])
    y = np.zeros((number, *data.y.shape[1:]), dtype=data.y.dtype)
    offsets = np.arange(clients + 1, dtype=np.int64) * records
    return FederatedData(x, y, offsets, taken(x, slice(1)), y[:1], data.classes)
