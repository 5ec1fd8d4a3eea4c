"""Whole runs: who takes part, and which coins clients toss, is what the ledger was charged for.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import math

import numpy as np
import pytest
from scipy.stats import binom, chi2

from fedveil.privacy.ledger.file import read_participations

from .conftest import DROWNED, FALSE_ALARM, SOURCES

SHOWN = ("evaluate.diagnostics=true",)

# --- cohorts ---


@pytest.mark.parametrize("source", SOURCES)
def test_poisson_cohorts_have_the_charged_rate(follow, source):
    settings = ("rounds=30", "data.clients=40", "client.epochs=1", "sample.rate=0.3")
    seen = follow("central", *settings, *DROWNED, *SHOWN, f"noise.source={source}")
    rate, cohorts = seen.event.rate, seen.cohorts()
    assert rate == 0.3
    everyone = binom(40 * len(cohorts), rate)
    assert everyone.ppf(FALSE_ALARM / 4) <= cohorts.sum() <= everyone.isf(FALSE_ALARM / 4)
    spread = ((cohorts - rate * 40) ** 2).sum() / (40 * rate * (1 - rate))
    low, high = chi2.ppf([FALSE_ALARM / 4, 1 - FALSE_ALARM / 4], len(cohorts))
    assert 0.8 * low <= spread <= 1.2 * high


def test_secret_cohorts_do_not_follow_from_the_seed(follow):
    """Two cohorts are equally large once in six times, ten pairs of them once in 10^7."""
    settings = ("data.clients=12", "rounds=10", "client.epochs=1", "noise.source=secure")
    first, second = (follow("central", *settings, *DROWNED, *SHOWN) for _ in range(2))
    assert not np.array_equal(first.cohorts(), second.cohorts())


def test_secret_cohorts_of_fixed_size_do_not_follow_from_the_seed(watch, tmp_path):
    """The ledger says who took part in local runs."""
    few = ("data.clients=40", "rounds=4", "sample.size=10", "sample.max_participations=none")
    settings = (*few, "noise.source=secure")
    for out in "ab":
        seen = watch("ldp-sgd", *settings, *DROWNED, out=out)
        assert (seen.cohorts() == 10).all()
    first, second = (read_participations(tmp_path / out / "ledger.db") for out in "ab")
    assert first.sum() == second.sum() == 40
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("recipe", ["ldp-sgd", "dp-sgd"])
def test_nobody_takes_part_more_often_than_the_recipe_allows(watch, tmp_path, recipe):
    cap = ("rounds=11", "data.clients=20", "sample.size=5", "sample.max_participations=3")
    seen = watch(recipe, *cap, *DROWNED)
    counts = read_participations(tmp_path / "run" / "ledger.db")
    assert counts.max() == 3
    assert seen.lines[0]["cap"] == 3
    assert (seen.cohorts() == 5).all()


# --- bits of clients ---


@pytest.mark.parametrize("source", SOURCES)
def test_clients_toss_a_coin_of_their_own_in_every_round(follow, source):
    """With a tiny clip every update needs clipping: what is left of the bits is their coins."""
    lr, epsilon, clients = 1e-3, 1.0, 24
    clip = ("clip.kind=quantile", "clip.value=1e-6", f"clip.bit_epsilon={epsilon}")
    more = (f"clip.lr={lr}", "sample.kind=all", "rounds=20", f"data.clients={clients}")
    seen = follow("ldp-sgd", *DROWNED, *clip, *more, f"noise.source={source}")
    assert seen.event.bit.epsilon == epsilon
    keep = 1 / (1 + math.exp(-epsilon))
    shares = -np.diff(np.log(seen.clips())) / lr  # of ones, less 1/2, in the mean over clients
    kept = (1 - (2 * keep - 1) * 2 * shares) / 2 * clients  # clients whose report says "clipped"
    assert np.allclose(kept, kept.round(), atol=1e-3)
    tosses = binom(clients * len(kept), keep)
    assert tosses.ppf(FALSE_ALARM / 4) <= kept.sum() <= tosses.isf(FALSE_ALARM / 4)
    spread = ((kept - keep * clients) ** 2).sum() / (clients * keep * (1 - keep))
    low, high = chi2.ppf([FALSE_ALARM / 4, 1 - FALSE_ALARM / 4], len(kept))
    assert 0.8 * low <= spread <= 1.2 * high


def test_secret_coins_do_not_follow_from_the_seed(follow):
    clip = ("clip.kind=quantile", "clip.value=1e-6", "clip.bit_epsilon=0.5")
    settings = ("data.clients=12", "rounds=10", *clip, "sample.kind=all", "noise.source=secure")
    first, second = (follow("ldp-sgd", *DROWNED, *settings) for _ in range(2))
    assert not np.array_equal(first.clips(), second.clips())
