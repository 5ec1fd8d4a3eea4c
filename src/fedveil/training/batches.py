"""Which records each client of a cohort sees in each local step."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.checks import BATCH, STEPS
from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated
from fedveil.base.inputs import mapped, taken
from fedveil.models.task import Features
from fedveil.privacy.noise.streams import KeySource, bits, bits_at
from fedveil.training.cohort import CohortData


@dataclass(frozen=True)
class Draws:
    """Where the records of one local step of a cohort get their keys from, for dropout."""

    streams: KeySource
    round: int
    ids: npt.NDArray[np.int64]
    step: int

    def keys(self, index: npt.NDArray[np.int64]) -> torch.Tensor:
        """One key per record, int64 [K, B], for the records `index` [K, B] of each client.

        A key is a pure function of (streams, round, client, step, the record's index in its
        client): who else is in the batch or the cohort has no part in it.
        """
        keys = self.streams.keys("dropout", self.round, self.ids, self.step)
        return torch.from_numpy(bits_at(keys, index).view(np.int64))


@dataclass(frozen=True)
class Batch:
    """Record indices [K, B] of one local step; `mask` is 0 on padding and for idle clients.

    `index` None is all of a client's records, in order: nothing need be copied.
    """

    index: torch.Tensor | None
    mask: torch.Tensor
    draws: Draws | None = None

    def of(self, cohort: CohortData) -> tuple[Features, torch.Tensor]:
        """The records [K, B, ...] and targets [K, B, ...] of this step."""
        return mapped(self.chosen, cohort.x), self.chosen(cohort.y)

    def chosen(self, values: torch.Tensor) -> torch.Tensor:
        """The step's part [K, B, ...] of values [K, n, ...] that belong to records."""
        if self.index is None:
            return values
        return values[torch.arange(len(values))[:, None], self.index]

    def scattered(self, values: torch.Tensor, records: int) -> torch.Tensor:
        """The reverse of `chosen`: [K, records, ...] with zeros for records not in this step."""
        if self.index is None:
            return values
        out = values.new_zeros(len(values), records, *values.shape[2:])
        rows = torch.arange(len(values))[:, None].expand_as(self.index)
        return out.index_put_((rows, self.index), values, accumulate=True)

    def real(self, cohort: CohortData, k: int) -> tuple[Features, torch.Tensor]:
        """The real records and targets of client k alone."""
        real = self.mask[k] > 0
        x, y = taken(cohort.x, k), cohort.y[k]
        if self.index is not None:
            real = self.index[k][real]
        elif bool(real.all()):
            return x, y
        return taken(x, real), y[real]

    @cached_property
    def keys(self) -> torch.Tensor:
        """The records' keys for dropout, int64 [K, B]."""
        if self.draws is None:
            raise AssertionError("the model drops, and nothing says what in this batch")
        index = np.broadcast_to(np.arange(self.mask.shape[1]), self.mask.shape)
        return self.draws.keys(index if self.index is None else self.index.numpy())

    def real_keys(self, k: int) -> torch.Tensor:
        """The keys of the real records of client k alone."""
        return self.keys[k][self.mask[k] > 0]

    def drawing(self, draws: Draws) -> "Batch":
        """The same records, with other keys."""
        other = object.__new__(type(self))  # made in every step: `copy` takes five times as long
        vars(other).update(vars(self), draws=draws)
        vars(other).pop("keys", None)
        return other

    @cached_property
    def weights(self) -> torch.Tensor:
        """What each record counts in its client's mean: [K, B], zeros for idle clients."""
        return self.mask / self.mask.sum(dim=1, keepdim=True).clamp_min(1)

    def without_idle_(self, rows: torch.Tensor) -> torch.Tensor:
        """Zeros for idle clients, in place: no weight makes a zero of a loss that overflows."""
        if not self.all_work:
            rows[~self.working] = 0.0
        return rows

    @cached_property
    def all_work(self) -> bool:
        """Whether no client is idle."""
        return bool(self.working.all())

    @cached_property
    def working(self) -> torch.Tensor:
        """Which clients have anything to do: bool [K]."""
        return self.mask.amax(dim=1) > 0


