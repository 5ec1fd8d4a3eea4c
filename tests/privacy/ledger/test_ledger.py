"""Charge, then release: what a charge says, what the budget refuses, whose turns are counted."""

import sqlite3
from datetime import date, datetime
from fractions import Fraction

import numpy as np
import pytest

from fedveil.base.errors import BadInput, BudgetExhausted, LedgerMismatch
from fedveil.privacy.accounting.claims import NoiseSource
from fedveil.privacy.accounting.events import Gaussian, to_dict
from fedveil.privacy.ledger.file import read_about, read_charges, read_participations, read_runs
from fedveil.privacy.ledger.hash_chain import read_links
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from tests.privacy.ledger.conftest import ABOUT, alter, rounds_on_disk

# --- charging ---


def test_charge_is_visible_to_others_as_soon_as_it_returns(ledger, path):
    for round in (1, 2, 3):
        ledger.charge(round)
        assert rounds_on_disk(path) == list(range(1, round + 1))


def test_charge_says_what_was_released_and_when(ledger, path, make_line):
    ledger.charge(1)
    (charge,) = read_charges(path)
    assert (charge.round, charge.attempt, charge.covers) == (1, 0, "updates")
    assert charge.event == to_dict(make_line().event)
    assert datetime.fromisoformat(charge.charged_at).utcoffset() is not None


def test_the_time_of_a_secure_charge_is_not_told(path, make_line):
    """How long a round took would tell how many clients it had."""
    ledger = Ledger.create(path, LedgerRun(ABOUT, (make_line(noise=NoiseSource.SECURE),), 5))
    ledger.charge(1)
    ledger.close()
    (charge,) = read_charges(path)
    assert date.fromisoformat(charge.charged_at)


def test_what_is_said_of_data_and_cohorts_confirms_no_guess(tmp_path, make_line):
    """The same run on the same data twice: nothing that a digest of them would make equal."""
    told = []
    for name in ("a.db", "b.db"):
        ledger = Ledger.create(tmp_path / name, LedgerRun(ABOUT, (make_line(),), 5, clients=3))
        ledger.charge(1, np.array([0, 2]))
        ledger.close()
        salt = read_about(tmp_path / name)["salt"]
        ((entry, _),) = read_links(tmp_path / name, salt)
        told.append((read_runs(tmp_path / name)["one"]["data"], entry.ids))
    assert not set(told[0]) & set(told[1])
    assert all(len(seal) == 64 for seal in (*told[0], *told[1]))


def test_round_that_would_exceed_the_budget_is_refused_and_not_written(ledger, path):
    for round in range(1, 6):
        ledger.charge(round)
    for _ in range(2):
        with pytest.raises(BudgetExhausted, match="permits 5 rounds; nothing was released"):
            ledger.charge(6)
    assert rounds_on_disk(path) == [1, 2, 3, 4, 5]


def test_budget_of_nothing_refuses_the_first_round(path, make_line):
    ledger = Ledger.create(path, LedgerRun(ABOUT, (make_line(),), 0))
    with pytest.raises(BudgetExhausted):
        ledger.charge(1)
    ledger.close()
    assert rounds_on_disk(path) == []


def test_replay_is_free_even_at_the_end_of_the_budget(ledger, path):
    for round in range(1, 6):
        ledger.charge(round)
    before = read_charges(path)
    for round in range(1, 6):
        ledger.charge(round)
    assert read_charges(path) == before


def test_rounds_cannot_be_skipped(path, make_line):
    """With shares, skipped rounds could all be one client's: count x share would be too low."""
    ledger = Ledger.create(path, LedgerRun(ABOUT, (make_line(share=Fraction(1, 4)),), 5))
    ledger.charge(1)
    with pytest.raises((BadInput, AssertionError)):
        ledger.charge(5)
    ledger.close()
    assert rounds_on_disk(path) == [1]


@pytest.mark.parametrize("round", [0, -1])
def test_rounds_count_from_one(ledger, path, round):
    with pytest.raises((BadInput, AssertionError)):
        ledger.charge(round)
    assert rounds_on_disk(path) == []


def test_no_lines_mean_no_charges_and_no_refusals(path):
    ledger = Ledger.create(path, LedgerRun(ABOUT, (), 1))
    for round in range(1, 10):
        ledger.charge(round)
    ledger.close()
    assert read_charges(path) == []


