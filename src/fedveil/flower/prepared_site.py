"""The site of a process: opened once, and again when one of the owner's files has changed."""

import os
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedveil.flower.federation_files import read_site_file
from fedveil.flower.site import Site

SITE = "FEDVEIL_SITE"
"""The environment variable with the path of the owner's file."""

FileStates = tuple[tuple[str, int, int, int], ...]


def open_site(path: Path) -> Site:
    """Return the site that a `site.toml` describes, opened by this process or the one it forked of.

    It is opened again if a file that it was made of has changed: the policy that counts is the one
    on disk. The ledger is read at every ask, whatever was opened. Raises BadInput as `Site.open`.
    """
    return _open_site(path, file_states(path))


@lru_cache(maxsize=1)
def _open_site(path: Path, _states: FileStates) -> Site:
    """Return the site of a file, for as long as the states of its files are the same."""
    return Site.open(path)


def file_states(path: Path) -> FileStates:
    """Return (path, size, time of change, inode) of a `site.toml`, and of all files it names.

    Whatever text in it, or in the recipe that it names, is the path of a file or folder beside it
    counts. The site's ledger and witness do not. A file that cannot be read has zeros.
    """
    seen = dict[Path, None]()
    with suppress(Exception):  # a file that is refused has no others
        site = read_site_file(path)  # whose defaults name files as well
        seen |= dict.fromkeys((Path(site.recipe), Path(site.policy)))
    for file in _named(path, seen):
        if file.suffix == ".toml":
            for _ in _named(file, seen):
                pass
    return tuple(_state(file) for file in seen)


def _named(path: Path, seen: dict[Path, None]) -> Iterator[Path]:
    """Yield a TOML file's own path and those that its texts name, and add the files to `seen`."""
    seen.setdefault(path)
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return
    own = {content.pop("ledger", "ledger"), content.pop("witness", None)}
    names = list(_texts(content))
    # the policy has a name where none is given, and code is named as FILE:FUNCTION
    for text in (*names, *(name.rpartition(":")[0] for name in names), "policy.toml"):
        found = path.parent / text
        try:
            if text in own or not text or not found.exists():
                continue
        except (OSError, ValueError):  # no path at all
            continue
        for file in sorted(found.rglob("*")) if found.is_dir() else [found]:
            seen.setdefault(file)
        yield found


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value of a TOML file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _state(path: Path) -> tuple[str, int, int, int]:
    """Return (path, size, time of change, inode) of a file, zeros if it cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return (str(path), 0, 0, 0)
    return (str(path), found.st_size, found.st_mtime_ns, found.st_ino)
