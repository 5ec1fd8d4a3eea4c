"""Messages with random delays, and what their arrival times reveal: latency is not a shuffler.

LDP-FL (Sun et al. 2021) splits a client's report into messages (position, high or low), sends each
after its own latency U(0, spread) and lets a mixer hand on, per position, the multiset only.
`dispatch` and `mix_all` walk that way message by message, in event time, and end at the numbers of
`privacy.shuffle.multisets`. `linkage` measures what an observer of the mixer's input line gains
from arrival times.

A delay hides which messages belong together only while every client starts
at the same instant: a client that starts later by more than the spread sends all its messages
together and can be told apart. Whoever carries the messages also sees addresses, connections and
losses, none of which a delay touches.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc

from fedveil.base.errors import BadInput
from fedveil.privacy.noise.streams import Streams, bits
from fedveil.privacy.shuffle import Flags, Multisets, multisets_if_enough

Indices = npt.NDArray[np.int32]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Messages:
    """All messages of a round in no particular order: one entry of each array per message.

    `sender` is known to the simulation only; `positions` is how many positions a report has.

    | edge | behaviour |
    |---|---|
    | arrays of unequal lengths | BadInput |
    | a position outside [0, positions) | BadInput |
    """

    time: Times
    position: Indices
    is_high: Flags
    sender: Indices
    positions: int

    def __post_init__(self) -> None:
        lengths = {len(self.time), len(self.position), len(self.is_high), len(self.sender)}
        if len(lengths) > 1:
            raise BadInput(f"messages have arrays of lengths {sorted(lengths)}: one is needed")
        if ((self.position < 0) | (self.position >= self.positions)).any():
            raise BadInput(f"a message lies outside the {self.positions} positions of a report")


def dispatch(
    high: Flags, streams: Streams, round: int, *, spread: float, starts: npt.ArrayLike = 0.0
) -> Messages:
    """The messages of K clients with bits `high` [K, P], each sent U(0, spread) after its start.

    Latencies are a function of (seed, round, client, position). `starts`, one number or one per
    client, is when clients begin: unequal ones are slow clients.

    | edge | behaviour |
    |---|---|
    | spread or a start negative, NaN or infinite; starts for other than K clients | BadInput |
    | spread 0 | all messages of a client arrive at its start |
    """
    if not (spread >= 0 and math.isfinite(spread)):
        raise BadInput(f"spread is {spread}: a finite number of seconds >= 0 is needed")
    clients, positions = high.shape
    begin = np.asarray(starts, dtype=np.float64)
    if begin.shape not in ((), (clients,)) or not (np.isfinite(begin) & (begin >= 0)).all():
        raise BadInput(
            f"starts of shape {begin.shape}: one finite number of seconds >= 0 is needed, or "
            f"{clients} of them"
        )
    words = bits(streams.keys("latency", round, np.arange(clients)), positions)
    return Messages(
        time=(begin[..., None] + spread * unit_interval(words)).ravel(),
        position=np.tile(np.arange(positions, dtype=np.int32), clients),
        is_high=high.ravel(),
        sender=np.repeat(np.arange(clients, dtype=np.int32), positions),
        positions=positions,
    )


def unit_interval(words: npt.NDArray[np.uint64]) -> Times:
    """Uniform 64-bit words as uniforms on [0, 1) with 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix_all(messages: Messages, minimum: int) -> Multisets:
    """The multisets of all messages, without their times, order and senders.

    | edge | behaviour |
    |---|---|
    | minimum < 1 | BadInput |
    | a position with fewer than `minimum` messages | BadInput, nothing is handed on |
    """
    high = np.bincount(messages.position[messages.is_high], minlength=messages.positions)
    reports = np.bincount(messages.position, minlength=messages.positions)
    return multisets_if_enough(high, reports, minimum)


@dataclass(frozen=True)
class Linkage:
    """How often an observer found the second message of a client, against guessing.

    `p_value` is the probability of at least as many successes by chance (one-sided, exact
    binomial), `z` the number of standard deviations above chance.
    """

    successes: int
    trials: int
    chance: float

    @property
    def success_rate(self) -> float:
        return self.successes / self.trials

    @property
    def z(self) -> float:
        spread = math.sqrt(self.trials * self.chance * (1 - self.chance))
        return (self.successes - self.trials * self.chance) / spread

    @property
    def p_value(self) -> float:
        return float(bdtrc(self.successes - 1, self.trials, self.chance))


def linkage(messages: Messages, streams: Streams, trials: int | None = None) -> Linkage:
    """Link a client's message at one position to its message at another by arrival time alone.

    In each trial the observer is shown a random client's message at position i and names the
    message at position j nearest to it in time: the most likely one when nothing is known about
    the client's start, since the difference of two latencies is most likely zero. Trials use
    positions (i, j) of their own, so with equal starts they are independent and each succeeds with
    probability 1 / K exactly: `p_value` has no approximation in it. By default as many as fit.

    Success at chance says that arrival times do not link messages. It is no privacy claim: an
    observer can do more than this one, and epsilon assumes an ideal shuffler.

    | edge | behaviour |
    |---|---|
    | fewer than two clients | BadInput |
    | a client without exactly one message at every position | BadInput |
    | fewer than one trial, or more than half the positions | BadInput |
    """
    times = _table(messages)
    clients, positions = times.shape
    most = positions // 2
    trials = most if trials is None else trials
    if not 1 <= trials <= most:
        raise BadInput(f"trials is {trials}: 1 to {most} fit {positions} positions")
    generator = streams.generator("linkage")
    first, second = generator.permutation(positions)[: 2 * trials].reshape(2, trials)
    client = generator.integers(clients, size=trials)
    guess = np.abs(times[:, second] - times[client, first]).argmin(axis=0)
    return Linkage(int((guess == client).sum()), trials, 1 / clients)


def _table(messages: Messages) -> Times:
    """Times [K, P] of complete reports."""
    clients = int(messages.sender.max(initial=-1)) + 1
    if clients < 2:
        raise BadInput(f"linkage has {clients} clients: at least two are needed")
    slot = messages.sender.astype(np.int64) * messages.positions + messages.position
    if not (np.bincount(slot, minlength=clients * messages.positions) == 1).all():
        raise BadInput("linkage needs exactly one message per client and position")
    times = np.empty(clients * messages.positions)
    times[slot] = messages.time
    return times.reshape(clients, messages.positions)
