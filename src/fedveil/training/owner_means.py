"""How a model does on each owner's records: the rows that priced metrics are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, taken
from fedveil.data.federated import Array, FederatedData
from fedveil.data.provenance import PUBLIC, by_record
from fedveil.models.memory import is_plain_function
from fedveil.models.metrics import Metric, is_of_numbers
from fedveil.models.task import Task
from fedveil.privacy.priced_metrics import LOSS
from fedveil.training.cohort import tensors
from fedveil.training.engines.housekeeping import one_thread
from fedveil.training.evaluate import BATCH

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Owners:
    """Records in the order of their owners: owner k has rows `offsets[k]:offsets[k + 1]` of them.

    `rows` are the places of these records in `x` and `y`. `of_clients`: the owners are clients of
    the training; otherwise nobody trains on their records. `records`: every record is an owner by
    itself, since nobody knows which belong together.
    """

    x: Inputs[Array]
    y: Array
    rows: Rows
    offsets: Rows
    of_clients: bool
    records: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1


def measured_owners(data: FederatedData) -> Owners:
    """On whose records priced metrics are measured.

    Held-out owners where there are any; otherwise the clients, on their own test records if the
    test records are theirs, else on all that they have. Every owner has at least one record.

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
            "protect; leave it out"
        )
    held_out = data.held_out > 0
    if data.elsewhere and not held_out:
        raise BadInput(
            "evaluate.epsilon would measure clients whose records are at their sites, which count "
            "what they release themselves: give the server test records of held-out owners, or "
            "leave it out"
        )
    if len(owner):
        rows = np.flatnonzero(owner < PUBLIC if held_out else owner >= 0)
        rows = rows[np.argsort(owner[rows], kind="stable")]
        begins = np.flatnonzero(np.diff(owner[rows], prepend=PUBLIC))
        offsets = np.append(begins, len(rows))
        alone = held_out and by_record(owner)
        return Owners(data.test_x, data.test_y, rows, offsets, not held_out, records=alone)
    sizes = data.sizes[data.sizes > 0]
    offsets = np.cumsum([0, *sizes], dtype=np.int64)
    return Owners(data.x, data.y, np.arange(len(data.y)), offsets, of_clients=True)


def priced_names(task: Task) -> tuple[str, ...]:
    """What is measured with a price: the task's metrics, and the loss; others are refused.

    | edge | behaviour |
    |---|---|
    | a metric that is no mean over records of numbers from 0 to 1 | BadInput |
    | a metric that is a function of the user's | BadInput: it could remember an owner's records |
    | a model or loss that cannot be captured | BadInput: so could it |
    """
    if task.forks:
        raise BadInput(
            f"evaluate.epsilon is given and the model or its loss cannot be captured "
            f"({task.forks}), so it might remember an owner's records: leave it out"
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
                f"{name!r} is none: leave it out (evaluate.metrics)"
            )
    return (*task.measures, LOSS)


def owner_means(
    task: Task,
    params: torch.Tensor,
    owners: Owners,
    names: Sequence[str],
    loss_clip: float,
) -> torch.Tensor:
    """The mean over each owner's records of each number, float64 [owners, numbers], in [0, 1].

    Guarantee: a row depends on its owner's records and on nothing else, to the last bit: each owner
    is computed by itself, whatever a metric does with the records of a batch.

    | edge | behaviour |
    |---|---|
    | a loss above `loss_clip`, or no number | 1 |
    | a loss below 0 | 0 |
    | another number that is none | 0 |
    """
    found = torch.zeros(len(owners), len(names), dtype=torch.float64)
    with one_thread(), torch.inference_mode():
        for k, (start, stop) in enumerate(pairwise(owners.offsets.tolist())):
            rows = owners.rows[start:stop]
            parts = [rows[a : a + BATCH] for a in range(0, len(rows), BATCH)]
            values = [_values(task, params, owners, part, names, loss_clip) for part in parts]
            found[k] = torch.cat(values).double().mean(dim=0)
    return found


def _values(
    task: Task,
    params: torch.Tensor,
    owners: Owners,
    rows: Rows,
    names: Sequence[str],
    loss_clip: float,
) -> torch.Tensor:
    """The numbers of some records, float64 [records, numbers] in [0, 1]."""
    x, y = tensors(taken(owners.x, rows)), torch.tensor(owners.y[rows])
    each = task.measure(params, x, y).per_example
    return torch.stack([_between(name, each[name], loss_clip) for name in names], dim=1)


def _between(name: str, values: torch.Tensor, loss_clip: float) -> torch.Tensor:
    """One number per record, float64 in [0, 1]."""
    values = values.to(torch.float64)
    if name == LOSS:
        return (values / loss_clip).nan_to_num(nan=1.0).clamp(0.0, 1.0)
    return values.nan_to_num(nan=0.0).clamp(0.0, 1.0)
