"""scikit-learn's diabetes data: 442 real patients, 10 measurements, a number to predict."""

import numpy as np

from fedveil.data.partition import holdout
from fedveil.data.records import Records


def load() -> Records:
    """Disease progression after a year, in hundreds, from ten standardised measurements.

    The embedded regression task: a linear model has 11 parameters, as on Lending Club. Features
    come standardised over all patients; the target is divided by 100, a public constant.
    """
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=True)
    x = (x * np.sqrt(len(x))).astype(np.float32)
    y = (y / 100).astype(np.float32)
    train, test = holdout(len(x))
    return Records("diabetes", x[train], y[train], x[test], y[test], classes=0)
