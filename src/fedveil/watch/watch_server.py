"""The server of the live page: one process on one address, all of it behind the guard.

Every request is checked before anything else happens:

| request | answer |
|---|---|
| the Host is not the address that the server listens on (DNS rebinding) | 403 |
| the path does not begin with the token | 403 |
| it comes from another site's page (Sec-Fetch-Site, Origin), or says so in part | 403 |
| anything but GET and HEAD without the Origin of this server | 403 |
| no request but a connection of another kind (a web socket) | closed |

A page of another site can neither read an answer nor end a run: it does not know the token, and
would be refused if it did. The token is in the path, not in a cookie, which browsers would send
to every server on this machine.
"""

import asyncio
import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedveil.base.errors import BadInput, FedveilError
from fedveil.runs.report import report_of
from fedveil.runs.run_directory import in_use, request_stop
from fedveil.watch import what_if
from fedveil.watch.followed_runs import FollowedRun, RunsFolder, RunStatus, check_plain
from fedveil.watch.live_pages import LiveView, all_page, all_view, run_page, run_view

_HEADERS = {
    b"cache-control": b"no-store",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
}


@dataclass(frozen=True)
class PageAddress:
    """Where the server listens, and the token that its paths begin with."""

    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        """The whole address, for a browser."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/{self.token}/"

    def is_own(self, host: str) -> bool:
        """Whether a Host header names this server.

        A name that somebody else's name server answers for is not among them: only this IP
        address and, on loopback, "localhost"; where all addresses are listened on, any IP address.
        """
        name, _, port = host.rpartition(":")
        if port != str(self.port):
            return False
        own = ipaddress.ip_address(self.host)
        if name == "localhost":
            return own.is_loopback
        try:
            named = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return named == own or own.is_unspecified


class Guard:
    """Middleware that refuses requests without the right host, token and origin."""

    def __init__(self, app: ASGIApp, address: PageAddress) -> None:
        self._app, self._address = app, address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not spoken here")

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS.items()]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await PlainTextResponse(f"{refusal}\n", 403)(scope, receive, with_headers)
            return
        path = scope["path"].removeprefix(f"/{self._address.token}")
        await self._app({**scope, "path": path, "raw_path": None}, receive, with_headers)

    def _refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._address.is_own(hosts[0]):
            return "this server is asked by its own address only"
        _, token, *rest = scope["path"].split("/", 2) if "/" in scope["path"] else ("", "")
        if not rest or not hmac.compare_digest(token.encode(), self._address.token.encode()):
            return "the address lacks its token: use the one that fedveil watch printed"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return "other sites' pages are not answered"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            return "other sites' pages are not answered"
        if scope["method"] not in ("GET", "HEAD") and origin is None:
            return "this is for the page's own button"
        return None


_INTERVAL, _KEEP_ALIVE = 1.0, 15.0
"""Seconds between two readings, and between keep-alive comments while nothing changes."""

_REST = 4.0
"""The pause after a slow reading, as a multiple of its duration: the runs need the machine."""


View = Callable[[Sequence[RunStatus]], LiveView]


class Watcher:
    """Reads a folder of runs about once a second, once for all pages that are open.

    Reading and drawing happen in a thread, one at a time, so that the server stays responsive.
    """

    def __init__(self, folder: RunsFolder) -> None:
        self.folder, self.ended = folder, asyncio.Event()
        self._lock = asyncio.Lock()
        self._statuses: list[RunStatus] = []
        self._read_at, self._pause = float("-inf"), _INTERVAL

    async def draw(self, view: View) -> LiveView:
        """A view of the folder as it was a moment ago."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            began = loop.time()
            fresh = began - self._read_at < self._pause * 0.9
            if not fresh:
                self._statuses = await loop.run_in_executor(None, self.folder.statuses)
                self._read_at = loop.time()
            drawn = await loop.run_in_executor(None, partial(view, self._statuses))
            if not fresh:
                self._pause = max(_INTERVAL, _REST * (loop.time() - began))
            return drawn

    async def find(self, id: str) -> FollowedRun | None:
        """The run of that id under the folder."""
        if self.folder.find(id) is None:
            await self.draw(lambda statuses: LiveView([], {}))
        return self.folder.find(id)

    def forget(self) -> None:
        """Look again at once: something was changed."""
        self._read_at = float("-inf")

    async def events(self, view: View) -> AsyncIterator[str]:
        """What has changed since the last event, until the server ends."""
        sent: dict[str, str] = {}
        order: list[tuple[str, list[str]]] | None = None
        silent = 0.0
        while not self.ended.is_set():
            drawn = await self.draw(view)
            texts = {id: part.text for id, part in drawn.parts.items()}
            new = {id: text for id, text in texts.items() if sent.get(id) != text}
            if new or drawn.cards != order:
                yield f"data: {json.dumps({'cards': drawn.cards, 'parts': new})}\n\n"
                sent, order, silent = texts, drawn.cards, 0.0
            elif silent >= _KEEP_ALIVE:
                yield ": nothing new\n\n"
                silent = 0.0
            silent += self._pause
            try:
                await asyncio.wait_for(self.ended.wait(), self._pause)
            except TimeoutError:
                continue
        yield "event: ended\ndata: {}\n\n"


