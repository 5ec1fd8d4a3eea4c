"""`[data]` and `[model]`."""

from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from fedveil.base.checks import (
    CODE,
    COUNT,
    DATA_NAMES,
    MODEL_NAMES,
    OWN,
    POSITIVE,
    SEED,
    TABLE,
    TEXT_LENGTH,
    VOCABULARY,
    Each,
    whole,
)
from fedveil.base.errors import BadInput
from fedveil.runs.sections.section import Section, setting

_RECORDS = whole(1, "at least one record is needed")
_VOCABULARY = whole(2, "at least padding and one word are needed", 10_000_000)

Value = bool | int | float | str
"""A category, a label, or what is filled in."""


class ColumnSection(Section):
    """`[data.columns.COLUMN]`: how its entries become numbers."""

    low: float | None = None
    """With high, the range that is scaled to [-1, 1]; entries outside are set to its ends. Left
    out: mean and std, or values, or what is fitted."""
    high: float | None = None
    """See low. Left out: see low."""
    mean: float | None = None
    """With std, what is subtracted before division by std. Left out: see low."""
    std: float | None = None
    """See mean. Left out: see low."""
    values: list[Value] | None = None
    """The categories, each of which becomes a number of its own that is 0 or 1; of the target, the
    labels in order. Left out: see low."""
    fill: Value | None = None
    """What stands for a missing entry. Left out: a missing entry is refused."""
    other: bool | None = None
    """Whether a category that is not listed becomes zeros. Left out: it is refused."""
    length: int | None = setting(TEXT_LENGTH, None)
    """The column holds texts, which are read word by word: how many words of each, shorter ones
    filled up. As the target: the next word is predicted. Left out: it holds no texts, or
    categories."""
    words: list[str] | str | None = None
    """The words that are known, or a file with one in each line; any other word is unknown. For
    texts. Left out: buckets, or public, or the words that are fitted."""
    buckets: int | None = setting(VOCABULARY, None)
    """How many numbers words are hashed to: none is unknown, and some share a number. For texts.
    Left out: see words."""
    public: str | None = None
    """A text file that is declared public, whose words are known; each line counts as a text. For
    texts. Left out: see words."""
    most_words: int | None = setting(VOCABULARY, None)
    """How many words are known at most, those that the most texts have. For words that are fitted,
    or public. Left out: 10000."""
    min_texts: int | None = setting(COUNT, None)
    """How many texts a word is in at least. For words that are fitted, or public. Left out: 2."""
    also: list[str] | str | None = None
    """Words that are known besides, or a file with one in each line. For words that are fitted, or
    public. Left out: none."""


class DataSection(Section):
    """`[data]`."""

    name: str = setting(DATA_NAMES)
    """The data set. digits and diabetes come with scikit-learn, saved is a folder that
    FederatedData.save wrote, table a file of one's own; all others are read from --data or
    FEDVEIL_DATA. May be left out where path is a table."""
    path: str | None = None
    """A .csv or .parquet file, relative to the current directory; for name 'saved', the folder that
    FederatedData.save wrote. Left out: only for other data sets."""
    client: str | None = None
    """The column of a table that says whose a row is. Left out: rows are dealt to clients."""
    target: str | None = None
    """The column of a table that is to be predicted. Left out: only for other data."""
    features: list[str] | None = None
    """The columns of a table that are predicted from. Left out: all others."""
    clients: int | None = setting(COUNT, None)
    """How many clients the training records are divided among; of natural clients, how many are
    kept, chosen at random. Left out: all natural clients; every other partition needs it."""
    partition: Literal["iid", "shards", "dirichlet", "natural", "grouped"] | None = None
    """How records are divided: 'iid' at random, 'shards' sorted by target, 'dirichlet' by a label
    mix of each client's own, 'natural' one client per owner, 'grouped' owners merged at random into
    clients, which claims say. Left out: 'grouped' for sentiment140 and reddit, 'natural' for a
    table with a client column, 'iid' otherwise."""
    alpha: float | None = setting(POSITIVE, None)
    """Parameter of the Dirichlet distribution that label mixes are drawn from: the smaller, the
    fewer labels a client has. For partition 'dirichlet'. Left out: only for other partitions."""
    shards_per_client: int | None = setting(COUNT, None)
    """Shards that each client gets: one each goes in order of the target, several are dealt at
    random. For partition 'shards'. Left out: 1."""
    grades: bool | None = None
    """Whether the features have what the lender fixed together with the interest rate: grade,
    sub-grade and installment. For lending-club. Left out: true."""
    digits: bool | None = None
    """Whether only the digits are kept of all characters. For femnist. Left out: false."""
    min_records: int | None = setting(COUNT, None)
    """Owners with fewer training records are left out: writers, authors, clients of a table. For
    femnist, sentiment140, reddit and tables. Left out: 20 for femnist, 1 for the others."""
    resample: int | None = setting(_RECORDS, None)
    """How many training records are drawn, with replacement, before they are divided. Claims say
    so, and DP-SGD refuses it. Left out: every record is there once."""
    most_records: int | None = setting(_RECORDS, None)
    """The most records that a client keeps, chosen at random. Left out: all."""
    test: float | str | None = None
    """What the model is measured on: 'by-client' holds a fifth of the natural clients out,
    unprotected; 'records' takes a data set's own split, in which clients have records; of a table,
    also a share of its rows, or the path of a table of others' or public rows; 'none' is nothing.
    Claims say whose they are. Left out: 'none' for a table, 'by-client' for other natural
    clients."""
    statistics: Literal["public", "held-out", "clients"] | None = None
    """What means, categories and words that nobody declared are fitted on: 'held-out' on the test
    split; 'clients' on clients' records in the clear, which claims say and secure noise refuses;
    'public' on the same, declaring them known from elsewhere. For tables, texts, lending-club,
    diabetes and saved data that name them. Left out: 'clients' for lending-club and diabetes,
    'held-out' for the others."""
    seed: int | None = setting(SEED, None)
    """Decides how records are drawn and divided. Seeded runs that share a ledger have it in common.
    Left out: the recipe's seed."""
    columns: dict[str, ColumnSection] | None = None
    """What is publicly known of a table's columns, by name: low and high, or mean and std, or
    values; fill; other; length of texts and their words. For tables, and for the column 'text' of
    sentiment140 and reddit. Left out: everything is fitted, see statistics."""

    @model_validator(mode="before")
    @classmethod
    def _a_path_is_a_table(cls, raw: Any) -> Any:
        """A path without a name is that of a table."""
        if isinstance(raw, dict) and "path" in raw and "name" not in raw:
            return {"name": TABLE, **raw}
        return raw

    @property
    def told(self) -> str:
        """What people call these records."""
        return Path(self.path).name if self.name == TABLE and self.path else self.name

    @property
    def seedless(self) -> bool:
        """Whether the records are divided in the same way whatever the run's seed is."""
        if self.seed is not None or self.name in ("saved", OWN):
            return True
        natural = self.client is not None or self.partition == "natural"
        return natural and self.clients is self.resample is self.most_records is None


