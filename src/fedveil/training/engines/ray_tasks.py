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
    """A file that an array is mapped from, with the size and digest that identify the file.

    Attributes:
        file_path: Absolute path of the file.
        dtype: The array's type, as NumPy writes it.
        shape: The array's shape.
        offset: Where in the file the array begins, in bytes.
        fortran: Whether the array is in Fortran order.
        bytes: Size of the file.
        digest: Digest of the array (`_digest`).
    """

    file_path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    fortran: bool
    bytes: int
    digest: str

    @classmethod
    def behind(cls, array: np.memmap[Any, Any]) -> "MappedFile | None":
        """The file that `array` is mapped from.

        None for an array that is a part of a mapped one, or if the file is gone.
        """
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
        """The array, mapped read-only from this file.

        None if the file is missing or another one.
        """
        try:
            if os.path.getsize(self.file_path) != self.bytes:
                return None
            found = self._mapped()
        except (OSError, ValueError):
            return None
        return found if _digest(found) == self.digest else None

    def _mapped(self) -> Array:
        """Map the array, read-only. Raises OSError or ValueError if the file does not have it."""
        order: Any = "F" if self.fortran else "C"
        return np.memmap(self.file_path, self.dtype, "r", self.offset, self.shape, order)


def _digest(array: Array) -> str:
    """A hexadecimal digest of the array's number of bytes and of up to 64 pieces all over it."""
    flat = array.reshape(-1, order="A").view(np.uint8)
    last = max(0, len(flat) - _LOOK)
    starts = np.unique(np.linspace(0, last, _LOOKS).astype(np.int64))
    digest = hashlib.sha256(str(len(flat)).encode())
    for start in starts:
        digest.update(flat[start : start + _LOOK].tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Parcel:
    """An object as it is sent.

    Attributes:
        pickled: The pickle, without its arrays.
        buffers: The bytes of the arrays that are sent along.
        mapped_files: The files of the other arrays, which are mapped on the node if they are there.
    """

    pickled: bytes
    buffers: list[npt.NDArray[np.uint8]]
    mapped_files: list[MappedFile]

    def missing_files(self) -> list[int]:
        """The indices in `mapped_files` of the files that are not on this node, or differ."""
        return [k for k, found in enumerate(self._mapped_arrays) if found is None]

    def open(self, others: dict[int, Array]) -> Any:
        """Unpickle the object.

        `others` holds arrays, by index in `mapped_files`, for the missing files.
        """
        arrays = [others.get(k, found) for k, found in enumerate(self._mapped_arrays)]
        return _Opening(io.BytesIO(self.pickled), self.buffers, arrays).load()

    @cached_property
    def _mapped_arrays(self) -> list[Array | None]:
        """The array of each file in `mapped_files`, None where the file is missing."""
        return [file.open() for file in self.mapped_files]


def pack(thing: object, *, what: str) -> tuple[Parcel, list[Array]]:
    """A parcel of `thing`, and the arrays that the parcel names by their files, in that order.

    `what` is the name of `thing` in messages.

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
            _pickler(out, buffers, files, mapped).dump(thing)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError, RuntimeError) as e:
        raise BadInput(
            f"engine 'ray' cannot send {what} to its workers: {one_line(e)}; leave that out of it, "
            "or use engine 'processes'"
        ) from e
    raw = [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]
    return Parcel(out.getvalue(), raw, files), mapped


def _pickler(
    out: io.BytesIO,
    buffers: list[pickle.PickleBuffer],
    files: list[MappedFile],
    mapped: list[Array],
) -> Any:
    """A pickler into `out` that names mapped arrays by their files.

    While it pickles, it appends the bytes of other arrays to `buffers`, and each mapped array and
    its file to `mapped` and `files`.
    """
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
    """An unpickler that puts `arrays[k]` where the pickle names file k."""

    def __init__(self, pickled: io.BytesIO, buffers: Sequence[Any], arrays: Sequence[Any]) -> None:
        super().__init__(pickled, buffers=buffers)
        self._arrays = arrays

    def persistent_load(self, pid: int) -> Array:
        """The array of the file with index `pid`."""
        array: Array = self._arrays[pid]
        return array


@contextmanager
def _own_code_by_value() -> Iterator[None]:
    """Context manager: pickles made inside contain the code of modules that are not installed.

    Installed modules are pickled by name.
    """
    from ray import cloudpickle

    by_value: Any = cloudpickle
    installed = _installed_prefixes()
    own = [m for name, m in list(sys.modules.items()) if _may_be_missing(name, m, installed)]
    for module in own:
        by_value.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            by_value.unregister_pickle_by_value(module)


def _installed_prefixes() -> tuple[str, ...]:
    """Folders of installed packages and of the standard library, as prefixes of file names."""
    places = {*site.getsitepackages(), *sysconfig.get_paths().values(), sys.base_prefix}
    return tuple(os.path.join(os.path.normpath(place), "") for place in places)


def _may_be_missing(name: str, module: ModuleType, installed: tuple[str, ...]) -> bool:
    """Whether other nodes may lack a module: its file is below none of the `installed` prefixes.

    False for `__main__`, for this package, for modules without a file, and for aliases. `name` is
    the module's key in `sys.modules`.
    """
    file = getattr(module, "__file__", None)
    if name == "__main__" or not file or name.split(".")[0] == "fedveil":
        return False
    if getattr(module, "__name__", None) != name:
        return False
    return not os.path.normpath(file).startswith(installed)


class FilesMissing(Exception):
    """Raised on a node that does not see files that arrays are mapped from.

    They have to be sent.
    """


_OPENED: dict[str, Any] = {}
"""The objects of the parcels that this process has opened last, by name."""


def use(
    function: Callable[..., Any],
    name: str,
    parcel: list[Any],
    arrays: Mapping[int, Any],
    *arguments: Any,
) -> Any:
    """Run on a node: return function(object in the parcel, *arguments).

    Raises FilesMissing if a file is not here and its array was not sent.

    Args:
        function: The function to call.
        name: Names the parcel. A process opens it once and keeps the object.
        parcel: A list with one reference to the parcel.
        arrays: References to arrays, by index, whose files are not on every node.
        arguments: Further arguments of `function`.
    """
    if name not in _OPENED:
        while len(_OPENED) >= _KEPT:
            _OPENED.pop(next(iter(_OPENED)))
        _OPENED[name] = _open(parcel, arrays)
    return function(_OPENED[name], *arguments)


def _open(where: list[Any], arrays: Mapping[int, Any]) -> Any:
    """Fetch the parcel that the reference `where[0]` is to, and return the object in it.

    Sets this process to one thread. Raises FilesMissing if files are not visible here and their
    arrays are not in `arrays`.
    """
    import ray

    torch.set_num_threads(1)
    parcel: Parcel = ray.get(where[0])
    missing = parcel.missing_files()
    if not set(missing) <= set(arrays):
        raise FilesMissing
    thing = parcel.open({k: ray.get(arrays[k]) for k in missing})
    if isinstance(thing, Serial):
        keep_memory(thing.job.task.size)
    gc.collect()
    gc.freeze()
    return thing


def _only_reference(refs: list[Any]) -> Any:
    """The only reference of a block of one call."""
    return refs[0]


class Tasks:
    """Calls of functions with one object on a cluster. The object is sent once.

    Raises BadInput if the object cannot be sent or the cluster cannot be joined.

    Args:
        cluster: The cluster, which is connected to until `close`.
        workers: The number of workers, 0 for one per core of the cluster.
        thing: The object, which is each function's first argument.
        what: Its name in messages.
    """

    def __init__(self, cluster: RayCluster, workers: int, thing: object, what: str) -> None:
        parcel, self._mapped = pack(thing, what=what)
        with ExitStack() as stack:
            self.workers = stack.enter_context(cluster.joined(workers))
            import ray

            self._ray: Any = ray
            self._name, self._parcel = uuid.uuid4().hex, [self._ray.put(parcel)]
            self._arrays: dict[int, Any] = {}
            self._use = self._ray.remote(num_cpus=1, max_retries=TRIES - 1)(use)
            few = self.workers < cluster_cores()  # then Ray itself would run more at a time
            self._limit = self.workers * (1 if few else _AHEAD)
            self._stack = stack.pop_all()

    @property
    def nodes(self) -> int:
        """The number of living nodes of the cluster."""
        return sum(bool(each["Alive"]) for each in self._ray.nodes())

    def close(self) -> None:
        """Release the objects that were sent, and disconnect from the cluster."""
        self._parcel, self._arrays = [], {}
        self._stack.close()

    def put(self, value: object) -> Any:
        """Store a value on the cluster, and return a reference to it that calls can be given."""
        return self._ray.put(value)

    def ordered(
        self, function: Any, calls: Sequence[Call], block: int = 1, join: Join = _only_reference
    ) -> Iterator[Any]:
        """Yield the results of function(object, *call) for each call, in order.

        With `block` above 1, `join` combines the references of every `block` calls in a row, and
        one result per block is yielded. Files that a node does not see are sent, and the remaining
        calls are made again. Raises what a call raised, and WorkerLost if its workers died.
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
        """Store the mapped arrays on the cluster, for nodes that do not see their files."""
        self._arrays = {k: self.put(np.asarray(a)) for k, a in enumerate(self._mapped)}

    def completed(self, function: Any, calls: Sequence[Call]) -> Iterator[Any]:
        """Yield (index of the call, its result) as calls finish, in any order.

        Raises what a call raised, and WorkerLost if its workers died. Running calls are then
        cancelled.
        """
        left, running = deque(enumerate(calls)), dict[Any, tuple[int, Call]]()
        try:
            while left or running:
                while left and len(running) < self._limit:
                    number, given = left.popleft()
                    running[self._call(function, given)] = number, given
                (done,) = self._ready(list(running))
                number, given = running.pop(done)
                try:
                    yield number, self._result(done)
                except FilesMissing:
                    self._send_arrays()
                    left.appendleft((number, given))
        finally:
            self._cancel(running)

    def _answers(
        self, function: Any, calls: Sequence[Call], block: int, join: Join
    ) -> Iterator[Any]:
        """Yield one result per `block` of calls, in order, as `ordered` does.

        Raises FilesMissing if a node does not see a file. Running calls are then cancelled.
        """
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
                    answer = self._result(first)
                    begun.popleft()
                    del first, waited, ready
                    yield answer
        finally:
            self._cancel(running)

    def _call(self, function: Any, given: Call) -> Any:
        """Start a task that calls function(object, *given), and return a reference to it."""
        return self._use.remote(function, self._name, self._parcel, self._arrays, *given)

    def _ready(self, refs: list[Any]) -> list[Any]:
        """Wait until a task has ended, and return a list with its reference.

        Raises WorkerLost if the cluster has ended.
        """
        try:
            return list(self._ray.wait(refs, num_returns=1, fetch_local=False)[0])
        except SystemExit as e:  # Ray exits those who are connected to it
            raise WorkerLost(_ENDED) from e

    def _result(self, ref: Any) -> Any:
        """The result of the task with reference `ref`. Waits for it.

        Raises the exception that the task raised, and WorkerLost if its workers died or the cluster
        ended.
        """
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
        """Cancel tasks, whatever their state. Never raises."""
        for ref in refs:
            with suppress(Exception):
                self._ray.cancel(ref)
