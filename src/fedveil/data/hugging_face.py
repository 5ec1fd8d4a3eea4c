"""Data sets of the Hugging Face `datasets` library as tables.

The library is imported only to read a folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, one_line
from fedveil.data.data_files import optional_module
from fedveil.data.tables import Table, from_arrow, listed, read_table
from fedveil.data.user_arrays import Array

_NESTED = ("list", "large_list", "fixed_size_list", "struct", "extension")
_TRAIN, _TEST = "train", "test"


def splits_of(source: object) -> tuple[Any, Any | None]:
    """The training split, and the test split if there is one, of a data set or its folder."""
    if isinstance(source, str | Path):
        library = optional_module(
            "datasets", package="datasets", needed_by="a data set on disk", extra="datasets"
        )
        try:
            source = library.load_from_disk(str(source))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadInput(f"{source} is no data set that save_to_disk wrote: {one_line(e)}") from e
    if isinstance(source, Mapping):
        if _TRAIN not in source:
            raise BadInput(f"the data set has splits {listed(list(source))} and no 'train': add it")
        found = source[_TRAIN], source.get(_TEST)
    else:
        found = source, None
    for split in found:
        usable = all(hasattr(split, name) for name in ("features", "with_format", "__len__"))
        if split is not None and not usable:
            raise BadInput(
                f"the data set is {shown(split)}: a Dataset or DatasetDict of the datasets library "
                "is needed, loaded and not streamed"
            )
    return found


def tables_of(
    source: object, target: str, client: str | None, features: list[str] | None
) -> tuple[Table, Table | None, dict[str, object]]:
    """The training and test tables of a data set, and the label names that it declares."""
    train, test = splits_of(source)
    named = [name for name in (client, target) if name is not None]
    wanted = None if features is None else [*features, *named]
    table = _table(train, wanted, "the training split")
    tested = None if test is None else _table(test, wanted, "the test split")
    names = {key: _labels(train, key) for key in table.columns if key != client}
    return table, tested, {key: {"values": value} for key, value in names.items() if value}


def _table(split: Any, wanted: list[str] | None, name: str) -> Table:
    """The wanted columns of a split (None: all), with labels by their names."""
    keys = [key for key in split.features if wanted is None or key in wanted]
    if not keys:
        raise BadInput(f"{name} has no column of {listed(wanted or [])}: see its features")
    arrow = split.with_format("arrow", columns=keys)[:]
    columns: dict[str, Array] = {}
    for key in keys:
        column = arrow.column(key)
        if labels := _labels(split, key):
            columns[key] = _named(column.to_pylist(), labels)
        elif str(column.type).startswith(_NESTED):
            columns[key] = np.asarray(split.with_format("numpy", columns=[key])[key][:])
        else:
            columns[key] = from_arrow(column)
    return read_table(columns, name)


def _labels(split: Any, key: str) -> list[str] | None:
    return getattr(split.features[key], "names", None)


def _named(codes: list[int | None], names: list[str]) -> Array:
    """Labels by name, None where a record has none (-1)."""
    found = [None if code is None or code < 0 else names[code] for code in codes]
    return np.array(found, dtype=object)
