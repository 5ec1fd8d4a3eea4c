"""Metrics with a price: clip, noise, calibration, intervals, and the joint account with updates."""

import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import HELD_OUT, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled, WithMetrics
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import unprotected
from fedveil.privacy.priced_metrics import (
    OwnerClip,
    PricedMetrics,
    measurement_rounds,
    priced_metrics,
)
from fedveil.privacy.release import SERVER
from fedveil.privacy.releases.central import central
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson
from fedveil.privacy.secure import SLIP, planned_for, with_secure_noise

NAMES = ("accuracy", "loss")
WHERE = (8, 15, 23, 30)
ANY = st.floats(allow_nan=True, allow_infinity=True, width=64)


def made(names=NAMES, owners=3000, target=0.5, delta=1e-5, rounds=WHERE, loss_clip=4.6, **rest):
    budget = Budget(target, delta)
    return priced_metrics(names, owners, budget=budget, rounds=rounds, loss_clip=loss_clip, **rest)


def of_clients(sampler, clients=1000, rounds=30, target=0.5, total=2.0, **rest):
    metrics = made(
        owners=clients,
        target=target,
        rounds=measurement_rounds(rounds, None),
        of_clients=True,
        relation=sampler.relation,
    )
    plan = central(
        *(sampler, clients, Fixed(1.0)),
        rounds=rounds,
        budget=Budget(total, 1e-5),
        metrics=metrics,
        **rest,
    )
    return plan.measuring(metrics)


# The clip.


@given(
    st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=4).flatmap(
        lambda weights: st.tuples(
            st.just(weights),
            *(st.lists(ANY, min_size=len(weights), max_size=len(weights)) for _ in range(2)),
        )
    )
)
def test_whatever_an_owner_s_means_are_it_moves_a_sum_by_the_sensitivity_at_most(drawn):
    weights, one, other = drawn
    clip = OwnerClip(tuple(weights))
    first, second = clip.apply(torch.tensor([one, other], dtype=torch.float64))
    for moved in (first - second, first, second):  # replaced; zeroed, added or removed
        assert float(moved.norm()) <= clip.sensitivity
    assert ((first >= 0) & (first <= torch.tensor(weights, dtype=torch.float64))).all()


def test_the_sensitivity_is_reached():
    clip = OwnerClip((0.6, 0.8))
    moved = clip.apply(torch.ones(1, 2)) - clip.apply(torch.zeros(1, 2))
    assert float(moved.norm()) == pytest.approx(clip.sensitivity, rel=1e-9)
    assert clip.sensitivity == pytest.approx(1.0, rel=1e-9)


def test_what_is_no_number_moves_nothing():
    rows = OwnerClip((1.0,)).apply(torch.tensor([[math.nan], [math.inf], [-math.inf]]))
    assert rows.tolist() == [[0.0], [1.0], [0.0]]


@pytest.mark.parametrize("weights", [(), (0.0,), (-1.0,), (math.nan,), (math.inf,)])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(BadInput, match="weights are"):
        OwnerClip(weights)


# Which share of a measurement each number gets.


@pytest.mark.parametrize(
    ("names", "shares"),
    [
        (("accuracy", "loss"), (0.8, 0.2)),
        (("accuracy", "top-5", "loss"), (0.4, 0.4, 0.2)),
        (("loss",), (1.0,)),
        (("accuracy",), (1.0,)),
        (("accuracy", "top-5"), (0.5, 0.5)),
    ],
)
def test_the_loss_gets_a_fifth_and_the_others_share_the_rest(names, shares):
    found = [weight**2 for weight in made(names).clip.weights]
    assert found == pytest.approx(shares)


# Calibration.


@pytest.mark.parametrize("count", [1, 4, 30])
def test_all_measurements_together_cost_the_budget_and_hardly_less(count):
    metrics = made(rounds=tuple(range(1, count + 1)))
    spent = gaussian_epsilon(math.sqrt(count) / metrics.mechanism.multiplier, 1e-5)
    assert 0.499 < spent <= 0.5
    assert metrics.line.claims(count)[0].epsilon == pytest.approx(spent, rel=1e-9)
    assert metrics.line.permitted_rounds(count) == count


def test_it_is_a_line_of_its_own_about_one_owner():
    line = made().line
    assert (line.unit, line.relation, line.trust) == (Unit.CLIENT, Relation.ZERO_OUT, Trust.CENTRAL)
    assert (line.covers, line.event) == (HELD_OUT, Gaussian(made().mechanism.multiplier))
    assert line.rounds == WHERE
    assert any("3000" in text and "public" in text for text in line.assumptions)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"names": ()}, "at least one"),
        ({"owners": 0}, "at least one"),
        ({"rounds": ()}, "at least one"),
        ({"target": math.inf}, "epsilon is inf"),
        ({"owners": 100_000}, "not below 1 / 100000"),
        ({"loss_clip": 0.0}, "loss_clip is"),
    ],
)
def test_what_cannot_be_priced(changed, match):
    with pytest.raises(BadInput, match=match):
        made(**changed)


