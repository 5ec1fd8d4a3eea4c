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

from fedveil.base.checks import CODE, OWN, ROUNDS, SEED, TABLE, hint, whole
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
    SumSection,
)
from fedveil.runs.sections.section import (
    Forms,
    Section,
    forms_of,
    is_key,
    setting,
    unknown_key_text,
)
from fedveil.runs.sections.server_section import EngineSection, EvaluateSection, ServerSection

if TYPE_CHECKING:
    from fedveil.data.federated import FederatedData


class Recipe(Section):
    """A run, as its author wrote it."""

    name: str
    """The name of the run. The name of its run directory begins with it."""
    seed: int = setting(SEED, 1)
    """The seed of the first model, the partition, cohorts, batches and noise. With secure noise, of
    the first two only."""
    rounds: int = setting(ROUNDS, None)  # load_recipe fills it in
    """Rounds to train, if the budget allows. Default: iterations / client.steps."""
    iterations: int | None = setting(whole(1, "at least one is needed"), None)
    """Local steps over all rounds, in place of rounds. Default: rounds x client.steps."""
    data: DataSection
    """The records, and how they are divided among clients."""
    model: ModelSection
    """The model to train."""
    sample: SampleSection
    """The clients that take part in a round."""
    client: ClientSection
    """The work of a client in a round."""
    clip: ClipSection | None = None
    """The limit on the length of a client's update. Noise needs it. Default: nothing is clipped."""
    noise: NoiseSection = NoNoiseSection(kind="none")
    """The noise that hides a client's update, and who adds it. Default: no noise, and no claim."""
    budget: BudgetSection | None = None
    """The most that the run may spend. Required where noise is claimed. Default: no budget."""
    shuffle: ShuffleSection | None = None
    """An ideal shuffler between clients and server, for noise.kind 'two-point'. Default: the
    server sees who sent what."""
    sum: SumSection | None = None
    """A secure sum between sites and server, for noise.where 'site' and 'server'. Default: the
    server sees every site's sum, or, with noise.share 'part', one of all sites."""
    server: ServerSection = ServerSection()
    """The server's step. Default: every key at its default."""
    attack: AttackSection | None = None
    """Clients that attack the training: a simulation, whose result stands beside the claim.
    Default: everybody is honest."""
    evaluate: EvaluateSection = EvaluateSection()
    """When the model is measured, and what is recorded. Default: every key at its default."""
    engine: EngineSection = EngineSection()
    """How a round is computed. Nothing here changes a result beyond rounding. Default: every key at
    its default."""

    def load_data(self, root: Path | None = None) -> "FederatedData":
        """Load the records and divide them among clients, by `[data]` and the seed alone.

        Raises BadInput for data that are missing or do not fit the section.

        Args:
            root: The folder with published data sets, None for that in FEDVEIL_DATA.
        """
        return self.data.divide(self.data.load(root), self.seed)


DEFAULT = "people"

_SHIPPED = files("fedveil") / "recipes"
_BY_KIND = ("sample", "client", "clip", "noise", "attack")
_OLD_SECTIONS = {"bound": "clip", "local": "client"}
_OLD_NAMES = {"local": "dp-sgd"}
_PATHS = (["data", "path"], ["model", "path"])
_NAMES_OF_PATHS = {"data": TABLE, "model": CODE}
"""The key `name` of a section that has a path and no name."""

_LARGEST, _DEEPEST = 1 << 18, 100  # bytes of a file, parts of a key

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 100

Overrides = Iterable[str] | Mapping[str, Any]
Settings = list[tuple[list[str], Any]]
"""Pairs of a key's parts and its value."""

_NEEDED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number is needed"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number is needed"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false is needed"),
    "string_type": "a text is needed",
    "list_type": 'a list is needed, such as ["a", "b"]',
}
"""What a key needs, by pydantic's word for what is wrong with its value."""

_BARE = {*string.ascii_letters, *string.digits, "_", "-"}
_COLUMNS, _OPTIONS = ["data", "columns"], ["model", "options"]


