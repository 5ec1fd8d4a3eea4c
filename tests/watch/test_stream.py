"""Events: what has changed, once; nothing while nothing does; an end that comes at once."""

import asyncio
import json
import time

import pytest

from fedveil.watch import watch_server
from fedveil.watch.followed_runs import RunsFolder
from fedveil.watch.live_pages import all_view
from fedveil.watch.watch_server import Watcher


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(watch_server, "_INTERVAL", 0.02)


def told(event):
    return json.loads(event.removeprefix("data: "))


def test_parts_are_sent_when_they_change(root, copied, holding):
    folder = copied("open")
    holding(folder)

    async def watched():
        watcher = Watcher(RunsFolder(root))
        events = watcher.events(all_view)
        first = told(await anext(events))
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        again = {**json.loads(lines[-1]), "round": 3, "accuracy": 0.123456}
        with (folder / "metrics.jsonl").open("a") as f:
            f.write(json.dumps(again) + "\n")
        second = told(await anext(events))
        watcher.ended.set()
        return first, second, [event async for event in events]

    first, second, rest = asyncio.run(watched())
    ((card, parts),) = first["cards"]
    assert set(first["parts"]) == set(parts)
    assert second["cards"] == first["cards"]
    assert f"{card}-state" in second["parts"]
    assert "0.1235" in second["parts"][f"{card}-state"]
    assert (
        not {f"{card}-head", f"{card}-end"} & second["parts"].keys()
    )  # a click meets no new button
    assert rest == ["event: ended\ndata: {}\n\n"]


def test_new_runs_join(root, copied):
    async def watched():
        events = Watcher(RunsFolder(root)).events(all_view)
        before = told(await anext(events))
        copied("ended")
        after = told(await anext(events))
        await events.aclose()
        return before, after

    before, after = asyncio.run(watched())
    assert before["cards"] == [["none", ["none-yet"]]]
    assert len(after["cards"]) == 1
    assert "Test accuracy" in str(after["parts"])


def test_where_nothing_happens_there_is_a_sign_of_life(root, copied, monkeypatch):
    monkeypatch.setattr(watch_server, "_KEEP_ALIVE", 0.06)
    copied("ended")

    async def watched():
        events = Watcher(RunsFolder(root)).events(all_view)
        found = [await anext(events) for _ in range(3)]
        await events.aclose()
        return found

    assert asyncio.run(watched())[1:] == [": nothing new\n\n"] * 2


def test_after_a_look_that_took_long_the_runs_have_the_machine(root, copied, monkeypatch):
    copied("ended")
    folder, began = RunsFolder(root), []
    statuses = folder.statuses
    folder.statuses = lambda: began.append(time.monotonic()) or time.sleep(0.1) or statuses()

    async def watched():
        watcher = Watcher(folder)
        await watcher.draw(all_view)
        first = len(began)
        watcher._read_at -= 0.1
        await watcher.draw(all_view)
        return first, len(began), watcher._pause

    first, second, pause = asyncio.run(watched())
    assert (first, second) == (1, 1)
    assert pause >= 0.4


def test_many_who_watch_look_once(root, copied, monkeypatch):
    monkeypatch.setattr(watch_server, "_INTERVAL", 0.5)
    copied("ended")
    folder, looked = RunsFolder(root), []
    statuses = folder.statuses
    folder.statuses = lambda: looked.append(1) or statuses()

    async def watched():
        watcher = Watcher(folder)
        many = [watcher.events(all_view) for _ in range(50)]
        first = await asyncio.gather(*(anext(events) for events in many))
        watcher.ended.set()
        last = await asyncio.wait_for(asyncio.gather(*(anext(events) for events in many)), 60)
        return first, last

    first, last = asyncio.run(watched())
    assert len(set(first)) == 1
    assert set(last) == {"event: ended\ndata: {}\n\n"}
    assert len(looked) <= 2
