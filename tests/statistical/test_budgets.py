"""Whole runs: budgets hold, one by one and together, and secure claims pay for their sampler."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from fedveil.privacy.accounting.closed_forms import gaussian_epsilon

from .conftest import DROWNED, FALSE_ALARM, FEW, SOURCES


@pytest.mark.parametrize("source", SOURCES)
def test_clients_with_budgets_of_their_own_have_noise_of_their_own(watch, source):
    """One client at a time: how far a round moves the model tells which noise it has."""
    budgets = ("budget.epsilon=none", "budget.epsilons=[0.5, 5.0]", "budget.delta=1e-3")
    turns = ("data.clients=5", "rounds=10", "sample.kind=round-robin", "sample.size=1")
    seen = watch("ldp-sgd", *budgets, *turns, "server.lr=1.0", f"noise.source={source}")
    noises = {line["event"]["multiplier"]: line["members"] for line in seen.lines}
    found = np.sqrt((seen.steps**2).mean(axis=1)) / (seen.reach() * seen.clips())
    nearest = [min(noises, key=lambda m: abs(m - one)) for one in found]
    room = 1.01 * norm.isf(FALSE_ALARM / 2 / 10) / math.sqrt(2 * seen.steps.shape[1])
    assert np.abs(found / nearest - 1).max() <= room
    assert {m: nearest.count(m) // 2 for m in noises} == noises
    assert sorted(noises.values()) == [2, 3]


def test_a_secure_claim_pays_for_its_sampler(watch):
    """Of the same delta a part is the sampler's, so that epsilon is a little larger."""
    settings = (*FEW, "client.epochs=1", "sample.kind=all", *DROWNED, "budget.delta=1e-4")
    seeded, secure = (
        watch("central", *settings, f"noise.source={source}", out=source).result["claims"][0]
        for source in SOURCES
    )
    assert secure["epsilon"] > seeded["epsilon"]
    assert secure["epsilon"] == pytest.approx(seeded["epsilon"], rel=1e-5)
    assert secure["delta"] <= 1e-4 == seeded["delta"]


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_stops_before_its_budget_is_exceeded(watch, source):
    """The rounds that were charged fit, one more would not have."""
    few = ("data.clients=40", "client.epochs=1", "sample.kind=all", "rounds=30")
    budget = ("noise.multiplier=5.0", "budget.epsilon=2.0", "budget.delta=1e-3")
    seen = watch("central", *few, *budget, f"noise.source={source}")
    assert seen.result["stopped"] == "budget"
    rounds = len(seen.charges)
    assert rounds == len(seen.steps) < 30

    def spent(count):
        return gaussian_epsilon(math.sqrt(count) / 5.0, 1e-3)

    assert spent(rounds) <= 2.0 < spent(rounds + 1)
    assert seen.result["claims"][0]["epsilon"] == pytest.approx(spent(rounds), rel=1e-5)
