"""Labels from an update alone: the last layer's gradient says which class had a record.

The gradient of the cross-entropy at the logit of a class is its probability less the share of the
records that have the label. One record makes exactly one of them negative (iDLG, Zhao et al. 2020).
"""

import numpy as np
import numpy.typing as npt
import torch

from fedveil.errors import BadInput
from fedveil.models.task import Task


def label_shares(task: Task, update: torch.Tensor, classes: int) -> npt.NDArray[np.float64]:
    """How much each class is asked for by an update [P]: larger where records have the label.

    The last layer's bias says it by its sign. Without one, rows of the weights are multiples of
    one vector if there is one record, and the label's is the longest.
    """
    named = task.named(update.detach().double())
    last = [value for value in named.values() if value.shape[:1] == (classes,)]
    if not last:
        raise BadInput(
            f"no parameter of the model has one row for each of {classes} labels: labels cannot be "
            "told from an update; use --method dlg, which guesses them"
        )
    found = last[-1] if last[-1].ndim == 1 else last[-1].reshape(classes, -1).norm(dim=1)
    return np.asarray(found.numpy(), dtype=np.float64)


def labels_of(
    shares: npt.NDArray[np.float64], chances: npt.NDArray[np.float64], records: int
) -> npt.NDArray[np.int64]:
    """The labels of `records` records, ascending, from what an update asks for.

    `chances` are the probabilities that the round's model gives classes on public records. A class
    that has n_c of n records is asked for by s (n_c / n - chance). What it is scaled by, s, is told
    by a class that has none. Exact for one record.
    """
    if records == 1:
        return np.array([int(np.argmax(shares))])
    scale = float(np.max(-shares / chances))
    left = shares / scale + chances if scale > 0 else shares.copy()
    found = []
    for _ in range(records):
        found.append(int(np.argmax(left)))
        left[found[-1]] -= 1 / records
    return np.sort(np.array(found, dtype=np.int64))