def shipped_recipes() -> list[dict[str, str]]:
    """Return a row "name", "protects" and "paper" for each recipe that comes with fedveil, by name.

    The last two come from the first comment line of the file: "# PROTECTS | PAPER".
    """
    out = []
    for file in sorted(_SHIPPED.iterdir(), key=lambda f: f.name.removesuffix(".toml")):
        if file.name.endswith(".toml"):
            protects, paper = file.read_text().splitlines()[0].lstrip("# ").split(" | ")
            name = file.name.removesuffix(".toml")
            out.append({"name": name, "protects": protects, "paper": paper})
    return out


def name_paths(raw: dict[str, Any]) -> None:
    """Add the key `name` to the sections [data] and [model] that have a path and no name."""
    for section, name in _NAMES_OF_PATHS.items():
        table = raw.get(section)
        if isinstance(table, dict) and "path" in table and "name" not in table:
            raw[section] = {"name": name, **table}


def recipe_in(folder: Path) -> Recipe:
    """Read the recipe.toml of a run directory. Raises BadInput if it is missing or refused."""
    if not (folder / "recipe.toml").is_file():
        raise BadInput(f"{folder} holds no run: it has no recipe.toml")
    return load_recipe(str(folder / "recipe.toml"))


def with_engine(recipe: Recipe, where: Sequence[str]) -> Recipe:
    """Return a copy of the recipe with another engine, or the recipe itself if `where` is empty.

    `where` holds the overrides "engine.kind=..." and "engine.address=...". Without the latter the
    recipe's own address is dropped. The new values are not checked here.
    """
    if not where:
        return recipe
    new = {"address": None, **{path[1]: value for path, value in parse_overrides(where)}}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=new)})


def on_this_machine(recipe: Recipe) -> Recipe:
    """Return a copy of the recipe with engine.kind "processes" and no engine.address."""
    return with_engine(recipe, ["engine.kind=processes"])


_LOSS_OF_OWN = ("model", "class_weights")
"""The one key of `[model]` that a module from Python leaves open: it is about the default loss."""


def load_recipe(
    source: str | Mapping[str, Any] = DEFAULT, overrides: Overrides = (), own: Iterable[str] = ()
) -> Recipe:
    """Read a shipped recipe by name, a file by path, or a dict, and apply overrides.

    Setting a section's `kind` clears that section first, so that no key of the old kind is left
    behind. So do `data.path` and `model.path` if the recipe names no path. An override
    `data.columns.COLUMN.key` declares a column of a table, `model.options.NAME` is an argument of
    the function in `model.path`, and `section=none` or `section.key=none` leaves something out.
    Raises BadInput for unknown keys, values out of range and keys that contradict each other.

    Args:
        source: A shipped recipe's name, a path, or the recipe as a dict.
        overrides: `section.key=value` texts, or a dict of section.key to value.
        own: The sections ("model", "data") that are replaced by objects from Python.
    """
    if isinstance(source, str):
        raw = read_recipe(source)
    else:
        keys = dict(source)
        raw = {key: copy.deepcopy(value) for key, value in keys.items() if value is not None}
    settings = parse_overrides(overrides)
    for section in own:
        raw[section] = {"name": OWN}
        for path, _ in settings:
            if path[0] == section and tuple(path) != _LOSS_OF_OWN:
                raise BadInput(f"{'.'.join(path)} has no effect on {section} of your own")
    _apply_overrides(raw, settings)
    source = source if isinstance(source, str) else str(raw.get("name", "given"))
    for old, new in _OLD_SECTIONS.items():
        if old in raw:
            raise BadInput(f"recipe {source}: {old!r} is now called {new!r}: rename the section")
    if isinstance(raw.get("data"), dict) and raw["data"].get("test") == "owners":
        raise BadInput(f"recipe {source}: data.test 'owners' is now called 'by-client'")
    name_paths(raw)
    _check_integers(raw)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise BadInput(f"recipe {source}: {explain_error(e, forms_of(Recipe))}") from e
    recipe.check_values()
    if ("rounds" in raw) == (recipe.iterations is not None):
        raise BadInput("give rounds, or iterations (rounds x client.steps), and not both")
    if recipe.iterations is None:
        return recipe
    # Fill in the rounds that so many local steps take.
    steps = getattr(recipe.client, "steps", None)
    if steps is None or steps < 1 or recipe.iterations % steps:
        raise BadInput(
            f"iterations is {recipe.iterations}, not a multiple of client.steps, {steps}: every "
            "round takes client.steps of them"
        )
    rounds = recipe.iterations // steps
    ROUNDS.check("rounds", rounds)
    return recipe.model_copy(update={"rounds": rounds, "iterations": None})


