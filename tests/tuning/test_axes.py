"""Axes, and the recipes that a grid of them is."""

import math

import pytest

from fedveil.base.errors import BadInput
from fedveil.tuning.recipe_grid import Axis, axis, cells, load_cell_recipe


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rounds=3", Axis("rounds", ("3",))),
        (" client.lr = 0.1 , 0.2 ", Axis("client.lr", ("0.1", "0.2"))),
        ("model.hidden=[5,6],[7]", Axis("model.hidden", ("[5,6]", "[7]"))),
        ("client.steps : rounds=1:2,3:4", Axis("client.steps:rounds", ("1:2", "3:4"))),
        ("data.path=a=b", Axis("data.path", ("a=b",))),
    ],
)
def test_reading_an_axis(text, expected):
    assert axis(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write it as section.key=value"),
        ("x", "write it as section.key=value"),
        ("=1", "write it as section.key=value"),
        ("a:=1:2", "write it as section.key=value"),
        ("client.steps=", "'client.steps=' lacks a value"),
        ("client.steps=1,,2", "lacks a value"),
        ("client.steps=1,", "lacks a value"),
        ("client.steps=1,2,1", "has 1 twice"),
    ],
)
def test_an_axis_that_is_none(text, message):
    with pytest.raises(BadInput, match=message):
        axis(text)


def test_every_combination_the_last_axis_fastest():
    found = cells("dp-fedavg", ["seed=7"], [axis("client.steps=1,2"), axis("rounds=3,4,5")])
    assert [(c.recipe.client.steps, c.recipe.rounds) for c in found] == [
        (1, 3), (1, 4), (1, 5), (2, 3), (2, 4), (2, 5),
    ]  # fmt: skip
    assert {c.recipe.seed for c in found} == {7}
    assert found[4].choice == {"client.steps": "2", "rounds": "4"}
    assert found[4].name == "client.steps=2, rounds=4"


def test_joint_axes_move_together():
    found = cells("dp-fedavg", [], [axis("client.steps:rounds=1:12,3:4"), axis("seed=1,2")])
    assert [(c.recipe.client.steps, c.recipe.rounds, c.recipe.seed) for c in found] == [
        (1, 12, 1), (1, 12, 2), (3, 4, 1), (3, 4, 2),
    ]  # fmt: skip


def test_one_key_may_have_a_value_with_a_colon():
    assert Axis("data.path", ("a:b",)).assign("a:b") == {"data.path": "a:b"}


def test_a_grid_without_axes_is_the_recipe():
    (cell,) = cells("dp-fedavg", ["rounds=4"], [])
    assert (cell.choice, cell.name, cell.recipe.rounds) == ({}, "recipe", 4)


def test_an_axis_wins_over_a_setting():
    (cell,) = cells("dp-fedavg", ["rounds=4"], [axis("rounds=5")])
    assert cell.recipe.rounds == 5


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["rounds=1", "rounds=2"], "--grid rounds is given twice"),
        (["client.steps:rounds=1:2", "rounds=2"], "--grid rounds is given twice"),
        (["client.steps:rounds=1:2,3"], "3 is 1 of the 2 values that go together"),
        (["client.steps:rounds=1:2:3"], "is 3 of the 2 values"),
        (["client.steps=1", "client.colour=1"], "cell client.steps=1, client.colour=1: .*unknown"),
        (["rounds=x"], "cell rounds=x"),
        ([f"rounds={','.join(map(str, range(1, 401)))}", f"seed={','.join(map(str, range(300)))}"],
         "120,000 cells"),
    ],
)  # fmt: skip
def test_a_grid_that_is_none(axes, message):
    with pytest.raises(BadInput, match=message):
        cells("dp-fedavg", [], [axis(text) for text in axes])


def test_iterations_that_local_steps_do_not_divide():
    with pytest.raises(BadInput, match=r"cell client.steps=3: iterations is 10, not a multiple"):
        cells("dp-fedavg", ["rounds=none", "iterations=10"], [axis("client.steps=1,2,3")])


def test_an_infinite_epsilon_is_neither_noise_nor_claim():
    recipe = load_cell_recipe("dp-fedavg", ["budget.epsilon=inf"])
    assert (recipe.noise.kind, recipe.budget) == ("none", None)
    assert recipe.clip.value == 3.0


def test_any_other_epsilon_stays():
    recipe = load_cell_recipe("dp-fedavg", ["budget.epsilon=5"])
    assert recipe.noise.kind == "laplace"
    assert recipe.budget.epsilon == 5


def test_minus_infinity_is_no_epsilon():
    with pytest.raises(BadInput, match=r"budget\.epsilon is -inf: a positive number is needed"):
        load_cell_recipe("dp-fedavg", ["budget.epsilon=-inf"])


def test_an_infinite_epsilon_beside_noise_that_is_given_stays():
    recipe = load_cell_recipe("dp-fedavg", ["budget.epsilon=inf", "noise.multiplier=2.0"])
    assert (recipe.noise.multiplier, recipe.budget.epsilon) == (2.0, math.inf)
