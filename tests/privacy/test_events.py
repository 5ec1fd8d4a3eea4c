"""Events are data: they go to the ledger and come back unchanged, or are refused."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.errors import BadInput
from fedveil.privacy.events import FixedSampled, Gaussian, PoissonSampled, from_dict, to_dict

gaussians = st.builds(Gaussian, st.floats(0, 1e300))
events = st.one_of(
    gaussians,
    st.builds(PoissonSampled, st.floats(0, 1, exclude_min=True), gaussians),
    st.builds(
        lambda size, rest, g: FixedSampled(size, size + rest, g),
        st.integers(1, 10**9),
        st.integers(0, 10**9),
        gaussians,
    ),
)


@given(events)
def test_dict_and_json_lose_nothing(event):
    assert from_dict(json.loads(json.dumps(to_dict(event), allow_nan=False))) == event


def test_kinds_are_the_ones_old_ledgers_hold():
    assert from_dict({"kind": "gaussian", "multiplier": 2}) == Gaussian(2.0)
    inner = {"kind": "gaussian", "multiplier": 2.0}
    assert from_dict({"kind": "poisson-sampled", "rate": 0.5, "event": inner}) == PoissonSampled(
        0.5, Gaussian(2.0)
    )
    assert from_dict(
        {"kind": "fixed-sampled", "size": 3, "population": 9, "event": inner}
    ) == FixedSampled(3, 9, Gaussian(2.0))


def test_unknown_kind_is_refused_by_name():
    with pytest.raises(BadInput, match="'laplace' is unknown"):
        from_dict({"kind": "laplace", "scale": 1.0})


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"kind": "gaussian"},
        {"kind": "gaussian", "multiplier": "much"},
        {"kind": "gaussian", "multiplier": None},
        {"kind": "poisson-sampled", "rate": 0.5},
        {"kind": "poisson-sampled", "rate": 0.5, "event": 7},
        {"kind": "fixed-sampled", "size": 3, "event": {"kind": "gaussian", "multiplier": 1.0}},
        [],
        "gaussian",
        None,
    ],
)
def test_event_that_cannot_be_read_is_refused(raw):
    with pytest.raises(BadInput, match="cannot be read"):
        from_dict(raw)


def test_sampling_of_a_sampled_event_is_refused():
    inner = to_dict(PoissonSampled(0.5, Gaussian(1.0)))
    with pytest.raises(BadInput, match="not a Gaussian"):
        from_dict({"kind": "poisson-sampled", "rate": 0.5, "event": inner})


@pytest.mark.parametrize("multiplier", [-1.0, -1e-300, math.nan, math.inf])
def test_gaussian_that_cannot_exist_is_refused(multiplier):
    with pytest.raises(BadInput):
        Gaussian(multiplier)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(BadInput):
        PoissonSampled(rate, Gaussian(1.0))


@pytest.mark.parametrize(("size", "population"), [(0, 10), (-1, 10), (11, 10)])
def test_cohort_that_cannot_be_drawn_is_refused(size, population):
    with pytest.raises(BadInput):
        FixedSampled(size, population, Gaussian(1.0))
