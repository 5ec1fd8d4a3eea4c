"""The area under the ROC curve, and an interval for it that holds near 1 as well."""

import math

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import rankdata

_NEAR = 1e-9

Values = npt.NDArray[np.float64]


def auc(scores: Values, has: npt.NDArray[np.bool_]) -> float:
    """How often one that has it scores above one that has not; ties count half.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, False, True, True]))
    0.875
    """
    count = int(has.sum())
    above = float(rankdata(scores)[has].sum()) - count * (count + 1) / 2
    return above / (count * (len(has) - count))


def auc_interval(area: float, with_: int, without: int, confidence: float) -> tuple[float, float]:
    """Where the true area lies: all values that `area` does not contradict.

    Hanley and McNeil's variance at the value in question, not at the estimate, with both numbers
    of cases replaced by their mean less one (Newcombe 2006, method 5): an area of 1 of few clients
    still has an interval. Holds for independent cases.
    """
    reach = float(ndtri((1 + confidence) / 2))
    most = max((with_ + without) / 2 - 1, 0.0)

    def off(true: float) -> float:
        ahead = (1 - true) / (2 - true)
        behind = true / (1 + true)
        variance = true * (1 - true) * (1 + most * (ahead + behind)) / (with_ * without)
        return reach * math.sqrt(variance)

    def below(true: float) -> float:
        return area - true - off(true)

    def above(true: float) -> float:
        return true - area - off(true)

    under, over = max(area - _NEAR, 0.0), min(area + _NEAR, 1.0)  # at 0 and 1 nothing varies
    low = float(brentq(below, 0.0, under)) if below(under) < 0 < below(0.0) else 0.0
    high = float(brentq(above, over, 1.0)) if above(over) < 0 < above(1.0) else 1.0
    return low, high
