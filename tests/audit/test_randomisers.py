"""Views of every kind of plan: what is seen, and that it stays below the claim on fixed seeds.

False-alarm rate 1e-4 for each finding.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

import fedveil as fv
from fedveil.audit import randomisers
from fedveil.audit.bounds import Counts
from fedveil.audit.observations import (
    client_views,
    line_claim,
    server_views,
    strict_line,
    worst_direction,
)
from fedveil.audit.randomisers import Randomiser, evidence_of
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Accountant, Trust
from fedveil.privacy.clip import Clip, Norm
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.releases.central_sum import central_sum
from fedveil.privacy.releases.secure_sum import SecureSum
from fedveil.privacy.releases.sites import PART, sites
from fedveil.privacy.sampling import OwnCoins

BUDGET = fv.Budget(2.0, 1e-5)
CLIENTS = 50


def local(schedule, **more):
    settings = {"laplace": False, "rounds": 2, "budgets": (BUDGET,), **more}
    return fv.client_noise(fv.samplers.Everyone(), CLIENTS, schedule, **settings)


def test_reports_have_the_signal_and_the_noise_of_the_plan():
    """In clips: -1 then +1, what is known +1 then -1; the spread is the multiplier times two."""
    plan = local(fv.clips.Fixed(0.3))
    ((mine, known, told),) = client_views(plan, Streams(1), -1.0, 2, 20_000)
    spread = 2 * plan.release.multiplier
    assert known.shape == (2, *mine.shape) == (2, 2, 20_000)
    near = {"atol": 5 * spread / 20_000**0.5}
    assert np.allclose(mine.mean(axis=1), [-1, 1], **near)
    assert np.allclose(known.mean(axis=2), [[1, -1], [1, -1]], **near)
    assert np.allclose([mine.std(axis=1), *known.std(axis=2)], spread, rtol=0.03)
    both = np.concatenate([mine[None], known]).reshape(6, -1)
    assert np.allclose(np.corrcoef(both), np.eye(6), atol=5 / 20_000**0.5)  # all noise is its own
    assert not told.any()


def test_sums_have_the_signal_and_the_noise_of_the_plan():
    plan = fv.central(
        fv.samplers.Poisson(0.1), CLIENTS, fv.clips.Fixed(0.3), rounds=3, budget=BUDGET
    )
    found = server_views(plan, Streams(1), 1.0, 2, 20_000)
    spread = plan.release.multiplier
    assert np.allclose(found.mean(axis=1), [1, -1], atol=5 * spread / 20_000**0.5)
    assert np.allclose(found.std(axis=1), spread, rtol=0.03)


def test_worst_directions_are_as_long_as_the_norm_allows():
    assert float(worst_direction(Clip(1.0), 4).norm()) == pytest.approx(1.0)
    assert float(worst_direction(Clip(1.0), 4).sum()) == 0.0
    assert worst_direction(Clip(1.0, Norm.L1), 4).tolist() == [1, 0, 0, 0]
    assert worst_direction(Clip(1.0), 1).tolist() == [1]


PLANS = {
    "a clip that the server watches": lambda: fv.central(
        *(fv.samplers.Poisson(0.5), CLIENTS, fv.clips.Quantile(1.0, 0.5, noise=8.0)),
        rounds=2,
        budget=BUDGET,
    ),
    "noise of their own": lambda: local(
        fv.clips.Fixed(1.0),
        budgets=(fv.Budget(2.0, 1e-5), fv.Budget(6.0, 1e-5)),
        group_of=np.arange(CLIENTS) % 2,
    ),
    "a histogram of norms": lambda: local(
        fv.clips.Median(0.5, -3, 3, 1, fv.Budget(1.0, 1e-6)), rounds=1
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_are_less_common(name):
    found = list(Randomiser(draws=300).findings(PLANS[name]()))
    assert found
    assert not any(finding.violated for finding in found)
    watching = [f for f in found if f.what.endswith("what the clip watches")]
    assert len(watching) == (name != "noise of their own")


def test_every_group_is_held_against_its_own_claim():
    """The larger epsilon at a far smaller delta has more noise, and its line is the first."""
    budgets = (fv.Budget(2.0, 1e-9), fv.Budget(1.9, 1e-2))
    plan = local(fv.clips.Fixed(1.0), budgets=budgets, group_of=np.arange(CLIENTS) % 2)
    found = list(Randomiser(draws=5000).findings(plan))
    assert not any(finding.violated for finding in found)
    assert [finding.claim.delta for finding in found] == [1e-2, 1e-2, 1e-9, 1e-9]
    assert all(finding.lower > finding.claim.epsilon / 2 for finding in found)


def test_draws_that_are_counted_have_no_say_in_the_directions(monkeypatch):
    """What is watched is put in units of its spread: of the draws that choose alone."""
    plan = PLANS["a clip that the server watches"]()
    generator, seen = np.random.default_rng(0), []
    views = {sign: generator.normal(size=(2, 100)) for sign in (0.0, 1.0)}

    def captured(out, in_, worth):
        seen.append(in_[:, 0])
        return Counts(5, 10, 5, 10)

    monkeypatch.setattr(randomisers.bounds, "count_guesses", captured)
    monkeypatch.setattr(
        randomisers.observations, "statistic_views", lambda plan, _, sign, draws: views[sign]
    )
    for _ in range(2):
        Randomiser(draws=100)._statistic(plan, strict_line(plan))
        views[1.0][:, 50:] *= 7
    np.testing.assert_array_equal(seen[0], seen[1])


@pytest.mark.slow
def test_shuffled_reports_are_told_apart_as_well_as_one():
    """What n reports hide is found from how the coin of one must be: half of the claim and more."""
    ranges = Ranges(0.0, 0.5, (64,), adaptive=False, perturb=Perturb.UPDATE)
    free = fv.Budget(math.inf, 1e-5)
    plan = fv.two_point(
        fv.samplers.Everyone(), 100, ranges, epsilon=1.0, rounds=1, budget=free, shuffled=50
    )
    one, shuffled = Randomiser(draws=50_000).findings(plan)
    assert one.claim.epsilon == 1.0
    assert 0.4 < shuffled.claim.epsilon < 0.7
    assert shuffled.claim.epsilon / 2 < shuffled.lower < shuffled.claim.epsilon


def test_what_is_claimed_decides_how_it_is_held_against():
    plan = fv.central(
        fv.samplers.Poisson(0.1), CLIENTS, fv.clips.Fixed(1.0), rounds=3, budget=BUDGET
    )
    line = strict_line(plan)
    claim = line_claim(line, 3)
    assert claim.epsilon == pytest.approx(2.0, abs=2e-3)
    (first, *_) = Randomiser(draws=300).findings(plan)
    assert first.claim.epsilon > claim.epsilon  # of a client that is known to take part
    counts = first.evidence.guess_counts
    assert evidence_of(line, 3, claim, counts).bound_name.startswith("the claimed release")
    pure = strict_line(local(fv.clips.Fixed(1.0, Norm.L1), laplace=True))
    assert line_claim(pure, 1).accountant is Accountant.PURE
    assert line_claim(pure, 1).delta == 0


def test_plans_without_a_claim_have_no_findings():
    assert list(Randomiser().findings(fv.unprotected(fv.samplers.Everyone(), 5, rounds=1))) == []
    with pytest.raises(BadInput, match="--draws is 5"):
        Randomiser(draws=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shares", "bits"])
def test_a_share_is_held_against_the_line_about_all_others(name, monkeypatch):
    """A client's report has its own share of the noise alone. With less, the audit says so."""
    budget = fv.Budget(1.0, 1e-5)
    if name == "shares":
        plan = central_sum(
            *(fv.samplers.Poisson(0.5), 5, fv.clips.Fixed(1.0)),
            threshold=3,
            honest=5,
            rounds=1,
            budget=budget,
        )
        trusts = {Trust.SITE, Trust.SECURE_SUM}
    else:
        clip, summed = fv.clips.Quantile(1.0, 0.5, noise=12.0), SecureSum(CLIENTS, 40, 50)
        plan = local(clip, rounds=1, budgets=(budget,), secure_sum=summed)
        trusts = {Trust.LOCAL}
    plan.check_lines()
    found = list(Randomiser(draws=4000).findings(plan))
    assert found
    assert {finding.claim.trust for finding in found} == trusts
    assert not any(finding.violated for finding in found)
    if name == "shares":
        half = replace(plan, release=replace(plan.release, multiplier=plan.release.multiplier / 3))
        assert any(f.violated for f in Randomiser(draws=4000).findings(half))
        monkeypatch.setattr(OwnCoins, "coins", lambda self, ids, round, streams: None)
        assert any(f.violated for f in Randomiser(draws=4000).findings(plan))
    else:
        half = replace(plan, clip_schedule=replace(clip, noise=0.5))
        assert any(f.violated for f in Randomiser(draws=4000).findings(half))


def test_the_smallest_sum_of_honest_sites_is_held_against_the_line_about_the_sum():
    """One of five sites sides with the server, and one drops out: three shares hide a record."""
    plan = sites(
        *(5, 1.0),
        records=100,
        rate=1.0,
        share=PART,
        rounds=1,
        budget=fv.Budget(2.0, 1e-5),
        threshold=4,
        honest=4,
    )
    assert plan.release.channel.divisor == 3
    found = list(Randomiser(draws=4000).findings(plan))
    assert [finding.claim.trust for finding in found] == [Trust.SECURE_SUM, Trust.SITE]
    assert "one sum of 3 honest clients' reports" in found[0].what
    assert not any(finding.violated for finding in found)
    assert 0.2 * found[0].claim.epsilon < found[0].lower
    less = replace(plan.release, multiplier=plan.release.multiplier / 3)
    first, _ = Randomiser(draws=4000).findings(replace(plan, release=less))
    assert first.violated
