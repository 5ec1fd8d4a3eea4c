"""Which keys there are, and what was meant by one that there is not."""

from typing import Annotated, Literal

import pytest
from pydantic import Field

from fedveil.base.errors import BadArgument, BadInput
from fedveil.runs.build import RECIPE_KEYS
from fedveil.runs.recipe import Recipe, load_recipe
from fedveil.runs.sections.section import Section, forms_of, in_keys, is_key, unknown_key_text


class Warm(Section):
    kind: Literal["warm"]
    degrees: int


class Cold(Section):
    kind: Literal["cold"]
    degrees: int
    wind: float


class Plain(Section):
    colour: str


class Whole(Section):
    name: str
    weather: Annotated[Warm | Cold, Field(discriminator="kind")] | None = None
    wall: Plain = Plain(colour="red")


SMALL = forms_of(Whole)


def test_forms_are_found_by_kind():
    assert {"name": {}, "weather": {"warm": Warm, "cold": Cold}, "wall": {"": Plain}} == SMALL


def test_a_recipe_has_forms_for_every_section():
    assert list(forms_of(Recipe)) == list(Recipe.model_fields)
    assert [name for name, forms in forms_of(Recipe).items() if not forms] == [
        *("name", "seed", "rounds", "iterations"),
    ]
    assert list(forms_of(Recipe)["clip"]) == ["fixed", "poly", "quantile", "median", "range"]
    assert list(forms_of(Recipe)["data"]) == [""]


@pytest.mark.parametrize(
    ("path", "known"),
    [
        (["name"], True),
        (["weather"], True),
        (["weather", "degrees"], True),
        (["weather", "wind"], True),
        (["wall", "colour"], True),
        (["wall", "degrees"], False),
        (["colour"], False),
        (["name", "colour"], False),
        (["sky", "colour"], False),
        (["wall", "colour", "colour"], False),
    ],
)
def test_keys_are_known_in_whatever_kind(path, known):
    assert is_key(SMALL, path) is known


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        (["wether"], None, "unknown key wether: did you mean weather?"),
        (["wether", "wind"], None, "unknown key wether: did you mean weather?"),
        (["degrees"], None, "unknown key degrees: did you mean weather.degrees?"),
        (["colur"], None, "unknown key colur: did you mean wall.colour?"),
        (["zzz"], None, "unknown key zzz: fedveil explain lists all sections"),
        (["wall", "color"], None, "unknown key wall.color: did you mean wall.colour?"),
        (["wall", "zzz"], None, "unknown key wall.zzz: fedveil explain wall lists its keys"),
        (["weather", "wnid"], None, "unknown key weather.wnid: did you mean weather.wind?"),
        (
            ["weather", "degree"],
            "cold",
            "unknown key weather.degree of kind 'cold': did you mean weather.degrees?",
        ),
        (
            ["weather", "wnid"],
            "warm",
            "unknown key weather.wnid of kind 'warm': fedveil explain weather lists its keys",
        ),
        (
            ["weather", "wind"],
            "warm",
            "unknown key weather.wind of kind 'warm': it belongs to kind 'cold'",
        ),
        (["name", "wind"], None, "unknown key name.wind: name has none"),
        (["a\nb"], None, "unknown key a b: fedveil explain lists all sections"),
        (["z" * 999], None, f"unknown key {'z' * 100}...: fedveil explain lists all sections"),
        ([""], None, "unknown key '': fedveil explain lists all sections"),
    ],
)
def test_what_is_said_of_an_unknown_key(path, kind, said):
    assert unknown_key_text(SMALL, path, kind) == said


QUANTILE = ("clip.kind=quantile", "clip.value=1.0")


@pytest.mark.parametrize(
    ("settings", "argument", "name"),
    [
        ((), "noise", "noise"),
        (QUANTILE, "noise", "clip.bit_noise"),
        ((), "size", "size"),
        (("sample.kind=fixed", "sample.size=5"), "size", "sample.size"),
        ((), "minimum", "minimum"),
        ((), "multiplier", "noise.multiplier"),
        ((), "epsilon", "epsilon"),
        ((), "delta", "budget.delta"),
    ],
)
def test_arguments_are_called_by_keys_that_the_recipe_has(settings, argument, name):
    recipe = load_recipe("central", settings)
    with (
        pytest.raises(BadInput, match=f"^{name} is wrong$"),
        in_keys(recipe=recipe, **RECIPE_KEYS),
    ):
        raise BadArgument(f"{{{argument}}} is wrong", argument)


def test_a_section_calls_arguments_by_its_own_keys():
    with pytest.raises(BadInput, match=r"^clip.low and other and attack.size$"), in_keys("clip"):
        raise BadArgument("{low} and other and {attack.size}", "low", "attack.size")


def test_an_inner_section_names_the_keys():
    outer = in_keys(recipe=load_recipe("central"), **RECIPE_KEYS)
    with pytest.raises(BadInput, match=r"^attack.delta is wrong$"), outer, in_keys("attack"):
        raise BadArgument("{delta} is wrong", "delta")
