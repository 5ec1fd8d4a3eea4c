"""`[data]`: which records there are, and how they are divided among clients."""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator, model_validator
from pydantic_core import PydanticCustomError

from fedveil.base import checks
from fedveil.base.errors import BadInput
from fedveil.runs.sections.section import Section, in_keys, setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedveil.data.federated import FederatedData
    from fedveil.data.own_table import TableOptions
    from fedveil.data.partition import Records

_RECORDS = checks.whole(1, "at least one record is needed")

_DIVISION = (
    *("clients", "partition", "alpha", "shards_per_client", "resample", "most_records"),
    *("test", "seed"),
)
_OF_TABLES = ("client", "target", "features", "columns", "person", "missing")
_OF_NAMED = ("grades", "digits", "min_records")


Value = bool | int | float | str
"""A category, a label, or what is filled in."""


class ColumnSection(Section):
    """`[data.columns.COLUMN]`: how the entries of a column become numbers."""

    low: float | str | None = None
    """With high, the range that is scaled to [-1, 1]; entries outside are set to its ends. Two
    dates, such as 2020-01-31, for a column of dates. Default: mean and std, or values, or what is
    fitted."""
    high: float | str | None = None
    """See low. Default: see low."""
    mean: float | str | None = None
    """With std, what is subtracted before division by std. Default: see low."""
    std: float | None = None
    """See mean. Default: see low."""
    values: list[Value] | None = None
    """The categories, each of which becomes a number of its own that is 0 or 1; of the target, the
    labels in order. Default: see low."""
    fill: Value | None = None
    """What stands for a missing entry. Default: see data.missing."""
    other: bool | None = None
    """Whether a category that is not listed becomes zeros. Default: it is refused."""
    length: int | None = setting(checks.TEXT_LENGTH, None)
    """The column holds texts, which are read word by word: how many words of each, shorter ones
    filled up. As the target: the next word is predicted. Default: it holds no texts, or
    categories."""
    words: list[str] | str | None = None
    """The words that are known, or a file with one in each line; any other word is unknown. For
    texts. Default: buckets, or public, or the words that are fitted."""
    buckets: int | None = setting(checks.VOCABULARY, None)
    """How many numbers words are hashed to: none is unknown, and some share a number. For texts.
    Default: see words."""
    public: str | None = None
    """A text file that is declared public, whose words are known; each line counts as a text. For
    texts. Default: see words."""
    most_words: int | None = setting(checks.VOCABULARY, None)
    """How many words are known at most, those that the most texts have. For words that are fitted,
    or public. Default: 10000."""
    min_texts: int | None = setting(checks.COUNT, None)
    """How many texts a word is in at least. For words that are fitted, or public. Default: 2."""
    also: list[str] | str | None = None
    """Words that are known besides, or a file with one in each line. For words that are fitted, or
    public. Default: none."""

    @field_validator("low", "high", "mean", mode="before")
    @classmethod
    def _number_or_date(cls, value: Any) -> Any:
        """Return a number, or a date as text in ISO 8601. Raise for anything else."""
        text = cls._iso_text(value)
        try:
            if isinstance(text, bool) or not isinstance(text, str | int | float | None):
                raise ValueError
            if isinstance(text, str):
                datetime.datetime.fromisoformat(text)
        except ValueError as e:
            need = "a number, or a date such as 2026-01-31, is needed"
            raise PydanticCustomError("date", need) from e
        return text

    @field_validator("fill", mode="before")
    @classmethod
    def _iso_text(cls, value: Any) -> Any:
        """Return a date of TOML as text in ISO 8601, anything else unchanged."""
        return value.isoformat() if isinstance(value, datetime.date) else value


