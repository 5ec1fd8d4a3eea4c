"""From a recipe to objects: what the data depend on, and what may be built once for many seeds."""

import numpy as np
import pytest
import torch

from fedveil.errors import BadInput
from fedveil.runs.build import build, data_of
from fedveil.runs.recipe import load_recipe

SMALL = ["data.clients=20", "rounds=2", "engine.workers=1"]


def recipe(*settings):
    return load_recipe("central", [*SMALL, *settings])


def test_the_runs_seed_divides_the_records_unless_the_data_have_their_own():
    first, second = (data_of(recipe(f"seed={seed}")) for seed in (1, 2))
    assert not np.array_equal(first.x, second.x)
    first, second = (data_of(recipe(f"seed={seed}", "data.seed=7")) for seed in (1, 2))
    assert np.array_equal(first.x, second.x)
    assert np.array_equal(first.x, data_of(recipe("seed=7")).x)


def test_records_may_be_drawn_with_replacement_and_clients_shortened():
    data = data_of(recipe("data.resample=5000", "data.most_records=30"))
    assert (data.clients, int(data.sizes.min()), int(data.sizes.max())) == (20, 30, 30)
    assert len(np.unique(data.x, axis=0)) < len(data.x)


@pytest.mark.parametrize("setting", ["data.resample=0", "data.most_records=0"])
def test_no_records_are_refused(setting):
    with pytest.raises(BadInput, match="at least one record"):
        data_of(recipe(setting))


def test_data_and_plan_may_be_given():
    """A plan does not depend on the seed; the model's first weights do where they are random."""
    whole = recipe("seed=3")
    data, plan = data_of(whole), build(recipe("seed=4")).plan
    given, built = build(whole, data=data, plan=plan), build(whole)
    assert given.data is data
    assert given.plan is plan
    assert torch.equal(given.start().params, built.start().params)
    assert given.plan.multiplier == built.plan.multiplier
