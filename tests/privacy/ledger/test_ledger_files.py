"""A ledger's file: a crash over-counts and never under-counts, and no other file passes for it."""

import multiprocessing
import os
import signal
import sqlite3
import threading
from fractions import Fraction

import pytest

from fedveil.base.errors import BadInput, BudgetExhausted, LedgerMismatch
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import NoiseSource
from fedveil.privacy.accounting.events import Gaussian
from fedveil.privacy.ledger.file import read_about, read_charges, read_runs
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from tests.privacy.ledger.conftest import ABOUT, alter, rounds_on_disk

# --- durability ---


def test_every_connection_waits_for_the_disk(ledger, path, make_line):
    """2 is FULL, which syncs the log at every commit; 0 and 1 may lose a charge in a power cut."""
    again = Ledger.reopen(path, LedgerRun(ABOUT, (make_line(),), 5))
    for one in (ledger, again):
        assert one._db.execute("PRAGMA synchronous").fetchone()[0] >= 2
        assert one._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    again.close()


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_charge_survives_a_process_killed_right_after_it(path, make_line):
    terms = make_line()

    def charge():
        ledger = Ledger.create(path, LedgerRun(ABOUT, (terms,), 2))
        ledger.charge(1)
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=charge)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert rounds_on_disk(path) == [1]
    ledger = Ledger.reopen(path, LedgerRun(ABOUT, (terms,), 2))
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
    again = Ledger.reopen(path, LedgerRun(ABOUT, (make_line(),), 5))
    again.charge(5)
    with pytest.raises(BudgetExhausted):
        again.charge(6)
    again.close()


@pytest.mark.parametrize("key", ["run", "recipe", "data"])
def test_ledger_of_something_else_is_refused(ledger, path, make_line, key):
    with pytest.raises(LedgerMismatch, match=key):
        Ledger.reopen(path, LedgerRun({**ABOUT, key: "other"}, (make_line(),), 5))


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
        Ledger.reopen(path, LedgerRun(ABOUT, (make_line(**change),), 5))


def test_ledger_without_lines_is_not_taken_for_one_with_lines(ledger, path):
    with pytest.raises(LedgerMismatch, match="lines"):
        Ledger.reopen(path, LedgerRun(ABOUT, (), 5))


def test_new_ledger_never_overwrites_an_old_one(ledger, path, make_line):
    ledger.charge(1)
    with pytest.raises((BadInput, sqlite3.OperationalError), match="exist"):
        Ledger.create(path, LedgerRun(ABOUT, (make_line(),), 5))
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
    other = Ledger.reopen(path, LedgerRun(ABOUT, (make_line(),), 5))
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
        mine = Ledger.reopen(path, LedgerRun(ABOUT, (make_line(),), 5))
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
    Ledger.reopen(path, LedgerRun(ABOUT, (terms,), 5))


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
