"""What is told of every key of a recipe: all of it, and nothing that is not so."""

import inspect
import json
import math
import re
from dataclasses import asdict

import pytest

from fedveil.base.checks import MODEL_NAMES, Each, Limits
from fedveil.base.errors import BadInput
from fedveil.data.image_sets import load_femnist
from fedveil.data.tabular_sets import load_lending_club
from fedveil.runs.build import build
from fedveil.runs.explain import find_part, overview, parts, recipes_text, split_kind
from fedveil.runs.recipe import Recipe, load_recipe, shipped_recipes
from fedveil.runs.sections.data_section import ColumnSection
from fedveil.runs.sections.section import Section, forms_of, is_key
from fedveil.training.work import Adam

FIELDS = {
    **{name: Recipe.model_fields[name] for name in forms_of(Recipe)},
    **{
        f"{section}.{name} ({kind})": field
        for section, forms in forms_of(Recipe).items()
        for kind, form in forms.items()
        for name, field in form.model_fields.items()
    },
}
DESCRIPTIONS = {name: " ".join((FIELDS[name].description or "").split()) for name in FIELDS}
KEYS = [key for part in parts() for key in part.keys]
INNER = [key for key in KEYS if ".NAME." in key.key]

OTHERS = ("engine.workers", "engine.timings", "data.test", "data.sites")
"""Keys whose ranges are not one number's."""


def test_every_key_is_described_in_short_sentences():
    for name in FIELDS:
        said = DESCRIPTIONS[name]
        assert said, name
        assert said.endswith(".")
        assert len(said) < 400
        assert said.isascii()


def test_what_holds_without_a_key_is_said_where_its_default_does_not():
    for name in FIELDS:
        field = FIELDS[name]
        optional = not field.is_required() and isinstance(field.default, Section | None)
        assert DESCRIPTIONS[name].count(" Default: ") == optional, name


def test_descriptions_name_only_keys_that_there_are():
    for name in FIELDS:
        words = re.findall(rf"\b({'|'.join(forms_of(Recipe))})\.(\w+)", DESCRIPTIONS[name])
        for section, key in words:
            assert is_key(forms_of(Recipe), [section, key]), f"{section}.{key}"


def test_all_keys_are_told_once_for_each_kind():
    assert len(KEYS) == len({(key.key, key.kind) for key in KEYS})
    assert len(KEYS) - len(INNER) == sum(1 for name in FIELDS if not forms_of(Recipe).get(name))
    assert [key.key.split(".")[-1] for key in INNER] == list(ColumnSection.model_fields)
    assert [part.section for part in parts()] == [
        "",
        *(name for name in forms_of(Recipe) if forms_of(Recipe)[name]),
    ]


def test_numbers_have_the_ranges_they_are_checked_by():
    for key in KEYS:
        name = f"{key.key} ({key.kind})" if f"{key.key} ({key.kind})" in FIELDS else key.key
        metadata = FIELDS[name].metadata if name in FIELDS else []
        limits = [one for one in metadata if isinstance(one, Limits | Each)]
        if limits:
            assert key.allowed == limits[0].text
            assert "number" in key.type
        elif (
            key.key not in ("engine.workers", "engine.timings", "data.test", "data.sites")
            and key not in INNER
        ):
            assert key.allowed == ""
            assert "number" not in key.type


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("name", "text"),
        ("rounds", "whole number"),
        ("sample.rate", "number"),
        ("noise.claim", "true or false"),
        ("data.test", "number or text"),
        ("data.columns.NAME.fill", "true or false or whole number or number or text"),
        ("data.statistics", "one of 'public', 'held-out', 'clients'"),
        ("model.hidden", "list of whole numbers"),
        ("budget.epsilons", "list of numbers"),
        ("engine.timings", "table of numbers, each for one of 'vectorised', 'looped'"),
        ("model.name", f"one of {', '.join(map(repr, MODEL_NAMES.choices))}"),
    ],
)
def test_types_are_in_plain_words(name, type_):
    assert {key.type for key in find_part(name).keys} == {type_}


def test_a_key_is_found_in_every_kind_that_has_it():
    found = find_part("clip.value")
    assert (found.section, found.left_out) == ("clip", "nothing is clipped")
    assert [key.kind for key in found.keys] == ["fixed", "poly", "quantile", "median"]
    assert list(found.kinds) == ["fixed", "poly", "quantile", "median"]
    assert [key.type for key in find_part("noise.where").keys[1:]] == ["'client'"] * 3


def test_a_kind_is_told_apart_from_its_keys():
    named, others = split_kind(find_part("sample").kinds["fixed"])
    assert named.meaning == "A random cohort of exactly size clients."
    assert [key.key for key in others] == ["sample.size", "sample.max_participations"]
    assert split_kind(find_part("sample.size").kinds["fixed"])[0] is None
    assert split_kind(find_part("data").keys)[0] is None


