"""`Recipe`: one TOML file that says everything a run does, read strictly.

It is a shipped one or a file, with overrides, and a run directory has the one that was run.
"""

import copy
import math
import reprlib
import string
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedveil.base.checks import OWN, ROUNDS, SEED, hint, whole
from fedveil.base.errors import BadInput
from fedveil.runs.sections.attack_section import AttackSection
from fedveil.runs.sections.client_section import ClientSection, SampleSection
from fedveil.runs.sections.clip_section import ClipSection
from fedveil.runs.sections.data_section import DataSection
from fedveil.runs.sections.model_section import ModelSection
from fedveil.runs.sections.noise_section import (
    BudgetSection,
    NoiseSection,
    NoNoiseSection,
    ShuffleSection,
)
from fedveil.runs.sections.section import Forms, Section, forms_of, is_key, setting, unknown
from fedveil.runs.sections.server_section import EngineSection, EvaluateSection, ServerSection

if TYPE_CHECKING:
    from fedveil.data.federated import FederatedData


class Recipe(Section):
    """A run, as its author wrote it."""

    name: str
    """What the run is called; its run directory begins with it."""
    seed: int = setting(SEED, 1)
    """Decides what is drawn: first model, partition, cohorts, batches and noise; with secure noise,
    only the first two."""
    rounds: int | None = setting(ROUNDS, None)
    """Rounds that are trained, if the budget allows. Left out: iterations is needed."""
    iterations: int | None = setting(whole(1, "at least one is needed"), None)
    """Local steps over all rounds, in place of rounds: rounds x client.steps. Left out: rounds is
    needed."""
    data: DataSection
    """Which records, and how they are divided among clients."""
    model: ModelSection
    """Which model is trained."""
    sample: SampleSection
    """Which clients take part in a round."""
    client: ClientSection
    """What a client computes in a round."""
    clip: ClipSection | None = None
    """How long a client's update may be; noise needs it. Left out: nothing is clipped."""
    noise: NoiseSection = NoNoiseSection(kind="none")
    """What hides a client's update, and who adds it. Left out: nothing does, and nothing is
    claimed."""
    budget: BudgetSection | None = None
    """What the run may spend; noise that is claimed needs it. Left out: only where nothing is
    claimed."""
    shuffle: ShuffleSection | None = None
    """An ideal shuffler between clients and server, for noise.kind 'two-point'. Left out: the
    server sees who sent what."""
    server: ServerSection = ServerSection()
    """How the server steps. Left out: with every key left out."""
    attack: AttackSection | None = None
    """Clients that attack the training: a simulation, whose result stands beside the claim. Left
    out: everybody is honest."""
    evaluate: EvaluateSection = EvaluateSection()
    """When the model is measured, and what is recorded. Left out: with every key left out."""
    engine: EngineSection = EngineSection()
    """How a round is computed; nothing here changes a result beyond rounding. Left out: with every
    key left out."""

    @property
    def total_rounds(self) -> int:
        """The number of rounds, which `load_recipe` has filled in."""
        if self.rounds is None:
            raise AssertionError("a recipe is made by load_recipe")
        return self.rounds

    def load_data(self, root: Path | None = None) -> "FederatedData":
        """Load the records and divide them. They depend on `[data]` and the seed alone.

        Args:
            root: The folder with published data sets.
        """
        return self.data.divide(self.data.load(root), self.seed)


FORMS = forms_of(Recipe)
"""The sections of a recipe in all their kinds, and the keys that stand before them."""


DEFAULT = "central"

_SHIPPED = files("fedveil") / "recipes"
_BY_KIND = ("sample", "client", "clip", "noise", "attack")
_OLD_SECTIONS = {"bound": "clip", "local": "client"}
_OLD_NAMES = {"local": "dp-sgd"}
_PATHS = (["data", "path"], ["model", "path"])
_LARGEST, _DEEPEST = 1 << 18, 100  # bytes of a file, parts of a key

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 100

Overrides = Iterable[str] | Mapping[str, Any]
Settings = list[tuple[list[str], Any]]
"""Pairs of a key's parts and its value."""

_BARE = {*string.ascii_letters, *string.digits, "_", "-"}
_COLUMNS, _OPTIONS = ["data", "columns"], ["model", "options"]


def shipped_recipes() -> list[dict[str, str]]:
    """The recipes that come with fedveil: name, what they protect, whose paper they are.

    All three come from the first comment line of the file: "# PROTECTS | PAPER".
    """
    out = []
    for file in sorted(_SHIPPED.iterdir(), key=lambda f: f.name.removesuffix(".toml")):
        if file.name.endswith(".toml"):
            protects, paper = file.read_text().splitlines()[0].lstrip("# ").split(" | ")
            out.append(
                {"name": file.name.removesuffix(".toml"), "protects": protects, "paper": paper}
            )
    return out


