"""Every change of a ledger's rows is found, with its place."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import NoiseSource
from fedveil.privacy.ledger.file import read_closing
from fedveil.privacy.ledger.hash_chain import Head, verify
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.ledger.shared import Common

CLIENTS = 6


def about(run):
    return {"run": run, "recipe": run, "data": "d", "noise": "secure"}


@pytest.fixture
def path(tmp_path, make_line):
    """Three runs with counted turns on a shared ledger; the second has an empty cohort."""
    path = tmp_path / "ledger.db"
    lines = (make_line(noise=NoiseSource.SECURE, budget=Budget(3.0, 1e-5)),)
    common = Common.from_lines(lines, "d", 9.0)
    rest = (lines, 9, CLIENTS, common)
    first = Ledger.create(path, LedgerRun(about("one"), *rest))
    first.charge(1, np.array([0, 1]))
    second = Ledger.join(path, LedgerRun(about("two"), *rest))
    second.charge(1, np.array([], dtype=np.int64))
    first.charge(2, np.array([2, 3]))
    first.charge(2, np.array([2, 4]))
    third = Ledger.join(path, LedgerRun(about("three"), *rest))
    third.charge(1, np.array([5]))
    third.note_end({"result.json": "a"})
    third.note_resumed()
    third.note_end({"result.json": "b"})
    second.charge(2, np.array([0, 5]))
    second.note_end({"result.json": "c"})
    for ledger in (first, second, third):
        ledger.close()
    return path


def alter(path, *statements):
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def test_a_ledger_that_was_left_alone_is_whole(path):
    head = verify(path)
    assert head.length == 10
    assert verify(path, head) == head


ROTATED = "substr(hash, 2) || substr(hash, 1, 1)"
LATE = "json_set(about, '$.after', '9')"
CHANGES = {
    # charges
    "the round of a charge": ["UPDATE charges SET round = 7 WHERE seq = 3"],
    "the attempt of a charge": ["UPDATE charges SET attempt = 0, round = 3 WHERE seq = 4"],
    "the run of a charge": ["UPDATE charges SET run = 'three', round = 5 WHERE seq = 2"],
    "the line of a charge": ["UPDATE charges SET covers = 'bits' WHERE seq = 1"],
    "the noise of a charge": ["UPDATE charges SET event = replace(event, '4.0', '8.0')"],
    "the time of a charge": ["UPDATE charges SET charged_at = '2020' WHERE seq = 5"],
    "a hash": [f"UPDATE charges SET hash = {ROTATED} WHERE seq = 2"],
    "the last hash": ["UPDATE charges SET hash = 'x' WHERE seq = 9"],
    "the type of a value": ["UPDATE charges SET event = CAST(event AS BLOB) WHERE seq = 2"],
    "a hash that is none": ["UPDATE charges SET hash = CAST(hash AS BLOB) WHERE seq = 2"],
    "the first charge removed": ["DELETE FROM charges WHERE seq = 1"],
    "a charge removed": ["DELETE FROM charges WHERE seq = 3"],
    "a charge removed, the rest moved up": [
        "DELETE FROM charges WHERE seq = 3",
        "UPDATE charges SET seq = seq - 1 WHERE seq > 3",
    ],
    "a charge inserted": [
        "INSERT INTO charges SELECT 11, run, 9, 0, covers, event, charged_at, hash "
        "FROM charges WHERE seq = 9"
    ],
    "two charges exchanged": [
        "UPDATE charges SET seq = 100 WHERE seq = 2",
        "UPDATE charges SET seq = 2 WHERE seq = 3",
        "UPDATE charges SET seq = 3 WHERE seq = 100",
    ],
    # cohorts
    "a cohort": ["UPDATE cohorts SET ids = x'05000000' WHERE run = 'one' AND round = 1"],
    "a cohort emptied": ["UPDATE cohorts SET ids = x'' WHERE run = 'one' AND round = 1"],
    "a cohort as text": ["UPDATE cohorts SET ids = 'all' WHERE run = 'one' AND round = 1"],
    "a cohort removed": ["DELETE FROM cohorts WHERE run = 'three'"],
    "an empty cohort removed": ["DELETE FROM cohorts WHERE run = 'two' AND round = 1"],
    "all cohorts removed": ["DELETE FROM cohorts"],
    "a cohort inserted": ["INSERT INTO cohorts VALUES ('three', 8, 0, x'01000000')"],
    "a cohort of nobody's run": ["INSERT INTO cohorts VALUES ('four', 1, 0, x'01000000')"],
    "two cohorts exchanged": [
        "UPDATE cohorts SET attempt = 9 WHERE run = 'one' AND round = 2 AND attempt = 0",
        "UPDATE cohorts SET attempt = 0 WHERE run = 'one' AND round = 2 AND attempt = 1",
        "UPDATE cohorts SET attempt = 1 WHERE run = 'one' AND round = 2 AND attempt = 9",
    ],
    # runs
    "what a run registered with": ["UPDATE runs SET about = replace(about, '4.0', '8.0')"],
    "the name of a run": ["UPDATE runs SET run = 'four' WHERE run = 'two'"],
    "a run removed": ["DELETE FROM runs WHERE run = 'two'"],
    "a run removed with its charges": [
        "DELETE FROM runs WHERE run = 'three'",
        "DELETE FROM charges WHERE run = 'three'",
        "DELETE FROM cohorts WHERE run = 'three'",
    ],
    "a run inserted": [
        "INSERT INTO runs SELECT 'four', json_set(about, '$.run', 'four') FROM runs LIMIT 1"
    ],
    "two runs exchanged": [
        "UPDATE runs SET rowid = 50 WHERE run = 'one'",
        "UPDATE runs SET rowid = 1 WHERE run = 'two'",
        "UPDATE runs SET rowid = 2 WHERE run = 'one'",
    ],
    "when a run registered": [f"UPDATE runs SET about = {LATE} WHERE run = 'three'"],
    "a run that says nothing": ["UPDATE runs SET about = '[]' WHERE run = 'three'"],
    # about
    "the common budget": ["UPDATE about SET value = '99.0' WHERE key = 'common epsilon'"],
    "the common delta removed": ["DELETE FROM about WHERE key = 'common delta'"],
    "a row of about inserted": ["INSERT INTO about VALUES ('note', 'mine')"],
    "the format": ["UPDATE about SET value = '99' WHERE key = 'format'"],
    # closings
    "what a run left": ["UPDATE closings SET files = upper(files) WHERE seq = 8"],
    "whose end it was": ["UPDATE closings SET run = 'one' WHERE seq = 8"],
    "when a run ended": ["UPDATE closings SET closed_at = '2020' WHERE seq = 6"],
    "the hash of an end": [f"UPDATE closings SET hash = {ROTATED} WHERE seq = 6"],
    "the type of an end": ["UPDATE closings SET files = CAST(files AS BLOB) WHERE seq = 8"],
    "an end removed": ["DELETE FROM closings WHERE seq = 8"],
    "the news that a run went on removed": ["DELETE FROM closings WHERE seq = 7"],
    "an end inserted": [
        "INSERT INTO closings SELECT 11, 'one', files, closed_at, hash FROM closings WHERE seq = 8"
    ],
    "an end beside a charge": [
        "INSERT INTO closings SELECT 9, run, files, closed_at, hash FROM closings WHERE seq = 8"
    ],
    "two ends exchanged": [
        "UPDATE closings SET seq = 100 WHERE seq = 6",
        "UPDATE closings SET seq = 6 WHERE seq = 8",
        "UPDATE closings SET seq = 8 WHERE seq = 100",
    ],
    "two ends exchanged but for their hashes": [
        'UPDATE closings SET files = \'{"result.json": "b"}\' WHERE seq = 6',
        'UPDATE closings SET files = \'{"result.json": "a"}\' WHERE seq = 8',
    ],
    "all ends removed": ["DELETE FROM closings"],
    # the file
    "the salt": ["UPDATE about SET value = 'x' WHERE key = 'salt'"],
    "the salt removed": ["DELETE FROM about WHERE key = 'salt'"],
    "a table removed": ["DROP TABLE cohorts"],
    "a table added": ["CREATE TABLE more (x)"],
    "a trigger that takes charges back": [
        "CREATE TRIGGER t AFTER INSERT ON charges BEGIN DELETE FROM charges WHERE seq > 9; END"
    ],
    "a view": ["CREATE VIEW v AS SELECT 1"],
    "an index emptied": [
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET rootpage = (SELECT rootpage FROM sqlite_master "
        "WHERE name = 'sqlite_autoindex_runs_1') WHERE name = 'sqlite_autoindex_charges_1'",
    ],
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_is_found(path, how):
    alter(path, *CHANGES[how])
    with pytest.raises(BadInput) as told:
        verify(path)
    assert str(path) in str(told.value)
    assert "\n" not in str(told.value)


def test_the_place_of_a_change_is_told(path):
    alter(path, "UPDATE charges SET covers = 'bits' WHERE seq = 4")
    with pytest.raises(BadInput, match=r"entry 4 \(round 2 of one\)"):
        verify(path)


def test_the_place_of_a_changed_end_is_told(path):
    alter(path, "UPDATE closings SET files = '{}' WHERE seq = 8")
    with pytest.raises(BadInput, match=r"entry 8 \(the end of three\)"):
        verify(path)


def test_a_removed_last_end_is_found_by_who_knows_the_head(path):
    head = verify(path)
    alter(path, "DELETE FROM closings WHERE seq = 10")
    assert read_closing(path, "two") == {}
    with pytest.raises(BadInput, match="9 entries, and there were 10: the end was cut off"):
        verify(path, head)


def test_the_last_end_of_a_run_counts(path):
    """One run never ended, one went on and ended again, one was between others' entries."""
    left = {run: read_closing(path, run) for run in ("one", "two", "three")}
    assert left == {"one": {}, "two": {"result.json": "c"}, "three": {"result.json": "b"}}


