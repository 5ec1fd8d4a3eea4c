"""The process of a site that holds its masking keys for as long as a run lasts.

Every message is answered in a process of its own, which ends with its answer. The keys of secure
sums have to outlive it, and may not be on disk. So the fork server forks one more process: it has
the keys, the journal and nothing else, no record and no model, and masks what the processes of
messages hand to it. They reach it through a socket that they have inherited; it has no address.
"""

import json
import os
import signal
import socket
import traceback
from base64 import b64decode, b64encode
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Never, Protocol

import numpy as np

from fedveil.base.errors import BadInput, FedveilError, one_line
from fedveil.flower.certificates import read_signing_key
from fedveil.flower.flwr_private.app_process import end_with_starter
from fedveil.masking.journal import Journal
from fedveil.masking.masking_site import MaskingSite
from fedveil.masking.sum_messages import Kind, MessageRefused, Parts, Place, SumTerms

MOST_RUNS = 8
"""Runs whose keys are held at once. With one more, the keys of the run that was used longest ago
are dropped: its sites take part again with new ones."""

_SECONDS = 600.0  # for a vector of 10^7 numbers and 30 sites, 60 times over
_LENGTH = 8
_LONGEST_HEAD = 1 << 20


class KeeperStep(StrEnum):
    """What the keeper does: each is a method of `MaskingSite`."""

    KEYS = "keys"
    BEGIN = "begin"
    MASK = "mask"
    ANSWER = "answer"
    REVEAL = "reveal"


