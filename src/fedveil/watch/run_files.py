"""Reading the files of a run directory without trusting whoever wrote them.

| edge | behaviour |
|---|---|
| no such file | None, or nothing new |
| a link, a folder, a pipe or a device | BadInput: it is not what a run leaves |
| longer than a run's files are | BadInput before it is read |
| a line that is half written | left for the next reading |
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from fedveil.base.errors import BadInput
from fedveil.runs.run_directory import History, parse_metrics

MOST = {"recipe.toml": 1 << 18, "result.json": 1 << 24, "metrics.jsonl": 1 << 27}
"""Bytes that are read of a run's files; a run of a million rounds stays below."""

LARGEST_LEDGER = 1 << 30


def content_of(path: Path) -> bytes | None:
    """The content of a file, or None if it does not exist."""
    try:
        with _opened(path) as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise BadInput(f"{path} cannot be read: {e.strerror}") from e


def check_plain(folder: Path) -> None:
    """Refuse a run directory with files that are not a run's own."""
    for name in MOST:
        try:
            _opened(folder / name).close()
        except FileNotFoundError:
            continue
        except OSError as e:
            raise BadInput(f"{folder / name} cannot be read: {e.strerror}") from e


class Tail:
    """The lines of a metrics file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget(None)

    def _forget(self, file: int | None) -> None:
        self._file, self._at, self._damaged = file, 0, False
        self.history: History = []

    @property
    def trouble(self) -> list[str]:
        if not self._damaged:
            return []
        return [f"metrics.jsonl was damaged after {len(self.history)} lines: the rest is left out"]

    def read_new(self) -> None:
        """Read what was added, or all of it if the file was replaced or cut."""
        try:
            with _opened(self._path) as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._file or about.st_size < self._at:
                    self._forget(about.st_ino)
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            self._forget(None)
            return
        except OSError as e:
            raise BadInput(f"{self._path} cannot be read: {e.strerror}") from e
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        self._take(whole)

    def _take(self, text: bytes) -> None:
        for one in text.decode(errors="replace").splitlines():
            line = None if self._damaged else parse_metrics(one)
            last = self.history[-1]["round"] if self.history else -1
            if line is None or line["round"] <= last:
                self._damaged = True
                return
            self.history.append(line)


def _opened(path: Path) -> BinaryIO:
    """Open a regular file of reasonable length. Links are not followed, pipes not waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        if path.is_symlink():
            raise BadInput(f"{path} is a link: a run leaves a file") from e
        raise
    file = os.fdopen(descriptor, "rb")
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
        file.close()
        raise BadInput(f"{path} is not a file")
    if about.st_size > MOST[path.name]:
        file.close()
        raise BadInput(f"{path} has {about.st_size:,} bytes: more than a run leaves")
    return file
