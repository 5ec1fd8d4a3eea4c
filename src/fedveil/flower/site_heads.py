"""`SiteHeads`: which heads of servers' ledgers a site has seen and signed, durably.

The file is in the site's own ledger folder. What the site signed is there before the signature
leaves the site.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedveil.base.errors import BadInput, one_line
from fedveil.flower.ledger_tail import LedgerTail
from fedveil.privacy.ledger.file import DAMAGED, connect, transaction
from fedveil.privacy.ledger.hash_chain import Head
from fedveil.privacy.ledger.signed_head import SignedHead, history_of

_TABLES = """
CREATE TABLE IF NOT EXISTS heads (
    run TEXT NOT NULL,
    length INTEGER NOT NULL,
    hash TEXT NOT NULL,
    history TEXT NOT NULL,
    PRIMARY KEY (run, length)
);
CREATE TABLE IF NOT EXISTS signatures (
    run TEXT NOT NULL,
    length INTEGER NOT NULL,
    head TEXT NOT NULL,
    PRIMARY KEY (run, length)
);
CREATE TABLE IF NOT EXISTS own_heads (
    seq INTEGER PRIMARY KEY,
    length INTEGER NOT NULL,
    hash TEXT NOT NULL,
    accepted INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS adoptions (run TEXT PRIMARY KEY, accepted INTEGER NOT NULL);
"""


class HeadRefused(Exception):
    """Raised if a server's ledger is not the one that this site knows, with a reason for it."""


@dataclass(frozen=True)
class SiteHeads:
    """What a site knows of servers' ledgers, in the file `file_path`.

    Guarantee: for one run, all heads that `extend` has returned are of one ledger that only grew,
    whatever a server sends, in whatever order, and whatever crashes in between. What is returned is
    on disk.

    | what the server's tail has | what is done |
    |---|---|
    | the last head that this site knows, and more entries | the new ones are kept |
    | the same entries again, and no more | nothing changes |
    | another hash for an entry that this site knows | HeadRefused: a fork |
    | fewer entries than this site knows | HeadRefused: the end was cut off |
    | entries after the last that this site knows, but for some | HeadRefused: a gap |
    | a head that this site has signed and does not know | HeadRefused: see `check` |
    | a head that this site is said to have signed and did not | HeadRefused |

    Attributes:
        file_path: The file.
        site: The name of the site.
        public_key: The site's public key, as `key_line` writes it. "" if it signs nothing.
    """

    file_path: Path
    site: str = ""
    public_key: str = ""

    def check(self, run: str, tail: LedgerTail) -> None:
        """Raise HeadRefused unless the ledger that a tail is of extends the one that is known.

        No head is written. If the server has a signature of this site at a head that the file does
        not have, file and ledger were put back from a backup together: the server's copy knows a
        later head. The owner may accept the ledger (`note_accepted`). Then that head is taken over.
        """
        with self._opened() as db:
            self._new_heads(db, run, tail)

    def extend(self, run: str, tail: LedgerTail, own: Head | None) -> tuple[str, str]:
        """Keep a tail's entries, and return (hash, history) at its end. HeadRefused as `check`.

        `own` is the site's own ledger now, None if it has none: a later look at it must find that
        head again.
        """
        with self._opened() as db, transaction(db):
            adopted, new = self._new_heads(db, run, tail)
            if adopted:
                row = (run, self._acceptances(db))
                db.execute("INSERT OR REPLACE INTO adoptions VALUES (?, ?)", row)
                db.execute("DELETE FROM heads WHERE run = ?", (run,))
            for length, hash, history in new:
                db.execute("INSERT INTO heads VALUES (?, ?, ?, ?)", (run, length, hash, history))
            if own is not None and own.length:
                self._note_own(db, own, accepted=0)
            hash, history = db.execute(
                "SELECT hash, history FROM heads WHERE run = ? ORDER BY length DESC LIMIT 1", (run,)
            ).fetchone()
        return str(hash), str(history)

    def keep(self, head: SignedHead) -> None:
        """Keep a signature, which is on disk on return."""
        row = (head.run, head.length, json.dumps(head.to_dict()))
        with self._opened() as db, transaction(db):
            db.execute("INSERT OR REPLACE INTO signatures VALUES (?, ?, ?)", row)

    def own_head(self) -> Head | None:
        """Return the head of the site's own ledger that was noted last, None without one."""
        if not self.file_path.exists():
            return None
        with self._opened() as db:
            row = db.execute("SELECT hash, length FROM own_heads ORDER BY seq DESC LIMIT 1")
            found = row.fetchone()
        return None if found is None else Head(str(found[0]), int(found[1]))

    def note_accepted(self, own: Head) -> None:
        """Take the site's own ledger as it is. Only owners may decide this.

        The next ask of each run may then bring a head that this site signed and has no copy of.
        """
        with self._opened() as db, transaction(db):
            self._note_own(db, own, accepted=1)

    def known(self, run: str) -> dict[int, str]:
        """Return the hashes of the run's ledger that this site has seen, by number of entries.

        {} for an unknown run. Nothing is written, and a file that is missing is not made.
        """
        if not self.file_path.exists():
            return {}
        try:
            place = f"{self.file_path.resolve().as_uri()}?mode=ro"
            with closing(sqlite3.connect(place, uri=True)) as db:
                rows = db.execute("SELECT length, hash FROM heads WHERE run = ?", (run,)).fetchall()
        except (*DAMAGED, OSError) as e:
            raise BadInput(f"{self.file_path} cannot be read: {one_line(e)}") from e
        return {int(length): str(hash) for length, hash in rows}

    def _new_heads(
        self, db: sqlite3.Connection, run: str, tail: LedgerTail
    ) -> tuple[bool, list[tuple[int, str, str]]]:
        """Return whether the server's copy of a head is taken over, and (length, hash, history).

        The latter are the heads to add. Raises HeadRefused.
        """
        rows = db.execute("SELECT length, hash, history FROM heads WHERE run = ?", (run,))
        known = {int(length): (str(hash), str(history)) for length, hash, history in rows}
        adopted = self._unknown_signature(db, run, tail, known)
        if adopted is not None:
            known = {adopted.length: (adopted.hash, adopted.history)}
        last = max(known, default=-1)
        if tail.length < last:
            raise HeadRefused(
                f"the server's ledger has {tail.length} entries, and this site has seen {last}: "
                "its end was cut off"
            )
        if tail.since > max(last, 0):
            raise HeadRefused(
                f"the server's ledger begins after entry {tail.since}, and this site has seen "
                f"{max(last, 0)}: entries between them are missing"
            )
        history, new = known[last][1] if known else "", []
        for length, hash in enumerate(tail.hashes, tail.since):
            if length in known:
                if known[length][0] != hash:
                    raise HeadRefused(
                        f"entry {length} of the server's ledger is not the one that this site has "
                        "seen: the ledger was rewritten"
                    )
            elif length > last:
                history = history_of(history, [hash])
                new.append((length, hash, history))
        if adopted is not None:
            new.insert(0, (adopted.length, adopted.hash, adopted.history))
        return adopted is not None, new

    def _unknown_signature(
        self,
        db: sqlite3.Connection,
        run: str,
        tail: LedgerTail,
        known: dict[int, tuple[str, str]],
    ) -> SignedHead | None:
        """Return a head that this site has signed and does not know, if it may be taken over.

        None if there is no such head. Raises HeadRefused if there is and the owner has not accepted
        the ledger since, and for a head that this site has not signed.
        """
        signed = tail.last_signed.get(self.site)
        if signed is None or not self.public_key:
            return None
        try:
            signed.check()
        except BadInput as e:
            raise HeadRefused(f"the server has a head that this site did not sign: {e}") from e
        if (signed.run, signed.key) != (run, self.public_key):
            raise HeadRefused("the server has a head of another run, or of another key")
        if known.get(signed.length) == (signed.hash, signed.history):
            return None
        if known and signed.length < min(known):  # older than one that was taken over
            return None
        if signed.length in known:
            raise HeadRefused(
                f"this site has signed entry {signed.length} of another ledger in this run"
            )
        before = db.execute("SELECT accepted FROM adoptions WHERE run = ?", (run,)).fetchone()
        if self._acceptances(db) > (0 if before is None else int(before[0])):
            return signed
        raise HeadRefused(
            f"the server has this site's signature at entry {signed.length}, and this site "
            f"remembers {max(known, default=0)}: the site's ledger was lost or put back"
        )

    def _acceptances(self, db: sqlite3.Connection) -> int:
        """Return how often the owner has accepted the ledger."""
        return int(db.execute("SELECT SUM(accepted) FROM own_heads").fetchone()[0] or 0)

    def _note_own(self, db: sqlite3.Connection, own: Head, *, accepted: int) -> None:
        """Note the head of the site's own ledger."""
        row = (own.length, own.hash, accepted)
        db.execute("INSERT INTO own_heads (length, hash, accepted) VALUES (?, ?, ?)", row)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Context manager: yield a connection. The file, and its folder, are made if missing.

        Raises BadInput if the file cannot be read.
        """
        self.file_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(connect(self.file_path)) as db:
                db.executescript(_TABLES)
                yield db
        except DAMAGED as e:
            raise BadInput(f"{self.file_path} cannot be used: {one_line(e)}") from e
