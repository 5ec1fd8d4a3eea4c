"""Every probability that is accounted is the one that is drawn, to the last digit.

No statistics: the words that decide a draw are put in, just below and just above the threshold. A
test of frequencies would let a rate pass that is some percent too high.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.events import FixedSampled, Gaussian, PoissonSampled
from fedveil.privacy.clip_statistic import ClipStatistic
from fedveil.privacy.noise.mechanisms import TwoPointMechanism
from fedveil.privacy.noise.secure_random import SecureRandom
from fedveil.privacy.noise.streams import Streams, uniform_
from fedveil.privacy.releases.priv_unit import PrivUnitG
from fedveil.training.cohort import CohortData
from fedveil.training.work import poisson_batch
from tests.contracts.enemies import CLIENTS, FREE, central

RATES = [1.0, 0.5, 0.05, 1 / 3, 0.01, 0.97, 1e-9, 1e-12]
GAUSSIAN = Gaussian(1.0)


def in_steps(rate):
    return fv.dp_sgd(
        fv.samplers.Everyone(),
        CLIENTS,
        1.0,
        rate=rate,
        steps=2,
        rounds=2,
        budget=FREE,
        multiplier=2.0,
    )


# --- records of a client, in DP-SGD ---


@pytest.mark.parametrize("rate", RATES)
def test_a_record_joins_a_step_exactly_at_its_rate(monkeypatch, rate):
    """The 53 bits that decide are below floor(rate x 2^53); the 11 others have no say."""
    edge = math.floor(Fraction(rate) * 2**53)
    places = [0, edge - 1, min(edge, 2**53 - 1), 2**53 - 1]
    words = np.array([[place << 11 | low for place in places for low in (0, 2**11 - 1)]], np.uint64)
    monkeypatch.setattr("fedveil.training.work.bits", lambda keys, count: words[:, :count])
    y = np.zeros(words.shape[1], dtype=np.int64)
    x = np.arange(2 * len(y), dtype=np.float32).reshape(-1, 2)
    data = fv.FederatedData.from_clients([("one", x, y)], test=(x[:1] - 9, y[:1]), classes=2)
    cohort = CohortData(data, np.array([0]))
    batch = poisson_batch(in_steps(rate).noisy_steps, cohort, 1, 0, Streams(1))
    joined = {int(i) for i, m in zip(batch.index[0], batch.mask[0], strict=True) if m}
    expected = {n for n, place in enumerate(np.repeat(places, 2).tolist()) if place < edge}
    assert joined == expected


@pytest.mark.parametrize("rate", [0.5, 0.05, 1 / 3])
def test_records_join_with_the_rate_that_is_accounted(rate):
    plan = in_steps(rate)
    assert plan.noisy_steps.rate == rate
    assert plan.lines[0].event.rate == rate
    for other in (math.nextafter(rate, 0), rate / 1.03):
        cheaper = replace(plan.lines[0], event=replace(plan.lines[0].event, rate=other))
        with pytest.raises(BadInput, match="clients take"):
            replace(plan, lines=(cheaper,)).check_lines()


# --- clients of a round ---


class Watching:
    """A generator that notes what it was asked to draw."""

    def __init__(self):
        self.asked = []

    def binomial(self, *arguments):
        self.asked.append(("binomial", *arguments))
        return 7

    def choice(self, population, size, *, replace, shuffle):
        self.asked.append(("choice", population, size, replace))
        return np.arange(size)


class Played(SecureRandom):
    """Words in order."""

    def __init__(self, *words):
        self.left = list(words)

    def words(self, count):
        given, self.left = self.left[:count], self.left[count:]
        return np.array(given, dtype=np.uint64)


class Given:
    """Streams with a source of words, or with a generator, of the test's own."""

    def __init__(self, source=None, generator=None):
        self.secure_random, self._generator = source, generator

    def generator(self, purpose, *parts):
        return self._generator


@pytest.mark.parametrize("rate", RATES)
def test_a_seeded_poisson_cohort_has_the_size_of_its_rate(rate):
    generator = Watching()
    cohort = fv.samplers.Poisson(rate).cohort(1000, 3, Given(generator=generator))
    assert generator.asked == [
        ("binomial", 1000, rate),
        ("choice", 1000, 7, False),
    ]
    assert cohort.tolist() == list(range(7))


@pytest.mark.parametrize("rate", [0.5, 0.05, 1 / 3, 0.01, 0.97, 1e-9])
def test_a_secure_poisson_client_joins_exactly_at_its_rate(rate):
    """Of one client: it stays away if the word is below (1 - rate) 2^64."""
    edge = (1 - Fraction(rate)) * 2**64
    more = [2**63] * 40

    def joins(word):
        return len(fv.samplers.Poisson(rate).cohort(1, 1, Given(Played(word, *more)))) == 1

    assert not joins(math.floor(edge) - 1)
    assert joins(math.ceil(edge))
    assert joins(2**64 - 1)
    assert not joins(0)


