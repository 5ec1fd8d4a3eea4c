"""How Flower joins the arrays that arrive: with a bound, and in one copy.

Flower sends an array in chunks, equal chunks once: 11 MB on the wire are 1.6 GB of zeros when they
are joined, which happens before the app sees the message.
"""

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from fedveil.flower.flwr_private import SOON, flower_name, replace_flower_name

_LONGEST_LIST = 1 << 20  # bytes that list an array's chunks
_DIMENSIONS, _LONGEST_WORD = 8, 40


def bound_arrays(most: int) -> None:
    """Let Flower make arrays of at most `most` bytes together in a thread: others are empty.

    A thread reads one message, at a site as at the server. Chunks are joined in one copy, where
    Flower by itself makes two. An error would be Flower's to handle, and a SuperNode whose app
    fails on a message waits for its reply for ever. Calling it again replaces the bound. Exits if
    Flower makes arrays in another way.

    | edge | behaviour |
    |---|---|
    | one chunk, listed many times, by one array or by several | its length counts each time |
    | a list of chunks that is longer than a MiB, none, or not of places in the head | empty |
    | a chunk that is listed and did not come | empty |
    """
    array, made_here = flower_name("flwr.app.message.array", "Array"), threading.local()

    def inflate(_cls: type, object_content: bytes, children: Any = None) -> Any:
        """Return the array with this list of chunks, joined of the chunks `children`."""
        made = array(*_stated_form(object_content), b"")
        chunks = _listed_chunks(object_content, children or {})
        total = getattr(made_here, "total", 0) + sum(len(chunk.data) for chunk in chunks)
        if total <= most:
            made_here.total = total
            made.data = b"".join(chunk.data for chunk in chunks)
        return made

    array.inflate = classmethod(inflate)


def pull_soon(seconds: float) -> None:
    """Let a server app look often for announced objects, and give up on them after `seconds`.

    By default Flower looks again after a second, and then less and less often, for two hours.
    """
    place = ("flwr.superlink.grid.http_grid", "pull_objects")
    pull = getattr(flower_name(*place), "func", flower_name(*place))
    soon = partial(pull, initial_backoff=SOON, backoff_cap=1.0, max_time=seconds)
    replace_flower_name(*place, soon)


def _listed_chunks(content: bytes, children: Mapping[str, Any]) -> list[Any]:
    """Return the chunks of an array in the order of its list, [] if that cannot be read.

    Args:
        content: The array as it is sent: a head with the ids of chunks, and a list of places there.
        children: The chunks by id.
    """
    head, _, body = bytes(content[:_LONGEST_LIST]).partition(b"\x00")
    try:
        names = head.decode().split(" ")[1].split(",")
        listed = json.loads(body)["arraychunk_ids"]
        if any(type(place) is not int or place < 0 for place in listed):
            return []
        chunks = [children[names[place]] for place in listed]
        return chunks if all(isinstance(chunk.data, memoryview) for chunk in chunks) else []
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def _stated_form(content: bytes) -> tuple[str, tuple[int, ...], str]:
    """Return the type, shape and encoding that an array states, for messages, or empty ones."""
    _, _, body = bytes(content[:_LONGEST_LIST]).partition(b"\x00")
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        stated = json.loads(body)
        shape = tuple(int(number) for number in stated["shape"][:_DIMENSIONS])
        return str(stated["dtype"])[:_LONGEST_WORD], shape, str(stated["stype"])[:_LONGEST_WORD]
    return "", (), ""
