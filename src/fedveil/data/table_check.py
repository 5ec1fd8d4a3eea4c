"""`check_table`: a first look at a user's tables, before anything is trained.

It reads every column at once and lists types, missing entries, candidates for the roles of columns,
and everything that a run would refuse. What it prints is computed from private rows in the clear:
it is for the owner of the table, and no claim covers it.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.data.entries import are_arrays, are_bits, are_dates, as_numbers, as_texts
from fedveil.data.own_table import TableOptions, each_file_a_client, table_problems
from fedveil.data.tables import (
    FILE_COLUMN,
    Table,
    files_name,
    is_several,
    join_tables,
    raise_together,
    read_files,
    read_table,
)
from fedveil.data.user_arrays import Array

CLIENT_WORDS = (
    *("client", "hospital", "clinic", "site", "institution", "centre", "center", "bank"),
    *("branch", "school", "owner", "grower", "device", "provider"),
)
CAP = 4
"""How many rows of a person count, in a recipe that is written: a number that is nobody's."""

PERSON_WORDS = (
    *("patient", "person", "subject", "people", "user", "customer", "member", "student"),
    *("employee", "mrn", "ssn", "email", "participant"),
)
TARGET_WORDS = (
    *("target", "label", "outcome", "class", "diagnosis", "result", "readmitted", "survived"),
    *("died", "death", "default", "churn", "response", "y"),
)
"""Words of a column's name that suggest its role."""

NEARLY_CONSTANT = 0.99  # share of the commonest entry
RARE_ROWS, RARE_SHARE = 10, 0.01  # a class with fewer rows than either is rare
FEW_CLIENTS = 50  # noise that hides one of fewer clients is louder than what they have in common
MOST_LABELS = 20

