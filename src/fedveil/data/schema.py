"""`TableSchema`: how rows of a table become records, and how undeclared parts of it are fitted.

Whatever is fitted is a statistic of the rows it is fitted on: scales, categories, labels, and which
columns hold numbers at all. So `fit_schema` uses the rows it is given and no others, and lists what
it fitted, for the claims.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, single
from fedveil.data.columns import MOST_VALUES, Column
from fedveil.data.tables import (
    Table,
    are_arrays,
    are_bits,
    are_floats,
    as_numbers,
    as_texts,
    listed,
    read_table,
)
from fedveil.data.user_arrays import Array, check_input
from fedveil.data.vocabulary import Text, known_words

_STEEPEST = 700.0  # beyond, exp overflows and a probability is 0 or 1


@dataclass(frozen=True)
class TableSchema:
    """The columns that are features, in their order, and the one that is predicted.

    It is public: what of it was not declared was fitted, and `FederatedData.assumptions` says on
    whose records. Tables are whatever `FederatedData.from_table` takes; columns that are neither
    are ignored. With `named`, or where one of several features holds arrays, each is an input of
    its own, by its name; otherwise they are one vector.

    >>> age, sex = Column("age", low=0, high=100), Column("sex", values=("f", "m"))
    >>> schema = TableSchema((age, sex), Column("well", values=("no", "yes")))
    >>> schema.encode({"age": [50, 75], "sex": ["m", "f"]}).tolist()
    [[0.0, 0.0, 1.0], [0.5, 1.0, 0.0]]
    >>> schema.decode(np.array([[0.0, 2.0]]))["prediction"].tolist()
    ['yes']
    """

    features: tuple[Column, ...]
    target: Column
    named: bool = False

    def __post_init__(self) -> None:
        if not self.features:
            raise BadInput("no features: name at least one column")
        if self.target.text is not None and self.features != (self.target,):
            raise BadInput(
                f"target {self.target.name!r} is a text, whose next words are predicted from the "
                "words before: leave features out"
            )
        if self.by_name:
            for column in self.features:
                check_input("features that are arrays", column.name)
        if self.target.whole and not self.target.target.classes:
            raise BadInput(
                f"target {self.target.name!r} holds arrays of whole numbers: say how many labels "
                f"there are ({self.target.where}.classes)"
            )
        if self.target.text is None and (self.target.fill is not None or self.target.other):
            raise BadInput(
                f"{self.target.where} is the target, which has no fill and no other: remove "
                "the rows"
            )

    @property
    def classes(self) -> int:
        """The number of labels, 0 if a number is predicted."""
        return self.target.target.classes

    @property
    def labels(self) -> tuple[Any, ...]:
        """The labels, in the order of the model's outputs."""
        if self.target.text is not None:
            return self.target.text.known.names
        return self.target.values or tuple(range(self.target.classes))

    @property
    def by_name(self) -> bool:
        """Whether each feature is an input of its own: one of several features holds arrays."""
        arrays = len(self.features) > 1 and any(column.shape for column in self.features)
        return self.named or arrays

    @property
    def words(self) -> int:
        """The size of the vocabulary of text columns, 0 without any."""
        text = self.features[0].text
        return 0 if text is None else text.known.size

    @property
    def record_shape(self) -> Inputs[tuple[int, ...]]:
        """The shape of one record, or a dict of shapes by input name."""
        if self.by_name:
            return {column.name: column.shape or (column.width,) for column in self.features}
        return self.features[0].shape or (sum(column.width for column in self.features),)

    def encode(self, table: object) -> Inputs[Array]:
        """Records [rows, ...] of a table with the features: float32, or int64 for whole arrays."""
        rows = read_table(table)
        if self.by_name:
            return {column.name: column.encode(rows) for column in self.features}
        encoded = [column.encode(rows) for column in self.features]
        return encoded[0] if len(encoded) == 1 else np.concatenate(encoded, axis=1)

    def targets(self, table: object) -> Array:
        """What is to be predicted [rows, ...]: labels as int64, or scaled numbers as float32."""
        rows, target = read_table(table), self.target
        if target.text is not None:
            return target.text.next_words(target.texts(rows))
        if target.shape:
            return target.encode(rows)
        if not self.classes:
            return target.numbers(rows, target=True).astype(np.float32)
        return target.codes(rows, target=True)

    def decode(self, outputs: Array, records: Inputs[Array] | None = None) -> dict[str, Array]:
        """Predictions of a model's outputs [rows, labels], or [rows, 1] of a number.

        "prediction" is the likeliest label, and "p(LABEL)" the probability of each; or it is the
        number in the target's own unit. A target of several places or numbers has as many
        predictions; where several labels hold at once, they are those more likely than not. Of
        next words, it is the one after the end of each text, if these `records` are given.
        """
        found, target = np.asarray(outputs, dtype=np.float64), self.target.target
        if found.shape[1:] != target.outputs:
            raise BadInput(
                f"outputs have shape {found.shape}: one row per record and {target.outputs} "
                "numbers in each are needed"
            )
        if not target.classes:
            return {"prediction": self.target.restored(found if target.shape else found[:, 0])}
        if target.several:
            shares = 1 / (1 + np.exp(-found.clip(-_STEEPEST, _STEEPEST)))
            return {"prediction": found > 0, **self._shares(shares)}
        if self.target.text is not None:
            found = known_words(found, None if records is None else single(records))
        weights = np.exp(found - found.max(axis=-1, keepdims=True))
        likeliest = np.array(self.labels)[found.argmax(axis=-1)]
        if target.shape or target.classes > MOST_VALUES:
            return {"prediction": likeliest}
        shares = weights / weights.sum(axis=1, keepdims=True)
        return {"prediction": likeliest, **self._shares(shares)}

    def _shares(self, shares: Array) -> dict[str, Array]:
        return {f"p({label})": shares[:, k] for k, label in enumerate(self.labels)}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "features": [column.to_dict() for column in self.features],
            "target": self.target.to_dict(),
            **({"named": True} if self.named else {}),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "TableSchema":
        """Inverse of `to_dict`."""
        try:
            features, target = tuple(map(_column, plain["features"])), _column(plain["target"])
            return cls(features, target, bool(plain.get("named", False)))
        except (TypeError, KeyError, AttributeError, ValueError) as e:
            raise BadInput(f"{shown(plain)} is no schema of a table: {e}") from e


