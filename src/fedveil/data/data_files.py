"""Find, open and save data files. Whatever is wrong with one raises a one-line `BadInput`."""

import gzip
import importlib
import json
import os
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.data.user_arrays import Array

UNREADABLE = (
    *(OSError, EOFError, ValueError, TypeError, MemoryError, RuntimeError, SyntaxError, Warning),
    tokenize.TokenError,
)
"""What numpy raises for a broken .npy file, whose header is a Python literal."""

_UNREADABLE = (*UNREADABLE, KeyError, zlib.error, zipfile.BadZipFile)
_NPZ_LIMIT = 1 << 32  # bytes an npz may unpack to


@contextmanager
def warnings_as_errors() -> Iterator[None]:
    """Inside, every warning is raised as an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def data_root(explicit: Path | None = None) -> Path:
    """The folder with one subfolder per data set: `explicit`, else FEDVEIL_DATA."""
    named = explicit or os.environ.get("FEDVEIL_DATA")
    if not named:
        raise BadInput("no data folder: give --data FOLDER or set the variable FEDVEIL_DATA")
    root = Path(named)
    if not root.is_dir():
        raise BadInput(f"data folder {root} does not exist: correct --data or FEDVEIL_DATA")
    return root


def find_file(root: Path, candidates: Sequence[str], *, expected: str) -> Path:
    """The first of `candidates` under `root`, paths that may hold `*`.

    `expected` tells a user without them which files are meant and where to get them.
    """
    for candidate in candidates:
        for path in sorted(root.glob(candidate)):
            return path
    raise BadInput(f"{root} has no {' or '.join(candidates)}: expected {expected}")


def malformed(path: Path, expected: str, found: object) -> BadInput:
    """The error for a file with unexpected content."""
    return BadInput(f"{path}: expected {expected}, found {' '.join(str(found).split())}")


@contextmanager
def reading(path: Path, expected: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn exceptions of a broken file, and `errors`, into `malformed`."""
    broken: tuple[type[Exception], ...] = (*_UNREADABLE, *errors)
    try:
        yield
    except BadInput:
        raise
    except broken as e:
        raise malformed(path, expected, str(e) or repr(e)) from e


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading, unpacking it on the way when its name ends in .gz."""
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def read_exactly(path: Path, stream: BinaryIO, size: int) -> bytes:
    """The `size` bytes left in `stream`, refusing fewer or more without reading further."""
    content = stream.read(size + 1)
    if len(content) != size:
        length = "more" if len(content) > size else len(content)
        raise malformed(path, f"{size} bytes of data", length)
    return content


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, Array]:
    """The named arrays of an npz file, never unpickled."""
    with reading(path, f"an npz file with {', '.join(keys)}"), warnings_as_errors():
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > _NPZ_LIMIT:
            raise malformed(path, f"at most {_NPZ_LIMIT} bytes unpacked", size)
        with np.load(path, allow_pickle=False) as archived:
            arrays = {key: archived[key] for key in keys}
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise malformed(path, f"an array {key}", "other content")
    return arrays


def check_codes(
    path: Path, codes: Array, *, records: int, count: int, what: str = "labels", first: int = 0
) -> None:
    """Refuse codes that are not one whole number per record, `count` of them from `first` on."""
    if codes.dtype.kind not in "iu" or codes.shape != (records,):
        raise malformed(
            path, f"whole-number {what} of {records} records", f"{codes.dtype} {codes.shape}"
        )
    last = first + count - 1
    bad = np.flatnonzero((codes < first) | (codes > last))
    if len(bad):
        raise malformed(path, f"{what} {first}..{last}", f"{codes[bad[0]]} at record {bad[0]}")


def optional_module(module: str, *, package: str, needed_by: str, extra: str = "data") -> Any:
    """Import a module of an extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise BadInput(f"{needed_by} needs {package}: pip install 'fedveil[{extra}]'") from e


def save_arrays(folder: Path, arrays: Mapping[str, Array | None], meta: Mapping[str, Any]) -> None:
    """Write one .npy per array, without those that are None, and meta.json into a new folder."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError as e:
        raise BadInput(f"{folder} exists: save into a new folder") from e
    except OSError as e:
        raise BadInput(f"{shown(str(folder))} cannot be made: {e.strerror}") from e
    for name, array in arrays.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
    (folder / "meta.json").write_text(json.dumps(meta) + "\n")


def read_meta(folder: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read meta.json: the number of classes, and keys with defaults, in the defaults' types."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text())
        values = {"classes": meta["classes"]}
        values |= {key: meta.get(key, default) for key, default in defaults.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise BadInput(f"{path}: not a saved data set ({e})") from e
    for key, value in values.items():
        if type(value) is not type(defaults.get(key, 0)):
            raise BadInput(f"{path}: {key} is {shown(value)}, not what save writes")
    return values


def mapped_array(path: Path) -> Array:
    """An .npy file mapped into memory."""
    try:
        with warnings_as_errors(), path.open("rb") as stream:
            np.lib.format.read_magic(stream)  # np.load would take other files as well
        with warnings_as_errors():
            array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    except UNREADABLE as e:
        reason = " ".join(str(e).split())
        raise BadInput(f"{path}: {reason}; expected what FederatedData.save wrote") from e
