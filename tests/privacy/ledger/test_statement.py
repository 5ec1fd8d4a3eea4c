"""What a ledger says long after its run is what the run itself said."""

import json
import math
import sqlite3
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import NOT_DECIDED, Budget, claims_of
from fedveil.privacy.accounting.claims import NoiseSource
from fedveil.privacy.accounting.events import Gaussian, to_dict
from fedveil.privacy.ledger.file import read_runs
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.ledger.statement import statements


@pytest.fixture
def write(tmp_path):
    """A ledger on disk with `rounds` charges, all that were planned unless it says otherwise."""

    def make(*lines, rounds, counts=None, planned=None):
        path = tmp_path / "ledger.db"
        clients = 0 if counts is None else len(counts)
        ledger = Ledger.create(path, LedgerRun({"run": "one"}, lines, planned or rounds, clients))
        for round in range(1, rounds + 1):
            ledger.charge(round, None if counts is None else np.flatnonzero(counts >= round))
        ledger.close()
        return path

    return make


def only(path):
    (told,) = statements(path)
    return told


def alter(path, statement, *values):
    db = sqlite3.connect(path)
    with db:
        db.execute(statement, values)
    db.close()


@pytest.mark.parametrize("rounds", [0, 1, 7])
@pytest.mark.parametrize("share", [Fraction(1), Fraction(1, 3)])
def test_claims_are_those_of_the_terms(make_line, write, rounds, share):
    terms = make_line(share=share)
    said = only(write(terms, rounds=rounds))
    assert said.claims == terms.claims(terms.participations(rounds))
    assert said.run == "one"
    assert said.epsilon_budget == 3.0
    assert [charge.round for charge in said.charges] == list(range(1, rounds + 1))


def test_rounds_that_were_done_again_are_told(make_line, tmp_path):
    """Each attempt with secure noise is one more release."""
    terms = make_line(noise=NoiseSource.SECURE)
    path = tmp_path / "ledger.db"
    ledger = Ledger.create(path, LedgerRun({"run": "one"}, (terms,), 3, 0))
    for round in (1, 1, 2, 3, 3, 3):
        ledger.charge(round)
    ledger.close()
    assert only(path).claims == terms.claims(6)


def test_a_run_that_has_not_done_all_its_rounds_holds_whoever_ended_it(make_line, write):
    terms = make_line()
    said = only(write(terms, rounds=7, planned=40))
    assert said.claims == claims_of((terms,), 7, None, planned=40)
    assert said.claims[0].epsilon == terms.epsilon_if_ended(7, 40) > terms.claims(7)[0].epsilon
    assert said.claims[-1] == replace(terms.claims(7)[0], condition=NOT_DECIDED)
    assert said.remainder().startswith(said.claims[0].remainder(3.0))


def test_a_ledger_that_does_not_say_how_many_were_planned_says_nothing_of_it(make_line, write):
    terms = make_line()
    path = write(terms, rounds=7, planned=40)
    about = read_runs(path)["one"]
    del about["permitted"]
    alter(path, "UPDATE runs SET about = ?", json.dumps(about))
    assert only(path).claims == terms.claims(7)


def test_a_plan_that_is_no_number_is_refused(make_line, write):
    path = write(make_line(), rounds=7)
    about = {**read_runs(path)["one"], "permitted": "many"}
    alter(path, "UPDATE runs SET about = ?", json.dumps(about))
    with pytest.raises(BadInput, match="how many rounds were planned"):
        only(path)


def test_remainder_is_budget_minus_spent(make_line, write):
    terms = make_line()
    left = only(write(terms, rounds=4)).remainder()
    number = float(left.split()[0])
    assert number == pytest.approx(3.0 - terms.claims(4)[0].epsilon, abs=1e-3)
    assert " of epsilon 3 at delta 1e-05 per client " in left


def test_remainder_is_never_overstated(make_line, write):
    terms = make_line()
    said = only(write(terms, rounds=5))
    assert float(said.remainder().split()[0]) <= 3.0 - terms.claims(5)[0].epsilon


