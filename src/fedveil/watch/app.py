"""The routes of the live page's server, all of them behind the guard."""

import asyncio
from functools import partial

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from fedveil.base.errors import FedveilError
from fedveil.runs.report import report_of
from fedveil.runs.run_directory import in_use, request_stop
from fedveil.watch import what_if
from fedveil.watch.access import Guard, PageAddress
from fedveil.watch.pages import all_page, all_view, run_page, run_view
from fedveil.watch.run_files import check_plain
from fedveil.watch.run_status import FollowedRun
from fedveil.watch.stream import Watcher
from fedveil.watch.what_if_page import answer_parts, what_if_page

_GONE = "there is no such run under this folder"


class Watch:
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
        return _missing() if run is None else _html(run_page(run.id, run.name))

    async def events(self, request: Request) -> Response:
        id = request.query_params.get("id")
        view = all_view if id is None else partial(run_view, id)
        return StreamingResponse(self._watcher.events(view), media_type="text/event-stream")

    async def report(self, request: Request) -> Response:
        """Draw the run's report as of now, without writing to its directory."""
        run = await self._run_of(request)
        if run is None:
            return _missing()

        def drawn() -> bytes:
            check_plain(run.folder)
            return report_of(run.folder)

        return _html(await run_in_threadpool(drawn))

    async def stop(self, request: Request) -> Response:
        """Ask a run that is going on to end after its round."""
        run = await self._run_of(request)
        if run is None:
            return _missing()
        if not in_use(run.folder):
            return PlainTextResponse("this run is not running: nothing was asked\n", 409)
        await run_in_threadpool(request_stop, run.folder)
        self._watcher.forget()
        return Response(status_code=204)

    async def what_if(self, request: Request) -> Response:
        return _html(what_if_page())

    async def answer(self, request: Request) -> Response:
        """Account for the settings in the query: a quick upper bound, or with `fine` the claim."""
        settings = what_if.Settings.read(request.query_params)
        fine = request.query_params.get("fine") == "1"
        return Response(
            await run_in_threadpool(answer_parts, settings, fine=fine),
            media_type="application/json",
        )

    async def recipe(self, request: Request) -> Response:
        settings = what_if.Settings.read(request.query_params)
        text = await run_in_threadpool(what_if.recipe_text, settings)
        headers = {"content-disposition": 'attachment; filename="what-if.toml"'}
        return PlainTextResponse(text, headers=headers)

    async def _run_of(self, request: Request) -> FollowedRun | None:
        return await self._watcher.find(request.query_params.get("id", ""))


def make_app(watcher: Watcher, address: PageAddress) -> Guard:
    """The whole application."""
    app = Starlette(
        routes=Watch(watcher).routes(),
        exception_handlers={FedveilError: _refused, OSError: _refused},
    )
    return Guard(app, address)


async def _refused(request: Request, error: Exception) -> Response:
    await asyncio.sleep(0)
    return PlainTextResponse(f"{' '.join(str(error).split())}\n", 400)


def _missing() -> Response:
    return PlainTextResponse(f"{_GONE}\n", 404)


def _html(content: bytes) -> Response:
    return Response(content, media_type="text/html")
