"""What a client that was not there may be told of a moving clip or ranges, and what not."""

import math
from dataclasses import replace

import pytest
import torch

from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip_schedules import Fixed, Median, PerGradient, Poly, Quantile
from fedveil.privacy.ranges import Perturb, Ranges
from tests.asking import moved_ranges

QUANTILE = Quantile(0.5, 0.5, lr=50.0, noise=1.0)
MEDIAN = Median(0.5, -3, 3, 1, Budget(1.0, 1e-5), noise=1.0)
SIZES = (6, 4)


@pytest.mark.parametrize(
    "schedule",
    [
        QUANTILE,
        replace(QUANTILE, lr=0.2),
        replace(QUANTILE, value=1e13),
        MEDIAN,
        replace(MEDIAN, monotone=True),
        replace(MEDIAN, cap=2.0),
        Fixed(0.5),
        Poly(0.5, 1.0, 30, 1e-3),
        PerGradient(Fixed(0.5), lambda round: 0.1 * round),
    ],
)
@pytest.mark.parametrize("size", [1e9, 1.0, -1e9])
def test_every_course_stays_within_the_span(schedule, size):
    generator = torch.Generator().manual_seed(1)
    width = 0 if schedule.statistic is None else schedule.statistic.width
    value = schedule.first_value()
    for round in range(1, 60):
        least, most = schedule.value_limits(round)
        assert least <= value <= most
        noisy = size * torch.randn(width, dtype=torch.float64, generator=generator).abs()
        value = schedule.next_value(value, noisy, 10.0, round)


def test_a_clip_that_does_not_move_has_one_value():
    assert Fixed(0.5).value_limits(7) == (0.5, 0.5)
    assert Poly(0.5, 1.0, 30, 1e-3).value_limits(7) == (0.5, 0.5)


def test_a_quantile_clip_moves_by_a_bounded_factor():
    assert QUANTILE.value_limits(1) == (0.5, 0.5)
    least, most = QUANTILE.value_limits(2)
    assert 0.5 * math.exp(3) <= most <= 0.5 * math.exp(6.1)
    assert 0.5 * math.exp(-6.1) <= least <= 0.5 * math.exp(-3)
    assert QUANTILE.value_limits(1000) == (1e-12, 1e12)


def test_a_median_clip_is_one_of_its_edges():
    assert MEDIAN.value_limits(1) == (0.5, 0.5)
    assert MEDIAN.value_limits(2) == (0.125, 8.0)
    assert replace(MEDIAN, monotone=True).value_limits(2) == (0.125, 0.5)
    assert replace(MEDIAN, cap=2.0).value_limits(2) == (0.125, 2.0)


def ranges(**changes):
    plain = {"centre": 0.0, "radius": 0.2, "tensor_sizes": SIZES, "adaptive": True}
    return Ranges(**{**plain, "perturb": Perturb.UPDATE, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"growth": 3.0},
        {"perturb": Perturb.WEIGHTS},
        {"perturb": Perturb.WEIGHTS, "radius": None, "growth": 1.5},
        {"adaptive": False},
    ],
)
def test_every_course_of_ranges_is_reachable(changes):
    generator = torch.Generator().manual_seed(2)
    own, first = ranges(**changes), torch.randn(10, generator=generator)
    params, moving = first, ranges(**changes).first_state(first)
    for round in range(1, 40):
        assert own.reachable(moving, params, first, round)
        after = params + torch.randn(10, generator=generator) * 10.0 ** (round % 5 - 2)
        moving, params = moved_ranges(own, moving, params, after), after


@pytest.mark.parametrize(
    "moving",
    [
        [0.0, 0.0, 0.2, 0.3],
        [0.0, 0.0, 0.2, 1e-7],
        [0.0, 0.0, 0.2, -0.1],
        [0.1, 0.0, 0.2, 0.2],
        [0.0, 0.0, 0.2, math.inf],
        [0.0, 0.0, math.nan, 0.2],
        [0.0, 0.2],
    ],
)
def test_ranges_that_no_course_leads_to_are_not(moving):
    first = torch.zeros(10)
    moving = torch.tensor(moving, dtype=torch.float64)
    assert not ranges().reachable(moving, first, first, 5)
    assert not ranges(adaptive=False).reachable(moving, first, first, 5)


def test_centres_of_weights_follow_from_the_model():
    own, first = ranges(perturb=Perturb.WEIGHTS), torch.arange(10.0)
    right = torch.tensor([2.5, 7.5, 0.2, 0.1], dtype=torch.float64)
    assert own.reachable(right, first, first, 2)
    assert not own.reachable(right + 1e-9, first, first, 2)
    assert not own.reachable(right, first + 1, first, 2)
    assert not own.reachable(right, first, first, 1)


def test_growth_without_end_is_bounded():
    own, first = ranges(growth=1e6), torch.zeros(10)
    most = torch.tensor([0.0, 0.0, 1e30, 1e30], dtype=torch.float64)
    assert own.reachable(most, first, first, 1000)
    assert not own.reachable(most * 1.1, first, first, 1000)
