"""Load a data set by its name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.base.checks import DATA_SETS, hint
from fedveil.base.errors import BadInput
from fedveil.data.data_files import data_root, find_file
from fedveil.data.image_sets import load_cifar10, load_digits, load_femnist, load_mnist
from fedveil.data.own_table import TableOptions, table_records
from fedveil.data.partition import Records
from fedveil.data.tabular_sets import (
    load_diabetes,
    load_lending_club,
    load_location30,
    load_purchase100,
    load_texas100,
)

EMBEDDED = ("digits", "diabetes", "saved", "table")
"""What no data folder is needed for: scikit-learn's own, and data that name their path."""

FITTING = ("lending-club", "diabetes")
"""The data sets whose features are fitted on records."""

TEXTS = ("sentiment140", "reddit")
"""The data sets of texts, which are read as a table is."""


def load_records(name: str, root: Path | None = None, **options: Any) -> Records:
    """The records of a data set, from its subfolder of `root` (or FEDVEIL_DATA).

    `digits` and `diabetes` come with scikit-learn and need no folder. Raises BadInput for an
    unknown name or option, and for files that are missing or malformed.

    Options: `min_records` and `digits` of femnist, `grades` of lending-club, and `held_out` of
    those that fit their features: on the test split instead of the clients' records. Those of
    `TEXTS` are what `FederatedData.from_table` takes. All of them are published, so that the test
    split is public wherever it is not of the clients themselves.
    """
    if name not in DATA_SETS:
        listed = f"use one of {', '.join(DATA_SETS)}{hint(name, DATA_SETS)}"
        raise BadInput(f"data set {name!r} is unknown: {listed}")
    loader, known = _LOADERS[name]
    for option in options:
        if option not in known:
            raise BadInput(f"{name} has no option {option!r}: use {', '.join(known) or 'none'}")
    records = loader(**options) if name in EMBEDDED else loader(data_root(root), **options)
    return replace(records, public_test=True)


def _load_sentiment140(root: Path, **options: Any) -> Records:
    """Sentiment140: tweets, negative (0) or positive (4) (Go, Bhayani and Huang 2009).

    They are rows of words, owned by their users. The column "text" is read as 30 words hashed to
    4096 numbers unless `columns` declares it.
    """
    path = find_file(
        root,
        ["sentiment140/*.parquet"],
        expected="a parquet file of tweets with label (0 or 4), user and text",
    )
    labels = {"label": {"values": [0, 4]}}
    usual = {"length": 30, "buckets": 4096}
    return _load_texts("sentiment140", path, "label", "user", ["text"], labels, usual, **options)


def _load_reddit(root: Path, **options: Any) -> Records:
    """Comments of Reddit as rows of words and of the words that follow them, by author.

    The column "text" is read as 20 words unless `columns` declares it, of a vocabulary that is
    counted in the held-out authors' comments: the 4000 most common words that 5 of them have.
    """
    path = find_file(
        root, ["reddit/*.parquet"], expected="a parquet file of comments with author and text"
    )
    usual = {"length": 20, "most_words": 4000, "min_texts": 5}
    return _load_texts("reddit", path, "text", "author", None, {}, usual, **options)


def _load_texts(
    name: str,
    path: Path,
    target: str,
    client: str,
    features: list[str] | None,
    other_columns: Mapping[str, object],
    usual: Mapping[str, Any],
    *,
    columns: Mapping[str, object] | None = None,
    test: object = None,
    **options: Any,
) -> Records:
    """The records of a table of texts by owner, about a fifth of whom is held out.

    Most owners wrote one text: merge them (partition "grouped"), or keep those with `min_records`.
    Raises BadInput if `columns` declares another column than "text".

    Args:
        name: The data set.
        path: The file.
        target: The column to predict.
        client: The column with the owner.
        features: Feature columns. None takes the words of the target.
        other_columns: Declarations of columns other than "text".
        usual: The usual declaration of "text". A declaration in `columns` with any other key than
            "length" and "fill" replaces all of it but "length".
        columns: The user's declaration of "text".
        test: The test split, "by-client" by default.
        options: Further fields of `TableOptions`.
    """
    for column in columns or {}:
        if column != "text":
            raise BadInput(
                f"columns.{column} is declared and {name} has one column to declare, 'text': leave "
                "it out"
            )
    text = (columns or {}).get("text", {})
    if isinstance(text, Mapping):
        completed = usual if text.keys() <= {"length", "fill"} else {"length": usual["length"]}
        text = {**completed, **text}
    declared = {**other_columns, "text": text}
    table = TableOptions(target, client, features, declared, test or "by-client", **options)
    return replace(table_records(path, table), name=name)


_OF_TEXTS = ("columns", "statistics", "test", "min_records")
_LOADERS: dict[str, tuple[Callable[..., Records], tuple[str, ...]]] = {
    "digits": (load_digits, ()),
    "diabetes": (load_diabetes, ("held_out",)),
    "mnist": (load_mnist, ()),
    "fashion-mnist": (partial(load_mnist, name="fashion-mnist"), ()),
    "femnist": (load_femnist, ("min_records", "digits")),
    "cifar10": (load_cifar10, ()),
    "sentiment140": (_load_sentiment140, _OF_TEXTS),
    "reddit": (_load_reddit, _OF_TEXTS),
    "location30": (load_location30, ()),
    "purchase100": (load_purchase100, ()),
    "texas100": (load_texas100, ()),
    "lending-club": (load_lending_club, ("grades", "held_out")),
}