def test_a_line_with_other_noise_than_is_added_is_refused():
    metrics = made()
    with pytest.raises(BadInput, match="priced_metrics"):
        PricedMetrics(
            *(metrics.names, metrics.owners, False, 1.0),
            GaussianMechanism(metrics.mechanism.multiplier / 2),
            metrics.line,
        )


# The release.


def test_numbers_are_means_over_owners_plus_noise_of_the_interval_that_was_said():
    """Kolmogorov-Smirnov at 1e-6 over 1,000 rounds; the true values are .75 and 2.3."""
    metrics = made()
    means = torch.tensor([[1.0, 0.5], [0.5, 0.5]]).repeat(1500, 1).double()
    drawn = [metrics.measure(means, round, Streams(7)) for round in range(1, 1001)]
    for name, true in (("accuracy", 0.75), ("loss", 2.3)):
        std = metrics.intervals[name] / 1.959964
        off = [(each[name] - true) / std for each in drawn]
        assert kstest(off, "norm").pvalue > 1e-6


def test_secure_numbers_have_the_same_law_and_lie_on_a_grid():
    metrics = made()
    means = torch.full((3000, 2), 0.3, dtype=torch.float64)
    streams = Streams(0, secure=True)
    drawn = [metrics.measure(means, 8, streams) for _ in range(1000)]
    step = metrics.mechanism.grid(
        metrics.mechanism.multiplier * metrics.clip.sensitivity, 2
    ).spacing
    rest = (NAMES, (0.3, 1.38), (1, 4.6), metrics.clip.weights)
    for name, true, unit, weight in zip(*rest, strict=True):
        std = metrics.intervals[name] / 1.959964
        off = np.array([(each[name] - true) / std for each in drawn])
        assert kstest(off, "norm").pvalue > 1e-6
        steps = np.array([each[name] for each in drawn]) / unit * weight * 3000 / step
        assert np.abs(steps - np.rint(steps)).max() < 1e-3
    assert len({each["accuracy"] for each in drawn}) > 990


def test_secure_rows_are_cut_before_they_are_summed():
    """So that one owner moves the sum by no more than its own row, to the last bit."""
    metrics = made(owners=3, names=("accuracy",), delta=1e-3)
    seen = []

    class Noted(GaussianMechanism):
        def add_(self, rows, scales, keys):
            seen.append(rows.clone())

    noisy = object.__new__(PricedMetrics)
    noisy.__dict__.update(metrics.__dict__ | {"mechanism": Noted(metrics.mechanism.multiplier)})
    means = torch.tensor([[1 / 3], [0.1], [0.7]], dtype=torch.float64)
    noisy.measure(means, 1, Streams(0, secure=True))
    grid = metrics.mechanism.grid(metrics.mechanism.multiplier * metrics.clip.sensitivity, 1)
    assert float(seen[0][0, 0]) == float(grid.cut_(means.clone()).sum())


def test_noise_is_that_of_the_round_and_of_no_other_purpose():
    metrics, means = made(), torch.zeros(3000, 2, dtype=torch.float64)
    first, second = (metrics.measure(means, round, Streams(1)) for round in (8, 15))
    assert first == metrics.measure(means, 8, Streams(1))
    assert first["accuracy"] != second["accuracy"]
    assert first["accuracy"] != metrics.measure(means, 8, Streams(1).for_attempt(1))["accuracy"]
    assert first["accuracy"] / first["loss"] != second["accuracy"] / second["loss"]


def test_no_other_draw_of_the_training_tells_the_noise():
    """As keys, and as numbers: the server's own noise on a sum of zeros is another."""
    metrics, streams = made(), Streams(1)
    found = metrics.measure(torch.zeros(3000, 2, dtype=torch.float64), 8, streams)["accuracy"]
    scale = metrics.mechanism.multiplier * metrics.clip.sensitivity
    for purpose in ("noise", "cohort", "client-bits", "bits", "client-noise"):
        other = torch.zeros(1, 2, dtype=torch.float64)
        metrics.mechanism.add_(other, np.array([scale]), streams.keys(purpose, 8, SERVER))
        drawn = float(other[0, 0]) / metrics.clip.weights[0] / 3000
        assert found != pytest.approx(drawn, rel=1e-9)


@pytest.mark.parametrize("shape", [(2999, 2), (3000, 1), (3001, 2)])
def test_rows_of_others_are_not_released(shape):
    with pytest.raises(AssertionError, match="are measured"):
        made().measure(torch.zeros(*shape, dtype=torch.float64), 8, Streams(1))


