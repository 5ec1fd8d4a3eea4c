"""The policy that a deployment writes for a site: what its recipe costs, and no trust unasked."""

import tomllib

import pytest

from fedveil.flower.policy import policy_text
from tests.flower.sites import CENTRAL, LOCAL, open_site


@pytest.mark.parametrize(
    ("recipe", "trust"), [(LOCAL, None), (CENTRAL, ["central"])], ids=["local", "central"]
)
def test_it_covers_the_recipe_and_trusts_whom_that_needs(tmp_path, recipe, trust):
    site = open_site(tmp_path, recipe)
    policy = tomllib.loads(policy_text(site.recipe, site.plan, 0))
    (cost,) = site.terms.costs
    assert cost.epsilon <= policy["epsilon"]["client"] <= 1.001 * cost.epsilon
    assert cost.delta <= policy["delta"] <= 1.001 * cost.delta
    assert policy.get("trust") == trust
