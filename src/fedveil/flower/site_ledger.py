"""A site's ledger: its charges, the asks that it has taken up, and a copy of its head elsewhere.

The folder has `ledger.db` with all runs, which `fedveil ledger` reads, and `asks.db` with every ask
that the site has taken up. Nothing stays in memory between two asks.
"""

import fcntl
import json
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

from fedveil.base.errors import BadInput, BudgetExhausted, one_line
from fedveil.flower.federation_files import SiteFile
from fedveil.flower.policy import Policy, RunCost, Terms
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.ledger.file import connect, one_look, query, read_runs, transaction
from fedveil.privacy.ledger.hash_chain import Head, verify
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.runs.run_directory import sync_folder, write_atomic

LOG = logging.getLogger("fedveil.site")

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
    """The site takes no part in a round, for a reason that the server may learn."""


@dataclass(frozen=True)
class SiteLedger:
    """The ledger of one site in `folder`. The file `witness`, elsewhere, remembers its head.

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
    | fewer asks are noted than the witness remembers | BadInput: some would be answered twice |
    | the witness is gone and the ledger is not empty | BadInput: `accept` makes a new one |
    | the asks of a run that was charged are gone | BadInput |
    | another recipe, data or version in the same run | LedgerMismatch |
    """

    folder: Path
    witness: Path

    @classmethod
    def named_in(cls, site_file: SiteFile) -> "SiteLedger":
        """The ledger that a `site.toml` names."""
        return cls(Path(site_file.ledger), Path(site_file.witness or ""))

    @property
    def file(self) -> Path:
        """The ledger itself."""
        return self.folder / "ledger.db"

    def charge(
        self,
        run: str,
        round: int,
        attempt: int,
        *,
        about: dict[str, str],
        terms: Terms,
        policy: Policy,
        today: date,
    ) -> None:
        """Note an ask and charge for it, or raise `Declined`.

        Args:
            run: The run's id.
            round: The round that the site is asked for.
            attempt: The attempt at it, from 0.
            about: What the ledger notes about the run beside its name and cost.
            terms: What the plan means for this site.
            policy: The owner's limits.
            today: The day.
        """
        costs = [{**claim.to_dict(), "assumptions": []} for claim in terms.costs]
        about = {"run": run, **about, "cost": json.dumps(costs)}
        with self._locked():
            self._check_whole()
            others = [cost for other, cost in self.run_costs().items() if other != run]
            beyond = policy.too_much(terms, others, today)
            if beyond is not None:
                LOG.warning("round %d of run %s: %s", round, run, beyond)
                raise Declined(beyond.reason)
            with closing(self._open_ledger(about, terms)) as ledger:
                turns = ledger.charged()
                extra_attempts = self._note(run, round, attempt, turns, today)
                needed = terms.needed_charges(turns + 1, round, extra_attempts)
                if terms.lines and needed > terms.permitted_turns:
                    raise Declined(
                        f"the run has had the {terms.permitted_turns} turns that this site permits"
                    )
                try:
                    while terms.lines and ledger.charged() < needed:
                        ledger.charge(ledger.charged() + 1)
                except BudgetExhausted as e:
                    raise Declined("the run's budget is used up") from e
                finally:
                    self._write_witness(ledger.head())

    def run_costs(self) -> dict[str, RunCost]:
        """What each charged run may cost in all, and the day of its last turn.

        A run that was charged for all turns at once still has them later, so the day is that of its
        last ask. Days never decrease, whatever the clock said.
        """
        if not self.file.exists():
            return {}
        with one_look(self.file):
            runs = read_runs(self.file)
            charges = query(self.file, "SELECT run, charged_at FROM charges ORDER BY seq")
        charge_days = _last_days((run, datetime.fromisoformat(at).date()) for run, at in charges)
        ask_days = _last_days(self._asks())
        return {
            run: RunCost(_read_costs(runs[run]), max(day, ask_days.get(run, day)))
            for run, day in charge_days.items()
        }

    def _asks(self) -> list[tuple[str, date]]:
        """The run and the day of every ask, as they came."""
        path = self.folder / "asks.db"
        if not path.exists():
            return []
        with closing(connect(path)) as db:
            db.execute(_ASKS)
            rows = db.execute("SELECT run, day FROM asks ORDER BY rowid").fetchall()
        return [(run, date.fromisoformat(day)) for run, day in rows]

    def accept(self) -> Head:
        """Trust the ledger as it is, and remember its head. Only its owner may decide this."""
        with self._locked():
            head = verify(self.file)
            self._write_witness(head)
        return head

    def check_whole(self) -> None:
        """Refuse a ledger that is not what the witness remembers."""
        if self.folder.exists():
            with self._locked():
                self._check_whole()
        elif self.witness.exists():
            raise self._lost()

    def _check_whole(self) -> None:
        witness = self._read_witness()
        if not self.file.exists():
            if witness is not None:
                raise self._lost()
            return
        head = verify(self.file, *([] if witness is None else [witness[0]]))
        asks = len(self._asks())
        if witness is not None and asks < witness[1]:
            raise BadInput(
                f"{self.folder / 'asks.db'} has {asks} asks and {self.witness} remembers "
                f"{witness[1]}: restore it; if it is lost, fedveil site accept takes what there is"
            )
        if witness is None and head.length:
            raise BadInput(
                f"{self.witness} is missing and the ledger {self.file} is not empty: restore it; "
                "if the ledger is whole, fedveil site accept takes it as it is"
            )

    def _lost(self) -> BadInput:
        return BadInput(
            f"{self.file} is missing and {self.witness} remembers it: what this site has spent is "
            "unknown; restore the ledger"
        )

    def _open_ledger(self, about: dict[str, str], terms: Terms) -> Ledger:
        run = LedgerRun(about, terms.lines, terms.permitted_turns)
        if not self.file.exists():
            return Ledger.create(self.file, run)
        if about["run"] in read_runs(self.file):
            return Ledger.reopen(self.file, run)
        return Ledger.join(self.file, run)

    def _note(self, run: str, round: int, attempt: int, charged: int, today: date) -> int:
        """Note an ask durably. Returns the run's attempts beyond each round's first."""
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
                row = (run, *place, today.isoformat())
                db.execute("INSERT INTO asks VALUES (?, ?, ?, ?)", row)
        return sum(dict([*before, place]).values())  # the last attempt of each round

    def _write_witness(self, head: Head) -> None:
        witness = {**head.to_dict(), "asks": len(self._asks())}
        write_atomic(self.witness, (json.dumps(witness, indent=2) + "\n").encode())

    def _read_witness(self) -> tuple[Head, int] | None:
        """The ledger's head, and the number of asks noted by then."""
        try:
            if not self.witness.exists():
                return None
            stored = json.loads(self.witness.read_text())
            return Head(str(stored["head"]), int(stored["length"])), int(stored["asks"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadInput(f"{self.witness} cannot be read: {e}") from e

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process, and one thread of it, at a time."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            sync_folder(self.folder.parent)
        with (self.folder / "lock").open("w") as f:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as e:
                    if time.monotonic() > deadline:
                        raise BadInput(f"{self.folder} is in use by another process") from e
                    time.sleep(0.01)
            yield


def today() -> date:
    """The day, by this machine's clock."""
    return datetime.now(UTC).date()


def _last_days(turns: Iterable[tuple[str, date]]) -> dict[str, date]:
    """The last day of each run. Days never decrease, whatever the clock said."""
    last, latest = dict[str, date](), date.min
    for run, day in turns:
        last[run] = latest = max(latest, day)
    return last


def _read_costs(about: dict[str, str]) -> tuple[PrivacyClaim, ...]:
    try:
        return tuple(PrivacyClaim.from_dict(raw) for raw in json.loads(about["cost"]))
    except (KeyError, TypeError, ValueError) as e:
        raise BadInput(f"the run {about['run']!r} is not one of a site's: {one_line(e)}") from e
