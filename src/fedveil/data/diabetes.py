"""scikit-learn's diabetes data: 442 real patients, 10 measurements, a number to predict."""

import numpy as np

from fedveil.data.loaded_records import Records
from fedveil.data.split import holdout

FITTED = "means and standard deviations of the features"


def load(*, held_out: bool = False) -> Records:
    """Disease progression after a year, in hundreds, from ten standardised measurements.

    The embedded regression task: a linear model has 11 parameters, as on Lending Club. Features
    come standardised over all patients, which no claim covers; with `held_out` over the test split
    alone, whose patients are no clients. The target is divided by 100, a public constant.
    """
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=not held_out)
    train, test = holdout(len(x))
    x = (x - x[test].mean(axis=0)) / x[test].std(axis=0) if held_out else x * np.sqrt(len(x))
    x, y = x.astype(np.float32), (y / 100).astype(np.float32)
    return Records(
        "diabetes",
        x[train],
        y[train],
        x[test],
        y[test],
        classes=0,
        fitted="" if held_out else FITTED,
        fitted_on_test=FITTED if held_out else "",
    )
