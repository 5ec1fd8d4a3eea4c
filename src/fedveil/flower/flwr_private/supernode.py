"""SuperNode of a site: it looks for messages often during a run, and names the cause of an end."""

import email.utils
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedveil.flower.flwr_private import (
    SOON,
    check_flower_version,
    flower_name,
    replace_flower_name,
)
from fedveil.flower.flwr_private.app_process import return_freed_memory

SUPERNODE = "flower-supernode"

CLOCK_TOLERANCE = 5.0
"""Seconds that a site's clock may be ahead of SuperLink's, of which Flower refuses more."""

_MODULE = "flwr.supernode.start_client_internal"
_IDLE, _STEP = 3.0, 0.5  # Flower's pauses: without a message, and while one is being answered
_BUSY, _BUSY_STEP = 0.2, 0.05
_BUSY_SECONDS = 120.0  # after the last message
_ONLINE = 75.0  # SuperLink misses a SuperNode that was killed after two heartbeats, of 30 s each
_AGAIN = 5.0
_LEAST_BYTES = 1 << 24  # of what a SuperNode may pull for an ask, whatever the plan


class Pauses:
    """A replacement for the module `time` in Flower's SuperNode, whose pauses are short in a run.

    Flower looks for messages every three seconds, and every half second for the reply of its app. A
    site that had a message in the last two minutes is in a run: it looks five times a second, and
    for the reply, which costs the server nothing, twenty times.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._busy_until = clock, 0.0
        self._sleep = time.sleep

    def sleep(self, seconds: float) -> None:
        """Wait, for less than the `seconds` of a pause of Flower's if a run is on."""
        now = self._clock()
        if seconds == _STEP:  # a message is being answered
            self._busy_until = now + _BUSY_SECONDS
            seconds = _BUSY_STEP
        elif seconds == _IDLE and now < self._busy_until:
            seconds = _BUSY
        self._sleep(seconds)


def run_supernode(arguments: Sequence[str]) -> None:
    """Run `flower-supernode` of a site in this process.

    It starts only if the canary passes, in a process of its own. It pulls no more bytes for an ask
    than one and a half times the plan's, and at least 16 MiB. What keeps SuperLink from letting it
    in is named: a key that is not registered, a clock that differs. After it was killed it waits
    until SuperLink lets it in again.
    """
    import flwr

    check_flower_version(flwr.__version__)
    return_freed_memory()
    most = _ask_bytes()
    sys.argv = [SUPERNODE, *arguments]
    print_problem(arguments)
    replace_flower_name(_MODULE, "time", Pauses())
    bound_pulls(most)
    watch_responses(most)
    try_activation_again()
    from flwr.supernode.cli import flower_supernode

    flower_supernode()


