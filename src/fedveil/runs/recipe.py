"""`Recipe`: one TOML file that says everything a run does, read strictly."""

import copy
import reprlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from fedveil.base.checks import OWN, ROUNDS, SEED, hint, whole
from fedveil.base.errors import BadInput
from fedveil.runs.overrides import Overrides, Settings, settings_of
from fedveil.runs.sections.attack_section import AttackSection
from fedveil.runs.sections.client_section import ClientSection, SampleSection
from fedveil.runs.sections.clip_section import ClipSection
from fedveil.runs.sections.data_section import DataSection, ModelSection
from fedveil.runs.sections.keys import Forms, forms_of, is_key, unknown
from fedveil.runs.sections.noise_section import (
    BudgetSection,
    NoiseSection,
    NoNoiseSection,
    ShuffleSection,
)
from fedveil.runs.sections.section import Section
from fedveil.runs.sections.server_section import EngineSection, EvaluateSection, ServerSection

DEFAULT = "central"

_BY_KIND = ("sample", "client", "clip", "noise", "attack")
_OLD_SECTIONS = {"bound": "clip", "local": "client"}
_OLD_NAMES = {"local": "dp-sgd"}
_OLD_TESTS = {"owners": "by-client"}
_PATHS = (["data", "path"], ["model", "path"])
_LARGEST, _DEEPEST = 1 << 18, 100  # bytes of a file, parts of a key

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 100


class Recipe(Section):
    """A run, as its author wrote it."""

    name: str = Field(description="What the run is called; its run directory begins with it.")
    seed: Annotated[int, SEED] = Field(
        default=1,
        description="Decides what is drawn: first model, partition, cohorts, batches and noise; "
        "with secure noise, only the first two.",
    )
    rounds: Annotated[int | None, ROUNDS] = Field(
        default=None,
        description="Rounds that are trained, if the budget allows. Left out: iterations is "
        "needed.",
    )
    iterations: Annotated[int | None, whole(1, "at least one is needed")] = Field(
        default=None,
        description="Local steps over all rounds, in place of rounds: rounds x client.steps. "
        "Left out: rounds is needed.",
    )
    data: DataSection = Field(description="Which records, and how they are divided among clients.")
    model: ModelSection = Field(description="Which model is trained.")
    sample: SampleSection = Field(description="Which clients take part in a round.")
    client: ClientSection = Field(description="What a client computes in a round.")
    clip: ClipSection | None = Field(
        default=None,
        description="How long a client's update may be; noise needs it. Left out: nothing is "
        "clipped.",
    )
    noise: NoiseSection = Field(
        default=NoNoiseSection(kind="none"),
        description="What hides a client's update, and who adds it. Left out: nothing does, and "
        "nothing is claimed.",
    )
    budget: BudgetSection | None = Field(
        default=None,
        description="What the run may spend; noise that is claimed needs it. Left out: only where "
        "nothing is claimed.",
    )
    shuffle: ShuffleSection | None = Field(
        default=None,
        description="An ideal shuffler between clients and server, for noise.kind 'two-point'. "
        "Left out: the server sees who sent what.",
    )
    server: ServerSection = Field(
        default=ServerSection(),
        description="How the server steps. Left out: with every key left out.",
    )
    attack: AttackSection | None = Field(
        default=None,
        description="Clients that attack the training: a simulation, whose result stands beside "
        "the claim. Left out: everybody is honest.",
    )
    evaluate: EvaluateSection = Field(
        default=EvaluateSection(),
        description="When the model is measured, and what is recorded. Left out: with every key "
        "left out.",
    )
    engine: EngineSection = Field(
        default=EngineSection(),
        description="How a round is computed; nothing here changes a result beyond rounding. "
        "Left out: with every key left out.",
    )

    @property
    def total_rounds(self) -> int:
        """The number of rounds; `load_recipe` has filled it in."""
        if self.rounds is None:
            raise AssertionError("a recipe is made by load_recipe")
        return self.rounds


FORMS = forms_of(Recipe)
"""The sections of a recipe in all their kinds, and the keys that stand before them."""


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


def recipe_in(folder: Path) -> Recipe:
    """The recipe of the run in a directory, as it was recorded."""
    if not (folder / "recipe.toml").is_file():
        raise BadInput(f"{folder} holds no run: it has no recipe.toml")
    return load_recipe(str(folder / "recipe.toml"))


def moved(recipe: Recipe, where: Sequence[str]) -> Recipe:
    """The recipe computed elsewhere: `where` are settings of engine.kind and engine.address.

    Given a kind, the address that the recipe names counts no more.
    """
    if not where:
        return recipe
    new = {"address": None, **{path[1]: value for path, value in settings_of(where)}}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=new)})


def here(recipe: Recipe) -> Recipe:
    """The recipe computed by processes of this machine."""
    return moved(recipe, ["engine.kind=processes"])


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
    raw = read(source) if isinstance(source, str) else copy.deepcopy(dict(source))
    settings = settings_of(overrides)
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
    _check_test(source, raw)
    _check_numbers(raw)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as e:
        raise BadInput(f"recipe {source}: {explained(e, FORMS)}") from e
    recipe.check_values()
    return _with_rounds(recipe)


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
    ROUNDS.check("rounds", rounds)
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


def read(source: str) -> dict[str, Any]:
    """A shipped recipe by name, or a file by path, as it is written."""
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
                f"{hint(source, names)}"
            )
        text = (_folder() / f"{source}.toml").read_text(encoding="utf-8")
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


def explained(error: ValidationError, forms: Forms) -> str:
    """The first problem, on one line; a key that is unknown before one that it was meant for.

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
            return f"{where} is {_SHOWN.repr(first['input'])}: {_lower(first['msg'])}"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
