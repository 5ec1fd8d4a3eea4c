"""A ledger that several runs share: what they have in common, and the filter over all of them."""

import json
import math
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput, CommonBudgetExhausted, LedgerMismatch
from fedveil.privacy.accounting.budget_line import BudgetLine
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.ledger.file import (
    counted_clients,
    ids_from_bytes,
    read_about,
    read_runs,
)
from fedveil.privacy.ledger.filter import Curve, RenyiFilter, renyi_curve
from fedveil.privacy.ledger.hash_chain import seal
from fedveil.privacy.ledger.looking import one_look
from fedveil.privacy.noise.grid import delta_of_sampler

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Common:
    """What runs that share a ledger have in common, and the budget they share."""

    unit: str
    neighbours: str
    trust: str
    epsilon: float
    delta: float
    data: str
    noise: str

    @classmethod
    def from_lines(cls, lines: tuple[BudgetLine, ...], data: str, epsilon: float) -> "Common":
        """The terms of a plan's only line. A plan with no line, or with several, is refused."""
        charged = [line for line in lines if not line.reading]
        if len(charged) != 1 or charged[0].as_published or len(charged) != len(lines):
            raise BadInput(
                "a shared ledger takes runs with exactly one claim, and a strict one: leave out "
                "--ledger, or as_published, budget.epsilons, two-point reports and evaluate.epsilon"
            )
        line = charged[0]
        return cls(
            str(line.unit),
            str(line.relation),
            str(line.trust),
            epsilon,
            line.budget.delta,
            data,
            str(line.noise),
        )

    @property
    def filter(self) -> RenyiFilter:
        """The filter over all runs.

        With secure noise 2^-10 of delta is kept for what its sampler is off the exact law, which
        is enough for 2^50 numbers drawn by all runs together (docs/proofs/filter.md).
        """
        if self.noise != NoiseSource.SECURE:
            return RenyiFilter(self.epsilon, self.delta)
        kept = self.delta * 2.0**-10
        if delta_of_sampler(2**50, 1, self.epsilon) > kept:
            raise BadInput(
                f"noise.source is 'secure' and the common budget epsilon {self.epsilon:g}: at that "
                "size the sampler's error, however small, cannot be vouched for; lower it"
            )
        return RenyiFilter(self.epsilon, self.delta - kept)

    def spent_text(self, spent: float) -> str:
        """One line: the claim of all runs together, and what is left of their budget."""
        claim = PrivacyClaim(
            epsilon=spent,
            delta=self.delta,
            unit=Unit(self.unit),
            neighbours=Relation(self.neighbours),
            trust=Trust(self.trust),
            accountant=Accountant.RDP,
            noise=NoiseSource(self.noise),
        )
        left = claim.left_of(self.epsilon)
        return f"all runs together, by a Renyi filter: {claim}; {left} is left"

    def to_rows(self, salt: str) -> dict[str, str]:
        """Rows of the ledger's `about`, the data sealed."""
        values = {**vars(self), "data": seal(salt, self.data)}
        return {f"common {name}": json.dumps(value) for name, value in values.items()}


