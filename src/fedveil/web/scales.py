"""Scales of a chart's axes: from numbers to positions, and the numbers to label."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_SAME = 1e-12
"""Numbers that differ by less, as a share of them, are one number."""


@dataclass(frozen=True)
class AxisScale:
    """Maps numbers from `low` to `high` to positions from `start` to `end`, linear or `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The position of a number, clamped to the scale."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers within the scale."""
        return _decades(self.low, self.high) if self.log else _round(self.low, self.high, about)


def fitted(
    values: Sequence[float], start: float, end: float, *, zero: bool = False, log: bool = False
) -> AxisScale:
    """A scale that includes all finite `values`, `zero` if required, and a margin.

    | edge | behaviour |
    |---|---|
    | no finite value | 0 to 1 |
    | one value, or all the same | a margin on both sides; all 0 with `zero`: 0 to 1 |
    | `log` and a value of zero or less | the scale is not in powers of ten |
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if log and low > 0:
        low, high = (low, high) if high - low > _SAME * high else (low / 2, high * 2)
        edge = (high / low) ** 0.04
        return AxisScale(low / edge, high * edge, start, end, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if zero and low == high:
        high = 1.0
    if high - low <= _SAME * max(abs(low), abs(high)):
        low, high = low - (abs(low) / 2 or 1.0), high + (abs(high) / 2 or 1.0)
    margin = 0.04 * (high - low)
    return AxisScale(low if zero and low == 0 else low - margin, high + margin, start, end)


def exact(low: float, high: float, start: float, end: float) -> AxisScale:
    """A scale from one number to another, without a margin."""
    return AxisScale(low, high if high > low else low + 1.0, start, end)


def tick_text(value: float) -> str:
    """A label: short, and without noise of floating point.

    >>> [tick_text(x) for x in (0.30000000000000004, 20000.0, 1e-7, 0.0)]
    ['0.3', '20k', '1e-7', '0']
    """
    size = abs(value)
    if 1e4 <= size < 1e6:
        return f"{value / 1e3:g}k"
    text = f"{value:.6g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def _round(low: float, high: float, about: int) -> list[float]:
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in _STEPS if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, 12) if step > 1e-9 else k * step for k in range(first, last + 1)]


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = [10.0**k for k in range(first, last + 1)]
    if last - first <= 2:
        decades = [factor * power for power in decades for factor in (1, 2, 5)]
    elif last - first > 8:
        decades = decades[:: -(-(last - first) // 6)]
    return [value for value in decades if low <= value <= high]
