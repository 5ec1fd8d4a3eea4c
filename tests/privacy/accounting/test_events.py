"""Events are data: they go to the ledger and come back unchanged, or are refused."""

import json
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.events import (
    KINDS,
    Event,
    FixedSampled,
    FuGaussian,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    PoissonSampled,
    PureReport,
    Shuffled,
    Skellam,
    TwoPoint,
    from_dict,
    to_dict,
)

multipliers = st.floats(0, 1e300)
gaussians = st.builds(Gaussian, multipliers)
skellams = st.builds(Skellam, multipliers, st.floats(1, 1e300))
reports = st.builds(TwoPoint, st.floats(1e-300, 1e300))
events = st.one_of(
    gaussians,
    skellams,
    reports,
    st.builds(PureReport, st.floats(1e-300, 1e300)),
    st.builds(Laplace, multipliers),
    st.builds(FuGaussian, multipliers, st.floats(1e-300, 1e300)),
    st.builds(Shuffled, reports, st.integers(1, 10**9)),
    st.builds(GaussianWithBit, gaussians, reports),
    st.builds(GaussianWithCurator, gaussians, gaussians, st.integers(1, 10**9)),
    st.builds(PoissonSampled, st.floats(0, 1, exclude_min=True), gaussians | skellams),
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
    integers = {"kind": "skellam", "multiplier": 2, "sensitivity": 9}
    assert from_dict(integers) == Skellam(2.0, 9.0)
    bit = {"kind": "two-point", "epsilon": 0.5}
    assert from_dict(bit) == TwoPoint(0.5)
    assert from_dict({"kind": "pure-report", "epsilon": 8}) == PureReport(8.0)
    assert from_dict({"kind": "laplace", "multiplier": 3}) == Laplace(3.0)
    assert from_dict({"kind": "fu-gaussian", "multiplier": 3, "c2": 1}) == FuGaussian(3.0, 1.0)
    shuffled = {"kind": "shuffled", "event": bit, "reports": 7}
    assert from_dict(shuffled) == Shuffled(TwoPoint(0.5), 7)
    both = {"kind": "gaussian-with-bit", "gaussian": inner, "bit": bit}
    assert from_dict(both) == GaussianWithBit(Gaussian(2.0), TwoPoint(0.5))
    watched = {"kind": "gaussian-with-curator", "gaussian": inner, "curator": inner, "most": 3}
    assert from_dict(watched) == GaussianWithCurator(Gaussian(2.0), Gaussian(2.0), 3)


def test_every_kind_has_a_name_of_its_own():
    names = {KINDS[event] for event in get_args(Event)}
    assert len(names) == len(get_args(Event))


def test_unknown_kind_is_refused_by_name():
    with pytest.raises(BadInput, match="'staircase' is unknown"):
        from_dict({"kind": "staircase", "scale": 1.0})


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
    with pytest.raises(BadInput, match=r"cannot be read|has the fields"):
        from_dict(raw)


def test_sampling_of_a_sampled_event_is_refused():
    inner = to_dict(PoissonSampled(0.5, Gaussian(1.0)))
    with pytest.raises(BadInput, match="holds a Gaussian"):
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


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", [TwoPoint, PureReport])
def test_report_that_cannot_exist_is_refused(kind, epsilon):
    with pytest.raises(BadInput):
        kind(epsilon)


@pytest.mark.parametrize("reports", [0, -1])
def test_shuffle_of_nothing_is_refused(reports):
    with pytest.raises(BadInput):
        Shuffled(TwoPoint(1.0), reports)


@pytest.mark.parametrize("most", [0, -1])
def test_curator_who_publishes_nothing_is_refused(most):
    with pytest.raises(BadInput):
        GaussianWithCurator(Gaussian(1.0), Gaussian(1.0), most)


@pytest.mark.parametrize("c2", [0.0, -1.0, math.nan, math.inf])
def test_constant_that_is_none_is_refused(c2):
    with pytest.raises(BadInput):
        FuGaussian(1.0, c2)


@pytest.mark.parametrize("multiplier", [-1.0, math.nan, math.inf])
def test_laplace_that_cannot_exist_is_refused(multiplier):
    with pytest.raises(BadInput):
        Laplace(multiplier)


def test_field_that_nobody_knows_is_refused():
    with pytest.raises(BadInput, match="has the fields"):
        from_dict({"kind": "gaussian", "multiplier": 1.0, "rate": 0.1})
