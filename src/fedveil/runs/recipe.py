"""`Recipe`: one TOML file that says everything a run does, read strictly."""

import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedveil.errors import BadInput

DEFAULT = "central"

_BY_KIND = ("sample", "local", "bound", "noise")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=True)


class DataSection(_Section):
    """Which records, and how they are divided among clients."""

    name: str
    clients: int | None = None
    partition: Literal["iid", "shards", "dirichlet", "natural"] | None = None
    alpha: float | None = None
    shards_per_client: int | None = None
    grades: bool | None = None
    min_records: int | None = None
    path: str | None = None


class ModelSection(_Section):
    """Which model of the zoo."""

    name: str
    hidden: list[int] | None = None


class PoissonSection(_Section):
    """Every client joins with probability `rate`."""

    kind: Literal["poisson"]
    rate: float


class FixedSection(_Section):
    """A random cohort of `size`; nobody takes part more than `max_participations` times."""

    kind: Literal["fixed"]
    size: int
    max_participations: int | None = None


class RoundRobinSection(_Section):
    """`size` clients at a time, in turn."""

    kind: Literal["round-robin"]
    size: int


class EveryoneSection(_Section):
    """All clients."""

    kind: Literal["all"]


SampleSection = Annotated[
    PoissonSection | FixedSection | RoundRobinSection | EveryoneSection,
    Field(discriminator="kind"),
]


class GradientSection(_Section):
    """One full-batch gradient; the learning rate is the server's."""

    kind: Literal["gradient"]


class SgdSection(_Section):
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


class DpSgdSection(_Section):
    """DP-SGD on Poisson batches of the client's own records."""

    kind: Literal["dp-sgd"]
    rate: float
    steps: int
    lr: float
    nominal: int | None = None


LocalSection = Annotated[GradientSection | SgdSection | DpSgdSection, Field(discriminator="kind")]

Each = Literal["update", "gradient"]


class FixedBoundSection(_Section):
    """The same bound in every round, on the update or on every local gradient."""

    kind: Literal["fixed"]
    value: float
    norm: Literal["l1", "l2"] = "l2"
    each: Each = "update"


class PolyBoundSection(_Section):
    """value x (1 - t/T)^power, never below `floor` (left out: a thousandth of value)."""

    kind: Literal["poly"]
    value: float
    power: float
    floor: float | None = None
    norm: Literal["l1", "l2"] = "l2"
    each: Each = "update"


class QuantileBoundSection(_Section):
    """Follow a quantile of norms; bits noised by server or curator, or by the client itself.

    `bit_noise` left out, without `bit_epsilon`, is a twentieth of the clients per round.
    """

    kind: Literal["quantile"]
    value: float
    quantile: float = 0.5
    lr: float = 0.2
    bit_noise: float | None = None
    bit_epsilon: float | None = None


class MedianBoundSection(_Section):
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


class RangeBoundSection(_Section):
    """Per-layer ranges [centre - radius, centre + radius] for two-point reports.

    `radius` left out, for adaptive ranges of weights, is taken from the first model.
    """

    kind: Literal["range"]
    centre: float = 0.0
    radius: float | None = None
    adaptive: bool = True
    perturb: Literal["weights", "update"] = "update"
    growth: float = 1.0


BoundSection = Annotated[
    FixedBoundSection
    | PolyBoundSection
    | QuantileBoundSection
    | MedianBoundSection
    | RangeBoundSection,
    Field(discriminator="kind"),
]


class NoNoiseSection(_Section):
    """No noise, no claim."""

    kind: Literal["none"]


class GaussianSection(_Section):
    """Gaussian noise; without a multiplier it is calibrated from the budget.

    `claim = false` is a defence without a privacy claim; `c2` the constant that Fu's published
    formula leaves open.
    """

    kind: Literal["gaussian"]
    where: Literal["server", "client", "training"] = "server"
    multiplier: float | None = None
    source: Literal["seeded"] = "seeded"
    claim: bool = True
    c2: float | None = None


class LaplaceSection(_Section):
    """Laplace noise that clients add to their reports."""

    kind: Literal["laplace"]
    where: Literal["client"] = "client"
    multiplier: float | None = None
    source: Literal["seeded"] = "seeded"


class TwoPointSection(_Section):
    """Two-valued reports with `epsilon` for each weight."""

    kind: Literal["two-point"]
    epsilon: float
    where: Literal["client"] = "client"
    source: Literal["seeded"] = "seeded"


NoiseSection = Annotated[
    NoNoiseSection | GaussianSection | LaplaceSection | TwoPointSection,
    Field(discriminator="kind"),
]


class BudgetSection(_Section):
    """What may be spent: one epsilon, or `epsilons` that are dealt to the clients in turn."""

    epsilon: float = float("inf")
    epsilons: list[float] | None = None
    delta: float
    as_published: bool = False


class ShuffleSection(_Section):
    """An ideal shuffler that hands on nothing below `minimum` reports per position."""

    minimum: int


