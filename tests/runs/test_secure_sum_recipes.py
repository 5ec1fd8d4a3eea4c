"""Recipes with `[sum]` beside `sites`: what they claim, and what does not go together with it."""

import json

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower.federation_files import check_recipe
from fedveil.masking.rehearsal import rehearse
from fedveil.privacy.releases import secure_sum
from fedveil.privacy.releases.secure_sum import SecureSum
from fedveil.privacy.sampling import OwnCoins
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe

CENTRAL = ("sum.kind=secure", "data.clients=6", "rounds=3", "client.epochs=1")
LDP = (
    *("sum.kind=secure", "data.clients=12", "rounds=3", "budget.epsilon=inf"),
    *("sample.kind=fixed", "sample.size=5", "noise.multiplier=2.0"),
)
QUANTILE = ("clip.kind=quantile", "clip.value=0.05", "clip.bit_noise=20")
MEDIAN = (
    *("clip.kind=median", "clip.value=0.05", "clip.low=-6", "clip.high=2", "clip.every=2"),
    *("clip.epsilon=5", "clip.delta=1e-6"),
)


def run(cli, out, name, *settings):
    sets = [part for text in settings for part in ("--set", text)]
    code, _, err = cli("run", name, *sets, "--out", out, "--quiet")
    assert (code, err) == (0, "")
    return json.loads((out / "result.json").read_text())


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_central_claims_the_client_behind_a_sum(cli, tmp_path, source):
    result = run(cli, tmp_path / "out", "central", *CENTRAL, f"noise.source={source}")
    claims = [c for c in result["claims"] if c["accountant"] == "pld"]
    assert [c["trust"] for c in claims] == ["secure-sum", "site"]
    assert {(c["unit"], c["noise"]) for c in claims} == {("client", source)}
    assert claims[0]["epsilon"] < claims[1]["epsilon"]
    assert cli("ledger", tmp_path / "out", "--verify")[0] == 0


def test_central_asks_every_client_and_divides_by_the_expected_ones():
    training = build(load_recipe("central", [*CENTRAL, "sum.honest=5"]))
    assert training.plan.sampler == OwnCoins(0.5)
    assert training.plan.release.channel == SecureSum(6, 4, 5)
    assert training.plan.expected_cohort == 3.0
    assert load_recipe("central", [*CENTRAL, "noise.share=part"]).noise.share == "part"
    build(load_recipe("central", [*CENTRAL, "noise.share=part"]))


@pytest.mark.parametrize("clip", [QUANTILE, MEDIAN], ids=["quantile", "median"])
@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_ldp_sgd_has_no_curator_any_more(cli, tmp_path, clip, source):
    result = run(cli, tmp_path / "out", "ldp-sgd", *LDP, *clip, f"noise.source={source}")
    claims = [c for c in result["claims"] if c["accountant"] == "pld"]
    assert {c["trust"] for c in claims} == {"secure-sum", "local"}
    assert not any("curator" in text for c in claims for text in c["assumptions"])


@pytest.mark.parametrize("clip", [QUANTILE, MEDIAN], ids=["quantile", "median"])
@pytest.mark.parametrize("missing", [0, 2, 3])
def test_masked_statistics_are_those_in_the_clear_to_the_last_bit(monkeypatch, clip, missing):
    """Three of five clients have to answer; with two the clip stays, and the model moves."""
    settings = [*LDP, *clip, "noise.source=secure", "sum.masks=true"]
    training = build(load_recipe("ldp-sgd", settings))
    plan, seen = training.plan, []

    def watched(vectors, *numbers):
        seen.append(len(vectors))
        return rehearse(vectors, *numbers)

    monkeypatch.setattr(secure_sum, "rehearse", watched)
    ledger, state = training.new_ledger(), training.start()
    asked = training.begin(state, ledger)
    assert len(asked.ids) == 5
    cohort = training.engine.run(asked)
    rows = {
        int(client): row
        for ids, block in cohort.updates_by_client
        for client, row in zip(ids, block, strict=True)
    }
    kept = sorted(rows)[missing:]
    cohort.updates_by_client[:] = [(np.array([client]), rows[client][None]) for client in kept]
    bits = torch.stack([rows[client][-plan.width :] for client in kept]).sum(dim=0)
    cohort.statistic_values.fill_(9.0)
    cohort.weight -= missing
    after = training.end(asked, state, cohort, ledger).state
    assert seen == ([5] if missing < 3 else [])
    expected = state.adaptive_state
    if missing < 3:
        moved = plan.clip_schedule.next_value(float(expected), bits, 5.0, 1)
        expected = torch.tensor([moved], dtype=torch.float64)
    assert torch.equal(after.adaptive_state, expected)
    assert not torch.equal(after.params, state.params)


def test_a_killed_run_goes_on_where_it_was(cli, tmp_path):
    """Seeded coins and shares fall again as they fell: the model is the same to the last bit."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = (*CENTRAL, "clip.kind=quantile", "clip.value=0.5", "clip.bit_noise=3")
    run(cli, whole, "central", *settings)
    sets = [part for text in settings for part in ("--set", text)]
    from fedveil.training import round as rounds

    end, ended = rounds.end, []

    def stop(*args, **keys):
        ended.append(1)
        if len(ended) == 2:
            raise KeyboardInterrupt
        return end(*args, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedveil.training.session.end", stop)
        cli("run", "central", *sets, "--out", cut, "--quiet")
    assert ended == [1, 1]
    code, _, _ = cli("run", "--resume", cut, "--quiet")
    assert code == 0
    models = [(folder / "model.safetensors").read_bytes() for folder in (whole, cut)]
    assert models[0] == models[1]


REFUSED = {
    ("central", "a secure sum of 2 sites: at least 3"): ["data.clients=2"],
    ("central", "a round asks 2 clients and sum.threshold is 4"): [
        "sample.kind=fixed",
        "sample.size=2",
    ],
    ("central", r"sum\.threshold is 3 and sum\.honest is 6 of 6"): ["sum.threshold=3"],
    ("central", "a secure sum adds up parts"): ["noise.share=whole"],
    ("central", "noise that is claimed"): [
        "noise.claim=false",
        "noise.multiplier=1",
        "budget=none",
    ],
    ("ldp-sgd", "for clip.kind 'quantile' or 'median'"): [],
    ("ldp-sgd", "use clip.kind 'median', or 'quantile' with bit_noise"): [
        "clip.kind=quantile",
        "clip.value=0.05",
        "clip.bit_epsilon=0.5",
    ],
    ("ldp-sgd", "needs cohorts of one size"): [*QUANTILE, "sample.kind=poisson", "sample.rate=0.5"],
    ("dp-sgd", "omit it"): [],
}


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_what_a_secure_sum_is_not_for_is_refused_in_one_line(name, message):
    settings = {"central": CENTRAL, "ldp-sgd": LDP}.get(name, ("sum.kind=secure",))
    given = [*settings, *REFUSED[name, message]]
    if "sample.kind=poisson" in given:
        given.remove("sample.size=5")
    with pytest.raises(BadInput, match=message) as refusal:
        build(load_recipe(name, given))
    assert "\n" not in str(refusal.value)


def test_a_federation_has_no_secure_sum_of_bits_alone():
    with pytest.raises(BadInput, match="is for simulations"):
        check_recipe(load_recipe("ldp-sgd", [*LDP, *QUANTILE]))
    check_recipe(load_recipe("central", CENTRAL))
