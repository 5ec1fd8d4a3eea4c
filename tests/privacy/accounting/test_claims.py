"""Epsilon never travels alone."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
    rendered,
)


def claim(**changes):
    settings = {
        "epsilon": 1.5,
        "delta": 1e-5,
        "unit": Unit.RECORD,
        "neighbours": Relation.REPLACE,
        "trust": Trust.LOCAL,
        "accountant": Accountant.RDP,
        "noise": NoiseSource.SECURE,
        "assumptions": ("a", "b"),
    }
    return PrivacyClaim(**{**settings, **changes})


def test_text_names_everything_the_epsilon_depends_on():
    text = str(claim())
    for word in ("1.5", "1e-05", "record", "replace", "local", "RDP", "secure"):
        assert word in text


def test_text_of_a_published_formula_says_that_it_is_no_guarantee():
    assert "as published, not a guarantee" in str(claim(as_published=True))
    assert "as published" not in str(claim())


def test_dict_has_exactly_the_promised_keys_and_survives_json():
    raw = claim().to_dict()
    assert (
        json.loads(json.dumps(raw, allow_nan=False))
        == raw
        == {
            "epsilon": 1.5,
            "delta": 1e-5,
            "unit": "record",
            "neighbours": "replace",
            "trust": "local",
            "accountant": "rdp",
            "noise": "secure",
            "as_published": False,
            "vouched": True,
            "assumptions": ["a", "b"],
            "holds_for": "everyone",
            "covers": "updates",
            "condition": "",
            "units": 1,
            "composed": None,
        }
    )


def test_dict_of_an_infinite_epsilon_is_still_json():
    raw = claim(epsilon=math.inf).to_dict()
    assert raw["epsilon"] == "inf"
    json.dumps(raw, allow_nan=False)


@pytest.mark.parametrize(
    "missing", ["epsilon", "delta", "unit", "neighbours", "trust", "accountant", "noise"]
)
def test_no_part_of_a_claim_has_a_default(missing):
    whole = {k: v for k, v in vars(claim()).items() if k != missing}
    with pytest.raises(TypeError, match=missing):
        PrivacyClaim(**whole)


def test_claim_cannot_be_changed():
    with pytest.raises(AttributeError):
        claim().epsilon = 0.1


@given(st.floats(1e-4, 1e4))
def test_printed_epsilon_is_never_smaller_than_the_claimed_one(epsilon):
    for text in (str(claim(epsilon=epsilon)), claim(epsilon=epsilon).short):
        printed = float(text.split()[1].replace(",", ""))
        assert epsilon <= printed <= epsilon * 1.01


@given(st.floats(1e-4, 1e4), st.floats(1e-4, 1e4))
def test_printed_remainder_is_never_larger_than_what_is_left(limit, spent):
    text = claim(epsilon=spent).left_of(limit)
    printed = float(text.split()[0].replace(",", ""))
    left = max(0.0, limit - spent)
    assert min(left - 1e-4, 0.99 * left) <= printed <= left
    assert text.endswith(f"of {claim(epsilon=limit).short}")


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [
        (7.99701, "7.998"),
        (1300.2, "1,301"),
        (12345.0, "12,350"),
        (0.00012341, "0.0001235"),
        (0.0, "0"),
        (0.05, "0.05"),
        (0.1 + 0.2, "0.3001"),
        (2.0, "2"),
        (math.inf, "infinity"),
    ],
)
def test_epsilons_are_rendered_one_way(epsilon, shown):
    assert rendered(epsilon) == shown


def test_short_text_still_has_what_the_epsilon_means():
    assert claim().short == "epsilon 1.5 at delta 1e-05 per record (replace, local trust)"
    assert claim(as_published=True).short == (
        "epsilon 1.5 at delta 1e-05 per record "
        "(replace, local trust, as published, not a guarantee)"
    )
    assert claim(covers="norms").short.startswith("norms: epsilon")


@pytest.mark.parametrize("text", [str, lambda c: c.short], ids=["long", "short"])
def test_what_is_not_vouched_for_is_about_right(text):
    assert "epsilon not vouched for, about 1.5 at delta" in text(claim(vouched=False))


def test_words_are_the_claim_without_its_number():
    assert str(claim()) == f"epsilon 1.5 {claim().full_terms}"
    assert claim(covers="norms").context == f"norms: {claim().full_terms}"
    for word in ("1e-05", "record", "replace", "local trust", "RDP", "secure noise"):
        assert word in claim().full_terms


@pytest.mark.parametrize("epsilon", [1.5, math.inf])
def test_claims_come_back_from_json(epsilon):
    one = claim(epsilon=epsilon, vouched=False, holds_for="the median client")
    assert PrivacyClaim.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_text_says_for_whom_and_of_what_unless_it_is_everyone_and_the_updates():
    text = str(claim(holds_for="the median client", covers="norms"))
    assert text.startswith("norms: epsilon")
    assert "per record, the median client" in text
    assert "everyone" not in str(claim())
    assert "updates" not in str(claim())


@pytest.mark.parametrize("accountant", Accountant)
def test_text_names_the_accountant(accountant):
    assert accountant.upper() in str(claim(accountant=accountant))
