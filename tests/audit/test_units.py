"""A person with several clients, audited with as many canaries: above K times, below the claim.

False alarms: a bound that a claim is held against is wrong with probability 1e-6 at most. The bound
that is above K times is the one at 95 %, and has four standard deviations of room.
"""

import math

import numpy as np
import pytest

from fedveil.audit.bounds import GeneralBound
from fedveil.audit.canary_clients import Canaries, _likelihood_scores
from fedveil.audit.observations import strict_line
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe

ALPHA = 1e-6
BASE = ("engine.workers=1", "data.clients=600", "client.epochs=1", "rounds=2", "budget.delta=1e-5")


def training(*settings):
    return build(load_recipe("central", [*BASE, *settings]))


@pytest.mark.slow
def test_eight_clients_of_one_person_are_found_above_eight_times_and_below_their_own_claim():
    """Gaussian noise, everybody in every round: 1 per client, 10.9 for eight of them."""
    audited = training("sample.kind=all", "budget.epsilon=1")
    single = strict_line(audited.plan).claims(2)[0]
    found = list(Canaries(3000, units=8).findings(audited))
    assert [finding.what for finding in found] == ["the final model", "all rounds"]
    for finding in found:
        assert finding.claim == single.for_units(8)
        assert single.epsilon < finding.evidence.lower_bound(ALPHA) <= finding.claim.epsilon
        assert not finding.violated
    assert found[1].lower > 8 * single.epsilon


@pytest.mark.slow
def test_sampled_clients_of_one_person_stay_below_their_claim():
    audited = training("sample.rate=0.5", "budget.epsilon=2")
    single = strict_line(audited.plan).claims(2)[0]
    found = list(Canaries(2000, units=4).findings(audited))
    for finding in found:
        assert finding.claim == single.for_units(4)
        bound = GeneralBound(finding.evidence.guess_counts, finding.claim.delta)
        assert bound.lower_bound(ALPHA) <= finding.claim.epsilon


@pytest.mark.slow
def test_sampled_clients_of_one_person_are_found_above_what_one_of_them_is_promised():
    audited = training("sample.rate=0.5", "budget.epsilon=2")
    single = strict_line(audited.plan).claims(2)[0]
    _, finding = Canaries(4000, units=6).findings(audited)
    assert single.epsilon < finding.evidence.lower_bound(ALPHA) <= finding.claim.epsilon


def test_scores_of_sampled_clients_are_the_ratio_of_the_mixtures():
    line = strict_line(training("sample.rate=0.3", "budget.epsilon=2").plan)
    noise, along = line.event.event.multiplier, np.linspace(-3, 6, 7)
    for units in (1, 3):
        with_ = sum(
            math.comb(units, j)
            * (0.3**j * 0.7 ** (units - j))
            * np.exp(-((along - j) ** 2) / (2 * noise**2))
            for j in range(units + 1)
        )
        wanted = np.log(with_ / np.exp(-(along**2) / (2 * noise**2)))
        assert _likelihood_scores(line, along, units) == pytest.approx(wanted, abs=1e-9)


def test_a_person_needs_at_least_one_client_and_fewer_than_there_are():
    with pytest.raises(BadInput, match="units is 0"):
        Canaries(units=0)
    audited = training("sample.kind=all", "budget.epsilon=1")
    assert audited.plan.lines[0].relation is Relation.ZERO_OUT
    with pytest.raises(BadInput, match="600 are too few for one of 301"):
        list(Canaries(units=301).findings(audited))
