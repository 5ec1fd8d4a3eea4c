"""What a live site takes: memory of its processes, and bytes between it and SuperLink."""

import re
import select
import socket
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.e2e.federations import processes_of

MIB = 1 << 20


def private_memory(pid):
    """The bytes that a process has for itself, and its part of what it shares with forks (PSS)."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


class Memory:
    """The memory of a folder's processes, watched by a thread.

    Attributes:
        before: Their bytes at the start.
        peak: The most bytes at once.
        parts: What each program had at that peak, by name.
    """

    def __init__(self, folder):
        self.folder, self.peak, self.parts = folder, 0, {}
        self.before = sum(self._now().values())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _now(self):
        found = {}
        for pid, name in processes_of(self.folder):
            found[f"{name} {pid}"] = private_memory(pid)
        return found

    def _watch(self):
        while not self._ended.wait(0.05):
            parts = self._now()
            if sum(parts.values()) > self.peak:
                self.peak, self.parts = sum(parts.values()), parts

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        self._thread.join()


class Relay:
    """A forwarder to a port of this machine, which counts bytes and can be cut.

    Attributes:
        port: Where it listens.
        up: The bytes to the other port so far.
        down: Those from it.
        limit: After so many bytes upwards it cuts all connections and lets none in. None: never.
    """

    def __init__(self, target):
        self.target, self.up, self.down, self.limit = target, 0, 0, None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._open, self._lock, self.closed = set(), threading.Lock(), False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def is_cut(self):
        """Whether it lets nothing through."""
        return self.limit is not None and self.up >= self.limit

    def mend(self):
        """Let connections in again."""
        self.limit = None

    def _accept(self):
        while not self.closed:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                inner.close()
                continue
            try:
                outer = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                inner.close()
                continue
            with self._lock:
                self._open |= {inner, outer}
            threading.Thread(target=self._pass, args=(inner, outer), daemon=True).start()

    def _pass(self, inner, outer):
        try:
            while True:
                for one in select.select([inner, outer], [], [])[0]:
                    data = one.recv(1 << 16)
                    if not data or self.is_cut:
                        return
                    if one is inner:
                        self.up += len(data)
                        outer.sendall(data)
                    else:
                        self.down += len(data)
                        inner.sendall(data)
        except (OSError, ValueError):
            return
        finally:
            self._shut(inner, outer)
            if self.is_cut:
                self._shut(*self._open)

    def _shut(self, *sockets):
        for one in sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        with self._lock:
            self._open -= set(sockets)

    def close(self):
        """End it."""
        self.closed = True
        self._listener.close()
        self._shut(*self._open)


@contextmanager
def relay(target):
    """A relay to a port, closed at the end."""
    made = Relay(target)
    try:
        yield made
    finally:
        made.close()


def seconds_of(function):
    """What a function returns, and how long it took."""
    began = time.monotonic()
    return function(), time.monotonic() - began
