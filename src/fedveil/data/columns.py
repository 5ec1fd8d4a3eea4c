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
from fedveil.data.entries import Bits, Floats, are_arrays, as_days, as_numbers, as_texts, day_of
from fedveil.data.tables import Table, quoted_names
from fedveil.data.user_arrays import Array
from fedveil.data.vocabulary import KEYS as TEXT_KEYS
from fedveil.data.vocabulary import Text

Value = str | bool | int | float

MOST_VALUES = 1000
"""Categories of a column, each of which is a feature of its own."""

_LARGEST = 1e30  # what is beyond has no square in float32's range
_PIECE = 1 << 22  # numbers scaled at once
_SCALES = ("low", "high", "mean", "std")
_DATED = ("low", "high", "mean", "fill")
_FLAGS = ("other", "whole", "classes", "dates", "zero_missing")
_DECLARED = (*_SCALES, "values", "fill", "other", "classes", *TEXT_KEYS)


@dataclass(frozen=True)
class Column:
    """How one column becomes numbers: scaled, standardised, one-hot, or words of a text.

    No entry's number depends on another entry.

    Attributes:
        name: The column's name.
        low, high: A number is scaled from this range to [-1, 1] and clamped outside.
        mean, std: Or it is standardised by these.
        values: One of these becomes a one-hot vector, or a label's place in the list.
        fill: Stands for an entry that is missing.
        zero_missing: Without `fill`, whether a missing entry becomes zeros: the middle of a range,
            the mean, or none of the categories.
        dates: Whether entries are dates in ISO 8601. They are scaled as days since the year 1.
        other: Whether anything that is not in `values` becomes zeros.
        shape: The shape of entries that are arrays, whose elements are scaled one by one.
        whole: Whether such arrays stay whole numbers.
        classes: The number of labels of a target whose labels are called by their numbers: one per
            row, one in each place of an array of whole numbers, or of an array of real ones each, 0
            to 1, how true that label is.
        text: How a text becomes an array of whole numbers, one for each word. As the target, it
            becomes the word that follows each.
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
    dates: bool = False
    zero_missing: bool = False

    def __post_init__(self) -> None:
        """Raise BadInput for keys that contradict each other, and turn values to plain types."""
        _check_scale(self)
        plain: dict[str, Any] = {
            key: float(getattr(self, key)) for key in _SCALES if getattr(self, key) is not None
        }
        if self.text is not None:
            plain |= {"shape": (self.text.length,), "whole": True}
        elif isinstance(self.classes, int | np.integer) and self.classes and not self.shape:
            plain["whole"] = True
        # NumPy's numbers become those that JSON knows
        entries: list[Any] = [
            value.item() if isinstance(value, np.generic) else value
            for value in (self.fill, *(self.values or ()))
        ]
        if self.values is not None:
            plain["values"] = tuple(v.strip() if isinstance(v, str) else v for v in entries[1:])
        for key, value in {**plain, "fill": entries[0]}.items():
            object.__setattr__(self, key, value)
        _check_labels(self)

    @classmethod
    def of_target(cls, name: str, target: Target) -> "Column":
        """A column that holds targets of the form `target` as they are: nothing is scaled."""
        if not (target.classes or target.shape):
            return cls(name, mean=0.0, std=1.0)
        whole = target.classes > 0 and not target.several
        return cls(name, shape=target.shape, whole=whole, classes=target.classes)

    @property
    def as_target(self) -> Target:
        """The `Target` of this column, if it is the one that is predicted."""
        if self.text is not None:
            return Target(self.text.known.size, self.shape)
        several = self.classes > 0 and not self.whole
        return Target(self.classes or len(self.values or ()), self.shape, several)

    @classmethod
    def declared(cls, name: str, options: object) -> "Column":
        """A column from a user's declaration, a dict. Raises BadInput for wrong keys or values."""
        where = declaration_key(name)
        if not isinstance(options, Mapping):
            raise BadInput(f"{where} is {shown(options)}: use low, high, values, ...")
        for key in options:
            if key not in _DECLARED:
                raise BadInput(f"unknown key {where}.{key}: use one of {', '.join(_DECLARED)}")
        of_text = {key: options[key] for key in TEXT_KEYS if options.get(key) is not None}
        others = {key: value for key, value in options.items() if key not in TEXT_KEYS}
        values = others.get("values")
        if values is not None:
            if isinstance(values, str | bytes) or not isinstance(values, Iterable):
                raise BadInput(f"{where}.values is {shown(values)}: a list is needed")
            others["values"] = tuple(values)
        others |= _declared_dates(where, others)
        return cls(name, **others, text=Text.declared(where, of_text) if of_text else None)

    @property
    def scaled(self) -> bool:
        """Whether the column has a scale: low and high, or mean and std."""
        return self.low is not None or self.mean is not None

    @property
    def width(self) -> int:
        """The number of features that the column becomes: its values, or 1. Arrays count as 1."""
        return len(self.values) if self.values is not None else 1

    def encode_entries(self, table: Table) -> Array:
        """Features of all rows: float32 [rows, width], or arrays [rows, *shape].

        Arrays and texts are int64 if they are whole numbers.
        """
        if self.text is not None:
            return self.text.word_numbers(self.texts(table))
        if self.shape:
            return self._arrays(table)
        if self.values is None:
            return self.scaled_numbers(table).astype(np.float32)[:, None]
        hot: Array = self.codes(table)[:, None] == np.arange(self.width)
        return hot.astype(np.float32)

    def scaled_numbers(self, table: Table, *, target: bool = False) -> Floats:
        """The column's numbers, scaled and with missing ones replaced by `fill`, [rows].

        Raises BadInput for an entry that is not a number, for a missing entry without `fill`, and
        for any missing entry of a `target`.
        """
        numbers, odd = self.parsed_numbers(table)
        if odd.any():
            row, where = int(np.argmax(odd)), declaration_key(self.name)
            need = f": a number is needed (or declare {where}.values, if it has categories)"
            if self.dates:
                need = ": a date such as 2026-01-31 is needed"
            elif day_of(table[self.name][row]) is not None:
                need = f": a number is needed (or declare {where}.low and high as dates)"
            raise self._entry_error(table, row, need)
        missing = np.isnan(numbers)
        if missing.any():
            fill = self._fill_for(table, int(np.argmax(missing)), target)
            numbers = np.where(missing, self._units[0] if fill is None else fill, numbers)
        return self._scale(table, numbers)

    def parsed_numbers(self, table: Table) -> tuple[Floats, Bits]:
        """(the entries as numbers or days, NaN where missing; a mask of those that are neither)."""
        return as_days(table[self.name]) if self.dates else as_numbers(table[self.name])

    def codes(self, table: Table, *, target: bool = False) -> npt.NDArray[np.int64]:
        """The place of each entry in `values`, [rows], -1 for entries that are none of them.

        With `classes`, the entries are the labels themselves. Raises BadInput for an entry that is
        none of the values, unless `other` is set, for a missing entry without `fill`, and for any
        missing entry of a `target`.
        """
        if self.classes:
            numbers = self.scaled_numbers(table, target=True)
            wrong = (numbers < 0) | (numbers >= self.classes) | (numbers % 1 != 0)
            if wrong.any():
                need = f": a label of 0..{self.classes - 1} is needed"
                raise self._entry_error(table, int(np.argmax(wrong)), need)
            return numbers.astype(np.int64)
        values, column = self.values or (), table[self.name]
        entries: list[Any]
        if isinstance(values[0], str):
            places: dict[Any, int] = {value: place for place, value in enumerate(values)}
            entries = as_texts(column)
        else:
            places = {float(value): place for place, value in enumerate(values)}
            numbers, odd = as_numbers(column)
            entries = [None if number != number else number for number in numbers.tolist()]
            for row in np.flatnonzero(odd).tolist():
                entries[row] = shown(column[row])
        if None in entries:
            fill = self._fill_for(table, entries.index(None), target)
            fill = str(fill) if isinstance(values[0], str) and fill is not None else fill
            entries = [fill if entry is None else entry for entry in entries]
        codes = np.array([places.get(entry, -1) for entry in entries], dtype=np.int64)
        unknown = (codes < 0) & np.array([entry is not None for entry in entries], dtype=bool)
        if not self.other and unknown.any():
            where = declaration_key(self.name)
            way_out = f"add it to {where}.values, or declare {where}.other = true"
            if target:
                way_out = f"declare all labels in {where}.values"
            need = f", which is none of its values {quoted_names(values)}: {way_out}"
            raise self._entry_error(table, int(np.argmax(unknown)), need)
        return codes

    def texts(self, table: Table, *, target: bool = False) -> list[str]:
        """The entries as texts [rows], with missing ones replaced by `fill`.

        Raises BadInput for arrays, for a missing entry without `fill`, and for any missing entry of
        a `target`.
        """
        column = table[self.name]
        if are_arrays(column):
            raise self._entry_error(table, 0, ": a text is needed")
        texts = as_texts(column)
        fill = self._fill_for(table, texts.index(None), target) if None in texts else ""
        return [(fill or "") if text is None else text for text in texts]

    def restored(self, numbers: Array) -> Floats:
        """Scaled numbers in the column's own unit, as float64: the inverse of scaling."""
        centre, half = self._units
        return np.asarray(numbers, dtype=np.float64) * half + centre

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, by name, as JSON values.

        Fields with their default are left out. The shape of a column of texts is left out too.
        """
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
        """(the number that is scaled to 0, the distance that is scaled to 1). (0, 1) by default."""
        if self.low is not None and self.high is not None:
            return (self.low + self.high) / 2, (self.high - self.low) / 2
        if self.mean is not None and self.std is not None:
            return self.mean, self.std
        return 0.0, 1.0

    def _scale(self, table: Table, numbers: Floats, first: int = 0) -> Floats:
        """Numbers clamped and scaled. Raises BadInput for a number that is not finite or too large.

        `first` is the row at which the numbers begin, for the message.
        """
        centre, half = self._units
        within = numbers if self.low is None else np.clip(numbers, self.low, self.high)
        scaled: Floats = (within - centre) / half
        fine = (np.abs(numbers) <= _LARGEST) & (np.abs(scaled) <= _LARGEST)
        if not fine.all():
            need = f": a finite number of at most {_LARGEST:g} is needed"
            raise self._entry_error(table, first + int(np.argwhere(~fine)[0][0]), need)
        return scaled

    def _arrays(self, table: Table) -> Array:
        """Entries that are arrays as one array [rows, *shape]. Raises BadInput for others."""
        column, kinds = table[self.name], "iu" if self.whole else "biuf"
        what = "whole numbers" if self.whole else "numbers"
        need = f": {what} of shape {self.shape} are needed"
        if column.dtype.kind == "O":
            stacked = np.empty((len(column), *self.shape), np.int64 if self.whole else np.float64)
            for row, entry in enumerate(column):
                if entry is None:
                    raise table.entry_error(self.name, row, "is empty: remove the row")
                try:
                    array = np.asarray(entry)
                except ValueError:
                    array = np.empty(0, dtype=object)
                if array.shape != self.shape or array.dtype.kind not in kinds:
                    raise self._entry_error(table, row, need)
                stacked[row] = array
            column = stacked
        if column.shape[1:] != self.shape or column.dtype.kind not in kinds:
            raise self._entry_error(table, 0, need)
        if self.whole:
            return column.astype(np.int64)
        out, step = np.empty(column.shape, np.float32), max(1, _PIECE // math.prod(self.shape))
        for start in range(0, len(column), step):
            piece = column[start : start + step].astype(np.float64)
            out[start : start + step] = self._scale(table, piece, start)
        return out

    def _fill_for(self, table: Table, row: int, target: bool) -> Any:
        """The value for missing entries, None if they become zeros.

        Raises BadInput about `row` if nothing is declared for them, and for a target.
        """
        if target:
            problem = "is empty, and it is the target: remove the row"
            raise table.entry_error(self.name, row, problem)
        if self.fill is None and not self.zero_missing:
            key = f"{declaration_key(self.name)}.fill"
            problem = (
                f"is empty: declare a public value for such entries ({key}), or missing = 'fill' "
                "for all columns, or remove the row"
            )
            raise table.entry_error(self.name, row, problem)
        return self.fill

    def _entry_error(self, table: Table, row: int, need: str) -> BadInput:
        """A BadInput about the entry in a row: its value, then `need`.

        To be raised by the caller.
        """
        return table.entry_error(self.name, row, f"is {shown(table[self.name][row])}{need}")


def _declared_dates(where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a declaration that are dates as days, and `dates` itself; {} without dates.

    A text that is a date is one in a range or a mean. Raises BadInput for other texts there, and
    where some of the keys are dates and some are numbers.
    """
    given = {key: options[key] for key in _DATED if options.get(key) is not None}
    days = {key: day_of(value) for key, value in given.items() if not isinstance(value, Real)}
    for key, day in days.items():
        if day is None and key != "fill":
            raise BadInput(
                f"{where}.{key} is {shown(given[key])}: a number, or a date such as 2026-01-31, is "
                "needed"
            )
    dated = [key for key, day in days.items() if day is not None and key != "fill"]
    if not dated:
        return {}
    for key, value in given.items():
        if days.get(key) is None:
            raise BadInput(f"{where}.{dated[0]} is a date and {key} is {shown(value)}: give a date")
    return {**days, "dates": True}


