"""Comments of Reddit by author, for predicting the next word."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedveil.data.data_files import find_file
from fedveil.data.loaded_records import Records
from fedveil.data.own_table import TableQuestion, table_records
from fedveil.data.table_split import BY_CLIENT
from fedveil.data.text_column import texts_of

_WORDS = {"length": 20, "most_words": 4000, "min_texts": 5}


def load(
    root: Path,
    *,
    columns: Mapping[str, object] | None = None,
    statistics: str | None = None,
    test: object = None,
    min_records: int | None = None,
) -> Records:
    """Comments as rows of words and of the words that follow them, owned by their authors.

    About a fifth of the authors is held out. `columns` says how the column "text" is read, without
    it 20 words of a vocabulary that is counted in the held-out authors' comments: the 4000 most
    common words that 5 of them have. The other options are those of `FederatedData.from_table`.
    Most authors wrote one comment: merge them (partition "grouped"), or keep those with
    `min_records`.
    """
    path = find_file(
        root, ["reddit/*.parquet"], expected="a parquet file of comments with author and text"
    )
    declared = texts_of("reddit", columns, _WORDS)
    asked = TableQuestion(
        "text", "author", None, declared, test or BY_CLIENT, statistics, min_records
    )
    return replace(table_records(path, asked), name="reddit")
