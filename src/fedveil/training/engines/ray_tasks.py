"""Tasks on a Ray cluster about one object, which is sent to each node once.

The object is packed into a parcel in the object store. Arrays travel beside the pickle, and workers
read them where the store has them: the workers of a node share one copy. An array that is mapped
from a file is sent as the file's name, and mapped again where the file is visible. A node that does
not see it gets the array itself. Code that is no installed package, such as a script's own module,
is sent along.
"""

import gc
import hashlib
import io
import mmap
import os
import pickle
import site
import sys
import sysconfig
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.errors import BadInput, one_line
from fedveil.training.engines.engine import keep_memory
from fedveil.training.engines.processes import TRIES, WorkerLost
from fedveil.training.engines.ray_cluster import RayCluster, cluster_cores
from fedveil.training.engines.serial import Serial

Array = npt.NDArray[Any]
Call = tuple[Any, ...]
"""The arguments of one task."""

Join = Callable[[list[Any]], Any]
"""References to several results -> a reference to one, which need not be there yet."""

_KEPT = 2
"""Parcels that a process keeps open."""

_AHEAD = 2
"""Tasks per worker that Ray gets at a time, so that no worker waits for the next."""

_UNUSED = 4
"""Results per worker that may wait in the store until they are taken."""

_ENDED = "the Ray cluster has ended, or its head is gone: start it again, then resume"

_LOOKS, _LOOK = 64, 1 << 12
"""How many pieces of a file are compared, and of how many bytes."""


@dataclass(frozen=True)
class MappedFile:
    """An array that is mapped from a file, and how to recognise the file."""

    file_path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    fortran: bool
    bytes: int
    digest: str

    @classmethod
    def behind(cls, array: np.memmap[Any, Any]) -> "MappedFile | None":
        """The file behind an array. None for a part of one, or if the file is gone."""
        name = array.filename
        if name is None or not isinstance(array.base, mmap.mmap):
            return None
        path = str(Path(name).resolve())
        try:
            size = os.path.getsize(path)
            fortran = not array.flags.c_contiguous and array.flags.f_contiguous
            known = cls(path, array.dtype.str, array.shape, array.offset, fortran, size, "")
            return replace(known, digest=_digest(known._mapped()))
        except (OSError, ValueError):
            return None

    def open(self) -> Array | None:
        """The array, mapped from the same file. None if there is no such file."""
        try:
            if os.path.getsize(self.file_path) != self.bytes:
                return None
            found = self._mapped()
        except (OSError, ValueError):
            return None
        return found if _digest(found) == self.digest else None

    def _mapped(self) -> Array:
        order: Any = "F" if self.fortran else "C"
        return np.memmap(self.file_path, self.dtype, "r", self.offset, self.shape, order)


def _digest(array: Array) -> str:
    """A digest of pieces all over the array, which differs for another array of the same size."""
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
        """Which of the files are not visible on this node."""
        return [k for k, found in enumerate(self._found) if found is None]

    def opened(self, others: dict[int, Array]) -> Any:
        """The packed object. `others` are arrays in place of files that are missing."""
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
            file = MappedFile.behind(thing)
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
    """Folders of installed packages, as prefixes of file names."""
    places = {*site.getsitepackages(), *sysconfig.get_paths().values(), sys.base_prefix}
    return tuple(os.path.join(os.path.normpath(place), "") for place in places)


def _is_own(name: str, module: ModuleType, installed: tuple[str, ...]) -> bool:
    """Whether a module is not installed, so that other nodes may not have it."""
    file = getattr(module, "__file__", None)
    if name == "__main__" or not file or name.split(".")[0] == "fedveil":
        return False
    if getattr(module, "__name__", None) != name:
        return False
    return not os.path.normpath(file).startswith(installed)


class FilesMissing(Exception):
    """A node does not see files that arrays are mapped from. They have to be sent."""


class _Opened:
    """The objects of the parcels that this process has opened last, by name."""

    things: dict[str, Any] = {}


def use(
    function: Callable[..., Any],
    name: str,
    parcel: list[Any],
    arrays: Mapping[int, Any],
    *arguments: Any,
) -> Any:
    """Runs on a node: `function` of the object in the parcel `name`, and of the arguments.

    `parcel` holds a reference to it, `arrays` references to those of its arrays whose files are not
    visible everywhere. They are fetched only if this process has not opened the parcel yet.
    """
    if name not in _Opened.things:
        while len(_Opened.things) >= _KEPT:
            _Opened.things.pop(next(iter(_Opened.things)))
        _Opened.things[name] = _opened(parcel, arrays)
    return function(_Opened.things[name], *arguments)


def _opened(where: list[Any], arrays: Mapping[int, Any]) -> Any:
    import ray

    torch.set_num_threads(1)
    parcel: Parcel = ray.get(where[0])
    missing = parcel.missing()
    if not set(missing) <= set(arrays):
        raise FilesMissing
    thing = parcel.opened({k: ray.get(arrays[k]) for k in missing})
    if isinstance(thing, Serial):
        keep_memory(thing.job.task.size)
    gc.collect()
    gc.freeze()
    return thing


