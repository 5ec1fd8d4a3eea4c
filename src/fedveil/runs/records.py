"""From a recipe's `data` section to the records of clients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedveil.base.checks import TABLE
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.data.load import FITTING, TEXTS, load_records
from fedveil.data.own_table import TableOptions, table_partition, table_records, table_test
from fedveil.data.partition import Records, partition, resampled, shortened
from fedveil.data.tables import check_file
from fedveil.runs.recipe import Recipe
from fedveil.runs.sections.data_section import DataSection

_DIVISION = (
    *("clients", "partition", "alpha", "shards_per_client", "resample", "most_records"),
    *("test", "seed"),
)
_OF_TABLES = ("client", "target", "features", "columns")
_OF_NAMED = ("grades", "digits", "min_records")


def data_of(recipe: Recipe, root: Path | None = None) -> FederatedData:
    """The records of the recipe's clients; they depend on its `data` section and its seed alone."""
    return divided(records_of(recipe.data, root), recipe.data, recipe.seed)


def source_of(section: DataSection) -> str:
    """What decides about `records_of`: two sections with one source have the same records."""
    keys = ("name", "path", "statistics", "test", *_OF_NAMED, *_OF_TABLES)
    return " ".join(repr(getattr(section, key)) for key in keys)


def records_of(section: DataSection, root: Path | None) -> Records | FederatedData:
    """The data set of a recipe as it is stored: saved data are divided already."""
    if section.name == "saved":
        return _saved(section)
    if section.name == TABLE:
        return _table(section)
    if section.path is not None:
        raise BadInput(f"data.path has no effect on {section.name!r}: use --data, or name 'saved'")
    if section.name in TEXTS:
        return _texts(section, root)
    _refuse(section, _OF_TABLES, repr(section.name))
    options = {key: getattr(section, key) for key in _OF_NAMED if getattr(section, key) is not None}
    if section.statistics in ("held-out", "clients") and section.name not in FITTING:
        raise _nothing_fitted(section)
    if section.statistics == "held-out":
        options["held_out"] = True
    return load_records(section.name, root, **options)


def divided(records: Records | FederatedData, section: DataSection, seed: int) -> FederatedData:
    """The records among clients, as a recipe's `data` section says."""
    if section.statistics == "public" and not records.fitted:
        raise _nothing_fitted(section)
    data = _partitioned(records, section, seed)
    return replace(data, declared_public=True) if section.statistics == "public" else data


def _saved(section: DataSection) -> FederatedData:
    _refuse(section, (*_DIVISION, *_OF_NAMED, *_OF_TABLES), "saved data")
    if section.path is None:
        raise BadInput("data.path is missing: name the folder FederatedData.save wrote")
    if section.statistics not in (None, "public"):
        raise BadInput(
            f"data.statistics is {section.statistics!r} and saved data are fitted: use 'public'"
        )
    return FederatedData.open(Path(section.path))


def _table(section: DataSection) -> Records:
    _refuse(section, ("grades", "digits"), "a table")
    if section.path is None:
        raise BadInput("data.path is missing: name a .csv or .parquet file")
    check_file(Path(section.path))
    if section.target is None:
        raise BadInput("data.target is missing: name the column that is to be predicted")
    table_partition(section.client, section.partition, section.clients)
    asked = TableOptions(
        section.target,
        section.client,
        section.features,
        _columns(section),
        section.test,
        section.statistics,
        section.min_records,
    )
    return table_records(section.path, asked)


def _texts(section: DataSection, root: Path | None) -> Records:
    _refuse(section, ("client", "target", "features", "grades", "digits"), repr(section.name))
    return load_records(
        section.name,
        root,
        columns=_columns(section),
        statistics=section.statistics,
        test=section.test,
        min_records=section.min_records,
    )


def _columns(section: DataSection) -> dict[str, Any]:
    """What a recipe says of columns, as plain values."""
    columns = section.columns or {}
    return {name: column.model_dump(exclude_none=True) for name, column in columns.items()}


def _refuse(section: DataSection, keys: tuple[str, ...], what: str) -> None:
    for key in keys:
        if getattr(section, key) is not None:
            raise BadInput(f"data.{key} has no effect on {what}: leave it out")


def _nothing_fitted(section: DataSection) -> BadInput:
    return BadInput(
        f"data.statistics is {section.statistics!r} and nothing of {section.name} was fitted on "
        "clients' records: leave it out"
    )


def _partitioned(
    records: Records | FederatedData, section: DataSection, seed: int
) -> FederatedData:
    if isinstance(records, FederatedData):
        return records
    seed = seed if section.seed is None else section.seed
    if section.resample is not None:
        records = resampled(records, section.resample, seed)
    kind: str = section.partition or "iid"
    test = section.test
    if section.name == TABLE:
        kind = table_partition(section.client, section.partition, section.clients)
        test = table_test(kind)
    elif section.name in TEXTS:
        kind = section.partition or "grouped"
        test = table_test(kind)
    data = partition(
        records,
        kind=kind,
        clients=section.clients,
        seed=seed,
        alpha=section.alpha,
        shards_per_client=1 if section.shards_per_client is None else section.shards_per_client,
        test=test,
    )
    return data if section.most_records is None else shortened(data, section.most_records, seed)
