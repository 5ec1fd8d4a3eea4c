"""`HeadSignatures`: the server's side of the signatures that sites give the heads of its ledger."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.base.software import installed_software, software_digest
from fedveil.flower.federation_files import Federation, fingerprint, signs_answers
from fedveil.flower.ledger_tail import MOST_HASHES, LedgerTail
from fedveil.flower.messages import (
    HEAD_FORMS,
    HeadAsk,
    HeadReply,
    Refusal,
    Transport,
    bytes_tensor,
    fault_of,
)
from fedveil.privacy.ledger.hash_chain import json_digest, read_hashes
from fedveil.privacy.ledger.signed_head import (
    SIGNATURES,
    SignedHead,
    history_of,
    read_signatures,
)
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.run_directory import write_atomic

PARTIES = "parties.json"
"""The file of a run directory with the plan, the sites and the server's software."""

EVERY = 10
"""Rounds from one collection to the next, where answers have no signatures."""

SECONDS = 30.0
"""The most seconds that a collection waits for the sites that are online."""


def collects(plan: PrivacyPlan, round: int) -> bool:
    """Return whether signatures are collected from every site before the asks of a round.

    The rule is the same for all sites and does not depend on who takes part. Where answers have
    signatures, nothing is collected but at the end of the run.
    """
    return not signs_answers(plan) and round % EVERY == 1


