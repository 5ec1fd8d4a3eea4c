"""What an owner accepts: the cost of a recipe, whom it trusts, and nothing else."""

import tomllib

import pytest

from fedveil.flower.federation_files import read_policy
from fedveil.flower.policy import Policy, accepted, policy_text
from fedveil.privacy.accounting.claims import Unit
from tests.flower.sites import CENTRAL, DP_SGD, FEDAVG, LOCAL, TWO_POINT, Server, open_site


def accepting(site, **keys):
    return accepted(Policy.model_validate(keys), site.terms, site.plan)


@pytest.mark.parametrize(
    ("recipe", "trust"), [(LOCAL, None), (CENTRAL, ["local", "central"])], ids=["local", "central"]
)
def test_it_covers_the_recipe_and_trusts_whom_that_needs(tmp_path, recipe, trust):
    site = open_site(tmp_path, recipe)
    policy = tomllib.loads(policy_text(accepting(site)))
    (cost,) = site.terms.costs
    assert cost.epsilon <= policy["epsilon"]["client"] <= 1.001 * cost.epsilon
    assert cost.delta <= policy["delta"] <= 1.001 * cost.delta
    assert policy.get("trust") == trust
    assert policy.keys() <= {"epsilon", "delta", "trust"}


@pytest.mark.parametrize(
    "recipe", [LOCAL, CENTRAL, DP_SGD, TWO_POINT, FEDAVG], ids=lambda r: r["name"]
)
def test_what_was_accepted_is_answered_once(tmp_path, recipe):
    site = open_site(tmp_path, recipe, {})
    path = tmp_path / "policy.toml"
    path.write_text(policy_text(accepting(site)))
    assert read_policy(path) == accepting(site)
    site.policy = read_policy(path)
    assert list(site.objections()) == []
    assert site.policy.objection_to_cost(site.terms, [], None) is None
    assert site.policy.unprotected == (recipe is FEDAVG)
    assert site.policy.seeded == (recipe is DP_SGD)
    Server(site).answer()
    spent = list(site.ledger.run_costs().values())
    assert len(spent) == (recipe is not FEDAVG)
    beyond = site.policy.objection_to_cost(site.terms, spent, None)
    assert (beyond is None) == (recipe is FEDAVG)  # a second run needs to be accepted again


def test_what_was_accepted_before_stays_possible(tmp_path):
    first, second = open_site(tmp_path / "a", LOCAL), open_site(tmp_path / "b", DP_SGD)
    before = accepting(first)
    after = accepted(before, second.terms, second.plan)
    assert after.epsilon.client == before.epsilon.client
    assert after.epsilon.record == pytest.approx(second.terms.costs[0].epsilon, rel=1e-3)
    assert after.delta == pytest.approx(2e-5)
    again = accepted(after, first.terms, first.plan)
    assert again.epsilon.client == 2 * before.epsilon.client
    assert again.epsilon.record > after.epsilon.record  # what costs the site costs its records


def test_an_owner_s_own_rules_are_no_part_of_what_is_accepted(tmp_path):
    site = open_site(tmp_path, LOCAL)
    policy = accepting(site, noise=100.0, recipes=["other"], steps=3, days=5)
    assert (policy.noise, policy.recipes, policy.steps, policy.days) == (100.0, ["other"], 3, 5)
    assert len(list(site.objections_of(policy))) == 2


def test_limits_are_per_unit_from_the_widest_to_the_narrowest():
    from fedveil.flower.policy import UNITS, counts_for

    assert UNITS[0] is Unit.CLIENT
    assert UNITS[-1] is Unit.RECORD

    class Claim:
        def __init__(self, unit):
            self.unit = unit

    assert counts_for(Claim(Unit.CLIENT), Unit.RECORD)
    assert not counts_for(Claim(Unit.RECORD), Unit.CLIENT)
    assert not counts_for(Claim(Unit.WEIGHT), Unit.RECORD)