def test_a_fixed_cohort_has_its_size_in_every_round():
    sampler, generator = fv.samplers.FixedSize(17), Watching()
    sampler.cohort(100, 1, Given(generator=generator))
    assert generator.asked == [("choice", 100, 17, False)]
    for streams in (Streams(3), Streams(3, secure=True)):
        assert {len(sampler.cohort(100, r, streams)) for r in range(20)} == {17}
        assert {len(fv.samplers.RoundRobin(17).cohort(100, r, Streams(3))) for r in range(20)} == {
            17
        }
    capped = fv.samplers.FixedSize(17, max_participations=2)
    assert len(capped.cohort(100, 1, Streams(3), np.zeros(100, dtype=np.int64))) == 17


def test_samplers_are_accounted_with_the_numbers_that_they_draw():
    assert fv.samplers.Poisson(0.03).event(GAUSSIAN, 10) == PoissonSampled(0.03, GAUSSIAN)
    assert fv.samplers.FixedSize(3).event(GAUSSIAN, 10) == FixedSampled(3, 10, GAUSSIAN)
    assert fv.samplers.RoundRobin(3).event(GAUSSIAN, 10) == GAUSSIAN
    assert fv.samplers.RoundRobin(3).participation_share(10) == Fraction(3, 10)
    assert fv.samplers.Poisson(0.03).expected(10) == 0.03 * 10


def test_a_plan_with_a_rate_that_is_a_digit_too_small_is_refused():
    plan = central(sampler=fv.samplers.Poisson(0.3))
    event = plan.lines[0].event
    assert event.rate == 0.3
    cheaper = replace(plan.lines[0], event=replace(event, rate=math.nextafter(0.3, 0)))
    with pytest.raises(BadInput, match="Poisson"):
        replace(plan, lines=(cheaper, *plan.lines[1:])).check_lines()


# --- coins inside a report ---


def drawing(monkeypatch, module, values):
    def given(out, keys):
        return out.copy_(torch.tensor(values, dtype=out.dtype).reshape(out.shape))

    monkeypatch.setattr(f"{module}.uniform_", given)


@pytest.mark.parametrize("flip", [0.1, 1.0, 4.0])
def test_a_flipped_bit_is_kept_exactly_as_often_as_is_accounted(monkeypatch, flip):
    """P(keep) / P(flip) <= e^flip for draws that are multiples of 2^-52, and close to it."""
    watched = ClipStatistic(1, 1.0, "bits", "seen", "key", 0.5, "remedy", flip=flip)
    keep = 1 / (1 + math.exp(-flip))
    edge = 2 * keep - 1 - 2.0**-22
    draws = [edge - 2.0**-40, edge, edge + 2.0**-40, -1.0]
    drawing(monkeypatch, "fedveil.privacy.clip_statistic", draws)
    found = watched.randomise_bits(torch.ones(4, 1, dtype=torch.float64), np.zeros(4, np.uint64))
    assert (found[:, 0] > 0).tolist() == [True, False, False, True]
    below = Fraction(math.floor(Fraction(edge) * 2**52) + 1 + 2**52, 2**53)
    assert below / (1 - below) <= Fraction(math.exp(flip))
    assert float(below / (1 - below)) > math.exp(flip) * (1 - 1e-4)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 5.0])
def test_a_two_point_report_is_high_exactly_as_often_as_is_accounted(monkeypatch, epsilon):
    mechanism = TwoPointMechanism(epsilon)
    most = 1 / mechanism.kappa - 2.0**-22
    step = 2.0**-23
    draws = [math.floor(most / step) * step + k * step for k in (-1, 0, 1, 2)]
    drawing(monkeypatch, "fedveil.privacy.noise.mechanisms", [draws])
    rows = torch.full((1, 4), 100.0)  # clamped to the end of the range
    mechanism.report_(rows, torch.zeros(4), torch.ones(4), np.zeros(1, np.uint64))
    assert (rows[0] > 0).tolist() == [True, True, False, False]
    high = Fraction(math.floor(most / step) + 1 + 2**23, 2**24)
    assert high / (1 - high) <= Fraction(math.exp(epsilon))
    assert float(high / (1 - high)) > math.exp(epsilon) * (1 - 1e-3)


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_private_unit_vector_is_on_its_cap_exactly_as_often_as_is_accounted(epsilon):
    mechanism = PrivUnitG(epsilon, 10)
    edge = 2 * mechanism.p - 1
    sides = torch.tensor([edge - 2.0**-50, edge, edge + 2.0**-50, -1.0], dtype=torch.float64)
    along = mechanism._draw_t(sides, torch.zeros(4, dtype=torch.float64))
    assert (along >= mechanism.tau).tolist() == [True, False, False, True]


def test_uniforms_are_the_leading_bits_of_their_words(monkeypatch):
    words = np.array([[0, 2**63, 2**64 - 1, 2**63 - 1]], dtype=np.uint64)
    monkeypatch.setattr("fedveil.privacy.noise.streams.bits", lambda keys, count: words)
    keys = np.zeros(1, np.uint64)
    found = uniform_(torch.empty(1, 4, dtype=torch.float64), keys)[0].tolist()
    assert found == [-1.0, 0.0, 1 - 2.0**-52, -(2.0**-52)]
    found = uniform_(torch.empty(1, 4), keys)[0].tolist()
    assert found == [-1.0, 0.0, 1 - 2.0**-23, -(2.0**-23)]
