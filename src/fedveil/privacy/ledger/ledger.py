"""The ledger: a durable record of charges, written before anything is released.

One SQLite file, a run's own or shared by several, with a write-ahead log that is synced at every
commit (synchronous = FULL): a charge is on disk before the round begins, so a crash can count a
round that was never released and never miss one that was. The log, `ledger.db-wal`, is part of the
ledger until it is closed. Charges, and what a run left at its end, are chained by their hashes
(`hash_chain.py`).
"""

import json
import secrets
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from fedveil.base.errors import BadInput, BudgetExhausted, LedgerMismatch
from fedveil.privacy.accounting import events
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import NoiseSource, Unit
from fedveil.privacy.ledger import hash_chain
from fedveil.privacy.ledger.file import (
    FORMAT,
    SCHEMA,
    Counts,
    Ids,
    connect,
    count_writer,
    ids_from_bytes,
    read_about,
    read_runs,
    transaction,
)
from fedveil.privacy.ledger.hash_chain import Closing, Entry, Head
from fedveil.privacy.ledger.shared import Common, SharedBudget, check_common, check_company

_SEALED = ("data", "identity")


@dataclass(frozen=True)
class LedgerRun:
    """A run as a ledger knows it.

    Attributes:
        about: Whose ledger it is, with the run's name under "run".
        lines: What is charged, and within which budgets.
        permitted: The number of rounds that fit the budgets.
        clients: How many clients' turns are counted, 0 if none are.
        common: What the runs of a shared ledger have in common, None if it is the run's own.
        repeats: Whether a round done again with seeded noise is the same round.
    """

    about: dict[str, str]
    lines: tuple[BudgetLine, ...]
    permitted: int
    clients: int = 0
    common: Common | None = None
    repeats: bool = True

    def identifying_values(self, salt: str) -> dict[str, str]:
        """The texts that identify the run: `about`, "lines" as JSON, "clients".

        "data" and "identity" are sealed with `salt`.
        """
        rows, lines = dict(self.about), []
        for key in _SEALED:
            if key in rows:
                rows[key] = hash_chain.seal(salt, rows[key])
        for line in self.lines:
            lines.append(line.to_dict())
        return {**rows, "lines": json.dumps(lines), "clients": str(self.clients)}