# What is said before the first round.


def test_the_line_before_the_first_round():
    told = made().described()
    assert "3,000 held-out owners after rounds 8, 15, 23, 30" in told
    assert "epsilon 0.5 at delta 1e-05 per client (zero-out, central trust)" in told
    assert "accuracy +-1.03 points, loss +-0.09" in told
    assert made().warning is None


def test_with_a_hundred_owners_one_number_is_within_some_fourteen_points():
    metrics = made(("accuracy",), owners=100, rounds=(30,))
    assert metrics.intervals["accuracy"] == pytest.approx(0.14, abs=0.003)
    assert "after round 30" in metrics.described()
    assert "+-13.8 points" in metrics.described()
    assert "+-13.8 points only" in (metrics.warning or "")


def test_a_wide_loss_alone_is_no_warning():
    assert made(("loss",), owners=10, delta=1e-3).warning is None


@pytest.mark.parametrize(
    ("last", "every", "rounds"),
    [
        (30, None, (8, 15, 23, 30)),
        (4, None, (1, 2, 3, 4)),
        (1, None, (1,)),
        (2, None, (1, 2)),
        (10, 4, (4, 8, 10)),
        (10, 5, (5, 10)),
        (10, 99, (10,)),
    ],
)
def test_the_last_round_is_always_measured_and_round_zero_never(last, every, rounds):
    assert measurement_rounds(last, every) == rounds


# Plans.


def test_held_out_owners_leave_the_clients_claim_as_it_is():
    plain = central(Poisson(0.1), 1000, Fixed(1.0), rounds=30, budget=Budget(2.0, 1e-5))
    plan = plain.measuring(made())
    assert plan.lines == plain.lines
    assert plan.every_line == (*plain.lines, made().line)
    plan.check_lines()
    own = [claim for claim in plan.claims(30) if claim.covers == HELD_OUT]
    assert own[0].epsilon <= 0.5
    assert plan.claims(30)[0] == plain.claims(30)[0]


@pytest.mark.parametrize("sampler", [Poisson(0.1), Everyone()], ids=["poisson", "everyone"])
def test_on_clients_one_claim_covers_both_and_the_training_gets_what_is_left(sampler):
    plan = of_clients(sampler)
    plan.check_lines()
    alone = central(sampler, 1000, Fixed(1.0), rounds=30, budget=Budget(2.0, 1e-5))
    assert plan.release.multiplier > 1.01 * alone.release.multiplier
    first = plan.claims(30)[0]
    assert 1.99 < first.epsilon <= 2.0
    assert first.covers == "updates and metrics"
    event = plan.lines[0].event
    assert isinstance(event, WithMetrics)
    assert (event.metrics.multiplier, event.most) == (plan.metrics.mechanism.multiplier, 4)


def test_no_claim_of_fewer_rounds_leaves_a_measurement_out():
    """Metrics concern everybody, so all planned ones count from the first round on."""
    plan = of_clients(Everyone())
    first = plan.lines[0].claims(1)[0].epsilon
    mu = math.hypot(1 / plan.release.multiplier, 2 / plan.metrics.mechanism.multiplier)
    assert first == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-9)


@pytest.mark.parametrize(
    ("rate", "noise", "count", "metrics", "most"),
    [(0.1, 1.2, 30, 15.0, 4), (0.01, 1.0, 1000, 8.0, 4), (0.5, 3.0, 20, 4.0, 2)],
)
def test_poisson_beside_a_gaussian_is_the_library_s(rate, noise, count, metrics, most):
    event = WithMetrics(PoissonSampled(rate, Gaussian(noise)), Gaussian(metrics), most)
    for relation in (Relation.ADD_REMOVE, Relation.ZERO_OUT):
        ours = epsilon(event, count, 1e-5, relation)
        library = PLDAccountant()
        updates = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        library.compose(updates, count)
        library.compose(dp_accounting.GaussianDpEvent(metrics), most)
        theirs = library.get_epsilon(1e-5)
        assert theirs * (1 - 1e-3) <= ours <= theirs * 1.01


@pytest.mark.parametrize("relation", list(Relation))
def test_sampling_everybody_is_the_closed_form(relation):
    closed = gaussian_epsilon(math.hypot(math.sqrt(10) / 6.0, math.sqrt(3) / 5.0), 1e-5)
    gaussian = WithMetrics(Gaussian(6.0), Gaussian(5.0), 3)
    assert epsilon(gaussian, 10, 1e-5, relation) == pytest.approx(closed, rel=1e-9)
    sampled = WithMetrics(PoissonSampled(1.0, Gaussian(6.0)), Gaussian(5.0), 3)
    assert closed <= epsilon(sampled, 10, 1e-5, relation) <= closed * 1.01


