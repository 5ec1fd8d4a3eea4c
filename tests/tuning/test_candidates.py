"""What a planner chooses from."""

import pytest

from fedveil.base.errors import BadInput
from fedveil.runs.recipe import load_recipe
from fedveil.tuning.recipe_grid import Space, candidates, load_cell_recipe, shared_settings


def test_pairs_are_e_and_rounds_each_once():
    space = Space(steps_per_round=(1, 4), steps_in_all=(4, 10))
    assert space.pairs == [(1, 4), (1, 10), (4, 1), (4, 2)]
    assert Space(steps_per_round=(4,), steps_in_all=(3, 4, 5)).pairs == [(4, 1)]


@pytest.mark.parametrize(
    ("steps", "iterations", "message"),
    [
        ((), (1,), "--grid steps is empty"),
        ((1,), (), "--grid iterations is empty"),
        ((0, 1), (4,), "--grid steps is 0"),
        ((1,), (4, -3), "--grid iterations is -3"),
        ((500,), (10,), "--grid steps has E = 500, more than the largest T of iterations, 10"),
    ],
)
def test_a_space_that_is_none(steps, iterations, message):
    with pytest.raises(BadInput, match=message):
        Space(steps, iterations)


def test_candidates_are_whole_recipes():
    space = Space((1, 2), (4,), clips=(1.0, 0.123456789), rates=(0.05,))
    found = [cell.recipe for cell in candidates("dp-fedavg", ["seed=3"], space)]
    assert [(r.client.steps, r.rounds, r.clip.value) for r in found] == [
        (1, 4, 1.0), (1, 4, 0.123456789), (2, 2, 1.0), (2, 2, 0.123456789),
    ]  # fmt: skip
    assert {(r.client.lr, r.seed) for r in found} == {(0.05, 3)}


def test_a_recipe_in_iterations_can_be_planned():
    settings = ["rounds=none", "iterations=40"]
    (cell,) = candidates("dp-fedavg", settings, Space((2,), (6,)))
    assert (cell.recipe.client.steps, cell.recipe.rounds) == (2, 3)


def test_epochs_are_planned_where_a_recipe_counts_them():
    (cell,) = candidates("central", [], Space((5,), (10,)))
    assert (cell.recipe.client.epochs, cell.recipe.client.steps, cell.recipe.rounds) == (5, None, 2)


def test_one_gradient_has_no_steps_to_plan():
    with pytest.raises(BadInput, match="takes one step"):
        candidates("ldp-sgd", [], Space())


def test_another_recipe_gets_data_model_and_budget():
    settings = [
        "seed=9",
        "data.clients=40",
        "sample.size=4",
        "budget.epsilon=7",
        "budget.delta=1e-4",
    ]
    base = load_cell_recipe("dp-fedavg", settings)
    other = load_cell_recipe(
        "dp-fedavg-gaussian", shared_settings(base, load_recipe("dp-fedavg-gaussian"))
    )
    assert (other.data, other.model, other.budget) == (base.data, base.model, base.budget)
    assert other.sample == base.sample
    assert (other.seed, other.rounds, other.name) == (9, 10, "dp-fedavg-gaussian")
    assert other.noise.kind == "gaussian"


def test_another_recipe_gets_several_budgets():
    base = load_cell_recipe("dp-fedavg", ["budget.epsilon=none", "budget.epsilons=[1.0, 5.0]"])
    other = load_cell_recipe(
        "dp-fedavg-gaussian", shared_settings(base, load_recipe("dp-fedavg-gaussian"))
    )
    assert other.budget == base.budget


def test_nothing_is_alike_without_a_budget():
    with pytest.raises(BadInput, match="compares recipes at one budget"):
        shared_settings(load_recipe("fedavg"), load_recipe("fedavg"))


def test_cohorts_that_are_drawn_in_another_way_stay():
    central = load_recipe("central")
    assert (
        load_cell_recipe("central", shared_settings(load_recipe("dp-fedavg"), central)).sample
        == central.sample
    )
