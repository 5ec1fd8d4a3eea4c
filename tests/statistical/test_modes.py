"""Whole runs in both modes: the same model, the same bounds, the same shares, up to rounding."""

import numpy as np
import pytest

SMALL = ("data.clients=12", "rounds=4")
HUSHED = ("noise.multiplier=0.05", "budget.epsilon=inf", "budget.delta=1e-4", "sample.kind=all")
UNEVEN = ("data.partition=dirichlet", "data.alpha=0.5")
SPAN = ("data.most_records=9",)
ADAPTIVE = ("bound.kind=quantile", "bound.value=0.05", "bound.bit_noise=0.1")
COASTING = ("local.momentum=0.5", "local.weight_decay=0.1")

RUNS = {
    "ragged batches": ("fedavg", (*UNEVEN, "local.epochs=2", "local.batch=16", "sample.size=6")),
    "ragged batches in the span": (
        "fedavg",
        (*UNEVEN, *SPAN, "local.epochs=3", "local.batch=4", "sample.size=6"),
    ),
    "momentum and decay": (
        "fedavg",
        (*UNEVEN, *COASTING, "local.epochs=2", "local.batch=16", "sample.size=6", "local.lr=0.1"),
    ),
    "adaptive bound": ("central", (*HUSHED, *ADAPTIVE, "local.epochs=2", "local.lr=0.2")),
    "adaptive bound in the span": (
        "central",
        (*HUSHED, *ADAPTIVE, *SPAN, "local.epochs=2", "local.lr=0.2"),
    ),
    "gradients": ("ldp-sgd", (*HUSHED, "server.lr=1.0")),
    "bounded gradients": ("dp-fedavg", (*HUSHED, "local.steps=3")),
    "records of uneven clients": ("local", (*HUSHED, *UNEVEN, "bound.value=0.1")),
    "two-point": ("ldp-fl", ("shuffle=none", "local.epochs=1", "bound.radius=0.5")),
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
    if looped.metrics[0]["bound"] is not None:
        assert np.allclose(looped.bounds(), vectorised.bounds(), rtol=1e-6)
    if name != "ldp-fl":  # where rounding may tip a coin
        assert np.allclose(looped.steps, vectorised.steps, atol=1e-4)


@pytest.mark.parametrize("kind", ["adaptive bound", "adaptive bound in the span"])
@pytest.mark.parametrize("mode", ["looped", "vectorised"])
def test_a_bound_that_is_too_small_grows_and_one_too_large_shrinks(watch, kind, mode):
    """Bits tell whether an update needed bounding in any of its steps."""
    name, settings = RUNS[kind]
    for value, grows in ((1e-4, True), (100.0, False)):
        more = (f"bound.value={value}", f"engine.mode={mode}")
        bounds = watch(name, *SMALL, *settings, *more, out=str(grows)).bounds()
        assert (np.diff(bounds) > 0).all() == grows
        assert (np.diff(bounds) < 0).all() != grows
