"""Server-sent events: parts of a page, each when it has changed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fedveil.watch.cards import Parts
from fedveil.watch.run_status import FollowedRun, RunStatus
from fedveil.watch.runs_folder import RunsFolder

EVERY = 1.0
_ALIVE = 15.0
"""Seconds between two readings, and between keep-alive comments while nothing changes."""

_REST = 4.0
"""The pause after a slow reading, as a multiple of its duration: the runs need the machine."""


@dataclass(frozen=True)
class Drawn:
    """A page's parts in their order, by the cards that they belong to."""

    cards: list[tuple[str, list[str]]]
    parts: Parts


View = Callable[[Sequence[RunStatus]], Drawn]


class Watcher:
    """Reads a folder of runs about once a second, once for all pages that are open.

    Reading and drawing happen in a thread, one at a time, so that the server stays responsive.
    """

    def __init__(self, folder: RunsFolder) -> None:
        self.folder, self.ended = folder, asyncio.Event()
        self._turn = asyncio.Lock()
        self._statuses: list[RunStatus] = []
        self._at, self._pause = float("-inf"), EVERY

    async def draw(self, view: View) -> Drawn:
        """A view of the folder as it was a moment ago."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            began = loop.time()
            fresh = began - self._at < self._pause * 0.9
            if not fresh:
                self._statuses = await loop.run_in_executor(None, self.folder.statuses)
                self._at = loop.time()
            drawn = await loop.run_in_executor(None, partial(view, self._statuses))
            if not fresh:
                self._pause = max(EVERY, _REST * (loop.time() - began))
            return drawn

    async def find(self, id: str) -> FollowedRun | None:
        """The run of that id under the folder."""
        if self.folder.find(id) is None:
            await self.draw(lambda statuses: Drawn([], {}))
        return self.folder.find(id)

    def forget(self) -> None:
        """Look again at once: something was changed."""
        self._at = float("-inf")

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
            elif silent >= _ALIVE:
                yield ": nothing new\n\n"
                silent = 0.0
            silent += self._pause
            try:
                await asyncio.wait_for(self.ended.wait(), self._pause)
            except TimeoutError:
                continue
        yield "event: ended\ndata: {}\n\n"
