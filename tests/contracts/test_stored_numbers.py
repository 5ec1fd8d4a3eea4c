"""Seeded trainings come to the numbers they came to before: models to 1e-5, claims exactly.

`stored_numbers.json` was written by `python -m tests.contracts.test_stored_numbers` before the
code was rearranged. Streams are given here, since a training's own depend on how its parts are
called. Write it again only where a number is known to have been wrong.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training import session as home
from fedveil.training.session import train

STORED = Path(__file__).with_name("stored_numbers.json")
SMALL = ("data.clients=40", "rounds=3", "engine.workers=1")
CURATOR = ("noise.multiplier=4.0", "budget.epsilon=inf")
CASES = {
    "fedavg": ("fedavg", "sample.size=20"),
    "fedsgd": ("fedsgd", "sample.size=20"),
    "norm-bound": ("norm-bound", "sample.size=20"),
    "weak-dp": ("weak-dp", "sample.size=20"),
    "central": ("central",),
    "central, quantile": (
        "central",
        "clip.kind=quantile",
        "clip.value=0.8",
        "clip.bit_noise=30.0",
        "noise.multiplier=3.0",
    ),
    "central, decaying": ("central", "clip.kind=poly", "clip.value=1.0", "clip.power=1.0"),
    "central, fixed cohorts": ("central", "sample.kind=fixed", "sample.size=9"),
    "central, a hidden layer": ("central", "model.name=mlp", "model.hidden=[8]"),
    "dp-sgd": ("dp-sgd", "sample.size=5", "sample.max_participations=3"),
    "dp-sgd, nominal": ("dp-sgd", "sample.size=5", "client.nominal=40", "server.weights=uniform"),
    "ldp-sgd": ("ldp-sgd", "sample.size=10"),
    "ldp-sgd, several budgets": (
        "ldp-sgd",
        "sample.size=10",
        "budget.epsilon=inf",
        "budget.epsilons=[9.0,30.0]",
    ),
    "ldp-sgd, quantile": (
        "ldp-sgd",
        "sample.size=10",
        "clip.kind=quantile",
        "clip.value=0.05",
        "clip.bit_noise=2.0",
        *CURATOR,
    ),
    "ldp-sgd, flipped bits": (
        "ldp-sgd",
        "sample.size=10",
        "clip.kind=quantile",
        "clip.value=0.05",
        "clip.bit_epsilon=1.0",
        *CURATOR,
    ),
    "ldp-sgd, median": (
        "ldp-sgd",
        "sample.size=10",
        "clip.kind=median",
        "clip.value=0.05",
        "clip.low=-6",
        "clip.high=3",
        "clip.every=2",
        "clip.epsilon=5.0",
        "clip.delta=1e-5",
        *CURATOR,
    ),
    "dp-fedavg": ("dp-fedavg", "sample.size=10"),
    "dp-fedavg, as published": ("dp-fedavg", "sample.size=10", "budget.as_published=true"),
    "dp-fedavg-gaussian": ("dp-fedavg-gaussian", "sample.size=10"),
    "dp-fedavg-gaussian, as published": (
        "dp-fedavg-gaussian",
        "sample.size=10",
        "budget.as_published=true",
        "noise.c2=1.5",
    ),
    "ldp-fl": ("ldp-fl", "shuffle.minimum=40"),
    "ldp-fl, weights": (
        "ldp-fl",
        "shuffle=none",
        "model.name=mlp",
        "model.hidden=[8]",
        "clip.perturb=weights",
        "clip.adaptive=true",
        "clip.radius=none",
        "clip.growth=1.5",
    ),
}
MODES = ("looped", "vectorised")


def numbers(name, mode, monkeypatch):
    """What a small training comes to: its model in a few numbers, its claims, its last clip."""
    recipe, *overrides = CASES[name]
    monkeypatch.setattr(home, "seed_of", lambda seed, *parts: seed)
    training = build(load_recipe(recipe, [*SMALL, *overrides, f"engine.mode={mode}"]))
    results = list(train(training))
    params = results[-1].state.params.double().numpy()
    waves = np.cos(np.arange(4)[:, None] * np.arange(len(params)) * 0.7)
    claims = training.plan.claims(len(results))
    return {
        "rounds": len(results),
        "model": [float(np.linalg.norm(params)), *(waves @ params).tolist()],
        "moving": results[-1].state.adaptive_state.tolist(),
        "clipped": [result.clipped for result in results],
        "refused": sum(len(result.refused) for result in results),
        "claims": [[c.epsilon, c.delta, str(c.accountant), str(c.trust)] for c in claims],
    }


@pytest.mark.parametrize("mode", [pytest.param("looped", marks=pytest.mark.slow), "vectorised"])
@pytest.mark.parametrize("name", CASES)
def test_seeded_trainings_come_to_the_same_numbers(name, mode, monkeypatch):
    now, before = numbers(name, mode, monkeypatch), json.loads(STORED.read_text())[name][mode]
    for part in ("model", "moving"):
        assert now.pop(part) == pytest.approx(before.pop(part), rel=1e-5, abs=1e-5)
    epsilons = [[claim.pop(0) for claim in each["claims"]] for each in (now, before)]
    assert epsilons[0] == pytest.approx(epsilons[1], rel=1e-9)  # an FFT's last digits are a CPU's
    assert now == before


def _write():
    with pytest.MonkeyPatch.context() as patch:
        found = {name: {mode: numbers(name, mode, patch) for mode in MODES} for name in CASES}
    STORED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    _write()
