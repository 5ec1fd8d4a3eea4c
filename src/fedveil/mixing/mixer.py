"""The mixer process: it buffers reports, counts them whole, and hands on multisets."""

import asyncio
import ipaddress
import json
import os
import signal
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedveil.base.checks import PORT, POSITIVE, number
from fedveil.base.errors import BadInput
from fedveil.base.platforms import take_lock
from fedveil.mixing import protocol
from fedveil.mixing.protocol import COLLECTOR, Reader, Status, Words, Writer, peer_name
from fedveil.privacy.shuffle import Counts, Flags, Multisets

_COUNT = number(lambda v: 1 <= v < 2**31, "1 to 2^31 - 1 is needed", whole=True)


class OpenedRounds:
    """A file with the numbers of all rounds that were ever opened: none opens twice.

    It is locked until `close`.

    Guarantee: when `add` returns, the number is on the disk, and every later mixer on the same file
    has it in `numbers`.

    | edge | behaviour |
    |---|---|
    | no file yet | made, readable by its owner alone |
    | another mixer uses the file | BadInput |
    | something else than whole numbers in it | BadInput |
    | a last line that was cut short | kept as the number that is left of it |
    | the disk is full | OSError, and the round does not open |
    """

    def __init__(self, path: Path | str) -> None:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._file = os.open(path, flags, 0o600)
        except OSError as e:
            raise BadInput(f"mixer.opened is {path}: {e.strerror}") from e
        try:
            self.numbers = self._read(path)
        except BaseException:
            self.close()
            raise

    def add(self, number: int) -> None:
        """Write a round's number to the disk, before its first report is taken.

        It begins a line of its own, so that nothing joins a number that an earlier call cut short.
        Raises OSError if the number is not written as a whole.
        """
        line = f"\n{number}\n".encode()
        if os.write(self._file, line) < len(line):
            raise OSError(f"round {number} could not be noted")
        os.fsync(self._file)
        self.numbers.add(number)

    def close(self) -> None:
        """Close the file, so that the next mixer can use it."""
        os.close(self._file)

    def _read(self, path: Path | str) -> set[int]:
        """Lock the file, and return the numbers in it.

        Raises BadInput if another mixer has the lock, and for anything but whole numbers.
        """
        try:
            free = take_lock(self._file)
        except OSError as e:
            raise BadInput(f"mixer.opened is {path}: it cannot be locked: {e.strerror}") from e
        if not free:
            raise BadInput(f"mixer.opened is {path}: another mixer uses it")
        with open(self._file, "rb", closefd=False) as file:  # Windows locks others out of reading
            text = file.read()
        words = text.split()
        if not all(word.isdigit() for word in words):
            raise BadInput(f"mixer.opened is {path}: whole numbers are needed, one per line")
        return {int(word) for word in words}


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """What a mixer accepts.

    Memory is about positions x (8 connections + 24 rounds_in_memory) bytes at most. The mixer stops
    when a collector has the outcome of every round, in some attempt, or after `seconds`, whatever
    is open.

    Attributes:
        positions: The number of positions of a report.
        minimum: The fewest reports that are handed on.
        expected: The number of reports after which a round closes.
        rounds: Rounds are numbered 1 to `rounds`; attempt a at round r, counted from 0, has the
            number a x rounds + r (`round_number`).
        deadline: Seconds that a round is open, from its first announcement.
        idle: Seconds between two frames of a connection: longer than the clients' latency.
        seconds: Seconds that the process runs.
        rounds_in_memory: The most rounds in memory, open or closed. A new one takes the place of
            the oldest closed one.
        connections: The most connections at a time.
        host: The IP address to listen on.
        port: The port, or 0 for any.
        attempts: The most attempts at a round.
        certificate: The file of the certificate for TLS.
        key: The file of its key.
        clients_ca: The authority that signs certificates of members and collector.
        members: Who reports, once per round: the common names in their certificates. The name
            `collector` collects.
        opened: The file with the rounds that were opened: none opens twice.
        simulated: For simulations and tests, where one process plays every client: it needs no
            members and no certificates, cannot tell clients apart, and listens on loopback only.

    | edge | behaviour |
    |---|---|
    | a count below 1, a time that is not positive and finite | BadInput |
    | more than 2^31 - 1 positions, a port above 65535 | BadInput |
    | expected < minimum, or > the number of members | BadInput |
    | a member without a name, named twice, or named `collector` | BadInput |
    | a host that is no IP address, or simulated beyond loopback | BadInput |
    | certificate, key, clients_ca, members or opened left out, unless simulated | BadInput |
    | clients_ca, members or opened given, and simulated | BadInput |
    | simulated, a certificate without its key, or the reverse | BadInput |
    """

    positions: int
    minimum: int
    expected: int
    rounds: int = 1
    deadline: float = 60.0
    idle: float = 30.0
    seconds: float = 3600.0
    rounds_in_memory: int = 4
    connections: int = 512
    host: str = "127.0.0.1"
    port: int = 0
    attempts: int = 1
    certificate: str | None = None
    key: str | None = None
    clients_ca: str | None = None
    members: tuple[str, ...] = ()
    opened: str | None = None
    simulated: bool = False

    def __post_init__(self) -> None:
        counts = "positions minimum expected rounds attempts rounds_in_memory connections"
        for name in counts.split():
            _COUNT.check(f"mixer.{name}", getattr(self, name))
        for name in ("deadline", "idle", "seconds"):
            POSITIVE.check(f"mixer.{name}", getattr(self, name))
        if self.expected < self.minimum:
            raise BadInput(
                f"mixer.expected is {self.expected}, below mixer.minimum {self.minimum}: raise it"
            )
        PORT.check("mixer.port", self.port)
        try:
            loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            raise BadInput(f"mixer.host is {self.host!r}: an IP address is needed") from None
        if (self.certificate is None) != (self.key is None):
            raise BadInput("mixer.certificate and mixer.key go together: give both, or neither")
        if self.simulated:
            self._check_simulated(loopback)
        else:
            self._check_members()

    def _check_simulated(self, loopback: bool) -> None:
        """Raise BadInput for settings that a simulated mixer cannot have."""
        if not loopback:
            raise BadInput(
                f"mixer.host is {self.host} and mixer.simulated is true: a simulated mixer listens "
                "on this machine only"
            )
        if self.clients_ca is not None or self.members or self.opened is not None:
            raise BadInput(
                "mixer.simulated is true beside clients_ca, members or opened: leave one out"
            )

    def _check_members(self) -> None:
        """Raise BadInput if members cannot be told apart, or are fewer than expected reports."""
        needed = ("certificate", "key", "clients_ca", "members", "opened")
        missing = [name for name in needed if not getattr(self, name)]
        if missing:
            raise BadInput(
                f"mixer.{missing[0]} is missing: without it clients cannot be told apart, and one "
                "of them could send every report but one; set mixer.simulated if that is meant"
            )
        if len(set(self.members)) < len(self.members) or "" in self.members:
            raise BadInput(f"mixer.members are {', '.join(self.members)}: a name of its own each")
        if COLLECTOR in self.members:
            raise BadInput(f"mixer.members has {COLLECTOR!r}, who collects: name it otherwise")
        if self.expected > len(self.members):
            raise BadInput(
                f"mixer.expected is {self.expected} and mixer.members has {len(self.members)}: one "
                "report each"
            )

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of the mixer, None without a certificate. BadInput for unusable files."""
        if self.certificate is None or self.key is None:
            return None
        return protocol.server_tls(self.certificate, self.key, self.clients_ca)


async def serve(
    config: MixerConfig,
    ready: Callable[[int], None] = lambda port: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Mix until every round's outcome is delivered, `stop` is set or `seconds` pass.

    `ready` is called once with the port when clients can connect. Raises BadInput for files that
    cannot be used, and OSError if the port cannot.
    """
    tls = config.tls
    mixer = _Mixer(config, stop or asyncio.Event())
    try:
        server = await asyncio.start_server(
            mixer.connected, config.host, config.port, limit=4 * protocol.MOST_WORDS, ssl=tls
        )
    except BaseException:
        await mixer.close()
        raise
    try:
        ready(server.sockets[0].getsockname()[1])
        with suppress(TimeoutError):
            async with asyncio.timeout(config.seconds):
                await mixer.stop.wait()
    finally:
        server.close()
        await mixer.close()
        await server.wait_closed()


