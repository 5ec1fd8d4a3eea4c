"""`TableSchema`: how rows of a table become records, and how undeclared parts of it are fitted.

Whatever is fitted is a statistic of the rows it is fitted on: scales, categories, labels, and which
columns hold numbers at all. So `fit_schema` uses the rows it is given and no others, and lists what
it fitted, for the claims.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, single
from fedveil.data.columns import MOST_VALUES, Column, declaration_key
from fedveil.data.entries import (
    are_arrays,
    are_bits,
    are_dates,
    are_floats,
    as_numbers,
    as_texts,
    day_of,
)
from fedveil.data.tables import Table, quoted_names, read_table
from fedveil.data.user_arrays import Array, check_input_name
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

    feature_columns: tuple[Column, ...]
    target_column: Column
    named: bool = False

    def __post_init__(self) -> None:
        """Raise BadInput for columns that cannot be features or target together."""
        target = self.target_column
        if not self.feature_columns:
            raise BadInput("no features: name at least one column")
        if target.text is not None and self.feature_columns != (target,):
            raise BadInput(
                f"target {target.name!r} is a text, whose next words are predicted from the "
                "words before: leave features out"
            )
        if self.by_name:
            for column in self.feature_columns:
                check_input_name("features that are arrays", column.name)
        if target.whole and not target.as_target.classes:
            raise BadInput(
                f"target {target.name!r} holds arrays of whole numbers: say how many labels "
                f"there are ({declaration_key(target.name)}.classes)"
            )
        if target.dates:
            raise BadInput(
                f"target {target.name!r} is a date: predict a number, such as the days in between"
            )
        if target.text is None and (target.fill is not None or target.other):
            where = declaration_key(target.name)
            raise BadInput(f"{where} is the target, which has no fill or other: remove the rows")

    @property
    def classes(self) -> int:
        """The number of labels, 0 if a number is predicted."""
        return self.target_column.as_target.classes

    @property
    def label_names(self) -> tuple[Any, ...]:
        """The labels in the order of the model's outputs, () if a number is predicted."""
        if self.target_column.text is not None:
            return self.target_column.text.known.all_words
        return self.target_column.values or tuple(range(self.target_column.classes))

    @property
    def by_name(self) -> bool:
        """Whether each feature is an input of its own: `named`, or one of several holds arrays."""
        shapes = [column.shape for column in self.feature_columns]
        return self.named or (len(shapes) > 1 and any(shapes))

    @property
    def vocabulary_size(self) -> int:
        """The number of words of a text column, with padding and unknown, 0 without texts."""
        text = self.feature_columns[0].text
        return 0 if text is None else text.known.size

    @property
    def record_shape(self) -> Inputs[tuple[int, ...]]:
        """The shape of one record, or a dict of shapes by input name."""
        if self.by_name:
            return {column.name: column.shape or (column.width,) for column in self.feature_columns}
        width = sum(column.width for column in self.feature_columns)
        return self.feature_columns[0].shape or (width,)

    def encode(self, table: object) -> Inputs[Array]:
        """Records [rows, ...] of a table with the features, or a dict of such arrays by input name.

        They are float32, or int64 for whole arrays and texts. `table` is anything that
        `FederatedData.from_table` takes. Raises BadInput for a missing column or an entry that does
        not fit.
        """
        rows = read_table(table)
        encoded = [column.encode_entries(rows) for column in self.feature_columns]
        if self.by_name:
            names = (column.name for column in self.feature_columns)
            return dict(zip(names, encoded, strict=True))
        return encoded[0] if len(encoded) == 1 else np.concatenate(encoded, axis=1)

    def targets(self, table: object) -> Array:
        """The targets of a table [rows, ...]: labels as int64, or scaled numbers as float32.

        Raises BadInput for a missing column or an entry that does not fit.
        """
        rows, target = read_table(table), self.target_column
        if target.text is not None:
            return target.text.next_words(target.texts(rows))
        if target.shape:
            return target.encode_entries(rows)
        if not self.classes:
            return target.scaled_numbers(rows, target=True).astype(np.float32)
        return target.codes(rows, target=True)

    def decode(self, outputs: Array, records: Inputs[Array] | None = None) -> dict[str, Array]:
        """Predictions, by column name, of a model's outputs [rows, labels] or [rows, 1].

        "prediction" is the likeliest label, and "p(LABEL)" the probability of each. Or it is the
        number in the target's own unit. A target of several places or numbers has as many
        predictions and no probabilities. Where several labels hold at once, the prediction is a
        mask of those more likely than not. Of next words, it is the word after the end of each
        text, if these `records` are given. Raises BadInput for outputs of another shape.
        """
        logits, target = np.asarray(outputs, dtype=np.float64), self.target_column.as_target
        if logits.shape[1:] != target.output_shape:
            raise BadInput(
                f"outputs have shape {logits.shape}: one row per record and {target.output_shape} "
                "numbers in each are needed"
            )
        if not target.classes:
            numbers = logits if target.shape else logits[:, 0]
            return {"prediction": self.target_column.restored(numbers)}
        if target.several:
            prediction: Array = logits > 0
            shares = 1 / (1 + np.exp(-logits.clip(-_STEEPEST, _STEEPEST)))
        else:
            if self.target_column.text is not None:
                logits = known_words(logits, None if records is None else single(records))
            prediction = np.array(self.label_names)[logits.argmax(axis=-1)]
            if target.shape or target.classes > MOST_VALUES:
                return {"prediction": prediction}
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            shares = weights / weights.sum(axis=1, keepdims=True)
        by_label = {f"p({label})": shares[:, k] for k, label in enumerate(self.label_names)}
        return {"prediction": prediction, **by_label}

    def to_dict(self) -> dict[str, Any]:
        """JSON values: features (a list of `Column.to_dict`), target, and "named": True if so."""
        return {
            "features": [column.to_dict() for column in self.feature_columns],
            "target": self.target_column.to_dict(),
            **({"named": True} if self.named else {}),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The schema of a dict from `to_dict`. Raises BadInput for anything else."""
        try:
            columns = []
            for column in (*plain["features"], plain["target"]):
                options = dict(column)
                options |= {k: tuple(options[k]) for k in ("values", "shape") if k in column}
                if "text" in column:
                    options["text"] = Text.from_dict(column["text"])
                columns.append(Column(**options))
            return cls(tuple(columns[:-1]), columns[-1], bool(plain.get("named", False)))
        except (TypeError, KeyError, AttributeError, ValueError) as e:
            raise BadInput(f"{shown(plain)} is no schema of a table: {e}") from e


FEW = 20
"""Whole numbers are labels if there are no more different ones."""


def fit_schema(
    features: Sequence[Column], target: Column, rows: Table, whose: str
) -> tuple[TableSchema, str]:
    """(the schema of a table, a text that lists what was fitted on `rows`, "" if nothing was).

    A target of texts has no features but its own words. Raises BadInput where the rows do not
    settle a column.

    Args:
        features: Feature columns as declared.
        target: The target as declared.
        rows: The rows to fit on.
        whose: Whose rows these are, for messages.
    """
    if target.text is not None:
        settled, what = _fit_text(target, rows)
        return TableSchema((settled,), settled), what and f"{what} of {target.name!r}"
    names: dict[str, list[str]] = {}
    fitted = []
    for column in (*features, target):
        fit = fit_target if column is target else fit_feature
        settled, what = fit(column, rows, whose)
        fitted.append(settled)
        if what:
            names.setdefault(what, []).append(column.name)
    lists = [f"{what} of {quoted_names(columns)}" for what, columns in names.items()]
    return TableSchema(tuple(fitted[:-1]), fitted[-1]), ", ".join(lists)


def undeclared_columns(features: Sequence[Column], target: Column, rows: Table) -> list[str]:
    """The names of the columns that `fit_schema` would fit. Arrays of numbers are not fitted."""
    missing = []
    for column in [target] if target.text is not None else [*features, target]:
        if column.text is not None:
            declared = column.text.vocabulary is not None
        else:
            declared = _is_declared(column) or are_arrays(rows[column.name])
        if not declared:
            missing.append(column.name)
    return missing


def _is_declared(column: Column) -> bool:
    """Whether a column has a scale, values or a number of classes."""
    return bool(column.scaled or column.values is not None or column.classes)


def fit_feature(column: Column, rows: Table, whose: str) -> tuple[Column, str]:
    """(the feature as declared or as fitted on the rows, what was fitted or "")."""
    entries = rows[column.name]
    if column.text is not None:
        return _fit_text(column, rows)
    if column.classes:
        key = f"{declaration_key(column.name)}.classes"
        raise BadInput(f"{key} is for the target: declare values, or omit it")
    if are_arrays(entries):
        return _fit_array(column, rows), ""
    if _is_declared(column):
        return column, ""
    if as_numbers(entries)[1].any():
        if not are_dates(entries):
            values = _categories(column, rows, whose)
            return replace(column, values=values, other=True), "categories"
        fill = day_of(column.fill) if isinstance(column.fill, str) else None
        column = replace(column, dates=True, fill=column.fill if fill is None else fill)
    return _fit_scale(column, rows, whose), "means and standard deviations"


def _fit_scale(column: Column, rows: Table, whose: str) -> Column:
    """A column of numbers or dates with the mean and standard deviation of these rows.

    Missing entries count as `fill`; without one they count for nothing, if zeros stand for them.
    """
    way_out = f"leave it out of features, or declare {declaration_key(column.name)}.low and high"
    column = replace(column, mean=0.0, std=1.0)
    numbers = column.scaled_numbers(rows)
    if column.fill is None:
        numbers = numbers[~np.isnan(column.parsed_numbers(rows)[0])]
    if len(numbers) == 0:
        raise BadInput(f"{rows.name}: column {column.name!r} is empty in all {whose}: {way_out}")
    if np.ptp(numbers) == 0:
        value = shown(rows[column.name][0]) if column.dates else f"{numbers[0]:g}"
        raise BadInput(f"{rows.name}: column {column.name!r} is {value} in all {whose}: {way_out}")
    return replace(column, mean=float(numbers.mean()), std=float(numbers.std()))


def _fit_text(column: Column, rows: Table) -> tuple[Column, str]:
    """(a column of texts with a vocabulary, "words" if that was counted in these rows or "")."""
    if column.text is None or column.text.vocabulary is not None:
        return column, ""
    texts = column.texts(rows)
    try:
        return replace(column, text=column.text.counted(texts)), "words"
    except BadInput as e:
        raise BadInput(f"{rows.name}: column {column.name!r}: {e}") from e


def _fit_array(column: Column, rows: Table) -> Column:
    """A column of arrays with their shape, and whether they stay whole numbers.

    Raises BadInput for entries that are not arrays of numbers.
    """
    entries = rows[column.name]
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


def fit_target(column: Column, rows: Table, whose: str) -> tuple[Column, str]:
    """(the target as declared or as guessed from the rows, what was fitted or "").

    Raises BadInput where it is not clear whether whole numbers are labels.
    """
    entries, where = rows[column.name], declaration_key(column.name)
    if are_arrays(entries):
        return _fit_array(column, rows), ""
    if _is_declared(column):
        if column.values is not None and len(column.values) < 2:
            raise BadInput(f"{where}.values has one label: two or more are needed")
        return column, ""
    if are_bits(entries):
        return replace(column, values=(False, True)), "labels"
    if as_numbers(entries)[1].any():
        return replace(column, values=_categories(column, rows, whose)), "labels"
    numbers = column.scaled_numbers(rows, target=True)
    if (numbers % 1 != 0).any():
        return column, "the type"
    distinct = sorted(set(numbers.tolist()))
    if are_floats(entries) or len(distinct) > FEW:
        written = ", written as real ones," if are_floats(entries) else ""
        raise BadInput(
            f"{rows.name}: target {column.name!r} has {len(distinct)} different whole numbers"
            f"{written} in {whose}: declare labels ({where}.values), or a number ({where}.low and "
            "high)"
        )
    if len(distinct) < 2:
        raise _one_value(column, rows, whose, f"{distinct[0]:g}")
    return replace(column, values=tuple(map(int, distinct))), "labels"


def _categories(column: Column, rows: Table, whose: str) -> tuple[str, ...]:
    """The different texts of a column, sorted.

    Raises BadInput if there is one only, or so many that each may be somebody's own. `whose` is a
    noun for the rows in messages.
    """
    distinct = sorted({text for text in as_texts(rows[column.name]) if text is not None})
    if len(distinct) == 1:
        raise _one_value(column, rows, whose, repr(distinct[0]))
    if len(distinct) > MOST_VALUES or (len(distinct) > FEW and 2 * len(distinct) > len(rows)):
        where = declaration_key(column.name)
        raise BadInput(
            f"{rows.name}: column {column.name!r} has {len(distinct)} different texts in "
            f"{len(rows)} {whose}: leave it out of features, or declare {where}"
            f".values, or {where}.length if its texts are to be read word by word"
        )
    return tuple(distinct)


def _one_value(column: Column, rows: Table, whose: str, value: str) -> BadInput:
    """A BadInput about a column that has one value in all rows, to be raised by the caller.

    `whose` is a plural noun for the rows, such as "test records", and `value` is the value as the
    message shows it.
    """
    return BadInput(
        f"{rows.name}: column {column.name!r} is {value} in all {whose}: declare "
        f"{declaration_key(column.name)}.values, or omit it"
    )
