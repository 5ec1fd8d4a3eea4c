"""`fedveil account`: any one of noise, rate, rounds and epsilon follows from the others."""

import json
import math

import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.calibration import solve
from fedveil.privacy.accounting.claims import Accountant, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled

WHOLE = {"noise": 1.5, "rate": 0.1, "rounds": 50, "epsilon": 2.0}


def ask(missing, delta=1e-5, **changes):
    return solve(**{**WHOLE, **changes, missing: None}, delta=delta)


def pld(answer, **changes):
    settings = {"noise": answer.noise, "rate": answer.rate, "rounds": answer.rounds, **changes}
    inner = Gaussian(settings["noise"])
    event = inner if settings["rate"] == 1 else PoissonSampled(settings["rate"], inner)
    return epsilon(event, settings["rounds"], 1e-5, Relation.ZERO_OUT)


def test_epsilon_is_what_the_accountants_say():
    answer = ask("epsilon")
    assert (answer.noise, answer.rate, answer.rounds) == (1.5, 0.1, 50)
    event = PoissonSampled(0.1, Gaussian(1.5))
    for claim in answer.claims:
        expected = epsilon(event, 50, 1e-5, Relation.ZERO_OUT, claim.accountant)
        assert claim.epsilon == expected


def test_noise_meets_epsilon_tightly():
    answer = ask("noise")
    assert answer.claims[0].epsilon <= 2.0 < pld(answer, noise=0.99 * answer.noise)


def test_rate_meets_epsilon_tightly():
    answer = ask("rate")
    assert answer.claims[0].epsilon <= 2.0 < pld(answer, rate=1.01 * answer.rate)


def test_rounds_meet_epsilon_tightly():
    answer = ask("rounds")
    assert answer.claims[0].epsilon <= 2.0 < pld(answer, rounds=answer.rounds + 1)


def test_claims_of_everyone_every_round():
    answer = ask("noise", rate=1.0)
    assert answer.claims[0].epsilon <= 2.0 < pld(answer, noise=0.99 * answer.noise)


def test_rate_may_be_one():
    assert ask("rate", noise=500.0).rate == 1


@pytest.mark.parametrize("missing", ["noise", "rate", "rounds", "epsilon"])
def test_json_keeps_its_contract(missing):
    raw = ask(missing).to_dict()
    assert json.loads(json.dumps(raw, allow_nan=False)) == raw
    assert list(raw) == ["noise", "rate", "rounds", "claims"]
    assert isinstance(raw["rounds"], int)
    assert [claim["accountant"] for claim in raw["claims"]] == ["pld", "rdp"]
    for claim in raw["claims"]:
        assert set(claim) == {
            "epsilon",
            "delta",
            "unit",
            "neighbours",
            "trust",
            "accountant",
            "noise",
            "as_published",
            "vouched",
            "assumptions",
            "holds_for",
            "condition",
            "covers",
            "units",
            "composed",
        }


def test_claims_say_what_they_assume():
    for claim in ask("epsilon").claims:
        assert (claim.unit, claim.neighbours) == (Unit.CLIENT, Relation.ZERO_OUT)
        assert (claim.trust, claim.noise) == (Trust.CENTRAL, NoiseSource.SECURE)
        assert claim.delta == 1e-5
        assert any("secure" in a for a in claim.assumptions)
        assert any("independently" in a for a in claim.assumptions)


def test_pld_comes_before_rdp():
    pld_claim, rdp_claim = ask("epsilon").claims
    assert (pld_claim.accountant, rdp_claim.accountant) == (Accountant.PLD, Accountant.RDP)
    assert pld_claim.epsilon < rdp_claim.epsilon


@pytest.mark.parametrize("missing", [(), ("noise", "rate"), tuple(WHOLE)], ids=str)
def test_exactly_one_may_be_missing(missing):
    with pytest.raises(BadInput, match="exactly one") as e:
        solve(**{**WHOLE, **dict.fromkeys(missing)}, delta=1e-5)
    for name in missing:
        assert name in str(e.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise", 0.0),
        ("noise", -1.0),
        ("noise", math.inf),
        ("noise", math.nan),
        ("rate", 0.0),
        ("rate", 1.5),
        ("rate", math.nan),
        ("rounds", 0),
        ("rounds", -3),
        ("epsilon", 0.0),
        ("epsilon", math.inf),
        ("epsilon", math.nan),
    ],
)
def test_value_that_makes_no_sense_is_refused_by_its_option(name, value):
    missing = "rounds" if name != "rounds" else "noise"
    with pytest.raises(BadInput, match=f"--{name} is"):
        ask(missing, **{name: value})


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan])
def test_delta_that_is_no_probability_is_refused(delta):
    with pytest.raises(BadInput, match="--delta"):
        ask("epsilon", delta=delta)


def test_one_round_that_exceeds_epsilon_is_refused():
    with pytest.raises(BadInput, match=r"one round alone exceeds epsilon 0\.1"):
        ask("rounds", noise=0.5, rate=1.0, epsilon=0.1)


@pytest.mark.parametrize("missing", ["rate", "rounds", "epsilon"])
def test_noise_too_small_for_arithmetic_is_refused_or_worthless(missing):
    try:
        answer = ask(missing, noise=1e-170)
    except BadInput:
        return
    assert answer.claims[0].epsilon == math.inf


@pytest.mark.parametrize(("noise", "rate"), [(1e6, 0.5), (1e6, 1.0), (1.0, 1.0), (1e-300, 0.5)])
def test_the_ends_of_what_can_be_asked(noise, rate):
    answer = solve(noise=noise, rate=rate, rounds=10, epsilon=None, delta=1e-100)
    assert all(claim.epsilon >= 0 for claim in answer.claims)