class ModelSection(Section):
    """`[model]`."""

    name: str = setting(MODEL_NAMES)
    """The model. linear predicts a number, mlp a number or a label, all others labels; fu-cnn and
    small-cnn take images of 28 x 28, vgg of 32 x 32; lstm and transformer read texts, lstm-lm and
    transformer-lm predict their next words; code is what path makes. May be left out where path is
    given."""
    path: str | None = None
    """A function that makes the model, an nn.Module, as 'net.py:make'; the file is relative to the
    current directory. Its code is run only with --allow-code (in Python, allow_code=True): a recipe
    could otherwise run anybody's. A run records what it made, and is not resumed with another. Left
    out: only for other models."""
    options: dict[str, Value | list[Value]] | None = None
    """Keyword arguments of the function in path. Parameters called shape and classes are filled in:
    the shape of a record, and the number of labels (0 for numbers). Left out: none."""
    hidden: list[int] | None = setting(Each(whole(1, "the width of a layer starts at 1")), None)
    """Widths of the hidden layers, in units. For mlp, lstm and lstm-lm. Left out: [200] for mlp,
    [64] for the others."""
    embedding: int | None = setting(whole(1, most=10_000), None)
    """How many numbers stand for a word. For models of texts. Left out: 32."""
    layers: int | None = setting(whole(1, most=100), None)
    """How many layers of attention. For transformer and transformer-lm. Left out: 2."""
    heads: int | None = setting(whole(1, most=100), None)
    """How many heads a layer of attention has; embedding is a multiple of it. For transformer and
    transformer-lm. Left out: 4."""
    words: int | None = setting(_VOCABULARY, None)
    """How many different numbers words have in records that are arrays; 0 is padding. For models of
    texts. Left out: the data's vocabulary tells."""
    weights: str | None = None
    """A .safetensors file with the model's first weights, relative to the current directory; names
    and shapes must be the model's. Claims take them as public. Left out: they are drawn from the
    seed."""
    new: list[str] | None = None
    """Patterns of names, such as 'head.*', that are not read from weights and keep what was drawn.
    Left out: every weight is read."""
    freeze: list[str] | None = None
    """Patterns of parameters' names, such as 'encoder.*', that do not learn. Claims take them as
    public. Left out: every parameter learns, but for those that the code froze."""
    batch_norm: Literal["group"] | None = None
    """'group' puts a group norm in place of every batch norm, which no claim could cover, with the
    same scale and shift. Left out: a model with batch norm is refused."""
    digest: str | None = None
    """What a run records of a module that came from Python, from path or with weights, so that no
    other continues it. Not for authors. Left out: the run fills it in."""

    @model_validator(mode="before")
    @classmethod
    def _a_path_is_code(cls, raw: Any) -> Any:
        """A path without a name is that of code."""
        if isinstance(raw, dict) and "path" in raw and "name" not in raw:
            return {"name": CODE, **raw}
        return raw

    @property
    def recorded(self) -> bool:
        """Whether the recipe alone does not say what the model is, so that a run records it."""
        return self.name in (OWN, CODE) or self.weights is not None

    def check_together(self) -> None:
        """Refuse keys that do not go together."""
        if self.name == CODE and self.path is None:
            raise BadInput(f"model.name is {CODE!r}: give model.path, such as 'net.py:make'")
        if self.path is not None and self.name != CODE:
            raise BadInput(f"model.path is given beside model.name = {self.name!r}: leave one out")
        if self.options is not None and self.path is None:
            raise BadInput("model.options is for the function in model.path: leave it out")
        for key in ("weights", "new", "freeze", "batch_norm"):
            if self.name == OWN and getattr(self, key) is not None:
                raise BadInput(f"model.{key} has no effect on a module from Python: do it there")
        if self.new is not None and self.weights is None:
            raise BadInput("model.new says what model.weights leaves out: give both, or neither")
        if self.digest is not None and not self.recorded:
            raise BadInput("model.digest is what a run records of an own module: leave it out")

    def check_allowed(self, allow_code: bool) -> None:
        """Refuse to run the code that a recipe names unless its user has said that it may be."""
        if self.path is not None and not allow_code:
            raise BadInput(
                f"model.path is {self.path!r}: a recipe may come from anybody, so the code it "
                "names is run only with --allow-code (fedveil run, evaluate, predict) or "
                "allow_code=True (Python); look at the file first"
            )