class LiveRoutes:
    """What the server answers. One request ends something: `stop`."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def routes(self) -> list[Route]:
        """Paths, without the token that they begin with."""
        return [
            Route("/", self.all),
            Route("/run", self.run),
            Route("/events", self.events),
            Route("/report", self.report),
            Route("/stop", self.stop, methods=["POST"]),
            Route("/what-if", self.what_if),
            Route("/answer", self.answer),
            Route("/recipe", self.recipe),
        ]

    async def all(self, request: Request) -> Response:
        return _html(all_page(self._watcher.folder.root))

    async def run(self, request: Request) -> Response:
        run = await self._run_of(request)
        return _html(run_page(run.id, run.name))

    async def events(self, request: Request) -> Response:
        id = request.query_params.get("id")
        view = all_view if id is None else partial(run_view, id)
        return StreamingResponse(self._watcher.events(view), media_type="text/event-stream")

    async def report(self, request: Request) -> Response:
        """Draw the run's report as of now, without writing to its directory."""
        run = await self._run_of(request)
        await run_in_threadpool(check_plain, run.folder)
        return _html(await run_in_threadpool(report_of, run.folder))

    async def stop(self, request: Request) -> Response:
        """Ask a run that is going on to end after its round."""
        run = await self._run_of(request)
        if not in_use(run.folder):
            return PlainTextResponse("this run is not running: nothing was asked\n", 409)
        await run_in_threadpool(request_stop, run.folder)
        self._watcher.forget()
        return Response(status_code=204)

    async def what_if(self, request: Request) -> Response:
        return _html(what_if.what_if_page())

    async def answer(self, request: Request) -> Response:
        """Account for the settings in the query: a quick upper bound, or with `fine` the claim."""
        settings = what_if.Settings.from_query(request.query_params)
        fine = request.query_params.get("fine") == "1"
        answer = await run_in_threadpool(what_if.answer_parts, settings, fine=fine)
        return Response(answer, media_type="application/json")

    async def recipe(self, request: Request) -> Response:
        settings = what_if.Settings.from_query(request.query_params)
        text = await run_in_threadpool(what_if.recipe_text, settings)
        headers = {"content-disposition": 'attachment; filename="what-if.toml"'}
        return PlainTextResponse(text, headers=headers)

    async def _run_of(self, request: Request) -> FollowedRun:
        """The run that the request names, or the answer 404."""
        run = await self._watcher.find(request.query_params.get("id", ""))
        if run is None:
            raise HTTPException(404, "there is no such run under this folder\n")
        return run


def make_app(watcher: Watcher, address: PageAddress) -> Guard:
    """The whole application."""
    app = Starlette(
        routes=LiveRoutes(watcher).routes(),
        exception_handlers={FedveilError: _refused, OSError: _refused},
    )
    return Guard(app, address)


async def _refused(request: Request, error: Exception) -> Response:
    await asyncio.sleep(0)
    return PlainTextResponse(f"{' '.join(str(error).split())}\n", 400)


def _html(content: bytes) -> Response:
    return Response(content, media_type="text/html")


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
        self.stop()

    def stop(self) -> None:
        """End soon. Event streams end first, since the server waits for open responses."""
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._watcher.ended.set)

    def end_with_stdin(self) -> None:
        """End when standard input is closed.

        It is read by `os.read`, because `sys.stdin` would hold a lock that the exit needs.
        """
        while os.read(0, 1 << 12):
            pass
        self.stop()


def _warm_up() -> None:
    """Load the accountants before the first slider is moved."""
    what_if.quick(what_if.Settings.from_query({}))