def run_mixer(config: MixerConfig) -> None:
    """Run `serve` in this process until SIGINT or SIGTERM, or until it ends by itself.

    It prints one JSON line with "host" and "port" when it is ready. Ending is clean at any time:
    open rounds are discarded.
    """

    def announce(port: int) -> None:
        """Print host and port."""
        print(json.dumps({"host": config.host, "port": port}), flush=True)

    async def main() -> None:
        """Serve until a signal comes."""
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for ending in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(ending, stop.set)
            except NotImplementedError:  # on Windows
                signal.signal(ending, lambda *_: loop.call_soon_threadsafe(stop.set))
        await serve(config, announce, stop)

    asyncio.run(main())


class _Malformed(Exception):
    """Raised when a connection breaks the protocol."""


@dataclass
class _OpenRound:
    """A round that takes reports.

    Attributes:
        high_counts: Number of reports with a high bit so far, by position, [P].
        timer: Closes the round at its deadline.
        reporters: The members that were counted.
    """

    high_counts: Counts
    timer: asyncio.TimerHandle
    reporters: set[object] = field(default_factory=set)


class _Partial:
    """One connection's report while it is coming in.

    Attributes:
        high: The bits that have arrived, [P].
        arrived: Which positions have arrived, [P].
        missing: The number of positions that have not.
    """

    def __init__(self, positions: int) -> None:
        self.high: Flags = np.zeros(positions, dtype=bool)
        self.arrived: Flags = np.zeros(positions, dtype=bool)
        self.missing = positions

    def add(self, words: Words) -> None:
        """Add the messages of one frame, words 2 x position + bit.

        Raises _Malformed if a position is out of range or came before.
        """
        position = (words >> 1).astype(np.int64)
        if (position >= len(self.arrived)).any() or self.arrived[position].any():
            raise _Malformed
        if len(np.unique(position)) < len(position):
            raise _Malformed
        self.arrived[position] = True
        self.high[position] = words & 1
        self.missing -= len(position)


