"""Metrics of the global model: on the test split, across clients, and per owner of records.

Everything is computed in batches of at most `BATCH` records, with one thread and without autograd.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, mapped, taken
from fedveil.base.platforms import one_thread
from fedveil.data.federated import Array, FederatedData
from fedveil.data.provenance import PUBLIC, by_record
from fedveil.models.memory import is_plain_function
from fedveil.models.metrics import (
    OVER_CLIENTS,
    Measurements,
    Metric,
    is_of_numbers,
    why_unmeasurable,
)
from fedveil.models.task import Task
from fedveil.privacy.priced_metrics import LOSS

BATCH = 1000
_OUTPUTS = 1 << 24

MOST_KEPT = 1 << 30
"""Bytes of outputs and targets of a test split that metrics may keep."""

_FEW = 32

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchMetrics:
    """Sums and arrays from one batch of the test split, from which metrics are computed.

    A metric is either in `sums` or in `statistics`.

    Attributes:
        records: Number of records.
        sums: By name, the sum over the records of the loss and of each metric that is a mean over
            records.
        statistics: By name, the arrays that any other metric keeps of the records
            (`Metric.statistics`).
    """

    records: int
    sums: dict[str, float]
    statistics: dict[str, tuple[npt.NDArray[np.generic], ...]]


def evaluate(
    task: Task, params: torch.Tensor, data: FederatedData, batch: int = BATCH
) -> dict[str, float]:
    """Loss and metrics over the test split, by name, means summed in float64.

    {} without a test split. `batch` is the largest number of records measured at once. Raises
    BadInput if a metric would keep too much of the split (`check_kept`).
    """
    if any(isinstance(metric, Metric) for metric in task.measures.values()):
        check_kept(task, data)
    with one_thread():
        parts = evaluation_batches(data, batch)
        return combine_metrics(task, [measure_batch(task, params, data, part) for part in parts])


def evaluation_batches(data: FederatedData, batch: int = BATCH) -> list[slice]:
    """The test split in slices of `batch` records, fewer where a record has many outputs.

    The last slice may reach beyond the end. [] without a test split.
    """
    batch = max(1, min(batch, _OUTPUTS // math.prod(data.target.output_shape)))
    return [slice(a, a + batch) for a in range(0, len(data.test_y), batch)]


def measure_batch(
    task: Task, params: torch.Tensor, data: FederatedData, batch: slice
) -> BatchMetrics:
    """Measure a model with parameters `params` [P] on the test records in the slice `batch`.

    The result is one of the batches that `combine_metrics` takes.
    """
    measured = _measure(task, params, data.test_x, data.test_y, batch)
    sums = {name: float(each.double().sum()) for name, each in measured.per_example.items()}
    return BatchMetrics(len(data.test_y[batch]), sums, measured.batch_statistics)


def combine_metrics(task: Task, batches: Sequence[BatchMetrics]) -> dict[str, float]:
    """The values of the loss and the metrics over all batches, by name, in the task's order.

    {} without batches.
    """
    metrics: dict[str, float] = {}
    if not batches:
        return metrics
    records = sum(batch.records for batch in batches)
    for name in ("loss", *task.measures):
        if name in batches[0].sums:
            metrics[name] = sum(batch.sums[name] for batch in batches) / records
        else:
            arrays = zip(*(batch.statistics[name] for batch in batches), strict=True)
            metrics[name] = task.value_of(name, [np.concatenate(parts) for parts in arrays])
    return metrics


def check_measurable(task: Task, data: FederatedData) -> None:
    """Raise BadInput for a metric that has no value on this test split, or keeps too much of it.

    Without a test split nothing is refused.
    """
    if not len(data.test_y):
        return
    for name, metric in task.measures.items():
        reason = why_unmeasurable(metric, data.classes, data.test_y)
        if reason:
            raise BadInput(f"metric {name!r} {reason}: omit it")
    if any(isinstance(metric, Metric) for metric in task.measures.values()):
        check_kept(task, data)


def check_kept(task: Task, data: FederatedData) -> None:
    """Raise BadInput for a metric that would keep more than `MOST_KEPT` bytes of the test split.

    The bytes per record are estimated on the first records, less the bytes that a single record
    takes: arrays of sums are as long for one record as for many. With fewer than two test records
    nothing is refused.
    """
    few = min(_FEW, len(data.test_y))
    if few < 2:
        return
    one, many = (
        _measure(task, task.parameters, data.test_x, data.test_y, slice(n)).batch_statistics
        for n in (1, few)
    )
    for name in one:
        more = sum(a.nbytes for a in many[name]) - sum(a.nbytes for a in one[name])
        whole = more // (few - 1) * len(data.test_y)
        if whole > MOST_KEPT:
            raise BadInput(
                f"metric {name!r} would keep {whole / 2**30:.3g} GiB of the test split's "
                f"{len(data.test_y):,} records, and may keep {MOST_KEPT / 2**30:.3g} GiB: hold "
                "fewer back, or omit it"
            )


def _measure(
    task: Task, params: torch.Tensor, x: Inputs[Array], y: Array, rows: slice | Rows
) -> Measurements:
    """Measure a model of parameters `params` on the records `rows` of x and y, without autograd."""
    with torch.inference_mode():
        here = mapped(torch.tensor, taken(x, rows))
        return task.measure_batch(params, here, torch.tensor(y[rows]))


@dataclass(frozen=True)
class ClientSums:
    """Sums of the loss and of metrics over a slice of the clients' records, client by client.

    Attributes:
        first: The client of the slice's first record.
        sums_by_client: By name, "loss" among them, one sum for each client from `first` on that has
            records in the slice.
    """

    first: int
    sums_by_client: dict[str, npt.NDArray[np.float64]]


def over_clients(task: Task, params: torch.Tensor, data: FederatedData) -> dict[str, float]:
    """Loss and metrics across clients, on their own records, in the form of `client_spread`.

    Computed from private data in the clear: a diagnostic of simulations, not a release. Call it
    only where the user asked for it and noise is seeded.
    """
    with one_thread():
        slices = record_slices(data)
        return client_spread(data, (measure_clients(task, params, data, part) for part in slices))


def record_slices(data: FederatedData, batch: int = BATCH) -> list[slice]:
    """Slices of `batch` records that cover all clients' records.

    A slice may span several clients.
    """
    return [slice(a, min(a + batch, data.records)) for a in range(0, data.records, batch)]


def measure_clients(
    task: Task, params: torch.Tensor, data: FederatedData, piece: slice
) -> ClientSums:
    """The sums of the loss and of each metric over the clients' records in the slice `piece`.

    One sum for each client. Metrics that are not means over records are left out.
    """
    each = _measure(task, params, data.x, data.y, piece).per_example
    first, last = np.searchsorted(data.offsets, [piece.start, piece.stop - 1], side="right") - 1
    begins = np.maximum(data.offsets[first : last + 1] - piece.start, 0)
    sums = {name: np.add.reduceat(v.double().numpy(), begins) for name, v in each.items()}
    return ClientSums(int(first), sums)


def client_spread(data: FederatedData, pieces: Iterable[ClientSums]) -> dict[str, float]:
    """Means per client, averaged over all clients and over the extreme tenths of them.

    Of the loss and of each metric that is a mean over records. The keys are
    "clients/NAME/mean", "clients/NAME/lowest_decile" and "clients/NAME/highest_decile", with "loss"
    among the names. Every client counts once. A tenth is rounded up to whole clients. Other metrics
    are left out: they have no value for a client with few records. `pieces` must be the sums of all
    slices of `record_slices`, in any order.
    """
    totals: dict[str, npt.NDArray[np.float64]] = {}
    for piece in pieces:
        for name, sums in piece.sums_by_client.items():
            total = totals.setdefault(name, np.zeros(data.clients))
            total[piece.first : piece.first + len(sums)] += sums
    metrics = {}
    tenth = math.ceil(data.clients / 10)
    for name, total in totals.items():
        means = np.sort(total / data.sizes)
        metrics[f"{OVER_CLIENTS}{name}/mean"] = float(means.mean())
        metrics[f"{OVER_CLIENTS}{name}/lowest_decile"] = float(means[:tenth].mean())
        metrics[f"{OVER_CLIENTS}{name}/highest_decile"] = float(means[-tenth:].mean())
    return metrics


@dataclass(frozen=True, eq=False)
class Owners:
    """Records in the order of their owners, on which priced metrics are measured.

    Attributes:
        x: An array that holds the records, in any order.
        y: An array that holds the targets, in the same order.
        record_rows: Indices of the records in `x` and `y`, owner by owner.
        offsets: Owner k has `record_rows[offsets[k]:offsets[k + 1]]`.
        of_clients: True if the owners are clients of the training. If False, nobody trains on the
            records.
        single_records: True if every record counts as an owner, since it is unknown which records
            belong to the same person.
    """

    x: Inputs[Array]
    y: Array
    record_rows: Rows
    offsets: Rows
    of_clients: bool
    single_records: bool = False

    def __len__(self) -> int:
        """The number of owners."""
        return len(self.offsets) - 1


def owners_to_measure(data: FederatedData) -> Owners:
    """The owners on whose records priced metrics are measured, each with at least one record.

    Held-out owners where there are any. Otherwise the clients: on their own test records if the
    test records are theirs, else on all of their records.

    | edge | behaviour |
    |---|---|
    | held-out owners, and also test records of clients or public ones | held-out owners alone |
    | all test records are public | BadInput: nothing has to be paid for |
    | no held-out owners, and clients' records are at their sites | BadInput |
    """
    owner = data.owners_of_test
    if len(owner) and (owner == PUBLIC).all():
        raise BadInput(
            "evaluate.epsilon is given and the test records are public: there is nothing to "
            "protect; omit it"
        )
    held_out = data.held_out_owners > 0
    if data.elsewhere and not held_out:
        raise BadInput(
            "evaluate.epsilon would measure clients whose records are at their sites, which count "
            "what they release themselves: give the server test records of held-out owners, or "
            "omit it"
        )
    if len(owner):
        if held_out:
            return held_out_owners(data)
        return _owners_of_rows(data, np.flatnonzero(owner >= 0), of_clients=True)
    sizes = data.sizes[data.sizes > 0]
    offsets = np.cumsum([0, *sizes], dtype=np.int64)
    return Owners(data.x, data.y, np.arange(len(data.y)), offsets, of_clients=True)


def held_out_owners(data: FederatedData) -> Owners:
    """The owners who are held out of the training, with their test records. There may be none."""
    return _owners_of_rows(data, np.flatnonzero(data.owners_of_test < PUBLIC), of_clients=False)


def _owners_of_rows(data: FederatedData, rows: Rows, *, of_clients: bool) -> Owners:
    """The owners of the test records `rows`, which are clients or held out."""
    owner = data.owners_of_test
    rows = rows[np.argsort(owner[rows], kind="stable")]
    begins = np.flatnonzero(np.diff(owner[rows], prepend=PUBLIC))
    offsets = np.append(begins, len(rows))
    alone = not of_clients and by_record(owner)
    return Owners(data.test_x, data.test_y, rows, offsets, of_clients, single_records=alone)


def priced_names(task: Task) -> tuple[str, ...]:
    """Names of the metrics measured at a price: the task's metrics, then the loss.

    | edge | behaviour |
    |---|---|
    | a metric that is no mean over records of numbers from 0 to 1 | BadInput |
    | a metric that is a function of the user's | BadInput: it could remember an owner's records |
    | a model or loss that cannot be captured | BadInput: so could it |
    """
    if task.forks:
        raise BadInput(
            f"evaluate.epsilon is given and the model or its loss cannot be captured "
            f"({task.forks}), so it might remember an owner's records: omit it"
        )
    for name, measure in task.measures.items():
        if not isinstance(measure, Metric) and not is_plain_function(measure):
            raise BadInput(
                f"evaluate.epsilon is given and metric {name!r} is a function of your own, which "
                "might remember an owner's records: leave one of them out"
            )
        if isinstance(measure, Metric) or is_of_numbers(measure):
            raise BadInput(
                f"evaluate.epsilon pays for means over records of numbers from 0 to 1, and metric "
                f"{name!r} is not one: omit it (evaluate.metrics)"
            )
    return (*task.measures, LOSS)


def owner_means(
    task: Task, params: torch.Tensor, owners: Owners, names: Sequence[str], loss_clip: float
) -> torch.Tensor:
    """The mean over each owner's records of each metric, float64 [owners, metrics], in [0, 1].

    Columns are in the order of `names`. Losses are divided by `loss_clip` before the mean.

    Guarantee: a row depends on its owner's records and on nothing else, to the last bit. Each owner
    is computed alone, whatever a metric does with the records of a batch.

    | edge, for one record | its value |
    |---|---|
    | a loss above `loss_clip`, or NaN | 1 |
    | a loss below 0 | 0 |
    | another metric that is NaN | 0 |
    """
    means = torch.zeros(len(owners), len(names), dtype=torch.float64)
    with one_thread():
        for k, (start, stop) in enumerate(pairwise(owners.offsets.tolist())):
            values = []
            for a in range(start, stop, BATCH):
                rows = owners.record_rows[a : min(a + BATCH, stop)]
                each = _measure(task, params, owners.x, owners.y, rows).per_example
                columns = [_clamped(name, each[name], loss_clip) for name in names]
                values.append(torch.stack(columns, dim=1))
            means[k] = torch.cat(values).mean(dim=0)
    return means


def _clamped(name: str, values: torch.Tensor, loss_clip: float) -> torch.Tensor:
    """The values of a metric as numbers in [0, 1], float64.

    Losses are divided by `loss_clip` first. NaN becomes 1 in a loss and 0 in any other metric.
    """
    values = values.to(torch.float64)
    if name == LOSS:
        return (values / loss_clip).nan_to_num(nan=1.0).clamp(0.0, 1.0)
    return values.nan_to_num(nan=0.0).clamp(0.0, 1.0)