class SharedBudget:
    """The filter over all runs of a shared ledger, with what it has read of their charges.

    Spending is kept per client where turns are counted, for everybody at once otherwise.
    """

    def __init__(self, common: Common, clients: int, lines: tuple[BudgetLine, ...]) -> None:
        self._filter = common.filter
        self._spent = np.zeros((max(1, clients), len(self._filter.orders)))
        self._counted, self._read = clients > 0, 0
        self._curve = self._curve_of(lines[0])
        self._curves: dict[str, Curve] = {}

    def check(self, db: sqlite3.Connection, run: str, ids: Ids | None) -> None:
        """Raise `CommonBudgetExhausted` if one more charge would exceed the common budget."""
        self._catch_up(db)
        here = self._spent if ids is None or not self._counted else self._spent[ids]
        if len(here) and not bool(self._filter.admits(here, self._curve).all()):
            raise CommonBudgetExhausted(
                f"{run}: the next round would exceed the common budget of epsilon "
                f"{self._filter.epsilon:g} that all runs on this ledger share; nothing was released"
            )

    def spent(self, db: sqlite3.Connection) -> float:
        """The epsilon of all runs together, of the client that has spent most."""
        self._catch_up(db)
        return max(self._filter.epsilon_of(row) for row in np.unique(self._spent, axis=0))

    def fitting(self, db: sqlite3.Connection, line: BudgetLine, rounds: int) -> int:
        """How many of `rounds` more rounds fit, whoever is asked: a lower bound.

        Where turns are counted, whoever has spent most is taken to be asked as often as can be.
        """
        self._catch_up(db)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.nan_to_num((self._filter.limits - self._spent) / self._curve, nan=0.0)
        turns = max(0.0, math.floor(min(room.max(axis=1).min(), float(rounds))))
        if not self._counted:
            return int(turns)
        low, high = 0, rounds
        while low < high:
            middle = (low + high + 1) // 2
            fits = line.participations(middle) <= turns
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _catch_up(self, db: sqlite3.Connection) -> None:
        """Read the charges that were made since the last look, by whichever run."""
        query = (
            "SELECT seq, charges.run, ids FROM charges LEFT JOIN cohorts "
            "USING (run, round, attempt) WHERE seq > ? ORDER BY seq"
        )
        for seq, run, ids in db.execute(query, (self._read,)).fetchall():
            if run not in self._curves:
                row = db.execute("SELECT about FROM runs WHERE run = ?", (run,)).fetchone()
                lines = json.loads(json.loads(row[0])["lines"])
                self._curves[run] = self._curve_of(BudgetLine.from_dict(lines[0]))
            who = slice(None) if ids is None or not self._counted else ids_from_bytes(ids)
            self._spent[who] += self._curves[run]
            self._read = int(seq)

    def _curve_of(self, line: BudgetLine) -> Curve:
        return line.per * renyi_curve(line.event, line.relation, self._filter.orders)


def check_common(path: Path, common: Common | None) -> None:
    """Refuse a ledger whose runs promise something else than this one."""
    about = read_about(path)
    stored = {key: value for key, value in about.items() if key.startswith("common ")}
    wanted = {} if common is None else common.to_rows(about["salt"])
    for key in sorted(stored.keys() | wanted.keys()):
        if stored.get(key) != wanted.get(key):
            raise LedgerMismatch(
                f"{path}: {key} is {stored.get(key, 'not set')} in the ledger and "
                f"{wanted.get(key, 'not set')} in this run: a shared ledger takes runs on the same "
                "data (data.seed fixes how records are divided) with the same promise; use another "
                "ledger"
            )


def check_company(path: Path, runs: dict[str, dict[str, str]], seed: str, clients: int) -> None:
    """Refuse a run that cannot be composed with those on the ledger.

    Composition needs noise that is independent of all earlier noise: two runs of one seed carry
    the same, and the difference of their models would have none. `seed` is empty where noise is
    secure; `clients` is how many clients' turns are counted.
    """
    for name, about in runs.items():
        if seed and about.get("seed") == seed:
            raise LedgerMismatch(
                f"{path}: seed {seed} was used by the run {name!r} on this ledger: the same noise "
                "again would cancel out; use another seed (data.seed fixes how records are divided)"
            )
        if about.get("clients") != str(clients):
            raise LedgerMismatch(
                f"{path}: the run {name!r} counts the turns of {about.get('clients')} clients and "
                f"this one of {clients}: use another ledger"
            )


def common_of(path: Path) -> Common | None:
    """The terms that the runs of a ledger share, `data` sealed. None if it is not shared."""
    rows = {
        key.removeprefix("common "): value
        for key, value in read_about(path).items()
        if key.startswith("common ")
    }
    if not rows:
        return None
    try:
        found = {name: json.loads(value) for name, value in rows.items()}
        return Common(
            unit=str(Unit(found["unit"])),
            neighbours=str(Relation(found["neighbours"])),
            trust=str(Trust(found["trust"])),
            epsilon=float(found["epsilon"]),
            delta=float(found["delta"]),
            data=str(found["data"]),
            noise=str(NoiseSource(found["noise"])),
        )
    except (KeyError, ValueError, TypeError) as e:
        raise BadInput(f"{path}: what its runs have in common cannot be read: {e}") from e


def spent_in(path: Path, common: Common) -> float:
    """The epsilon of all runs of a shared ledger together, as its filter counts."""
    with one_look(path) as db:
        try:
            runs = read_runs(path).values()
            clients = max(map(counted_clients, runs))
            lines = [BudgetLine.from_dict(json.loads(about["lines"])[0]) for about in runs]
            return SharedBudget(common, clients, tuple(lines)).spent(db)
        except (sqlite3.DatabaseError, LookupError, ValueError, TypeError) as e:
            if isinstance(e, BadInput):
                raise
            raise BadInput(f"{path}: what its runs have spent cannot be read: {e}") from e
