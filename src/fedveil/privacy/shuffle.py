"""What a shuffler hands on, what a line of delayed messages shows, and how far they are apart.

LDP-FL (Sun et al. 2021) splits a client's report into messages (position, high or low), sends each
after its own latency U(0, spread) and lets a mixer hand on, per position, the multiset only. For
two-valued reports that multiset is two numbers: how many are high, and how many there are.

`multisets` is that result at once, without messages. `dispatch`, `arrivals` and `mix` walk the same
way message by message, in event time, and end at the same numbers. `linkage` measures what an
observer of the mixer's input line gains from arrival times.

Latency is not a shuffler. It hides which messages belong together only while every client starts
at the same instant: a client that starts later by more than the spread sends all its messages
together and can be told apart. Whoever carries the messages also sees addresses, connections and
losses, none of which a delay touches. Every claim behind a shuffler therefore assumes an ideal one,
a party that sees the messages, forgets their senders and does not side with the server; where there
is none, only the claims without a shuffler hold.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import bdtrc

from fedveil.errors import BadInput
from fedveil.privacy.noise.streams import Streams, bits

Flags = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int32]
Times = npt.NDArray[np.float64]

_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Multisets:
    """Per position, how many reports are high and how many there are, int64 [P] each, read-only.

    Guarantee: a function of the unordered reports at each position, and of nothing else.

    | edge | behaviour |
    |---|---|
    | no positions, or unequal numbers of them | BadInput |
    | a negative count, or more high than there are reports | BadInput |

    >>> pair = Multisets(high=np.array([2, 0]), reports=np.array([3, 3]))
    >>> pair.sums(torch.zeros(2), torch.tensor([0.5, 2.0])).tolist()
    [0.5, -6.0]
    """

    high: Counts
    reports: Counts

    def __post_init__(self) -> None:
        high = np.array(self.high, dtype=np.int64)
        reports = np.array(self.reports, dtype=np.int64)
        if high.ndim != 1 or high.shape != reports.shape or not len(high):
            raise BadInput(
                f"multisets have {high.shape} high counts and {reports.shape} numbers of reports: "
                "one of each per position is needed"
            )
        if (high < 0).any() or (high > reports).any():
            raise BadInput("multisets count more high reports than reports, or fewer than none")
        for name, counts in (("high", high), ("reports", reports)):
            counts.setflags(write=False)
            object.__setattr__(self, name, counts)

    def sums(self, centre: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
        """The sum of the reports at each position, float64 [P]; reach is radius times kappa.

        Guarantee: with float32 centre and reach, and fewer than 2^29 reports, each sum is the sum
        of the reports as made, rounded once to float64.
        """
        high = torch.from_numpy(self.high.copy())
        low = torch.from_numpy(self.reports - self.high)
        return high * (centre + reach).double() + low * (centre - reach).double()


def highs(rows: torch.Tensor, centre: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
    """Which reports of rows [K, P] are high: the one bit that a message carries.

    Rows must be as `TwoPointMechanism.report_` left them, centre and reach [P] of the same dtype.

    Guarantee: the bits determine the rows exactly, or the rows are refused.

    | edge | behaviour |
    |---|---|
    | a value that is neither centre + reach nor centre - reach, NaN included | BadInput |
    | reach 0, or lost in rounding: both values are the same | low |
    """
    if rows.ndim != 2 or centre.shape != rows.shape[1:] or reach.shape != rows.shape[1:]:
        raise BadInput(
            f"reports {tuple(rows.shape)}, centre {tuple(centre.shape)}, reach "
            f"{tuple(reach.shape)}: [K, P], [P] and [P] are needed"
        )
    not_low = rows != centre - reach
    neither = not_low & (rows != centre + reach)
    if bool(neither.any()):
        row, position = neither.nonzero()[0].tolist()
        raise BadInput(
            f"report {row} holds {float(rows[row, position]):g} at position {position}: only "
            f"{float((centre - reach)[position]):g} and {float((centre + reach)[position]):g} are "
            "two-point reports"
        )
    return not_low


def multisets(
    rows: torch.Tensor, centre: torch.Tensor, reach: torch.Tensor, minimum: int
) -> Multisets:
    """What an ideal shuffler hands on of report rows [K, P]: `mix` of their messages, at once.

    Guarantee: `sums(centre, reach)` of the result are the column sums of the rows; the order of
    the rows does not matter, and nothing comes out below `minimum` reports.

    | edge | behaviour |
    |---|---|
    | minimum < 1 | BadInput |
    | fewer than `minimum` rows | BadInput, nothing is handed on |
    | a value that is no two-point report | BadInput, nothing is handed on |
    """
    high = torch.zeros(rows.shape[1:], dtype=torch.int64)
    for block in torch.split(rows, max(1, _BLOCK // max(1, len(centre)))):
        high += highs(block, centre, reach).sum(dim=0)
    return _handed_on(high.numpy(), np.full(high.shape, len(rows), dtype=np.int64), minimum)


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
    high: Flags
    sender: Indices
    positions: int

    def __post_init__(self) -> None:
        lengths = {len(self.time), len(self.position), len(self.high), len(self.sender)}
        if len(lengths) > 1:
            raise BadInput(f"messages have arrays of lengths {sorted(lengths)}: one is needed")
        if ((self.position < 0) | (self.position >= self.positions)).any():
            raise BadInput(f"a message lies outside the {self.positions} positions of a report")


@dataclass(frozen=True, eq=False)
class Arrivals:
    """What an observer of the mixer's input line sees, in order of time."""

    time: Times
    position: Indices
    high: Flags


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
        high=high.ravel(),
        sender=np.repeat(np.arange(clients, dtype=np.int32), positions),
        positions=positions,
    )


def unit_interval(words: npt.NDArray[np.uint64]) -> Times:
    """Uniform 64-bit words as uniforms on [0, 1) with 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def arrivals(messages: Messages) -> Arrivals:
    """The messages as they arrive.

    Guarantee: who sent what changes nothing; messages that arrive at the same instant are listed
    by position and value.
    """
    order = np.lexsort((messages.high, messages.position, messages.time))
    return Arrivals(messages.time[order], messages.position[order], messages.high[order])


def mix(messages: Messages, minimum: int) -> Multisets:
    """What the mixer hands on once all messages are in; times, order and senders are gone.

    | edge | behaviour |
    |---|---|
    | minimum < 1 | BadInput |
    | a position with fewer than `minimum` messages | BadInput, nothing is handed on |
    """
    high = np.bincount(messages.position[messages.high], minlength=messages.positions)
    reports = np.bincount(messages.position, minlength=messages.positions)
    return _handed_on(high, reports, minimum)


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
    def rate(self) -> float:
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


def _handed_on(high: Counts, reports: Counts, minimum: int) -> Multisets:
    """The multisets, if there are at least `minimum` reports everywhere."""
    if minimum < 1:
        raise BadInput(f"shuffle.minimum is {minimum}: at least one honest report is needed")
    made = Multisets(high, reports)
    fewest = int(made.reports.min())
    if fewest < minimum:
        raise BadInput(
            f"a position has {fewest} reports and shuffle.minimum is {minimum}: nothing is handed "
            "on; wait for more clients"
        )
    return made
