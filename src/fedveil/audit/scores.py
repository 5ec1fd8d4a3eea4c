"""From scores of two inputs to counts: choose the guess on some draws, count it on others."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from fedveil.audit.bounds import Counts, least, most
from fedveil.base.errors import BadInput

Scores = npt.NDArray[np.float64]
Worth = Callable[[Any, Any], Any]
"""(lower ends of true, upper ends of false positive rates) -> what a threshold is worth."""

CHOOSING = 0.2
_LEVEL = 0.025
_THRESHOLDS = 500


def gap(hit: Any, alarm: Any) -> Any:
    """The mu that a threshold gives."""
    with np.errstate(invalid="ignore"):
        found = ndtri(np.clip(hit, 0, 1)) - ndtri(np.clip(alarm, 0, 1))
    return np.where(np.isnan(found), -np.inf, found)


def log_ratio(delta: float) -> Worth:
    """The epsilon at `delta` that a threshold gives."""

    def worth(hit: Any, alarm: Any) -> Any:
        gain = np.maximum(hit - delta, 0.0)
        with np.errstate(divide="ignore"):
            return np.log(gain) - np.log(alarm)

    return worth


def choosing(scores: Scores) -> Scores:
    """The draws that choose the guess, [n] or [ways, n]. None of them is counted."""
    return scores[..., : int(scores.shape[-1] * CHOOSING)]


def counted(without: Scores, with_: Scores, worth: Worth) -> Counts:
    """Counts of the best guess, chosen on the first fifth of the draws.

    Scores are [n], or [ways of scoring, n]; column k of each is one draw. A guess is a way of
    scoring, a side and a threshold.

    Guarantee: no counted draw influences which guess is counted, so the counts are binomial if the
    draws are independent.

    | edge | behaviour |
    |---|---|
    | fewer than ten draws of either input | BadInput |
    | scores that are not finite | they count: NaN as 0, infinities as the largest numbers |
    """
    without, with_ = (np.nan_to_num(np.atleast_2d(each)) for each in (without, with_))
    if min(without.shape[1], with_.shape[1]) < 10:
        raise BadInput(f"{without.shape[1]} and {with_.shape[1]} draws: at least ten are needed")
    first = choosing(without), choosing(with_)
    best, chosen = -np.inf, (0, 1.0, 0.0)
    for way, (out, in_) in enumerate(zip(*first, strict=True)):
        for side in (1.0, -1.0):
            value, threshold = _best(side * out, side * in_, worth)
            if value > best:
                best, chosen = value, (way, side, threshold)
    way, side, threshold = chosen
    out, in_ = side * without[way, first[0].shape[1] :], side * with_[way, first[1].shape[1] :]
    return Counts(int((in_ >= threshold).sum()), len(in_), int((out >= threshold).sum()), len(out))


def _best(out: Scores, in_: Scores, worth: Worth) -> tuple[float, float]:
    """(the worth of the best threshold on these draws, the threshold)."""
    both = np.sort(np.concatenate([out, in_]))
    places = np.unique(np.linspace(0, len(both) - 1, _THRESHOLDS).astype(np.int64))
    few = np.unique(np.minimum(np.geomspace(1, len(both), 60).astype(np.int64), len(both)))
    places = np.unique(np.concatenate([places, len(both) - few]))
    thresholds = np.unique(both[places])
    hits = len(in_) - np.searchsorted(np.sort(in_), thresholds)
    alarms = len(out) - np.searchsorted(np.sort(out), thresholds)
    values = worth(least(hits, len(in_), _LEVEL), most(alarms, len(out), _LEVEL))
    best = int(np.argmax(values))
    return float(values[best]), float(thresholds[best])
