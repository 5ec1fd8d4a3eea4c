"""The 1,797 handwritten 8x8 digits that come with scikit-learn: no file needed."""

import numpy as np

from fedveil.data.records import Records
from fedveil.data.split import holdout


def load() -> Records:
    """Digits as [N, 1, 8, 8] in 0..1 with a fixed 80/20 split."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y = labels.astype(np.int64)
    train, test = holdout(len(x))
    return Records("digits", x[train], y[train], x[test], y[test], classes=10)
