"""Start worker processes that begin empty, and send them what they compute with.

A spawned process imports modules and is sent the rest by pickle. It never runs the script that
started the program, so a script needs no `if __name__ == "__main__":`. In return nothing can be
sent that is defined in a script, in a notebook or in a file that a recipe's model.path names.
"""

import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fedveil.base import platforms
from fedveil.base.errors import BadInput, one_line

_FAILURES = (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError)


class _Sending(pickle.Pickler):
    """A pickler that refuses what another process cannot import."""

    def reducer_override(self, thing: Any) -> Any:
        """Raise PicklingError for a class or function that another process cannot import.

        Otherwise returns NotImplemented, so that `thing` is pickled as usual.
        """
        if isinstance(thing, type | types.FunctionType) and not _is_importable(thing.__module__):
            raise pickle.PicklingError(f"{thing.__qualname__} is defined in a script or notebook")
        return NotImplemented


def _is_importable(name: str) -> bool:
    """Whether another process can import the module called `name`, which this one may have.

    False for `__main__`, and for a file that was run and not imported.
    """
    module = sys.modules.get(name)
    ran_as_file = hasattr(module, "__file__") and getattr(module, "__spec__", None) is None
    return name != "__main__" and not ran_as_file


class _Nowhere(io.RawIOBase):
    """A file that drops whatever is written to it."""

    def write(self, content: Any) -> int:
        return len(content)


def can_send(thing: object) -> bool:
    """Whether `thing` can be sent to a spawned process. Arrays are not copied to find out."""
    drop: Callable[[pickle.PickleBuffer], Any] = lambda _: None  # noqa: E731
    try:
        _Sending(_Nowhere(), protocol=5, buffer_callback=drop).dump(thing)
    except _FAILURES:
        return False
    return True


def pickle_to_send(thing: object, what: str) -> bytes:
    """The pickle of `thing` for spawned processes. Raises BadInput, with `what`, if it has none."""
    out = io.BytesIO()
    try:
        _Sending(out, protocol=5).dump(thing)
    except _FAILURES as e:
        raise BadInput(
            f"{what} cannot be sent to worker processes: {one_line(e)}; define it in a module that "
            "can be imported, or use one worker"
        ) from e
    return out.getvalue()


@contextmanager
def script_left_out() -> Iterator[None]:
    """Context manager: processes spawned inside do not run this program's script again.

    Does nothing where processes are forked, which keep what the script has defined.
    """
    if platforms.start_method() == "fork":
        yield
        return
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
