"""The execution mode and the chunk size of a training: by a rule, or by a race if asked for."""

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedveil.base.inputs import mapped, taken, values_of
from fedveil.base.platforms import one_thread
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.models.trial import goes_together
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.streams import Streams
from fedveil.training.cohort import Batch, CohortData, Draws, FullBatch
from fedveil.training.engines.side_by_side import data_of, random_contents
from fedveil.training.gradients.least_squares import uses_quadratics
from fedveil.training.gradients.linear_chains import linear_chain
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.work import ClientDpSgd, ClientSgd, ClientWork, SiteSum

MEMORY = 512
"""MiB per worker for the clients that are computed together."""

Trial = Callable[[int, int], float]
"""(clients, records of each) -> seconds per client and record of one local step."""

_LEAST, _MOST = 32, 4096
_WORK = 1 << 23  # multiplications in a chunk: enough to hide its overhead, few enough to share
_WIDE = 1 << 20
_LITTLE = 1 << 20
_WORTHWHILE = 4
_SIZES = ((2, 1), (2, 4), (8, 16), (32, 64))
_CLIENTS, _RECORDS = _SIZES[-1]
_LONG, _LONGEST = 0.2, 1.0
_CLEARLY = 4
_OVERHEAD, _CLIENT_OVERHEAD = 0.05, 0.002


