"""Charge, then release; a crash over-counts and never under-counts."""

import math
import multiprocessing
import os
import signal
import sqlite3
import threading
from dataclasses import replace
from datetime import date, datetime
from fractions import Fraction

import numpy as np
import pytest

from fedveil.errors import BadInput, BudgetExhausted, LedgerMismatch
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import NoiseSource, Relation, Trust
from fedveil.privacy.accounting.events import Gaussian, GaussianWithCurator, to_dict
from fedveil.privacy.ledger.file import read_about, read_charges, read_participations, read_runs
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.ledger.verification import read_links

ABOUT = {"run": "one", "recipe": "abc", "data": "def"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path, make_line):
    ledger = Ledger.create(path, ABOUT, (make_line(),), 5)
    yield ledger
    ledger.close()


def rounds_on_disk(path):
    return [charge.round for charge in read_charges(path)]


def alter(path, statement, *values):
    db = sqlite3.connect(path)
    with db:
        db.execute(statement, values)
    db.close()


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
    ledger = Ledger.create(path, ABOUT, (make_line(noise=NoiseSource.SECURE),), 5)
    ledger.charge(1)
    ledger.close()
    (charge,) = read_charges(path)
    assert date.fromisoformat(charge.charged_at)


def test_what_is_said_of_data_and_cohorts_confirms_no_guess(tmp_path, make_line):
    """The same run on the same data twice: nothing that a digest of them would make equal."""
    told = []
    for name in ("a.db", "b.db"):
        ledger = Ledger.create(tmp_path / name, ABOUT, (make_line(),), 5, clients=3)
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
    ledger = Ledger.create(path, ABOUT, (make_line(),), 0)
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


def within(make_line, releases, **changes):
    """Secure terms whose budget is what so many releases cost."""
    plain = make_line(noise=NoiseSource.SECURE, **changes)
    budget = Budget(plain.claims(releases)[0].epsilon * (1 + 1e-6), 1e-5)
    line = make_line(noise=NoiseSource.SECURE, budget=budget, **changes)
    assert line.affords(releases)
    assert not line.affords(releases + 1)
    return line


def test_secure_noise_is_never_replayed_for_free(path, make_line):
    """New randomness on the same data is a second release."""
    ledger = Ledger.create(path, ABOUT, (within(make_line, 5),), 5)
    assert [ledger.charge(1), ledger.charge(2), ledger.charge(2), ledger.charge(2)] == [0, 0, 1, 2]
    assert (ledger.charged(), ledger.again) == (2, 2)
    assert ledger.charge(3) == 0
    for round, again in ((3, 3), (4, 2)):
        with pytest.raises(BudgetExhausted, match=rf"done again \({again}\)"):
            ledger.charge(round)
    ledger.close()
    assert [(c.round, c.attempt) for c in read_charges(path)] == [
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
        (3, 0),
    ]


def test_what_the_budget_has_beyond_the_plan_pays_for_attempts(path, make_line):
    ledger = Ledger.create(path, ABOUT, (within(make_line, 4),), 3)
    charges = [ledger.charge(1), ledger.charge(2), ledger.charge(2), ledger.charge(3)]
    assert charges == [0, 0, 1, 0]
    with pytest.raises(BudgetExhausted, match=r"budget of updates, .* again \(2\)"):
        ledger.charge(3)
    with pytest.raises(BudgetExhausted, match="permits 3 rounds"):
        ledger.charge(4)
    ledger.close()


def test_an_attempt_is_a_turn_of_the_clients_asked(path, make_line):
    """Of two clients one has had all turns its budget pays for; the other may still be asked."""
    local = {"noise": NoiseSource.SECURE, "trust": Trust.LOCAL, "relation": Relation.REPLACE}
    terms = make_line(**local)
    most = terms.permitted(1000)
    ledger = Ledger.create(path, {"run": "one"}, (terms,), most, 2)
    for round in range(1, most + 1):
        ledger.charge(round, np.array([0]))
    with pytest.raises(BudgetExhausted):
        ledger.charge(most, np.array([0]))
    assert ledger.charge(most, np.array([1])) == 1
    assert ledger.counts().tolist() == [most, 1]
    ledger.close()