def test_a_run_that_goes_on_is_open(path, make_line):
    lines = (make_line(noise=NoiseSource.SECURE),)
    ledger = Ledger.reopen(
        path, LedgerRun(about("two"), lines, 9, CLIENTS, Common.from_lines(lines, "d", 9.0))
    )
    ledger.note_resumed()
    assert (ledger.closing_files(), read_closing(path, "two")) == ({}, {})
    ledger.note_resumed()
    ledger.close()
    assert verify(path).length == 11


def test_a_cut_tail_is_found_by_who_knows_the_head(path):
    head = verify(path)
    alter(
        path,
        "DELETE FROM charges WHERE seq = 9",
        "DELETE FROM closings WHERE seq = 10",
        "DELETE FROM cohorts WHERE run = 'two' AND round = 2",
    )
    assert verify(path).length == 8
    with pytest.raises(BadInput, match="8 entries, and there were 10: the end was cut off"):
        verify(path, head)


def test_an_emptied_ledger_is_found_by_who_knows_the_head(path):
    head = verify(path)
    alter(path, "DELETE FROM charges", "DELETE FROM cohorts", "DELETE FROM closings")
    assert verify(path).length == 0
    with pytest.raises(BadInput, match="the end was cut off"):
        verify(path, head)


def test_a_ledger_that_went_on_still_has_the_old_head(path, make_line):
    head = verify(path)
    lines = (make_line(noise=NoiseSource.SECURE),)
    ledger = Ledger.reopen(
        path, LedgerRun(about("one"), lines, 9, CLIENTS, Common.from_lines(lines, "d", 9.0))
    )
    ledger.charge(3, np.array([1]))
    ledger.close()
    assert verify(path, head).length == 11


