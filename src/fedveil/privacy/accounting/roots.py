"""Find a root between two points, without the third of a second of importing scipy.optimize."""

import math
from collections.abc import Callable

_MOST_STEPS = 200


def root(
    function: Callable[[float], float], low: float, high: float, *, xtol: float, rtol: float = 1e-15
) -> float:
    """A point within `xtol` + `rtol` times its size of where the function changes its sign.

    Chandrupatla's method (1997): inverse quadratic interpolation where the last three points allow
    it, the middle of the bracket otherwise.

    | edge | behaviour |
    |---|---|
    | the function is 0 at an end | that end |
    | the same sign at both ends | ValueError |

    >>> round(root(lambda x: x * x - 2, 0.0, 2.0, xtol=1e-12), 9)
    1.414213562
    """
    a, b = high, low
    fa, fb = function(a), function(b)
    if fa == 0 or fb == 0:
        return b if fb == 0 else a
    if (fa > 0) == (fb > 0):
        raise ValueError(f"the function is {fb:g} at {low:g} and {fa:g} at {high:g}: no root")
    share = 0.5
    for _ in range(_MOST_STEPS):
        x = a + share * (b - a)
        fx = function(x)
        if (fx > 0) == (fa > 0):
            c, fc = a, fa
        else:
            c, fc, b, fb = b, fb, a, fa
        a, fa = x, fx
        best = a if abs(fa) < abs(fb) else b
        least = (rtol * abs(best) + xtol / 2) / abs(b - a)
        if fx == 0 or least > 0.5:
            return best
        share = min(max(_interpolated(a, b, c, fa, fb, fc), least), 1 - least)
    return best


def _interpolated(a: float, b: float, c: float, fa: float, fb: float, fc: float) -> float:
    """Place of the root from a to b by inverse quadratic interpolation, 1/2 if that is unsafe."""
    place = (a - b) / (c - b)
    height = (fa - fb) / (fc - fb)
    if not (place > height * height and 1 - place > (1 - height) * (1 - height)):
        return 0.5
    found = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
    return found if math.isfinite(found) else 0.5