def test_without_a_limit_as_many_attempts_as_rounds(path, make_line):
    """So many does the sampler's share of delta pay for."""
    line = make_line(noise=NoiseSource.SECURE, budget=Budget(math.inf, 1e-5))
    ledger = Ledger.create(path, ABOUT, (line,), 2)
    assert [ledger.charge(1), ledger.charge(1), ledger.charge(1)] == [0, 1, 2]
    with pytest.raises(BudgetExhausted, match="3 rounds were done again"):
        ledger.charge(1)
    assert ledger.charge(2) == 0
    ledger.close()


def test_what_cannot_be_vouched_for_is_not_charged(path, make_line):
    plain = make_line(noise=NoiseSource.SECURE)
    vouched = plain.claims(3)[0].epsilon * (1 + 1e-6)
    line = make_line(
        noise=NoiseSource.SECURE, budget=Budget(math.inf, 1e-5), slip=0.0, vouched=vouched
    )
    ledger = Ledger.create(path, ABOUT, (line,), 3)
    assert [ledger.charge(1), ledger.charge(1), ledger.charge(2)] == [0, 1, 0]
    with pytest.raises(BudgetExhausted, match=r"done again \(1\)"):
        ledger.charge(3)
    ledger.close()


def test_a_line_that_is_due_now_and_then_has_a_budget_of_its_own(path, make_line):
    """Histograms in rounds 1 and 3 of 4, calibrated for two: a third would exceed their budget."""
    lines = (within(make_line, 5), within(make_line, 2, covers="norms", every=2))
    ledger = Ledger.create(path, ABOUT, lines, 4)
    assert [ledger.charge(1), ledger.charge(1), ledger.charge(2)] == [0, 1, 0]
    with pytest.raises(BudgetExhausted, match=r"budget of norms, .* again \(1\)"):
        ledger.charge(3)
    ledger.close()
    assert [c.covers for c in read_charges(path)].count("norms") == 2


def test_rounds_done_again_are_charged_for_what_the_curator_published(path, make_line):
    """Three turns and two histograms fit; a round done again may be a third histogram."""
    event = GaussianWithCurator(Gaussian(9.0), Gaussian(2.0), 2)
    plain = make_line(event=event, relation=Relation.REPLACE, noise=NoiseSource.SECURE)
    limit = plain.claims(5)[0].epsilon
    line = replace(plain, budget=Budget(limit, 1e-5))
    ledger = Ledger.create(path, ABOUT, (line,), 3)
    assert [ledger.charge(1), ledger.charge(2)] == [0, 0]
    with pytest.raises(BudgetExhausted, match=r"done again \(1\)"):
        ledger.charge(2)
    ledger.close()


def test_rounds_cannot_be_skipped(path, make_line):
    """With shares, skipped rounds could all be one client's: count x share would be too low."""
    ledger = Ledger.create(path, ABOUT, (make_line(share=Fraction(1, 4)),), 5)
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
    ledger = Ledger.create(path, ABOUT, (), 1)
    for round in range(1, 10):
        ledger.charge(round)
    ledger.close()
    assert read_charges(path) == []


def test_ledger_in_memory_keeps_the_budget_too(make_line):
    ledger = Ledger.create(None, ABOUT, (make_line(),), 1)
    ledger.charge(1)
    ledger.charge(1)
    with pytest.raises(BudgetExhausted):
        ledger.charge(2)
    ledger.close()


# --- durability ---


def test_every_connection_waits_for_the_disk(ledger, path, make_line):
    """2 is FULL, which syncs the log at every commit; 0 and 1 may lose a charge in a power cut."""
    again = Ledger.reopen(path, ABOUT, (make_line(),), 5)
    for one in (ledger, again):
        assert one._db.execute("PRAGMA synchronous").fetchone()[0] >= 2
        assert one._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    again.close()


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_charge_survives_a_process_killed_right_after_it(path, make_line):
    terms = make_line()

    def charge():
        ledger = Ledger.create(path, ABOUT, (terms,), 2)
        ledger.charge(1)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=charge)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert rounds_on_disk(path) == [1]
    ledger = Ledger.reopen(path, ABOUT, (terms,), 2)
    ledger.charge(1)
    ledger.charge(2)
    with pytest.raises(BudgetExhausted):
        ledger.charge(3)
    ledger.close()


