"""`fedveil site doctor` and `status`: can this site take part, and what has it done so far?"""

import json
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput, one_line
from fedveil.flower.connection import Connection, certificate_end
from fedveil.flower.federation_files import fingerprint
from fedveil.flower.flwr_private import TESTED
from fedveil.flower.flwr_private.node_key import is_registered
from fedveil.flower.flwr_private.supernode import CLOCK_TOLERANCE, clock_ahead
from fedveil.flower.site import Site
from fedveil.flower.site_ledger import today
from fedveil.privacy.accounting.claims import rendered
from fedveil.privacy.ledger.file import read_charges

_SOON = 30  # days before the end of a certificate from which on it is mentioned
_SUPERLINK = re.compile(r"--superlink (\S+)")
_KEY = re.compile(r'--auth-supernode-private-key "?([^"\s]+)"?')
_PORT = re.compile(r"^port=(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class SiteFinding:
    """The result of one check of a site.

    Attributes:
        check: What was looked at, one word.
        passed: True, False, or None if it could not be looked at.
        text: One line, with the way out if it did not pass.
    """

    check: str
    passed: bool | None
    text: str

    def __str__(self) -> str:
        """Return the finding as a line for people."""
        word = {True: "ok", False: "FAILED", None: "?"}[self.passed]
        return f"{word:<7}{self.check:<12}{self.text}"


def examine(path: Path) -> Iterator[SiteFinding]:
    """Yield a finding for each check of the site that a `site.toml` describes. Never raises.

    Nothing is written and nothing charged. SuperLink is connected to once, and once more as the
    site itself if its SuperNode does not run.
    """
    folder = path.absolute().parent
    yield _finding("versions", _versions)
    site: list[Site] = []

    def opened() -> str:
        """Open the site. The text says what it has."""
        site.append(Site.open(path))
        return f"{path} and its recipe are read: {site[0].recipe.name}"

    yield _finding("files", opened)
    if site:
        yield _finding("records", lambda: f"{site[0].records.records:,} records are read")
        yield _finding("ledger", lambda: _ledger_text(site[0]))
        yield _finding("policy", lambda: _policy_text(site[0]))
    yield _finding("guard", _guard)
    yield _finding("key", lambda: _key_text(_key_file(folder)))
    yield from _connection_findings(folder)


def _finding(check: str, look: Callable[[], str]) -> SiteFinding:
    """Return the finding of a check: passed with its text, or failed with what it raised."""
    try:
        return SiteFinding(check, True, look())
    except Exception as e:  # a doctor looks at what is broken
        return SiteFinding(check, False, one_line(e) or type(e).__name__)


def _versions() -> str:
    """Return the versions in use. Raises BadInput if Flower's is not tested."""
    flower = version("flwr")
    if ".".join(flower.split(".")[:2]) not in TESTED:
        raise BadInput(f"Flower {flower} is not tested: {', '.join(TESTED)} is needed")
    return f"fedveil {version('fedveil')}, Flower {flower}, Python {sys.version.split()[0]}"


def _ledger_text(site: Site) -> str:
    """Return how many charges a site's ledger has, and when the last one was made."""
    charges = read_charges(site.ledger.file) if site.ledger.file.exists() else []
    if not charges:
        return "the ledger is whole: nothing was charged yet"
    last = max(charge.charged_at for charge in charges)
    return f"the ledger is whole: {len(charges):,} charges, the last of {last}"


def _policy_text(site: Site) -> str:
    """Return what taking part costs at most. Raises BadInput if the policy has an objection."""
    spent = list(site.ledger.run_costs().values())
    beyond = site.policy.objection_to_cost(site.terms, spent, today())
    objections = [*site.objections(), *([] if beyond is None else [beyond])]
    if objections:
        raise BadInput("; ".join(dict.fromkeys(map(str, objections))))
    costs = ", ".join(f"epsilon {rendered(cost.epsilon)}" for cost in site.terms.costs)
    return f"the site takes part: a run costs at most {costs or 'nothing that is claimed'}"


def _guard() -> str:
    """Run the canary in a process of its own. Raises BadInput if it does not pass."""
    command = [sys.executable, "-m", "fedveil.flower.flwr_private", "canary"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise BadInput((done.stderr.strip().splitlines() or ["the canary did not pass"])[-1])
    return "code that a server sends is not run here"


def _key_file(folder: Path) -> Path:
    """Return the private key that a site's supernode.sh names, by default `node` beside it."""
    script = folder / "supernode.sh"
    found = _KEY.search(script.read_text() if script.exists() else "")
    return folder / ("node" if found is None else found[1])


def _key_text(path: Path) -> str:
    """Return the fingerprint of a site's key. Raises BadInput if others may read the key."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise BadInput(f"{path} is readable by others (mode {mode:o}): chmod 600 it")
    return fingerprint(path.with_suffix(".pub").read_text())


def _connection_findings(folder: Path) -> Iterator[SiteFinding]:
    """Yield what SuperLink, its certificate, the clocks and the registration come to."""
    script = folder / "supernode.sh"
    text = script.read_text() if script.exists() else ""
    found, port = _SUPERLINK.search(text), _PORT.search(text)
    if found is None:
        yield SiteFinding("superlink", None, f"{script} does not name SuperLink")
        return
    address, authority = found[1], folder / "ca.crt"
    yield _finding("authority", lambda: _end_text(certificate_end(authority), "ca.crt"))
    seen = Connection.probe(address, authority)
    yield SiteFinding("superlink", not seen.problem, seen.problem or f"{address} answers")
    if seen.problem:
        return
    if seen.ends is not None:
        ends = seen.ends
        yield _finding("certificate", lambda: _end_text(ends, "SuperLink's certificate"))
    ahead = clock_ahead(seen.date)
    side = "ahead of" if ahead > 0 else "behind"
    differ = f"this clock is {abs(ahead):.0f} s {side} the server's"
    yield SiteFinding("clock", abs(ahead) <= CLOCK_TOLERANCE, differ)
    own = None if port is None else int(port[1])
    yield _finding("registered", lambda: is_registered(address, authority, _key_file(folder), own))


def _end_text(ends: datetime, what: str) -> str:
    """Return when a certificate ends. Raises BadInput if it has ended."""
    days = (ends - datetime.now(UTC)).days
    if days < 0:
        raise BadInput(f"{what} ended on {ends.date()}: the operator makes a new one")
    warning = ": ask the operator for a new one" if days < _SOON else ""
    return f"{what} holds until {ends.date()}, {days} days{warning}"


def site_status(path: Path, lines: int = 10) -> dict[str, Any]:
    """Return what a site has done: runs with their costs, and the last lines of its log.

    Keys: "site", "recipe", "runs" (a list of "run", "last_turn", "costs" of epsilons) and "log" (a
    list of the log's entries). Raises BadInput as `Site.open`.
    """
    site = Site.open(path)
    runs = [
        {
            "run": run,
            "last_turn": cost.last_day.isoformat(),
            "costs": [claim.short for claim in cost.costs],
        }
        for run, cost in site.ledger.run_costs().items()
    ]
    log = site.log.file_path
    texts = log.read_text().splitlines()[-lines:] if log.exists() else []
    return {
        "site": site.name,
        "recipe": site.recipe.name,
        "runs": runs,
        "log": [json.loads(text) for text in texts if text.endswith("}")],
    }


def status_lines(status: dict[str, Any]) -> list[str]:
    """Return what `site_status` returned as lines for people."""
    lines = [f"{status['site']}: {status['recipe']}"]
    for run in status["runs"]:
        costs = ", ".join(run["costs"]) or "nothing that is claimed"
        lines.append(f"run {run['run'][:8]}: last turn {run['last_turn']}, at most {costs}")
    lines += [] if status["runs"] else ["no run was charged yet"]
    for entry in status["log"]:
        place = f"run {entry.get('run', '')[:8]} round {entry.get('round')}"
        more = entry.get("error") or entry.get("reason") or ", ".join(entry.get("spent", ()))
        lines.append(f"{entry['time']} {entry['event']}: {place}{more and f', {more}'}")
    return lines
