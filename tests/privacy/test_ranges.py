"""Ranges are public: they come from agreed numbers and released models, and nothing else."""

import math

import pytest
import torch

from fedveil.base.checks import SMALLEST_RADIUS
from fedveil.base.errors import BadInput
from fedveil.privacy.ranges import Perturb, Ranges
from tests.asking import moved_ranges

BEFORE = torch.tensor([0.1, -0.3, 0.5, 2.0, 4.0])


def ranges(**changes):
    settings = {
        "centre": 0.0,
        "radius": 0.5,
        "tensor_sizes": (3, 2),
        "adaptive": True,
        "perturb": Perturb.WEIGHTS,
    }
    return Ranges(**{**settings, **changes})


@pytest.mark.parametrize("params", [BEFORE, torch.full((5,), 1e6), torch.full((5,), math.nan)])
def test_first_ranges_are_the_agreed_ones_whatever_the_model(params):
    start = ranges(centre=0.25, radius=0.075).first_state(params)
    assert start.tolist() == [0.25, 0.25, 0.075, 0.075]


def test_first_ranges_without_a_radius_are_those_of_the_first_model():
    start = ranges(radius=None).first_state(BEFORE)
    assert start.tolist() == pytest.approx([0.1, 3.0, 0.4, 1.0])


def test_spread_repeats_a_layer_over_its_coordinates():
    centre, radius = ranges().per_coordinate(
        torch.tensor([1.0, 2.0, 0.5, 0.25], dtype=torch.float64)
    )
    assert centre.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert radius.tolist() == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert centre.dtype is radius.dtype is torch.float32


def test_fixed_ranges_never_move():
    fixed = ranges(adaptive=False)
    start = fixed.first_state(BEFORE)
    assert torch.equal(moved_ranges(fixed, start, BEFORE, 100 * BEFORE), start)


def test_weights_are_followed_layer_by_layer():
    wide = ranges(radius=10.0)
    moved = moved_ranges(wide, wide.first_state(BEFORE), torch.zeros(5), BEFORE)
    assert moved.tolist() == pytest.approx([0.1, 3.0, 0.4, 1.0])


def test_updates_stay_centred_and_follow_the_spread_of_the_last_mean_update():
    wide = ranges(radius=10.0, perturb=Perturb.UPDATE)
    after = BEFORE + torch.tensor([0.1, 0.2, 0.4, -1.0, 1.0])
    moved = moved_ranges(wide, wide.first_state(BEFORE), BEFORE, after)
    assert moved.tolist() == pytest.approx([0.0, 0.0, 0.15, 1.0], rel=1e-5)


@pytest.mark.parametrize(("growth", "radius"), [(1.0, 0.5), (1.2, 0.6), (100.0, 1.0)])
def test_radius_grows_by_a_limited_factor_a_round(growth, radius):
    some = ranges(growth=growth)
    moved = moved_ranges(some, some.first_state(BEFORE), torch.zeros(5), BEFORE)
    assert float(moved[3]) == pytest.approx(radius)


def test_radius_does_not_drift_upwards_on_noise_alone():
    """Reports lie at c +- r kappa; an aggregate of few of them is wider than the range."""
    some = ranges(radius=0.1, tensor_sizes=(1000,))
    moving, generator = some.first_state(torch.zeros(1000)), torch.Generator().manual_seed(1)
    model = torch.zeros(1000)
    for _ in range(30):
        centre, radius = some.per_coordinate(moving)
        sign = torch.randint(0, 2, (1000,), generator=generator) * 2 - 1
        after = centre + radius * 20 * sign
        moving, model = moved_ranges(some, moving, model, after), after
        assert float(moving[1]) <= 0.1


def test_constant_layer_keeps_a_radius():
    start = ranges().first_state(BEFORE)
    moved = moved_ranges(ranges(), start, torch.zeros(5), torch.full((5,), 0.3))
    assert moved[:2].tolist() == pytest.approx([0.3, 0.3])
    assert torch.equal(moved[2:], start[2:])


def test_ranges_depend_on_released_models_only():
    """Same models, same ranges: there is no other way in."""
    some = ranges(growth=2.0)
    start = some.first_state(BEFORE)
    first = moved_ranges(some, start, BEFORE, 2 * BEFORE)
    assert torch.equal(first, moved_ranges(some, start, BEFORE, 2 * BEFORE))
    assert torch.equal(start, some.first_state(BEFORE))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("centre", math.nan),
        ("centre", math.inf),
        ("radius", 0.0),
        ("radius", SMALLEST_RADIUS / 2),
        ("radius", math.inf),
        ("radius", math.nan),
        ("growth", 0.99),
        ("growth", math.inf),
        ("growth", math.nan),
    ],
)
def test_number_that_is_no_range_is_refused(key, value):
    with pytest.raises(BadInput, match=rf"^{key} is "):
        ranges(**{key: value})


def test_centre_of_updates_is_the_model_sent():
    with pytest.raises(BadInput, match="omit it"):
        ranges(centre=0.1, perturb=Perturb.UPDATE)
