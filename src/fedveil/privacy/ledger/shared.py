"""A ledger that several runs share: their common budget, kept by a Renyi filter.

Composition theorems for a plan fixed in advance say nothing about a second run that somebody chose
after seeing the first. A filter does: charges may depend on everything released so far, as long as
their Renyi divergences add up to no more than what was fixed at the beginning (Feldman and Zrnic,
arXiv 2008.11193).
"""

import json
import math
import sqlite3
from bisect import bisect_right
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput, CommonBudgetExhausted, LedgerMismatch, UnsupportedEvent
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.events import (
    KINDS,
    Event,
    FixedSampled,
    Gaussian,
    GaussianWithBit,
    GaussianWithCurator,
    Laplace,
    PoissonSampled,
    PureReport,
    Skellam,
    TwoPoint,
)
from fedveil.privacy.accounting.renyi import gaussian_alike, poisson_log_moment
from fedveil.privacy.ledger.file import (
    counted_clients,
    ids_from_bytes,
    ledger_snapshot,
    read_about,
    read_runs,
)
from fedveil.privacy.ledger.hash_chain import seal
from fedveil.privacy.noise.grid import delta_of_sampler

Curve = npt.NDArray[np.float64]

ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512)


@dataclass(frozen=True)
class RenyiFilter:
    """(epsilon, delta) for everything charged, at Renyi orders fixed in advance.

    Guarantee: docs/proofs/filter.md. If each charge's curve bounds its Renyi divergence given all
    that came before, and charges are admitted only by `admits`, everything released together is
    (epsilon, delta)-DP, however charges were chosen. An order that is used up stays used up; delta
    is divided among the orders, since which of them lasts longest depends on what is charged.

    | edge | behaviour |
    |---|---|
    | epsilon not positive or infinite, delta outside (0, 1) | BadInput |
    | an epsilon too small for every order | BadInput |
    | an event without a Renyi curve | UnsupportedEvent, from `renyi_curve` |
    """

    epsilon: float
    delta: float
    orders: tuple[int, ...] = ORDERS

    def __post_init__(self) -> None:
        """Raise BadInput for the edges above, and for orders below 2 or none at all."""
        if not (0 < self.epsilon < math.inf):
            raise BadInput(f"the common budget is epsilon {self.epsilon}: a finite one is needed")
        if not 0 < self.delta < 1:
            raise BadInput(f"delta is {self.delta}: a number in (0, 1) is needed")
        if not self.orders or min(self.orders) < 2:
            raise BadInput("a filter needs at least one Renyi order, all of them 2 or more")
        if not (self.order_limits > 0).any():
            raise BadInput(
                f"a common budget of epsilon {self.epsilon:g} at delta {self.delta:g} is too small "
                "for a Renyi filter: raise either"
            )

    @property
    def order_limits(self) -> Curve:
        """The largest sum of divergences at each order, [orders].

        Negative if an order is of no use.
        """
        orders = np.array(self.orders, dtype=np.float64)
        return self.epsilon - math.log(len(self.orders) / self.delta) / (orders - 1)

    def admits(self, spent: Curve, curve: Curve) -> npt.NDArray[np.bool_]:
        """For each row of `spent` [..., orders], whether `curve` [orders] fits at some order."""
        return np.asarray((spent + curve <= self.order_limits).any(axis=-1))

    def epsilon_of(self, spent: Curve) -> float:
        """The epsilon of the divergences in `spent` [orders], as the filter counts.

        0 if all of them are 0.
        """
        orders = np.array(self.orders, dtype=np.float64)
        paid = spent + math.log(len(self.orders) / self.delta) / (orders - 1)
        return 0.0 if not spent.any() else float(paid.min())


def renyi_curve(event: Event, relation: Relation, orders: tuple[int, ...] = ORDERS) -> Curve:
    """An upper bound on the Renyi divergence of one release at each integer order, [orders].

    Sampling without replacement is counted as no sampling, which is safe; so is Poisson sampling
    under replacement, and a curator is counted in every release. Raises UnsupportedEvent for other
    events, and for noise of 0.
    """
    a = np.array(orders, dtype=np.float64)
    match event:
        case Gaussian(m) if m > 0:
            return a / (2 * m * m)
        case Skellam(m, _) if m > 0:
            return renyi_curve(gaussian_alike(event), relation, orders)
        case PoissonSampled(rate, Skellam(m, _) as noise) if m > 0:
            alike = PoissonSampled(rate, gaussian_alike(noise))
            return renyi_curve(alike, relation, orders)
        case Laplace(m) if m > 0:
            return _laplace(a, m)
        case TwoPoint(eps0) | PureReport(eps0):
            return _two_point(a, eps0)
        case GaussianWithBit(first, second) | GaussianWithCurator(first, second, _):
            return renyi_curve(first, relation, orders) + renyi_curve(second, relation, orders)
        case PoissonSampled(rate, Gaussian() as gaussian) if (
            relation is not Relation.REPLACE and rate < 1
        ):
            if gaussian.multiplier > 0:
                logs = [poisson_log_moment(order, rate, gaussian.multiplier) for order in orders]
                return np.minimum(np.array(logs) / (a - 1), a / (2 * gaussian.multiplier**2))
        case PoissonSampled(_, Gaussian() as gaussian) | FixedSampled(_, _, gaussian):
            return renyi_curve(gaussian, relation, orders)
    raise UnsupportedEvent(
        f"a shared ledger cannot count {KINDS[type(event)]}: it has no Renyi curve; use a ledger "
        "of the run's own"
    )


