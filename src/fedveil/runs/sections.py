"""The sections of a recipe and their words, read strictly: an unknown key is an error."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

TABLE = "table"
"""The name of data in a file of the user's own."""

Value = bool | int | float | str
"""A category, a label, or what is filled in."""


class Section(BaseModel):
    """Frozen, and strict about keys and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=True)


class ColumnSection(Section):
    """How a column's entries become numbers: `low` and `high`, or `mean` and `std`, or `values`.

    `fill` stands for a missing entry; with `other`, a value that is not listed becomes zeros.
    """

    low: float | None = None
    high: float | None = None
    mean: float | None = None
    std: float | None = None
    values: list[Value] | None = None
    fill: Value | None = None
    other: bool | None = None


class DataSection(Section):
    """Which records, and how they are divided among clients.

    A data set has a `name`; so have data that were "saved" in the folder `path`. A .csv or .parquet
    file `path`, relative to the current directory, is a table, and needs no name: `client` names
    the column that says whose a row is (left out: rows are dealt to `clients`), `target` the one to
    predict, `features` the others (left out: all), and `columns` declare in public how entries
    become numbers.

    `resample` training records are drawn with replacement before they are divided; a client keeps
    at most `most_records` of its own. `seed` decides how; left out, it is the run's.

    `statistics` is for features that are fitted on records: "held-out" on the test split, whose
    records are no client's; "clients" on clients' records, which claims say is outside them and
    secure noise refuses; "public" on the same, declaring that the statistics are known from
    elsewhere, or were fitted on records that are no client's. Left out, it is "held-out" for a
    table and "clients" for lending-club and diabetes.

    `test` is for natural clients and tables: "by-client" (left out: the same, if there are natural
    clients) holds about a fifth of them out by name, whose records alone are the test split;
    "records" takes a data set's own split, in which clients' own test records are measured in the
    clear, which claims say and secure noise refuses. Of a table it may also be a share, or the path
    of a table with test rows.
    """

    name: str
    path: str | None = None
    client: str | None = None
    target: str | None = None
    features: list[str] | None = None
    clients: int | None = None
    partition: Literal["iid", "shards", "dirichlet", "natural"] | None = None
    alpha: float | None = None
    shards_per_client: int | None = None
    grades: bool | None = None
    min_records: int | None = None
    resample: int | None = None
    most_records: int | None = None
    test: float | str | None = None
    statistics: Literal["public", "held-out", "clients"] | None = None
    seed: int | None = None
    columns: dict[str, ColumnSection] | None = None

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
        if self.seed is not None or self.name == "saved":
            return True
        natural = self.client is not None or self.partition == "natural"
        return natural and self.clients is self.resample is self.most_records is None


class ModelSection(Section):
    """Which model of the zoo."""

    name: str
    hidden: list[int] | None = None


class PoissonSection(Section):
    """Every client joins with probability `rate`."""

    kind: Literal["poisson"]
    rate: float


class FixedSection(Section):
    """A random cohort of `size`; nobody takes part more than `max_participations` times."""

    kind: Literal["fixed"]
    size: int
    max_participations: int | None = None


class RoundRobinSection(Section):
    """`size` clients at a time, in turn."""

    kind: Literal["round-robin"]
    size: int


class EveryoneSection(Section):
    """All clients."""

    kind: Literal["all"]


SampleSection = Annotated[
    PoissonSection | FixedSection | RoundRobinSection | EveryoneSection,
    Field(discriminator="kind"),
]


class GradientSection(Section):
    """One full-batch gradient; the learning rate is the server's."""

    kind: Literal["gradient"]


class SgdSection(Section):
    """Local SGD; batch 0 is all records; a constant lr, or 2 / (mu (k + gamma))."""

    kind: Literal["sgd"]
    epochs: int | None = None
    steps: int | None = None
    batch: int = 0
    lr: float | None = None
    mu: float | None = None
    gamma: float | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0


class DpSgdSection(Section):
    """DP-SGD on Poisson batches of the client's own records."""

    kind: Literal["dp-sgd"]
    rate: float
    steps: int
    lr: float
    nominal: int | None = None


ClientSection = Annotated[GradientSection | SgdSection | DpSgdSection, Field(discriminator="kind")]

Each = Literal["update", "gradient"]


class FixedClipSection(Section):
    """The same clip in every round, on the update or on every local gradient."""

    kind: Literal["fixed"]
    value: float
    norm: Literal["l1", "l2"] = "l2"
    each: Each = "update"


