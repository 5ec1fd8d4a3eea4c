"""Chains of linear layers as batched algebra: the same means and bounded sums as vmap."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.models.metrics import cross_entropy, squared_error
from fedveil.privacy.clip import Clip, Norm, row_norms
from fedveil.training.cohort import Batch
from fedveil.training.gradients.linear_chains import DualTrajectory, StackedTrajectory
from tests.training.gradients.chains import (
    ACTIVATIONS,
    BATCHES,
    assert_close,
    away,
    brier,
    chain,
    smooth,
    some,
    whole,
)


def on_its_way(walk, general, spanned):
    """None, and somewhere else: as the walk says it and as parameters."""
    assert type(walk) is (DualTrajectory if spanned else StackedTrajectory)
    moved = away(walk, 0.05)
    return [(None, None), (moved, walk.update_rows(moved))]


def sampled(cases, stride):
    """The cases, of which the quick run takes one in `stride`, a prime."""
    marks = itertools.cycle([[], *([pytest.mark.slow] for _ in range(stride - 1))])
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=False)]


FORMS = ("stacked", "dual")


@pytest.mark.parametrize(
    ("after", "batch", "spanned"),
    sampled(itertools.product(ACTIVATIONS, BATCHES, FORMS), 5),
    indirect=["spanned"],
)
def test_means_are_those_of_vmap_for_any_function(make_walks, after, batch, spanned):
    walk, general = make_walks(chain(after=ACTIVATIONS[after], hidden=(5, 4)), spanned=spanned)
    for moved, row in on_its_way(walk, general, spanned):
        step = BATCHES[batch](walk)
        found = walk.update_rows(walk.mean_update(moved, step))
        assert_close(found, general.mean_update(row, step))
        assert step.idle is None or not found[step.idle].any()


def test_a_step_goes_down_the_gradient_from_where_the_clients_are(make_walks, spanned):
    walk, _ = make_walks(chain(), spanned=spanned)
    step = whole(walk, [1, 4])
    first = walk.descend_(None, step, 0.5)
    assert_close(first, -0.5 * walk.mean_update(None, step))
    expected = first - 0.25 * walk.mean_update(first, step)
    second = walk.descend_(first, step, 0.25)
    assert second is first
    assert_close(second, expected)
    assert not second[step.idle].any()


@pytest.mark.parametrize("general", [True, False])
def test_an_idle_client_stays_where_its_loss_overflows(make_walks, general):
    walk = make_walks(chain(1, ()), squared_error)[general]
    moved, step = away(walk), whole(walk, [3])
    moved[3] = 1e30
    walk._cohort.x[3] = 1e20
    assert not walk.mean_update(moved, step)[3].any()
    before = moved[3].clone()
    assert torch.equal(walk.descend_(moved, step, 0.1)[3], before)


LOSSES = ((cross_entropy, 3), (brier, 3), (squared_error, 1), (smooth, 1), (cross_entropy, 4))
HIDDEN = ((), (5,), (1,), (6, 4))


@pytest.mark.parametrize(
    ("last", "hidden", "bias", "spanned"),
    sampled(itertools.product(LOSSES, HIDDEN, (True, False), FORMS), 11),
    indirect=["spanned"],
)
def test_means_are_those_of_vmap_for_any_shape(make_walks, last, hidden, bias, spanned):
    loss, outputs = last
    module = chain(outputs, hidden, bias=bias)
    walk, general = make_walks(module, loss, spanned=spanned)
    for moved, row in on_its_way(walk, general, spanned):
        for step in (whole(walk), some(walk)):
            assert_close(
                walk.update_rows(walk.mean_update(moved, step)), general.mean_update(row, step)
            )


def test_large_layers_are_written_straight_into_their_rows(make_walks):
    walk, general = make_walks(chain(hidden=(70, 60), inputs=90), shape=(90,))
    for moved in (None, away(walk, 0.02)):
        for step in (whole(walk), some(walk)):
            assert_close(walk.mean_update(moved, step), general.mean_update(moved, step))
            clip = Clip(0.5)
            found = walk.clipped_sum(moved, step, clip)
            assert_close(found, general.clipped_sum(moved, step, clip))


@pytest.mark.parametrize(
    ("loss", "outputs", "hidden", "bias", "after", "norm"),
    [
        (cross_entropy, 3, (5,), True, "relu-in-place", Norm.L2),
        (cross_entropy, 3, (), False, "identity", Norm.L2),
        (brier, 3, (6, 4), True, "tanh", Norm.L2),
        (squared_error, 1, (5,), False, "two", Norm.L2),
        (squared_error, 1, (), True, "identity", Norm.L2),
        (smooth, 1, (1,), True, "softplus", Norm.L2),
        (cross_entropy, 3, (5,), True, "tanh", Norm.L1),
    ],
)
def test_bounded_sums_are_those_of_vmap(make_walks, loss, outputs, hidden, bias, after, norm):
    """The clip lies among the norms, so that some gradients are cut and some are not."""
    module = chain(outputs, hidden, ACTIVATIONS[after], bias)
    walk, general = make_walks(module, loss)
    free, cut = Clip(1e9, norm), Clip(1e-9, norm)
    for moved in (None, away(walk)):
        for step in (whole(walk), whole(walk, [1, 4]), some(walk)):
            value = float(row_norms(general.clipped_sum(moved, step, free), norm).median()) / 4
            for clip in (free, cut, Clip(value, norm)):
                expected = general.clipped_sum(moved, step, clip)
                assert_close(walk.clipped_sum(moved, step, clip), expected)


@pytest.mark.parametrize("value", [1e-3, 1.0, 30.0])
def test_one_record_moves_a_bounded_sum_by_at_most_the_bound(make_walks, value):
    walk, _ = make_walks(chain())
    batch = whole(walk)
    before = walk.clipped_sum(None, batch, Clip(value)).double()
    for k, n in enumerate(walk._cohort.sizes):
        for record in range(n):
            mask = batch.mask.clone()
            mask[k, record] = 0
            after = walk.clipped_sum(None, Batch(None, mask), Clip(value)).double()
            lengths = (before - after).norm(dim=1)
            assert 0 < float(lengths[k]) <= value * (1 + 1e-6)
            assert float(lengths.sum()) == float(lengths[k])


@pytest.mark.parametrize("loss", [cross_entropy, brier])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_record_without_a_finite_gradient_counts_as_zero(make_walks, loss, value):
    walk, general = make_walks(chain(after=nn.ReLU), loss)
    batch, clip = whole(walk), Clip(0.5)
    walk._cohort.x[3, 2] = value
    found = walk.clipped_sum(None, batch, clip)
    assert_close(found, general.clipped_sum(None, batch, clip))
    walk._cohort.x[3, 2] = 0.0
    batch.mask[3, 2] = 0
    assert_close(found, walk.clipped_sum(None, batch, clip), 1e-6)


@pytest.mark.parametrize("large", [1e15, 2.5e18, 1.2e22, 2.5e22, 1e30])
@pytest.mark.parametrize("value", [1e-20, 1e-7, 0.1, 1.0])
def test_no_record_is_so_large_that_its_scale_is_rounded_up(make_walks, large, value):
    walk, _ = make_walks(chain(1, (), bias=False), squared_error)
    walk._cohort.x[0, 0] = large
    batch = whole(walk, range(1, 5))
    batch.mask[0, 1:] = 0
    found = walk.clipped_sum(None, batch, Clip(value))
    assert float(found.double().norm()) <= value


def test_no_error_is_so_small_that_it_is_rounded_up(make_walks):
    """What float32 rounds by at its smallest, times a record at its largest, is not nothing."""
    walk, _ = make_walks(
        chain(3, (), bias=False), lambda outputs, y: 1e-12 * outputs.sum(-1) + 0 * y
    )
    walk._cohort.x[0, 0] = 1e38
    batch = whole(walk, range(1, 5))
    batch.mask[0, 1:] = 0
    for value in np.logspace(-8, -4, 41):
        assert float(walk.clipped_sum(None, batch, Clip(value)).double().norm()) <= value


def test_a_loss_of_the_whole_batch_is_that_of_each_record_alone(make_walks):
    def mined(outputs, targets):
        losses = cross_entropy(outputs, targets)
        return losses * (losses >= losses.mean() - 1e-6)

    walk, general = make_walks(chain(), mined)
    found = walk.clipped_sum(None, whole(walk), Clip(0.1))
    assert_close(found, general.clipped_sum(None, whole(walk), Clip(0.1)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_padding_without_a_finite_gradient_counts_as_zero(make_walks, value):
    walk, _ = make_walks(chain(after=nn.ReLU))
    batch, clip = whole(walk), Clip(0.5)
    expected = walk.clipped_sum(None, batch, clip)
    walk._cohort.x[1, 1:] = value
    assert_close(walk.clipped_sum(None, batch, clip), expected, 1e-6)


def test_nothing_that_was_given_is_changed(make_walks, spanned):
    for loss, outputs in ((cross_entropy, 3), (squared_error, 1), (brier, 3)):
        module = chain(outputs, after=ACTIVATIONS["relu-in-place"])
        walk, _ = make_walks(module, loss, spanned=spanned)
        own, moved, step = walk._task.parameters, away(walk), some(walk)
        given = [own, walk._start, walk._cohort.x, walk._cohort.y, moved, step.index, step.mask]
        kept = [values.clone() for values in given]
        for way in (None, moved):
            walk.mean_update(way, step)
            if not spanned:
                walk.clipped_sum(way, step, Clip(0.1))
        walk.norms(moved, Norm.L2)
        walk.update_rows(moved)
        assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
        assert walk._task.module[1].inplace
        assert all(p.grad is None for p in module.parameters())
