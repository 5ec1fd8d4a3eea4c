"""`[attack]` in recipes: what a run writes of it, and what is refused."""

import json

import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe

PIXEL = ["attack.kind=pixel", "attack.target=0", "attack.size=2"]
SHORT = ["rounds=3", "data.clients=20", "sample.size=9", "client.epochs=2", "engine.workers=1"]
NUMBERS = {
    *("accuracy", "backdoor"),
    *("cheating", "cheating_share", "honest_length", "cheating_length"),
}


def adversary(recipe, *settings):
    asked = load_recipe(recipe, list(settings))
    return build(asked, data=asked.load_data()).participants


def test_every_round_says_what_the_attack_came_to(tmp_path):
    asked = load_recipe("norm-bound", [*PIXEL, *SHORT, "attack.attackers=3", "evaluate.every=1"])
    fv.run(asked, out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    before, *rounds = [json.loads(line) for line in lines]
    assert "backdoor" in before
    assert len(rounds) == 3
    for found in rounds:
        assert found.keys() >= NUMBERS
        assert found["cheating"] == 3
        assert found["cheating_share"] == pytest.approx(3 / found["clients"])
        assert 9 <= found["clients"] <= 12
        assert found["cheating_length"] > found["honest_length"] > 0
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "certif" in json.dumps(told)


def test_the_boost_that_is_left_out_replaces_the_model():
    found = adversary("norm-bound", *PIXEL, *SHORT, "server.lr=0.5")
    assert found.boost == pytest.approx(9 / 0.5)


@pytest.mark.parametrize(
    ("recipe", "settings", "words"),
    [
        ("fedavg", ["attack.attackers=20"], "attack.attackers is 20 of 20 clients"),
        ("fedavg", ["attack.row=7"], "attack.row is 7 .* lies outside images of 8 x 8"),
        ("fedavg", ["attack.boost=0"], "attack.boost is 0"),
        ("fedavg", ["attack.boost=-2"], "attack.boost is -2"),
        ("fedavg", ["attack.start=4"], "attack.start is 4 and there are 3 rounds"),
        ("fedavg", ["attack.project=true"], "attack.project is true and updates are not clipped"),
        ("fedavg", ["server.optimizer=adam"], "attack.boost is missing"),
        ("dp-sgd", ["attack.lr=0.1"], "attack.epochs and attack.lr are for attackers that train"),
        ("ldp-sgd", ["attack.lr=0.1"], "no effect on one gradient"),
    ],
)
def test_bad_settings_get_one_line(recipe, settings, words):
    short = [key for key in SHORT if recipe in ("fedavg",) or "client." not in key]
    with pytest.raises(BadInput, match=words) as error:
        adversary(recipe, *PIXEL, *short, *settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["median", "trimmed-mean", "krum", "multi-krum", "flame"])
def test_a_defence_that_breaks_the_claim_gets_one_line(kind):
    asked = load_recipe("central", ["data.clients=20", f"server.aggregate={kind}"])
    with pytest.raises(BadInput) as error:
        build(asked, data=asked.load_data())
    assert "\n" not in str(error.value)
    assert "looks at updates one by one and noise is for the sum" in str(error.value)


def test_who_skips_dp_sgd_may_train_in_its_own_way():
    short = ["rounds=3", "data.clients=20", "engine.workers=1"]
    found = adversary("dp-sgd", *PIXEL, *short, "attack.noise=skip", "attack.lr=0.1")
    assert isinstance(found.work, fv.ClientSgd)