def recipe_in(folder: Path) -> Recipe:
    """The recipe of the run in a directory, as it was recorded."""
    if not (folder / "recipe.toml").is_file():
        raise BadInput(f"{folder} holds no run: it has no recipe.toml")
    return load_recipe(str(folder / "recipe.toml"))


def with_engine(recipe: Recipe, where: Sequence[str]) -> Recipe:
    """The recipe computed elsewhere: `where` are settings of engine.kind and engine.address.

    Given a kind, the address that the recipe names counts no more.
    """
    if not where:
        return recipe
    new = {"address": None, **{path[1]: value for path, value in parse_overrides(where)}}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=new)})


def on_this_machine(recipe: Recipe) -> Recipe:
    """The recipe computed by processes of this machine."""
    return with_engine(recipe, ["engine.kind=processes"])


def load_recipe(
    source: str | Mapping[str, Any] = DEFAULT,
    overrides: Overrides = (),
    own: Iterable[str] = (),
) -> Recipe:
    """Read a shipped recipe by name, a file by path, or a dict, and apply overrides.

    Overrides are `section.key=value` texts, or a dict of section.key to value. Setting a section's
    `kind` clears that section first, so that no key of the old kind is left behind; so do
    `data.path` and `model.path` where the recipe names no path. `data.columns.COLUMN.key` declares
    a column of a table, `model.options.NAME` is an argument of the function in `model.path`.
    `section=none` and `section.key=none` leave something out. `own` names the sections (model,
    data) in whose place something comes from Python.
    """
    raw = read_recipe(source) if isinstance(source, str) else copy.deepcopy(dict(source))
    settings = parse_overrides(overrides)
    for section in own:
        raw[section] = {"name": OWN}
        for path, _ in settings:
            if path[0] == section:
                raise BadInput(f"{'.'.join(path)} has no effect on {section} of your own")
    _apply(raw, settings)
    source = source if isinstance(source, str) else str(raw.get("name", "given"))
    for old, new in _OLD_SECTIONS.items():
        if old in raw:
            raise BadInput(f"recipe {source}: {old!r} is now called {new!r}: rename the section")
    if isinstance(raw.get("data"), dict) and raw["data"].get("test") == "owners":
        raise BadInput(f"recipe {source}: data.test 'owners' is now called 'by-client'")
    _check_numbers(raw)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise BadInput(f"recipe {source}: {explain_error(e, FORMS)}") from e
    recipe.check_values()
    return _with_rounds(recipe)


def _check_numbers(raw: dict[str, Any]) -> None:
    """Refuse whole numbers beyond 64 bits, which TOML does not have, wherever they are."""
    left: list[tuple[str, Any]] = [("", raw)]
    while left:
        where, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{where}.{key}" if where else key, v) for key, v in value.items()]
        elif isinstance(value, list):
            left += [(where, v) for v in value]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            shown = str(value) if value.bit_length() < 100 else f"of {value.bit_length()} bits"
            raise BadInput(f"{where} is {shown}: a whole number of at most 64 bits is needed")


def _with_rounds(recipe: Recipe) -> Recipe:
    """The recipe with `rounds` filled in from `iterations`, if that was given."""
    if (recipe.rounds is None) == (recipe.iterations is None):
        raise BadInput("give rounds, or iterations (rounds x client.steps), and not both")
    if recipe.iterations is None:
        return recipe
    steps = getattr(recipe.client, "steps", None)
    if steps is None or steps < 1 or recipe.iterations % steps:
        raise BadInput(
            f"iterations is {recipe.iterations}, not a multiple of client.steps, {steps}: every "
            "round takes client.steps of them"
        )
    rounds = recipe.iterations // steps
    ROUNDS.check("rounds", rounds)
    return recipe.model_copy(update={"rounds": rounds, "iterations": None})


def _text(source: str) -> str:
    """The text of a file that can be a recipe: not so large or deep that reading it is work."""
    with Path(source).open("rb") as stream:
        content = stream.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise BadInput(f"recipe {source} is longer than {_LARGEST} bytes: no recipe is")
    text = content.decode()
    for line in text.splitlines():
        if not line.lstrip().startswith("#") and line.partition("=")[0].count(".") > _DEEPEST:
            raise BadInput(f"recipe {source} has a key of more than {_DEEPEST} parts: use sections")
    return text.replace("\r\n", "\n")


def read_recipe(source: str) -> dict[str, Any]:
    """A shipped recipe by name, or a file by path, as it is written."""
    if source.endswith(".toml") or "/" in source:
        try:
            text = _text(source)
        except (OSError, ValueError) as e:
            if isinstance(e, BadInput):
                raise
            raise BadInput(f"recipe {source} cannot be read: {e}") from e
    else:
        names = [recipe["name"] for recipe in shipped_recipes()]
        if source in _OLD_NAMES:
            raise BadInput(f"recipe {source!r} is now called {_OLD_NAMES[source]!r}")
        if source not in names:
            raise BadInput(
                f"recipe {source!r} is unknown: use one of {', '.join(names)}, or a .toml file"
                f"{hint(source, names)}"
            )
        text = (_SHIPPED / f"{source}.toml").read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # also for numbers too long and tables too deep
        raise BadInput(f"recipe {source} is not TOML: {e}") from e


