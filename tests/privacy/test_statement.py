"""What a ledger says long after its run is what the run itself said."""

import json
import math
import sqlite3
from fractions import Fraction

import pytest

from fedveil.errors import BadInput
from fedveil.privacy.events import Gaussian, to_dict
from fedveil.privacy.ledger import Ledger
from fedveil.privacy.statement import statement
from fedveil.privacy.terms import Budget


@pytest.fixture
def write(tmp_path):
    """A ledger on disk with `rounds` charges."""

    def make(terms, rounds):
        path = tmp_path / "ledger.db"
        ledger = Ledger.create(path, {"run": "one"}, terms, 100)
        for round in range(1, rounds + 1):
            ledger.charge(round)
        ledger.close()
        return path

    return make


def alter(path, statement, *values):
    db = sqlite3.connect(path)
    with db:
        db.execute(statement, values)
    db.close()


@pytest.mark.parametrize("rounds", [0, 1, 7])
@pytest.mark.parametrize("share", [Fraction(1), Fraction(1, 3)])
def test_claims_are_those_of_the_terms(make_terms, write, rounds, share):
    terms = make_terms(share=share)
    said = statement(write(terms, rounds))
    assert said.claims == terms.claims(rounds)
    assert said.run == "one"
    assert said.budget == 3.0
    assert [charge.round for charge in said.charges] == list(range(1, rounds + 1))


def test_remainder_is_budget_minus_spent(make_terms, write):
    terms = make_terms()
    left = statement(write(terms, 4)).remainder()
    number = float(left.split()[0])
    assert number == pytest.approx(3.0 - terms.claims(4)[0].epsilon, abs=1e-4)
    assert left.endswith("of epsilon 3 is left")


def test_remainder_is_never_overstated(make_terms, write):
    terms = make_terms()
    said = statement(write(terms, 5))
    assert float(said.remainder().split()[0]) <= 3.0 - terms.claims(5)[0].epsilon


def test_remainder_is_never_negative(make_terms, write):
    terms = make_terms(budget=Budget(0.5, 1e-5))
    assert statement(write(terms, 9)).remainder().startswith("0.0000 ")


def test_remainder_without_a_limit_or_a_claim(make_terms, write):
    limitless = make_terms(budget=Budget(math.inf, 1e-5))
    assert "no limit" in statement(write(limitless, 2)).remainder()


def test_run_without_a_claim_has_nothing_to_state(write):
    said = statement(write(None, 3))
    assert said.claims == ()
    assert said.charges == []
    assert "no privacy is claimed" in said.remainder()


def test_statement_is_json(make_terms, write):
    raw = statement(write(make_terms(), 2)).to_dict()
    assert json.loads(json.dumps(raw, allow_nan=False)) == raw
    assert set(raw) == {"run", "charges", "claims", "left"}
    assert raw["claims"][0]["accountant"] == "pld"
    assert set(raw["charges"][0]) == {"round", "attempt", "event", "charged_at"}


def test_charge_for_another_event_is_refused(make_terms, write):
    path = write(make_terms(), 3)
    smaller = json.dumps(to_dict(Gaussian(400.0)))
    alter(path, "UPDATE charges SET event = ? WHERE round = 2", smaller)
    with pytest.raises(BadInput, match="round 2 was charged"):
        statement(path)


def test_charge_of_an_unknown_event_is_refused(make_terms, write):
    path = write(make_terms(), 1)
    alter(path, 'UPDATE charges SET event = \'{"kind": "future"}\'')
    with pytest.raises(BadInput, match="future"):
        statement(path)


@pytest.mark.parametrize("terms", ["{", "[]", "7", '{"event": {}}'])
def test_terms_that_cannot_be_read_are_refused(make_terms, write, terms):
    path = write(make_terms(), 1)
    alter(path, "UPDATE about SET value = ? WHERE key = 'terms'", terms)
    with pytest.raises(BadInput, match="cannot be read"):
        statement(path)


def test_missing_terms_are_refused(make_terms, write):
    path = write(make_terms(), 1)
    alter(path, "DELETE FROM about WHERE key = 'terms'")
    with pytest.raises(BadInput, match="cannot be read"):
        statement(path)


def test_missing_charge_is_never_forgiven(make_terms, write):
    """Round 3 was charged, so at least three rounds were."""
    terms = make_terms()
    path = write(terms, 3)
    alter(path, "DELETE FROM charges WHERE round = 2")
    try:
        said = statement(path)
    except BadInput:
        return
    assert said.claims[0].epsilon >= terms.claims(3)[0].epsilon


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no ledger here"):
        statement(tmp_path / "nothing.db")