def test_replacement_is_composed_with_the_other_pair():
    event = WithMetrics(PoissonSampled(0.1, Gaussian(2.0)), Gaussian(9.0), 4)
    alone = PoissonSampled(0.1, Gaussian(2.0))
    both, one = (epsilon(e, 50, 1e-5, Relation.REPLACE) for e in (event, alone))
    add = epsilon(event, 50, 1e-5, Relation.ADD_REMOVE)
    assert both > one
    assert both != pytest.approx(add, rel=1e-3)


def test_metrics_without_noise_have_no_epsilon():
    assert epsilon(WithMetrics(Gaussian(5.0), Gaussian(0.0), 1), 1, 1e-5, Relation.ZERO_OUT) == (
        math.inf
    )


def test_metrics_that_leave_nothing_for_the_training():
    with pytest.raises(BadInput, match=r"leaves nothing of budget.epsilon 0\.4"):
        of_clients(Everyone(), total=0.4)


def test_a_cohort_of_fixed_size_has_no_joint_account():
    with pytest.raises(BadInput, match="no accountant knows that beside fixed-sampled"):
        of_clients(FixedSize(10))


def test_metrics_of_clients_that_no_line_counts_are_refused():
    metrics = made(owners=1000, rounds=WHERE, of_clients=True)
    plain = central(Everyone(), 1000, Fixed(1.0), rounds=30, budget=Budget(2.0, 1e-5))
    with pytest.raises(BadInput, match="metrics are measured on the same clients"):
        plain.measuring(metrics).check_lines()


def test_metrics_of_clients_beside_a_claim_that_trusts_nobody_are_refused():
    """Whoever measures sees the records, whatever the event counts."""
    plan = of_clients(Everyone())
    for changed in ({"trust": Trust.LOCAL}, {"relation": Relation.REPLACE}):
        other = replace(plan, lines=(replace(plan.lines[0], **changed),))
        with pytest.raises(BadInput, match="by somebody who sees them"):
            other.check_lines()


def test_metrics_of_clients_with_more_noise_on_paper_are_refused():
    plan = of_clients(Everyone())
    loud = made(owners=1000, target=1.0, rounds=WHERE, of_clients=True)
    with pytest.raises(BadInput, match="are measured on the same clients"):
        plan.measuring(loud).check_lines()
    more = made(owners=1000, rounds=tuple(range(1, 31)), of_clients=True)
    often = PricedMetrics(
        *(NAMES, 1000, True, 4.6, plan.metrics.mechanism),
        more.line.__class__(**{**vars(more.line), "event": plan.metrics.line.event}),
    )
    with pytest.raises(BadInput, match="30 times metrics"):
        plan.measuring(often, 1).check_lines()


def test_nothing_claimed_of_the_training_nothing_priced():
    with pytest.raises(BadInput, match="nothing is claimed of the training"):
        unprotected(Everyone(), 100, rounds=3).measuring(made())


def test_where_the_budget_ends_the_training_early_the_last_round_is_still_measured():
    plan = central(
        *(Everyone(), 1000, Fixed(1.0)), rounds=30, budget=Budget(2.0, 1e-5), multiplier=6.0
    )
    assert plan.permitted < 30
    assert plan.measuring(made()).metrics.rounds[-1] == plan.permitted


def test_secure_metrics_pay_for_their_sampler():
    budget = planned_for(Budget(0.5, 1e-5))
    metrics = made(delta=budget.delta)
    plain = central(
        *(Poisson(0.1), 1000, Fixed(1.0)), rounds=30, budget=planned_for(Budget(2.0, 1e-5))
    )
    plan = with_secure_noise(plain.measuring(metrics), 100, diagnostics=False)
    line = plan.metrics.line
    assert line.noise is NoiseSource.SECURE
    assert line.slip == pytest.approx(1e-5 * SLIP)
    assert line.budget.delta == pytest.approx(1e-5)
    assert plan.claims(30)[-1].noise is NoiseSource.SECURE


def test_every_claim_says_what_the_plan_assumes():
    plan = of_clients(Everyone()).assuming("the moon is full")
    assert all("the moon is full" in claim.assumptions for claim in plan.claims(3))


def test_a_person_with_two_clients_moves_updates_and_metrics_by_both():
    plan = of_clients(Everyone())
    mu = math.hypot(math.sqrt(30) / plan.release.multiplier, 2 / plan.metrics.mechanism.multiplier)
    found = plan.claims(30)[0].for_units(2).epsilon
    assert found == pytest.approx(gaussian_epsilon(2 * mu, 1e-5), rel=1e-6)