class Whole(Batch):
    """All records of every working client: `sizes` [K] of them, 0 for an idle client.

    The mask is made only if someone asks for it.
    """

    _sizes: npt.NDArray[np.int64]
    _longest: int

    def __init__(self, sizes: npt.NDArray[np.int64], longest: int) -> None:
        object.__setattr__(self, "index", None)
        object.__setattr__(self, "draws", None)
        object.__setattr__(self, "_sizes", sizes)
        object.__setattr__(self, "_longest", longest)

    def real(self, cohort: CohortData, k: int) -> tuple[Features, torch.Tensor]:
        if self._sizes[k] == self._longest:
            return taken(cohort.x, k), cohort.y[k]
        return super().real(cohort, k)

    @cached_property
    def mask(self) -> torch.Tensor:
        real = np.arange(self._longest)[None, :] < self._sizes[:, None]
        return torch.from_numpy(real.astype(np.float32))

    @cached_property
    def working(self) -> torch.Tensor:
        return torch.from_numpy(self._sizes > 0)


@dataclass(frozen=True)
class Batches:
    """`epochs` passes over each client's records, or exactly `steps` batches, shuffled per pass.

    `size` 0 is the full batch. A client with n records has ceil(n / size) batches per pass, the
    last one shorter. The order of client c in pass e is a pure function of (seed, round, c, e).
    """

    size: int
    epochs: int | None = None
    steps: int | None = None

    @property
    def identity(self) -> Stated:
        return (
            ("batches", "shuffled"),
            ("size", self.size),
            ("epochs", self.epochs),
            ("steps", self.steps),
        )

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise BadArgument(
                "give {epochs} or {steps}, not both and not neither", "epochs", "steps"
            )
        for name, value in (("epochs", self.epochs), ("steps", self.steps)):
            if value is not None:
                STEPS.check(name, value)
        BATCH.check("size", self.size)

    def of(
        self,
        ids: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        round: int,
        streams: KeySource,
    ) -> "RoundBatches":
        """The batches of a cohort in `round`."""
        return RoundBatches(self, ids, sizes, round, streams)


class RoundBatches:
    """The batches of one cohort in one round, one local step after the other."""

    def __init__(
        self,
        batches: Batches,
        ids: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        round: int,
        streams: KeySource,
    ) -> None:
        self._ids, self._sizes, self._round, self._streams = ids, sizes, round, streams
        self._longest = int(sizes.max(initial=1))
        self._width = min(batches.size or self._longest, self._longest)
        self._per_pass = -(-sizes // (batches.size or self._longest))
        passes = batches.epochs
        self._last = np.full(len(ids), batches.steps) if passes is None else passes * self._per_pass
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self._all: Batch | None = None

    @property
    def steps(self) -> int:
        """Local steps of the client that takes most."""
        return int(self._last.max(initial=0))

    def at(self, step: int) -> Batch:
        """The records of local step `step` for every client."""
        draws = Draws(self._streams, self._round, self._ids, step)
        if self._width == self._longest:
            return self._whole(step, draws)
        passes, position = np.divmod(step, self._per_pass)
        index = position[:, None] * self._width + np.arange(self._width)[None, :]
        real = (index < self._sizes[:, None]) & (step < self._last)[:, None]
        index = np.minimum(index, self._longest - 1)
        index = np.take_along_axis(self._order(passes), index, axis=1)
        return Batch(torch.from_numpy(index), torch.from_numpy(real.astype(np.float32)), draws)

    def _whole(self, step: int, draws: Draws) -> Batch:
        """Full batches of the clients that are not done yet; made once while all of them work."""
        working = step < self._last
        if not working.all():
            return Whole(np.where(working, self._sizes, 0), self._longest).drawing(draws)
        self._all = (self._all or Whole(self._sizes, self._longest)).drawing(draws)
        return self._all

    def _order(self, passes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[K, n] record orders, row k being that of pass passes[k]; padding comes last."""
        wanted = {int(e) for e in np.unique(passes)}
        self._orders = {e: order for e, order in self._orders.items() if e in wanted}
        for e in wanted - self._orders.keys():
            words = bits(self._streams.keys("batches", self._round, self._ids, e), self._longest)
            padding = np.arange(self._longest)[None, :] >= self._sizes[:, None]
            self._orders[e] = np.argsort(
                np.where(padding, np.iinfo(np.uint64).max, words >> np.uint64(1)), axis=1
            )
        if len(wanted) == 1:
            return self._orders[wanted.pop()]
        orders = np.empty((len(passes), self._longest), dtype=np.int64)
        for e, order in self._orders.items():
            orders[passes == e] = order[passes == e]
        return orders