def _check_integers(raw: dict[str, Any]) -> None:
    """Raise BadInput for an integer beyond 64 bits, at any depth, which TOML cannot hold."""
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


def read_recipe(source: str) -> dict[str, Any]:
    """Parse the TOML of a shipped recipe by name, or of a file by path, without checking its keys.

    Raises BadInput for an unknown name, and for a file that cannot be read, is too large, has keys
    of too many parts, or is not TOML.
    """
    if source.endswith(".toml") or "/" in source:
        try:
            with Path(source).open("rb") as stream:
                content = stream.read(_LARGEST + 1)
            too_large = len(content) > _LARGEST
            text = "" if too_large else content.decode().replace("\r\n", "\n")
        except FileNotFoundError as e:
            raise BadInput(
                f"recipe {source} does not exist: a relative path is relative to the current "
                "directory"
            ) from e
        except (OSError, ValueError) as e:
            raise BadInput(f"recipe {source} cannot be read: {e}") from e
        if too_large:
            raise BadInput(f"recipe {source} is longer than {_LARGEST} bytes: no recipe is")
        keys = [x.partition("=")[0] for x in text.splitlines() if not x.lstrip().startswith("#")]
        if any(key.count(".") > _DEEPEST for key in keys):
            raise BadInput(f"recipe {source} has a key of more than {_DEEPEST} parts: use sections")
    else:
        shipped = (file.name for file in _SHIPPED.iterdir())
        names = sorted(name.removesuffix(".toml") for name in shipped if name.endswith(".toml"))
        if source in _OLD_NAMES:
            raise BadInput(f"recipe {source!r} is now called {_OLD_NAMES[source]!r}")
        if source.endswith((".csv", ".parquet")):
            raise BadInput(f"{source} is a table, not a recipe: --set data.path={source}")
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


def _apply_overrides(raw: dict[str, Any], settings: Settings) -> None:
    """Set keys of the recipe `raw` in place, making sections that are not there.

    A kind, or a path where there was none, clears its section first. The value "none" removes a
    key. Raises BadInput if a key's section is not a table in `raw`.
    """
    for path, value in settings:
        by_kind = path[-1] == "kind" and path[0] in _BY_KIND
        section = raw.get(path[0], {})
        new_path = path in _PATHS and isinstance(section, dict) and "path" not in section
        if new_path or (by_kind and section != {"kind": value}):
            raw[path[0]] = {}
    for path, value in settings:
        section = raw
        for depth, part in enumerate(path[:-1]):
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                above = ".".join(path[: depth + 1])
                raise BadInput(f"--set {'.'.join(path)}: {above} is not a section")
        if value == "none" and path[-1] != "kind" and is_key(forms_of(Recipe), path):
            section.pop(path[-1], None)
        else:
            section[path[-1]] = value


