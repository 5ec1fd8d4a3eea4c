"""Long series made short without hiding what stands out in them."""

import math
from collections.abc import Sequence

Point = tuple[float, float]

MOST = 200
"""Stretches that a long series is cut into: about as many as a chart has places for."""


def finite(points: Sequence[tuple[float, float | None]]) -> list[Point]:
    """The points that can be drawn."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y) and math.isfinite(x)]


def thinned(points: Sequence[Point], most: int = MOST) -> list[Point]:
    """At most four points from each of `most` stretches of a series in the order of x.

    Guarantee: the result has the first, lowest, highest and last point of every stretch, so that
    the line through it reaches every extreme.

    >>> thinned([(x, 9.0 if x == 5 else 0.0) for x in range(9)], most=1)
    [(0, 0.0), (5, 9.0), (8, 0.0)]
    """
    if len(points) <= 4 * most:
        return list(points)
    short: list[Point] = []
    for k in range(most):
        part = points[k * len(points) // most : (k + 1) * len(points) // most]
        low = min(range(len(part)), key=lambda i: part[i][1])
        high = max(range(len(part)), key=lambda i: part[i][1])
        short += [part[i] for i in sorted({0, low, high, len(part) - 1})]
    return short
