"""One look at a ledger: of one moment, writing nothing, whoever writes it meanwhile."""

import multiprocessing
import os
import shutil
import subprocess
import sys

import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.ledger import file as ledger_file
from fedveil.privacy.ledger.file import ledger_snapshot, query, read_charges, read_runs
from fedveil.privacy.ledger.hash_chain import verify
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun

COUNT = "SELECT COUNT(*) FROM charges"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger ?x=1#%20.db"


@pytest.fixture
def ledger(path, make_line):
    ledger = Ledger.create(path, LedgerRun({"run": "one", "data": "d"}, (make_line(),), 500))
    yield ledger
    ledger.close()


def names(path):
    return sorted(one.name for one in path.parent.iterdir())


def test_a_ledger_at_rest_is_read_in_place_and_left_alone(ledger, path):
    ledger.charge(1)
    ledger.close()
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert len(read_charges(path)) == 1
    assert verify(path).length == 1
    assert names(path) == [path.name]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_charges_that_are_in_the_log_only_are_read_from_a_copy(ledger, path, tmp_path):
    for round in (1, 2, 3):
        ledger.charge(round)
    other = tmp_path / "other"
    other.mkdir()
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", other / f"ledger.db{end}")
    before = {one.name: one.read_bytes() for one in other.iterdir()}
    assert len(read_charges(other / "ledger.db")) == 3
    assert verify(other / "ledger.db").length == 3
    assert {one.name: one.read_bytes() for one in other.iterdir()} == before


def test_a_link_to_a_ledger_has_the_ledgers_log(ledger, path, tmp_path):
    ledger.charge(1)
    copied = tmp_path / "there"
    copied.mkdir()
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", copied / f"ledger.db{end}")
    (tmp_path / "link.db").symlink_to(copied / "ledger.db")
    assert len(read_charges(tmp_path / "link.db")) == 1


def test_a_look_is_at_one_moment(ledger, path):
    ledger.charge(1)
    with ledger_snapshot(path):
        assert query(path, COUNT) == [(1,)]
        ledger.charge(2)
        assert query(path, COUNT) == [(1,)]
    assert query(path, COUNT) == [(2,)]


def test_locks_of_this_process_outlive_a_look(ledger, path):
    """A descriptor that is opened and closed beside SQLite's would take its locks away.

    Another process that opens and closes the ledger would then think that it was the last one, and
    take the log away.
    """
    ledger.charge(1)
    read_charges(path)
    log = path.with_name(f"{path.name}-wal")
    code = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.execute(sys.argv[2])"
    code += ".fetchall(); db.close()"
    subprocess.run([sys.executable, "-c", code, path, COUNT], check=True)
    assert log.stat().st_size > 0
    ledger.charge(2)
    assert len(read_charges(path)) == 2


def charge_on(path, lines, ready):
    ledger = Ledger.reopen(path, LedgerRun({"run": "one", "data": "d"}, lines, 500))
    ready.set()
    for round in range(1, 301):
        ledger.charge(round)
    ledger.close()


def test_a_ledger_that_is_being_written_is_whole_at_every_look(path, make_line):
    """Charges by another process, and a checkpoint of its log at the end."""
    lines = (make_line(),)
    Ledger.create(path, LedgerRun({"run": "one", "data": "d"}, lines, 500)).close()
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    writer = fork.Process(target=charge_on, args=(path, lines, ready))
    writer.start()
    ready.wait(60)
    lengths, refusals = [], []
    while writer.is_alive():
        try:
            lengths.append(verify(path).length)
        except BadInput as e:
            refusals.append(str(e))
    writer.join()
    assert all("look again" in told for told in refusals)
    assert lengths == sorted(lengths)
    assert verify(path).length == 300


def test_what_was_written_while_it_was_read_is_told_as_that(ledger, path):
    ledger.close()

    def torn():
        with ledger_snapshot(path):
            os.utime(path, ns=(0, 0))
            raise BadInput("it does not fit")

    with pytest.raises(BadInput, match="written while it was read; look again"):
        torn()


def test_a_log_that_changes_all_the_time_is_told(ledger, path, tmp_path, monkeypatch):
    ledger.charge(1)
    other = tmp_path / "other.db"
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", f"{other}{end}")
    copyfile = shutil.copyfile

    def meanwhile(source, target):
        copyfile(source, target)
        os.utime(other, ns=(0, os.stat(other).st_mtime_ns + 1))

    monkeypatch.setattr(ledger_file.shutil, "copyfile", meanwhile)
    with pytest.raises(BadInput, match="written all the time; look again"):
        read_runs(other)


def test_no_room_for_a_copy_is_told(ledger, path, tmp_path, monkeypatch):
    ledger.charge(1)
    other = tmp_path / "other.db"
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", f"{other}{end}")
    monkeypatch.setattr(ledger_file.tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match="set TMPDIR"):
        read_runs(other)