def test_charge_that_cannot_be_written_raises(ledger, path):
    """The caller must not go on to release."""
    ledger._db.execute("PRAGMA query_only = ON")
    with pytest.raises(sqlite3.OperationalError):
        ledger.charge(1)
    ledger._db.execute("PRAGMA query_only = OFF")
    assert rounds_on_disk(path) == []
    ledger.charge(1)
    assert rounds_on_disk(path) == [1]


# --- reopening ---


def test_reopened_ledger_remembers_what_was_charged(ledger, path, make_line):
    for round in range(1, 5):
        ledger.charge(round)
    ledger.close()
    again = Ledger.reopen(path, ABOUT, (make_line(),), 5)
    again.charge(5)
    with pytest.raises(BudgetExhausted):
        again.charge(6)
    again.close()


@pytest.mark.parametrize("key", ["run", "recipe", "data"])
def test_ledger_of_something_else_is_refused(ledger, path, make_line, key):
    with pytest.raises(LedgerMismatch, match=key):
        Ledger.reopen(path, {**ABOUT, key: "other"}, (make_line(),), 5)


@pytest.mark.parametrize(
    "change",
    [
        {"event": Gaussian(4.0000001)},
        {"budget": Budget(3.1, 1e-5)},
        {"budget": Budget(3.0, 1e-6)},
        {"share": Fraction(1, 2)},
        {"noise": NoiseSource.SECURE},
        {"cap": 3},
        {"every": 2},
        {"per": 2},
        {"covers": "bits"},
        {"reading": True},
        {"as_published": True},
    ],
    ids=str,
)
def test_ledger_with_other_terms_is_refused(ledger, path, make_line, change):
    with pytest.raises(LedgerMismatch, match="lines"):
        Ledger.reopen(path, ABOUT, (make_line(**change),), 5)


def test_ledger_without_lines_is_not_taken_for_one_with_lines(ledger, path):
    with pytest.raises(LedgerMismatch, match="lines"):
        Ledger.reopen(path, ABOUT, (), 5)


def test_new_ledger_never_overwrites_an_old_one(ledger, path, make_line):
    ledger.charge(1)
    with pytest.raises((BadInput, sqlite3.OperationalError), match="exist"):
        Ledger.create(path, ABOUT, (make_line(),), 5)
    assert rounds_on_disk(path) == [1]


def test_about_is_what_was_written(ledger, path):
    about = read_about(path)
    assert about.pop("format") == "5"
    assert len(bytes.fromhex(about.pop("salt"))) == 32
    assert not about
    (run,) = read_runs(path).values()
    plain = {key: value for key, value in ABOUT.items() if key != "data"}
    assert {key: run[key] for key in plain} == plain
    assert len(run["data"]) == 64


# --- two at once ---


def test_two_connections_share_one_budget(ledger, path, make_line):
    other = Ledger.reopen(path, ABOUT, (make_line(),), 5)
    for round in range(1, 6):
        (ledger if round % 2 else other).charge(round)
    for one in (ledger, other):
        with pytest.raises(BudgetExhausted):
            one.charge(6)
    other.close()
    assert rounds_on_disk(path) == [1, 2, 3, 4, 5]


def test_connections_that_race_for_a_round_charge_it_once(ledger, path, make_line):
    barrier, failures = threading.Barrier(4), []

    def run():
        mine = Ledger.reopen(path, ABOUT, (make_line(),), 5)
        barrier.wait()
        try:
            for round in range(1, 6):
                mine.charge(round)
        except Exception as e:
            failures.append(e)
        finally:
            mine.close()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert rounds_on_disk(path) == [1, 2, 3, 4, 5]


def test_charge_waits_for_a_writer_and_raises_if_it_never_ends(ledger, path):
    ledger._db.execute("PRAGMA busy_timeout = 50")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        ledger.charge(1)
    other.execute("ROLLBACK")
    other.close()
    ledger.charge(1)
    assert rounds_on_disk(path) == [1]


