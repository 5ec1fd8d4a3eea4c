"""Numbers have a place on every scale, and labels are round numbers within it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.pages.charts import AxisScale

numbers = st.floats(-1e9, 1e9).map(lambda x: round(x, 6))


@given(st.lists(numbers, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_every_value_is_on_the_scale_and_every_label_too(values, zero, log):
    scale = AxisScale.from_values(values, 10.0, 110.0, zero=zero, log=log)
    assert scale.smallest < scale.largest
    assert all(10.0 <= scale.position(value) <= 110.0 for value in values)
    ticks = [value for value, _ in scale.ticks()]
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
    scale = AxisScale.from_values(values, 0.0, 1.0, **options)
    assert (scale.smallest, scale.largest) == pytest.approx((low, high))


def test_powers_of_ten():
    scale = AxisScale.from_values([1e-3, 1.0, 1e3], 0.0, 60.0, log=True)
    assert scale.log
    assert scale.position(1.0) == pytest.approx(30.0)
    assert [value for value, _ in scale.ticks()] == pytest.approx(
        [1e-3, 1e-2, 1e-1, 1, 10, 100, 1000]
    )
    assert not AxisScale.from_values([0.0, 1.0], 0.0, 1.0, log=True).log
    assert [text for _, text in AxisScale.from_values([5.0], 0.0, 1.0, log=True).ticks()] == [
        "5",
        "10",
    ]


def test_numbers_that_differ_in_their_last_digit_are_one():
    nearly = math.nextafter(7e8, math.inf)
    for log in (False, True):
        assert AxisScale.from_values([7e8, nearly], 0.0, 1.0, log=log).position(
            7e8
        ) == pytest.approx(0.5)


def test_a_value_outside_is_put_at_the_edge():
    assert AxisScale(0.0, 1.0, 10.0, 20.0).position(-5.0) == 10.0


@pytest.mark.parametrize(
    ("largest", "labels"),
    [(3e6, ["0", "1e6", "2e6", "3e6"]), (5e4, ["0", "10k", "20k", "30k", "40k", "50k"]),
     (0.6, ["0", "0.2", "0.4", "0.6"]), (3e-7, ["0", "1e-7", "2e-7", "3e-7"])],
)  # fmt: skip
def test_labels_are_short_and_without_noise_of_floating_point(largest, labels):
    assert [text for _, text in AxisScale(0.0, largest, 0.0, 1.0).ticks()] == labels