def _only(refs: list[Any]) -> Any:
    return refs[0]


class Tasks:
    """Calls of functions of one object on a cluster. The object is sent once.

    Args:
        cluster: Where.
        workers: How many, 0 for one per core of the cluster.
        thing: The object, which is each function's first argument.
        what: Its name in messages.
    """

    def __init__(self, cluster: RayCluster, workers: int, thing: object, what: str) -> None:
        parcel, self._mapped = packed(thing, what=what)
        with ExitStack() as opened:
            self.workers = opened.enter_context(cluster.joined(workers))
            import ray

            self._ray: Any = ray
            self._name, self._parcel = uuid.uuid4().hex, [self._ray.put(parcel)]
            self._arrays: dict[int, Any] = {}
            self._use = self._ray.remote(num_cpus=1, max_retries=TRIES - 1)(use)
            few = self.workers < cluster_cores()  # then Ray itself would run more at a time
            self._limit = self.workers * (1 if few else _AHEAD)
            self._opened = opened.pop_all()

    @property
    def nodes(self) -> int:
        """How many nodes the cluster has."""
        return sum(bool(each["Alive"]) for each in self._ray.nodes())

    def close(self) -> None:
        """Let go of what was sent, and of the cluster."""
        self._parcel, self._arrays = [], {}
        self._opened.close()

    def put(self, value: object) -> Any:
        """A reference to a value that several calls are given."""
        return self._ray.put(value)

    def ordered(
        self, function: Any, calls: Sequence[Call], block: int = 1, join: Join = _only
    ) -> Iterator[Any]:
        """The results of the calls, in order. `join` combines those of each `block` of calls.

        Files that a node turns out not to see are sent, and the remaining calls are made again.
        """
        taken = 0
        while taken < len(calls):
            try:
                for answer in self._answers(function, calls[taken:], block, join):
                    taken += block
                    yield answer
            except FilesMissing:
                if self._arrays:
                    raise AssertionError("an array that was sent is missing") from None
                self._send_arrays()

    def _send_arrays(self) -> None:
        self._arrays = {k: self.put(np.asarray(a)) for k, a in enumerate(self._mapped)}

    def completed(self, function: Any, calls: Sequence[Call]) -> Iterator[Any]:
        """(number of the call, its result) as they finish."""
        left, running = deque(enumerate(calls)), dict[Any, tuple[int, Call]]()
        try:
            while left or running:
                while left and len(running) < self._limit:
                    number, given = left.popleft()
                    running[self._call(function, given)] = number, given
                (done,) = self._ready(list(running))
                number, given = running.pop(done)
                try:
                    yield number, self._got(done)
                except FilesMissing:
                    self._send_arrays()
                    left.appendleft((number, given))
        finally:
            self._cancel(running)

    def _answers(
        self, function: Any, calls: Sequence[Call], block: int, join: Join
    ) -> Iterator[Any]:
        left, begun = deque(range(0, len(calls), block)), deque[tuple[Any, int]]()
        running: list[Any] = []
        most = max(_UNUSED * self.workers, 2 * block)
        try:
            while left or begun:
                unused = sum(count for _, count in begun)
                while left and (not begun or (len(running) < self._limit and unused < most)):
                    some = calls[left[0] : left.popleft() + block]
                    refs = [self._call(function, given) for given in some]
                    running += refs
                    begun.append((join(refs), len(some)))
                    unused += len(some)
                first = begun[0][0]
                waited = list(dict.fromkeys([first, *running]))
                ready = self._ready(waited)
                running = [ref for ref in running if ref not in ready]
                if first in ready:
                    answer = self._got(first)
                    begun.popleft()
                    del first, waited, ready
                    yield answer
        finally:
            self._cancel(running)

    def _call(self, function: Any, given: Call) -> Any:
        return self._use.remote(function, self._name, self._parcel, self._arrays, *given)

    def _ready(self, refs: list[Any]) -> list[Any]:
        """Wait for one of the results or failures. Returns those that are there."""
        try:
            return list(self._ray.wait(refs, num_returns=1, fetch_local=False)[0])
        except SystemExit as e:  # Ray exits those who are connected to it
            raise WorkerLost(_ENDED) from e

    def _got(self, ref: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except SystemExit as e:
            raise WorkerLost(_ENDED) from e
        except errors.RayTaskError as e:
            cause: BaseException = e
            while isinstance(cause, errors.RayTaskError) and cause.cause is not None:
                cause = cause.cause
            if not isinstance(cause, FilesMissing):
                cause.add_note(f"on a Ray worker:\n{e}")
            raise cause from None
        except errors.RayError as e:
            raise WorkerLost(
                f"{TRIES} workers in a row died on the same work ({type(e).__name__}), as they do "
                "when memory runs out: lower engine.memory or engine.chunk, or see to the nodes"
            ) from e

    def _cancel(self, refs: Iterable[Any]) -> None:
        for ref in refs:
            with suppress(Exception):
                self._ray.cancel(ref)
