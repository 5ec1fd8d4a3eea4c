"""A ledger on disk that permits five rounds, and its file as others see and alter it."""

import sqlite3

import pytest

from fedveil.privacy.ledger.file import read_charges
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun

ABOUT = {"run": "one", "recipe": "abc", "data": "def"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path, make_line):
    ledger = Ledger.create(path, LedgerRun(ABOUT, (make_line(),), 5))
    yield ledger
    ledger.close()


def rounds_on_disk(path):
    return [charge.round for charge in read_charges(path)]


def alter(path, statement, *values):
    db = sqlite3.connect(path)
    with db:
        db.execute(statement, values)
    db.close()
