"""The sentence never promises more than the claim, whatever is claimed."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.privacy.accounting.claims import (
    SEEDED,
    TRUSTED_SERVER,
    Accountant,
    Composed,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.closed_forms import gaussian_epsilon
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.accounting.meaning import (
    NOTHING_CLAIMED,
    Meaning,
    Strength,
    counting,
    power,
    right_guesses,
)

epsilons, deltas = st.floats(0, 20), st.floats(0, 0.5)


def claim(epsilon=1.0, delta=1e-5, **changed):
    parts = {
        "unit": Unit.CLIENT,
        "neighbours": Relation.ZERO_OUT,
        "trust": Trust.CENTRAL,
        "accountant": Accountant.PLD,
        "noise": NoiseSource.SECURE,
    }
    return PrivacyClaim(epsilon=epsilon, delta=delta, **{**parts, **changed})


# --- numbers: docstrings' tables, and the worst mechanism there is ---


@pytest.mark.parametrize(
    ("epsilon", "delta", "share"),
    [
        (0.0, 0.0, 0.5),
        (math.log(3), 0.0, 0.75),
        (0.0, 0.5, 0.75),
        (math.inf, 0.0, 1.0),
        (1e6, 0.0, 1.0),
        (1.0, 1.0, 1.0),
        (8.0, 0.0, 0.9996646),
    ],
)
def test_right_guesses(epsilon, delta, share):
    assert right_guesses(claim(epsilon, delta)) == pytest.approx(share, abs=1e-7)


@pytest.mark.parametrize(
    ("epsilon", "delta", "alarms", "found"),
    [
        (0.0, 0.0, 0.1, 0.1),
        (math.log(2), 0.0, 0.1, 0.2),
        (math.log(2), 0.0, 0.5, 0.75),
        (math.log(2), 0.01, 0.0, 0.01),
        (math.log(2), 0.01, 0.1, 0.21),
        (0.0, 0.9, 0.0, 0.9),
        (math.inf, 0.0, 0.0, 1.0),
        (1e6, 0.0, 0.1, 1.0),
        (10.0, 0.0, 0.001, 0.9999546),
    ],
)
def test_power(epsilon, delta, alarms, found):
    assert power(claim(epsilon, delta), alarms) == pytest.approx(found, abs=1e-6)


def worst(epsilon, delta):
    """The mechanism of four outcomes that reaches (epsilon, delta) everywhere."""
    a, b = math.exp(epsilon) / (1 + math.exp(epsilon)), 1 / (1 + math.exp(epsilon))
    present = np.array([delta, (1 - delta) * a, (1 - delta) * b, 0.0])
    return present, present[::-1]


@given(epsilons, deltas)
def test_bounds_are_reached_by_the_worst_mechanism_and_by_nothing_better(epsilon, delta):
    present, absent = worst(epsilon, delta)
    asked = claim(epsilon, delta)
    best = sum(np.maximum(present, absent)) / 2
    assert right_guesses(asked) == pytest.approx(best, abs=1e-9)
    for count in range(1, 5):
        alarms, found = absent[:count].sum(), present[:count].sum()
        assert power(asked, alarms) == pytest.approx(found, abs=1e-9)


@given(epsilons, deltas, st.floats(0, 1))
def test_power_is_at_least_the_false_alarms_and_at_most_one(epsilon, delta, alarms):
    assert alarms - 1e-12 <= power(claim(epsilon, delta), alarms) <= 1


@given(epsilons, deltas)
def test_what_is_told_is_never_less_than_what_is_claimed(epsilon, delta):
    meaning = Meaning([claim(epsilon, delta)])
    share = re.search(r"be right ([\d.]+) in 100", meaning.sentence)
    told = 100.0 if share is None else float(share[1])
    assert told >= 100 * right_guesses(meaning.claim) - 1e-6
    for row, alarms in zip(meaning.odds, (1e-3, 1e-2, 1e-1), strict=True):
        found = float(row["true cases found, at most"].partition(" ")[0])
        assert found >= 100 * power(meaning.claim, alarms) - 1e-6


# --- words ---


def test_the_sentence_of_an_ordinary_claim():
    assert Meaning([claim(1.0, 0.0)]).sentence == (
        "Whoever sees this model, and every model on the way to it, and knows everything about "
        "everyone else, can guess whether a given client contributed its data or nothing at all "
        "and be right 73.2 in 100 times at most; tossing a coin is right 50 in 100 times."
    )


WORDS = {
    "unit": {
        Unit.CLIENT: "client",
        Unit.RECORD: "record",
        Unit.PERSON: "person's records",
        Unit.WEIGHT: "weight",
    },
    "trust": {
        Trust.CENTRAL: "sees this model",
        Trust.LOCAL: "everything that a client sends",
        Trust.SHUFFLED: "the shuffler hands on",
        Trust.CURATOR: "the server sees",
        Trust.SITE: "everything that a site sends",
        Trust.SECURE_SUM: "only sums of what sites mask",
    },
}


@pytest.mark.parametrize(
    ("unit", "relation", "trust"), list(itertools.product(Unit, Relation, Trust))
)
def test_words_follow_unit_neighbours_and_trust(unit, relation, trust):
    meaning = Meaning([claim(1.0, unit=unit, neighbours=relation, trust=trust)])
    others = {
        Meaning([claim(1.0, unit=u, neighbours=r, trust=trust)]).worlds
        for u, r in itertools.product(Unit, Relation)
    }
    assert len(others) == 12
    assert WORDS["unit"][unit] in meaning.worlds
    assert WORDS["trust"][trust] in meaning.sentence
    assert ("every other record" in meaning.sentence) == (unit is Unit.RECORD)
    if relation is Relation.REPLACE and unit is not Unit.WEIGHT:
        assert "any other" in meaning.worlds
        assert "That somebody takes part" in " ".join(meaning.uncovered)


def test_only_central_trust_needs_a_trusted_server():
    told = {trust: Meaning([claim(trust=trust)]).trusted for trust in Trust}
    assert "The server has to be trusted" in told[Trust.CENTRAL]
    for trust in (Trust.LOCAL, Trust.SHUFFLED, Trust.CURATOR):
        assert "server need not be" in told[trust]
    assert "nobody else" in told[Trust.SITE]
    assert "server need not be" in told[Trust.SECURE_SUM]


@pytest.mark.parametrize(
    ("epsilon", "strength"),
    [
        (0.0, Strength.STRONG),
        (0.5, Strength.STRONG),
        (1.0, Strength.MODERATE),
        (3.0, Strength.WEAK),
        (6.9, Strength.WEAK),
        (7.0, Strength.NOTHING),
        (math.inf, Strength.NOTHING),
    ],
)
def test_strength(epsilon, strength):
    assert Meaning([claim(epsilon, 0.0)]).strength is strength


def test_a_large_epsilon_promises_next_to_nothing_and_says_so():
    meaning = Meaning([claim(8.0)])
    assert "next to nothing" in meaning.worth
    assert "99.97 in 100" in meaning.sentence
    assert "may be right every time" in Meaning([claim(20.0)]).sentence
    assert "more than a million times" in Meaning([claim(20.0)]).factor


def test_a_large_delta_promises_next_to_nothing_as_well():
    assert Meaning([claim(0.1, 0.999)]).strength is Strength.NOTHING


@pytest.mark.parametrize("changed", [{"as_published": True}, {"vouched": False}])
def test_what_is_no_guarantee_has_no_odds_and_no_strength(changed):
    meaning = Meaning([claim(0.1, **changed)])
    assert meaning.sentence.startswith("Nothing is ")
    assert "at most" not in meaning.sentence
    assert (meaning.strength, meaning.odds, meaning.factor) == (Strength.NONE, [], "")
    assert meaning.worth == ""


def test_the_strict_claim_counts_and_the_published_one_is_named():
    published, strict = claim(1.0, as_published=True), claim(2.0)
    meaning = Meaning([published, strict])
    assert meaning.claim is strict is counting([published, strict])
    assert "not a guarantee" in meaning.warnings[0]
    assert counting([published]) is published
    # one weight's epsilon beside a client's is a reading, and no warning
    assert Meaning([strict, published]).warnings == []


def test_nothing_claimed():
    meaning = Meaning([])
    assert meaning.sentence == NOTHING_CLAIMED
    assert (meaning.claim, counting([]), meaning.odds) == (None, None, [])
    assert (meaning.conditions, meaning.uncovered, meaning.warnings) == ([], [], [])


def test_seeded_noise_is_a_simulation():
    seeded = claim(noise=NoiseSource.SEEDED, assumptions=(SEEDED,))
    assert "simulation" in Meaning([seeded]).warnings[0]
    assert Meaning([claim()]).warnings == []
    assert Meaning([seeded]).conditions == [Meaning([seeded]).trusted, SEEDED]


def test_a_trusted_server_is_said_once_and_every_other_condition_with_it():
    central = claim(trust=Trust.CENTRAL, assumptions=(TRUSTED_SERVER, "N is public", SEEDED))
    told = Meaning([central])
    assert told.conditions == [told.trusted, "N is public", SEEDED]
    assert told.trusted.startswith(
        "The server has to be trusted: it sees every client's true update"
    )


def test_whom_it_holds_for_is_said():
    assert "for the median client" in Meaning([claim(holds_for="the median client")]).sentence


# --- several units of one person ---


def composed(noise=0.60023, **changed):
    return claim(
        gaussian_epsilon(1 / noise, 1e-5), composed=Composed(Gaussian(noise), 1), **changed
    )


def test_the_table_of_several_units_has_their_own_epsilons():
    rows = Meaning([composed()]).several()
    assert [row["clients of one person"] for row in rows] == ["1", "2", "4", "8"]
    assert [row["epsilon"] for row in rows] == ["8", "19.13", "49.86", "144.8 (no protection)"]
    assert [row["right guesses at most"] for row in rows][:2] == ["99.97 in 100", "100 in 100"]
    assert Meaning([composed()]).several_unknown == ""


def test_a_table_of_what_is_not_vouched_for_bounds_no_guesses():
    slipping = claim(8.0, composed=Composed(Gaussian(0.60023), 1, 1e-11, 19.0))
    rows = Meaning([slipping]).several()
    assert [row["right guesses at most"] for row in rows] == ["99.97 in 100", *["no bound"] * 3]
    assert rows[1]["epsilon"].startswith("not vouched for")


@pytest.mark.parametrize(
    "of",
    [[], [composed(as_published=True)], [composed(vouched=False)], [composed(unit=Unit.WEIGHT)]],
)
def test_no_table_of_several_units_where_nothing_is_promised_to_anybody(of):
    assert Meaning(of).several() == []
    assert Meaning(of).several_unknown == ""


def test_a_claim_that_cannot_be_asked_about_several_units_says_so():
    assert Meaning([claim()]).several() == []
    assert "several clients is larger, and cannot be computed" in Meaning([claim()]).several_unknown
    pure = Meaning([claim(2.0, 0.0)])
    assert [row["epsilon"] for row in pure.several()] == ["2", "4", "8", "16"]


@pytest.mark.parametrize("unit", [Unit.CLIENT, Unit.RECORD])
@pytest.mark.parametrize("relation", Relation)
def test_the_sentence_about_several_units_says_how_many(unit, relation):
    several = Meaning([composed(unit=unit, neighbours=relation).for_units(3)])
    assert f"3 {unit}s of one person" in several.sentence
    assert several.several() == []
    assert several.several_unknown == ""


@pytest.mark.parametrize("unit", [Unit.CLIENT, Unit.RECORD])
def test_nobody_is_said_to_have_an_epsilon_that_multiplies(unit):
    text = Meaning([claim(unit=unit)]).unit
    assert "larger epsilon" in text
    assert "as many times" not in text
