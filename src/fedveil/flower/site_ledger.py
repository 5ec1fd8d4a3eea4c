"""A site's ledger: its charges, its asks, and a copy of the ledger's head elsewhere.

The folder has `ledger.db` with the charges of all runs, which `fedveil ledger` reads, and `asks.db`
with every ask that the site has begun to answer. Nothing stays in memory between two asks.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from fedveil.base.errors import BadInput, BudgetExhausted, one_line
from fedveil.flower.federation_files import SiteFile
from fedveil.flower.policy import Policy, RunCost, Terms
from fedveil.flower.site_heads import SiteHeads
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.ledger.file import connect, ledger_snapshot, query, read_runs, transaction
from fedveil.privacy.ledger.hash_chain import Head, read_hashes, verify
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.runs.run_directory import lock_held, sync_folder, write_atomic

LOG = logging.getLogger("fedveil.site")

METRICS = "-metrics"
"""The end of the name under which a ledger has a run's measurements."""

_LOCK_SECONDS = 60.0
_ASKS = """
CREATE TABLE IF NOT EXISTS asks (
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    day TEXT NOT NULL,
    PRIMARY KEY (run, round, attempt)
)
"""


class Declined(Exception):
    """Raised if the site takes no part in a round, with a reason that the server may learn."""


@dataclass(frozen=True)
class SiteLedger:
    """The ledger of one site in `folder`. The file `witness`, elsewhere, has a copy of its head.

    Guarantee: when `charge` returns, the ask is new, the policy admits its run, at least as many
    charges are on disk as the terms need, and the witness has the ledger's head. So every answer
    that leaves the site has a charge of its own from before, whoever repeats, reorders or forges
    asks, and whatever crashes in between.

    | edge | behaviour |
    |---|---|
    | an ask that was taken up before, answered or not | Declined |
    | a round, or an attempt of it, older than the run's last | Declined |
    | the run's budget, or the policy, does not allow it | Declined, nothing is charged |
    | a crash after the ask was noted, or after the charge | the ask is lost, the charge stays |
    | turns that were charged at once, days ago | their run is as old as its last turn |
    | several processes | one after the other; waits at most a minute |
    | the ledger is gone, shorter or other than the witness has it | BadInput |
    | the same, as the site's own last signature of a server's ledger has it | BadInput |
    | fewer asks are noted than the witness remembers | BadInput: some would be answered twice |
    | the witness is gone and the ledger is not empty | BadInput: `accept` makes a new one |
    | the asks of a run that was charged are gone | BadInput |
    | another recipe, data or version in the same run | LedgerMismatch |
    """

    folder: Path
    witness_path: Path

    @classmethod
    def from_site_file(cls, site_file: SiteFile) -> "SiteLedger":
        """Return the ledger that a `site.toml` names. Nothing is opened."""
        return cls(Path(site_file.ledger), Path(site_file.witness or ""))

    @property
    def file(self) -> Path:
        """Return the path of the database with the charges."""
        return self.folder / "ledger.db"

    @property
    def heads_file(self) -> Path:
        """Return the path of the database with the heads of servers' ledgers (`SiteHeads`)."""
        return self.folder / "heads.db"

    def current_head(self) -> Head | None:
        """Return the head of the ledger, unchecked. None without a ledger."""
        if not self.file.exists():
            return None
        hashes = read_hashes(self.file)
        return Head(hashes[-1], len(hashes) - 1)

    def charge(
        self,
        run: str,
        round: int,
        attempt: int,
        *,
        about: dict[str, str],
        terms: Terms,
        policy: Policy,
        metrics: bool = False,
    ) -> None:
        """Write an ask and charge for it durably, or raise Declined.

        Measurements of a run have asks and charges of their own, under the run's name with
        `METRICS` at its end. The policy sees a run as a whole, measurements included.

        Raises BadInput if the ledger is not what the witness remembers, or stays locked for a
        minute.

        Args:
            run: The run's id.
            round: The round that the site is asked for.
            attempt: The attempt at the round, from 0.
            about: Facts about the run for the ledger, beside its name and cost.
            terms: The budget lines and turns of this site.
            policy: The owner's limits.
            metrics: Whether the ask is for a measurement. `terms.measurements` is then charged.
        """
        whole = terms
        if metrics:
            if terms.measurements is None:
                raise AssertionError("nothing is measured on these terms")
            terms = terms.measurements
        name = run + METRICS if metrics else run
        costs = [{**claim.to_dict(), "assumptions": []} for claim in terms.turn_costs]
        about = {"run": name, **about, "cost": json.dumps(costs)}
        what = "measurements" if metrics else "turns"
        with self._locked():
            self._check_whole()
            others = [cost for other, cost in self.run_costs().items() if other != run]
            day = today()
            objection = policy.objection_to_cost(whole, others, day)
            if objection is not None:
                LOG.warning("round %d of run %s: %s", round, run, objection)
                raise Declined(objection.reason)
            with closing(self._open_ledger(about, terms)) as ledger:
                turns = ledger.charged()
                extra_attempts = self._write_ask(name, round, attempt, turns, day)
                needed = turns + 1
                if terms.at_once:
                    needed = max(terms.permitted_turns, round + extra_attempts)
                if terms.lines and needed > terms.permitted_turns:
                    raise Declined(
                        f"the run has had the {terms.permitted_turns} {what} that this site permits"
                    )
                try:
                    while terms.lines and ledger.charged() < needed:
                        ledger.charge(ledger.charged() + 1)
                except BudgetExhausted as e:
                    raise Declined("the run's budget is used up") from e
                finally:
                    self._write_witness(ledger.head())

    def run_costs(self) -> dict[str, RunCost]:
        """Return by run id what each charged run may cost in all, and the day of its last turn.

        {} without a ledger. A run that was charged for all turns at once still has them later, so
        the day is that of its last ask. Days never decrease, even if the clock was set back. What
        a run's measurements cost is part of the run.
        """
        if not self.file.exists():
            return {}
        with ledger_snapshot(self.file):
            runs = read_runs(self.file)
            charges = query(self.file, "SELECT run, charged_at FROM charges ORDER BY seq")
        charge_days = _last_days((run, datetime.fromisoformat(at).date()) for run, at in charges)
        ask_days = _last_days(self._asks())
        found = dict[str, RunCost]()
        for name, day in charge_days.items():
            run, day = name.removesuffix(METRICS), max(day, ask_days.get(name, day))
            before = found.get(run, RunCost((), day))
            costs = (*before.costs, *_read_costs(runs[name]))
            found[run] = RunCost(costs, max(day, before.last_day))
        return found

    def turn_count(self, run: str) -> int:
        """Return how many turns a run was charged for. 0 without a ledger."""
        if not self.file.exists():
            return 0
        turns = dict(query(self.file, "SELECT run, MAX(round) FROM charges GROUP BY run"))
        return int(turns.get(run, 0))

    def _asks(self) -> list[tuple[str, date]]:
        """Return (run, day) of every ask, in the order of arrival. [] without a file."""
        path = self.folder / "asks.db"
        if not path.exists():
            return []
        with closing(connect(path)) as db:
            db.execute(_ASKS)
            rows = db.execute("SELECT run, day FROM asks ORDER BY rowid").fetchall()
        return [(run, date.fromisoformat(day)) for run, day in rows]

    def accept(self) -> Head:
        """Write a witness of the ledger as it is, and return its head. Only owners may decide this.

        Later heads that a server has of this site's are then taken over. Raises BadInput if the
        ledger's hash chain is broken.
        """
        with self._locked():
            head = verify(self.file)
            SiteHeads(self.heads_file).note_accepted(head)
            self._write_witness(head)
        return head

    def check_whole(self) -> None:
        """Raise BadInput if the ledger is not what the witness remembers.

        A site without either is fine.
        """
        with self._locked() if self.folder.exists() else nullcontext():
            self._check_whole()

    def _check_whole(self) -> None:
        """Do what `check_whole` does. The caller has the lock."""
        witness, own = self._read_witness(), SiteHeads(self.heads_file).own_head()
        if not self.file.exists():
            if witness is not None or own is not None:
                remembers = self.heads_file if witness is None else self.witness_path
                raise BadInput(
                    f"{self.file} is missing and {remembers} remembers it: what this site has "
                    "spent is unknown; restore the ledger"
                )
            return
        known = [*([] if witness is None else [witness[0]]), *([] if own is None else [own])]
        head = verify(self.file, *known)
        asks = len(self._asks())
        if witness is not None and asks < witness[1]:
            raise BadInput(
                f"{self.folder / 'asks.db'} has {asks} asks and {self.witness_path} remembers "
                f"{witness[1]}: restore it; if it is lost, fedveil site accept takes what there is"
            )
        if witness is None and head.length:
            raise BadInput(
                f"{self.witness_path} is missing and the ledger {self.file} is not empty: "
                "restore it; "
                "if the ledger is whole, fedveil site accept takes it as it is"
            )

    def _open_ledger(self, about: dict[str, str], terms: Terms) -> Ledger:
        """Open the ledger for the run in `about`. A new run is added, and a missing file made.

        Raises LedgerMismatch if the run is there with other facts or terms.
        """
        run = LedgerRun(about, terms.lines, terms.permitted_turns)
        if not self.file.exists():
            return Ledger.create(self.file, run)
        if about["run"] in read_runs(self.file):
            return Ledger.reopen(self.file, run)
        return Ledger.join(self.file, run)

    def _write_ask(self, run: str, round: int, attempt: int, charged: int, day: date) -> int:
        """Write an ask durably, and return the run's attempts beyond the first of each round.

        `charged` is the number of turns that the run was charged for, `day` the day to write.
        Raises Declined if the ask is there already or older than the last one, and BadInput if the
        run was charged and has no asks.
        """
        place = (round, attempt)
        with closing(connect(self.folder / "asks.db")) as db:
            db.execute(_ASKS)
            with transaction(db):
                query = "SELECT round, attempt FROM asks WHERE run = ? ORDER BY round, attempt"
                before: list[tuple[int, int]] = db.execute(query, (run,)).fetchall()
                if charged and not before:
                    raise BadInput(
                        f"{self.folder / 'asks.db'} knows nothing of a run that was charged: "
                        "restore it"
                    )
                if place in before:
                    raise Declined(f"round {round}, attempt {attempt}, was asked before")
                if before and place < before[-1]:
                    raise Declined(
                        f"round {round}, attempt {attempt}, comes after round "
                        f"{before[-1][0]}, attempt {before[-1][1]}"
                    )
                row = (run, *place, day.isoformat())
                db.execute("INSERT INTO asks VALUES (?, ?, ?, ?)", row)
        return sum(dict([*before, place]).values())  # the last attempt of each round

    def _write_witness(self, head: Head) -> None:
        """Write the ledger's head and the number of asks into the witness file, atomically."""
        witness = {**head.to_dict(), "asks": len(self._asks())}
        write_atomic(self.witness_path, (json.dumps(witness, indent=2) + "\n").encode())

    def _read_witness(self) -> tuple[Head, int] | None:
        """Return (the ledger's head, the number of asks) of the witness file, None without one.

        Raises BadInput if the file cannot be read.
        """
        try:
            if not self.witness_path.exists():
                return None
            stored = json.loads(self.witness_path.read_text())
            return Head(str(stored["head"]), int(stored["length"])), int(stored["asks"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadInput(f"{self.witness_path} cannot be read: {e}") from e

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Context manager: lock the ledger against other processes and threads.

        Makes the folder if it is missing. Raises BadInput if the lock is not free within a minute.
        """
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)  # another process may be faster
            sync_folder(self.folder.parent)
        with lock_held(self.folder / "lock", _LOCK_SECONDS) as free:
            if not free:
                raise BadInput(f"{self.folder} is in use by another process")
            yield


def today() -> date:
    """Return the current day in UTC."""
    return datetime.now(UTC).date()


def _last_days(turns: Iterable[tuple[str, date]]) -> dict[str, date]:
    """Return the last day of each run, from pairs (run, day) in the order of events.

    A day before an earlier pair's, from a clock that was set back, counts as that earlier one.
    """
    last, latest = dict[str, date](), date.min
    for run, day in turns:
        last[run] = latest = max(latest, day)
    return last


def _read_costs(about: dict[str, str]) -> tuple[PrivacyClaim, ...]:
    """Return the claims under "cost" in a run's entry of the ledger.

    Raise BadInput without them.
    """
    try:
        return tuple(PrivacyClaim.from_dict(raw) for raw in json.loads(about["cost"]))
    except (KeyError, TypeError, ValueError) as e:
        raise BadInput(f"the run {about['run']!r} is not one of a site's: {one_line(e)}") from e
