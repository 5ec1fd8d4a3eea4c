"""Shipped recipes against their own claims: never above, and not far below where it counts.

False alarms: 1 % over all recipes together, on fixed seeds.
"""

import pytest

from fedveil.audit.canary_clients import Canaries
from fedveil.audit.randomisers import Randomiser, plans, self_test
from fedveil.audit.record_audits import OneRunAudit, sensitivity_findings, standardisation_findings
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe, shipped_recipes

FALSE_ALARM = 0.01
PRIVATE = ("central", "dp-fedavg", "dp-fedavg-gaussian", "dp-sgd", "ldp-fl", "ldp-sgd", "priv-unit")
PRIVATE = (*PRIVATE, "people", "sites")


def training(name):
    return build(load_recipe(name, ["engine.workers=1"]))


def assert_below(findings, among):
    """Refuse a bound above its claim; `among` findings share the false alarms."""
    assert findings
    for finding in findings:
        assert finding.evidence.lower_bound(FALSE_ALARM / among) <= finding.claim.epsilon, (
            finding.what
        )


def test_the_list_of_recipes_that_claim_something_is_whole():
    claims = [
        each["name"] for each in shipped_recipes() if load_recipe(each["name"]).budget is not None
    ]
    assert sorted(claims) == sorted(PRIVATE)


@pytest.mark.parametrize("name", ["central", "ldp-sgd", "dp-fedavg", "priv-unit"])
def test_a_quick_audit_finds_nothing_above_a_claim(name):
    assert_below(list(Randomiser(5_000).findings(training(name).plan)), 20)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_audit_finds_anything_above_a_claim():
    found = []
    for name in PRIVATE:
        made = training(name)
        found += Randomiser().findings(made.plan)
        found += sensitivity_findings(made)
        found += standardisation_findings(made)
        found += Canaries(500).findings(made)
        found += OneRunAudit(500).findings(made)
    assert {finding.attack for finding in found} == {
        *("randomiser", "sensitivity", "statistics", "canaries", "one-run")
    }
    assert_below(found, len(found))


@pytest.mark.parametrize(
    ("name", "about", "draws"),
    [
        ("dp-fedavg-gaussian", 0, 20_000),
        ("ldp-fl", 0, 20_000),
        ("central", 0, 20_000),
        pytest.param("ldp-fl", 1, 100_000, marks=pytest.mark.slow),
    ],
)
def test_worst_cases_reach_half_of_the_claim(name, about, draws):
    """Gaussian noise at clients and at the server; the two-point report of a weight, shuffled."""
    finding = list(Randomiser(draws).findings(training(name).plan))[about]
    assert finding.lower >= finding.claim.epsilon / 2


@pytest.mark.slow
def test_canaries_reach_a_third_of_a_claim_of_eight():
    final, rounds = Canaries(1000).findings(training("central"))
    assert 7.9 < final.claim.epsilon <= 8
    assert rounds.lower >= final.claim.epsilon / 3
    assert final.lower >= final.claim.epsilon / 4
    assert final.estimate >= final.claim.epsilon / 3


@pytest.mark.slow
def test_the_self_test_passes():
    found = list(self_test(Randomiser()))
    assert {finding.attack for finding in found} == plans().keys()
    assert len(plans()) >= 15
    assert not any(finding.violated for finding in found)
