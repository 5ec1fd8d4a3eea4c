"""AUC, balanced accuracy and hits at few false alarms, beside libraries and simulations."""

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score, roc_curve

from fedveil.audit.findings import Roc, auc, auc_interval, tpr_at
from fedveil.base.errors import BadInput


def drawn(members=300, others=200, shift=0.7, seed=0, ties=False):
    random = np.random.default_rng(seed)
    scores = random.normal(size=members) + shift, random.normal(size=others)
    return Roc(*(np.round(s, 1) if ties else s for s in scores))


@pytest.mark.parametrize("ties", [False, True])
def test_auc_and_curve_are_scikit_learns(ties):
    roc = drawn(ties=ties)
    labels = np.r_[np.ones(300), np.zeros(200)]
    scores = np.r_[roc.member_scores, roc.others]
    assert roc.auc.value == pytest.approx(roc_auc_score(labels, scores))
    false, true = roc.curve
    wanted = roc_curve(labels, scores, drop_intermediate=False)
    assert np.r_[0, false] == pytest.approx(wanted[0])
    assert np.r_[0, true] == pytest.approx(wanted[1])


def test_interval_is_as_wide_as_auc_varies():
    """DeLong's standard error beside 1,500 simulations: to 10 %, five of its own deviations."""
    found = [drawn(60, 40, seed=seed).auc for seed in range(1500)]
    spread = np.std([each.value for each in found])
    told = np.mean([(each.high - each.low) / (2 * 1.959964) for each in found])
    assert told == pytest.approx(spread, rel=0.1)


def test_interval_of_pairs_knows_that_they_are_pairs():
    """A record's two scores go together: the interval is that of the simulations, not DeLong's."""

    def one(seed):
        random = np.random.default_rng(seed)
        own = random.normal(size=50)
        return Roc(own + 0.3 * random.normal(size=50), -own + random.normal(size=50), paired=True)

    found = [one(seed).auc for seed in range(1500)]
    spread = np.std([each.value for each in found])
    told = np.mean([(each.high - each.low) / (2 * 1.959964) for each in found])
    assert told == pytest.approx(spread, rel=0.1)
    apart = Roc(one(0).member_scores, one(0).others).auc
    assert apart.high - apart.low < 0.8 * (one(0).auc.high - one(0).auc.low)


def test_hits_are_counted_where_no_more_than_the_rate_are_false_alarms():
    others = np.arange(1000.0)
    members = np.array([*np.full(30, 998.5), *np.full(20, 990.5), *np.full(150, 0.0)])
    roc = Roc(members, others)
    for rate, hits, alarms in ((0.001, 30, 1), (0.01, 50, 10), (0.0, 0, 0)):
        found = roc.hits(rate)
        interval = binomtest(hits, 200).proportion_ci(0.95, "exact")
        assert (roc.others >= roc.score_threshold(rate)).sum() <= alarms
        assert found.value == hits / 200
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_equal_scores_are_above_a_threshold_together():
    """Half of the others share the top score: no threshold lets one of them through alone."""
    roc = Roc(np.full(10, 1.0), np.r_[np.full(500, 1.0), np.zeros(500)])
    assert roc.hits(0.01).value == 0.0


def test_balanced_accuracy_is_not_flattered_by_its_threshold():
    """Where nothing can be told it is 1/2 on average: 400 simulations, five standard errors."""
    found = [drawn(50, 50, shift=0.0, seed=seed).balanced.value for seed in range(400)]
    assert np.mean(found) == pytest.approx(0.5, abs=5 * np.std(found) / 20)
    assert drawn(400, 400, shift=8.0).balanced.value > 0.99


@pytest.mark.parametrize(
    ("members", "others", "paired", "words"),
    [
        ([1.0], [0.0, 1.0], False, "1 members and 2 others"),
        ([1.0, np.nan], [0.0, 1.0], False, "not finite"),
        ([1.0, 2.0, 3.0], [0.0, 1.0], True, "in pairs"),
    ],
)
def test_scores_that_tell_nothing_are_refused(members, others, paired, words):
    with pytest.raises(BadInput, match=words):
        Roc(np.array(members), np.array(others), paired)


def test_names():
    assert [m.name for m in drawn().measures] == [
        *("AUC", "balanced accuracy", "TPR at 0.1 % FPR", "TPR at 1 % FPR")
    ]
    assert tpr_at(0.05) == "TPR at 5 % FPR"


def test_the_area_is_a_count_of_pairs():
    generator = np.random.default_rng(0)
    scores, has = generator.integers(6, size=40).astype(float), generator.random(40) < 0.4
    pairs = [(a > b) + (a == b) / 2 for a in scores[has] for b in scores[~has]]
    assert auc(scores, has) == pytest.approx(np.mean(pairs))


def test_ends_of_the_scale():
    has = np.array([False] * 5 + [True] * 5)
    assert auc(np.arange(10.0), has) == 1.0
    assert auc(-np.arange(10.0), has) == 0.0
    assert auc(np.zeros(10), has) == 0.5
    low, high = auc_interval(1.0, 5, 5, 0.95)
    assert 0.4 < low < 0.95
    assert high == 1.0
    assert auc_interval(0.0, 5, 5, 0.95) == pytest.approx((0.0, 1 - low))


@pytest.mark.parametrize("apart", [0.0, 1.0, 2.5])
def test_intervals_hold(apart):
    """Of 400 at 95 %, fewer than 345 hold once in a million (binomial)."""
    generator = np.random.default_rng(1)
    true, has = float(ndtr(apart / 2**0.5)), np.arange(40) % 2 == 0
    held = 0
    for _ in range(400):
        scores = generator.normal(size=40) + apart * has
        low, high = auc_interval(auc(scores, has), 20, 20, 0.95)
        held += low <= true <= high
    assert held >= 345