class ServerSection(_Section):
    """How the server steps; lr left out is 1 for sgd and 0.01 for adam."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float | None = None
    momentum: float = 0.0
    weights: Literal["uniform", "examples"] = "uniform"


class EvaluateSection(_Section):
    """When the model is measured on the test split."""

    every: int = 1


class EngineSection(_Section):
    """How a round is computed; nothing here changes what is computed beyond rounding.

    Left out, mode, chunk and threads are chosen and recorded. `checkpoint` is the number of
    rounds between checkpoints.
    """

    mode: Literal["vectorised", "looped"] | None = None
    chunk: int = 0
    threads: int | None = None
    checkpoint: int = 1


class Recipe(_Section):
    """A run, as its author wrote it.

    `iterations` may stand for `rounds`: the local steps over all rounds, T = rounds x local.steps.
    """

    name: str
    seed: int = 1
    rounds: int | None = None
    iterations: int | None = None
    data: DataSection
    model: ModelSection
    sample: SampleSection
    local: LocalSection
    bound: BoundSection | None = None
    noise: NoiseSection = NoNoiseSection(kind="none")
    budget: BudgetSection | None = None
    shuffle: ShuffleSection | None = None
    server: ServerSection = ServerSection()
    evaluate: EvaluateSection = EvaluateSection()
    engine: EngineSection = EngineSection()

    @property
    def total_rounds(self) -> int:
        """The number of rounds; `load_recipe` has filled it in."""
        if self.rounds is None:
            raise AssertionError("a recipe is made by load_recipe")
        return self.rounds


def shipped() -> list[dict[str, str]]:
    """The recipes that come with fedveil: name, what they protect, whose paper they are.

    All three come from the first comment line of the file: "# PROTECTS | PAPER".
    """
    out = []
    for file in sorted(_folder().iterdir(), key=lambda f: f.name.removesuffix(".toml")):
        if file.name.endswith(".toml"):
            protects, paper = file.read_text().splitlines()[0].lstrip("# ").split(" | ")
            out.append(
                {"name": file.name.removesuffix(".toml"), "protects": protects, "paper": paper}
            )
    return out


def load_recipe(source: str = DEFAULT, overrides: Iterable[str] = ()) -> Recipe:
    """Read a shipped recipe by name, or a file by path, and apply `section.key=value` overrides.

    Setting a section's `kind` starts that section anew, so that no key of the old kind is left
    behind; `section=none` and `section.key=none` leave something out.
    """
    raw = _read(source)
    _apply(raw, overrides)
    try:
        return _with_rounds(Recipe.model_validate(raw))
    except ValidationError as e:
        raise BadInput(f"recipe {source}: {_explain(e)}") from e


def _with_rounds(recipe: Recipe) -> Recipe:
    """The recipe with `rounds` filled in from `iterations`, if that was given."""
    if (recipe.rounds is None) == (recipe.iterations is None):
        raise BadInput("give rounds, or iterations (rounds x local.steps), and not both")
    if recipe.iterations is None:
        return recipe
    steps = getattr(recipe.local, "steps", None)
    if steps is None or steps < 1 or recipe.iterations % steps:
        raise BadInput(
            f"iterations is {recipe.iterations}, not a multiple of local.steps, {steps}: every "
            "round takes local.steps of them"
        )
    return recipe.model_copy(update={"rounds": recipe.iterations // steps, "iterations": None})


def _folder() -> Any:
    return files("fedveil") / "recipes"


def _read(source: str) -> dict[str, Any]:
    if source.endswith(".toml") or "/" in source:
        try:
            text = Path(source).read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise BadInput(f"recipe {source} cannot be read: {e}") from e
    else:
        names = [recipe["name"] for recipe in shipped()]
        if source not in names:
            raise BadInput(
                f"recipe {source!r} is unknown: use one of {', '.join(names)}, or a .toml file"
            )
        text = (_folder() / f"{source}.toml").read_text()
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise BadInput(f"recipe {source} is not TOML: {e}") from e


def _apply(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    settings = []
    for override in overrides:
        key, equals, value = override.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path) or len(path) > 2:
            raise BadInput(f"--set {override!r}: write it as section.key=value")
        settings.append((path, _value(value.strip())))
    for path, value in settings:
        if path[-1] == "kind" and raw.get(path[0]) != {"kind": value}:
            raw[path[0]] = {}
    for path, value in settings:
        section = raw
        if len(path) == 2:
            section = raw.setdefault(path[0], {})
            if not isinstance(section, dict):
                raise BadInput(f"--set {'.'.join(path)}: {path[0]} is not a section")
        if value == "none" and path[-1] != "kind":
            section.pop(path[-1], None)
        else:
            section[path[-1]] = value


def _value(text: str) -> Any:
    """A TOML value; what is not one is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: ValidationError) -> str:
    """The first problem, on one line."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    kind = place.pop(1) if len(place) > 1 and place[0] in _BY_KIND else None
    where = ".".join(place)
    match first["type"]:
        case "extra_forbidden":
            return f"{where} is no key" + (f" of kind {kind!r}" if kind else "") + ": remove it"
        case "missing":
            return f"{where} is missing" + (f" for kind {kind!r}" if kind else "")
        case "union_tag_not_found":
            return f"{where}.kind is missing"
        case "union_tag_invalid":
            context = first["ctx"]
            return f"{where}.kind is {context['tag']!r}: use one of {context['expected_tags']}"
        case _:
            return f"{where} is {first['input']!r}: {_lower(first['msg'])}"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