def _laplace(a: Curve, m: float) -> Curve:
    """Renyi divergences at orders `a` of Laplace noise of scale `m` (Mironov 2017, Table II).

    They are at most 1/m.
    """
    first = np.log(a / (2 * a - 1)) + (a - 1) / m
    second = np.log((a - 1) / (2 * a - 1)) - a / m
    return np.asarray(np.minimum(np.logaddexp(first, second) / (a - 1), 1 / m))


def _two_point(a: Curve, eps0: float) -> Curve:
    """Renyi divergences at orders `a` of two values with odds e^eps0 : 1 against 1 : e^eps0.

    They are at most eps0. Every eps0-DP report is a function of these two values, so none has more.
    """
    high = -math.log1p(math.exp(-eps0))
    low = high - eps0
    both = np.logaddexp(a * high + (1 - a) * low, a * low + (1 - a) * high)
    return np.asarray(np.minimum(both / (a - 1), eps0))


Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Common:
    """The terms that all runs on a shared ledger have in common, and their common budget."""

    unit: Unit
    neighbours: Relation
    trust: Trust
    epsilon: float
    delta: float
    data: str
    noise: NoiseSource

    @classmethod
    def from_lines(cls, lines: tuple[BudgetLine, ...], data: str, epsilon: float) -> "Common":
        """The terms of a plan's only line, with `epsilon` as the common budget of all runs.

        `data` is the digest of the data set. Raises BadInput for a plan with no line, with several,
        or with one as published.
        """
        charged = [line for line in lines if not line.reading]
        if len(charged) != 1 or charged[0].as_published or len(charged) != len(lines):
            raise BadInput(
                "a shared ledger takes runs with exactly one claim, and a strict one: leave out "
                "--ledger, or as_published, budget.epsilons, two-point reports and evaluate.epsilon"
            )
        line = charged[0]
        terms = line.unit, line.relation, line.trust
        return cls(*terms, epsilon, line.budget.delta, data, line.noise)

    @property
    def filter(self) -> RenyiFilter:
        """The filter over all runs.

        With secure noise 2^-10 of delta is kept for what its sampler is off the exact law, which is
        enough for 2^50 numbers drawn by all runs together (docs/proofs/filter.md). Raises BadInput
        if epsilon is too large for that.
        """
        if self.noise is not NoiseSource.SECURE:
            return RenyiFilter(self.epsilon, self.delta)
        kept = self.delta * 2.0**-10
        if delta_of_sampler(2**50, 1, self.epsilon) > kept:
            raise BadInput(
                f"noise.source is 'secure' and the common budget epsilon {self.epsilon:g}: at that "
                "size the sampler's error, however small, cannot be vouched for; lower it"
            )
        return RenyiFilter(self.epsilon, self.delta - kept)

    def spent_text(self, spent: float) -> str:
        """One line: the claim of all runs together, and what is left of their budget.

        `spent` is the epsilon of that claim.
        """
        claim = PrivacyClaim(
            epsilon=spent,
            delta=self.delta,
            unit=self.unit,
            neighbours=self.neighbours,
            trust=self.trust,
            accountant=Accountant.RDP,
            noise=self.noise,
        )
        left = claim.left_of(self.epsilon)
        return f"all runs together, by a Renyi filter: {claim}; {left} is left"

    def to_rows(self, salt: str) -> dict[str, str]:
        """Rows of the ledger's `about`: "common " and a field's name -> its value as JSON.

        `data` is sealed with `salt`.
        """
        values = {**vars(self), "data": seal(salt, self.data)}
        return {f"common {name}": json.dumps(value) for name, value in values.items()}


