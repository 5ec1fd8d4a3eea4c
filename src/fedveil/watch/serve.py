"""The server: one process on one address, until Ctrl-C or until the one who started it is gone."""

import asyncio
import ipaddress
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from fedveil.base.errors import BadInput
from fedveil.watch.access import PageAddress
from fedveil.watch.app import make_app
from fedveil.watch.runs_folder import RunsFolder
from fedveil.watch.stream import Watcher
from fedveil.watch.what_if import Settings, quick

_GRACE = 2
"""Seconds that answers under way are waited for at the end."""


@dataclass(frozen=True)
class Served:
    """What is watched, and where.

    | edge | behaviour |
    |---|---|
    | a host that is no IP address | BadInput |
    | a host beyond loopback without `outside` | BadInput: the page is not encrypted |
    | a port that is taken, or outside 0 to 65535 | BadInput |
    """

    root: Path
    host: str = "127.0.0.1"
    port: int = 0
    outside: bool = False

    def __post_init__(self) -> None:
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise BadInput(f"--host is {self.host!r}: an IP address is needed") from None
        if not (address.is_loopback or self.outside):
            raise BadInput(
                f"--host is {self.host}, which other machines reach, and nothing is encrypted: use "
                "127.0.0.1 and a tunnel (ssh -L), or add --outside if that is meant"
            )
        if not 0 <= self.port < 2**16:
            raise BadInput(f"--port is {self.port}: 0 (any) to 65535 is needed")

    def listening(self) -> socket.socket:
        """A socket that has the address."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = socket.socket(family)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self.host, self.port))
        except OSError as e:
            sock.close()
            raise BadInput(
                f"--port {self.port} of {self.host} cannot be listened on: {e.strerror}; "
                "choose another, or 0 for any"
            ) from e
        return sock


def serve(served: Served, ready: Callable[[str], None], *, while_stdin: bool = False) -> None:
    """Answer until Ctrl-C, SIGTERM or, `while_stdin`, until standard input is closed.

    `ready` is given the address when it can be opened.
    """
    sock = served.listening()
    address = PageAddress(served.host, sock.getsockname()[1], secrets.token_urlsafe(24))
    asyncio.run(_serve(served.root, sock, address, ready, while_stdin=while_stdin))


async def _serve(
    root: Path,
    sock: socket.socket,
    address: PageAddress,
    ready: Callable[[str], None],
    *,
    while_stdin: bool,
) -> None:
    watcher = Watcher(RunsFolder(root))
    config = uvicorn.Config(
        make_app(watcher, address),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE,
    )
    server = _Server(config, watcher)
    if while_stdin:
        threading.Thread(target=server.end_with_stdin, daemon=True).start()
    threading.Thread(target=_warm_up, daemon=True).start()
    sock.listen()
    ready(address.url)
    await server.serve(sockets=[sock])


class _Server(uvicorn.Server):
    """A server whose event streams end with it, however many there are."""

    def __init__(self, config: uvicorn.Config, watcher: Watcher) -> None:
        super().__init__(config)
        self._watcher, self._loop = watcher, asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ctrl-C and SIGTERM: it ends, and nothing is raised."""
        self.end()

    def end(self) -> None:
        """End soon. Event streams end first, since the server waits for open responses."""
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._watcher.ended.set)

    def end_with_stdin(self) -> None:
        """End when standard input is closed.

        It is read by `os.read`, because `sys.stdin` would hold a lock that the exit needs.
        """
        while os.read(0, 1 << 12):
            pass
        self.end()


def _warm_up() -> None:
    """Load the accountants before the first slider is moved."""
    quick(Settings.read({}))
