"""Means of repetitions with intervals, and a paired test of two options."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over repetitions and half the width of its 95 % interval (Student's t).

    `diverged` counts repetitions that ended without a finite number; the mean is then infinite, as
    it is without any repetition.
    With one repetition nothing is known of the spread: `half` is NaN.
    """

    value: float
    half: float
    count: int
    diverged: int = 0

    def __str__(self) -> str:
        if not self.count:
            return "not tried"
        if self.diverged:
            return f"diverged ({self.diverged} of {self.count})"
        if math.isnan(self.half):
            return f"{self.value:.4g}"
        return f"{self.value:.4g} +- {self.half:.2g}"


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of repetitions.

    >>> str(mean_of([1.0, 2.0, 3.0]))
    '2 +- 2.5'
    """
    array = np.asarray(values, dtype=np.float64)
    wrong = int((~np.isfinite(array)).sum())
    if wrong or len(array) == 0:
        return Mean(math.inf, math.nan, len(array), wrong)
    if len(array) == 1:
        return Mean(float(array[0]), math.nan, 1)
    spread = array.std(ddof=1) / math.sqrt(len(array))
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(array) - 1)
    return Mean(float(array.mean()), float(quantile * spread), len(array))


def worse(candidate: Sequence[float], best: Sequence[float]) -> float:
    """The p-value of "the candidate's mean is larger", paired by repetition, one-sided.

    Small is significant. What a repetition has in common (its clients, its first model) cancels;
    the rest is independent from one to the next. 0 for a candidate that
    diverged when the best never did; 1 when the best itself diverged, when the two agree
    everywhere, and for a single repetition.
    """
    theirs, ours = np.asarray(candidate, dtype=np.float64), np.asarray(best, dtype=np.float64)
    if not np.isfinite(ours).all():
        return 1.0
    if not np.isfinite(theirs).all():
        return 0.0
    difference = theirs - ours
    count = len(difference)
    if count < 2:
        return 1.0
    mean, spread = float(difference.mean()), float(difference.std(ddof=1))
    if spread == 0:
        return 1.0 if mean <= 0 else 0.0
    return float(stats.t.sf(mean * math.sqrt(count) / spread, count - 1))
