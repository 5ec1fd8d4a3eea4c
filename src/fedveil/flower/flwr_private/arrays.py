"""A bound on the arrays that Flower makes of what arrives.

Flower sends an array in chunks, equal chunks once: 11 MB on the wire are 1.6 GB of zeros when they
are joined, which happens before the app sees the message.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from fedveil.flower.flwr_private import SOON, flower_name, replace_flower_name

_LONGEST_LIST = 1 << 20  # bytes that list an array's chunks
_DIMENSIONS, _LONGEST_WORD = 8, 40


def bound_arrays(most: int) -> None:
    """Let Flower make no array of more than `most` bytes in this process: it is empty instead.

    An error would be Flower's to handle, and a SuperNode whose app fails on a message waits for
    its reply for ever. Calling it again replaces the bound. Exits if Flower makes arrays in another
    way.

    | edge | behaviour |
    |---|---|
    | one chunk, listed many times | its length counts each time |
    | chunks of several lengths | all but one count as the longest, as in what Flower sends |
    | a list of chunks that is longer than a MiB, or none, or not of whole numbers | empty |
    """
    array = flower_name("flwr.app.message.array", "Array")
    unbounded = getattr(array.inflate, "unbounded", array.inflate)

    def inflate(_cls: type, object_content: bytes, children: Any = None) -> Any:
        """Return what Flower makes of an array's list of chunks and the chunks `children`."""
        if _least_length(object_content, children or {}) > most:
            return array(*_stated_form(object_content), b"")
        return unbounded(object_content, children)

    inflate.unbounded = unbounded  # type: ignore[attr-defined]
    array.inflate = classmethod(inflate)


def pull_soon(seconds: float) -> None:
    """Let a server app look often for announced objects, and give up on them after `seconds`.

    By default Flower looks again after a second, and then less and less often, for two hours.
    """
    place = ("flwr.superlink.grid.http_grid", "pull_objects")
    pull = getattr(flower_name(*place), "func", flower_name(*place))
    soon = partial(pull, initial_backoff=SOON, backoff_cap=1.0, max_time=seconds)
    replace_flower_name(*place, soon)


def _least_length(content: bytes, children: Mapping[str, Any]) -> float:
    """Return how many bytes an array has at least, infinity if that cannot be read."""
    _, _, body = bytes(content[:_LONGEST_LIST]).partition(b"\x00")
    try:
        listed = json.loads(body)["arraychunk_ids"]
        lengths = [len(chunk.data) for chunk in children.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return math.inf
    if not isinstance(listed, list) or not listed or not lengths:
        return math.inf
    return (len(listed) - 1) * max(lengths) + min(lengths)


def _stated_form(content: bytes) -> tuple[str, tuple[int, ...], str]:
    """Return the type, shape and encoding that an array states, for messages, or empty ones."""
    _, _, body = bytes(content[:_LONGEST_LIST]).partition(b"\x00")
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        stated = json.loads(body)
        shape = tuple(int(number) for number in stated["shape"][:_DIMENSIONS])
        return str(stated["dtype"])[:_LONGEST_WORD], shape, str(stated["stype"])[:_LONGEST_WORD]
    return "", (), ""
