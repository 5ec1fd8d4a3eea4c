"""Messages on Flower: as its records, and by its grid. Needs the extra `flower`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedveil.base.errors import BadInput, one_line
from fedveil.flower.federation import Federation, fingerprint
from fedveil.flower.messages import (
    LONGEST_REASON,
    Answer,
    Message,
    Refusal,
    RoundAsk,
    put_together,
    taken_apart,
)
from fedveil.flower.transport import Arrival

ASKING = "train"
"""The type of Flower's messages that carry asks and answers."""

_WORDS, _ARRAYS = "fedveil", "arrays"
_POLL = 0.5  # seconds from one look for answers to the next


def to_records(message: Message) -> RecordDict:
    """A message as Flower carries it."""
    parts = taken_apart(message)
    arrays = ArrayRecord({name: Array(array) for name, array in parts.arrays.items()})
    return RecordDict({_WORDS: ConfigRecord(dict(parts.words)), _ARRAYS: arrays})


def from_records(content: RecordDict) -> Message:
    """Read a message from Flower's records. Raises `BadInput` if it is none.

    | edge | behaviour |
    |---|---|
    | other records than the two, a metric among them | BadInput |
    | an array that cannot be read, such as one of pickled objects | BadInput |
    | anything that `put_together` refuses | BadInput |
    """
    words, arrays = content.config_records, content.array_records
    if set(content) != {_WORDS, _ARRAYS} or set(words) != {_WORDS} or set(arrays) != {_ARRAYS}:
        raise BadInput("a message with other records than fedveil's")
    try:
        values = {name: array.numpy() for name, array in arrays[_ARRAYS].items()}
    except Exception as e:  # whatever a reader of files that somebody else wrote may raise
        raise BadInput(f"an array of a message cannot be read: {one_line(e)}") from e
    return put_together(dict(words[_WORDS]), values)


@dataclass(frozen=True, eq=False)
class GridTransport:
    """A transport through Flower's grid. A site is the node that authenticated with its key.

    SuperLink has checked that a node holds its key, and names the key. Nodes with other keys are
    ignored, and so is what a node says about itself.
    """

    grid: Grid
    federation: Federation

    def online(self) -> frozenset[str]:
        """The sites whose nodes are online."""
        return frozenset(self._nodes())

    def ask(self, sites: Sequence[str], ask: RoundAsk, seconds: float) -> Iterator[Arrival]:
        """Ask the nodes that are online, and pull what they answer until the time is over.

        Answers that come later are never pulled: Flower drops them, as their time to live is over.
        """
        until, nodes = time.monotonic() + seconds, self._nodes()
        asked = [site for site in sites if site in nodes]
        content, group = to_records(ask), f"{ask.round}.{ask.attempt}"
        messages = [
            FlowerMessage(content, nodes[site], ASKING, ttl=seconds, group_id=group)
            for site in asked
        ]
        pushed = list(self.grid.push_messages(messages)) if messages else []
        waiting = {one: site for one, site in zip(pushed, asked, strict=False) if one}
        while waiting and time.monotonic() < until:
            for reply in self.grid.pull_messages(list(waiting)):
                site = waiting.pop(reply.metadata.reply_to_message_id, None)
                if site is not None:
                    yield Arrival(site, _read(reply, nodes[site]))
            if waiting:
                time.sleep(_POLL)

    def _nodes(self) -> dict[str, int]:
        """The node of each site that is online."""
        known = {site.fingerprint: site.name for site in self.federation.sites}
        online: dict[str, int] = {}
        for node in self.grid.get_nodes():
            name = known.get(key_of(node.public_key))
            if name is not None:
                online[name] = node.node_id
        return online


def key_of(public_key: bytes) -> str:
    """The fingerprint of a node's public key, or "" if it cannot be read."""
    try:
        line = load_pem_public_key(public_key).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return ""
    return fingerprint(line.decode())


def _read(reply: FlowerMessage, node: int) -> Answer | Refusal | str:
    """What a node sent, or why it cannot be read, in one line."""
    if reply.has_error():
        return f"its app failed: {one_line(ValueError(reply.error.reason))}"[:LONGEST_REASON]
    if reply.metadata.src_node_id != node:
        return "its answer came from another node"
    try:
        message = from_records(reply.content)
    except BadInput as e:
        return one_line(e)
    return "it asked, and was to answer" if isinstance(message, RoundAsk) else message