def fitting_chunk(
    task: Task,
    data: FederatedData,
    work: ClientWork,
    mode: Mode,
    memory: int = MEMORY,
    cohort: float = math.inf,
    *,
    secure: bool = False,
) -> int:
    """The number of clients to sum together, at least 1.

    Vectorised: as many as fit `memory` MiB, or fewer where each has much to do. A client needs its
    padded records and six rows of parameters, two more for Adam.

    Looped: one client is in memory at a time and a chunk is only the unit of work. It has several
    clients if the model is wide, so that a sum takes long to return, or if they have little to do,
    but at most a quarter of `cohort`, the expected cohort size.

    The number is stored with the run and shown in its report. With `secure` noise it therefore
    follows from public numbers: `data.most_records` takes the place of the largest number of
    records that a client has, and a constant where that is not declared.
    """
    longest = (data.most_records or _RECORDS) if secure else int(data.sizes.max())
    if mode is Mode.LOOPED:
        light = _WORK // (task.size * (3 * work.records_per_round(longest) + 16))
        return int(max(1, min(max(light, min(8, task.size // _WIDE)), _MOST, cohort // 4)))
    width = sum(map(math.prod, values_of(data.record_shape)))
    adam = isinstance(work, ClientSgd | ClientDpSgd) and work.adam is not None
    numbers = (8 if adam else 6) * task.size + 3 * longest * width
    effort = 3 * multiplications(task, data) * work.records_per_round(longest) + 16 * task.size
    private = isinstance(work, ClientDpSgd | SiteSum)
    full = not private and not secure and work.records_per_step(longest) == longest
    if full and uses_quadratics(task, data):
        effort = task.size * (task.size * work.records_per_round(longest) // longest + 16)
    return max(1, min(_MOST, memory * 2**20 // (4 * numbers), max(_LEAST, _WORK // effort)))


def multiplications(task: Task, data: FederatedData) -> int:
    """The multiplications in one record's forward pass, at least `task.size`.

    A gradient takes three times as many. A chain of linear layers uses every weight once. Other
    modules are measured on one example, for which PyTorch loads its compiler: about a second.
    """
    flatten, layers = linear_chain(task)
    shape = data.record_shape
    if layers and not isinstance(shape, dict) and (flatten or len(shape) == 1):
        return task.size
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        one = mapped(torch.tensor, data.examples(1)[0])
        task.outputs(task.named(task.parameters.clone()), one)
    return max(task.size, counter.get_total_flops() // 2)


def mode_of(
    task: Task, data: FederatedData, work: ClientWork, memory: int, *, secure: bool = False
) -> Mode:
    """The execution mode by a rule from model, numbers of records and work.

    No time is measured. `memory` is in MiB. With `secure` noise the rule uses
    `FederatedData.longest` in place of the clients' numbers of records.

    | model | mode |
    |---|---|
    | a chain of linear layers of at most 2^20 parameters, on real numbers | vectorised |
    | any other, not recurrent, whose step takes at most 2^20 multiplications | vectorised |
    | one that vmap cannot compute, or of which `memory` holds fewer than 4 clients | looped |
    | all others | looped |

    A chain is batched algebra side by side. In any other model, a step of few multiplications is
    mostly overhead, which vmap shares between clients, while vmap makes the operations of longer
    steps slower. A step is that of a client with the median number of records.
    """
    layers = task.module.modules()
    if any(isinstance(layer, nn.RNNBase | nn.RNNCellBase) for layer in layers):
        return Mode.LOOPED
    real = not isinstance(data.x, dict) and data.x.dtype.kind == "f"
    chain = real and bool(linear_chain(task)[1])
    usual = work.records_per_step(data.longest if secure else int(np.median(data.sizes)))
    short = task.size <= _WIDE if chain else multiplications(task, data) * usual <= _LITTLE
    fits = fitting_chunk(task, data, work, Mode.VECTORISED, memory, secure=secure)
    if not short or fits < _WORTHWHILE:
        return Mode.LOOPED
    examples, targets = data.examples(2)
    few = np.arange(2) % len(targets)
    x, y = mapped(torch.tensor, taken(examples, few)), torch.from_numpy(targets[few])
    return Mode.VECTORISED if chain or goes_together(task, x, y) else Mode.LOOPED


def timings(task: Task, data: FederatedData, work: ClientWork, memory: int) -> dict[Mode, float]:
    """Measure the seconds per client of one local step, of 64 records at most, in each mode.

    Looped is always in the result. Vectorised is there if vmap has a rule for every operation and
    `memory` MiB hold at least four clients. Nothing is timed on clients' records: inputs are random
    or public test records. The result depends on the clients through their number and their median
    and largest numbers of records. Raises RuntimeError if the looped mode fails.
    """
    usual = work.records_per_step(int(np.median(data.sizes)))
    chunk = fitting_chunk(task, data, work, Mode.VECTORISED, memory)
    most = min(_CLIENTS, data.clients), min(_RECORDS, usual)
    modes = [Mode.VECTORISED] if chunk >= _WORTHWHILE else []
    with one_thread():
        x, y, sizes = random_contents(data, *most, torch.Generator().manual_seed(0))
        random = data_of(data, x, y, torch.full_like(sizes, most[1]))
        trials = {mode: _step_timer(task, random, work, mode) for mode in (*modes, Mode.LOOPED)}
        sizes = [(min(most[0], chunk, c), min(most[1], r)) for c, r in _SIZES]
        found = race(trials, list(dict.fromkeys(sizes)))
    return {mode: seconds * most[1] for mode, seconds in found.items()}


def race(trials: dict[Mode, Trial], sizes: list[tuple[int, int]]) -> dict[Mode, float]:
    """Run each mode's trial on growing sizes, and return its last result.

    Results are in seconds per client and record. `sizes` are pairs (clients, records of each),
    ascending. The first is always tried. The race ends when one mode is left, or before a size that
    would take the slowest of them more than about a second. A mode that has clearly lost leaves the
    race, but only once a step takes long enough for its overhead not to matter. A vectorised mode
    leaves it if vmap cannot compute the model. A RuntimeError of the looped mode is raised.
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
            seconds, ratio = found[mode] * clients * records, found[mode] / best
            hopeless = seconds > _CLIENT_OVERHEAD and ratio > 2 * sizes[-1][1] / records
            if (seconds > _OVERHEAD and ratio > _CLEARLY) or (mode is Mode.LOOPED and hopeless):
                del running[mode]
        if len(running) == 1 or number + 1 == len(sizes):
            break
        more = sizes[number + 1][0] * sizes[number + 1][1]
        if more * max(found[mode] for mode in running) > _LONGEST:
            break
    return found


def _step_timer(task: Task, data: FederatedData, work: ClientWork, mode: Mode) -> Trial:
    """A trial, which times a local step of (clients, records) in `mode` on `data`.

    It takes the first clients and their first records. All clients of `data` have equally many
    records. The trial returns seconds per client and record, the best of three steps, or of fewer
    if they take long.
    """
    longest = int(data.sizes[0])
    private = isinstance(work, ClientDpSgd | SiteSum)
    full = not private and work.records_per_step(longest) == longest
    gradients = gradients_of(task, mode, data, full_batches=full, private=private)
    loaded = False

    def seconds(clients: int, records: int) -> float:
        nonlocal loaded
        if not loaded:  # the first step of a process loads what it needs, which may take seconds
            loaded = True
            seconds(clients, records)
        cohort = CohortData(data, np.arange(clients))
        trajectory = gradients.trajectory(task.parameters, cohort, spanned=not private)
        moved = torch.zeros(clients, trajectory.width)
        draws = Draws(Streams(0), 0, cohort.ids, 0)
        if records == longest:
            batch: Batch = FullBatch(cohort.sizes, longest, draws)
        else:
            index = torch.arange(records).expand(clients, -1)
            batch = Batch(index, torch.ones(clients, records), draws)
        best, began = math.inf, time.perf_counter()
        for _ in range(3):
            before = time.perf_counter()
            if private:
                trajectory.clipped_sum(moved, batch, Clip(1.0))
            else:
                trajectory.mean_update(moved, batch)
            best = min(best, time.perf_counter() - before)
            if time.perf_counter() - began > _LONG:
                break
        return best / (clients * records)

    return seconds
