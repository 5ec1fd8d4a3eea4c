"""What runs on a cluster's nodes: a parcel is opened once per process, and then computed with."""

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.privacy.channel import Round
from fedveil.training.engines.housekeeping import LARGE_MODEL, keep_memory
from fedveil.training.engines.on_ray.parcel import Parcel
from fedveil.training.engines.serial import Serial
from fedveil.training.engines.tree import Branch, SumTree
from fedveil.training.evaluate import BatchMetrics, ClientSums, measure_batch, measure_clients
from fedveil.training.reports import CohortSum

Numbers = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
ClientReports = tuple[Numbers, tuple[Any, ...]]
"""A sum as it travels: its numbers, and the rest."""

_KEPT = 2


class FilesMissing(Exception):
    """A node does not see files that arrays are mapped from; they have to be sent."""


class _Opened:
    """The parcels that this process has opened last, by name."""

    things: dict[str, Any] = {}


def use(
    function: Callable[..., Any],
    name: str,
    parcel: list[Any],
    arrays: Mapping[int, Any],
    *given: Any,
) -> Any:
    """`function` of what is in the parcel `name` and of what is given.

    `parcel` holds a reference to it, `arrays` those to arrays of it whose files are not to be seen
    everywhere. They are followed only where the parcel is not open yet.
    """
    if name not in _Opened.things:
        while len(_Opened.things) >= _KEPT:
            _Opened.things.pop(next(iter(_Opened.things)))
        _Opened.things[name] = _opened(parcel, arrays)
    return function(_Opened.things[name], *given)


def _opened(where: list[Any], arrays: Mapping[int, Any]) -> Any:
    import ray

    torch.set_num_threads(1)
    parcel: Parcel = ray.get(where[0])
    missing = parcel.missing()
    if not set(missing) <= set(arrays):
        raise FilesMissing
    thing = parcel.opened({k: ray.get(arrays[k]) for k in missing})
    if isinstance(thing, Serial):
        keep_memory(thing.job.task.size)
    gc.collect()
    gc.freeze()
    return thing


def chunks_sum(
    engine: Serial, start: Numbers, everyone: Ids, round: Round, chunks: Sequence[Ids]
) -> ClientReports:
    """The sum of a few chunks in a row, a branch of the tree."""
    job, tree = engine.job, SumTree(engine.job.zero)
    round = replace(round, start=torch.tensor(start), ids=everyone)
    for ids in chunks:
        total = job.zero()
        engine.add_chunk_(total, round, ids)
        if len(chunks) > 1:
            tree.add_(Branch(total))
        if job.task.size > LARGE_MODEL:
            gc.collect()  # a few forgotten rows would be most of the memory
    return _sent(total if len(chunks) == 1 else tree.total())


def _sent(total: CohortSum) -> ClientReports:
    return total.whole.numpy(), total.rest


def added(size: int, noisy: bool, keep: bool, *parts: ClientReports) -> ClientReports:
    """The sums of a few branches in a row, as one."""
    numbers = torch.zeros(len(parts[0][0]), dtype=torch.float64)
    total = CohortSum.over(numbers, size, noisy, keep)
    for part in parts:
        total.add_(received(part, size, noisy))
    return _sent(total)


def received(sent: ClientReports, size: int, noisy: bool) -> CohortSum:
    """A sum that has travelled, where it was put: to be read and not changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch knows no arrays that are only read
        numbers = torch.from_numpy(sent[0])
    return CohortSum.over(numbers, size, noisy).with_rest(sent[1])


def batch_measure(engine: Serial, params: Numbers, batch: slice) -> BatchMetrics:
    """What a batch of the test split comes to."""
    return measure_batch(engine.job.task, torch.tensor(params), engine.job.data, batch)


def clients_measure(engine: Serial, params: Numbers, piece: slice) -> ClientSums:
    """What a piece of the clients' records comes to."""
    return measure_clients(engine.job.task, torch.tensor(params), engine.job.data, piece)
