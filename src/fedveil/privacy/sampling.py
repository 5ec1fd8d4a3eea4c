"""Who takes part in a round, and what that choice is worth to the accountant.

A sampler is both: `cohort` draws the clients, `event` says how the draw changes the release.
The two cannot drift apart because they are one object.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import COHORT, COUNT, RATE
from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.accounting.events import Event, FixedSampled, Gaussian, PoissonSampled
from fedveil.privacy.noise.secure_random import poisson_subset

if TYPE_CHECKING:
    from fedveil.privacy.noise.streams import KeySource, Streams

__all__ = [
    "Everyone",
    "FixedSize",
    "OwnCoins",
    "Poisson",
    "RoundRobin",
    "Sampler",
]

Cohort = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


class Sampler(Protocol):
    """Chooses a cohort for each round, deterministically in (seed, round).

    What has a default here is the plain case: any population, no amplification, every round.

    Attributes:
        relation: The neighbouring relation under which its accounting holds.
        assumption: What the accounting takes for granted.
    """

    @property
    def relation(self) -> Relation:
        """The neighbouring relation under which the accounting holds."""
        ...

    @property
    def assumption(self) -> str:
        """A sentence for claims: what the accounting takes for granted."""
        ...

    def check(self, population: int) -> None:
        """Raise BadInput for a population that this sampler cannot draw from.

        By default any will do.
        """
        return

    def cohort(
        self, population: int, round: int, streams: "Streams", counts: Counts | None = None
    ) -> Cohort:
        """The ids of the clients of `round`, int64, in ascending order. It may be empty.

        `streams` are the source of randomness: seeded ones give the same cohort again. `counts` [N]
        is how often each client took part before. Only a sampler with a cap needs it.
        """
        ...

    def expected(self, population: int) -> float:
        """The public number of clients by which the sum of a round is divided."""
        ...

    def event(self, release: Gaussian, population: int) -> Event:
        """The event of one round, as it concerns one client. By default `release` itself.

        `release` is the event without sampling.
        """
        return release

    def participation_share(self, population: int) -> Fraction:
        """The share of rounds that concern a client, who is charged ceil(rounds x share) events.

        By default 1: every round concerns every client.
        """
        return Fraction(1)


@dataclass(frozen=True)
class Poisson(Sampler):
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
        """Identity pairs: sampler "poisson", rate."""
        return (("sampler", "poisson"), ("rate", self.rate))

    def __post_init__(self) -> None:
        """Raise BadArgument for a rate outside [1e-12, 1]."""
        RATE.check("rate", self.rate)

    def cohort(
        self, population: int, round: int, streams: "Streams", counts: Counts | None = None
    ) -> Cohort:
        """The ids of the clients that join, in ascending order, as if by one coin each.

        Seeded, by a binomial size and a uniform subset. With secure randomness, by the gaps between
        clients. `counts` are not used.
        """
        if streams.secure_random is not None:
            return poisson_subset(streams.secure_random, self.rate, population)
        generator = streams.generator("cohort", round)
        size = int(generator.binomial(population, self.rate))
        return np.sort(generator.choice(population, size, replace=False, shuffle=False))

    def expected(self, population: int) -> float:
        """rate x N, fixed in advance, and never the size of a cohort."""
        return self.rate * population

    def event(self, release: Gaussian, population: int) -> Event:
        """`PoissonSampled`, or the plain `release` at rate 1."""
        return release if self.rate == 1 else PoissonSampled(self.rate, release)


@dataclass(frozen=True)
class OwnCoins(Sampler):
    """Every client reports in every round. A coin of its own decides whether it reports zero.

    The coin falls inside the client, and nobody else knows it. It is for reports that have noise
    before they leave: without noise, zero would show how the coin fell.

    Guarantee: docs/proofs/central-sum.md. Accounted as Poisson sampling of the clients under
    zero-out, also against the server and all other clients together.

    | edge | behaviour |
    |---|---|
    | rate outside (0, 1], below 1e-12, no number | BadInput |
    | rate 1 | no coin, no amplification |
    | a rate with more than 53 binary digits behind the point | up to 2^-53 less is drawn |
    """

    rate: float
    relation: ClassVar[Relation] = Relation.ZERO_OUT
    assumption = (
        "each client decides by a coin of its own whether it contributes, and keeps that secret; "
        "how long its report takes does not depend on it"
    )

    @property
    def identity(self) -> Stated:
        """Identity pairs: sampler "own-coins", rate."""
        return (("sampler", "own-coins"), ("rate", self.rate))

    def __post_init__(self) -> None:
        """Raise BadArgument for a rate outside [1e-12, 1]."""
        RATE.check("rate", self.rate)

    def cohort(
        self, population: int, round: int, streams: "Streams", counts: Counts | None = None
    ) -> Cohort:
        """The ids 0 .. population - 1: all clients report."""
        return np.arange(population, dtype=np.int64)

    def expected(self, population: int) -> float:
        """rate x N, fixed in advance, however coins fall."""
        return self.rate * population

    def event(self, release: Gaussian, population: int) -> Event:
        """`PoissonSampled`, or the plain `release` at rate 1."""
        return Poisson(self.rate).event(release, population)

    def coins(self, ids: Cohort, round: int, streams: "KeySource") -> npt.NDArray[np.bool_] | None:
        """Which of the clients `ids` of a round report their update, bool [K]. None at rate 1.

        The others report zero. Seeded, a client's coin follows from the seed, the round and the
        client. Secure, each call draws new ones.
        """
        if self.rate == 1:
            return None
        from fedveil.privacy.noise.streams import bits  # imports torch, which accounts do without

        words = bits(streams.keys("own-coin", round, ids), 1)[:, 0]
        coins: npt.NDArray[np.bool_] = (words >> np.uint64(11)) < np.uint64(
            math.floor(self.rate * 2.0**53)
        )
        return coins


@dataclass(frozen=True)
class FixedSize(Sampler):
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
        """Identity pairs: sampler "fixed", size, max_participations."""
        return (("sampler", "fixed"), *named_values(self, "size", "max_participations"))

    def __post_init__(self) -> None:
        """Raise BadArgument for a size or cap that is not a whole number from 1 on."""
        COHORT.check("size", self.size)
        if self.max_participations is not None:
            COUNT.check("max_participations", self.max_participations)

    def check(self, population: int) -> None:
        """Raise BadArgument for more clients per round than there are."""
        _check_size(self.size, population)

    def cohort(
        self, population: int, round: int, streams: "Streams", counts: Counts | None = None
    ) -> Cohort:
        """`size` ids of clients below their cap, drawn uniformly, in ascending order.

        Fewer, possibly none, if fewer are below it. With a cap, raises AssertionError without
        `counts`.
        """
        if self.max_participations is None:
            return _subset(streams, round, population, self.size)
        if counts is None:
            raise AssertionError("a capped sampler needs to know who took part")
        eligible = np.flatnonzero(counts < self.max_participations)
        return eligible[_subset(streams, round, len(eligible), min(self.size, len(eligible)))]

    def expected(self, population: int) -> float:
        """`size`, as a float."""
        return float(self.size)

    def event(self, release: Gaussian, population: int) -> Event:
        """`FixedSampled`, or the plain `release` if the cohort is everyone.

        A cap does not change it.
        """
        return release if self.size == population else FixedSampled(self.size, population, release)


@dataclass(frozen=True)
class RoundRobin(Sampler):
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
        """Identity pairs: sampler "round-robin", size."""
        return (("sampler", "round-robin"), ("size", self.size))

    def __post_init__(self) -> None:
        """Raise BadArgument for a size that is not a whole number from 1 on."""
        COHORT.check("size", self.size)

    def check(self, population: int) -> None:
        """Raise BadArgument for more clients per round than there are."""
        _check_size(self.size, population)

    def cohort(
        self, population: int, round: int, streams: "Streams", counts: Counts | None = None
    ) -> Cohort:
        """The next `size` clients of the fixed order, as ids in ascending order.

        No `counts` are used.
        """
        order = _order(streams, population)
        return np.sort(order[(round * self.size + np.arange(self.size)) % population])

    def expected(self, population: int) -> float:
        """`size`, as a float."""
        return float(self.size)

    def participation_share(self, population: int) -> Fraction:
        """size / N: the client whose turn comes first has had ceil(rounds x size / N) turns."""
        return Fraction(self.size, population)


@dataclass(frozen=True)
class Everyone(Sampler):
    """All clients in every round.

    Guarantee: no amplification, one charge per round, under zero-out (the number of clients is
    public).
    """

    relation: ClassVar[Relation] = Relation.ZERO_OUT
    assumption = "the number of clients is public"

    @property
    def identity(self) -> Stated:
        """Identity pairs: sampler "all"."""
        return (("sampler", "all"),)

    def cohort(
        self, population: int, round: int, streams: "Streams", counts: Counts | None = None
    ) -> Cohort:
        """The ids 0 .. population - 1."""
        return np.arange(population, dtype=np.int64)

    def expected(self, population: int) -> float:
        """`population`, as a float."""
        return float(population)


def _subset(streams: "Streams", round: int, population: int, size: int) -> Cohort:
    """A uniformly random subset of `size` out of 0 .. population - 1, in ascending order.

    Secure streams draw another one each time, seeded ones the same for the same `round`.
    """
    if streams.secure_random is not None:
        return streams.secure_random.subset(population, size)
    generator = streams.generator("cohort", round)
    return np.sort(generator.choice(population, size, replace=False, shuffle=False))


@lru_cache(maxsize=4)
def _order(streams: "Streams", population: int) -> Cohort:
    """The clients' ids in the order of turns, which follows from the seed and never changes.

    Cached.
    """
    return streams.generator("order").permutation(population)


def _check_size(size: int, population: int) -> None:
    """Raise BadArgument for a cohort larger than the population."""
    if size > population:
        raise BadArgument(
            f"{{size}} is {size} but there are only {population} clients: lower {{size}} or raise "
            "{population}",
            "size",
            "population",
        )