class _Mixer:
    """The state of a mixer: the outcome of each round, and the connections under way.

    Its config's file of opened rounds is locked until `close`.
    """

    def __init__(self, config: MixerConfig, stop: asyncio.Event) -> None:
        self.config, self.stop = config, stop
        self._opened = None if config.opened is None else OpenedRounds(config.opened)
        self._rounds: dict[int, _OpenRound | Multisets | Status] = {}
        if self._opened is not None:
            self._rounds = dict.fromkeys(self._opened.numbers, Status.FORGOTTEN)
        self._delivered: set[int] = set()
        self._connections: set[asyncio.Task[None]] = set()

    def connected(self, reader: Reader, writer: Writer) -> None:
        """Begin to serve a new connection, or drop it at once if there are too many."""
        if len(self._connections) >= self.config.connections:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._converse(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        """Drop all connections and open rounds, and unlock the file of opened rounds."""
        for state in self._rounds.values():
            if isinstance(state, _OpenRound):
                state.timer.cancel()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._opened is not None:
            self._opened.close()

    async def _converse(self, reader: Reader, writer: Writer) -> None:
        """Serve one connection. An error on it closes it and affects no other."""
        try:
            async with asyncio.timeout(self.config.idle):
                hello = await reader.readexactly(protocol.HELLO.size)
            kind, positions, minimum, round = protocol.HELLO.unpack(hello)
            if kind not in (protocol.REPORT, protocol.COLLECT):
                raise _Malformed
            config = self.config
            # Members report, the collector collects, and nobody does both: a collector that could
            # report as well would fill a round up with reports that it knows, and know the one that
            # is left. In a simulation every connection is a member.
            peer: object = object() if config.simulated else peer_name(writer)
            allowed = peer == COLLECTOR if kind == protocol.COLLECT else peer in config.members
            # The sender relies on at most as many reports as the mixer waits for.
            known = positions == config.positions and minimum <= config.minimum
            if not allowed and not config.simulated:
                writer.write(bytes([Status.FORBIDDEN]))
            elif not known or not 1 <= round <= config.rounds * config.attempts:
                writer.write(bytes([Status.UNKNOWN]))
            elif kind == protocol.REPORT:
                await self._receive(round, peer, reader, writer)
            else:
                await self._deliver(round, reader, writer)
        except (*protocol.GONE, _Malformed):
            pass
        finally:
            writer.transport.abort()  # an answer of one byte is with the kernel by now
            with suppress(OSError):
                await writer.wait_closed()

    async def _receive(self, round: int, member: object, reader: Reader, writer: Writer) -> None:
        """Receive one report of `member`, count it once it is complete, and send the status.

        If the round does not take it, only the status is sent. Raises _Malformed or a timeout if
        the report does not come as it should: nothing is then counted.
        """
        state = self._admit(round, member)
        if isinstance(state, Status):
            writer.write(bytes([state]))
            return
        writer.write(bytes([Status.OK]))
        report = _Partial(self.config.positions)
        async with asyncio.timeout_at(state.timer.when()):
            while report.missing:
                async with asyncio.timeout(self.config.idle):
                    report.add(await _read_frame(reader))
        writer.write(bytes([self._count(round, member, report.high)]))

    async def _deliver(self, round: int, reader: Reader, writer: Writer) -> None:
        """Send the collector the counts of a closed round, or the status of any other.

        The round counts as delivered when the collector has confirmed the counts, or was sent
        TOO_FEW or FORGOTTEN.
        """
        state = self._rounds.get(round, Status.OPEN)
        if isinstance(state, Multisets):
            counts = np.append(state.report_counts[0], state.high_counts).astype(">u4")
            writer.write(bytes([Status.OK]) + counts.tobytes())
            async with asyncio.timeout(self.config.idle):
                await reader.readexactly(len(protocol.THANKS))
            self._note_delivered(round)
            return
        status = Status.OPEN if isinstance(state, _OpenRound) else state
        writer.write(bytes([status]))
        if status in (Status.TOO_FEW, Status.FORGOTTEN):
            self._note_delivered(round)

    def _admit(self, round: int, member: object) -> _OpenRound | Status:
        """The open round for a member's report, opened if it is new.

        A status if the report cannot be taken: REPEATED, FINISHED, or BUSY if too many rounds are
        open. A new round's number is on the disk before this returns.
        """
        state = self._rounds.get(round)
        if isinstance(state, _OpenRound):
            return Status.REPEATED if member in state.reporters else state
        if state is not None:
            return Status.FINISHED
        if not self._make_room():
            return Status.BUSY
        if self._opened is not None:
            self._opened.add(round)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.config.deadline, self._finish, round)
        opened = _OpenRound(np.zeros(self.config.positions, dtype=np.int64), timer)
        self._rounds[round] = opened
        return opened

    def _make_room(self) -> bool:
        """Make room for one more round, if need be by forgetting the oldest closed one.

        False, with nothing changed, if all rounds in memory are open.
        """
        in_memory = [n for n, state in self._rounds.items() if not isinstance(state, Status)]
        if len(in_memory) < self.config.rounds_in_memory:
            return True
        closed = [n for n in in_memory if isinstance(self._rounds[n], Multisets)]
        for oldest in closed[:1]:
            self._rounds[oldest] = Status.FORGOTTEN
            self._note_delivered(oldest)
        return bool(closed)

    def _count(self, round: int, member: object, high: Flags) -> Status:
        """Add one whole report, and return OK, or FINISHED or REPEATED if it does not count.

        `high` are its bits, [P]. The round closes with the last expected report.

        Guarantee: the number of reports in a round is the number of members that were counted.

        | edge | behaviour |
        |---|---|
        | two connections of one member, both complete | the first counts, the second is refused |
        | the round closed while the report came in | refused |
        """
        state = self._rounds[round]
        if not isinstance(state, _OpenRound):
            return Status.FINISHED
        if member in state.reporters:
            return Status.REPEATED
        state.high_counts += high
        state.reporters.add(member)
        if len(state.reporters) == self.config.expected:
            self._finish(round)
        return Status.OK

    def _finish(self, round: int) -> None:
        """Close an open round, or discard its reports if they are fewer than the minimum.

        AssertionError for a round that is not open.
        """
        state = self._rounds[round]
        assert isinstance(state, _OpenRound), f"round {round} finished twice"
        state.timer.cancel()
        if len(state.reporters) < self.config.minimum:
            self._rounds[round] = Status.TOO_FEW
        else:
            reports = np.full(len(state.high_counts), len(state.reporters), dtype=np.int64)
            self._rounds[round] = Multisets(state.high_counts, reports)

    def _note_delivered(self, round: int) -> None:
        """Record that a round's outcome was delivered or forgotten, and set `stop` after the last.

        Attempts of one round count as the same round.
        """
        self._delivered.add((round - 1) % self.config.rounds)
        if len(self._delivered) == self.config.rounds:
            self.stop.set()


async def _read_frame(reader: Reader) -> Words:
    """The words of the next frame, uint32. Raises _Malformed if it is empty or oversized."""
    (count,) = protocol.COUNT.unpack(await reader.readexactly(protocol.COUNT.size))
    if not 1 <= count <= protocol.MOST_WORDS:
        raise _Malformed
    return np.frombuffer(await reader.readexactly(4 * count), dtype=">u4").astype(np.uint32)