_OTHER_DATE = re.compile(r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{4}[./]\d{1,2}[./]\d{1,2}")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class ColumnSummary:
    """What a column of a table holds.

    Attributes:
        name: The column's name.
        kind: "number", "whole number", "true or false", "text", "date", "array" or "empty".
        missing_share: The share of entries that are missing.
        distinct: The number of different entries.
        commonest: The share of the commonest entry among those that are not missing.
        remarks: For the owner, such as that the column is an id.
    """

    name: str
    kind: str
    missing_share: float
    distinct: int
    commonest: float
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableCheck:
    """What `check_table` read in one or several tables.

    Attributes:
        paths: The files or the folder, as they were given. Empty for tables in memory.
        files: The names of the tables that were read.
        rows: The number of rows in all.
        columns: A summary of each column.
        client, person, target: The columns with these roles, given or chosen. None: no candidate.
        candidates: Other columns that could have each role, by role.
        clients, people: The number of clients and of people, None without such a column.
        most_rows: The largest number of rows of one person, None without a person column.
        problems: What a run would refuse, one sentence each.
        warnings: What a run would accept although it is rarely wanted.
        protects: What each choice would protect, one sentence each.
        by_file: Whether each file is a client.
    """

    paths: tuple[str, ...]
    files: tuple[str, ...]
    rows: int
    columns: tuple[ColumnSummary, ...]
    client: str | None
    person: str | None
    target: str | None
    candidates: dict[str, tuple[str, ...]]
    clients: int | None
    people: int | None
    most_rows: int | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    protects: tuple[str, ...]
    by_file: bool = False

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON, with the text of the `[data]` block as "block"."""
        return {**asdict(self), "block": self.block}

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The columns that are useful features: no names, no ids, nothing constant or empty."""
        roles = {self.client, self.person, self.target}
        roles |= {*self.candidates["client"], *self.candidates["person"]}
        return tuple(
            column.name
            for column in self.columns
            if column.name not in roles and not column.remarks
        )

    @property
    def fills_missing(self) -> bool:
        """Whether entries of features or of the target are missing, so that a rule is needed."""
        used = {*self.feature_names, self.target}
        return any(column.missing_share > 0 for column in self.columns if column.name in used)

    @property
    def person_keys(self) -> dict[str, object]:
        """Keys of `[client]` for claims per person, in recipes that can have them. {} without one.

        The cap is not computed from the rows: a recipe is public.
        """
        return {} if self.person is None else {"unit": "person", "cap": CAP}

    @property
    def suggested_test(self) -> str | float:
        """The test split that suits the tables: whole clients, or a share of rows."""
        return "by-client" if (self.clients or 0) > 1 else 0.2

    @property
    def block(self) -> str:
        """The `[data]` section of a recipe for these tables, as TOML.

        Ranges and categories are left to the owner: they are statistics of private rows unless
        they are known from elsewhere.
        """
        paths = [_toml_text(path) for path in self.paths] or ['"..."']
        listed = paths[0] if len(paths) == 1 else f"[{', '.join(paths)}]"
        lines = ["[data]", f"path = {listed}"]
        if self.client is None:
            lines.append("clients = 100  # no client column: rows are dealt to so many clients")
        elif not self.by_file:
            lines.append(f"client = {_toml_text(self.client)}")
        if self.person is not None:
            people = f"{self.people:,} people, up to {self.most_rows} rows each"
            lines.append(f"person = {_toml_text(self.person)}  # {people}")
        lines.append(
            "# target = ...  # name the column to predict"
            if self.target is None
            else f"target = {_toml_text(self.target)}"
        )
        lines.append(f"features = [{', '.join(map(_toml_text, self.feature_names))}]")
        lines.append(f"test = {json.dumps(self.suggested_test)}")
        if self.fills_missing:
            lines.append('missing = "fill"  # the middle of a range, the mean, or no category')
        for column in self.columns:
            if column.name in (*self.feature_names, self.target) and column.kind != "array":
                key = column.name if _BARE_KEY.fullmatch(column.name) else _toml_text(column.name)
                lines += ["", f"# [data.columns.{key}]  # {column.kind}: declare what is public"]
                lines += [f"# {line}" for line in _declaration(column)]
        return "\n".join(lines) + "\n"


def _toml_text(text: str) -> str:
    """A text as a TOML string on one line."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def check_table(
    *tables: object,
    client: str | None = None,
    person: str | None = None,
    target: str | None = None,
    delta: float = 1e-5,
    **options: Any,
) -> TableCheck:
    """Look through tables and return their columns, roles, problems and what could be protected.

    Args:
        tables: Paths of CSV or Parquet files, a folder of them, a data frame or a dict of columns.
            Each of several files is a client, unless `client` names a column.
        client: The column with the client of a row. None: chosen by name and content.
        person: The column with the person of a row. None: chosen in the same way.
        target: The column to predict. None: chosen in the same way.
        delta: The delta of the claims, for the warning that it is too large.
        options: Further options of `FederatedData.from_table` that describe the table, such as
            `columns`. With any, `problems` are those of the table under these options, not of the
            suggested block.

    Raises BadInput if no table can be read at all, a named column does not exist, or an option does
    not describe a table, as those of a partition.
    """
    described = {field.name for field in fields(TableOptions)} - {"by_file", "declared_columns"}
    for option in sorted(options.keys() - described - {"columns", "partition"}):
        raise BadInput(f"{option} does not describe a table: leave it out of check_table")
    if not tables:
        raise BadInput("no table is given: name at least one file")
    given = tables[0] if len(tables) == 1 else list(tables)
    table, problems = _read_all(given)
    by_file = is_several(given) and client is None and FILE_COLUMN not in table.arrays
    table = table.with_file_names() if by_file else table
    chosen = {"target": target, "client": FILE_COLUMN if by_file else client, "person": person}
    for role, name in chosen.items():
        if name is not None:
            try:
                table[name]
            except BadInput as e:
                raise BadInput(f"{role}: {e}") from e
    summaries = [_summary(name, column) for name, column in table.arrays.items()]
    candidates = _choose(chosen, summaries, len(table))
    counts = {role: _counts(table[name]) for role, name in chosen.items() if name is not None}
    checked = TableCheck(
        paths=_paths(given),
        files=tuple(part.name for part in table.parts),
        rows=len(table),
        columns=tuple(summaries),
        client=chosen["client"],
        person=chosen["person"],
        target=chosen["target"],
        candidates=candidates,
        clients=len(counts["client"]) if "client" in counts else None,
        people=len(counts["person"]) if "person" in counts else None,
        most_rows=max(counts["person"].values()) if "person" in counts else None,
        problems=tuple(problems),
        warnings=(*_warnings(chosen, counts, summaries), *_about_delta(delta, counts, len(table))),
        protects=tuple(_protections(counts, len(table))),
        by_file=by_file,
    )
    if checked.target is None:
        return replace(checked, problems=(*problems, "no column looks like a target: name it"))
    if problems:
        return checked
    if options:
        return replace(checked, problems=_refusals(given, target, client, person, options))
    suggested: dict[str, Any] = {"features": checked.feature_names, "test": checked.suggested_test}
    if checked.fills_missing:
        suggested["missing"] = "fill"
    client = None if by_file else checked.client
    lines = _refusals(given, checked.target, client, checked.person, suggested)
    return replace(checked, problems=lines)


def _paths(given: object) -> tuple[str, ...]:
    """The paths of tables as they were given, none for tables in memory."""
    listed = given if isinstance(given, list) else [given]
    return tuple(str(path) for path in listed if isinstance(path, str | Path))


def _read_all(given: object) -> tuple[Table, list[str]]:
    """(one table of all rows, a line for each file that cannot be read).

    Files that cannot be read are left out. The table has the columns that all others share. Raises
    BadInput for a single table that cannot be read, and if no file can be.
    """
    if not is_several(given):
        return read_table(given), []
    tables, problems = read_files(given)
    if not tables:
        raise_together(problems, files_name(given))
    return join_tables(tables, files_name(given)), problems


def _refusals(
    given: object,
    target: str | None,
    client: str | None,
    person: str | None,
    options: Mapping[str, Any],
) -> tuple[str, ...]:
    """What reading the tables with these roles and options would refuse, a line each.

    `options` describe the table. Of `partition` only whether each file is a client counts.
    """
    used = dict(options)
    by_file = each_file_a_client(given, client, used.pop("partition", None))
    used["declared_columns"] = used.pop("columns", None)
    if target is None:
        return ("no column is named as the target: name it",)
    try:
        table = TableOptions(target, client, person=person, by_file=by_file, **used)
        return tuple(table_problems(given, table))
    except BadInput as e:
        return (str(e),)


def _choose(
    chosen: dict[str, str | None], columns: Sequence[ColumnSummary], rows: int
) -> dict[str, tuple[str, ...]]:
    """Fill in the roles of `chosen` that are None, and return other candidates for each role.

    `chosen` has the keys "target", "client" and "person" and is changed in place. A role that no
    column fits stays None. Candidates are in order, the likeliest first.
    """
    candidates: dict[str, tuple[str, ...]] = {}
    for role in ("target", "client", "person"):
        taken = {name for name in chosen.values() if name is not None}
        names = _candidates(role, [column for column in columns if column.name not in taken], rows)
        if chosen[role] is None and names:
            chosen[role] = names[0]
        candidates[role] = tuple(name for name in names if name != chosen[role])
    return candidates


def _about_delta(delta: float, counts: Mapping[str, Counter[str]], rows: int) -> list[str]:
    """The warning that delta is above one over the number of people or rows, if it is."""
    what, units = ("people", len(counts["person"])) if "person" in counts else ("rows", rows)
    if delta < 1 / units:
        return []
    return [
        f"delta is {delta:g}, and there are {units:,} {what}: use a delta far below "
        f"1 / {units:,} = {1 / units:.2g}"
    ]


def _summary(name: str, column: Array) -> ColumnSummary:
    """Describe a column: its kind, missing entries, distinct entries, and whether it is useless."""
    rows = len(column)
    if are_arrays(column):
        return ColumnSummary(name, "array", 0.0, rows, 0.0)
    texts = as_texts(column)
    numbers, odd = as_numbers(column)
    missing = [text is None for text in texts]
    if not odd.any():
        missing = np.isnan(numbers).tolist()
    both = zip(texts, missing, strict=True)
    present = [text for text, gone in both if text is not None and not gone]
    share = sum(missing) / rows
    if not present:
        return ColumnSummary(name, "empty", 1.0, 0, 0.0, ("no feature: every entry is missing",))
    counts = Counter(present)
    kind = _kind(column, present, numbers, numeric=not odd.any())
    commonest = counts.most_common(1)[0][1] / len(present)
    notes = []
    if len(counts) == len(present) == rows >= MOST_LABELS and kind in ("text", "whole number"):
        notes.append("an id, no feature: every entry is different")
    elif commonest >= NEARLY_CONSTANT:
        notes.append(f"no feature: {100 * commonest:.1f} % of entries are the same")
    elif kind == "text" and len(counts) > MOST_LABELS and 2 * len(counts) > len(present):
        notes.append("free text: no feature, unless its length in words is declared")
    dates = sum(bool(_OTHER_DATE.fullmatch(text)) for text in present)
    if kind == "text" and dates > len(present) / 2:
        notes = ["no feature: write dates as YYYY-MM-DD to use them"]
    return ColumnSummary(name, kind, share, len(counts), commonest, tuple(notes))


def _kind(column: Array, present: Sequence[str], numbers: Array, *, numeric: bool) -> str:
    """Name the kind of a column: "true or false", "whole number", "number", "date" or "text".

    Args:
        column: The entries.
        present: Those that are not missing, as text.
        numbers: The entries as numbers, NaN where missing.
        numeric: Whether all entries that are not missing are numbers.
    """
    if are_bits(np.array(present, dtype=object)) or column.dtype.kind == "b":
        return "true or false"
    if numeric:
        whole = bool((numbers[~np.isnan(numbers)] % 1 == 0).all())
        return "whole number" if whole else "number"
    return "date" if are_dates(column) else "text"


def _candidates(role: str, columns: Sequence[ColumnSummary], rows: int) -> list[str]:
    """List the columns that could have a role, the likeliest first."""
    words = {"client": CLIENT_WORDS, "person": PERSON_WORDS, "target": TARGET_WORDS}[role]
    likely: list[tuple[int, int, str]] = []
    for place, column in enumerate(columns):
        named = any(word.lower() in words for word in _WORDS.findall(column.name))
        names_things = column.kind in ("text", "whole number")
        if role == "client":
            fits = names_things and 2 <= column.distinct <= rows / 4 and column.missing_share < 0.5
            order = column.distinct
        elif role == "person":
            fits = names_things and column.distinct > 2 * rows**0.5 and column.missing_share < 0.5
            order = place
        else:
            labels = column.kind in ("text", "whole number", "true or false")
            fits = (labels and 2 <= column.distinct <= MOST_LABELS) or column.kind == "number"
            order = -place  # targets often stand last
        if fits and named:
            likely.append((0, order, column.name))
        elif fits and role == "target" and column.distinct <= MOST_LABELS:
            likely.append((1, order, column.name))
    return [name for _, _, name in sorted(likely)]


def _counts(column: Array) -> Counter[str]:
    """Count the rows of each entry of a column, missing entries not included."""
    return Counter(text for text in as_texts(column) if text is not None)


def _warnings(
    chosen: dict[str, str | None], counts: dict[str, Counter[str]], columns: Sequence[ColumnSummary]
) -> list[str]:
    """List what is unusual: classes that are rare or too common, tiny clients, missing entries."""
    warnings = []
    target = counts.get("target", Counter())
    if 2 <= len(target) <= MOST_LABELS:
        least = max(RARE_ROWS, RARE_SHARE * target.total())
        for label, rows in target.items():
            if rows < least:
                few = f"class {shown(label)} of {chosen['target']!r} has {_rows(rows)}"
                warnings.append(f"{few}: too few to learn under noise")
        common = target.most_common(1)[0][1] / target.total()
        if common > 0.8:
            warnings.append(
                f"{100 * common:.0f} % of rows have one class: always predicting it is "
                f"{common:.3f} accurate, so look at balanced accuracy"
            )
    for name, rows in counts.get("client", Counter()).items():
        if rows < RARE_ROWS:
            warnings.append(f"client {shown(name)} has {_rows(rows)}")
    for column in columns:
        if 0 < column.missing_share < 1:
            warnings.append(
                f"column {column.name!r} is missing in {100 * column.missing_share:.1f} % of rows"
            )
    return warnings


def _rows(count: int) -> str:
    """A number of rows in words."""
    return "1 row" if count == 1 else f"{count:,} rows"


def _protections(counts: dict[str, Counter[str]], rows: int) -> list[str]:
    """Say in a sentence each what protecting clients, people or records would mean here.

    A role without a column has no sentence, nor have people who all have one row.

    Args:
        counts: The number of rows of each client or person, by role ("client", "person").
        rows: The number of all rows.
    """
    sentences = []
    if "client" in counts:
        clients = len(counts["client"])
        text = f"per client (recipe central): all rows of each of {clients:,} clients"
        if clients < FEW_CLIENTS:
            text += f". Noise that hides one of {clients} drowns the signal: protect records"
        sentences.append(text)
    most = max(counts["person"].values()) if "person" in counts else 1
    if most > 1:
        text = f"per person (recipe dp-sgd or sites, client.unit = 'person', client.cap = {CAP}): "
        text += f"each of {len(counts['person']):,} people, with at most {CAP} rows each. Let the "
        sentences.append(f"{text}cap follow from what is public, not from these rows")
    text = f"per record (recipe dp-sgd): each of {rows:,} rows by itself"
    if most > 1:
        text += f". For a person with {most} rows, epsilon is about {most} times as large"
    sentences.append(text)
    return sentences


def _declaration(column: ColumnSummary) -> list[str]:
    """Return the keys to declare for a column of this kind, as lines of TOML without values."""
    scale = ["low = ...", "high = ..."]
    keys = {
        "number": scale,
        "whole number": scale,
        "date": ["low = 2020-01-01", "high = 2030-01-01"],
        "text": ['values = ["...", "..."]'],
    }
    return keys.get(column.kind, ["values = [false, true]"])
