"""Read the entries of a column, one by one, as numbers, texts, arrays or missing."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.data.user_arrays import Array

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.bool_]

_MISSING = ("", "na", "n/a", "nan", "null", "none")
"""Words for a number that is not there; of a text, only the empty one is."""

_BITS = {"true": 1.0, "false": 0.0}
_WHOLE = 2.0**53


def as_numbers(column: Array) -> tuple[Floats, Bits]:
    """Entries as numbers, NaN where missing, and a mask of those that are not numbers."""
    if column.ndim > 1:
        return np.full(len(column), math.nan), np.ones(len(column), dtype=bool)
    try:
        return column.astype(np.float64), np.zeros(len(column), dtype=bool)
    except (TypeError, ValueError, OverflowError):
        found = [_number(entry) for entry in column]
    odd = np.array([number is None for number in found], dtype=bool)
    return np.array([math.nan if n is None else n for n in found], dtype=np.float64), odd


def as_texts(column: Array) -> list[str | None]:
    """Entries as texts, None where missing. 1 and 1.0 are the same text."""
    return [_text(entry) for entry in column.tolist()]


def are_bits(column: Array) -> bool:
    """Whether all entries are true or false, as such or as these words."""
    if column.dtype.kind != "O":
        return column.dtype.kind == "b"
    return all(
        isinstance(entry, bool | np.bool_)
        or (isinstance(entry, str) and entry.strip().lower() in _BITS)
        for entry in column
    )


def are_floats(column: Array) -> bool:
    """Whether an entry is written or stored as a real number, though it may be a whole one."""
    if column.dtype.kind != "O":
        return column.dtype.kind == "f"
    return any(
        isinstance(entry, float | np.floating)
        or (isinstance(entry, str) and not entry.strip().lstrip("+-").isdigit())
        for entry in column
    )


def are_arrays(column: Array) -> bool:
    """Whether entries are arrays, judged by the first that is not missing."""
    if column.dtype.kind != "O":
        return column.ndim > 1
    first = next((entry for entry in column if entry is not None), None)
    return isinstance(first, list | tuple | np.ndarray)


def _number(entry: Any) -> float | None:
    """A number, NaN if missing, None if it is not a number."""
    if entry is None:
        return math.nan
    if isinstance(entry, str):
        word = entry.strip().lower()
        if word in _MISSING:
            return math.nan
        if word in _BITS:
            return _BITS[word]
    try:
        return float(entry)
    except (TypeError, ValueError, OverflowError):
        return None


def _text(entry: Any) -> str | None:
    if entry is None:
        return None
    if isinstance(entry, float):
        if math.isnan(entry):
            return None
        whole = entry.is_integer() and abs(entry) < _WHOLE
        return str(int(entry)) if whole else repr(entry)
    return str(entry).strip() or None
