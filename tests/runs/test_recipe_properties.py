"""What holds for every recipe: it survives being written, and overrides do not depend on order."""

import itertools
import tomllib
import types
import typing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from fedveil.base.errors import BadInput
from fedveil.base.identity import identity
from fedveil.runs.build import build, resolve_recipe
from fedveil.runs.recipe import Recipe, load_recipe, shipped_recipes, to_toml

NAMES = [recipe["name"] for recipe in shipped_recipes()]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: texts,
    bool: st.booleans(),
}


def values(annotation):
    """Everything that a key of this type may be; None is a key that is left out."""
    if annotation in SCALARS:
        return SCALARS[annotation]
    if annotation is types.NoneType:
        return st.none()
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return sections(annotation)
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return st.sampled_from(inside)
    if origin is typing.Annotated:
        return values(inside[0])
    if origin is list:
        return st.lists(values(inside[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(values(inside[0]), values(inside[1]), max_size=2)
    assert origin in (typing.Union, types.UnionType), annotation
    return st.one_of([values(kind) for kind in inside])


def sections(model):
    """A table for a section: every key that must be there, and any of those that may."""
    return st.fixed_dictionaries(
        {key: values(field.annotation) for key, field in model.model_fields.items()}
    ).map(lambda made: {key: value for key, value in made.items() if value is not None})


def readable(made):
    """The document, in which `sites` contradicts no other key and texts of ranges are dates."""
    data = dict(made["data"])
    if "sites" in data:
        data = {key: value for key, value in data.items() if key not in ("clients", "client")}
    for column in data.get("columns", {}).values():
        for key in ("low", "high", "mean"):
            if isinstance(column.get(key), str):
                column[key] = "2026-01-31"
    return {**made, "data": data}


documents = st.fixed_dictionaries(
    {
        **{
            key: values(field.annotation)
            for key, field in Recipe.model_fields.items()
            if key not in ("rounds", "iterations")
        },
        "rounds": st.integers(-5, 10**6),
    }
).map(lambda made: {key: value for key, value in made.items() if value is not None})
documents = documents.map(readable)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes") / "recipe.toml"


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(document=documents)
def test_writing_and_reading_is_the_identity(file, document):
    first = Recipe.model_validate(tomllib.loads(to_toml(document)))
    assert first == Recipe.model_validate(document)
    text = to_toml(first.model_dump())
    file.write_text(text, encoding="utf-8")
    again = Recipe.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    assert again == first
    assert to_toml(again.model_dump()) == text


OVERRIDES = (
    *("seed=7", "rounds=3", "name=other", "data.clients=9", "data.partition=shards"),
    *("model.name=mlp", "model.hidden=[3]", "sample.kind=fixed", "sample.size=4"),
    *("client.kind=sgd", "client.steps=2", "client.lr=0.5", "clip.kind=poly", "clip.value=0.1"),
    *("clip.power=1.0", "noise.kind=laplace", "noise.multiplier=2.0", "budget.epsilon=3.0"),
    *("budget.delta=1e-6", "server.lr=0.2", "server.momentum=none", "engine.chunk=none"),
    *("evaluate.every=4", "colour=red", "data.colour=red", "rounds=none", "client.lr=fast"),
)


def outcome(name, overrides):
    try:
        return load_recipe(name, overrides)
    except BadInput:
        return "refused"


@given(
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(OVERRIDES), unique_by=lambda o: o.partition("=")[0], max_size=6),
    st.randoms(use_true_random=False),
)
def test_overrides_of_different_keys_commute(name, overrides, random):
    shuffled = list(overrides)
    random.shuffle(shuffled)
    assert outcome(name, overrides) == outcome(name, shuffled)
    assert outcome(name, [*overrides, *overrides]) == outcome(name, overrides)


def test_some_of_these_overrides_are_taken_and_some_refused():
    taken = [outcome("central", [o]) != "refused" for o in OVERRIDES]
    assert 10 < sum(taken) < len(OVERRIDES) - 5
    pairs = itertools.permutations(("client.kind=sgd", "client.lr=0.5", "client.steps=2"))
    assert len({str(load_recipe("central", pair)) for pair in pairs}) == 1


def numbers(training):
    """The noise, the first clips or ranges, and the budget lines of a training's plan."""
    plan = training.plan
    state = plan.first_state(training.start().params)
    clips = [plan.clip(state, r) for r in (1, 2)]
    lines = [line.to_dict() for line in plan.lines]
    return (
        *(identity(plan.release), state.tolist(), clips, lines),
        *(plan.permitted, plan.rounds, plan.population),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=1, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    rounds=st.integers(1, 5),
    lr=st.floats(1e-6, 1e3),
)
def test_a_resolved_recipe_builds_the_same_plan(file, name, seed, rounds, lr):
    wanted = [f"seed={seed}", f"rounds={rounds}", f"server.lr={lr!r}", "engine.mode=looped"]
    recipe = load_recipe(name, wanted)
    training = build(recipe)
    written = resolve_recipe(recipe, training)
    file.write_text(to_toml(written.model_dump()), encoding="utf-8")
    read = load_recipe(str(file))
    again = build(read)
    assert read == written
    assert resolve_recipe(read, again) == written
    assert numbers(again) == numbers(training)
    assert again.data.fingerprint == training.data.fingerprint
    assert again.start().params.equal(training.start().params)
