"""The recipe `sites`: what it trains, what it claims, and what does not go together with it."""

import json

import pytest

from fedveil.base.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe

SHORT = ("rounds=3", "noise.multiplier=2.0", "budget.epsilon=inf")


@pytest.mark.parametrize("source", ["seeded", "secure"])
@pytest.mark.parametrize(
    ("share", "trusts"), [("part", ["secure-sum", "site"]), ("whole", ["site", "central"])]
)
def test_claims_name_the_record_and_whom_it_trusts(cli, tmp_path, share, trusts, source):
    out = tmp_path / "out"
    sets = [
        part
        for text in (*SHORT, f"noise.share={share}", f"noise.source={source}")
        for part in ("--set", text)
    ]
    code, _, err = cli("run", "sites", *sets, "--out", out, "--quiet")
    assert (code, err) == (0, "")
    result = json.loads((out / "result.json").read_text())
    claims = [c for c in result["claims"] if c["accountant"] == "pld"]
    assert [c["trust"] for c in claims] == trusts
    assert {c["unit"] for c in claims} == {"record"}
    assert {c["noise"] for c in claims} == {source}
    assert claims[0]["epsilon"] < claims[1]["epsilon"] or share == "whole"
    code, text, _ = cli("ledger", out, "--verify")
    assert code == 0
    code, text, _ = cli("ledger", out)
    assert "3 charges for 3 rounds" in text


def test_sites_are_the_clients_and_the_rate_is_that_of_their_records():
    training = build(load_recipe("sites", ["data.sites=5", *SHORT]))
    assert training.data.clients == training.plan.population == 5
    assert training.plan.steps.rate == 0.5
    assert training.plan.release.records == training.data.records
    assert training.work.noisy == training.plan.steps
    assert load_recipe("sites", ["data.sites=5"]).data.clients == 5


def test_a_recipe_that_was_written_out_is_read_again():
    recipe = load_recipe("sites", ["data.sites=4"])
    again = load_recipe(recipe.model_dump(mode="json", exclude_none=True))
    assert again.data.sites == again.data.clients == 4


REFUSED = {
    "sites is 3 and clients is 7": ["data.clients=7"],
    "use client.kind = 'gradient'": ["client.kind=sgd", "client.epochs=1", "client.lr=0.1"],
    "draws each site's records": ["sample.kind=fixed", "sample.size=2"],
    "clips each record's gradient in L2": ["clip.norm=l1"],
    "a sum of one hides nothing": ["data.sites=1"],
    "is for noise.where = 'site'": ["noise.where=server", "client.unit=none"],
    "server.weights is 'examples' and sites send sums": ["server.weights=examples"],
    "of which a client may then have several copies": ["data.resample=2000"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused(message):
    with pytest.raises(BadInput, match=message):
        build(load_recipe("sites", REFUSED[message]))


def test_a_unit_has_no_effect_without_noise_at_the_sites():
    with pytest.raises(BadInput, match=r"client\.unit is 'record' and has no effect"):
        build(load_recipe("fedsgd", ["client.unit=record"]))


def test_sums_of_sites_are_not_deployed(cli, tmp_path):
    code, _, err = cli("deploy", "sites", tmp_path / "out", "--sites", "a,b,c")
    assert code == 2
    (line,) = err.splitlines()
    assert "noise.where is 'site'" in line
    assert not (tmp_path / "out").exists()
