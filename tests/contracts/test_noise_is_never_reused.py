"""Every draw of noise is recorded: no two releases anywhere share one.

Two releases with the same noise tell their difference without any. Rounds, clients, local steps,
bits, histograms and runs are looked at together.
"""

import itertools
import os
import sys

import pytest

from fedveil.privacy import clip_statistic, sampling
from fedveil.privacy.noise import mechanisms, streams
from fedveil.privacy.noise import secure_random as entropy
from fedveil.privacy.releases import priv_unit
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.session import train

SMALL = ("rounds=3", "data.clients=20", "engine.workers=1")
NOISY = ("budget.epsilon=inf", "budget.delta=1e-4", "noise.multiplier=2.0")
TURNS = ("sample.size=10", "sample.max_participations=3")
RECIPES = {
    "central": ("central", "client.epochs=1", *NOISY),
    "central, quantile": (
        *("central", "client.epochs=1", *NOISY),
        *("clip.kind=quantile", "clip.value=0.5", "clip.bit_noise=5.0"),
    ),
    "central, shares": (
        *("central", "client.epochs=1", "sum.kind=secure", *NOISY),
        *("clip.kind=quantile", "clip.value=0.5", "clip.bit_noise=5.0"),
    ),
    "weak-dp": ("weak-dp", "client.epochs=1", "sample.size=10"),
    "dp-sgd in clients": ("dp-sgd", *NOISY, *TURNS),
    "ldp-sgd": ("ldp-sgd", *NOISY, *TURNS),
    "ldp-sgd, local bits": (
        *("ldp-sgd", *NOISY, *TURNS),
        *("clip.kind=quantile", "clip.value=0.5", "clip.bit_epsilon=0.5"),
    ),
    "ldp-sgd, curator's bits": (
        *("ldp-sgd", *NOISY, *TURNS),
        *("clip.kind=quantile", "clip.value=0.5", "clip.bit_noise=5.0"),
    ),
    "ldp-sgd, summed bits": (
        *("ldp-sgd", "sum.kind=secure", *NOISY, *TURNS),
        *("clip.kind=quantile", "clip.value=0.5", "clip.bit_noise=5.0"),
    ),
    "ldp-sgd, histograms": (
        *("ldp-sgd", *NOISY, *TURNS, "clip.kind=median", "clip.value=0.5", "clip.low=-4"),
        *("clip.high=2", "clip.every=1", "clip.epsilon=50.0", "clip.delta=1e-4"),
    ),
    "dp-fedavg": ("dp-fedavg", *NOISY, "sample.size=10"),
    "dp-fedavg-gaussian": ("dp-fedavg-gaussian", *NOISY, "sample.size=10"),
    "ldp-fl": ("ldp-fl", "client.epochs=1", "budget.delta=1e-4", "shuffle.minimum=18"),
    "priv-unit": ("priv-unit", "budget.delta=1e-4", *TURNS),
}
DRAWS = {
    "central": 3,
    "central, quantile": 6,
    "central, shares": 3 * 20 * 3,
    "weak-dp": 3,
    "dp-sgd in clients": 3 * 10 * 5,
    "ldp-sgd": 30,
    "ldp-sgd, local bits": 60,
    "ldp-sgd, curator's bits": 33,
    "ldp-sgd, summed bits": 60,
    "ldp-sgd, histograms": 33,
    "dp-fedavg": 30,
    "dp-fedavg-gaussian": 30,
    "ldp-fl": 60,
    "priv-unit": 60,
}
"""How many rows of noise, and clients' coins, three rounds have."""


@pytest.fixture
def drawn(monkeypatch):
    """The key of every row of noise, in the order in which they are drawn."""
    keys = []

    def recording(draw):
        def spy(*arguments):
            keys.extend(map(int, arguments[-1]))
            return draw(*arguments)

        return spy

    def recording_first(draw):
        def spy(coins, count):
            if sys._getframe(1).f_globals["__name__"] == sampling.__name__:
                keys.extend(map(int, coins))
            return draw(coins, count)

        return spy

    for module, name in itertools.product(
        (mechanisms, clip_statistic, priv_unit), ("normal_", "add_normals_", "laplace_", "uniform_")
    ):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, recording(getattr(module, name)))
    monkeypatch.setattr(streams, "bits", recording_first(streams.bits))
    return keys


def run(name, *more):
    recipe, *settings = RECIPES[name]
    for _ in train(build(load_recipe(recipe, (*SMALL, *settings, *more)))):
        pass


@pytest.mark.parametrize("mode", ["looped", "vectorised"])
@pytest.mark.parametrize("name", RECIPES)
def test_no_two_draws_of_a_run_share_a_key(drawn, name, mode):
    run(name, f"engine.mode={mode}")
    assert len(drawn) == DRAWS[name]
    assert len(set(drawn)) == len(drawn)


def test_no_two_draws_of_several_runs_share_a_key(drawn):
    """Runs of one seed that differ in one number, and runs that differ in nothing but the seed."""
    changes = (
        *(("seed=1",), ("seed=2",), ("noise.multiplier=3.0",), ("clip.value=0.7",)),
        *(("rounds=4",), ("server.lr=0.5",), ("client.lr=0.9",), ("data.partition=shards",)),
    )
    for change in changes:
        run("central", "engine.mode=vectorised", *change)
    assert len(drawn) == 3 * len(changes) + 1
    assert len(set(drawn)) == len(drawn)


def test_a_run_that_is_the_same_in_everything_is_a_replay(drawn):
    run("ldp-sgd", "engine.mode=vectorised")
    run("ldp-sgd", "engine.mode=looped", "evaluate.every=2")
    assert drawn[:30] == drawn[30:]


def test_secure_noise_never_uses_a_key_twice(monkeypatch):
    """Keys and nonces come from the operating system, one for every piece that is drawn."""
    taken, urandom = [], os.urandom

    def spy(count):
        taken.append(urandom(count))
        return taken[-1]

    monkeypatch.setattr(entropy.os, "urandom", spy)
    run("central", "noise.source=secure", "budget.epsilon=20.0")
    assert len(taken) > 3
    assert len(set(taken)) == len(taken)
