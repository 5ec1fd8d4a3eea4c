"""The recipe `sites`: what it trains, what it claims, and what does not go together with it."""

import json

import pytest

from fedveil.base.errors import BadInput
from fedveil.base.identity import digest_of
from fedveil.flower.federation_files import check_recipe
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled
from fedveil.privacy.releases.secure_sum import SecureSum
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
    assert training.plan.noisy_steps.rate == 0.5
    assert training.plan.release.records == training.data.records
    assert training.work.noisy == training.plan.noisy_steps
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
    "a secure sum of 2 sites: at least 3": ["data.sites=2"],
    r"sum\.threshold is 3 and sum\.honest is 4 of 5 sites: .* use at least 4": [
        "data.sites=5",
        "sum.kind=secure",
        "sum.threshold=3",
        "sum.honest=4",
    ],
    r"sum\.threshold is 2 and 2 of 5 sites may be dishonest \(sum\.honest is 3\).* at least 3": [
        "data.sites=5",
        "sum.kind=secure",
        "sum.threshold=2",
        "sum.honest=3",
    ],
    r"sum\.threshold is 9 of 3 sites": ["sum.kind=secure", "sum.threshold=9"],
    r"sum\.honest is 4 of 3 sites": ["sum.kind=secure", "sum.honest=4"],
    r"sum\.threshold is 0: at least 1 site": ["sum.kind=secure", "sum.threshold=0"],
    "a secure sum adds up parts": ["sum.kind=secure", "noise.share=whole"],
    r"\[sum\] is for noise that is claimed": [
        "sum.kind=secure",
        "noise.where=client",
        "noise.share=none",
        "client.unit=none",
    ],
    "masks are for integers": ["sum.kind=secure", "sum.masks=true"],
    r"sum\.bits is 16 and noise\.source is 'seeded'": ["sum.kind=secure", "sum.bits=16"],
    r"sum\.bits is 16 and noise\.where 'server'": [
        "sum.kind=secure",
        "sum.bits=16",
        "noise.where=server",
        "noise.share=none",
        "client.unit=none",
    ],
    r"sum\.bits is 40: 64, or 16 to 32": ["sum.kind=secure", "sum.bits=40"],
    r"sum\.bits is 16: .* have no room in 2\^16 steps; use at least 1\d": [
        "sum.kind=secure",
        "sum.bits=16",
        "noise.source=secure",
        "noise.multiplier=1000",
    ],
    r"sum\.kind is 'open'": ["sum.kind=open"],
    "is for noise.where = 'site'": ["noise.where=server", "client.unit=none"],
    "server.weights is 'examples' and sites send sums": ["server.weights=examples"],
    "of which a client may then have several copies": ["data.resample=2000"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused(message):
    with pytest.raises(BadInput, match=message):
        build(load_recipe("sites", REFUSED[message]))


def plan_with(*sets):
    return build(load_recipe("sites", [*SHORT, *sets])).plan


def test_a_secure_sum_leaves_room_for_dropouts_and_its_absence_none():
    alone = plan_with("data.sites=5")
    assert alone.release.channel == SecureSum(5, 5, 5)
    written = plan_with("data.sites=5", "sum.kind=secure", "noise.share=none")
    assert written.release.channel == SecureSum(5, 3, 5)
    assert plan_with("data.sites=5", "sum.kind=secure", "sum.honest=4").release.channel == (
        SecureSum(5, 4, 4)
    )
    everyone = plan_with("data.sites=5", "sum.kind=secure", "sum.threshold=5")
    assert digest_of(everyone) == digest_of(alone)
    assert digest_of(everyone) != digest_of(written)
    for plan in (alone, written):
        assert plan.lines[0].event == PoissonSampled(0.5, Gaussian(2.0))
    assert written.release.noisy.multiplier == 2.0 / 3**0.5
    assert written.lines[1].event == PoissonSampled(0.5, Gaussian(2.0 / 3**0.5))


def test_a_sum_of_few_bits_claims_skellam_noise(cli, tmp_path):
    out = tmp_path / "out"
    sets = ["rounds=2", "noise.source=secure", "sum.kind=secure", "sum.bits=18", "sum.masks=true"]
    code, _, err = cli("run", "sites", *[p for s in sets for p in ("--set", s)], "--out", out)
    assert code == 0, err
    claims = json.loads((out / "result.json").read_text())["claims"]
    assert [c["trust"] for c in claims] == ["secure-sum", "site"]
    assert {c["accountant"] for c in claims} == {"rdp"}
    assert 1.9 < claims[0]["epsilon"] <= 2.0
    for claim in claims:
        assert claim["composed"]["event"]["event"]["kind"] == "skellam"
    assert cli("ledger", out, "--verify")[0] == 0
    written = build(load_recipe(str(out / "recipe.toml"))).plan
    assert written.release.rotated.bits == 18
    stored = claims[0]["composed"]["event"]["event"]
    assert written.lines[0].event.event.multiplier == stored["multiplier"]
    assert written.lines[0].event.event.sensitivity == stored["sensitivity"]


def test_a_run_behind_real_masks_claims_what_one_in_the_clear_does(cli, tmp_path):
    claims = []
    for masks in ("true", "false"):
        out = tmp_path / masks
        sets = [*SHORT, "noise.source=secure", "sum.kind=secure", f"sum.masks={masks}"]
        sets = [part for text in sets for part in ("--set", text)]
        code, _, err = cli("run", "sites", *sets, "--out", out, "--quiet")
        assert (code, err) == (0, "")
        claims.append(json.loads((out / "result.json").read_text())["claims"])
        assert cli("ledger", out, "--verify")[0] == 0
    assert claims[0] == claims[1]
    texts = claims[0][0]["assumptions"]
    assert any("only one sum a round, of 2 or more of 3 sites" in text for text in texts)
    assert "all 3 sites add their noise honestly, and keep it to themselves" in texts


def test_a_unit_has_no_effect_without_noise_at_the_sites():
    with pytest.raises(BadInput, match=r"client\.unit is 'record' and has no effect"):
        build(load_recipe("fedsgd", ["client.unit=record"]))


def test_shares_are_deployed_with_a_secure_sum_only():
    with pytest.raises(BadInput, match=r"the recipe has no \[sum\].* sum.kind = 'secure'"):
        check_recipe(load_recipe("sites"))
    check_recipe(load_recipe("sites", ["noise.share=whole"]))
    check_recipe(load_recipe("sites", ["sum.kind=secure"]))
    check_recipe(load_recipe("sites", ["sum.kind=secure", "noise.share=none"]))