def test_ledger_in_memory_keeps_the_budget_too(make_line):
    ledger = Ledger.create(None, LedgerRun(ABOUT, (make_line(),), 1))
    ledger.charge(1)
    ledger.charge(1)
    with pytest.raises(BudgetExhausted):
        ledger.charge(2)
    ledger.close()


# --- several lines ---


def test_every_line_is_charged_in_the_rounds_in_which_it_is_due(path, make_line):
    lines = (make_line(), make_line(covers="norms", every=3, event=Gaussian(7.0)))
    ledger = Ledger.create(path, LedgerRun(ABOUT, lines, 9))
    for round in range(1, 8):
        ledger.charge(round)
    assert ledger.charged() == 7
    ledger.close()
    charges = read_charges(path)
    assert [c.round for c in charges if c.covers == "updates"] == [1, 2, 3, 4, 5, 6, 7]
    assert [c.round for c in charges if c.covers == "norms"] == [1, 4, 7]
    assert {c.event["multiplier"] for c in charges if c.covers == "norms"} == {7.0}


def test_another_reading_of_a_release_is_not_charged(path, make_line):
    ledger = Ledger.create(path, LedgerRun(ABOUT, (make_line(), make_line(reading=True)), 9))
    ledger.charge(1)
    ledger.close()
    assert len(read_charges(path)) == 1


# --- turns ---


@pytest.fixture
def counting(path, make_line):
    ledger = Ledger.create(path, LedgerRun(ABOUT, (make_line(),), 5, clients=3))
    yield ledger
    ledger.close()


def test_turns_are_written_with_the_charge_and_not_by_a_replay(counting, path):
    counting.charge(1, np.array([0, 2]))
    counting.charge(2, np.array([0]))
    counting.charge(1, np.array([0, 2]))
    assert read_participations(path).tolist() == [2, 0, 1]
    assert counting.counts().tolist() == [2, 0, 1]


def test_a_replay_with_another_cohort_is_refused(counting, path):
    counting.charge(1, np.array([0, 2]))
    with pytest.raises(LedgerMismatch, match="another cohort"):
        counting.charge(1, np.array([0, 1]))
    assert read_participations(path).tolist() == [1, 0, 1]


def test_refused_round_does_not_count_anybody(counting, path):
    for round in range(1, 6):
        counting.charge(round, np.arange(3))
    with pytest.raises(BudgetExhausted):
        counting.charge(6, np.arange(3))
    assert read_participations(path).tolist() == [5, 5, 5]


def test_turns_and_charge_are_one_transaction(counting, path):
    """A cohort that cannot be written takes the charge with it."""
    counting._db.execute("DROP TABLE cohorts")
    with pytest.raises(sqlite3.OperationalError):
        counting.charge(1, np.array([1]))
    assert rounds_on_disk(path) == []


def test_ledger_that_counts_nobody_has_no_counts(ledger, path):
    ledger.charge(1)
    assert read_participations(path) is None
    assert ledger.counts() is None


def test_ledger_tells_the_turns_of_any_number_of_rounds(counting, path, make_line):
    """A round that was charged and not finished has been reported by its clients all the same."""
    assert counting.counts().tolist() == [0, 0, 0]
    for round, ids in enumerate(([0, 2], [2], [], [1, 2]), 1):
        counting.charge(round, np.array(ids, dtype=np.int64))
    expected = {0: [0, 0, 0], 1: [1, 0, 1], 2: [1, 0, 2], 3: [1, 0, 2], 4: [1, 1, 3]}
    for rounds in (4, 1, 0, 2, 3, 4):
        assert counting.turns(rounds).tolist() == expected[rounds]
    counting.close()
    again = Ledger.reopen(path, LedgerRun(ABOUT, (make_line(),), 5, clients=3))
    assert again.turns(2).tolist() == expected[2]
    assert again.counts().tolist() == expected[4]
    again.close()


def test_ledger_of_another_number_of_clients_is_refused(counting, path, make_line):
    with pytest.raises(LedgerMismatch, match="clients is '3'"):
        Ledger.reopen(path, LedgerRun(ABOUT, (make_line(),), 5, clients=4))


@pytest.mark.parametrize("bad", ["x'0102'", "x'09000000'"], ids=["cut", "nobody's"])
def test_cohorts_that_cannot_be_read_are_refused(counting, path, bad):
    counting.charge(1, np.array([1]))
    alter(path, f"UPDATE cohorts SET ids = {bad}")
    with pytest.raises(BadInput, match="cohorts cannot be read"):
        read_participations(path)