def _ask_bytes() -> int:
    """Return the most bytes that this site pulls for an ask. Exits if the canary does not pass."""
    command = [sys.executable, "-m", "fedveil.flower.flwr_private", "canary"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    lines = done.stdout.decode().splitlines()
    try:
        found = json.loads(lines[-1])["ask_bytes"]
    except (IndexError, ValueError, KeyError):
        found = None
    if done.returncode or not isinstance(found, int):
        sys.exit("error: the site does not start: what a server sends could be run here")
    return max(_LEAST_BYTES, found + found // 2)


def print_problem(arguments: Sequence[str]) -> None:
    """Print why SuperLink cannot be reached, or how far apart the clocks are. Flower tries again.

    Nothing is printed where `arguments`, those of `flower-supernode`, name no server or authority.
    """
    from fedveil.flower.connection import Connection

    named = dict(pairwise(arguments))
    if "--superlink" not in named or "--root-certificates" not in named:
        return
    seen = Connection.probe(named["--superlink"], Path(named["--root-certificates"]))
    problem = seen.problem or clock_problem(clock_ahead(seen.date))
    if problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)


def bound_pulls(most: int) -> None:
    """Let a SuperNode of this process pull no more than `most` bytes of a message's objects."""
    pull = flower_name(_MODULE, "pull_objects")

    def pull_bounded(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> Any:
        """Pull objects until they are too long, of which Flower tells the log."""
        left = most

        def counted(name: str) -> bytes:
            """Pull one object, or raise ValueError."""
            nonlocal left
            content = pull_object_fn(name)
            left -= len(content)
            if left < 0:
                raise ValueError(f"the message has more than {most:,} bytes")
            return content

        return pull(object_ids, counted, initial_backoff=SOON)

    replace_flower_name(_MODULE, "pull_objects", pull_bounded)


def watch_responses(most: int) -> None:
    """Let the clients of this process read no response above `most` bytes, and explain refusals."""
    client = flower_name("flwr.supercore.protobuf.client", "ProtobufClient")
    make, last = client.__init__, ""

    def look(response: Any) -> None:
        """Look at the head of a response, before its body is read. A cause is printed once."""
        nonlocal last
        cause = cause_of(response.status_code, response.headers.get("date"), response.url.path)
        if cause and cause != last:
            print(f"error: {cause}", file=sys.stderr, flush=True)
        last = cause
        length, encoding = (
            response.headers.get("content-length"),
            response.headers.get("content-encoding"),
        )
        if encoding or length is None or not length.isdecimal() or int(length) > most:
            raise ValueError(f"SuperLink sends more than {most:,} bytes, or does not say how many")

    def make_watching(self: Any, *args: Any, **keys: Any) -> None:
        """Make Flower's client, whose responses are looked at."""
        make(self, *args, **keys)
        self._client.event_hooks = {"request": [], "response": [look]}

    client.__init__ = make_watching


def try_activation_again(sleep: Callable[[float], None] = time.sleep) -> None:
    """Let a SuperNode of this process ask SuperLink for 75 s to let it in, where it is refused.

    A SuperNode that was killed counts as online for a minute, and SuperLink takes the one that
    follows for a second one. Flower would end it.
    """
    import httpx

    client = flower_name("flwr.supernode.fleet_http_client", "FleetHttpClient")
    activate = client.ActivateNode

    def activate_in_time(self: Any, request: Any) -> Any:
        """Activate the node, or raise what the last request raised."""
        for _ in range(int(_ONLINE / _AGAIN)):
            try:
                return activate(self, request)
            except httpx.HTTPStatusError as e:
                if e.response.status_code != 412:
                    raise
            sleep(_AGAIN)
        return activate(self, request)

    client.ActivateNode = activate_in_time


def cause_of(status: int, date: str | None, path: str, now: datetime | None = None) -> str:
    """Return why SuperLink refused a request of this site, as a sentence, "" if it did not.

    Args:
        status: The status of the response.
        date: Its date, by the server's clock.
        path: The path of the request.
        now: The time here. None: now.
    """
    if status == 401:
        return clock_problem(clock_ahead(date, now)) or (
            "SuperLink does not take this site's signature: its key is not the one it is known by"
        )
    if status == 412 and path.endswith("/activate-node"):
        return (
            f"this site's key{_fingerprint()} is not registered with SuperLink, or was taken out: "
            "send node.pub to the operator, who registers it; or SuperLink still counts a "
            "SuperNode with it as online, up to a minute after it was killed: wait"
        )
    return ""


def clock_problem(ahead: float) -> str:
    """Return a message about a clock that is too far from the server's, or "" if it is not.

    This site's clock is `ahead` seconds ahead, behind if that is negative. Up to CLOCK_TOLERANCE,
    either way, is no problem.
    """
    if abs(ahead) <= CLOCK_TOLERANCE:
        return ""
    side = "ahead of" if ahead > 0 else "behind"
    return (
        f"this site's clock is {abs(ahead):.0f} s {side} the server's, and SuperLink takes "
        f"{CLOCK_TOLERANCE:g} s: set it (timedatectl set-ntp true)"
    )


def clock_ahead(date: str | None, now: datetime | None = None) -> float:
    """Return by how many seconds this machine's clock is ahead of an HTTP date. 0 without one."""
    try:
        there = email.utils.parsedate_to_datetime(date or "")
    except ValueError:
        return 0.0
    here = (now or datetime.now(UTC)).timestamp()
    ahead = here - there.timestamp()
    return ahead - min(max(ahead, 0.0), 1.0)  # a date has no fractions of a second


def _fingerprint() -> str:
    """Return the fingerprint of the key that SuperNode was given, after a blank, or ""."""
    from fedveil.flower.federation_files import fingerprint

    named = dict(pairwise(sys.argv)).get("--auth-supernode-private-key", "node")
    path = Path(f"{named}.pub")
    return f" {fingerprint(path.read_text())}" if path.exists() else ""