@dataclass(eq=False)
class HeadSignatures:
    """The signatures of a run's ledger, and what is asked for more of them.

    Guarantee: what `last` returns was signed by the key that the federation registered for that
    site, over this run's ledger as it is in the run directory. It is on disk.

    | what a site sends | what is done |
    |---|---|
    | a signature of the head that it was asked for, by its own key | kept |
    | a signature of another head, run, plan, site or software, or by another key | not kept |
    | no signature | not kept; the site is taken to have seen the head |
    | a refusal, or nothing | it has the signature that it had |

    Attributes:
        folder: The run directory.
        run: The run's id.
        plan_parts: What the digest of the plan covers (`plan_content`).
        federation: The sites and their keys.
        clock: Returns the time in seconds.
        declined: By site, why it did not sign when it was asked last.
    """

    folder: Path
    run: str
    plan_parts: dict[str, Any]
    federation: Federation
    clock: Callable[[], float] = time.monotonic
    declined: dict[str, str] = field(default_factory=dict)
    _last: dict[str, SignedHead] | None = None
    _seen: dict[str, int] = field(default_factory=dict)
    _history: tuple[int, str] = (-1, "")

    @property
    def last(self) -> dict[str, SignedHead]:
        """Return the last signed head of each site that has signed one, by name.

        Read from the file once. A line that a crash cut off, or of another run, is left out.
        """
        if self._last is None:
            self._last = {
                name: head
                for name, head in read_signatures(self.folder / SIGNATURES, self.run).items()
                if name in self.federation.site_names
            }
        return self._last

    @property
    def plan(self) -> str:
        """Return the digest of the plan."""
        return json_digest(self.plan_parts)

    @property
    def signers(self) -> list[str]:
        """Return the sites that have signed the ledger as it is now."""
        end = len(read_hashes(self.folder / "ledger.db")) - 1
        names = self.federation.site_names
        return [name for name in names if name in self.last and self.last[name].length == end]

    def write_parties(self) -> None:
        """Write plan, sites and software into the run directory, for `fedveil evidence`."""
        sites = [[site.name, fingerprint(site.key)] for site in self.federation.sites]
        parties = {"plan": self.plan_parts, "sites": sites, "software": installed_software()}
        write_atomic(self.folder / PARTIES, json.dumps(parties, sort_keys=True).encode())

    def tail(self, site: str | None = None) -> LedgerTail:
        """Return the end of the ledger since the head that a site signed last, or all sites did.

        It has at most `MOST_HASHES` hashes: the first ones for a `site` that is further behind,
        and the last ones for all.
        """
        hashes = read_hashes(self.folder / "ledger.db")
        end = len(hashes) - 1
        if site is None:
            since = min(map(self._length, self.federation.site_names), default=0)
            since = max(since, end - MOST_HASHES + 1)
        else:
            since = self._length(site)
            hashes = hashes[: since + MOST_HASHES]
        digest = software_digest(installed_software())
        return LedgerTail(since, hashes[since:], digest, self.last)

    def add_signature(self, site: str, signature: bytes, tail: LedgerTail) -> str:
        """Keep a site's signature of the end of a tail. Returns why it is not kept, "" if it is.

        No signature, from a site that signs none, is no fault.
        """
        if not signature:
            self._seen[site] = tail.length
            return ""
        try:
            head = SignedHead.from_dict(json.loads(signature))
            head.check()
        except (BadInput, ValueError, RecursionError):
            return "its signature of the ledger cannot be checked"
        key = fingerprint(self.federation.sites[self.federation.site_names.index(site)].key)
        expected = (self.run, self.plan, site, tail.length, tail.hashes[-1], tail.software)
        found = (head.run, head.plan, head.site, head.length, head.hash, head.server_software)
        if found != expected or head.history != self._history_at(tail.length):
            return "it has signed another ledger than it was asked for"
        if fingerprint(head.key) != key:
            return "it has signed the ledger with another key"
        self._append(head)
        self.last[site] = head
        return ""

    def collect(self, transport: Transport, round: int, attempt: int) -> None:
        """Ask every site that is online, and behind, to sign the ledger as it is now.

        It ends when all have answered, or after `SECONDS`. Who does not sign is in `declined`.
        """
        until = self.clock() + SECONDS
        behind = [*self._behind(transport)]
        while behind and self.clock() < until:
            tails = {name: self.tail(name) for name in behind}
            messages = {
                name: HeadAsk(
                    self.run, round, attempt, self.plan, bytes_tensor(tails[name].to_bytes())
                )
                for name in behind
            }
            before, known = {name: self._length(name) for name in behind}, set[str]()
            for arrival in transport.send(messages, until - self.clock(), HEAD_FORMS):
                site, message, ask = arrival.site, arrival.message, messages[behind[0]]
                late = self.clock() > until
                reason = fault_of(arrival, ask, behind, known, late=late)
                known.add(site)
                if not reason and isinstance(message, Refusal):
                    reason = message.reason
                elif not reason and isinstance(message, HeadReply):
                    reason = self.add_signature(
                        site, message.signature.numpy().tobytes(), tails[site]
                    )
                if reason:
                    self.declined[site] = reason
                else:
                    self.declined.pop(site, None)
            going = [name for name in behind if self._length(name) > before[name]]
            behind = [name for name in self._behind(transport) if name in going]

    def _behind(self, transport: Transport) -> list[str]:
        """Return the sites that are online and have not signed, or seen, the end of the ledger."""
        end = len(read_hashes(self.folder / "ledger.db")) - 1
        online = transport.online()
        names = self.federation.site_names
        return [name for name in names if name in online and self._length(name) < end]

    def _history_at(self, length: int) -> str:
        """Return the ledger's history after so many entries. The last one is remembered."""
        if self._history[0] != length:
            hashes = read_hashes(self.folder / "ledger.db")[: length + 1]
            self._history = (length, history_of("", hashes))
        return self._history[1]

    def _length(self, site: str) -> int:
        """Return how many entries a site has signed, or has seen if it signs none."""
        head = self.last.get(site)
        return max(0 if head is None else head.length, self._seen.get(site, 0))

    def _append(self, head: SignedHead) -> None:
        """Append a signature to the file, readable by its owner alone. It is on disk on return."""
        path, flags = self.folder / SIGNATURES, os.O_WRONLY | os.O_CREAT | os.O_APPEND
        before = path.read_bytes()[-1:] if path.exists() else b""
        start = "\n" if before not in (b"", b"\n") else ""  # of a line that a crash cut off
        content = f"{start}{json.dumps(head.to_dict())}\n".encode()
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            while content:
                content = content[file.write(content) or 0 :]
            os.fsync(file.fileno())
