"""Noise in shares with dropouts: every sum that can be handed on has the noise that is accounted.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.masking.rehearsal import rehearse
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Trust
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.noise.grid import LARGEST_SUM, gaussian_int
from fedveil.privacy.noise.secure_random import SecureRandom
from fedveil.privacy.releases.secure_sum import MOST_SITES, SecureSum, least_threshold
from fedveil.privacy.releases.sites import PART, WHOLE, SiteNoise, sites

ALARM = 1e-6
FREE = Budget(math.inf, 1e-5)


def plan_of(population=5, share=PART, multiplier=2.0, **more):
    given = {"records": 900, "rate": 1.0, "rounds": 20, "budget": FREE, **more}
    return sites(population, 1.0, share=share, multiplier=multiplier, **given)


@pytest.mark.parametrize(("threshold", "honest"), [(3, 5), (4, 4), (5, 3), (5, 5)])
def test_released_noise_has_the_accounted_variance_for_every_number_of_dropouts(threshold, honest):
    """Of the sites that answer, as many are dishonest, and add nothing, as may be."""
    plan = plan_of(threshold=threshold, honest=honest)
    (line, own_line), steps, words = plan.lines, 2.0**20, 4000
    assert isinstance(line.event, Gaussian)
    own = plan.release.noisy.multiplier
    assert own_line.event == Gaussian(own)
    for answering in range(threshold, 6):
        silent = 5 - honest
        shares = [
            gaussian_int(SecureRandom(), own * steps, words)
            if site >= silent
            else np.zeros(words, dtype=np.int64)
            for site in range(answering)
        ]
        vectors = [*shares, *[None] * (5 - answering)]
        released = rehearse(vectors, threshold, honest, int(LARGEST_SUM)) / steps
        square = float((released**2).sum())
        assert stats.chi2.cdf(square / line.event.multiplier**2, words) > ALARM
        adding = answering - silent
        exact = square / (own**2 * adding)
        assert ALARM < stats.chi2.cdf(exact, words) < 1 - ALARM
        if answering == threshold:
            assert own * math.sqrt(adding) == pytest.approx(line.event.multiplier)


@pytest.mark.parametrize("population", [3, 4, 5, 10, 100])
def test_shares_follow_from_the_least_number_of_honest_sites(population):
    for honest in range(population // 2 + 2, population + 1):
        for threshold in range(least_threshold(population, honest), population + 1):
            plan = plan_of(population, threshold=threshold, honest=honest)
            divisor = threshold - (population - honest)
            assert plan.release.noisy.multiplier == 2.0 / math.sqrt(divisor)
            assert plan.release.channel.minimum == threshold
            plan.check_lines()
            if population > 10 and threshold > population - 3:
                break


def test_the_least_threshold_is_the_least_that_is_not_refused():
    for population in range(3, 30):
        for honest in range(population // 2 + 1, population + 1):
            least = least_threshold(population, honest)
            if least > population:
                continue
            SecureSum(population, least, honest)
            with pytest.raises(BadInput):
                SecureSum(population, least - 1, honest)


def test_honest_majorities_are_needed_at_the_least():
    """With two of five honest no threshold protects."""
    assert least_threshold(5, 1) == 5
    for threshold in range(1, 6):
        with pytest.raises(BadInput):
            SecureSum(10, 2 * threshold, 0)
    with pytest.raises(BadInput, match="use at least 4"):
        SecureSum(4, 3, 2)


def test_claims_say_whom_they_count_on():
    strict = plan_of(threshold=4, honest=4).lines[0]
    assert strict.trust is Trust.SECURE_SUM
    seen, noise, answers, *_ = strict.assumptions
    assert "only one sum a round, of 4 or more of 5 sites' reports (a secure sum)" in seen
    assert noise == "4 of 5 sites add their noise honestly, and keep it to themselves"
    assert answers == "whether a site answers does not depend on its records"
    everyone = plan_of().lines[0].assumptions
    assert everyone[0] == "the server sees only the sum of all sites' reports (a secure sum)"
    assert everyone[1] == "all 5 sites add their noise honestly, and keep it to themselves"


def test_a_plan_says_how_much_noise_the_smallest_sum_has():
    plan = plan_of(threshold=3)
    text = plan.release.describe(plan.lines)
    assert text.endswith("1.155, at each of 5 sites, 2 or more in every sum of 3 or more")
    round = SimpleNamespace(clip=SimpleNamespace(value=1.0))
    together = plan.release.noisy.multiplier * math.sqrt(5)
    assert plan.release.noise_length(round, 4) == pytest.approx(2 * together)
    assert plan_of().release.noise_length(round, 4) == pytest.approx(2 * 2.0)


def test_plans_that_claim_the_noise_of_more_sites_than_are_sure_to_answer_are_refused():
    plan, other = plan_of(threshold=3), plan_of(threshold=3, multiplier=3.0)
    from dataclasses import replace

    with pytest.raises(BadInput, match="noise of 2 clips is added"):
        replace(plan, lines=other.lines).check_lines()
    own = replace(plan.lines[1], event=Gaussian(2.0))
    with pytest.raises(BadInput, match=r"noise of 1\.1547 clips is added"):
        replace(plan, lines=(plan.lines[0], own)).check_lines()


@pytest.mark.parametrize("given", [{"threshold": 3}, {"honest": 5}, {"masks": True}])
def test_thresholds_are_for_shares(given):
    with pytest.raises(BadInput, match="share is 'whole'"):
        plan_of(share=WHOLE, **given)


def test_no_sum_overflows():
    """The bounds of docs/proofs/secure-sum.md: records, and the noise of all sites."""
    largest_share = 40 * 2**32
    assert LARGEST_SUM + MOST_SITES * largest_share < 2**63
    with pytest.raises(BadInput):
        SiteNoise(2.0, 0.5, 2, 90, PART)