class Ledger:
    """The charges of one run, one row per round, attempt and line of the budget.

    Guarantee: `charge` returns only after the charge is on disk, and raises `BudgetExhausted`
    without writing when it would exceed the budget. A round with seeded noise that was charged
    before is a replay of the same randomness on the same data, hence the same release: it costs
    nothing. With secure noise, or where `repeats` is false because other clients may answer the
    second time, it is a new release, hence a new attempt with a new charge. Where
    clients are charged for their own turns, the ledger also notes who took part, in the same
    transaction, and knows how often each of them did. On a shared ledger, every charge must also
    pass the filter over all runs, in that same transaction. What it says of data and cohorts is
    sealed, and with secure noise charges have a date and no time, which would tell how many clients
    a round had. A round costs time and space in proportion to its cohort, not to the number of
    clients.

    | edge | behaviour |
    |---|---|
    | no lines: nothing is claimed | no charge is written, none is refused |
    | round charged before, seeded | no second charge, no second count |
    | round charged before, secure or not repeatable | a new attempt, charged, or BudgetExhausted |
    | round charged before for another cohort, seeded | LedgerMismatch |
    | ledger of another run, recipe or data set | LedgerMismatch |
    | shared ledger of another unit, relation, trust, delta, noise or data set | LedgerMismatch |
    | shared ledger with a seeded run of the same seed | LedgerMismatch: noise would cancel out |
    | file missing, corrupt or of another version | BadInput |

    Attributes:
        refusal: The last `BudgetExhausted` that `charge` raised, or None.
        shared: The common budget of a shared ledger, None if the ledger is the run's own.
    """

    def __init__(self, connection: sqlite3.Connection, run: LedgerRun) -> None:
        """Use `create`, `reopen` or `join` instead: the run must be registered already.

        `connection` is to the ledger, and `close` closes it.
        """
        self._db, self._run = connection, run.about["run"]
        salt = connection.execute("SELECT value FROM about WHERE key = 'salt'").fetchone()
        self._salt = str(salt[0])
        name = connection.execute("PRAGMA database_list").fetchone()[2]  # empty for memory
        self._file = Path(name) if name else None
        if self._file is not None:
            count_writer(self._file, 1)
        self._lines, self._permitted = run.lines, run.permitted
        seeded = all(line.noise is NoiseSource.SEEDED for line in run.lines)
        self._replays = run.repeats and seeded
        self._turns, self._counted = np.zeros(run.clients, dtype=np.int64), 0
        self._lasting: dict[tuple[str, int], bool] = {}
        self.refusal: BudgetExhausted | None = None
        self.shared: SharedBudget | None = None
        if run.common is not None:
            self.shared = SharedBudget(connection, run.common, run.clients, run.lines[0])

    @classmethod
    def create(cls, path: Path | None, run: LedgerRun) -> "Ledger":
        """A new ledger at `path`, or in memory if it is None.

        Writes the file, which may not be a ledger yet, and registers the run. A ledger in memory is
        for a training that leaves no run behind. With a `common` budget other runs may share the
        ledger.
        """
        db = connect(path)
        db.execute("PRAGMA journal_mode = WAL")
        with transaction(db):
            for statement in filter(str.strip, SCHEMA.split(";")):
                db.execute(statement)
            salt = secrets.token_hex(32)
            shared = run.common.to_rows(salt) if run.common else {}
            rows = {"format": FORMAT, "salt": salt, **shared}
            db.executemany("INSERT INTO about VALUES (?, ?)", rows.items())
            _register(db, run, salt)
        return cls(db, run)

    @classmethod
    def reopen(cls, path: Path, run: LedgerRun) -> "Ledger":
        """Open the ledger of a run that is registered in it.

        Raises LedgerMismatch as `check_same` does, and BadInput if the file cannot be read.
        """
        cls.check_same(path, run)
        return cls(connect(path), run)

    @staticmethod
    def check_same(path: Path, run: LedgerRun) -> None:
        """Raise LedgerMismatch if the ledger at `path` belongs to something else than `run`.

        That is another part, other data, other lines or another common budget.
        """
        runs, name = read_runs(path), run.about["run"]
        if name not in runs and len(runs) != 1:
            raise LedgerMismatch(f"{path}: there is no run {name!r} in this ledger")
        stored = runs[name] if name in runs else next(iter(runs.values()))
        for key, value in run.identifying_values(read_about(path)["salt"]).items():
            if stored.get(key) == value:
                continue
            if key == "identity":
                raise LedgerMismatch(f"{path}: {_other_identity(stored)}")
            raise LedgerMismatch(
                f"{path}: {key} is {stored.get(key)!r} in the ledger and {value!r} now: "
                "resume with what the run was started with, or start a new run"
            )
        check_common(path, run.common)

    @classmethod
    def join(cls, path: Path, run: LedgerRun) -> "Ledger":
        """Start a new run on an existing ledger, and register it.

        Raises LedgerMismatch if there is a run of that name, seed or other count of clients, or if
        a shared ledger has other terms. Without a `common` budget runs stand beside each other, and
        nobody adds them up.
        """
        salt = read_about(path)["salt"]
        check_common(path, run.common)
        db = connect(path)
        try:
            with transaction(db):
                rows = db.execute("SELECT run, about FROM runs").fetchall()
                others = {str(name): json.loads(text) for name, text in rows}
                if run.about["run"] in others:
                    raise LedgerMismatch(f"{path}: there is a run {run.about['run']!r} already")
                check_company(path, others, run.about.get("seed", ""), run.clients)
                _register(db, run, salt)
        except BaseException:
            db.close()
            raise
        return cls(db, run)

    def charge(self, round: int, ids: Ids | None = None) -> int:
        """Charge `round` (counting from 1), and return the number of the attempt.

        The attempt is 0, unless the round was charged before with noise that cannot be replayed. A
        replay, and a run without lines, write nothing. Lines of metrics are charged by
        `charge_measurement`.

        Raises BudgetExhausted, with nothing written, if it would exceed a budget: `refusal` keeps
        it. Raises AssertionError for a round that does not follow the last one, LedgerMismatch for
        a replay with another cohort, and BadInput for a client that is asked too often.

        `ids` are the clients that take part, where their turns are counted. None otherwise.
        """
        if not self._lines:
            return 0
        cohort = b"" if ids is None else ids.astype("<u4").tobytes()
        with transaction(self._db):
            before = self._last_attempt(round)
            attempt = self.attempt(round)
            if before is not None and self._replays:
                if ids is not None and self._cohort(round) != cohort:
                    raise LedgerMismatch(
                        f"round {round} was charged for another cohort: a replay must be the same"
                    )
                return attempt
            try:
                self._check(round, ids)
            except BudgetExhausted as e:
                self.refusal = e
                raise
            if ids is not None:
                row = (self._run, round, attempt, cohort)
                self._db.execute("INSERT INTO cohorts VALUES (?, ?, ?, ?)", row)
            for line in self._lines:
                if line.due(round) and not line.reading and not line.rounds:
                    self._append_charge(line, round, attempt)
        return attempt

    def charge_measurement(self, round: int) -> bool:
        """Charge the metrics of `round` for its last attempt, before measuring.

        Guarantee: True only after the charge is on disk; and in all attempts of all rounds
        together no line is charged more often than it lists rounds. False, with nothing written,
        is for a measurement that must not be made.

        | edge | behaviour |
        |---|---|
        | no line lists this round | False |
        | the round itself was not charged | AssertionError |
        | charged before for this attempt, seeded | True, no second charge: the same noise |
        | the same with secure noise | False: another measurement would have other noise |
        | as many measurements as were planned are charged, of rounds done again | False |
        """
        due = [line for line in self._lines if line.rounds and line.due(round)]
        if not due:
            return False
        with transaction(self._db):
            attempt = self._last_attempt(round)
            if attempt is None:
                raise AssertionError(f"round {round} is measured before it was charged")
            query = "SELECT round, attempt FROM charges WHERE run = ? AND covers = ?"
            for line in due:
                made = self._db.execute(query, (self._run, line.covers)).fetchall()
                if (round, attempt) in made:
                    if not self._replays:
                        return False
                    continue
                if len(made) >= len(line.rounds):
                    return False
                self._append_charge(line, round, attempt)
        return True

    def attempt(self, round: int) -> int:
        """The number, from 0, of the attempt at `round` that the next charge is for.

        A replay has the number of the attempt that it repeats.
        """
        last = self._last_attempt(round)
        return 0 if last is None else last + (not self._replays)  # a replay has the same number

    def goes_on(self, round: int, attempt: int) -> bool:
        """Whether `attempt` at `round` may go on without a charge: it is what was charged last.

        True for any attempt where nothing is charged.
        """
        if not self._lines:
            return True
        return self._last_attempt(round) == attempt and self.charged() == round

    def _last_attempt(self, round: int) -> int | None:
        """The number of the last charged attempt at `round`, None if it was not charged."""
        query = "SELECT MAX(attempt) FROM charges WHERE run = ? AND round = ?"
        found = self._db.execute(query, (self._run, round)).fetchone()[0]
        return None if found is None else int(found)

    def _check(self, round: int, ids: Ids | None) -> None:
        """Raise BudgetExhausted if the run's own or the common budget does not permit `round`.

        Raises AssertionError for a round that does not follow the last one, BadInput for a client
        in `ids` that is asked too often.
        """
        last = self.charged()
        if round > last + 1 or round < 1:
            raise AssertionError(f"round {round} charged after {last} rounds")
        if round > self._permitted:
            raise BudgetExhausted(
                f"round {round} would exceed the budget, which permits {self._permitted} rounds; "
                "nothing was released"
            )
        extra_attempts = self.extra_attempts + (round <= last)
        if ids is not None:
            self._check_turns(round, extra_attempts, ids)
        if extra_attempts:
            self._check_extra_attempts(max(round, last), extra_attempts, ids)
        if self.shared is not None:
            self.shared.check(self._run, ids)

    def _check_turns(self, round: int, extra_attempts: int, ids: Ids) -> None:
        """Raise BadInput if a client in `ids` would be asked more often than a line accounts for.

        `extra_attempts` is the number of attempts beyond each round's first, this one included.
        """
        turns = int(self.turns(round - 1)[ids].max(initial=-1)) + 1
        for line in self._lines:
            if line.rounds or line.unit is Unit.WEIGHT:
                continue
            if turns > line.participations(round, extra_attempts):
                raise BadInput(
                    f"by round {round} the sampler has asked a client {turns} times, and "
                    f"{line.covers} are accounted for {line.participations(round)}: nothing was "
                    "released; use a sampler that does what its account says"
                )

    def _check_extra_attempts(self, rounds: int, extra_attempts: int, ids: Ids | None) -> None:
        """Raise BudgetExhausted if attempts beyond each round's first exceed what is permitted.

        Each of them is one more release, and may be anybody's unless turns are counted.

        Args:
            rounds: The number of charged rounds, this one included.
            extra_attempts: The number of attempts beyond each round's first, this one included.
            ids: The clients that take part, None where turns are not counted.
        """
        if extra_attempts > self._permitted:
            raise BudgetExhausted(
                f"{extra_attempts} rounds were done again, as many as there are: nothing more was "
                "released; start over"
            )
        turns = None if ids is None else int(self.turns(rounds)[ids].max(initial=0)) + 1
        for line in (line.with_extra_attempts(extra_attempts) for line in self._lines):
            if line.reading or line.rounds or self._lasts_to_the_end(line, extra_attempts):
                continue
            most = line.participations(rounds, extra_attempts)
            if not line.affords(most if turns is None else min(most, turns)):
                raise BudgetExhausted(
                    f"round {rounds} would exceed the budget of {line.covers}, which also paid for "
                    f"rounds that had to be done again ({extra_attempts}); nothing was released"
                )

    def _lasts_to_the_end(self, line: BudgetLine, extra_attempts: int) -> bool:
        """Whether the line's budget affords all permitted rounds and so many extra attempts.

        Cached.
        """
        key = (line.covers, extra_attempts)
        if key not in self._lasting:
            end = line.participations(self._permitted, extra_attempts)
            self._lasting[key] = line.affords(end)
        return self._lasting[key]

    def _append_charge(self, line: BudgetLine, round: int, attempt: int) -> None:
        """Append a charge of `line` to the chain, with the attempt's cohort, sealed, if noted."""
        query = "SELECT ids FROM cohorts WHERE run = ? AND round = ? AND attempt = ?"
        cohort = self._db.execute(query, (self._run, round, attempt)).fetchone()
        hash_chain.append(
            self._db,
            Entry,
            self._run,
            round,
            attempt,
            line.covers,
            json.dumps(events.to_dict(line.event)),
            self._now(),
            "" if cohort is None else hash_chain.seal(self._salt, bytes(cohort[0])),
        )

    def _now(self) -> str:
        """The time now in ISO format, or the date alone with noise that cannot be replayed.

        Times would tell the sizes of cohorts.
        """
        now = datetime.now(UTC)
        return (now if self._replays else now.date()).isoformat()

    def note_end(self, files: dict[str, str]) -> Head:
        """Write a closing entry with the files that the run left. Returns the new head.

        `files` has a digest by file name. Calling it again replaces the closing entry.
        `note_resumed` voids it.
        """
        with transaction(self._db):
            text = json.dumps(files, sort_keys=True)
            return hash_chain.append(self._db, Closing, self._run, text, self._now())

    def note_resumed(self) -> None:
        """Void the closing entry of a run that is resumed, before anything that it left is changed.

        Nothing is written if there is none.
        """
        if self.closing_files():
            self.note_end({})

    def closing_files(self) -> dict[str, str]:
        """The digests by name of the files that the run left when it ended. {} while it is open."""
        query = "SELECT files FROM closings WHERE run = ? ORDER BY seq DESC LIMIT 1"
        row = self._db.execute(query, (self._run,)).fetchone()
        return {} if row is None else dict(json.loads(row[0]))

    def head(self) -> Head:
        """The last hash and the number of entries, of which run directories keep copies."""
        return hash_chain.head_of(self._db)

    def charged(self) -> int:
        """The number of charged rounds of the run, released or not."""
        query = "SELECT MAX(round) FROM charges WHERE run = ?"  # they are charged in turn
        return int(self._db.execute(query, (self._run,)).fetchone()[0] or 0)

    @property
    def extra_attempts(self) -> int:
        """How many attempts were charged beyond each round's first.

        0 where rounds can be replayed.
        """
        if self._replays:
            return 0
        query = (
            "SELECT COUNT(*) FROM (SELECT DISTINCT round, attempt FROM charges "
            "WHERE run = ? AND attempt > 0)"
        )
        return int(self._db.execute(query, (self._run,)).fetchone()[0])

    def turns(self, rounds: int) -> Counts:
        """How often each client took part in the first `rounds` rounds, int64 [N]. Not a copy.

        With noise that cannot be replayed every charged attempt counts, whatever `rounds` is.
        Raises BadInput where turns are not counted.
        """
        if len(self._turns) == 0:
            raise BadInput("this ledger counts nobody's turns: create it with `clients`")
        if not self._replays:
            query = "SELECT ids FROM cohorts WHERE run = ? ORDER BY rowid LIMIT -1 OFFSET ?"
            for (ids,) in self._db.execute(query, (self._run, self._counted)).fetchall():
                self._turns[ids_from_bytes(ids)] += 1
                self._counted += 1
            return self._turns
        if rounds < self._counted:
            self._turns[:], self._counted = 0, 0
        for round in range(self._counted + 1, rounds + 1):
            self._turns[ids_from_bytes(self._cohort(round))] += 1
        self._counted = rounds
        return self._turns

    def counts(self) -> Counts | None:
        """A copy of how often each client took part in all charged rounds, int64 [N].

        None where turns are not counted.
        """
        if len(self._turns) == 0:
            return None
        return self.turns(self.charged()).copy()

    def _cohort(self, round: int) -> bytes:
        """The stored cohort of the first attempt at `round`, as bytes. b"" if none is noted."""
        query = "SELECT ids FROM cohorts WHERE run = ? AND round = ? AND attempt = 0"
        row = self._db.execute(query, (self._run, round)).fetchone()
        return b"" if row is None else bytes(row[0])

    def close(self) -> None:
        """Close the connection, and note that this process writes the file no more."""
        self._db.close()
        if self._file is not None:
            count_writer(self._file, -1)
            self._file = None