# --- bad files ---


def open_again(path, terms):
    Ledger.reopen(path, ABOUT, (terms,), 5)


READERS = [
    pytest.param(lambda path, terms: read_about(path), id="about"),
    pytest.param(lambda path, terms: read_charges(path), id="charges"),
    pytest.param(open_again, id="reopen"),
]


@pytest.mark.parametrize("read", READERS)
def test_missing_file_is_refused_and_not_created(path, make_line, read):
    with pytest.raises(BadInput, match="no ledger here"):
        read(path, make_line())
    assert not path.exists()


@pytest.mark.parametrize("read", READERS)
def test_directory_is_refused(tmp_path, make_line, read):
    with pytest.raises(BadInput, match="no ledger here"):
        read(tmp_path, make_line())


@pytest.mark.parametrize("content", [b"", b"not a database " * 500], ids=["empty", "text"])
@pytest.mark.parametrize("read", READERS)
def test_file_that_is_no_ledger_is_refused(path, make_line, read, content):
    path.write_bytes(content)
    with pytest.raises(BadInput, match="not a fedveil ledger"):
        read(path, make_line())
    assert path.read_bytes() == content


@pytest.mark.parametrize("read", READERS)
def test_truncated_file_is_refused(ledger, path, make_line, read):
    ledger.charge(1)
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match="not a fedveil ledger"):
        read(path, make_line())


def test_other_format_is_refused(ledger, path, make_line):
    ledger.close()
    alter(path, "UPDATE about SET value = '99' WHERE key = 'format'")
    for read in (lambda: read_about(path), lambda: open_again(path, make_line())):
        with pytest.raises(BadInput, match="format '99'"):
            read()


def test_ledger_without_a_format_is_refused(ledger, path):
    ledger.close()
    alter(path, "DELETE FROM about WHERE key = 'format'")
    with pytest.raises(BadInput, match="format None"):
        read_about(path)


def test_charge_that_is_not_json_is_refused(ledger, path):
    ledger.charge(1)
    alter(path, "UPDATE charges SET event = '{'")
    with pytest.raises(BadInput):
        read_charges(path)


# --- several lines ---


def test_every_line_is_charged_in_the_rounds_in_which_it_is_due(path, make_line):
    lines = (make_line(), make_line(covers="norms", every=3, event=Gaussian(7.0)))
    ledger = Ledger.create(path, ABOUT, lines, 9)
    for round in range(1, 8):
        ledger.charge(round)
    assert ledger.charged() == 7
    ledger.close()
    charges = read_charges(path)
    assert [c.round for c in charges if c.covers == "updates"] == [1, 2, 3, 4, 5, 6, 7]
    assert [c.round for c in charges if c.covers == "norms"] == [1, 4, 7]
    assert {c.event["multiplier"] for c in charges if c.covers == "norms"} == {7.0}


def test_another_reading_of_a_release_is_not_charged(path, make_line):
    ledger = Ledger.create(path, ABOUT, (make_line(), make_line(reading=True)), 9)
    ledger.charge(1)
    ledger.close()
    assert len(read_charges(path)) == 1


# --- turns ---


@pytest.fixture
def counting(path, make_line):
    ledger = Ledger.create(path, ABOUT, (make_line(),), 5, clients=3)
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
    again = Ledger.reopen(path, ABOUT, (make_line(),), 5, clients=3)
    assert again.turns(2).tolist() == expected[2]
    assert again.counts().tolist() == expected[4]
    again.close()


def test_ledger_of_another_number_of_clients_is_refused(counting, path, make_line):
    with pytest.raises(LedgerMismatch, match="clients is '3'"):
        Ledger.reopen(path, ABOUT, (make_line(),), 5, clients=4)


@pytest.mark.parametrize("bad", ["x'0102'", "x'09000000'"], ids=["cut", "nobody's"])
def test_cohorts_that_cannot_be_read_are_refused(counting, path, bad):
    counting.charge(1, np.array([1]))
    alter(path, f"UPDATE cohorts SET ids = {bad}")
    with pytest.raises(BadInput, match="cohorts cannot be read"):
        read_participations(path)