@dataclass(frozen=True)
class KeeperTask:
    """What a process of the site asks of the keeper, beside the bytes that it is about.

    Attributes:
        action: What to do.
        terms: The terms, which the site derives from its own recipe and keys.
        number: The site's number.
        key: The file with the site's private key.
        journal: The file with the site's journal, made if it is not there.
        place: The round and attempt.
    """

    action: KeeperStep
    terms: SumTerms
    number: int
    key: str
    journal: str
    place: Place

    def to_json(self) -> bytes:
        """Return the task as JSON."""
        terms, place = self.terms, self.place
        keys = [b64encode(key).decode() for key in terms.node_keys]
        numbers = [terms.threshold, terms.honest, terms.words, terms.bits]
        values = [self.action, terms.run.hex(), keys, *numbers, self.number, self.key, self.journal]
        return json.dumps([*values, place.round, place.attempt]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "KeeperTask":
        """Return the task that `to_json` has written."""
        action, run, keys, *numbers, number, key, journal, round, attempt = json.loads(text)
        node_keys = tuple(b64decode(key) for key in keys)
        terms, place = SumTerms(bytes.fromhex(run), node_keys, *numbers), (round, attempt)
        return cls(KeeperStep(action), terms, number, key, journal, Place(*place))


class Keeper(Protocol):
    """Whoever holds a site's masking keys: `MaskingKeeper`, in this process or in another."""

    def perform(self, task: KeeperTask, content: bytes) -> bytes:
        """Do a task, and return the bytes of its result."""
        ...


class MaskingKeeper:
    """A site's masking keys, one `MaskingSite` for each run and federation.

    Guarantee: that of `MaskingSite`, whatever the processes of messages do in whatever order. A
    vector is masked only for the round and attempt that was begun last, which is the one that its
    process has charged.

    | edge | behaviour |
    |---|---|
    | a roster of another round or attempt than the task's | refused, before it is in the journal |
    | a vector for another round than the one that was begun last | refused |
    | a ninth run | the keys of the run that was used longest ago are dropped |
    | a private key that is not the site's in the terms | BadInput |
    """

    def __init__(self) -> None:
        self._sites = OrderedDict[tuple[bytes, int, str], MaskingSite]()
        self._begun = dict[tuple[bytes, int, str], Place]()
        self._journals = dict[str, Journal]()

    def perform(self, task: KeeperTask, content: bytes) -> bytes:
        """Do a task of a process that answers a message, and return the bytes of its result.

        Raises MessageRefused for messages that `MaskingSite` refuses.
        """
        name = (task.terms.hash, task.number, task.journal)
        site = self._site(task, name)
        match task.action:
            case KeeperStep.KEYS:
                return site.advert
            case KeeperStep.BEGIN:
                Parts(content, Kind.ROSTER, task.terms).take_place(task.place)
                self._begun.pop(name, None)
                self._begun[name] = site.begin(content)
                return b""
            case KeeperStep.MASK:
                if self._begun.get(name) != task.place:
                    raise MessageRefused(f"{task.place} is not the round that was begun last")
                return site.mask(np.frombuffer(content, dtype="<i8"))
            case KeeperStep.ANSWER:
                return site.answer(content)
            case KeeperStep.REVEAL:
                return site.reveal(content)

    def _site(self, task: KeeperTask, name: tuple[bytes, int, str]) -> MaskingSite:
        """Return the site of a run, with new keys if it has none."""
        if name not in self._sites:
            journal = self._journals.get(task.journal)
            if journal is None:
                Path(task.journal).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                journal = self._journals[task.journal] = Journal(Path(task.journal))
            key = read_signing_key(Path(task.key))
            self._sites[name] = MaskingSite(task.terms, task.number, key, journal)
        self._sites.move_to_end(name)
        while len(self._sites) > MOST_RUNS:
            oldest, _ = self._sites.popitem(last=False)
            self._begun.pop(oldest, None)
        return self._sites[name]


class KeeperProcess:
    """A process with a `MaskingKeeper`, forked from this one, and the socket that leads to it.

    Whoever has inherited this object can reach the keeper, and nobody else can. It ends with the
    process that started it.
    """

    def __init__(self) -> None:
        self._door, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = os.fork()
        if process == 0:
            self._door.close()
            _serve(inside)
        inside.close()

    @property
    def ended(self) -> bool:
        """Return whether the process has ended, and its keys with it."""
        try:
            return not self._door.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close this process's end of the socket. The keeper ends when nobody has one."""
        self._door.close()

    def perform(self, task: KeeperTask, content: bytes) -> bytes:
        """Let the process do a task, as `MaskingKeeper.perform` does, and wait for its result.

        Raises BadInput if it has ended.
        """
        try:
            mine, other = socket.socketpair()
            with mine:
                with other:
                    socket.send_fds(self._door, [b"."], [other.fileno()])
                mine.settimeout(_SECONDS)
                _send(mine, task.to_json())
                _send(mine, content)
                verdict, result = _receive(mine, _LONGEST_HEAD), _receive(mine)
        except OSError as e:
            raise BadInput(
                f"the process with this site's masking keys has ended: {one_line(e)}; it takes "
                "part with new keys from the next round"
            ) from e
        if verdict == b"refused":
            raise MessageRefused(result.decode())
        if verdict != b"done":
            raise BadInput(result.decode())
        return result


_running: KeeperProcess | None = None


def keep_running() -> None:
    """Start the keeper of this process and of those that it forks, unless it is there."""
    global _running
    if _running is not None and not _running.ended:
        return
    if _running is not None:
        _running.close()
    _running = KeeperProcess()


def running_keeper() -> KeeperProcess | None:
    """Return the keeper that this process has inherited, None if there is none."""
    return _running


def _serve(door: socket.socket) -> Never:
    """Do the tasks that arrive, one after the other, until nobody can send one. Then exit."""
    try:
        end_with_starter()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # for those who started it
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        keeper = MaskingKeeper()
        while True:
            message, descriptors, _, _ = socket.recv_fds(door, 1, 1)
            if not message:
                break
            for descriptor in descriptors:
                with socket.socket(fileno=descriptor) as connection, suppress(OSError):
                    connection.settimeout(_SECONDS)
                    _serve_one(keeper, connection)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _serve_one(keeper: MaskingKeeper, connection: socket.socket) -> None:
    """Do one task, and send its result, or why there is none."""
    text, content = _receive(connection, _LONGEST_HEAD), _receive(connection)
    verdict, result = b"done", b""
    try:
        result = keeper.perform(KeeperTask.from_json(text), content)
    except MessageRefused as e:
        verdict, result = b"refused", str(e).encode()
    except FedveilError as e:
        verdict, result = b"failed", str(e).encode()
    except Exception as e:  # the keys outlive whatever one message does
        verdict, result = b"failed", f"{type(e).__name__}: {one_line(e)}".encode()
    _send(connection, verdict)
    _send(connection, result)


def _send(connection: socket.socket, content: bytes) -> None:
    """Send bytes after their length."""
    connection.sendall(len(content).to_bytes(_LENGTH, "big"))
    if content:  # after the length of nothing the other side may have answered, and be gone
        connection.sendall(content)


def _receive(connection: socket.socket, most: int = 1 << 40) -> bytes:
    """Return the bytes that `_send` has sent. OSError if they end early or are too many."""
    length = int.from_bytes(_exactly(connection, _LENGTH), "big")
    if length > most:
        raise OSError(f"{length} bytes, and at most {most} are expected")
    return bytes(_exactly(connection, length))


def _exactly(connection: socket.socket, length: int) -> bytearray:
    """Return the next `length` bytes. OSError if they end early."""
    content = bytearray(length)
    view, at = memoryview(content), 0
    while at < length:
        got = connection.recv_into(view[at:])
        if not got:
            raise OSError("the connection has ended")
        at += got
    return content