def declaration_key(name: str) -> str:
    """The key of a column's declaration in messages, "columns.NAME" on one line."""
    return f"columns.{' '.join(name.split())}"


def _check_scale(column: Column) -> None:
    """Raise BadInput unless the column declares its scale in at most one way, completely.

    The ways are low < high, mean with std > 0, values, and length. All numbers are finite.
    """
    where = declaration_key(column.name)
    for key in _SCALES:
        value = getattr(column, key)
        number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (number and abs(float(value)) <= _LARGEST):
            raise BadInput(f"{where}.{key} is {shown(value)}: a finite number is needed")
    for one, other in (("low", "high"), ("mean", "std")):
        if (getattr(column, one) is None) != (getattr(column, other) is None):
            raise BadInput(f"{where} has one of {one} and {other}: give both")
    ways = {
        "low and high": column.low,
        "mean and std": column.mean,
        "values": column.values,
        "length": column.text,
    }
    given = [key for key, value in ways.items() if value is not None]
    if len(given) > 1:
        raise BadInput(f"{where} has {given[0]} and also {given[1]}: leave one out")
    if column.low is not None and column.high is not None and not column.low < column.high:
        low, high = float(column.low), float(column.high)
        raise BadInput(f"{where}.low is {low:g} and high is {high:g}: low < high")
    if column.std is not None and not column.std > 0:
        raise BadInput(f"{where}.std is {float(column.std):g}: a positive number is needed")


