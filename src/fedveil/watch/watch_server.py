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
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedveil.base.checks import PORT
from fedveil.base.errors import BadInput, FedveilError
from fedveil.runs.report import report_html
from fedveil.runs.run_directory import in_use, request_stop
from fedveil.watch import what_if
from fedveil.watch.followed_runs import FollowedRun, RunsFolder, RunStatus, check_run_files
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
    """The address that the server listens on.

    Attributes:
        host: An IP address.
        port: A port.
        token: A secret with which all paths begin.
    """

    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        """Return "http://HOST:PORT/TOKEN/", for a browser."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/{self.token}/"

    def is_own_host(self, host: str) -> bool:
        """Return whether a Host header names this server.

        Accepted are its IP address, "localhost" on loopback, and any IP address if the server
        listens on all of them. Other names are refused: another name server may answer for them.
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
    """Middleware that refuses requests without the right host, token and origin, with 403.

    It removes the token from the path, and adds headers to every answer.
    """

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
        """Return why the request is refused, in a sentence, or None if it is answered."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._address.is_own_host(hosts[0]):
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
    Create it inside the event loop.

    Attributes:
        folder: The runs.
        ended: Set this event to end all streams.
    """

    def __init__(self, folder: RunsFolder) -> None:
        self.folder, self.ended = folder, asyncio.Event()
        self._lock = asyncio.Lock()
        self._statuses: list[RunStatus] = []
        self._read_at, self._pause = float("-inf"), _INTERVAL

    async def draw(self, view: View) -> LiveView:
        """Return `view` of the runs' statuses.

        The folder is read again if the last reading is older than the pause: about a second, or
        four times as long as the last reading took.
        """
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
        """Return the run with that id, or None.

        The folder is searched if the id is not known yet.
        """
        if self.folder.find(id) is None:
            await self.draw(lambda statuses: LiveView([], {}))
        return self.folder.find(id)

    def expire(self) -> None:
        """Make the next `draw` read the folder again, since a run was changed."""
        self._read_at = float("-inf")

    async def events(self, view: View) -> AsyncIterator[str]:
        """Yield server-sent events, as text, with the parts of a view that have changed.

        The first has all parts. While nothing changes, a comment comes every 15 seconds. An event
        "ended" comes last, after the event `ended` was set.
        """
        sent: dict[str, str] = {}
        order: list[tuple[str, list[str]]] | None = None
        silent = 0.0
        while not self.ended.is_set():
            drawn = await self.draw(view)
            texts = {id: part.text for id, part in drawn.pieces.items()}
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
    """The answers of the server. Only `stop` changes anything: it writes into the run directory."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def routes(self) -> list[Route]:
        """Return the routes by path, without the token."""
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
        """Answer with the page of all runs."""
        return HTMLResponse(all_page(self._watcher.folder.root))

    async def run(self, request: Request) -> Response:
        """Answer with the page of the run in the query, or 404."""
        run = await self._run_of(request)
        return HTMLResponse(run_page(run.id, run.name))

    async def events(self, request: Request) -> Response:
        """Answer with a stream of events: of the run `id` in the query, or of all runs."""
        id = request.query_params.get("id")
        view = all_view if id is None else partial(run_view, id)
        return StreamingResponse(self._watcher.events(view), media_type="text/event-stream")

    async def report(self, request: Request) -> Response:
        """Answer with the report of the run in the query, drawn now, or 404. Nothing is written."""
        run = await self._run_of(request)
        await run_in_threadpool(check_run_files, run.folder)
        return HTMLResponse(await run_in_threadpool(report_html, run.folder))

    async def stop(self, request: Request) -> Response:
        """Ask the run in the query to end after its round, and answer 204.

        Answer 404 without such a run, and 409 if it is not running.
        """
        run = await self._run_of(request)
        if not in_use(run.folder):
            return PlainTextResponse("this run is not running: nothing was asked\n", 409)
        await run_in_threadpool(request_stop, run.folder)
        self._watcher.expire()
        return Response(status_code=204)

    async def what_if(self, request: Request) -> Response:
        """Answer with the what-if page."""
        return HTMLResponse(what_if.what_if_page())

    async def answer(self, request: Request) -> Response:
        """Answer with the JSON of `answer_parts` for the query's settings, exact if `fine` is 1.

        A setting off its range is answered with 400.
        """
        settings = what_if.Settings.from_query(request.query_params)
        exact = request.query_params.get("fine") == "1"
        answer = await run_in_threadpool(what_if.answer_parts, settings, exact=exact)
        return Response(answer, media_type="application/json")

    async def recipe(self, request: Request) -> Response:
        """Answer with a recipe file, what-if.toml, of the settings in the query.

        A setting off its range is answered with 400.
        """
        settings = what_if.Settings.from_query(request.query_params)
        text = await run_in_threadpool(what_if.recipe_text, settings)
        headers = {"content-disposition": 'attachment; filename="what-if.toml"'}
        return PlainTextResponse(text, headers=headers)

    async def _run_of(self, request: Request) -> FollowedRun:
        """Return the run that the request names. Raise HTTPException 404 if there is none."""
        run = await self._watcher.find(request.query_params.get("id", ""))
        if run is None:
            raise HTTPException(404, "there is no such run under this folder\n")
        return run


def make_app(watcher: Watcher, address: PageAddress) -> Guard:
    """Return all routes behind the guard. Errors of fedveil and OSErrors are answered with 400."""
    app = Starlette(
        routes=LiveRoutes(watcher).routes(),
        exception_handlers={FedveilError: _error_response, OSError: _error_response},
    )
    return Guard(app, address)


async def _error_response(request: Request, error: Exception) -> Response:
    """Answer 400 with the message of the error on one line."""
    await asyncio.sleep(0)
    return PlainTextResponse(f"{' '.join(str(error).split())}\n", 400)


_GRACE = 2
"""Seconds that answers under way are waited for at the end."""


@dataclass(frozen=True)
class WatchOptions:
    """The folder to watch and the address to listen on. Its constructor checks them.

    Attributes:
        root: The folder.
        host: An IP address.
        port: A port, 0 for any.
        outside: Permits addresses that other machines reach.

    | edge | behaviour |
    |---|---|
    | a host that is not an IP address | BadInput |
    | a host beyond loopback without `outside` | BadInput: the page is not encrypted |
    | a port outside 0 to 65535 | BadInput |
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
        PORT.check("--port", self.port)

    def bind_socket(self) -> socket.socket:
        """Return a socket bound to the address, not listening yet.

        Raise BadInput if it cannot be.
        """
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


