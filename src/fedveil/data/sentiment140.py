"""Sentiment140: tweets by user, negative (0) or positive (4) (Go, Bhayani and Huang 2009)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedveil.data.data_files import find_file
from fedveil.data.loaded_records import Records
from fedveil.data.own_table import TableQuestion, table_records
from fedveil.data.table_split import BY_CLIENT
from fedveil.data.text_column import texts_of

_LABELS = {"label": {"values": [0, 4]}}
_WORDS = {"length": 30, "buckets": 4096}


def load(
    root: Path,
    *,
    columns: Mapping[str, object] | None = None,
    statistics: str | None = None,
    test: object = None,
    min_records: int | None = None,
) -> Records:
    """Tweets as rows of words, owned by their users, about a fifth of whom is held out.

    `columns` says how the column "text" is read, without it 30 words hashed to 4096 numbers. The
    other options are those of `FederatedData.from_table`. Most users wrote one tweet: merge them
    (partition "grouped"), or keep those with `min_records`.
    """
    path = find_file(
        root,
        ["sentiment140/*.parquet"],
        expected="a parquet file of tweets with label (0 or 4), user and text",
    )
    declared = {**_LABELS, **texts_of("sentiment140", columns, _WORDS)}
    asked = TableQuestion(
        "label", "user", ["text"], declared, test or BY_CLIENT, statistics, min_records
    )
    return replace(table_records(path, asked), name="sentiment140")
