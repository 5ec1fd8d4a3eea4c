"""Parcels: what all workers need, put into the object store once, so that a node gets it once.

Arrays travel beside the pickle, and workers read them where the store has them: the workers of a
node share one copy. An array that is mapped from a file is sent as the file's name, and mapped
again where the file is to be seen; a node that does not see it gets the array itself. Code that is
no installed package, such as a script's own module, is sent along.
"""

import hashlib
import io
import mmap
import os
import pickle
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput, one_line

Array = npt.NDArray[Any]

_LOOKS, _LOOK = 64, 1 << 12
"""How many pieces of a file are compared, and of how many bytes."""


@dataclass(frozen=True)
class MappedFile:
    """An array that is mapped from a file, and how to know the file again."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    fortran: bool
    bytes: int
    digest: str

    @classmethod
    def of(cls, array: np.memmap[Any, Any]) -> "MappedFile | None":
        """The file behind an array; None for a part of one, or where the file has gone."""
        name = array.filename
        if name is None or not isinstance(array.base, mmap.mmap):
            return None
        path = str(Path(name).resolve())
        try:
            size = os.path.getsize(path)
            fortran = not array.flags.c_contiguous and array.flags.f_contiguous
            known = cls(path, array.dtype.str, array.shape, array.offset, fortran, size, "")
            return cls(*list(vars(known).values())[:-1], digest=_digest(known._mapped()))
        except (OSError, ValueError):
            return None

    def open(self) -> Array | None:
        """The array, mapped from the same file; None where there is no such file."""
        try:
            if os.path.getsize(self.path) != self.bytes:
                return None
            found = self._mapped()
        except (OSError, ValueError):
            return None
        return found if _digest(found) == self.digest else None

    def _mapped(self) -> Array:
        order: Any = "F" if self.fortran else "C"
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape, order)


def _digest(array: Array) -> str:
    """Of pieces all over the array: another one of the same size is told apart."""
    flat = array.reshape(-1, order="A").view(np.uint8)
    last = max(0, len(flat) - _LOOK)
    starts = np.unique(np.linspace(0, last, _LOOKS).astype(np.int64))
    digest = hashlib.sha256(str(len(flat)).encode())
    for start in starts:
        digest.update(flat[start : start + _LOOK].tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Parcel:
    """A pickle, the bytes of its arrays, and the files that others of its arrays are in."""

    pickled: bytes
    buffers: list[npt.NDArray[np.uint8]]
    files: list[MappedFile]

    def missing(self) -> list[int]:
        """Which of the files are not to be seen from here."""
        return [k for k, found in enumerate(self._found) if found is None]

    def opened(self, others: dict[int, Array]) -> Any:
        """What was packed; `others` are arrays in the place of files that are missing."""
        arrays = [others.get(k, found) for k, found in enumerate(self._found)]
        return _Opening(io.BytesIO(self.pickled), self.buffers, arrays).load()

    @cached_property
    def _found(self) -> list[Array | None]:
        return [file.open() for file in self.files]


def packed(thing: object, *, what: str) -> tuple[Parcel, list[Array]]:
    """A parcel of `thing`, and the arrays that it names by their files.

    Guarantee: what is opened computes as `thing` does; nothing is left out silently. Secure
    randomness has no state to be sent (`SecureRandom` refuses it), so no two workers share any.

    | edge | behaviour |
    |---|---|
    | a class of a script, of a notebook or of a file that a recipe names | its code is sent along |
    | something that cannot be pickled: a lock, an open file, a generator | BadInput names it |
    """
    out, buffers, mapped = io.BytesIO(), list[pickle.PickleBuffer](), list[Array]()
    files: list[MappedFile] = []
    try:
        with _own_code_by_value():
            _packing(out, buffers, files, mapped).dump(thing)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError, RuntimeError) as e:
        raise BadInput(
            f"engine 'ray' cannot send {what} to its workers: {one_line(e)}; leave that out of it, "
            "or use engine 'processes'"
        ) from e
    raw = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    return Parcel(out.getvalue(), raw, files), mapped


def _packing(
    out: io.BytesIO,
    buffers: list[pickle.PickleBuffer],
    files: list[MappedFile],
    mapped: list[Array],
) -> Any:
    from ray import cloudpickle

    by_cloudpickle: Any = cloudpickle.CloudPickler

    class Packing(by_cloudpickle):  # type: ignore[misc]
        """Names mapped arrays by their files."""

        def persistent_id(self, thing: object) -> int | None:
            if not isinstance(thing, np.memmap):
                return None
            for k, known in enumerate(mapped):
                if known is thing:
                    return k
            file = MappedFile.of(thing)
            if file is None:
                return None
            files.append(file)
            mapped.append(thing)
            return len(files) - 1

        def reducer_override(self, thing: object) -> Any:
            if isinstance(thing, np.memmap):  # a part of a file, or of one that has gone
                return np.asarray(thing).__reduce_ex__(5)
            return super().reducer_override(thing)

    return Packing(out, protocol=5, buffer_callback=buffers.append)


class _Opening(pickle.Unpickler):
    """Puts arrays where their files are named."""

    def __init__(self, pickled: io.BytesIO, buffers: Sequence[Any], arrays: Sequence[Any]) -> None:
        super().__init__(pickled, buffers=buffers)
        self._arrays = arrays

    def persistent_load(self, pid: int) -> Array:
        array: Array = self._arrays[pid]
        return array


@contextmanager
def _own_code_by_value() -> Iterator[None]:
    """Inside, code of modules that are in no package directory is pickled and not named."""
    from ray import cloudpickle

    by_value: Any = cloudpickle
    installed = _installed()
    own = [m for name, m in list(sys.modules.items()) if _is_own(name, m, installed)]
    for module in own:
        by_value.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            by_value.unregister_pickle_by_value(module)


def _installed() -> tuple[str, ...]:
    """How the names of files of packages begin: found once, as there are thousands of modules."""
    places = {*site.getsitepackages(), *sysconfig.get_paths().values(), sys.base_prefix}
    return tuple(os.path.join(os.path.normpath(place), "") for place in places)


def _is_own(name: str, module: ModuleType, installed: tuple[str, ...]) -> bool:
    """Whether other nodes cannot be expected to have a module."""
    file = getattr(module, "__file__", None)
    if name == "__main__" or not file or name.split(".")[0] == "fedveil":
        return False
    if getattr(module, "__name__", None) != name:
        return False
    return not os.path.normpath(file).startswith(installed)