class SharedBudget:
    """The filter over all runs of a shared ledger, with what it has read of their charges.

    Spending is kept per client where turns are counted, for everybody at once otherwise.
    """

    def __init__(
        self, db: sqlite3.Connection, common: Common, clients: int, line: BudgetLine
    ) -> None:
        """Begin with nothing read: charges are read from `db` when they are needed.

        Args:
            db: The shared ledger.
            common: The terms of all runs.
            clients: The number of clients whose turns are counted, 0 if none are.
            line: The budget line of this run, by which its charges are counted.
        """
        self._db, self._line, self._filter = db, line, common.filter
        self._spent = np.zeros((max(1, clients), len(self._filter.orders)))
        self._counted, self._read = clients > 0, 0
        self._curve = self._curve_of(line)
        self._curves: dict[str, Curve] = {}

    def check(self, run: str, ids: Ids | None) -> None:
        """Raise CommonBudgetExhausted if one more charge would exceed the common budget.

        `run` is the name in the message. `ids` are the clients that would be charged, None for
        everybody. Nothing is charged here.
        """
        self._catch_up()
        here = self._spent if ids is None or not self._counted else self._spent[ids]
        if len(here) and not bool(self._filter.admits(here, self._curve).all()):
            raise CommonBudgetExhausted(
                f"{run}: the next round would exceed the common budget of epsilon "
                f"{self._filter.epsilon:g} that all runs on this ledger share; nothing was released"
            )

    def spent(self) -> float:
        """The epsilon of all runs together, for the client that has spent most.

        0 before any charge.
        """
        self._catch_up()
        return max(self._filter.epsilon_of(row) for row in np.unique(self._spent, axis=0))

    def rounds_left(self, rounds: int) -> int:
        """How many more rounds fit, from 0 to `rounds`, whoever is asked: a lower bound.

        Where turns are counted, the client that has spent most is taken to be asked as often as can
        be.
        """
        self._catch_up()
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.nan_to_num((self._filter.order_limits - self._spent) / self._curve, nan=0.0)
        turns = max(0.0, math.floor(min(room.max(axis=1).min(), float(rounds))))
        if not self._counted:
            return int(turns)
        return bisect_right(range(rounds + 1), turns, key=self._line.participations) - 1

    def _catch_up(self) -> None:
        """Add the charges of all runs that were made since the last call to `_spent`."""
        query = (
            "SELECT seq, charges.run, ids FROM charges LEFT JOIN cohorts "
            "USING (run, round, attempt) WHERE seq > ? ORDER BY seq"
        )
        for seq, run, ids in self._db.execute(query, (self._read,)).fetchall():
            if run not in self._curves:
                row = self._db.execute("SELECT about FROM runs WHERE run = ?", (run,)).fetchone()
                lines = json.loads(json.loads(row[0])["lines"])
                self._curves[run] = self._curve_of(BudgetLine.from_dict(lines[0]))
            who = slice(None) if ids is None or not self._counted else ids_from_bytes(ids)
            self._spent[who] += self._curves[run]
            self._read = int(seq)

    def _curve_of(self, line: BudgetLine) -> Curve:
        """The Renyi curve [orders] of one participation on `line`, with all its events."""
        return line.per * renyi_curve(line.event, line.relation, self._filter.orders)


def check_common(path: Path, common: Common | None) -> None:
    """Raise LedgerMismatch if the ledger's common terms are not those of this run.

    None is a run that shares nothing: a shared ledger refuses it.
    """
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
    """Raise LedgerMismatch if a new run cannot be composed with those on the ledger.

    Composition needs noise that is independent of all earlier noise: two runs of one seed carry the
    same noise, which cancels out in the difference of their models.

    Args:
        path: The ledger, for messages.
        runs: By name, what the runs on the ledger registered with.
        seed: The seed of the new run, "" with secure noise.
        clients: The number of clients whose turns the new run counts. All runs count the same.
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
    """The terms that the runs of a ledger share, None if it is not shared.

    `data` stays sealed. Raises BadInput if they cannot be read.
    """
    rows = {key: value for key, value in read_about(path).items() if key.startswith("common ")}
    if not rows:
        return None
    try:
        values = {}
        for field in fields(Common):
            values[field.name] = field.type(json.loads(rows[f"common {field.name}"]))  # type: ignore[operator]
        return Common(**values)
    except (KeyError, ValueError, TypeError) as e:
        raise BadInput(f"{path}: what its runs have in common cannot be read: {e}") from e


def spent_in(path: Path, common: Common) -> float:
    """The epsilon of all runs of a shared ledger together, as its filter counts.

    It is that of the client that has spent most. Raises BadInput if the ledger cannot be read.
    """
    with ledger_snapshot(path) as db:
        try:
            runs = read_runs(path).values()
            clients = max(map(counted_clients, runs))
            lines = [BudgetLine.from_dict(json.loads(about["lines"])[0]) for about in runs]
            return SharedBudget(db, common, clients, lines[0]).spent()
        except (sqlite3.DatabaseError, LookupError, ValueError, TypeError) as e:
            if isinstance(e, BadInput):
                raise
            raise BadInput(f"{path}: what its runs have spent cannot be read: {e}") from e