def _check_labels(column: Column) -> None:
    """Raise BadInput for `other`, `classes` or `values` that contradict the rest of a column."""
    where, values, classes = declaration_key(column.name), column.values, column.classes
    if not isinstance(column.other, bool):
        raise BadInput(f"{where}.other is {shown(column.other)}: use true or false")
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 0:
        raise BadInput(f"{where}.classes is {shown(classes)}: give the number of labels")
    if classes and (values is not None or column.scaled):
        key = "low or mean" if values is None else "values"
        raise BadInput(f"{where} has classes and also {key}: leave one out")
    if classes and column.shape and not column.whole and column.shape != (classes,):
        raise BadInput(
            f"{where}.classes is {classes} and the column holds real numbers of shape "
            f"{column.shape}: one for each label is needed, or labels as whole numbers"
        )
    if values is not None:
        if column.shape:
            raise BadInput(f"{where} holds arrays, which have no values: declare low and high")
        if not values:
            raise BadInput(f"{where}.values is empty: list the categories or labels")
        if len(values) > MOST_VALUES:
            raise BadInput(f"{where} has {len(values)} values: at most {MOST_VALUES} are possible")
        numbers = all(isinstance(value, Real) and value == value for value in values)
        if not (numbers or all(isinstance(value, str) for value in values)):
            given = shown(list(values))
            raise BadInput(f"{where}.values is {given}: use texts only, or numbers only")
        if len(set(values)) < len(values) or "" in values:
            raise BadInput(f"{where}.values has an entry twice or an empty one: list each once")
    if column.fill is not None:
        _check_fill(column, f"{where}.fill is {shown(column.fill)}")


def _check_fill(column: Column, stated: str) -> None:
    """Raise BadInput for a `fill` that entries of the column cannot be.

    `stated` is the beginning of the message.
    """
    fill, values = column.fill, column.values
    if not isinstance(fill, str | Real) or fill != fill:
        raise BadInput(f"{stated}: a number or a text is needed")
    if column.text is not None and not isinstance(fill, str):
        raise BadInput(f"{stated}: a text is needed")
    if column.shape and column.text is None:
        raise BadInput(f"{stated}: arrays are not filled in, remove the rows")
    if column.scaled and isinstance(fill, str):
        raise BadInput(f"{stated}: a number is needed")
    if values is not None and not column.other and fill not in values:
        raise BadInput(f"{stated}, which is none of {declaration_key(column.name)}.values")
