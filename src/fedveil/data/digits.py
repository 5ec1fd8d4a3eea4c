"""The 1,797 handwritten 8x8 digits that come with scikit-learn: no file needed."""

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np

from fedveil.data.loaded_records import Records
from fedveil.data.split import holdout
from fedveil.data.user_arrays import Array

_FILE = Path("datasets", "data", "digits.csv.gz")


def load() -> Records:
    """Digits as [N, 1, 8, 8] in 0..1 with a fixed 80/20 split."""
    images, labels = _arrays()
    x = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y = labels.astype(np.int64)
    train, test = holdout(len(x))
    return Records("digits", x[train], y[train], x[test], y[test], classes=10)


@cache
def _arrays() -> tuple[Array, Array]:
    """64 pixels and a label per row, read from scikit-learn's file without importing it: a second
    less to the first round. Where the file is not in its place, scikit-learn is asked.
    """
    found = importlib.util.find_spec("sklearn")
    path = Path(found.origin).parent / _FILE if found and found.origin else _FILE
    if path.is_file():
        rows = np.loadtxt(path, delimiter=",")
        return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images, labels