class PolyClipSection(Section):
    """value x (1 - t/T)^power, never below `floor` (left out: a thousandth of value)."""

    kind: Literal["poly"]
    value: float
    power: float
    floor: float | None = None
    norm: Literal["l1", "l2"] = "l2"
    each: Each = "update"


class QuantileClipSection(Section):
    """Follow a quantile of norms; bits noised by server or curator, or by the client itself.

    `bit_noise` left out, without `bit_epsilon`, is a twentieth of the clients per round.
    """

    kind: Literal["quantile"]
    value: float
    quantile: float = 0.5
    lr: float = 0.2
    bit_noise: float | None = None
    bit_epsilon: float | None = None


class MedianClipSection(Section):
    """The median of a curator's noisy histogram of norms, bins at 2^low ... 2^high."""

    kind: Literal["median"]
    value: float
    low: int
    high: int
    every: int
    epsilon: float
    delta: float
    monotone: bool = False
    cap: float = float("inf")


class RangeClipSection(Section):
    """Per-layer ranges [centre - radius, centre + radius] for two-point reports.

    `radius` left out, for adaptive ranges of weights, is taken from the first model.
    """

    kind: Literal["range"]
    centre: float = 0.0
    radius: float | None = None
    adaptive: bool = True
    perturb: Literal["weights", "update"] = "update"
    growth: float = 1.0


ClipSection = Annotated[
    FixedClipSection | PolyClipSection | QuantileClipSection | MedianClipSection | RangeClipSection,
    Field(discriminator="kind"),
]


Source = Literal["seeded", "secure"]
"""Repeatable streams, for simulations, or the operating system's entropy, for what is published."""


class NoNoiseSection(Section):
    """No noise, no claim."""

    kind: Literal["none"]


class GaussianSection(Section):
    """Gaussian noise; without a multiplier it is calibrated from the budget.

    `claim = false` is a defence without a privacy claim; `c2` the constant that Fu's published
    formula leaves open.
    """

    kind: Literal["gaussian"]
    where: Literal["server", "client", "training"] = "server"
    multiplier: float | None = None
    source: Source = "seeded"
    claim: bool = True
    c2: float | None = None


class LaplaceSection(Section):
    """Laplace noise that clients add to their reports."""

    kind: Literal["laplace"]
    where: Literal["client"] = "client"
    multiplier: float | None = None
    source: Source = "seeded"


class TwoPointSection(Section):
    """Two-valued reports with `epsilon` for each weight."""

    kind: Literal["two-point"]
    epsilon: float
    where: Literal["client"] = "client"
    source: Source = "seeded"


class PrivUnitSection(Section):
    """PrivUnitG reports with `epsilon` each; left out, it is the largest the budget allows."""

    kind: Literal["priv-unit"]
    epsilon: float | None = None
    where: Literal["client"] = "client"
    source: Source = "seeded"


NoiseSection = Annotated[
    NoNoiseSection | GaussianSection | LaplaceSection | TwoPointSection | PrivUnitSection,
    Field(discriminator="kind"),
]


class BudgetSection(Section):
    """What may be spent: one epsilon, or `epsilons` that are dealt to the clients in turn."""

    epsilon: float = float("inf")
    epsilons: list[float] | None = None
    delta: float
    as_published: bool = False


class ShuffleSection(Section):
    """An ideal shuffler that hands on nothing below `minimum` reports per position."""

    minimum: int


class ServerSection(Section):
    """How the server steps; lr left out is 1 for sgd and 0.01 for adam."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float | None = None
    momentum: float = 0.0
    weights: Literal["uniform", "examples"] = "uniform"


class EvaluateSection(Section):
    """When the model is measured on the test split.

    `diagnostics` are computed from clients' private data: shares clipped, signal/noise, cohort
    sizes, refused reports. Left out, they are recorded with seeded noise and not with secure noise.
    """

    every: int = 1
    diagnostics: bool | None = None


class EngineSection(Section):
    """How a round is computed; nothing here changes what is computed beyond rounding.

    Left out, the mode is the faster one, which is measured and recorded with its `timings` (seconds
    per client and local step), the chunk what `memory` MiB hold, and there is one worker per core.
    `checkpoint` is the number of rounds between checkpoints.
    """

    mode: Literal["vectorised", "looped"] | None = None
    timings: dict[Literal["vectorised", "looped"], float] | None = None
    chunk: int = 0
    memory: int = 512
    workers: int = 0
    checkpoint: int = 1
