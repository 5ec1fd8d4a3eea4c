"""Fit the parts of a table's schema that were not declared, on some of its rows.

Whatever is found is a statistic of these rows: scales, categories, labels, and which columns hold
numbers at all. So it is found from the rows it is handed and no others, and it is named, for the
claims.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.data.columns import MOST_VALUES, Column
from fedveil.data.schema import TableSchema
from fedveil.data.table_cells import are_arrays, are_bits, are_floats, as_numbers, as_texts
from fedveil.data.tables import Table, listed

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
