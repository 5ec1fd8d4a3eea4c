"""How a cohort is cut into chunks: fixed by the recipe and the data, never by the workers."""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedveil.base.inputs import values_of
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.training.cohort import tensors
from fedveil.training.gradients.least_squares import uses_quadratics
from fedveil.training.gradients.linear_chains import linear_chain
from fedveil.training.gradients.modes import Mode
from fedveil.training.work import ClientDpSgd, ClientSgd, ClientWork

MEMORY = 512
"""MiB for the clients that are computed together, per worker."""

_LEAST, _MOST = 32, 4096
_WORK = 1 << 23  # multiplications in a chunk: enough to hide its overhead, few enough to share
_WIDE = 1 << 20


def cut(
    ids: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], chunk: int
) -> list[npt.NDArray[np.int64]]:
    """Chunks of at most `chunk` clients of similar size, the largest first.

    Several chunks are a power of two, equally long, so that 2, 4 or 8 workers have equal shares.
    """
    if len(ids) == 0:
        return []
    count = -(-len(ids) // chunk)
    count = min(len(ids), 1 << (count - 1).bit_length())
    largest_first = ids[np.argsort(-sizes, kind="stable")]
    return [largest_first] if count == 1 else np.array_split(largest_first, count)


def fitting_chunk(
    task: Task,
    data: FederatedData,
    work: ClientWork,
    mode: Mode,
    memory: int = MEMORY,
    cohort: float = math.inf,
) -> int:
    """How many clients are summed together: what `memory` MiB hold, or less if it is enough work.

    Vectorised, a client needs its padded records and six rows of parameters, and two more for Adam.
    Looped, one client is in memory at a time and a chunk is only the unit in which work is handed
    out: several clients of a wide model, whose sum takes long to hand back, or with little to do;
    but never so many that a `cohort` of the expected size is fewer than four chunks.
    """
    longest = int(data.sizes.max())
    if mode is Mode.LOOPED:
        light = _WORK // (task.size * (3 * work.records_per_round(longest) + 16))
        return int(max(1, min(max(light, min(8, task.size // _WIDE)), _MOST, cohort // 4)))
    width = sum(map(math.prod, values_of(data.record_shape)))
    adam = isinstance(work, ClientSgd | ClientDpSgd) and work.adam is not None
    numbers = (8 if adam else 6) * task.size + 3 * longest * width
    effort = 3 * multiplications(task, data) * work.records_per_round(longest) + 16 * task.size
    if work.full_batches(longest) and uses_quadratics(task, data):
        effort = task.size * (task.size * work.records_per_round(longest) // longest + 16)
    return max(1, min(_MOST, memory * 2**20 // (4 * numbers), max(_LEAST, _WORK // effort)))


def multiplications(task: Task, data: FederatedData) -> int:
    """Of one record's forward pass; a gradient takes about three times as many.

    A chain of linear layers takes every weight once. Anything else is counted, for which PyTorch
    loads its compiler: about a second.
    """
    flatten, layers = linear_chain(task)
    shape = data.record_shape
    if layers and not isinstance(shape, dict) and (flatten or len(shape) == 1):
        return task.size
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        task.outputs(task.named(task.parameters.clone()), tensors(data.examples(1)[0]))
    return max(task.size, counter.get_total_flops() // 2)