def test_a_ledger_written_anew_is_found_by_who_knows_the_head(path, tmp_path, make_line):
    """The same charges at another time: a whole chain, and not the one that was seen."""
    head = verify(path)
    other = tmp_path / "other.db"
    lines = (make_line(),)
    ledger = Ledger.create(other, LedgerRun(about("one"), lines, 11))
    for round in range(1, 12):
        ledger.charge(round)
    ledger.close()
    assert verify(other).length == 11
    with pytest.raises(BadInput, match="entry 10 is not the one that was seen"):
        verify(other, head)


def test_a_ledger_without_charges_has_a_head_too(tmp_path, make_line):
    path = tmp_path / "ledger.db"
    Ledger.create(path, LedgerRun(about("one"), (make_line(),), 9)).close()
    head = verify(path)
    assert head.length == 0
    alter(path, "INSERT INTO about VALUES ('note', 'mine')")
    with pytest.raises(BadInput, match="entry 0 is not the one"):
        verify(path, head)
    with pytest.raises(BadInput, match="the end was cut off"):
        verify(path, Head(head.hash, 1))


def test_the_head_that_a_ledger_tells_is_the_one_that_is_verified(path, make_line):
    lines = (make_line(noise=NoiseSource.SECURE),)
    ledger = Ledger.reopen(
        path, LedgerRun(about("one"), lines, 9, CLIENTS, Common.from_lines(lines, "d", 9.0))
    )
    assert ledger.head() == verify(path)
    ledger.close()


def test_runs_say_after_which_charge_they_came(path):
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT run, about FROM runs ORDER BY rowid").fetchall()
    assert [(run, json.loads(text)["after"]) for run, text in rows] == [
        ("one", "0"),
        ("two", "1"),
        ("three", "4"),
    ]