def _column(plain: Mapping[str, Any]) -> Column:
    lists: dict[str, Callable[[Any], Any]] = {
        "values": tuple,
        "shape": tuple,
        "text": Text.from_dict,
    }
    return Column(**{key: lists.get(key, lambda v: v)(value) for key, value in plain.items()})


FEW = 20
"""Whole numbers are labels if there are no more different ones."""

_SCALES, _CATEGORIES, _LABELS, _TYPE, _WORDS = (
    "means and standard deviations",
    "categories",
    "labels",
    "the type",
    "words",
)


def fit_schema(
    features: Sequence[Column], target: Column, rows: Table, whose: str
) -> tuple[TableSchema, str]:
    """The schema of a table, and a text that lists what was fitted on `rows`, "" if nothing was.

    A target of texts has no features but its own words.
    `whose` says in messages which rows these are.
    """
    if target.text is not None:
        settled, what = _text(target, rows)
        return TableSchema((settled,), settled), what and f"{what} of {target.name!r}"
    found: dict[str, list[str]] = {}
    fitted = []
    for column in (*features, target):
        settled, what = (_target if column is target else _feature)(column, rows, whose)
        fitted.append(settled)
        if what:
            found.setdefault(what, []).append(column.name)
    texts = [f"{what} of {listed(names)}" for what, names in found.items()]
    return TableSchema(tuple(fitted[:-1]), fitted[-1]), ", ".join(texts)


def undeclared(features: Sequence[Column], target: Column, rows: Table) -> list[str]:
    """The columns that `fit_schema` would fit on rows.

    Arrays of numbers are not fitted.
    """
    every = [target] if target.text is not None else [*features, target]
    return [column.name for column in every if not _settled(column, rows)]


def _settled(column: Column, rows: Table) -> bool:
    if column.text is not None:
        return column.text.vocabulary is not None
    declared = column.scaled or column.values is not None or column.classes
    return bool(declared) or are_arrays(rows.column(column.name))


