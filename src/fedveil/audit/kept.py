"""`Kept`: what a long audit has computed so far, in a directory that survives any interruption.

audit.json   what is audited, with which settings, and by which code
found.json   everything that was found, when the audit has ended
NAME.npy     one array each, written as soon as it is there
NAME.json    what was found, where that is kept
NAME.png     figures
"""

import hashlib
import importlib.metadata
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

import fedveil
from fedveil.data.data_files import UNREADABLE
from fedveil.errors import BadInput
from fedveil.runs.disk import locked, write_atomic
from fedveil.runs.recipe import Recipe
from fedveil.tuning.figures import png

Numbers = npt.NDArray[np.float64]

_FORMAT = 2
_PACKAGES = ("fedveil", "torch", "numpy", "scipy", "scikit-learn")
ABOUT = "audit.json"
FOUND = "found.json"
_OWN_FILES = ("lock", f".{ABOUT}.tmp")


@dataclass(frozen=True)
class Kept:
    """Arrays by name in `folder`; None keeps nothing.

    Arrays are functions of what audit.json says, up to rounding, so that an audit which was killed
    and started again computes no array twice and ends with the same findings. The code that wrote
    them is part of it: what another version computed is never mixed in.
    """

    folder: Path | None = None

    @staticmethod
    @contextmanager
    def at(folder: Path | None, identity: dict[str, Any]) -> Iterator["Kept"]:
        """The audit in `folder`, held for this process: a new one, or the one that is there.

        | edge | behaviour |
        |---|---|
        | another audit, a run, or other files in the folder | BadInput |
        | the same audit, begun by other code or other libraries | BadInput |
        | another process is at work there | BadInput |
        """
        if folder is None:
            yield Kept()
            return
        told = {"format": _FORMAT, "code": code(), **json.loads(json.dumps(identity))}
        _check(folder, told)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise BadInput(f"--out {folder} cannot be made: {e.strerror}") from e
        with locked(folder):
            _check(folder, told)
            write_atomic(folder / ABOUT, json.dumps(told, indent=2).encode())
            yield Kept(folder)

    def array(self, name: str) -> Numbers | None:
        """What was kept under a name; None if nothing was, or a crash has torn it."""
        if self.folder is None:
            return None
        try:
            found = np.load(self.folder / f"{name}.npy", allow_pickle=False)
        except UNREADABLE:
            return None
        return np.asarray(found, dtype=np.float64)

    def keep(self, name: str, values: Numbers) -> None:
        """Write an array, so that it is there whole or not at all."""
        if self.folder is not None:
            buffer = io.BytesIO()
            np.save(buffer, values, allow_pickle=False)
            write_atomic(self.folder / f"{name}.npy", buffer.getvalue())

    def told(self, name: str) -> dict[str, Any] | None:
        """What was said under a name; None if nothing was."""
        if self.folder is None:
            return None
        try:
            return dict(json.loads((self.folder / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def tell(self, name: str, said: dict[str, Any]) -> None:
        """Write plain JSON values."""
        if self.folder is not None:
            write_atomic(self.folder / f"{name}.json", json.dumps(said, indent=2).encode())

    def picture(self, name: str, draw: Callable[[], Figure]) -> None:
        """Draw a figure, if there is where to put it."""
        if self.folder is not None:
            write_atomic(self.folder / f"{name}.png", png(draw()))


@cache
def code() -> str:
    """The versions of what computes an audit, and the digest of fedveil's own source.

    A version number alone does not tell two states of the source apart.
    """
    source, digest = Path(fedveil.__file__).parent, hashlib.sha256()
    for path in sorted(source.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(source).as_posix()} {content}\n".encode())
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    return ", ".join([*versions, f"source {digest.hexdigest()[:16]}"])


def audited_digest(recipe: Recipe) -> str:
    """What an audit knows a recipe by."""
    return hashlib.sha256(recipe.model_dump_json().encode()).hexdigest()


def _check(folder: Path, told: dict[str, Any]) -> None:
    """Refuse a folder that holds anything but this audit."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder} is a file: name a directory")
    path = folder / ABOUT
    if not path.exists():
        inside = folder.iterdir() if folder.is_dir() else ()
        others = sorted(p.name for p in inside if p.name not in _OWN_FILES)
        if others:
            raise BadInput(f"--out {folder} holds {others[0]} and no audit: use another")
        return
    try:
        stored = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as e:
        raise BadInput(f"{path} is not an audit's: use another --out") from e
    for key, value in told.items():
        if stored.get(key) != value:
            raise BadInput(
                f"{folder} holds another audit (its {key} is {stored.get(key)!r}, not {value!r}): "
                "start it again as it was, or use another --out"
            )
