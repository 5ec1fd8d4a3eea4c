"""Read the entries of a column as numbers, days, texts or truth values, each by itself.

What one entry is does not depend on any other. None, an empty text or NaN is a missing entry.
"""

import datetime
import math
import re
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
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?")


def as_numbers(column: Array) -> tuple[Floats, Bits]:
    """(entries as numbers, NaN where missing; a mask of the entries that are not numbers)."""
    if column.ndim > 1:
        return np.full(len(column), math.nan), np.ones(len(column), dtype=bool)
    try:
        return column.astype(np.float64), np.zeros(len(column), dtype=bool)
    except (TypeError, ValueError, OverflowError):
        numbers = [_number(entry) for entry in column]
    odd = np.array([number is None for number in numbers], dtype=bool)
    return np.array([math.nan if n is None else n for n in numbers], dtype=np.float64), odd


def as_days(column: Array) -> tuple[Floats, Bits]:
    """(entries as days since the year 1, NaN where missing; a mask of entries that are no dates).

    The time of day does not count.
    """
    if column.ndim > 1:
        return np.full(len(column), math.nan), np.ones(len(column), dtype=bool)
    missing = [text is None or text.lower() in (*_MISSING, "nat") for text in as_texts(column)]
    days = [None if gone else day_of(entry) for entry, gone in zip(column, missing, strict=True)]
    numbers = np.array([math.nan if day is None else day for day in days], dtype=np.float64)
    return numbers, np.isnan(numbers) & ~np.array(missing, dtype=bool)


def day_of(entry: Any) -> float | None:
    """The day of a date or time in ISO 8601, such as 2026-01-31, None for anything else.

    >>> day_of("2026-01-31") - day_of("2026-01-01T18:30")
    30.0
    """
    text = _text(entry)
    if text is None or not _ISO_DATE.fullmatch(text):
        return None
    try:
        datetime.datetime.fromisoformat(text[:19])
        return float(datetime.date.fromisoformat(text[:10]).toordinal())
    except ValueError:
        return None


def as_texts(column: Array) -> list[str | None]:
    """Entries as texts without outer spaces, None where missing. 1 and 1.0 are the same text."""
    return [_text(entry) for entry in column.tolist()]


def forms(column: Array) -> list[tuple[object, object]]:
    """Return each entry of a column as (exact form, normalised form).

    Entries with equal exact forms are the same entry. Entries with equal normalised forms have one
    value, however it was written: 0.5 and "0.50" do, and a date has its day.
    """
    entries = list(column) if column.ndim > 1 else column.tolist()
    if column.ndim == 1 and column.dtype.kind in "iuf":
        return [
            (None, None) if math.isnan(entry) else (entry, repr(float(entry) + 0.0))
            for entry in entries
        ]
    return [_forms(entry) for entry in entries]


def _forms(entry: Any) -> tuple[object, object]:
    """One entry in the forms of `forms`."""
    if isinstance(entry, list | tuple | np.ndarray):
        array = np.asarray(entry)
        if array.dtype.kind not in "biuf":
            return repr(entry), repr(entry)
        exact = array.shape, array.dtype.str, array.tobytes()
        return exact, (array.shape, array.astype(np.float64).tobytes())
    text = _text(entry)
    word = "" if text is None else text.lower()
    if text is None or word in (*_MISSING, "nat"):
        return text, None
    try:
        return text, repr(float(text) + 0.0)
    except ValueError:
        return text, word if word in _BITS else day_of(text) or text


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


def are_dates(column: Array) -> bool:
    """Whether all entries that are not missing are dates in ISO 8601, and there is one."""
    days, odd = as_days(column)
    return not odd.any() and not np.isnan(days).all()


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
    """An entry as a text, None if it is missing or empty."""
    if entry is None:
        return None
    if isinstance(entry, float):
        if math.isnan(entry):
            return None
        whole = entry.is_integer() and abs(entry) < _WHOLE
        return str(int(entry)) if whole else repr(entry)
    return str(entry).strip() or None