def _apply(raw: dict[str, Any], settings: Settings) -> None:
    for path, value in settings:
        by_kind = path[-1] == "kind" and path[0] in _BY_KIND
        if by_kind and raw.get(path[0]) != {"kind": value}:
            raw[path[0]] = {}
        if path in _PATHS and "path" not in _inner(raw, path):
            raw[path[0]] = {}
    for path, value in settings:
        section = _inner(raw, path)
        if value == "none" and path[-1] != "kind" and is_key(FORMS, path):
            section.pop(path[-1], None)
        else:
            section[path[-1]] = value


def _inner(raw: dict[str, Any], path: list[str]) -> dict[str, Any]:
    """The section that the last part of a path is a key of, made if it is not there."""
    section = raw
    for depth, part in enumerate(path[:-1]):
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise BadInput(
                f"--set {'.'.join(path)}: {'.'.join(path[: depth + 1])} is not a section"
            )
    return section


def explain_error(error: ValidationError, forms: Forms) -> str:
    """The first problem, on one line. Unknown keys come before the missing keys they may stand for.

    `forms` are the sections of the file that was read (`forms_of`).
    """
    first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    place = [str(part) for part in first["loc"]]
    kind = place.pop(1) if len(place) > 1 and place[0] in _BY_KIND else None
    where = " ".join(".".join(place).split())
    match first["type"]:
        case "extra_forbidden":
            return unknown(forms, place, kind)
        case "missing":
            return f"{where} is missing" + (f" for kind {kind!r}" if kind else "")
        case "union_tag_not_found":
            return f"{where}.kind is missing"
        case "union_tag_invalid":
            tag, known = _SHOWN.repr(first["ctx"]["tag"]), first["ctx"]["expected_tags"]
            return f"{where}.kind is {tag}: use one of {known}"
        case _:
            need = first["msg"][:1].lower() + first["msg"][1:]
            return f"{where} is {_SHOWN.repr(first['input'])}: {need}"


def parse_overrides(overrides: Overrides) -> Settings:
    """Split overrides into the parts of their keys, and their values."""
    if isinstance(overrides, str):
        raise BadInput(f"set is {_SHOWN.repr(overrides)}: use a dict, or a list of texts")
    settings: Settings = []
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            path = _place(str(key), f"set {_SHOWN.repr(key)}")
            value = list(value) if isinstance(value, tuple) else value
            settings.append((path, "none" if value is None else value))
        return settings
    for override in overrides:
        key, equals, text = override.partition("=")
        option = f"--set {_SHOWN.repr(override)}"
        if not equals:
            raise BadInput(f"{option}: write it as section.key=value")
        path = _place(key, option)
        if any("\ud800" <= character <= "\udfff" for character in override):
            raise BadInput(f"{option}: it is not UTF-8")
        settings.append((path, _parse_value(text.strip())))
    return settings


def _place(key: str, option: str) -> list[str]:
    """Split a key into its parts. The name of a table's column may contain dots."""
    path = key.strip().split(".")
    if path[:2] == _COLUMNS and len(path) > 4:
        path = [*_COLUMNS, ".".join(path[2:-1]), path[-1]]
    in_table = path[:2] == _COLUMNS or (path[:2] == _OPTIONS and len(path) == 3)
    if not all(path) or (len(path) > 2 and not in_table):
        raise BadInput(f"{option}: write it as section.key=value")
    return path


def _parse_value(text: str) -> Any:
    """Parse a TOML value. Text that is not TOML is a string."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text


def to_toml(document: dict[str, Any]) -> str:
    """Write top-level scalars first, then one table per section, without None.

    >>> print(to_toml({"name": "x", "data": {"clients": 3, "alpha": None}}), end="")
    name = "x"
    <BLANKLINE>
    [data]
    clients = 3
    """
    scalars = {k: v for k, v in document.items() if not isinstance(v, dict)}
    lines = _pairs(scalars)
    for name, section in document.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]", *_pairs(section)]
    return "\n".join(lines) + "\n"


def _pairs(section: dict[str, Any]) -> list[str]:
    """`key = value` for each key, in quotes unless TOML can do without."""
    pairs = []
    for key, value in section.items():
        if value is not None:
            bare = key and not set(key) - _BARE
            pairs.append(f"{key if bare else _value(key)} = {_value(value)}")
    return pairs


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case float():
            return str(value) if not math.isfinite(value) else repr(value)
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            plain = [c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped]
            return f'"{"".join(plain)}"'
        case list() | tuple():
            return "[" + ", ".join(_value(v) for v in value) + "]"
        case dict():
            return "{ " + ", ".join(_pairs(value)) + " }"
    raise AssertionError(f"no TOML for {type(value).__name__}")
