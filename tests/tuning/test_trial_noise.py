"""No two trainings on the same records share a draw of noise: what is released twice cancels."""

from collections import Counter

import numpy as np
import pytest
import torch

from fedveil.privacy.noise.streams import Streams
from fedveil.runs.build import build
from fedveil.training.session import train
from fedveil.tuning.recipe_grid import Space, axis, cells
from fedveil.tuning.search import plan_by_training
from fedveil.tuning.sweep import Sweep
from fedveil.tuning.trials import Laboratory, recipe_of_repetition

NOISE = {"noise", "client-noise", "step-noise", "client-bits", "bits", "norms"}
FEW = ("data.clients=12", "rounds=2", "engine.mode=vectorised")
GIVEN = ("noise.multiplier=2.0", "budget.epsilon=inf")
KINDS = {
    "server": ("central", [*FEW, *GIVEN, "client.epochs=1"]),
    "server, in step": ("central", [*FEW, *GIVEN, "client.epochs=1", "data.seed=1"]),
    "clients": ("dp-fedavg", [*FEW, "sample.size=4", "client.steps=2"]),
    "clients, in step": ("dp-fedavg", [*FEW, "sample.size=4", "client.steps=2", "data.seed=1"]),
    "steps, in step": ("dp-sgd", [*FEW, "sample.size=4", "data.seed=1", "client.steps=2"]),
    "two-point": ("ldp-fl", [*FEW, "shuffle=none"]),
    "quantile": (
        "central",
        [
            *FEW,
            *GIVEN,
            "client.epochs=1",
            "clip.kind=quantile",
            "clip.value=1.0",
            "clip.bit_noise=20.0",
        ],
    ),
    "dealt": (
        "dp-fedavg",
        [*FEW, "sample.size=4", "budget.epsilon=none", "budget.epsilons=[5.0, 50.0]"],
    ),
}
FAST = ("server, in step", "clients", "quantile")
SMALL = ("data.clients=20", "sample.size=5", "engine.mode=vectorised")


@pytest.fixture
def drawn(monkeypatch):
    """The keys of every draw of noise, and how often each was drawn."""
    found, keys = Counter(), Streams.keys

    def kept(self, purpose, round, clients, *parts):
        made = keys(self, purpose, round, clients, *parts)
        if purpose in NOISE:
            found.update(made.tolist())
        return made

    monkeypatch.setattr(Streams, "keys", kept)
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in FAST else pytest.mark.slow) for k in KINDS]
)
def test_cells_and_repetitions_draw_their_own(kind, drawn):
    """In step and alone; no cell is another's repetition."""
    recipe, settings = KINDS[kind]
    grid = cells(recipe, settings, [axis("client.lr=0.1,0.2"), axis("server.lr=0.5,1")])
    laboratory = Laboratory(workers=1)
    prepared = [laboratory.prepare(cell) for cell in grid]
    drawn.clear()
    for one in prepared:
        for block in one.blocks(0, 3):
            laboratory.trial(one, block)
    assert all((one.together >= 3) == ("in step" in kind) for one in prepared)
    assert len(drawn) >= len(prepared) * 3 * 2
    assert set(drawn.values()) == {1}


def test_a_plan_and_the_run_that_follows_it_draw_their_own(drawn):
    space = Space((1, 2), (2, 4))
    laboratory = Laboratory(workers=1)
    report = plan_by_training("dp-fedavg", SMALL, space, laboratory, repeat=3)
    assert set(drawn.values()) == {1}
    trials = set(drawn)
    drawn.clear()
    (recipe,) = (cell.recipe for cell in cells("dp-fedavg", SMALL, []))
    chosen = recipe_of_repetition(recipe, 3)
    assert f"seed = {chosen.seed}" in report.recipe_toml
    for _ in train(build(chosen)):
        pass
    assert len(trials) > 100
    assert drawn
    assert not trials & set(drawn)


def test_a_sweep_draws_its_own_in_every_trial(drawn, tmp_path):
    axes = [axis("budget.epsilon=5,50"), axis("client.steps=1,2")]
    settings = [*SMALL, "rounds=2"]
    Sweep.in_folder(tmp_path, "dp-fedavg", settings, axes, 2, Laboratory(workers=1)).run()
    assert len(drawn) == 4 * 2 * 2 * 5
    assert set(drawn.values()) == {1}


def test_the_difference_of_two_released_models_has_noise():
    """Two learning rates so small that nothing is learnt: what differs is noise alone.

    With one seed for both the difference was below 1e-6; independent, each of its 650 coordinates
    has noise of sqrt(2) sigma, and their length is within 20 % of its mean but for 1e-11.
    """
    settings = ["rounds=1", "sample.kind=all", "client.lr=1e-12", "client.epochs=1"]
    grid = cells("central", [*settings, "engine.mode=looped"], [axis("client.batch=0,8")])
    laboratory = Laboratory(workers=1)
    prepared = [laboratory.prepare(cell) for cell in grid]
    models = []
    for one in prepared:
        training = laboratory._training(one, 0)
        models.append([result.state.params.clone() for result in train(training)][-1])
    difference = float(torch.dist(*models))
    expected = np.sqrt(2) * prepared[0].noise_std * np.sqrt(len(models[0]))
    assert 0.8 < difference / expected < 1.2


def test_what_repetitions_have_in_common_stays_common():
    """The same repetition of two cells has the same clients and the same first model."""
    grid = cells("central", ["data.clients=10", "model.name=mlp"], [axis("client.lr=0.1,0.2")])
    laboratory = Laboratory()
    one, other = (laboratory._training(laboratory.prepare(cell), 2) for cell in grid)
    assert one.data.fingerprint == other.data.fingerprint
    assert torch.equal(one.start().params, other.start().params)
    assert one.seed == other.seed
    assert one.streams != other.streams
