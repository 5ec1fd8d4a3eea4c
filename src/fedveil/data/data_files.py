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
from fedveil.base.errors import BadInput, one_line
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
    """Context manager: raise every warning inside as an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def data_root(explicit: Path | None = None) -> Path:
    """The folder with one subfolder per data set: `explicit`, or the variable FEDVEIL_DATA.

    Raises BadInput if neither is set, or if there is no such folder.
    """
    named = explicit or os.environ.get("FEDVEIL_DATA")
    if not named:
        raise BadInput("no data folder: give --data FOLDER or set the variable FEDVEIL_DATA")
    root = Path(named)
    if not root.is_dir():
        raise BadInput(f"data folder {root} does not exist: correct --data or FEDVEIL_DATA")
    return root


def find_file(root: Path, candidates: Sequence[str], *, expected: str) -> Path:
    """The first file under `root` that matches one of `candidates`, paths that may hold `*`.

    Earlier candidates win. Raises BadInput if there is none, and its message ends with `expected`:
    which files are meant and where to get them.
    """
    for candidate in candidates:
        for path in sorted(root.glob(candidate)):
            return path
    raise BadInput(f"{root} has no {' or '.join(candidates)}: expected {expected}")


def malformed(path: Path, expected: str, found: object) -> BadInput:
    """A BadInput about a file with unexpected content, to be raised by the caller.

    Args:
        path: The file.
        expected: The content that was expected, in words.
        found: What was found, or an exception. Line breaks become spaces.
    """
    return BadInput(f"{path}: expected {expected}, found {' '.join(str(found).split())}")


@contextmanager
def reading(path: Path, expected: str, *errors: type[Exception]) -> Iterator[None]:
    """Context manager: turn exceptions of a broken file into the BadInput of `malformed`.

    `errors` are further exceptions to turn. A BadInput stays as it is.
    """
    broken: tuple[type[Exception], ...] = (*_UNREADABLE, *errors)
    try:
        yield
    except BadInput:
        raise
    except broken as e:
        raise malformed(path, expected, str(e) or repr(e)) from e


def open_bytes(path: Path) -> BinaryIO:
    """Open a file to read its bytes. A file whose name ends in .gz is unpacked on the way."""
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def read_exactly(path: Path, stream: BinaryIO, size: int) -> bytes:
    """The `size` bytes that are left in `stream`. Raises BadInput if there are fewer or more.

    `path` is for the message.
    """
    content = stream.read(size + 1)
    if len(content) != size:
        length = "more" if len(content) > size else len(content)
        raise malformed(path, f"{size} bytes of data", length)
    return content


def read_npz(path: Path, keys: Sequence[str]) -> dict[str, Array]:
    """The arrays `keys` of an npz file, by name.

    Raises BadInput for pickled or missing arrays, and for more than 4 GiB unpacked.
    """
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
    """Raise BadInput unless codes [records] are whole numbers from `first` to first + count - 1.

    `path` and `what` are for the message.
    """
    if codes.dtype.kind not in "iu" or codes.shape != (records,):
        raise malformed(
            path, f"whole-number {what} of {records} records", f"{codes.dtype} {codes.shape}"
        )
    last = first + count - 1
    bad = np.flatnonzero((codes < first) | (codes > last))
    if len(bad):
        raise malformed(path, f"{what} {first}..{last}", f"{codes[bad[0]]} at record {bad[0]}")


def optional_module(module: str, *, package: str, needed_by: str, extra: str = "data") -> Any:
    """Import and return a module. Raises BadInput with the command that installs it.

    Args:
        module: The module.
        package: The package of the module, for the message.
        needed_by: The feature that needs the module, for the message.
        extra: The extra of fedveil that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise BadInput(f"{needed_by} needs {package}: pip install 'fedveil[{extra}]'") from e


def save_arrays(folder: Path, arrays: Mapping[str, Array | None], meta: Mapping[str, Any]) -> None:
    """Write one .npy per array, without those that are None, and meta.json into a new folder.

    Raises BadInput if the folder exists or cannot be made.
    """
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
    """The values of meta.json: "classes", and every key of `defaults`. Other keys are dropped.

    Raises BadInput without the file or "classes", and for a value that is not of the default's
    type.
    """
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
    """An .npy file as a read-only memory map. Raises BadInput for any other or broken file."""
    try:
        with warnings_as_errors(), path.open("rb") as stream:
            np.lib.format.read_magic(stream)  # np.load would take other files as well
        with warnings_as_errors():
            array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    except UNREADABLE as e:
        raise BadInput(f"{path}: {one_line(e)}; expected what FederatedData.save wrote") from e
