"""No two draws of a run share their randomness: not two rounds, clients, steps or purposes.

Keys are 64 or 128 bits, so that two that are equal are one draw made twice, and not context.
"""

from collections import Counter

import numpy as np
import pytest

from fedveil.privacy.noise.streams import SecureKeys, Streams

SMALL = ("data.clients=12", "rounds=4")
LOUD = ("noise.multiplier=5.0", "budget.epsilon=inf")
BITS = ("sample.kind=all", "clip.kind=quantile", "clip.value=0.1")
MEDIAN = ("clip.kind=median", "clip.value=0.1", "clip.low=-10", "clip.high=4", "clip.every=1")
RUNS = {
    "central": ("central", ("client.epochs=2", "client.batch=8", *LOUD)),
    "central, quantile": ("central", ("client.epochs=1", *BITS, "clip.bit_noise=9.0", *LOUD)),
    "central, fixed size": (
        "central",
        ("client.epochs=1", "sample.kind=fixed", "sample.size=4", *LOUD),
    ),
    "ldp-sgd": ("ldp-sgd", ("sample.size=6", "sample.max_participations=none", *LOUD)),
    "ldp-sgd, bits": ("ldp-sgd", (*BITS, "clip.bit_epsilon=0.5", *LOUD)),
    "ldp-sgd, curator": ("ldp-sgd", (*BITS, "clip.bit_noise=9.0", *LOUD)),
    "ldp-sgd, median": (
        "ldp-sgd",
        ("sample.kind=all", *MEDIAN, "clip.epsilon=20.0", "clip.delta=1e-4", *LOUD),
    ),
    "dp-fedavg": ("dp-fedavg", ("sample.size=6", "client.batch=4", *LOUD)),
    "ldp-fl": ("ldp-fl", ("client.epochs=2", "client.batch=8", "shuffle=none")),
    "local": ("dp-sgd", ("sample.size=6", "sample.max_participations=none", *LOUD)),
}
MODES = ("looped", "vectorised")
COSTLY = {  # and drawn like others; in `make test-all`
    *(("central, fixed size", mode) for mode in MODES),
    *((kind, "looped") for kind in ("ldp-sgd, curator", "ldp-sgd, median", "dp-fedavg", "ldp-fl")),
}


@pytest.fixture
def drawn(monkeypatch):
    """Every key that is asked for, with what it was asked for."""
    asked = Counter()
    keys, generator = Streams.keys, Streams.generator

    def noted_keys(self, purpose, round, clients, *parts):
        found = keys(self, purpose, round, clients, *parts)
        if not isinstance(found, SecureKeys):
            asked.update(int(key) for key in found)
        return found

    def noted_generator(self, purpose, *parts):
        asked.update([self.derive_key(purpose, *parts)])
        return generator(self, purpose, *parts)

    monkeypatch.setattr(Streams, "keys", noted_keys)
    monkeypatch.setattr(Streams, "generator", noted_generator)
    return asked


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param(kind, mode, marks=pytest.mark.slow if (kind, mode) in COSTLY else [])
        for kind in RUNS
        for mode in MODES
    ],
)
def test_nothing_is_drawn_twice(watch, drawn, kind, mode):
    name, settings = RUNS[kind]
    watch(name, *SMALL, *settings, f"engine.mode={mode}", "data.seed=1", start=drawn.clear)
    assert len(drawn) > 4
    twice = [key for key, count in drawn.items() if count > 1]
    assert twice == []


@pytest.mark.parametrize("kind", ["central", "ldp-sgd, bits", "local"])
def test_runs_of_two_seeds_have_no_draw_in_common(watch, drawn, kind):
    name, settings = RUNS[kind]
    seen = []
    for seed in (1, 2):
        watch(name, *SMALL, *settings, f"seed={seed}", out=str(seed), start=drawn.clear)
        seen.append(set(drawn))
    assert not seen[0] & seen[1]


def test_keys_of_clients_are_different():
    """Of many clients, and of rounds and purposes whose names run into each other."""
    clients = np.arange(100_000)
    keys = Streams(1).keys("noise", 1, clients)
    assert len(np.unique(keys)) == len(clients)
    few = np.arange(100)
    others = [
        Streams(1).keys("noise", 11, few),
        Streams(11).keys("noise", 1, few),
        Streams(1).keys("noise", 1, few, 1),
        Streams(1).keys("noise1", 1, few),
        Streams(1).keys("noise", 1, few, 0),
    ]
    every = np.concatenate([keys, *others])
    assert len(np.unique(every)) == len(every)
