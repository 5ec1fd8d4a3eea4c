"""All runs under a folder: those that were there, and those that appear."""

import os
from collections.abc import Iterator
from pathlib import Path

from fedveil.watch.run_status import FollowedRun, RunStatus, State

DEEPEST, MOST_RUNS, MOST_FOLDERS = 3, 500, 10_000
"""Levels of folders that are searched, runs that are followed, folders that are opened."""


class RunsFolder:
    """The runs in and below `root`.

    Links to folders are not followed, so nothing outside `root` is read. A page names a run by its
    `id`, never by a path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, FollowedRun] = {}

    def statuses(self) -> list[RunStatus]:
        """The status of every run: running ones first, then the latest."""
        self._search()
        statuses = [run.status() for run in self._runs.values()]
        return sorted(
            statuses, key=lambda status: (status.state is not State.RUNNING, -status.changed)
        )

    def find(self, id: str) -> FollowedRun | None:
        """The run with that id, or None if it is not or no longer under the folder."""
        run = self._runs.get(id)
        return run if run is not None and _is_run(run.folder) else None

    def _search(self) -> None:
        there = {}
        for folder in _runs_in(self.root):
            name = str(folder.relative_to(self.root)) if folder != self.root else folder.name
            there[folder] = name
            if len(there) == MOST_RUNS:
                break
        known = {run.folder: run for run in self._runs.values()}
        runs = [known.get(folder) or FollowedRun(folder, name) for folder, name in there.items()]
        self._runs = {run.id: run for run in runs}


def _runs_in(root: Path) -> Iterator[Path]:
    waiting, opened = [(root, 0)], 0
    while waiting and opened < MOST_FOLDERS:
        folder, depth = waiting.pop(0)
        opened += 1
        if _is_run(folder):
            yield folder
        elif depth < DEEPEST:
            waiting += [(inner, depth + 1) for inner in _folders_in(folder)]


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(e.path) for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    """Whether a run was begun here: the recipe is the first file that it writes."""
    try:
        return (folder / "recipe.toml").is_file()
    except OSError:
        return False
