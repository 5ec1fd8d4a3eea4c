"""Whole runs in both modes: the same model, the same clips, the same shares, up to rounding."""

import numpy as np
import pytest

SMALL = ("data.clients=12", "rounds=4")
HUSHED = ("noise.multiplier=0.05", "budget.epsilon=inf", "budget.delta=1e-4", "sample.kind=all")
UNEVEN = ("data.partition=dirichlet", "data.alpha=0.5")
SPAN = ("data.most_records=9",)
ADAPTIVE = ("clip.kind=quantile", "clip.value=0.05", "clip.bit_noise=0.1")
PULLED = ("client.proximal=0.5",)
ADAM = ("client.optimizer=adam", "client.floor=0.001", "client.weight_decay=0.1")
COASTING = ("client.momentum=0.5", "client.weight_decay=0.1")

RUNS = {
    "ragged batches": ("fedavg", (*UNEVEN, "client.epochs=2", "client.batch=16", "sample.size=6")),
    "ragged batches in the span": (
        "fedavg",
        (*UNEVEN, *SPAN, "client.epochs=3", "client.batch=4", "sample.size=6"),
    ),
    "momentum and decay": (
        "fedavg",
        (
            *UNEVEN,
            *COASTING,
            "client.epochs=2",
            "client.batch=16",
            "sample.size=6",
            "client.lr=0.1",
        ),
    ),
    "proximal term": (
        "fedavg",
        (*UNEVEN, "client.epochs=2", "client.batch=16", "sample.size=6", *PULLED),
    ),
    "proximal term in the span": (
        "fedavg",
        (*UNEVEN, *SPAN, "client.epochs=3", "client.batch=4", "sample.size=6", *PULLED),
    ),
    "Adam": (
        "fedavg",
        (*UNEVEN, *ADAM, "client.epochs=2", "client.batch=16", "sample.size=6", "client.lr=0.02"),
    ),
    "adaptive clip": ("central", (*HUSHED, *ADAPTIVE, "client.epochs=2", "client.lr=0.2")),
    "adaptive clip in the span": (
        "central",
        (*HUSHED, *ADAPTIVE, *SPAN, "client.epochs=2", "client.lr=0.2"),
    ),
    "gradients": ("ldp-sgd", (*HUSHED, "server.lr=1.0")),
    "clipped gradients": ("dp-fedavg", (*HUSHED, "client.steps=3")),
    "records of uneven clients": ("dp-sgd", (*HUSHED, *UNEVEN, "clip.value=0.1")),
    "Adam on records of uneven clients": (
        "dp-sgd",
        (*HUSHED, *UNEVEN, *ADAM, "clip.value=0.1", "client.lr=0.02"),
    ),
    "two-point": ("ldp-fl", ("shuffle=none", "client.epochs=1", "clip.radius=0.5")),
}


@pytest.mark.parametrize("kind", RUNS)
def test_modes_agree(watch, kind):
    name, settings = RUNS[kind]
    looped, vectorised = (
        watch(name, *SMALL, *settings, f"engine.mode={mode}", out=mode)
        for mode in ("looped", "vectorised")
    )
    assert looped.steps.any()
    for told in ("clients", "clipped", "refused"):
        assert [m[told] for m in looped.metrics] == [m[told] for m in vectorised.metrics]
    if looped.metrics[0]["clip"] is not None:
        assert np.allclose(looped.clips(), vectorised.clips(), rtol=1e-6)
    if name != "ldp-fl":  # where rounding may tip a coin
        assert np.allclose(looped.steps, vectorised.steps, atol=1e-4)


@pytest.mark.parametrize("kind", ["adaptive clip", "adaptive clip in the span"])
@pytest.mark.parametrize("mode", ["looped", "vectorised"])
def test_a_bound_that_is_too_small_grows_and_one_too_large_shrinks(watch, kind, mode):
    """Bits tell whether an update needed clipping in any of its steps."""
    name, settings = RUNS[kind]
    for value, grows in ((1e-4, True), (100.0, False)):
        more = (f"clip.value={value}", f"engine.mode={mode}")
        clips = watch(name, *SMALL, *settings, *more, out=str(grows)).clips()
        assert (np.diff(clips) > 0).all() == grows
        assert (np.diff(clips) < 0).all() != grows