class DataSection(Section):
    """`[data]`: which records there are, and how they are divided among clients."""

    name: str = setting(checks.DATA_NAMES)
    """The data set. digits and diabetes come with scikit-learn, saved is a folder that
    FederatedData.save wrote, table a file of one's own; all others are read from --data or
    FEDVEIL_DATA. May be left out where path is a table."""
    path: str | list[str] | None = None
    """A .csv or .parquet file, a list of such files, or a folder of them, relative to the current
    directory; for name 'saved', the folder that FederatedData.save wrote. Required for
    tables and saved data. Default: none."""
    client: str | None = None
    """The column of a table with the client of a row. Default: each of several files is a client,
    and the rows of a single file are dealt to clients."""
    person: str | None = None
    """The column of a table with the person of a row, which is no feature. Nobody has rows on both
    sides of a test split that is 'by-client' or a share. Claims are per person if client.cap says
    how many of a person's rows count. Default: rows are divided whoever they are about."""
    target: str | None = None
    """The column of a table to predict. Required for tables. Default: none."""
    features: list[str] | None = None
    """The columns of a table to predict from. Default: all others."""
    sites: int | str | None = None
    """The institutions: how many the records are divided among, or the column of a table that names
    them. Takes the place of clients or client. Default: see clients and client."""
    missing: Literal["refuse", "fill"] | None = None
    """What becomes of missing entries of a table without a fill of their own: 'fill' sets a number
    to the middle of its range or its mean and a category to zeros, and leaves out rows without a
    target, which claims say. Default: 'refuse', with row and column."""
    clients: int | None = setting(checks.COUNT, None)
    """How many clients the training records are divided among; of natural clients, how many are
    kept, chosen at random. Default: all natural clients; every other partition needs it."""
    partition: Literal["iid", "shards", "dirichlet", "natural", "grouped"] | None = None
    """How records are divided: 'iid' at random, 'shards' sorted by target, 'dirichlet' by a label
    mix of each client's own, 'natural' one client per owner, 'grouped' owners merged at random into
    clients, which claims say. Rows of a table are dealt one by one, and not by 'shards'. Default:
    'grouped' for sentiment140 and reddit, 'natural' for a
    table with a client column, 'iid' otherwise."""
    alpha: float | None = setting(checks.POSITIVE, None)
    """Parameter of the Dirichlet distribution that label mixes are drawn from: the smaller, the
    fewer labels a client has. Required for partition
    'dirichlet'. Default: none."""
    shards_per_client: int | None = setting(checks.COUNT, None)
    """Shards that each client gets: one each goes in order of the target, several are dealt at
    random. For partition 'shards'. Default: 1."""
    grades: bool | None = None
    """Whether the features have what the lender fixed together with the interest rate: grade,
    sub-grade and installment. For lending-club. Default: true."""
    digits: bool | None = None
    """Whether only the digits are kept of all characters. For femnist. Default: false."""
    min_records: int | None = setting(checks.COUNT, None)
    """Owners with fewer training records are left out: writers, authors, clients of a table. For
    femnist, sentiment140, reddit and tables. Default: 20 for femnist, 1 for the others."""
    resample: int | None = setting(_RECORDS, None)
    """How many training records are drawn, with replacement, before they are divided. Claims say
    so, and DP-SGD refuses it. Default: every record is there once."""
    most_records: int | None = setting(_RECORDS, None)
    """The most records that a client keeps, chosen at random, a public number. With it, clients are
    computed side by side with secure noise too. Default: all."""
    test: float | str | None = None
    """What the model is measured on: 'by-client' holds a fifth of the natural clients out,
    unprotected; 'records' takes a data set's own split, in which clients have records; of a table,
    also a share of its rows, each chosen by what it is, or the path of a table of others' or public
    rows; 'none' is nothing. Claims say whose they are. Default: 'none' for a table, 'by-client'
    for other natural clients."""
    statistics: Literal["public", "held-out", "clients"] | None = None
    """What means, categories and words that nobody declared are fitted on: 'held-out' on the test
    split; 'clients' on clients' records in the clear, which claims say and secure noise refuses;
    'public' on the same, declaring them known from elsewhere. For tables, texts, lending-club,
    diabetes and saved data that name them. Default: 'clients' for lending-club and diabetes,
    'held-out' for the others."""
    seed: int | None = setting(checks.SEED, None)
    """Decides how records are drawn and divided. Seeded runs that share a ledger have it in common.
    Default: the recipe's seed."""
    columns: dict[str, ColumnSection] | None = None
    """What is publicly known of a table's columns, by name: low and high, or mean and std, or
    values; fill; other; length of texts and their words. For tables, and for the column 'text' of
    sentiment140 and reddit. Default: everything is fitted, see statistics."""

    @model_validator(mode="before")
    @classmethod
    def _divide_among_sites(cls, values: Any) -> Any:
        """Let `sites` stand for the number of clients, or for the client column if it is a text.

        Raises ValueError if `clients` or `client` is given as well and is another.
        """
        sites = values.get("sites") if isinstance(values, dict) else None
        if sites is None:
            return values
        key = "client" if isinstance(sites, str) else "clients"
        if values.get(key) not in (None, sites):
            raise ValueError(f"sites is {sites!r} and {key} is {values[key]!r}: leave one out")
        return {**values, key: sites}

    @field_validator("path", mode="before")
    @classmethod
    def _file_names(cls, value: Any) -> Any:
        """Return a path or a list of paths unchanged. Raise for anything else."""
        paths = value if isinstance(value, list) else [value]
        if not all(isinstance(path, str | None) for path in paths):
            raise PydanticCustomError("paths", "a file, a folder, or a list of files is needed")
        return value

    @property
    def seedless(self) -> bool:
        """Return whether the division into clients is independent of the recipe's seed.

        True for data with a seed of their own, saved and own data, and natural clients that are all
        kept whole.
        """
        if self.seed is not None or self.name in ("saved", checks.OWN):
            return True
        natural = self.client is not None or self.by_file or self.partition == "natural"
        return natural and self.clients is self.resample is self.most_records is None

    @property
    def by_file(self) -> bool:
        """Return whether each file of a table is a client."""
        from fedveil.data.own_table import each_file_a_client

        return self.name == checks.TABLE and each_file_a_client(
            self.path, self.client, self.partition
        )

    @property
    def source(self) -> str:
        """Return one text of all keys that `load` depends on. Equal texts give equal records."""
        keys = ("name", "path", "statistics", "test", "by_file", *_OF_NAMED, *_OF_TABLES)
        return " ".join(repr(getattr(self, key)) for key in keys)

    @in_keys("data")
    def load(self, root: Path | None = None) -> "Records | FederatedData":
        """Read the records from where they are stored, not yet divided among clients.

        Saved data (name "saved") are divided already. Raises BadInput for data that are missing,
        and for keys that have no effect on these data.

        Args:
            root: The folder with published data sets, None for that in FEDVEIL_DATA.
        """
        from fedveil.data.federated import FederatedData
        from fedveil.data.load import FITTING, TEXTS, load_records

        if self.name == "saved":
            self._refuse((*_DIVISION, *_OF_NAMED, *_OF_TABLES), "saved data")
            if not isinstance(self.path, str):
                raise BadInput("data.path is missing: name the folder FederatedData.save wrote")
            if self.statistics not in (None, "public"):
                raise BadInput(
                    f"data.statistics is {self.statistics!r} and saved data are fitted: use "
                    "'public'"
                )
            return FederatedData.open(Path(self.path))
        columns = self._declared_columns
        if self.name == checks.TABLE:
            return self._load_table(columns)
        if self.path is not None:
            raise BadInput(f"data.path has no effect on {self.name!r}: use --data, or name 'saved'")
        options: dict[str, Any]
        if self.name in TEXTS:
            self._refuse(("client", "target", "features", "grades", "digits"), repr(self.name))
            options = {"columns": columns, "statistics": self.statistics, "test": self.test}
            return load_records(self.name, root, min_records=self.min_records, **options)
        self._refuse(_OF_TABLES, repr(self.name))
        options = self.present_values(*_OF_NAMED)
        if self.statistics in ("held-out", "clients") and self.name not in FITTING:
            raise self._nothing_fitted()
        if self.statistics == "held-out":
            options["held_out"] = True
        return load_records(self.name, root, **options)

    @in_keys("data", kind="data.partition", count="data.resample", most="data.most_records")
    def divide(self, records: "Records | FederatedData", seed: int) -> "FederatedData":
        """Divide the records among clients, after resampling them if `resample` is set.

        `records` are what `load` returned. Random choices follow the section's seed, or `seed` if
        it has none. Saved data stay as they are divided. Raises BadInput if they cannot be divided
        so.
        """
        from fedveil.data.federated import FederatedData
        from fedveil.data.load import TEXTS
        from fedveil.data.own_table import table_partition, table_test
        from fedveil.data.partition import partition, resample, shorten_clients
        from fedveil.data.tables import FILE_COLUMN

        public = self.statistics == "public"
        if public and not records.fitted:
            raise self._nothing_fitted()
        if isinstance(records, FederatedData):
            return replace(records, declared_public=True) if public else records
        seed = seed if self.seed is None else self.seed
        if self.resample is not None:
            records = resample(records, self.resample, seed)
        kind: str = self.partition or "iid"
        test = self.test
        if self.name == checks.TABLE:
            client = FILE_COLUMN if self.by_file else self.client
            kind = table_partition(client, self.partition, self.clients)
            test = table_test(kind)
        elif self.name in TEXTS:
            kind = self.partition or "grouped"
            test = table_test(kind)
        data = partition(
            records,
            kind=kind,
            clients=self.clients,
            seed=seed,
            alpha=self.alpha,
            shards_per_client=1 if self.shards_per_client is None else self.shards_per_client,
            test=test,
        )
        if self.most_records is not None:
            data = shorten_clients(data, self.most_records, seed)
        return replace(data, declared_public=True) if public else data

    @property
    def _declared_columns(self) -> dict[str, Any]:
        """Return the declarations in [data.columns], by column."""
        return {
            name: column.model_dump(exclude_none=True)
            for name, column in (self.columns or {}).items()
        }

    @property
    def check_options(self) -> dict[str, Any]:
        """Return the options of `check_table` for this table."""
        keys = ("client", "person", "target", "features", "test", "statistics", "min_records")
        given = self.present_values(*keys, "missing", "partition")
        return {**given, "columns": self._declared_columns}

    def _load_table(self, columns: dict[str, Any]) -> "Records":
        """Read the table at `path`. `columns` are the declarations in [data.columns], by column.

        Raises BadInput without `path` or `target`, and for a table that does not fit.
        """
        from fedveil.data.own_table import table_partition, table_records
        from fedveil.data.tables import check_file, is_several

        self._refuse(("grades", "digits"), "a table")
        if self.path is None:
            raise BadInput("data.path is missing: name a .csv or .parquet file")
        if isinstance(self.path, str) and not is_several(self.path):
            check_file(Path(self.path))
        options = self._table_options(columns)
        table_partition(options.client_column, self.partition, self.clients)
        return table_records(self.path, options)

    def _table_options(self, columns: dict[str, Any]) -> "TableOptions":
        """Return the options of the table. `columns` are its declarations, by column.

        Raises BadInput without `target`.
        """
        from fedveil.data.own_table import TableOptions

        if self.target is None:
            raise BadInput("data.target is missing: name the column that is to be predicted")
        keys = ("client", "features", "test", "statistics", "min_records", "missing", "person")
        given = self.present_values(*keys)
        return TableOptions(self.target, declared_columns=columns, by_file=self.by_file, **given)

    @in_keys("data")
    def declared_data(
        self, test: str | None, names: "Sequence[str]", records: "Sequence[int]" = ()
    ) -> "FederatedData":
        """Return the data of sites whose tables are known by this section's declarations alone.

        `path` is not read. Raises BadInput if a column is not declared.

        Args:
            test: The path of a public table to test on, None for none.
            names: The sites' names.
            records: The public number of records of each site, 0 where it is not public.
        """
        from fedveil.data.declared import declared_data

        options = self._table_options(self._declared_columns)
        return declared_data(replace(options, by_file=False), test, names, records)

    def _refuse(self, keys: tuple[str, ...], what: str) -> None:
        """Raise BadInput if one of the keys is set.

        `what` names the data that it has no effect on.
        """
        for key in self.present_values(*keys):
            raise BadInput(f"data.{key} has no effect on {what}: omit it")

    def _nothing_fitted(self) -> BadInput:
        """Return, not raise, the error that `statistics` is set and nothing was fitted."""
        return BadInput(
            f"data.statistics is {self.statistics!r} and nothing of {self.name} was fitted on "
            "clients' records: omit it"
        )