def test_remainder_is_never_negative(make_line, write):
    terms = make_line(budget=Budget(0.5, 1e-5))
    assert only(write(terms, rounds=9)).remainder().startswith("0 of ")


def test_remainder_without_a_limit_or_a_claim(make_line, write):
    limitless = make_line(budget=Budget(math.inf, 1e-5))
    assert "no limit" in only(write(limitless, rounds=2)).remainder()


def test_run_without_a_claim_has_nothing_to_state(write):
    said = only(write(rounds=3))
    assert said.claims == ()
    assert said.charges == []
    assert "no privacy is claimed" in said.remainder()


def test_statement_is_json(make_line, write):
    raw = only(write(make_line(), rounds=2)).to_dict()
    assert json.loads(json.dumps(raw, allow_nan=False)) == raw
    assert set(raw) == {"run", "charges", "claims", "left"}
    assert raw["claims"][0]["accountant"] == "pld"
    keys = {"run", "round", "attempt", "covers", "event", "charged_at"}
    assert set(raw["charges"][0]) == keys


def test_charge_for_another_event_is_refused(make_line, write):
    path = write(make_line(), rounds=3)
    smaller = json.dumps(to_dict(Gaussian(400.0)))
    alter(path, "UPDATE charges SET event = ? WHERE round = 2", smaller)
    with pytest.raises(BadInput, match="round 2 was charged"):
        only(path)


def test_charge_of_an_unknown_event_is_refused(make_line, write):
    path = write(make_line(), rounds=1)
    alter(path, 'UPDATE charges SET event = \'{"kind": "future"}\'')
    with pytest.raises(BadInput, match="future"):
        only(path)


@pytest.mark.parametrize("terms", ["{", "7", "{}7", '[{"event": {}}]', "[7]", "null"])
def test_lines_that_cannot_be_read_are_refused(make_line, write, terms):
    path = write(make_line(), rounds=1)
    alter(path, "UPDATE runs SET about = json_set(about, '$.lines', ?)", terms)
    with pytest.raises(BadInput, match="cannot be read"):
        only(path)


def test_missing_lines_are_refused(make_line, write):
    path = write(make_line(), rounds=1)
    alter(path, "UPDATE runs SET about = json_remove(about, '$.lines')")
    with pytest.raises(BadInput, match="cannot be read"):
        only(path)


def test_missing_charge_is_never_forgiven(make_line, write):
    """Round 3 was charged, so at least three rounds were."""
    terms = make_line()
    path = write(terms, rounds=3)
    alter(path, "DELETE FROM charges WHERE round = 2")
    with pytest.raises(BadInput, match="charges are missing"):
        only(path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no ledger here"):
        only(tmp_path / "nothing.db")


def test_charge_on_a_line_that_was_never_promised_is_refused(make_line, write):
    path = write(make_line(), rounds=2)
    alter(path, "UPDATE charges SET covers = 'norms' WHERE round = 2")
    with pytest.raises(BadInput, match="'norms'"):
        only(path)


def test_charge_on_a_reading_is_refused(make_line, write):
    """A reading is never charged, so its event may not stand in for the one that is."""
    reading = make_line(reading=True, event=Gaussian(400.0))
    path = write(make_line(), reading, rounds=2)
    assert len(only(path).claims) == 4
    alter(path, "UPDATE charges SET event = ?", json.dumps(to_dict(Gaussian(400.0))))
    with pytest.raises(BadInput, match="round 1 was charged"):
        only(path)


def test_every_line_is_stated(make_line, write):
    lines = (make_line(), make_line(covers="norms", every=3, event=Gaussian(7.0)))
    said = only(write(*lines, rounds=7))
    assert said.claims == (*lines[0].claims(7), *lines[1].claims(3))


def test_clients_that_took_part_unequally_are_told_apart(make_line, write):
    terms = make_line(share=Fraction(1))
    said = only(write(terms, rounds=7, counts=np.array([5, 1, 2])))
    worst, median = terms.claims(5), terms.claims(2)
    assert [c.epsilon for c in said.claims] == [*(c.epsilon for c in worst), median[0].epsilon]
    assert said.claims[0].holds_for == "the client that took part most"
    assert said.claims[-1].holds_for == "the median client"
