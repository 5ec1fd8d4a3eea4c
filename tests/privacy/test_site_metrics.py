"""Metrics that sites measure: what one person moves, what is refused, and the intervals."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import HELD_OUT, Relation, Trust, Unit
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.site_metrics import SiteMetrics, site_metrics

NAMES = ("accuracy", "loss")


def of(*names: str, epsilon: float = 1.0, rounds: tuple[int, ...] = (2, 4)) -> SiteMetrics:
    return site_metrics(
        names or NAMES,
        3,
        budget=Budget(epsilon, 1e-5),
        rounds=rounds,
        loss_clip=2.0,
        unit=Unit.PERSON,
    )


def test_the_line_is_about_a_person_of_a_site_and_all_measurements() -> None:
    metrics = of()
    line = metrics.line
    assert (line.unit, line.trust, line.relation) == (Unit.PERSON, Trust.SITE, Relation.ADD_REMOVE)
    assert (line.covers, line.rounds) == (HELD_OUT, (2, 4))
    assert line.event == Gaussian(metrics.mechanism.multiplier)
    claim = line.claims(line.participations(1))[0]
    assert 0.99 < claim.epsilon <= 1.0
    twice = of(rounds=(1, 2, 3, 4, 5, 6, 7, 8)).mechanism.multiplier
    assert twice == pytest.approx(2 * metrics.mechanism.multiplier, rel=1e-3)


@pytest.mark.parametrize("names", [("accuracy", "loss"), ("loss",), ("accuracy", "top-5", "loss")])
def test_weights_have_length_one_and_the_count_is_among_them(names: tuple[str, ...]) -> None:
    metrics = of(*names)
    squares = np.square(metrics.clip.weights)
    assert len(squares) == len(names) + 1 == metrics.width
    assert math.fsum(squares) == pytest.approx(1.0)
    assert squares[-1] == pytest.approx(0.2)
    assert squares[names.index("loss")] == pytest.approx(0.2 if len(names) > 1 else 0.8)
    assert 1.0 <= metrics.clip.sensitivity < 1 + 1e-9


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5, -7.0, 7.0, math.nan, math.inf])
def test_one_more_person_moves_the_sum_by_at_most_the_sensitivity(value: float) -> None:
    """Whatever the means are: the same noise on both sums."""
    metrics, streams = of(), Streams(3)
    few = torch.full((5, 2), 0.3, dtype=torch.float64)
    more = torch.cat([few, torch.full((1, 2), value, dtype=torch.float64)])
    moved = metrics.noisy_sum(more, 2, streams) - metrics.noisy_sum(few, 2, streams)
    assert bool(torch.isfinite(moved).all())
    assert float(moved.norm()) <= metrics.clip.sensitivity
    exchanged = torch.cat([few[:-1], more[-1:]])
    moved = metrics.noisy_sum(exchanged, 2, streams) - metrics.noisy_sum(few, 2, streams)
    assert float(moved.norm()) <= metrics.clip.sensitivity


def test_nobody_and_other_shapes() -> None:
    metrics = of()
    for secure in (False, True):
        streams = Streams(1, secure=secure)
        alone = metrics.noisy_sum(torch.zeros(0, 2), 2, streams)
        assert alone.shape == (3,)
        assert bool((alone != 0).all())
    for shape in ((4, 3), (4,), (2, 4, 2)):
        with pytest.raises(AssertionError, match="means of shape"):
            metrics.noisy_sum(torch.zeros(shape), 2, Streams(1))


def test_each_measurement_has_noise_of_its_own() -> None:
    metrics, means = of(), torch.zeros(3, 2)
    first = metrics.noisy_sum(means, 2, Streams(1))
    assert torch.equal(first, metrics.noisy_sum(means, 2, Streams(1)))
    assert not torch.equal(first, metrics.noisy_sum(means, 4, Streams(1)))
    assert not torch.equal(first, metrics.noisy_sum(means, 2, Streams(2)))


def exact(metrics: SiteMetrics, people: float, *means: float) -> torch.Tensor:
    """The sums of so many people with these means, without noise."""
    return torch.tensor([*(people * m for m in means), people]).double() * torch.tensor(
        metrics.clip.weights
    )


def test_the_mean_is_over_people_whatever_sites_they_are_at() -> None:
    metrics = of()
    sums = [exact(metrics, 3000, 0.9, 0.5), exact(metrics, 1000, 0.5, 0.1)]
    found = metrics.combined(sums, [0, 0])
    assert found["accuracy"] == pytest.approx(0.8)
    assert found["loss"] == pytest.approx(2.0 * 0.4)
    less = metrics.combined(sums, [1000, 1000])
    assert less["accuracy"] == pytest.approx(0.7)
    assert less["accuracy/interval"] > found["accuracy/interval"]
    assert metrics.combined([], []) == {}


def test_so_few_people_that_noise_hides_them_give_no_metrics() -> None:
    metrics = of()
    one = metrics.mechanism.multiplier / metrics.clip.weights[-1]  # a standard deviation of people
    assert metrics.combined([exact(metrics, 2.9 * one, 0.5, 0.5)], [0]) == {}
    assert metrics.combined([exact(metrics, 3.1 * one, 0.5, 0.5)], [0])
    assert metrics.combined([exact(metrics, 3.1 * one, 0.5, 0.5)] * 2, [0, 0])
    assert metrics.combined([exact(metrics, -50 * one, 0.5, 0.5)], [0]) == {}


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        (torch.zeros(2).double(), "another form"),
        (torch.zeros(3), "another form"),
        (torch.tensor([0.0, math.inf, 0.0]).double(), "not finite"),
        (torch.tensor([0.0, math.nan, 0.0]).double(), "not finite"),
        (torch.tensor([-1e3, 0.0, 0.0]).double(), "none that people can have"),
        (torch.tensor([0.0, 0.0, -1e3]).double(), "none that people can have"),
        (torch.tensor([0.0, 1e3, 0.0]).double(), "none that people can have"),
    ],
)
def test_sums_that_no_people_have_are_refused(sums: torch.Tensor, words: str) -> None:
    metrics = of()
    assert words in metrics.refusal(sums)
    assert metrics.refusal(exact(metrics, 1000, 1.0, 1.0)) == ""
    assert metrics.refusal(exact(metrics, 0, 0.0, 0.0)) == ""


def test_honest_sites_are_not_refused() -> None:
    """4,000 measurements of one person, or nobody, at the ends of what they can be."""
    metrics = of()
    for seed in range(1000):
        for means in (torch.zeros(0, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(9, 2)):
            assert metrics.refusal(metrics.noisy_sum(means, 2, Streams(seed))) == ""


def test_intervals_hold_for_95_in_100_measurements() -> None:
    """Of 2,000: 1,846 to 1,953 by chance, at a false-alarm rate of about 1e-6 (5 deviations)."""
    metrics, within = of(epsilon=2.0), {"accuracy": 0, "loss": 0}
    means = torch.tensor([[1.0, 0.2], [1.0, 0.3], [1.0, 0.1], [0.0, 0.8]]).double().repeat(75, 1)
    truth = {"accuracy": 0.75, "loss": 2.0 * 0.35}
    for seed in range(2000):
        sums = [metrics.noisy_sum(means, 2, Streams(3 * seed + site)) for site in range(3)]
        found = metrics.combined(sums, [0] * 3)
        for name in within:
            within[name] += abs(found[name] - truth[name]) <= found[f"{name}/interval"]
    for name, count in within.items():
        assert 1846 <= count <= 1953, name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ()}, "at least one of each is needed"),
        ({"rounds": ()}, "at least one of each is needed"),
        ({"sites": 0}, "at least one of each is needed"),
        ({"unit": Unit.CLIENT}, "sites measure each person or each record"),
        ({"budget": Budget(math.inf, 1e-5)}, "epsilon is inf"),
        ({"loss_clip": 0.0}, "loss_clip is 0"),
    ],
)
def test_what_is_no_measurement_is_refused(changes: dict[str, Any], words: str) -> None:
    said = {"names": NAMES, "sites": 3, "budget": Budget(1.0, 1e-5), "rounds": (1,)}
    with pytest.raises(BadInput, match=words):
        site_metrics(**{**said, "loss_clip": 2.0, "unit": Unit.RECORD, **changes})


def test_noise_and_line_go_together() -> None:
    metrics = of()
    with pytest.raises(BadInput, match="make them with `site_metrics`"):
        replace(metrics, mechanism=GaussianMechanism(1.0))
    with pytest.raises(BadInput, match="make them with `site_metrics`"):
        replace(metrics, line=replace(metrics.line, rounds=()))


def test_fewer_rounds_keep_the_noise_of_all() -> None:
    metrics = of(rounds=(2, 4, 6, 8))
    less = metrics.until(4, 2)
    assert less.rounds == (2, 4)
    assert less.mechanism == metrics.mechanism
    assert less.line.claims(less.line.participations(1))[0].epsilon < 1.0
    with pytest.raises(AssertionError):
        metrics.until(40, 2)


@pytest.mark.parametrize("secure", [False, True])
def test_noise_has_the_size_that_the_line_accounts_for(secure: bool) -> None:
    """Of 6,000 draws of a sum of nobody, the variance; false alarms about once in 1e6 (5 sigma).

    The event is a Gaussian of that multiplier, and one person's row is at most 1 long.
    """
    metrics = of()
    assert isinstance(metrics.line.event, Gaussian)
    draws = torch.cat(
        [metrics.noisy_sum(torch.zeros(0, 2), 2, Streams(k, secure=secure)) for k in range(2000)]
    )
    ratio = float((draws**2).mean()) / metrics.line.event.multiplier**2
    assert abs(ratio - 1) < 5 * math.sqrt(2 / len(draws))
