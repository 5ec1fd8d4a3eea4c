"""Who takes part in a round, and what that choice is worth to the accountant.

A sampler is both: `cohort` draws the clients, `event` says how the draw changes the release.
The two cannot drift apart because they are one object.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import COHORT, COUNT, RATE
from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import Event, FixedSampled, Gaussian, PoissonSampled
from fedveil.privacy.noise.secure_random import joining
from fedveil.privacy.noise.streams import Streams

__all__ = [
    "Everyone",
    "FixedSize",
    "Poisson",
    "RoundRobin",
    "Sampler",
]

Cohort = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


class Sampler(Protocol):
    """Chooses a cohort for each round, deterministically in (seed, round).

    `relation` is the neighbouring relation under which its accounting holds, `assumption` what
    the accounting takes for granted.
    """

    @property
    def relation(self) -> Relation: ...
    @property
    def assumption(self) -> str: ...

    def check(self, population: int) -> None:
        """Refuse a population this sampler cannot draw from."""
        ...

    def cohort(
        self, population: int, round: int, streams: Streams, counts: Counts | None = None
    ) -> Cohort:
        """The clients of `round`, in ascending order.

        `counts` says how often each client took part before; only a sampler with a cap asks.
        """
        ...

    def expected(self, population: int) -> float:
        """The public number of clients a round is divided by."""
        ...

    def event(self, release: Gaussian, population: int) -> Event:
        """What one round releases about one client."""
        ...

    def participation_share(self, population: int) -> Fraction:
        """The share of rounds that concern a client: it is charged ceil(rounds x share) events."""
        ...


@dataclass(frozen=True)
class Poisson:
    """Every client joins independently with probability `rate`.

    Guarantee: accounted as Poisson sampling under zero-out: the number of clients is public and
    the sum is divided by rate x N, so a neighbour keeps N. The cohort may be empty; its round is
    released and charged like any other, or its emptiness would leak.

    | edge | behaviour |
    |---|---|
    | rate outside (0, 1], below 1e-12, no number | BadInput |
    | rate 1 | everyone, no amplification |
    | empty cohort | an empty array |
    """

    rate: float
    relation: ClassVar[Relation] = Relation.ZERO_OUT
    assumption = "clients join each round independently; who joined is kept secret"

    @property
    def identity(self) -> Stated:
        return (("sampler", "poisson"), ("rate", self.rate))

    def __post_init__(self) -> None:
        RATE.check("rate", self.rate)

    def check(self, population: int) -> None:
        """Any population will do."""

    def cohort(
        self, population: int, round: int, streams: Streams, counts: Counts | None = None
    ) -> Cohort:
        """By a binomial size and a uniform subset, or by gaps: the law of one coin per client."""
        if streams.secure_random is not None:
            return joining(streams.secure_random, self.rate, population)
        generator = streams.generator("cohort", round)
        return _chosen(generator, population, int(generator.binomial(population, self.rate)))

    def expected(self, population: int) -> float:
        """rate x N, fixed in advance: never the realised size."""
        return self.rate * population

    def event(self, release: Gaussian, population: int) -> Event:
        """Poisson-sampled, or the plain release when everyone always joins."""
        return release if self.rate == 1 else PoissonSampled(self.rate, release)

    def participation_share(self, population: int) -> Fraction:
        """Every round concerns every client."""
        return Fraction(1)


@dataclass(frozen=True)
class FixedSize:
    """A uniformly random cohort of exactly `size` clients.

    Guarantee: accounted as sampling without replacement under replacement of one client; it is
    never accounted as Poisson. With `max_participations` a client that has reached it is not
    eligible any more; local claims are calibrated to that cap, and a cohort of a capped sampler
    is not amplified.

    | edge | behaviour |
    |---|---|
    | size or max_participations < 1, or not whole | BadInput |
    | size > population | BadInput in `check` |
    | size = population | everyone, no amplification |
    | fewer eligible clients than `size` | all that are eligible, possibly none |
    """

    size: int
    max_participations: int | None = None
    relation: ClassVar[Relation] = Relation.REPLACE
    assumption = "the cohort is a uniformly random subset, kept secret"

    @property
    def identity(self) -> Stated:
        return (("sampler", "fixed"), *named_values(self, "size", "max_participations"))

    def __post_init__(self) -> None:
        COHORT.check("size", self.size)
        if self.max_participations is not None:
            COUNT.check("max_participations", self.max_participations)

    def check(self, population: int) -> None:
        """Refuse more clients per round than there are."""
        _check_fits(self.size, population)

    def cohort(
        self, population: int, round: int, streams: Streams, counts: Counts | None = None
    ) -> Cohort:
        """`size` clients, drawn each round from those below their cap."""
        if self.max_participations is None:
            return _subset(streams, round, population, self.size)
        if counts is None:
            raise AssertionError("a capped sampler needs to know who took part")
        eligible = np.flatnonzero(counts < self.max_participations)
        return eligible[_subset(streams, round, len(eligible), min(self.size, len(eligible)))]

    def expected(self, population: int) -> float:
        """Exactly `size`."""
        return float(self.size)

    def event(self, release: Gaussian, population: int) -> Event:
        """Sampled without replacement, or the plain release when everyone always joins."""
        return release if self.size == population else FixedSampled(self.size, population, release)

    def participation_share(self, population: int) -> Fraction:
        """Every round concerns every client."""
        return Fraction(1)


@dataclass(frozen=True)
class RoundRobin:
    """`size` clients at a time, around a seeded random order that never changes.

    Guarantee: no amplification. A client is charged for the rounds in which it takes part, at
    most ceil(size x rounds / N), under zero-out: its turn stays, its contribution vanishes.

    | edge | behaviour |
    |---|---|
    | size < 1 or not whole | BadInput |
    | size > population | BadInput in `check` |
    | size does not divide N | turns wrap around; nobody has more than ceil(size x rounds / N) |
    """

    size: int
    relation: ClassVar[Relation] = Relation.ZERO_OUT
    assumption = "the order of turns is public; the number of clients is public"

    @property
    def identity(self) -> Stated:
        return (("sampler", "round-robin"), ("size", self.size))

    def __post_init__(self) -> None:
        COHORT.check("size", self.size)

    def check(self, population: int) -> None:
        """Refuse more clients per round than there are."""
        _check_fits(self.size, population)

    def cohort(
        self, population: int, round: int, streams: Streams, counts: Counts | None = None
    ) -> Cohort:
        """The next `size` clients in order."""
        order = _order(streams, population)
        return np.sort(order[(round * self.size + np.arange(self.size)) % population])

    def expected(self, population: int) -> float:
        """Exactly `size`."""
        return float(self.size)

    def event(self, release: Gaussian, population: int) -> Event:
        """The plain release: turns are public, so nothing is amplified."""
        return release

    def participation_share(self, population: int) -> Fraction:
        """size / N: the client whose turn comes first has had ceil(rounds x size / N) turns."""
        return Fraction(self.size, population)


@dataclass(frozen=True)
class Everyone:
    """All clients in every round.

    Guarantee: no amplification, one charge per round, under zero-out (the number of clients is
    public).
    """

    relation: ClassVar[Relation] = Relation.ZERO_OUT
    assumption = "the number of clients is public"

    @property
    def identity(self) -> Stated:
        return (("sampler", "all"),)

    def check(self, population: int) -> None:
        """Any population will do."""

    def cohort(
        self, population: int, round: int, streams: Streams, counts: Counts | None = None
    ) -> Cohort:
        """Everyone."""
        return np.arange(population, dtype=np.int64)

    def expected(self, population: int) -> float:
        """All of them."""
        return float(population)

    def event(self, release: Gaussian, population: int) -> Event:
        """The plain release."""
        return release

    def participation_share(self, population: int) -> Fraction:
        """Every round concerns every client."""
        return Fraction(1)


def _subset(streams: Streams, round: int, population: int, size: int) -> Cohort:
    if streams.secure_random is not None:
        return streams.secure_random.subset(population, size)
    return _chosen(streams.generator("cohort", round), population, size)


def _chosen(generator: np.random.Generator, population: int, size: int) -> Cohort:
    chosen = generator.choice(population, size=size, replace=False, shuffle=False)
    return np.sort(chosen).astype(np.int64)


@lru_cache(maxsize=4)
def _order(streams: Streams, population: int) -> Cohort:
    """The order of turns: the same in every round, so it is drawn once."""
    return streams.generator("order").permutation(population)


def _check_fits(size: int, population: int) -> None:
    if size > population:
        raise BadArgument(
            f"{{size}} is {size} but there are only {population} clients: lower {{size}} or raise "
            "{population}",
            "size",
            "population",
        )