def note_file(path: Path, run: str, name: str, digest: str) -> Head | None:
    """Record that one file of a run that has ended was written again. Returns the new head.

    The digests of its other files stay as they are. Returns None, and changes nothing, while the
    run is open. Raises BadInput if the ledger at `path` cannot be written.
    """
    with closing(connect(path)) as db:
        count_writer(path, 1)
        try:
            with transaction(db):
                query = "SELECT files FROM closings WHERE run = ? ORDER BY seq DESC LIMIT 1"
                row = db.execute(query, (run,)).fetchone()
                files = {} if row is None else dict(json.loads(row[0]))
                if not files:
                    return None
                text = json.dumps({**files, name: digest}, sort_keys=True)
                today = datetime.now(UTC).date().isoformat()  # a time may be secret
                return hash_chain.append(db, Closing, run, text, today)
        except sqlite3.OperationalError as e:
            raise BadInput(f"{path}: {name} cannot be recorded there: {e}") from e
        finally:
            count_writer(path, -1)


def _other_identity(stored: dict[str, str]) -> str:
    """A message that a run cannot continue with parts of another identity, and what to do.

    `stored` is what the run registered with.
    """
    what = "this run would continue with other noise: its parts are not those it was begun with"
    if "identity" not in stored:
        what = "this run was begun before runs recorded which parts their noise is drawn for"
    return f"{what}; finish it with the version of fedveil that began it, or start over"


def _register(db: sqlite3.Connection, run: LedgerRun, salt: str) -> None:
    """Insert a run into `runs`, with its identifying values and its permitted rounds.

    `after` is the number of entries there were: from the next on, the chain covers the run.
    """
    after = hash_chain.head_of(db).length
    rest = {"permitted": str(run.permitted), "after": str(after)}
    text = json.dumps({**run.identifying_values(salt), **rest})
    db.execute("INSERT INTO runs VALUES (?, ?)", (run.about["run"], text))
