"""The records of K clients as one padded array, and the batches of their local steps."""

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.checks import BATCH, STEPS
from fedveil.base.errors import BadArgument
from fedveil.base.identity import stated
from fedveil.base.inputs import mapped, taken
from fedveil.data.federated import FederatedData
from fedveil.models.task import Features
from fedveil.privacy.noise.streams import KeySource, bits, bits_at

Ids = npt.NDArray[np.int64]

_ALIGNMENT = 64


@dataclass(frozen=True)
class Slots:
    """The public shape of a block of clients that are computed side by side with secure noise.

    Attributes:
        clients: How many slots there are, whoever takes part.
        records: How many records a slot has room for. No client has more.
    """

    clients: int
    records: int


@dataclass(frozen=True, eq=False)
class CohortData:
    """The records of K clients: row k holds those of client `owners[k]`, padded to the longest.

    Records are copied on first access. Padding repeats a client's last record. A client's row never
    holds another client's record, not even as padding: a loss that overflows there would reach this
    client's gradient through 0 x infinity.

    Guarantee: with `slots` all shapes are those of the slots, client k is in slot k, and the others
    are empty: zeros that belong to nobody (docs/proofs/secure-side-by-side.md).

    Attributes:
        data: The records of all clients. It may hold more clients than take part.
        ids: The clients, [K]. In an empty slot it is the first client, of whom nothing is used.
        whose: Client of `data` on whose records each one trains, [K], if not on its own: a
            malicious client may train on other records.
        slots: The shape of the block, None for as many clients and records as there are.
        real: The number of clients that are not empty slots. They come first.
        owners: The client of `data` whose records each row holds, [K].
        sizes: Records per client, [K], 0 for an empty slot.
        longest: Number of records of the client that has most, or the room of a slot.
    """

    data: FederatedData
    ids: Ids
    whose: Ids | None = None
    slots: Slots | None = None
    real: int = field(init=False)
    owners: Ids = field(init=False)
    sizes: Ids = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        """Raise AssertionError for more clients or records than there is room for in the slots."""
        owners = self.ids if self.whose is None else self.whose
        real, slots = len(self.ids), self.slots
        sizes = self.data.offsets[owners + 1] - self.data.offsets[owners]
        longest = int(sizes.max(initial=1))
        if slots is not None:
            if not 0 < real <= slots.clients or longest > slots.records or self.whose is not None:
                raise AssertionError(f"{real} clients of {longest} records do not fit {slots}")
            spare, longest = slots.clients - real, slots.records
            owners = np.concatenate([owners, np.repeat(owners[:1], spare)])
            sizes = np.concatenate([sizes, np.zeros(spare, dtype=sizes.dtype)])
            object.__setattr__(self, "ids", owners)
        object.__setattr__(self, "real", real)
        object.__setattr__(self, "owners", owners)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "longest", longest)

    def __len__(self) -> int:
        """The number of clients, K, empty slots included."""
        return len(self.ids)

    @cached_property
    def x(self) -> Features:
        """The records, [K, longest, ...], or a dictionary of such tensors for named inputs."""
        return mapped(self._rows, self.data.x)

    @cached_property
    def y(self) -> torch.Tensor:
        """The targets, [K, longest, ...]. Padding repeats a client's last target."""
        return self._rows(self.data.y)

    def _rows(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The clients' records in `array`, as a copy [K, longest, ...] aligned to a cache line.

        `array` holds one entry per record of all clients, such as `data.y`. The last bits of a
        product may depend on the alignment of its factors, so all copies have the same alignment.
        """
        starts, sizes = self.data.offsets[self.owners[: self.real]], self.sizes[: self.real]
        longest = self.longest
        last = len(array) - longest
        if len(starts) == 1 and sizes[0] == longest:
            out = np.array(array[starts[0] : starts[0] + sizes[0]], order="C")[None]
        elif last < 0 or not array.flags.c_contiguous:
            rows = starts[:, None] + np.minimum(np.arange(longest)[None, :], sizes[:, None] - 1)
            out = np.ascontiguousarray(array[rows])
        else:
            # each client's records are copied in one piece
            width = int(np.prod(array.shape[1:], dtype=np.int64))
            size = array.itemsize
            windows = np.lib.stride_tricks.as_strided(
                array, (last + 1, longest * width), (width * size, size), writeable=False
            )
            out = windows[np.minimum(starts, last)].reshape(len(starts), longest, *array.shape[1:])
            for k in np.flatnonzero(starts > last):
                out[k, : sizes[k]] = array[starts[k] : starts[k] + sizes[k]]
            if int(sizes.min(initial=longest)) < longest:
                row, column = np.nonzero(np.arange(longest)[None, :] >= sizes[:, None])
                out[row, column] = out[row, sizes[row] - 1]
        if spare := len(self.ids) - self.real:
            out = np.concatenate([out, np.zeros_like(out, shape=(spare, *out.shape[1:]))])
        padded = torch.from_numpy(out)
        return padded if padded.data_ptr() % _ALIGNMENT == 0 else padded.clone()

    def gather(self, index: torch.Tensor) -> "CohortData":
        """A copy of this cohort whose `x` and `y` are the records at `index` [K, B] of each client.

        They are copied in that order, and `longest` is B. An index beyond a client's records is its
        last record. `sizes` stay the numbers of all records.
        """
        places = np.minimum(index.numpy(), self.sizes[:, None] - 1)  # padding is a client's own
        rows = self.data.offsets[self.owners][:, None] + places
        few = copy.copy(self)
        vars(few).update(
            longest=index.shape[1],
            x=mapped(lambda array: torch.from_numpy(array[rows]), self.data.x),
            y=torch.from_numpy(self.data.y[rows]),
        )
        return few

    @cached_property
    def people(self) -> Ids:
        """The number of persons of each client, [K]. That of an empty slot has no meaning. Cached.

        Raises BadInput if the data do not say whose records are whose.
        """
        return self.data.people[self.owners]

    def records_of(self, people: "Batch", cap: int) -> "Batch":
        """The batch of all records of the persons in `people`, a batch whose index has persons.

        The result has `group` = `cap` and [K, B x cap] places, `cap` side by side for each person.
        The places beyond a person's records repeat the last of them, and their mask is 0.
        AssertionError if a person has more than `cap` records.

        Guarantee: what is in a person's places depends on that person and on `cap` alone.
        """
        assert people.index is not None, "a batch of people has their numbers"
        index, last = self.data.person_index, self.people[:, None] - 1
        own = np.minimum(people.index.numpy(), last)  # padding is a client's own
        who = index.first[self.owners][:, None] + own
        places, real = index.positions(who, cap)
        if bool((index.record_counts[who] > cap).any()):
            raise AssertionError(f"a person has more than {cap} records: {cap} of them count")
        places -= self.data.offsets[self.owners][:, None, None]
        mask = people.mask[..., None] * torch.from_numpy(real.astype(np.float32))
        records = torch.from_numpy(places).flatten(1)
        return Batch(records, mask.flatten(1), people.draws, group=cap)

    @property
    def weights(self) -> torch.Tensor:
        """The clients' numbers of records, as weights in a mean, float64 [K]."""
        return torch.from_numpy(self.sizes.astype(np.float64))


@dataclass(frozen=True)
class Draws:
    """The source of the dropout keys for the records of one local step of a cohort.

    Attributes:
        key_source: The streams of the training.
        round: The round.
        ids: The clients, [K].
        step: The local step, counted from 0.
    """

    key_source: KeySource
    round: int
    ids: Ids
    step: int

    def record_keys(self, index: Ids) -> torch.Tensor:
        """One dropout key per record, int64 [K, B], for the records `index` [K, B] of each client.

        A key is a pure function of (streams, round, client, step, the record's index in its
        client). It does not depend on the rest of the batch or cohort.
        """
        keys = self.key_source.keys("dropout", self.round, self.ids, self.step)
        return torch.from_numpy(bits_at(keys, index).view(np.int64))


class Batch:
    """The records that K clients use in one local step, at most B each.

    Attributes:
        index: Indices [K, B] of the records in their clients. None means all records in order,
            which are then not copied.
        draws: The source of dropout keys, None if the model needs none.
        group: How many neighbouring places belong to one unit, which is clipped as a whole.
    """

    group = 1

    def __init__(
        self,
        index: torch.Tensor | None,
        mask: torch.Tensor,
        draws: Draws | None = None,
        group: int = 1,
    ) -> None:
        self.index, self._mask, self.draws = index, mask, draws
        self._places, self.group = index, group

    @property
    def mask(self) -> torch.Tensor:
        """1 for records and 0 for padding and idle clients, float32 [K, B]."""
        return self._mask

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """This step's part [K, B, ...] of `values`, which are of all records, [K, n, ...].

        With `index` None it is `values` itself, not a copy.
        """
        if self.index is None:
            return values
        return values[torch.arange(len(values))[:, None], self.index]

    def scatter(self, values: torch.Tensor, records: int) -> torch.Tensor:
        """The reverse of `select`: this step's values [K, B, ...], put into [K, records, ...].

        Records that are not in this step have zeros. Values of places that have the same record are
        added up, so those of padding must be 0. With `index` None it is `values` itself.
        """
        if self.index is None:
            return values
        out = values.new_zeros(len(values), records, *values.shape[2:])
        rows = torch.arange(len(values))[:, None].expand_as(self.index)
        return out.index_put_((rows, self.index), values, accumulate=True)

    def client_records(self, cohort: CohortData, k: int) -> tuple[Features, torch.Tensor]:
        """The records and targets of client `k` (a row of `cohort`) in this step, without padding.

        They may be views of the cohort's tensors.
        """
        real = self.mask[k] > 0
        x, y = taken(cohort.x, k), cohort.y[k]
        if self.index is not None:
            real = self.index[k][real]
        elif bool(real.all()):
            return x, y
        return taken(x, real), y[real]

    @cached_property
    def dropout_keys(self) -> torch.Tensor:
        """The records' keys for dropout, int64 [K, B]. AssertionError without `draws`."""
        assert self.draws is not None, "the model has dropout and this batch no source of keys"
        index = np.broadcast_to(np.arange(self.mask.shape[1]), self.mask.shape)
        return self.draws.record_keys(index if self._places is None else self._places.numpy())

    def gathered(self) -> "Batch":
        """This batch for the cohort that `CohortData.gather` makes of its index.

        Its own `index` is None. Dropout keys stay those of the records' places in their clients.
        """
        other = Batch(None, self.mask, self.draws, self.group)
        other._places = self.index
        return other

    def by_unit(self, values: torch.Tensor) -> torch.Tensor:
        """Values [K, B, ...] of this batch's places by unit, [K, B / group, group, ...]."""
        clients, places = values.shape[:2]
        return values.reshape(clients, places // self.group, self.group, *values.shape[2:])

    @property
    def unit_weights(self) -> torch.Tensor:
        """The weight of each record in its unit's mean, [K, B / group, group].

        Units without records have zeros.
        """
        mask = self.by_unit(self.mask)
        return mask / mask.sum(dim=2, keepdim=True).clamp_min(1)

    @cached_property
    def weights(self) -> torch.Tensor:
        """The weight of each record in its client's mean, [K, B].

        Rows of idle clients are zeros.
        """
        return self.mask / self.mask.sum(dim=1, keepdim=True).clamp_min(1)

    def zero_idle_(self, rows: torch.Tensor) -> torch.Tensor:
        """Set the rows [K, ...] of idle clients to zero, in place, and return `rows`.

        Weights of 0 are not enough where a loss overflows.
        """
        if self.idle is not None:
            rows[self.idle] = 0.0
        return rows

    @cached_property
    def idle(self) -> torch.Tensor | None:
        """Mask of the clients without records in this step, bool [K].

        None if every client has some.
        """
        idle = self.mask.amax(dim=1) == 0
        return idle if bool(idle.any()) else None


class FullBatch(Batch):
    """A batch of all records of every client that is not idle. The mask is made on first access.

    Args:
        sizes: Number of records [K], 0 for an idle client.
        longest: Width of the padded records.
        draws: The source of dropout keys.
    """

    def __init__(self, sizes: Ids, longest: int, draws: Draws | None = None) -> None:
        self.index, self._places, self.draws = None, None, draws
        self._sizes, self._longest = sizes, longest

    def client_records(self, cohort: CohortData, k: int) -> tuple[Features, torch.Tensor]:
        """All records and targets of client `k` (a row of `cohort`), without padding.

        Both are empty if the client is idle.
        """
        if self._sizes[k] == self._longest:
            return taken(cohort.x, k), cohort.y[k]
        return super().client_records(cohort, k)

    @cached_property
    def mask(self) -> torch.Tensor:
        """1 for records and 0 for padding and idle clients, float32 [K, longest]."""
        real = np.arange(self._longest)[None, :] < self._sizes[:, None]
        return torch.from_numpy(real.astype(np.float32))

    @cached_property
    def idle(self) -> torch.Tensor | None:
        """Mask of the clients whose size is 0, bool [K]. None if there are none."""
        idle = self._sizes == 0
        return torch.from_numpy(idle) if idle.any() else None


@dataclass(frozen=True)
class Batches:
    """`epochs` passes over each client's records, or exactly `steps` batches, shuffled per pass.

    `size` is the number of records per batch, 0 for all of a client's records. A client with n
    records has ceil(n / size) batches per pass, and the last one may be shorter. The order of
    client c's records in pass e is a pure function of (seed, round, c, e). Exactly one of `epochs`
    and `steps` must be given (BadArgument).
    """

    size: int
    epochs: int | None = None
    steps: int | None = None

    identity = stated("batches", "shuffled", "size", "epochs", "steps")

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise BadArgument("set exactly one of {epochs} and {steps}", "epochs", "steps")
        for name, value in (("epochs", self.epochs), ("steps", self.steps)):
            if value is not None:
                STEPS.check(name, value)
        BATCH.check("size", self.size)

    def for_round(
        self, ids: Ids, sizes: Ids, round: int, streams: KeySource, longest: int | None = None
    ) -> "RoundBatches":
        """The batches in `round` of the clients `ids` [K], which have `sizes` [K] records.

        Rows have room for `longest` records, by default for those of the client that has most.
        """
        longest = int(sizes.max(initial=1)) if longest is None else longest
        return RoundBatches(self, ids, sizes, round, streams, longest)


_OF_ALL_STEPS = {"mask", "weights", "idle"}
"""What full batches compute once for all steps of a round."""


class RoundBatches:
    """The batches of a cohort in one round.

    Attributes:
        steps: The number of local steps of a client whose records fill its row. No client takes
            more.
    """

    def __init__(
        self, batches: Batches, ids: Ids, sizes: Ids, round: int, streams: KeySource, longest: int
    ) -> None:
        self._ids, self._sizes, self._round, self._streams = ids, sizes, round, streams
        self._longest = longest
        size = batches.size or longest
        self._width = min(size, longest)
        self._per_pass = np.maximum(1, -(-sizes // size))
        if batches.epochs is None:
            self._last, self.steps = np.full(len(ids), batches.steps), batches.steps or 0
        else:
            self._last = batches.epochs * self._per_pass
            self.steps = batches.epochs * -(-longest // size)
        self._orders: dict[int, Ids] = {}
        self._all: FullBatch | None = None

    def batch(self, step: int) -> Batch:
        """The batch of local step `step`, counted from 0.

        Clients that have taken all their steps are idle in it.
        """
        draws = Draws(self._streams, self._round, self._ids, step)
        working = step < self._last
        if self._width == self._longest:
            if not working.all():
                return FullBatch(np.where(working, self._sizes, 0), self._longest, draws)
            # its mask and weights are computed once for all steps
            before = {} if self._all is None else vars(self._all)
            self._all = FullBatch(self._sizes, self._longest, draws)
            vars(self._all).update((name, before[name]) for name in _OF_ALL_STEPS & before.keys())
            return self._all
        passes, position = np.divmod(step, self._per_pass)
        index = position[:, None] * self._width + np.arange(self._width)[None, :]
        real = (index < self._sizes[:, None]) & working[:, None]
        index = np.minimum(index, self._longest - 1)
        index = np.take_along_axis(self._order(passes), index, axis=1)
        return Batch(torch.from_numpy(index), torch.from_numpy(real.astype(np.float32)), draws)

    def _order(self, passes: Ids) -> Ids:
        """The indices of each client's records in shuffled order, [K, n], padding last.

        `passes` [K] is the pass, counted from 0, that each client is in. Only the orders of these
        passes are kept in memory.
        """
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