def explain_error(error: ValidationError, forms: Forms) -> str:
    """Return the first problem of a recipe or another file of sections, on one line.

    Unknown keys come first, since a missing key may be one that was misspelt. `forms` are the
    sections of the file (`forms_of`). The line does not name the file.
    """
    first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    place = [str(part) for part in first["loc"]]
    kind = place.pop(1) if len(place) > 1 and place[0] in _BY_KIND else None
    where = " ".join(".".join(place).split())
    match first["type"]:
        case "extra_forbidden":
            return unknown_key_text(forms, place, kind)
        case "missing":
            return f"{where} is missing" + (f" for kind {kind!r}" if kind else "")
        case "union_tag_not_found":
            return f"{where}.kind is missing"
        case "union_tag_invalid":
            tag, known = _SHOWN.repr(first["ctx"]["tag"]), first["ctx"]["expected_tags"]
            return f"{where}.kind is {tag}: use one of {known}"
        case "value_error":
            return f"{where}: {first['ctx']['error']}"
        case "model_type" | "model_attributes_type":
            keys = (key for form in forms[place[0]].values() for key in form.model_fields)
            key = next((key for key in keys if key != "kind"), "kind") if len(place) == 1 else "KEY"
            need = f"it is a section; set its keys, such as {where}.{key}"
        case "literal_error":
            need = f"use {first['ctx']['expected']}"
        case other if other in _NEEDED:
            need = _NEEDED[other]
        case _:
            need = first["msg"][:1].lower() + first["msg"][1:]
    return f"{where} is {_SHOWN.repr(first['input'])}: {need}"


def parse_overrides(overrides: Overrides) -> Settings:
    """Return each override as a pair (parts of its key, value), in order.

    The value in a `section.key=value` text is parsed as TOML. Text that is not TOML is a string. In
    a dict, None becomes "none" and a tuple a list. Raises BadInput if a text has no "=", or a key
    too few or too many parts.
    """
    if isinstance(overrides, str):
        raise BadInput(f"set is {_SHOWN.repr(overrides)}: use a dict, or a list of texts")
    given: list[tuple[str, str, Any]] = []  # how a message names the override, its key and value
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            value = list(value) if isinstance(value, tuple) else value
            given.append((f"set {_SHOWN.repr(key)}", str(key), "none" if value is None else value))
    else:
        for override in overrides:
            option = f"--set {_SHOWN.repr(override)}"
            key, equals, text = override.partition("=")
            if not equals:
                raise BadInput(f"{option}: write it as section.key=value")
            if any("\ud800" <= character <= "\udfff" for character in override):
                raise BadInput(f"{option}: it is not UTF-8")
            try:
                document = tomllib.loads(f"value = {text.strip()}")
            except (ValueError, RecursionError):
                document = {}
            given.append((option, key, document["value"] if len(document) == 1 else text.strip()))
    settings: Settings = []
    for option, key, value in given:
        path = key.strip().split(".")
        if path[:2] == _COLUMNS and len(path) > 4:  # a column's name may contain dots
            path = [*_COLUMNS, ".".join(path[2:-1]), path[-1]]
        in_table = path[:2] == _COLUMNS or (path[:2] == _OPTIONS and len(path) == 3)
        if not all(path) or (len(path) > 2 and not in_table):
            raise BadInput(f"{option}: write it as section.key=value")
        settings.append((path, value))
    return settings


def to_toml(document: dict[str, Any]) -> str:
    """Return a document as TOML: scalars first, then one table per section. None is left out.

    >>> print(to_toml({"name": "x", "data": {"clients": 3, "alpha": None}}), end="")
    name = "x"
    <BLANKLINE>
    [data]
    clients = 3
    """
    scalars = {k: v for k, v in document.items() if not isinstance(v, dict)}
    lines = _toml_pairs(scalars)
    for name, section in document.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]", *_toml_pairs(section)]
    return "\n".join(lines) + "\n"


def _toml_pairs(section: dict[str, Any]) -> list[str]:
    """Return a line `key = value` for each value that is not None, with quotes around odd keys."""
    pairs = []
    for key, value in section.items():
        if value is not None:
            bare = key and not set(key) - _BARE
            pairs.append(f"{key if bare else toml_value(key)} = {toml_value(value)}")
    return pairs


def toml_value(value: Any) -> str:
    """Return a bool, number, string, list or dict as a TOML value on one line.

    AssertionError for any other type.
    """
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
            return "[" + ", ".join(toml_value(v) for v in value) + "]"
        case dict():
            return "{ " + ", ".join(_toml_pairs(value)) + " }"
    raise AssertionError(f"no TOML for {type(value).__name__}")