def test_keys_before_all_sections_are_found():
    (rounds,) = find_part("rounds").keys
    assert (rounds.key, rounds.kind, rounds.left_out) == ("rounds", "", "iterations / client.steps")
    assert find_part("rounds").section == ""


def test_a_key_that_is_needed_has_nothing_that_holds_without_it():
    for key in (key for key in KEYS if key not in INNER):
        forms = forms_of(Recipe)[key.key.split(".")[0]]
        fields = forms[key.kind].model_fields if forms else Recipe.model_fields
        assert (key.left_out == "") is fields[key.key.split(".")[-1]].is_required()


@pytest.mark.parametrize("name", [recipe["name"] for recipe in shipped_recipes()])
def test_recipes_are_named_with_the_value_they_have(name):
    recipe = load_recipe(name)
    own = [key for key in KEYS if name in key.recipes]
    assert {"name", "rounds", "data.name", "sample.kind"} <= {key.key for key in own}
    for key in own:
        section, *rest = key.key.split(".")
        value = getattr(recipe, section)
        found = getattr(value, rest[0]) if rest else value
        assert found == key.recipes[name]
        assert getattr(value, "kind", "") == key.kind


def test_recipes_are_told_by_value():
    assert recipes_text({}) == ""
    assert recipes_text({"central": True, "dp-sgd": [1, 2]}) == "true in central; [1, 2] in dp-sgd"
    assert recipes_text(find_part("seed").keys[0].recipes) == "1 in every recipe"
    assert recipes_text(find_part("name").keys[0].recipes) == "every recipe has its own"


@pytest.mark.parametrize("name", ["", ".", "clip.", ".value", "clip.value.x", "[clip]", "CLIP"])
def test_what_is_no_section_or_key_is_refused(name):
    with pytest.raises(BadInput, match="unknown key ") as refusal:
        find_part(name)
    assert "\n" not in str(refusal.value)


def test_all_of_it_is_json():
    for part in parts():
        assert json.loads(json.dumps(asdict(part), allow_nan=False))["section"] == part.section
    assert json.loads(json.dumps(overview(), allow_nan=False)) == overview()


def left_out(name, kind=""):
    (key,) = [key for key in find_part(name).keys if key.kind == kind]
    return key.left_out


@pytest.mark.parametrize(
    ("load", "option"), [(load_femnist, "min_records"), (load_lending_club, "grades")]
)
def test_defaults_of_loaders_are_what_is_said(load, option):
    default = inspect.signature(load).parameters[option].default
    said = left_out(f"data.{option}")
    assert said.partition(" for femnist, 1 for the others")[0] == str(default).lower()


def test_defaults_that_are_found_later_are_what_is_said():
    sgd = build(load_recipe("fedavg"))
    others = [
        build(load_recipe("fedavg", [f"server.optimizer={name}"])).server
        for name in ("adam", "yogi", "adagrad")
    ]
    for other in others:
        assert left_out("server.lr") == f"{sgd.server.lr} for 'sgd', {other.lr} for all others"
        assert left_out("server.floor") == str(other.floor)
    for key in ("beta1", "beta2"):
        assert {left_out(f"server.{key}")} == {str(getattr(other, key)) for other in others[:2]}
        assert left_out(f"client.{key}", "sgd") == str(getattr(Adam(), key))
    assert float(left_out("client.floor", "sgd")) == Adam().floor
    mlp = [build(load_recipe("fedavg", ["model.name=mlp", *more])) for more in ([], [HIDDEN])]
    assert mlp[0].task.size == mlp[1].task.size
    assert left_out("clip.floor", "poly") == "a thousandth of value"
    schedule = build(load_recipe("ldp-sgd")).plan.clip_schedule
    assert math.isclose(schedule.floor, schedule.value / 1000)
    quantile = build(load_recipe("central", ["clip.kind=quantile", "clip.value=1.0"])).plan
    assert left_out("clip.bit_noise", "quantile").startswith("a twentieth of the clients per round")
    assert math.isclose(quantile.clip_schedule.noise, quantile.expected_cohort / 20)


HIDDEN = f"model.hidden={left_out('model.hidden').partition(' for mlp')[0]}"


def test_a_table_of_tables_is_told_with_their_keys():
    first, *_ = find_part("data.columns").keys
    assert first.type == "one table for each name"
    assert [key.key for key in find_part("data.columns").keys] == [
        "data.columns",
        *(f"data.columns.NAME.{name}" for name in ColumnSection.model_fields),
    ]