def serve(
    options: WatchOptions, ready: Callable[[str], None], *, while_stdin: bool = False
) -> None:
    """Serve the pages until Ctrl-C or SIGTERM. Raise BadInput if the port is taken.

    Args:
        options: The folder and the address.
        ready: Called with the URL, token included, as soon as it can be opened.
        while_stdin: Also end when standard input is closed.
    """
    sock = options.bind_socket()
    address = PageAddress(options.host, sock.getsockname()[1], secrets.token_urlsafe(24))

    async def run() -> None:
        watcher = Watcher(RunsFolder(options.root))
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
        # One quick answer, so that accountants are loaded before a slider moves.
        first = (what_if.Settings.from_query({}),)
        threading.Thread(target=what_if.quick_claims, args=first, daemon=True).start()
        sock.listen()
        ready(address.url)
        await server.serve(sockets=[sock])

    asyncio.run(run())


class _Server(uvicorn.Server):
    """A server whose event streams end with it, however many there are."""

    def __init__(self, config: uvicorn.Config, watcher: Watcher) -> None:
        super().__init__(config)
        self._watcher, self._loop = watcher, asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server on Ctrl-C or SIGTERM, without raising."""
        self.stop()

    def stop(self) -> None:
        """Make the server and all event streams end, from any thread."""
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._watcher.ended.set)

    def end_with_stdin(self) -> None:
        """Wait until standard input is closed, then stop the server.

        It is read by `os.read`, because `sys.stdin` would hold a lock that the exit needs.
        """
        while os.read(0, 1 << 12):
            pass
        self.stop()