def _feature(column: Column, rows: Table, whose: str) -> tuple[Column, str]:
    entries = rows.column(column.name)
    if column.text is not None:
        return _text(column, rows)
    if column.classes:
        raise BadInput(f"{column.where}.classes is for the target: declare values, or leave it out")
    if are_arrays(entries):
        return _array(column, rows), ""
    if column.scaled or column.values is not None:
        return column, ""
    if as_numbers(entries)[1].any():
        return replace(column, values=_categories(column, rows, whose), other=True), _CATEGORIES
    column = replace(column, mean=0.0, std=1.0)
    numbers = column.numbers(rows)
    if np.ptp(numbers) == 0:
        raise BadInput(
            f"{rows.name}: column {column.name!r} is {numbers[0]:g} in all {whose}: leave it out "
            f"of features, or declare {column.where}.low and high"
        )
    return replace(column, mean=float(numbers.mean()), std=float(numbers.std())), _SCALES


def _text(column: Column, rows: Table) -> tuple[Column, str]:
    """A column of texts, with the words of these rows if no others were declared."""
    if column.text is None or column.text.vocabulary is not None:
        return column, ""
    texts = column.texts(rows)
    try:
        return replace(column, text=column.text.counted(texts)), _WORDS
    except BadInput as e:
        raise BadInput(f"{rows.name}: column {column.name!r}: {e}") from e


def _array(column: Column, rows: Table) -> Column:
    """A column of arrays: their shape, and whether they stay whole numbers."""
    entries = rows.column(column.name)
    first = next(entry for entry in entries if entry is not None)
    try:
        kind = entries.dtype if entries.ndim > 1 else np.asarray(first).dtype
        shape = np.asarray(first).shape
    except ValueError:
        kind, shape = np.dtype(object), ()
    if kind.kind not in "biuf" or 0 in shape or not shape:
        raise BadInput(
            f"{rows.name}: column {column.name!r} holds {shown(first)}: arrays of numbers of one "
            "shape are needed"
        )
    return replace(column, shape=shape, whole=kind.kind in "iu" and not column.scaled)


def _target(column: Column, rows: Table, whose: str) -> tuple[Column, str]:
    """The target column as declared, or guessed from the rows: labels or a number."""
    entries = rows.column(column.name)
    if are_arrays(entries):
        return _array(column, rows), ""
    if column.classes or column.scaled or column.values is not None:
        if column.values is not None and len(column.values) < 2:
            raise BadInput(f"{column.where}.values has one label: two or more are needed")
        return column, ""
    if are_bits(entries):
        return replace(column, values=(False, True)), _LABELS
    if as_numbers(entries)[1].any():
        return replace(column, values=_categories(column, rows, whose)), _LABELS
    numbers = column.numbers(rows, target=True)
    if (numbers % 1 != 0).any():
        return column, _TYPE
    few = sorted(set(numbers.tolist()))
    if are_floats(entries) or len(few) > FEW:
        what = f"{len(few)} different whole numbers" + (
            ", written as real ones," if are_floats(entries) else ""
        )
        raise BadInput(
            f"{rows.name}: target {column.name!r} has {what} in {whose}: declare labels "
            f"({column.where}.values), or a number ({column.where}.low and high)"
        )
    if len(few) < 2:
        raise _one_value(column, rows, whose, f"{few[0]:g}")
    return replace(column, values=tuple(map(int, few))), _LABELS


def _categories(column: Column, rows: Table, whose: str) -> tuple[str, ...]:
    """The different texts, in order. Refuses so many that each may be somebody's own."""
    texts = as_texts(rows.column(column.name))
    found = sorted({text for text in texts if text is not None})
    if len(found) == 1:
        raise _one_value(column, rows, whose, repr(found[0]))
    if len(found) > MOST_VALUES or (len(found) > FEW and 2 * len(found) > len(rows)):
        raise BadInput(
            f"{rows.name}: column {column.name!r} has {len(found)} different texts in "
            f"{len(rows)} {whose}: leave it out of features, or declare {column.where}"
            f".values, or {column.where}.length if its texts are to be read word by word"
        )
    return tuple(found)


def _one_value(column: Column, rows: Table, whose: str, value: str) -> BadInput:
    return BadInput(
        f"{rows.name}: column {column.name!r} is {value} in all {whose}: declare "
        f"{column.where}.values, or leave it out"
    )
