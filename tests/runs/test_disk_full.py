"""A disk that is full, files that cannot be written or opened: one line, and no charge is lost."""

import errno
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.ledger.file import read_charges
from fedveil.runs import checkpoint
from fedveil.runs import run as runs
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.runs.run_directory import locked

from .conftest import BASE
from .endings import at, model_of, one_line


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def denied(*_, **__):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class FullDisk(sqlite3.Connection):
    """A ledger's disk that is full from the third charge on."""

    def execute(self, statement, *rest):
        if statement.startswith("INSERT INTO charges") and rest[0][2] == 3:
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(statement, *rest)


class FullAtCommit(sqlite3.Connection):
    """The same, noticed at the end of the transaction only."""

    def execute(self, statement, *rest):
        if statement.startswith("INSERT INTO charges") and rest[0][2] == 3:
            self.third = True
        if statement == "COMMIT" and getattr(self, "third", False):
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(statement, *rest)


def started(tmp_path):
    recipe = load_recipe("ldp-sgd", BASE["ldp-sgd"])
    return Run.start(recipe, tmp_path / "here" / "run", None)


@pytest.mark.parametrize("kind", [FullDisk, FullAtCommit])
def test_a_ledger_that_cannot_grow_ends_the_run_before_the_round(made, tmp_path, monkeypatch, kind):
    run, connect, seen = started(tmp_path), sqlite3.connect, []
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, factory=kind, **k))
    with pytest.raises(BadInput, match=r"disk is full.*--resume"):
        run.execute(lambda line: seen.append(line["round"]))
    monkeypatch.undo()
    assert seen == [1, 2]
    assert [charge.round for charge in read_charges(run.folder / "ledger.db")] == [1, 2]
    Run.resume(run.folder, None).execute()
    assert model_of(run.folder) == model_of(made / "whole" / "run")


FULL = {
    "at the sync": lambda patch: patch.setattr(os, "fsync", full),
    "at the write": lambda patch: patch.setattr(checkpoint, "write_atomic", full),
    "no permission": lambda patch: patch.setattr(checkpoint, "write_atomic", denied),
}


@pytest.mark.parametrize("how", FULL)
def test_a_checkpoint_that_cannot_be_written_ends_the_run(made, tmp_path, monkeypatch, how):
    """The round was charged and released; with the same noise it is done again."""
    run = started(tmp_path)
    with pytest.raises(BadInput, match=r"(No space left|Permission denied).*--resume") as told:
        run.execute(at(1, lambda: FULL[how](monkeypatch)))
    assert "\n" not in str(told.value)
    monkeypatch.undo()
    assert [charge.round for charge in read_charges(run.folder / "ledger.db")] == [1, 2]
    Run.resume(run.folder, None).execute()
    assert model_of(run.folder) == model_of(made / "whole" / "run")


@pytest.mark.parametrize("error", [full, denied])
def test_a_disk_that_is_full_from_the_start_is_told(tmp_path, monkeypatch, error):
    run = started(tmp_path)
    monkeypatch.setattr(runs, "write_atomic", error)
    with pytest.raises(BadInput, match="the run cannot continue"):
        run.execute()


def test_a_directory_that_cannot_be_written_is_told_on_resume(copy, cli, monkeypatch):
    folder, opened = copy("cut"), Path.open

    def deny(self, mode="r", *rest, **more):
        if self.parent == folder and mode != "r":
            denied()
        return opened(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", deny)
    line = one_line(cli("run", "--resume", folder, "--quiet"))
    assert "Permission denied" in line


def test_a_ledger_that_cannot_be_opened_is_told(copy, cli, monkeypatch):
    folder = copy("cut")

    def refuse(*_, **__):
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(sqlite3, "connect", refuse)
    for arguments in (("run", "--resume", folder, "--quiet"), ("ledger", folder, "--verify")):
        assert "ledger cannot be opened" in one_line(cli(*arguments))


def test_a_ledger_that_is_locked_is_told(copy, cli, monkeypatch):
    """Somebody else holds a write lock on it for longer than a round can wait."""
    folder, connect = copy("cut"), sqlite3.connect
    with closing(connect(folder / "ledger.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **{**k, "timeout": 0}))
        assert "database is locked" in one_line(cli("run", "--resume", folder, "--quiet"))
        other.execute("ROLLBACK")


def test_a_directory_in_use_is_told(copy, cli):
    folder = copy("cut")
    with locked(folder):
        line = one_line(cli("run", "--resume", folder, "--quiet"))
    assert "in use by another process" in line


def test_an_export_to_a_full_disk_is_told(copy, cli, tmp_path, monkeypatch):
    folder = copy("cut")
    monkeypatch.setattr(os, "fsync", full)
    line = one_line(cli("ledger", folder, "--export", tmp_path / "out.json"))
    assert "No space left" in line
    assert not (tmp_path / "out.json").exists()
