"""Numbers have a place on every scale, and labels are round numbers within it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.pages.charts import AxisScale, fitted, tick_text

numbers = st.floats(-1e9, 1e9).map(lambda x: round(x, 6))


@given(st.lists(numbers, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_every_value_is_on_the_scale_and_every_label_too(values, zero, log):
    scale = fitted(values, 10.0, 110.0, zero=zero, log=log)
    assert scale.smallest < scale.largest
    assert all(10.0 <= scale(value) <= 110.0 for value in values)
    ticks = scale.ticks()
    assert len(ticks) < 20
    slack = 1e-6 * (scale.largest - scale.smallest)
    assert all(scale.smallest - slack <= tick <= scale.largest + slack for tick in ticks)
    if zero and not scale.log:
        assert scale.smallest <= 0 <= scale.largest


@pytest.mark.parametrize(
    ("values", "options", "low", "high"),
    [
        ([], {}, -0.04, 1.04),
        ([math.nan, math.inf], {}, -0.04, 1.04),
        ([0.0, 0.0], {"zero": True}, 0.0, 1.04),
        ([4.0], {}, 1.84, 6.16),
        ([0.0], {}, -1.08, 1.08),
    ],
)
def test_edges(values, options, low, high):
    scale = fitted(values, 0.0, 1.0, **options)
    assert (scale.smallest, scale.largest) == pytest.approx((low, high))


def test_powers_of_ten():
    scale = fitted([1e-3, 1.0, 1e3], 0.0, 60.0, log=True)
    assert scale.log
    assert scale(1.0) == pytest.approx(30.0)
    assert scale.ticks() == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10, 100, 1000])
    assert not fitted([0.0, 1.0], 0.0, 1.0, log=True).log
    assert fitted([5.0], 0.0, 1.0, log=True).ticks() == pytest.approx([5.0, 10.0])


def test_numbers_that_differ_in_their_last_digit_are_one():
    nearly = math.nextafter(7e8, math.inf)
    for log in (False, True):
        assert fitted([7e8, nearly], 0.0, 1.0, log=log)(7e8) == pytest.approx(0.5)


def test_a_value_outside_is_put_at_the_edge():
    assert AxisScale(0.0, 1.0, 10.0, 20.0)(-5.0) == 10.0


def test_labels():
    assert [tick_text(x) for x in (1e6, 25_000.0, -0.25)] == ["1e6", "25k", "-0.25"]
