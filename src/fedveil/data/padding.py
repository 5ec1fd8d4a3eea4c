"""Pad lists of different lengths to one array."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.data.user_arrays import Array, array_of

_KEEP = ("start", "end")


def pad(lists: Iterable[Any], length: int, *, value: float = 0, keep: str = "start") -> Array:
    """One row of `length` per list: shorter ones end with `value`, of longer ones a part is kept.

    `keep` says which part: the "start" or the "end". Whole numbers stay whole. The same `length` is
    used for all clients and for the test split: choose it beforehand, since the length of the
    longest list is a statistic of the records. Padding in targets is -100, which counts for
    nothing; a mask is what becomes of lists of ones.

    >>> pad([[5, 6], [7, 8, 9]], length=3).tolist()
    [[5, 6, 0], [7, 8, 9]]
    >>> pad([[5, 6], [7, 8, 9]], length=2, keep="end", value=-100).tolist()
    [[5, 6], [8, 9]]
    >>> pad([[1] * 2, [1] * 3], length=3).tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
        raise BadInput(f"length is {shown(length)}: the length of all rows is needed, 1 or more")
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise BadInput(f"value is {shown(value)}: the number that stands for nothing is needed")
    if keep not in _KEEP:
        raise BadInput(f"keep is {shown(keep)}: use 'start' or 'end'")
    if isinstance(lists, str | bytes | dict) or not isinstance(lists, Iterable):
        raise BadInput(f"lists is {shown(lists)}: one list of numbers per record is needed")
    rows = [_row(number, each) for number, each in enumerate(lists)]
    whole = float(value).is_integer() and all(row.dtype.kind in "biu" for row in rows if len(row))
    out = np.full((len(rows), int(length)), value, np.int64 if whole else np.float32)
    for place, row in zip(out, rows, strict=True):
        kept = row[:length] if keep == "start" else row[-length:]
        place[: len(kept)] = kept
    return out


def _row(number: int, each: object) -> Array:
    row = array_of(f"the entries of list {number}", each)
    if row.ndim != 1 or (len(row) and row.dtype.kind not in "biuf"):
        raise BadInput(f"list {number} is {shown(each)}: a list of numbers is needed")
    return row
