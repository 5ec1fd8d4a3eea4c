"""What group privacy certifies against poisoning."""

import math
from dataclasses import replace

import pytest

import fedveil as fv
from fedveil.attacks.certificate import bound, certificate, group, in_words


def claim(epsilon, delta=1e-5):
    plan = fv.central(
        fv.samplers.Everyone(),
        100,
        fv.clips.Fixed(1.0),
        rounds=1,
        budget=fv.Budget(math.inf, 1e-5),
        multiplier=9.0,
    )
    return replace(plan.claims(1)[0], epsilon=epsilon, delta=delta)


def test_a_group_composes_neighbour_by_neighbour():
    """delta of k + 1 is delta + e^eps delta of k."""
    epsilon, delta = 0.7, 1e-4
    total = 0.0
    for size in range(1, 6):
        total = delta + math.exp(epsilon) * total
        assert group(epsilon, delta, size) == pytest.approx((size * epsilon, total))
    assert group(0.0, 0.1, 3) == pytest.approx((0.0, 0.3))
    assert group(100.0, 1e-5, 50)[1] == 1.0


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 0.9, 1.0])
def test_the_bound_is_met_by_randomised_response(rate):
    """Of (eps, 0)-neighbours none can exceed it, and the best of them reaches it."""
    epsilon = 0.8
    most = bound(claim(epsilon, 0.0), 1, rate)
    best = 0.0
    for k in range(1001):  # rates (p, p') that are e^eps close both ways
        other = k / 1000
        near = other <= math.exp(epsilon) * rate + 1e-12
        far = 1 - rate <= math.exp(epsilon) * (1 - other) + 1e-12
        best = max(best, other if near and far else 0.0)
    assert most == pytest.approx(best, abs=2e-3)


def test_more_attackers_are_certified_less():
    small = claim(0.2)
    found = certificate(small, 0.01)
    assert found is not None
    attackers, most = found
    assert attackers > 5
    assert bound(small, attackers, 0.01) == most <= 0.99 < bound(small, attackers + 1, 0.01)
    assert certificate(claim(8.0), 0.01) is None


def test_words_say_for_whom_and_for_whom_not():
    assert "certifies nothing" in in_words(claim(8.0), 0.01, drawn=True)
    assert "at most" in in_words(claim(0.2), 0.01, drawn=True)
    assert "uninvited" in in_words(claim(0.2), 0.01, drawn=False)
    assert "nothing is claimed" in in_words(None, 0.01, drawn=True)
    local = replace(claim(0.2), trust=fv.claims.Trust.LOCAL)
    assert "add their own noise" in in_words(local, 0.01, drawn=True)
    assert "whole clients" in in_words(replace(local, unit=fv.claims.Unit.RECORD), 0.01, drawn=True)
