"""`Recipe`: one TOML file that says everything a run does, read strictly."""

import reprlib
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedveil.checks import VALUES, check, check_workers
from fedveil.errors import BadInput
from fedveil.runs.sections import (
    BudgetSection,
    ClientSection,
    ClipSection,
    DataSection,
    EngineSection,
    EvaluateSection,
    ModelSection,
    NoiseSection,
    NoNoiseSection,
    SampleSection,
    Section,
    ServerSection,
    ShuffleSection,
)

DEFAULT = "central"

_BY_KIND = ("sample", "client", "clip", "noise")
_OLD_SECTIONS = {"bound": "clip", "local": "client"}
_OLD_NAMES = {"local": "dp-sgd"}
_OLD_TESTS = {"owners": "by-client"}
_COLUMNS = ["data", "columns"]
_LARGEST, _DEEPEST = 1 << 18, 100  # bytes of a file, parts of a key

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 100


class Recipe(Section):
    """A run, as its author wrote it.

    `iterations` may stand for `rounds`: the local steps over all rounds, T = rounds x client.steps.
    """

    name: str
    seed: int = 1
    rounds: int | None = None
    iterations: int | None = None
    data: DataSection
    model: ModelSection
    sample: SampleSection
    client: ClientSection
    clip: ClipSection | None = None
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

    Setting a section's `kind` clears that section first, so that no key of the old kind is left
    behind; so does `data.path` where the recipe names no path. `data.columns.COLUMN.key=value`
    declares a column of a table. `section=none` and `section.key=none` leave something out.
    """
    raw = _read(source)
    _apply(raw, overrides)
    for old, new in _OLD_SECTIONS.items():
        if old in raw:
            raise BadInput(f"recipe {source}: {old!r} is now called {new!r}: rename the section")
    _check_test(source, raw)
    _check_numbers(raw)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise BadInput(f"recipe {source}: {_explain(e)}") from e
    check_values(recipe)
    return _with_rounds(recipe)


def check_values(recipe: Recipe) -> None:
    """Refuse values that are wrong by themselves, before anything heavy is imported."""
    check_workers("engine.workers", recipe.engine.workers)
    if recipe.engine.timings is not None and recipe.engine.mode is None:
        raise BadInput("engine.timings is what a run records beside engine.mode: leave it out")
    for key, section in recipe:
        inner = section if isinstance(section, Section) else ((None, section),)
        for name, value in inner:
            path = key if name is None else f"{key}.{name}"
            if path in VALUES:
                if value == []:
                    raise BadInput(f"{path} is empty: give at least one number, or leave it out")
                for one in value if isinstance(value, list) else [value]:
                    if one is not None:
                        check(path, one)


def _check_test(source: str, raw: dict[str, Any]) -> None:
    """Refuse the old word for a test split of held-out clients."""
    data = raw.get("data")
    for old, new in _OLD_TESTS.items():
        if isinstance(data, dict) and data.get("test") == old:
            raise BadInput(f"recipe {source}: data.test {old!r} is now called {new!r}")


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
    check("rounds", rounds)
    return recipe.model_copy(update={"rounds": rounds, "iterations": None})


def _folder() -> Any:
    return files("fedveil") / "recipes"


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


def _read(source: str) -> dict[str, Any]:
    if source.endswith(".toml") or "/" in source:
        try:
            text = _text(source)
        except (OSError, ValueError) as e:
            if isinstance(e, BadInput):
                raise
            raise BadInput(f"recipe {source} cannot be read: {e}") from e
    else:
        names = [recipe["name"] for recipe in shipped()]
        if source in _OLD_NAMES:
            raise BadInput(f"recipe {source!r} is now called {_OLD_NAMES[source]!r}")
        if source not in names:
            raise BadInput(
                f"recipe {source!r} is unknown: use one of {', '.join(names)}, or a .toml file"
            )
        text = (_folder() / f"{source}.toml").read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # also for numbers too long and tables too deep
        raise BadInput(f"recipe {source} is not TOML: {e}") from e


def _apply(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    settings = []
    for override in overrides:
        key, equals, value = override.partition("=")
        path = _path(key)
        if not equals or not all(path) or (len(path) > 2 and path[:2] != _COLUMNS):
            raise BadInput(f"--set {_SHOWN.repr(override)}: write it as section.key=value")
        if any("\ud800" <= character <= "\udfff" for character in override):
            raise BadInput(f"--set {_SHOWN.repr(override)}: it is not UTF-8")
        settings.append((path, _value(value.strip())))
    for path, value in settings:
        if path[-1] == "kind" and raw.get(path[0]) != {"kind": value}:
            raw[path[0]] = {}
        if path == ["data", "path"] and "path" not in _inner(raw, path):
            raw["data"] = {}
    for path, value in settings:
        section = _inner(raw, path)
        if value == "none" and path[-1] != "kind":
            section.pop(path[-1], None)
        else:
            section[path[-1]] = value


def _path(key: str) -> list[str]:
    """The parts of a key; the name of a table's column may have dots of its own."""
    parts = key.strip().split(".")
    if parts[:2] == _COLUMNS and len(parts) > 4:
        return [*_COLUMNS, ".".join(parts[2:-1]), parts[-1]]
    return parts


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


def _value(text: str) -> Any:
    """A TOML value; what is not one is a string."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text


def _explain(error: ValidationError) -> str:
    """The first problem, on one line."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    kind = place.pop(1) if len(place) > 1 and place[0] in _BY_KIND else None
    where = " ".join(".".join(place).split())
    match first["type"]:
        case "extra_forbidden":
            return f"{where} is no key" + (f" of kind {kind!r}" if kind else "") + ": remove it"
        case "missing":
            return f"{where} is missing" + (f" for kind {kind!r}" if kind else "")
        case "union_tag_not_found":
            return f"{where}.kind is missing"
        case "union_tag_invalid":
            tag, known = _SHOWN.repr(first["ctx"]["tag"]), first["ctx"]["expected_tags"]
            return f"{where}.kind is {tag}: use one of {known}"
        case _:
            return f"{where} is {_SHOWN.repr(first['input'])}: {_lower(first['msg'])}"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
