"""Whole runs, from a recipe to what is released: the noise that is added and the steps that are
taken are those that the ledger was charged for.

Updates are drowned in noise, so that what a round moves the model by is the noise. The multiplier,
the relation, the rate and the number of steps are read from the ledger; clips and cohorts from the
metrics. Statistical tests have a false-alarm rate of 1e-6 each.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2, norm

from .conftest import DROWNED, FALSE_ALARM, FEW, SOURCES

SMALL = ("data.clients=40", "client.epochs=1")

ADAPTIVE = ("clip.kind=quantile", "clip.value=0.1", "clip.bit_noise=100.0")
COHORT = ("sample.kind=fixed", "sample.size=10")
SERVER = {  # settings, clients that a round is divided by, rounds
    "poisson": (("sample.rate=0.2",), 8, 15),
    "everyone, always": (("sample.rate=1.0",), 40, 15),
    "fixed size": (COHORT, 10, 6),
    "all": (("sample.kind=all",), 40, 15),
    "turns": (("sample.kind=round-robin", "sample.size=15"), 15, 15),
    "decay": (("clip.kind=poly", "clip.value=1.0", "clip.power=1.0"), 20, 15),
    "quantile": (ADAPTIVE, 20, 15),
    "quantile, fixed size": ((*ADAPTIVE, *COHORT), 10, 6),
}
SECURE_NOISE = ("poisson", "fixed size", "decay", "quantile")
COSTLY = (  # and covered by others; in `make test-all`
    ("quantile, fixed size", "seeded"),
    ("fixed size", "secure"),
    ("decay", "secure"),
    ("fu, Gaussian", "secure"),
    ("shuffle.minimum=36", "secure"),
    (30, "looped"),
)


def quickly(pairs):
    """The costly ones of `pairs` of arguments marked as slow."""
    return [pytest.param(*p, marks=pytest.mark.slow if p in COSTLY else []) for p in pairs]


def assert_standard(values, signal=2e-3):
    """Refuse that `values` are independent standard normals; `signal`: what else may be in them."""
    total, count = float((values**2).sum()), values.size
    low, high = chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], count)
    assert low <= total <= high * (1 + signal), math.sqrt(total / count)


def assert_unrelated(rows):
    """Refuse rows [R, P], P large, any two of which are correlated; and halves of a row."""
    halves = rows[:, : rows.shape[1] // 2 * 2].reshape(2 * len(rows), -1)
    for pieces in (rows, halves):
        unit = pieces / np.linalg.norm(pieces, axis=1, keepdims=True)
        pairs = np.triu_indices(len(unit), 1)
        found = np.abs((unit @ unit.T)[pairs]).max() * math.sqrt(unit.shape[1])
        assert found <= norm.isf(FALSE_ALARM / 4 / len(pairs[0]))


# --- noise at the server ---


def of_updates(seen, bit_noise=None):
    """The multiplier of the updates: all that was charged, or what the bits left of it."""
    z = seen.multiplier()
    if bit_noise is None:
        return z
    return (z**-2 - (bit_noise * 2 / seen.reach()) ** -2) ** -0.5


@pytest.mark.parametrize(
    ("kind", "source"),
    quickly([*((kind, "seeded") for kind in SERVER), *((kind, "secure") for kind in SECURE_NOISE)]),
)
def test_the_servers_noise_is_what_was_charged(watch, kind, source):
    settings, size, rounds = SERVER[kind]
    more = (f"rounds={rounds}", f"noise.source={source}")
    seen = watch("central", *SMALL, *DROWNED, *settings, *more)
    multiplier = of_updates(seen, 100.0 if "quantile" in kind else None)
    std = multiplier * seen.reach() * seen.clips() / size
    noise = seen.steps / std[:, None]
    assert_standard(noise)
    assert_unrelated(noise)
    if kind == "decay":
        assert np.allclose(seen.clips(), 1 - np.arange(rounds) / rounds)


def test_the_noise_on_the_bits_is_what_was_charged(watch):
    """Bits move the share by at most a half, their noise by many times that."""
    lr = 0.02
    seen = watch("central", *SMALL, *DROWNED, *ADAPTIVE, "rounds=80", f"clip.lr={lr}")
    moves = np.diff(np.log(seen.clips())) / lr * 20 / 100.0
    spread = float(((moves - moves.mean()) ** 2).sum())
    low, high = chi2.ppf([FALSE_ALARM / 4, 1 - FALSE_ALARM / 4], len(moves) - 1)
    assert low <= spread <= high * 1.05
    assert abs(moves.mean()) * math.sqrt(len(moves)) <= norm.isf(FALSE_ALARM / 4) + 1


# --- noise at the clients ---


FU = ("client.steps=2", "data.statistics=public")
CLIENTS = {
    "ldp-sgd": ("ldp-sgd", ("sample.size=20", "sample.max_participations=none", "server.lr=1.0")),
    "fu, Gaussian": ("dp-fedavg-gaussian", (*FU, "sample.size=20")),
    "fu, Laplace": ("dp-fedavg", (*FU, "sample.size=20")),
}


@pytest.mark.parametrize(("kind", "source"), quickly(itertools.product(CLIENTS, SOURCES)))
def test_the_clients_noise_is_what_was_charged(watch, kind, source):
    """The mean of K reports has the noise of one over the root of K."""
    name, settings = CLIENTS[kind]
    rounds = 15 if name == "ldp-sgd" else 50 if source == "seeded" else 25
    more = ("data.clients=40", f"rounds={rounds}", f"noise.source={source}")
    seen = watch(name, *DROWNED, *settings, *more)
    clips = seen.clips() * (1.0 if name == "ldp-sgd" else 2 * 0.02)
    one = seen.multiplier() * seen.reach() * clips * (math.sqrt(2) if "Lap" in kind else 1.0)
    noise = seen.steps / (one / math.sqrt(20))[:, None]
    assert_standard(noise, signal=0.01)
    if name == "ldp-sgd":
        assert_unrelated(noise)
        assert np.allclose(seen.clips(), 0.05 * (1 - np.arange(15) / 15))


SHUFFLES = ("shuffle.minimum=36", "shuffle=none")


@pytest.mark.parametrize(
    ("shuffle", "source"),
    quickly(itertools.product(SHUFFLES, SOURCES)),
)
def test_two_point_reports_are_what_was_charged(watch, source, shuffle):
    """A report lies at r kappa on either side; kappa follows from the charged epsilon."""
    settings = (*FEW, "client.epochs=1", "noise.epsilon=0.01", shuffle, f"noise.source={source}")
    seen = watch("ldp-fl", *settings)
    (event,) = {str(e): e for e in seen.charges}.values()
    epsilon = event["event"]["epsilon"] if event["kind"] == "shuffled" else event["epsilon"]
    assert epsilon == 0.01
    assert seen.lines[0]["per"] == seen.steps.shape[1]
    noise = seen.steps / (0.15 / math.tanh(epsilon / 2) / math.sqrt(40))
    assert_standard(noise)
    assert_unrelated(noise)


# --- noise in the clients' steps ---


@pytest.mark.parametrize(
    ("nominal", "mode"), quickly(itertools.product([None, 30], ["looped", "vectorised"]))
)
def test_dp_sgd_takes_the_steps_and_the_noise_that_were_charged(watch, nominal, mode):
    """A client's update is the sum of its steps' noise, each over rate x n."""
    few = ("data.clients=20", "rounds=8", "sample.size=10", "sample.max_participations=none")
    local = ("client.rate=0.2", "client.steps=3", "clip.value=2.0", f"engine.mode={mode}")
    size = () if nominal is None else (f"client.nominal={nominal}", "server.weights=uniform")
    seen = watch("dp-sgd", *few, *DROWNED, *local, *size)
    (event,) = {str(e): e for e in seen.charges}.values()
    assert event["rate"] == 0.2
    assert seen.lines[0]["per"] == 3
    assert seen.lines[0]["relation"] == ("zero-out" if nominal is None else "add-remove")
    n = float(seen.sizes.mean()) if nominal is None else nominal
    assert seen.sizes.max() - seen.sizes.min() <= 1
    one = seen.multiplier() * 2.0 * math.sqrt(seen.lines[0]["per"]) / (event["rate"] * n)
    noise = seen.steps / (one / math.sqrt(10))
    assert_standard(noise, signal=0.01)
    assert_unrelated(noise)


# --- what moves from round to round ---


@pytest.mark.parametrize("perturb", ["weights", "update"])
def test_ranges_are_those_of_the_models_released_before(follow, perturb):
    """Layer by layer: of the last model, or of the step that led to it."""
    settings = (*FEW, "clip.adaptive=true", f"clip.perturb={perturb}", "clip.growth=1e9")
    seen = follow("ldp-fl", *settings, "clip.radius=0.5", "client.epochs=1", "shuffle=none")
    before = seen.training.start().params
    for result in seen.results:
        after = result.state.params
        shown = (after if perturb == "weights" else after - before).double()
        layers = torch.split(shown, list(seen.training.task.layer_sizes))
        centres = [float(a.max() + a.min()) / 2 if perturb == "weights" else 0.0 for a in layers]
        radii = [float(a.max() - a.min()) / 2 for a in layers]
        assert result.state.adaptive_state.tolist() == pytest.approx([*centres, *radii], rel=1e-5)
        before = after
