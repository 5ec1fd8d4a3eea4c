"""`Column`: how the entries of one column become numbers, as declared in public or as fitted."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Target
from fedveil.data.tables import Floats, Table, are_arrays, as_numbers, as_texts, listed
from fedveil.data.user_arrays import Array
from fedveil.data.vocabulary import KEYS as TEXT_KEYS
from fedveil.data.vocabulary import Text

Value = str | bool | int | float

MOST_VALUES = 1000
"""Categories of a column, each of which is a feature of its own."""

_LARGEST = 1e30  # what is beyond has no square in float32's range
_PIECE = 1 << 22  # numbers scaled at once
_FLAGS = ("other", "whole", "classes")
_DECLARED = ("low", "high", "mean", "std", "values", "fill", "other", "classes", *TEXT_KEYS)


@dataclass(frozen=True)
class Column:
    """How one column becomes numbers: scaled, standardised, one-hot, or words of a text.

    A number is scaled from [low, high] to [-1, 1] and clamped outside, or it is standardised by
    `mean` and `std`. One of `values` becomes a one-hot vector, or a label's place in the list. With
    `other`, anything else becomes zeros. `fill` stands for an entry that is missing. Entries of a
    column with a `shape` are arrays, whose elements are scaled one by one, and `whole` ones stay
    whole numbers. A target with `classes` has that many labels, which are called by their numbers:
    one per row, one in each place of an array of whole numbers, or of an array of real ones each, 0
    to 1, how true that label is. A `text` becomes an array of whole numbers, one for each word. As
    the target, it becomes the word that follows each.

    Nothing here looks at more than one entry at a time.
    """

    name: str
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    std: float | None = None
    values: tuple[Value, ...] | None = None
    fill: Value | None = None
    other: bool = False
    shape: tuple[int, ...] = ()
    whole: bool = False
    classes: int = 0
    text: Text | None = None

    def __post_init__(self) -> None:
        if self.text is not None:
            object.__setattr__(self, "shape", (self.text.length,))
            object.__setattr__(self, "whole", True)
        _check_pairs(self)
        _check_values(self)
        _check_classes(self)
        _check_fill(self)

    @classmethod
    def of_target(cls, name: str, target: Target) -> "Column":
        """A column of targets that are arrays as they are."""
        if not (target.classes or target.shape):
            return cls(name, mean=0.0, std=1.0)
        whole = target.classes > 0 and not target.several
        return cls(name, shape=target.shape, whole=whole, classes=target.classes)

    @property
    def target(self) -> Target:
        """What is to be predicted, if this is the target."""
        if self.text is not None:
            return Target(self.text.known.size, self.shape)
        several = self.classes > 0 and not self.whole
        return Target(self.classes or len(self.values or ()), self.shape, several)

    @classmethod
    def declared(cls, name: str, options: object) -> "Column":
        """A column as a user describes it, in a dict."""
        where = declaration(name)
        if not isinstance(options, Mapping):
            raise BadInput(f"{where} is {shown(options)}: use low, high, values, ...")
        for key in options:
            if key not in _DECLARED:
                raise BadInput(f"{where}.{key} is no key: use one of {', '.join(_DECLARED)}")
        declared_text = {key: options[key] for key in TEXT_KEYS if options.get(key) is not None}
        text = Text.declared(where, declared_text) if declared_text else None
        options = {key: value for key, value in options.items() if key not in TEXT_KEYS}
        values = options.get("values")
        if values is None:
            return cls(name, **options, text=text)
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise BadInput(f"{where}.values is {shown(values)}: a list is needed")
        return cls(name, **{**options, "values": tuple(values)}, text=text)

    @property
    def where(self) -> str:
        """The key that declares this column, on one line."""
        return declaration(self.name)

    @property
    def scaled(self) -> bool:
        """Whether it says how numbers are scaled."""
        return self.low is not None or self.mean is not None

    @property
    def what(self) -> str:
        """What a column with a shape holds."""
        return "arrays" if self.text is None else "texts"

    @property
    def width(self) -> int:
        """How many features it becomes."""
        return len(self.values) if self.values is not None else 1

    def encode(self, table: Table) -> Array:
        """Features, float32 [rows, width]. Arrays are [rows, *shape], int64 if they are whole."""
        if self.text is not None:
            return self.text.records(self.texts(table))
        if self.shape:
            return self._arrays(table)
        if self.values is None:
            return self.numbers(table).astype(np.float32)[:, None]
        hot: Array = self.codes(table)[:, None] == np.arange(self.width)
        return hot.astype(np.float32)

    def numbers(self, table: Table, *, target: bool = False) -> Floats:
        """Scaled numbers [rows]."""
        found, odd = as_numbers(table.column(self.name))
        if odd.any():
            row = int(np.argmax(odd))
            raise table.refused(
                self.name, row, f"is {self._entry(table, row)}: a number is needed (or declare "
                f"{self.where}.values, if it has categories)"
            )  # fmt: skip
        missing = np.isnan(found)
        if missing.any():
            found = np.where(missing, self._filled(table, int(np.argmax(missing)), target), found)
        return self._scale(table, found)

    def codes(self, table: Table, *, target: bool = False) -> npt.NDArray[np.int64]:
        """Places in `values` [rows], -1 for others. With `classes`, the entries themselves."""
        if self.classes:
            return self._by_number(table)
        values, where = self.values or (), self.where
        texts = isinstance(values[0], str)
        found = as_texts(table.column(self.name)) if texts else self._numbers_or_texts(table)
        places: dict[Any, int] = {
            value if texts else float(value): place for place, value in enumerate(values)
        }
        if None in found:
            fill = self._filled(table, found.index(None), target)
            found = [(str(fill) if texts else fill) if entry is None else entry for entry in found]
        codes = np.array([places.get(entry, -1) for entry in found], dtype=np.int64)
        if not self.other and (codes < 0).any():
            row = int(np.argmax(codes < 0))
            way_out = f"add it to {where}.values, or declare {where}.other = true"
            if target:
                way_out = f"declare all labels in {where}.values"
            raise table.refused(
                self.name, row, f"is {self._entry(table, row)}, which is none of its values "
                f"{listed(values)}: {way_out}"
            )  # fmt: skip
        return codes

    def texts(self, table: Table, *, target: bool = False) -> list[str]:
        """Entries as texts [rows]."""
        column = table.column(self.name)
        if are_arrays(column):
            raise table.refused(self.name, 0, f"is {self._entry(table, 0)}: a text is needed")
        found = as_texts(column)
        fill = self._filled(table, found.index(None), target) if None in found else ""
        return [fill if text is None else text for text in found]

    def _by_number(self, table: Table) -> npt.NDArray[np.int64]:
        found = self.numbers(table, target=True)
        wrong = (found < 0) | (found >= self.classes) | (found % 1 != 0)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise table.refused(
                self.name, row, f"is {self._entry(table, row)}: a label of 0..{self.classes - 1} "
                "is needed"
            )  # fmt: skip
        return found.astype(np.int64)

    def _numbers_or_texts(self, table: Table) -> list[Any]:
        """Entries as numbers, as texts where they are not numbers, None where they are missing."""
        numbers, odd = as_numbers(table.column(self.name))
        found: list[Any] = [None if number != number else number for number in numbers.tolist()]
        for row in np.flatnonzero(odd).tolist():
            found[row] = self._entry(table, row)
        return found

    def restored(self, numbers: Array) -> Floats:
        """The original numbers of scaled ones."""
        found = np.asarray(numbers, dtype=np.float64)
        centre, half = self._units
        return found * half + centre

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without those that are not set."""
        values_by_name = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.text is not None:
            values_by_name |= {"text": self.text.to_dict(), "shape": (), "whole": False}
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in values_by_name.items()
            if value is not None and value != () and not (key in _FLAGS and not value)
        }

    @property
    def _units(self) -> tuple[float, float]:
        """(the number that becomes 0, the distance that becomes 1)."""
        if self.low is not None and self.high is not None:
            return (self.low + self.high) / 2, (self.high - self.low) / 2
        if self.mean is not None and self.std is not None:
            return self.mean, self.std
        return 0.0, 1.0

    def _scale(self, table: Table, found: Floats, first: int = 0) -> Floats:
        centre, half = self._units
        within = found if self.low is None else np.clip(found, self.low, self.high)
        scaled: Floats = (within - centre) / half
        fine = (np.abs(found) <= _LARGEST) & (np.abs(scaled) <= _LARGEST)
        if not fine.all():
            row = first + int(np.argwhere(~fine)[0][0])
            raise table.refused(
                self.name, row, f"is {self._entry(table, row)}: a finite number of at most "
                f"{_LARGEST:g} is needed"
            )  # fmt: skip
        return scaled

    def _arrays(self, table: Table) -> Array:
        column = table.column(self.name)
        if column.dtype.kind == "O":
            column = self._stacked(table, column)
        if column.shape[1:] != self.shape or column.dtype.kind not in self._kinds:
            raise self._misfit(table, 0)
        if self.whole:
            return column.astype(np.int64)
        out, step = np.empty(column.shape, np.float32), max(1, _PIECE // math.prod(self.shape))
        for start in range(0, len(column), step):
            piece = column[start : start + step].astype(np.float64)
            out[start : start + step] = self._scale(table, piece, start)
        return out

    def _stacked(self, table: Table, column: Array) -> Array:
        """Entries that are arrays as one array, each of them checked."""
        out = np.empty((len(column), *self.shape), np.int64 if self.whole else np.float64)
        for row, entry in enumerate(column):
            if entry is None:
                raise table.refused(self.name, row, "is empty: remove the row")
            try:
                array = np.asarray(entry)
            except ValueError:
                array = np.empty(0, dtype=object)
            if array.shape != self.shape or array.dtype.kind not in self._kinds:
                raise self._misfit(table, row)
            out[row] = array
        return out

    @property
    def _kinds(self) -> str:
        return "iu" if self.whole else "biuf"

    def _misfit(self, table: Table, row: int) -> BadInput:
        what = "whole numbers" if self.whole else "numbers"
        return table.refused(
            self.name, row, f"is {self._entry(table, row)}: {what} of shape {self.shape} are needed"
        )

    def _filled(self, table: Table, row: int, target: bool) -> Any:
        """The public value for a missing entry, or the refusal of the first one."""
        if target:
            raise table.refused(self.name, row, "is empty, and it is the target: remove the row")
        if self.fill is None:
            raise table.refused(
                self.name, row, "is empty: declare a public value for such entries "
                f"({self.where}.fill), or remove the row"
            )  # fmt: skip
        return self.fill

    def _entry(self, table: Table, row: int) -> str:
        return shown(table.column(self.name)[row])


def declaration(name: str) -> str:
    """The key of a column's declaration, on one line."""
    return f"columns.{' '.join(name.split())}"


def _check_pairs(column: Column) -> None:
    where = column.where
    for key in ("low", "high", "mean", "std"):
        value = getattr(column, key)
        if value is None:
            continue
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not (number and abs(float(value)) <= _LARGEST):
            raise BadInput(f"{where}.{key} is {shown(value)}: a finite number is needed")
        object.__setattr__(column, key, float(value))
    for one, other in (("low", "high"), ("mean", "std")):
        if (getattr(column, one) is None) != (getattr(column, other) is None):
            raise BadInput(f"{where} has one of {one} and {other}: give both")
    ways = [
        key
        for key, given in (
            ("low and high", column.low),
            ("mean and std", column.mean),
            ("values", column.values),
            ("length", column.text),
        )
        if given is not None
    ]
    if len(ways) > 1:
        raise BadInput(f"{where} has {ways[0]} and also {ways[1]}: leave one out")
    if column.low is not None and column.high is not None and not column.low < column.high:
        raise BadInput(f"{where}.low is {column.low:g} and high is {column.high:g}: low < high")
    if column.std is not None and not column.std > 0:
        raise BadInput(f"{where}.std is {column.std:g}: a positive number is needed")


def _check_values(column: Column) -> None:
    where, values = column.where, column.values
    if not isinstance(column.other, bool):
        raise BadInput(f"{where}.other is {shown(column.other)}: use true or false")
    if values is None:
        return
    if column.shape:
        raise BadInput(f"{where} holds arrays, which have no values: declare low and high")
    if not values:
        raise BadInput(f"{where}.values is empty: list the categories or labels")
    if len(values) > MOST_VALUES:
        raise BadInput(f"{where} has {len(values)} values: at most {MOST_VALUES} are possible")
    texts = [isinstance(value, str) for value in values]
    numbers = [isinstance(value, Real) and value == value for value in values]
    if not (all(texts) or all(numbers)):
        raise BadInput(f"{where}.values is {shown(list(values))}: use texts only, or numbers only")
    cleaned = tuple(value.strip() if isinstance(value, str) else _plain(value) for value in values)
    object.__setattr__(column, "values", cleaned)
    if len(set(cleaned)) < len(cleaned) or "" in cleaned:
        raise BadInput(f"{where}.values has an entry twice or an empty one: list each once")


def _plain(value: Any) -> Any:
    """A number that JSON knows."""
    return value.item() if isinstance(value, np.generic) else value


def _check_classes(column: Column) -> None:
    where, classes = f"{column.where}.classes", column.classes
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 0:
        raise BadInput(f"{where} is {shown(classes)}: give the number of labels")
    if not classes:
        return
    for key, given in (("values", column.values), ("low or mean", column.scaled or None)):
        if given is not None:
            raise BadInput(f"{column.where} has classes and also {key}: leave one out")
    if not column.shape:
        object.__setattr__(column, "whole", True)
    if column.shape and not column.whole and column.shape != (classes,):
        raise BadInput(
            f"{where} is {classes} and the column holds real numbers of shape {column.shape}: one "
            "for each label is needed, or labels as whole numbers"
        )


def _check_fill(column: Column) -> None:
    where, fill = f"{column.where}.fill", column.fill
    if fill is None:
        return
    if not isinstance(fill, str | Real) or fill != fill:
        raise BadInput(f"{where} is {shown(fill)}: a number or a text is needed")
    if column.text is not None and not isinstance(fill, str):
        raise BadInput(f"{where} is {shown(fill)}: a text is needed")
    if column.shape and column.text is None:
        raise BadInput(f"{where} is {shown(fill)}: arrays are not filled in, remove the rows")
    if column.scaled and isinstance(fill, str):
        raise BadInput(f"{where} is {shown(fill)}: a number is needed")
    object.__setattr__(column, "fill", _plain(fill))
    if column.values is not None and not column.other and fill not in column.values:
        raise BadInput(f"{where} is {shown(fill)}, which is none of {column.where}.values")
