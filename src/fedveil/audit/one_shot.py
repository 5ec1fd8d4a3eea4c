"""The one-shot estimate: canaries' scores as two Gaussians (Andrew et al. 2023)."""

import math

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from fedveil.base.errors import BadInput

_STEPS = 80
_SAME = 1e-9


def two_gaussians(
    mean: float, std: float, null_mean: float, null_std: float, delta: float
) -> float:
    """The epsilon at `delta` between N(mean, std^2) and N(null_mean, null_std^2), both ways.

    Guarantee: the least epsilon for which neither distribution exceeds e^epsilon times the other by
    more than delta, to 1e-9. Exact for Gaussians, and an estimate where they were fitted.

    | edge | behaviour |
    |---|---|
    | the same distribution twice | 0 |
    | std or null_std not positive | BadInput |
    | delta outside (0, 1) | BadInput |
    """
    if not (std > 0 and null_std > 0):
        raise BadInput(f"standard deviations {std} and {null_std}: positive ones are needed")
    if not 0 < delta < 1:
        raise BadInput(f"delta is {delta}: a number in (0, 1) is needed")
    shift, scale = (mean - null_mean) / null_std, std / null_std
    back = -shift / scale, 1 / scale
    return max(_one_way(shift, scale, delta), _one_way(*back, delta))


def fitted(
    inside: npt.NDArray[np.float64], outside: npt.NDArray[np.float64], delta: float
) -> float:
    """The estimate from scores of canaries that were in and of canaries that were out."""
    if min(len(inside), len(outside)) < 2:
        raise BadInput(f"{len(inside)} canaries in and {len(outside)} out: two of each are needed")
    return two_gaussians(
        float(inside.mean()),
        float(inside.std(ddof=1)),
        float(outside.mean()),
        float(outside.std(ddof=1)),
        delta,
    )


def _one_way(shift: float, scale: float, delta: float) -> float:
    """The least epsilon with P(A) <= e^epsilon Q(A) + delta, P = N(shift, scale^2), Q = N(0, 1)."""
    low, high = 0.0, 1.0
    if _excess(shift, scale, low) <= delta:
        return 0.0
    while _excess(shift, scale, high) > delta:
        low, high = high, 2 * high
        if high > 1e6:
            return math.inf
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _excess(shift, scale, middle) <= delta else (middle, high)
    return high


def _excess(shift: float, scale: float, epsilon: float) -> float:
    """P(A) - e^epsilon Q(A) on the set A where the density of P is above e^epsilon that of Q.

    log P/Q is a x^2 + b x + c: A is a half-line, what is outside an interval, or an interval.
    """
    a = 0.5 - 0.5 / scale**2
    b = shift / scale**2
    c = -(shift**2) / (2 * scale**2) - math.log(scale) - epsilon
    if abs(a) < _SAME:
        if b == 0:
            return 0.0
        edge = -c / b
        sides = [(edge, math.inf)] if b > 0 else [(-math.inf, edge)]
    else:
        square = b * b - 4 * a * c
        if square <= 0:
            sides = [(-math.inf, math.inf)] if a > 0 else []
        else:
            ends = sorted([(-b - math.sqrt(square)) / (2 * a), (-b + math.sqrt(square)) / (2 * a)])
            between = (ends[0], ends[1])
            outside = [(-math.inf, ends[0]), (ends[1], math.inf)]
            sides = outside if a > 0 else [between]
    found = 0.0
    for start, stop in sides:
        own = _mass((start - shift) / scale, (stop - shift) / scale)
        found += own - math.exp(min(epsilon, 700.0)) * _mass(start, stop)
    return found


def _mass(start: float, stop: float) -> float:
    """P(start < N(0, 1) < stop), exact in both tails."""
    if start > 0:
        start, stop = -stop, -start
    return float(ndtr(stop) - ndtr(start))
