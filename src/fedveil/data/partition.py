"""Divide the records of a data set among clients."""

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, join_inputs, taken, values_of
from fedveil.data.federated import FederatedData
from fedveil.data.provenance import PUBLIC, choose_held_out, held_out_number, holdout
from fedveil.data.schema import TableSchema
from fedveil.data.user_arrays import Array, Rows, described, target_of


@dataclass(frozen=True, eq=False)
class Records:
    """Training and test records of one data set.

    `x` is float32, images as [N, channels, height, width], or several inputs by name; `y` is int64
    labels, or float32 when `classes` is 0 (see `base.inputs.Target`). `owners[i]` is the index
    in `owner_names` of the person training record i came from, or None when the data set has no
    natural clients; `test_owners[i]` that of test record i. `lines[i]` is the place of training
    record i in its table, `test_lines[i]` that of test record i in the same table, or -1 if it is
    not from there. `public_test` says that the source has published the test split. `fitted` names
    what was fitted on clients' records in the clear, "" if nothing was, `fitted_on_test` what was
    fitted on the test records; `remarks` are what claims have to say besides, and `schema` is that
    of a table.
    """

    name: str
    x: Inputs[Array]
    y: Array
    test_x: Inputs[Array]
    test_y: Array
    classes: int
    owners: Array | None = None
    owner_names: Array | None = None
    test_owners: Array | None = None
    lines: Array | None = None
    test_lines: Array | None = None
    public_test: bool = False
    fitted: str = ""
    fitted_on_test: str = ""
    remarks: tuple[str, ...] = ()
    schema: TableSchema | None = None

    @classmethod
    def with_holdout(cls, name: str, x: Array, y: Array, **options: Any) -> "Records":
        """Records without a split of their own: a fixed fifth of them is the test split.

        Features become float32. `options` are further fields.
        """
        train, test = holdout(len(x))
        train_x, test_x = (x[rows].astype(np.float32, copy=False) for rows in (train, test))
        return cls(name, train_x, y[train], test_x, y[test], **options)

    def __repr__(self) -> str:
        target = target_of(self.y, self.classes)
        return f"Records({self.name}, {described(self.x, self.test_x, target)})"


def few_records_assumption(least: int) -> str:
    """The assumption about clients that were left out because they have few records.

    How many there were is not said: it is computed from their records.
    """
    return f"which clients have at least {least} records is public: the others were left out"


KINDS = ("iid", "shards", "dirichlet", "natural", "grouped")
OWNED = ("natural", "grouped")
"""The kinds in which all records of one owner are one client's."""

TESTS = ("by-client", "records")

_STREAM = int.from_bytes(b"partition", "big")
_DRAWN, _KEPT = 1, 2
_MOST_BYTES = 1 << 30  # of records drawn with replacement


def partition(
    records: Records,
    *,
    kind: str,
    clients: int | None,
    seed: int,
    alpha: float | None = None,
    shards_per_client: int = 1,
    test: str | float | None = None,
) -> FederatedData:
    """Divide the training records among clients. The test records are no client's.

    By `kind`:

    - "iid": a random permutation cut into equal parts.
    - "shards": sorted by target and cut into equal shards, `shards_per_client` to each client;
      one each goes in order, several are dealt at random.
    - "dirichlet": equal parts, each client's label mix drawn from Dirichlet(alpha, ..., alpha).
      Smaller alpha, fewer labels per client. A label that has run out is replaced by the others
      in the client's own proportions, so the clients served last fit their mix least well.
    - "natural": one client per owner; `clients` keeps that many owners, chosen at random.
    - "grouped": owners merged into `clients` groups, each of which is a client. An owner's group
      follows from its name and the seed alone, so that nobody moves anybody else.

    For the last two, `test` "by-client" (default) holds out about a fifth of the owners, chosen by
    name: all their records are the test split, and nobody else's. With "records" it is the source's
    own, in which clients may have records. The result has the owner of each (`test_owners`).

    Equal parts differ by at most one record. The result depends on the arguments alone.
    """
    if kind not in KINDS:
        raise BadInput(f"partition {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if alpha is not None and kind != "dirichlet":
        raise BadInput(f"alpha {alpha} has no effect on partition {kind!r}: leave it out")
    if shards_per_client != 1 and kind != "shards":
        raise BadInput(
            f"shards_per_client {shards_per_client} has no effect on partition {kind!r}: "
            "leave it out"
        )
    if test not in (None, *TESTS):
        raise BadInput(f"test is {test!r}: use one of {', '.join(TESTS)}")
    if test is not None and kind not in OWNED:
        raise BadInput(f"test {test!r} has no effect on partition {kind!r}: leave it out")
    random = _generator(seed)
    if kind in OWNED:
        owners = _owners(records, hold_out=test != "records")
        if kind == "natural":
            return _natural(records, owners, clients, random)
        return _grouped(records, owners, clients, seed)
    sizes = _equal_sizes(len(records.y), clients)
    match kind:
        case "iid":
            order = random.permutation(len(records.y))
        case "shards":
            order, sizes = _shards(records, len(sizes), shards_per_client, random)
        case _:
            order = _dirichlet(records, sizes, alpha, random)
    data = _federate(records, order, sizes)
    if records.owners is None:
        return data
    remark = (
        "records of one owner are dealt to several clients: a claim per client is not about an "
        "owner"
    )
    return replace(data, remarks=(*data.remarks, remark))


def resampled(records: Records, count: int, seed: int) -> Records:
    """`count` training records drawn with replacement.

    The test records stay as they are. The same record may then be several clients' own: a claim
    about a client is about one of them.
    """
    if count < 1:
        raise BadInput(f"resample is {count}: at least one record is needed")
    most = _MOST_BYTES // (sum(x[:1].nbytes for x in values_of(records.x)) + 16)
    if count > most:
        raise BadInput(f"resample is {count}: at most {most} records of this size are possible")
    rows = _generator(seed, _DRAWN).integers(len(records.y), size=count)
    owners, lines = (None if of is None else of[rows] for of in (records.owners, records.lines))
    return replace(records, x=taken(records.x, rows), y=records.y[rows], owners=owners, lines=lines)


def shortened(data: FederatedData, most: int, seed: int) -> FederatedData:
    """The same clients, each with at most `most` of its records, chosen at random."""
    if most < 1:
        raise BadInput(f"most_records is {most}: at least one record is needed")
    random = _generator(seed, _KEPT)
    kept = [
        first + np.sort(random.permutation(size)[:most])
        for first, size in zip(data.offsets, data.sizes, strict=False)
    ]
    rows = np.concatenate(kept)
    offsets = np.cumsum([0, *map(len, kept)], dtype=np.int64)
    return replace(data, x=taken(data.x, rows), y=data.y[rows], offsets=offsets)


def _generator(seed: int, *purpose: int) -> np.random.Generator:
    if seed < 0:
        raise BadInput(f"seed {seed} is negative: use 0 or more")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _STREAM, *purpose))))


def _equal_sizes(records: int, clients: int | None) -> Rows:
    """How many records each client gets, differing by at most one."""
    if clients is None or clients < 1:
        raise BadInput(f"clients is {clients}: give a number from 1 to {records}")
    if clients > records:
        raise BadInput(f"{clients} clients for {records} training records: use fewer clients")
    sizes = np.full(clients, records // clients, dtype=np.intp)
    sizes[: records % clients] += 1
    return sizes


def _shards(
    records: Records, clients: int, shards_per_client: int, random: np.random.Generator
) -> tuple[Rows, Rows]:
    if shards_per_client < 1:
        raise BadInput(f"shards_per_client is {shards_per_client}: use 1 or more")
    count = clients * shards_per_client
    if count > len(records.y):
        raise BadInput(
            f"{count} shards ({clients} clients x {shards_per_client}) for {len(records.y)} "
            "training records: use fewer"
        )
    _check_one_target(records, "shards")
    order = np.argsort(records.y, kind="stable")
    sizes = _equal_sizes(len(order), count)
    if shards_per_client == 1:
        return order, sizes
    shards = np.split(order, np.cumsum(sizes)[:-1])
    dealt = random.permutation(count)
    return (
        np.concatenate([shards[shard] for shard in dealt]),
        sizes[dealt].reshape(clients, shards_per_client).sum(axis=1),
    )


def _check_one_target(records: Records, kind: str) -> None:
    """Refuse to sort records by more than one label or number each."""
    if records.y.ndim > 1:
        raise BadInput(
            f"{records.name} has targets of shape {records.y.shape[1:]}, which partition {kind!r} "
            "cannot sort by: use iid"
        )


def _dirichlet(
    records: Records, sizes: Rows, alpha: float | None, random: np.random.Generator
) -> Rows:
    if not records.classes:
        raise BadInput(
            f"{records.name} has no labels, so no dirichlet partition: use shards, which sorts by "
            "the number to be predicted"
        )
    _check_one_target(records, "dirichlet")
    if alpha is None or not (alpha > 0 and math.isfinite(alpha)):
        raise BadInput(f"alpha is {alpha}: a dirichlet partition needs a number above 0")
    shuffled = random.permutation(len(records.y))
    by_label = shuffled[np.argsort(records.y[shuffled], kind="stable")]
    left = np.bincount(records.y, minlength=records.classes)
    start = np.cumsum(left) - left
    order: list[Rows] = []
    for size in sizes:
        mix = random.dirichlet(np.full(records.classes, alpha))
        taken = _take(int(size), mix, left, random)
        for label in np.flatnonzero(taken):
            order.append(by_label[start[label] : start[label] + taken[label]])
        start += taken
        left -= taken
    return np.concatenate(order)


def _take(size: int, mix: npt.NDArray[np.float64], left: Rows, random: np.random.Generator) -> Rows:
    """How many records of each label make up `size`, following `mix` as far as `left` allows."""
    taken = np.zeros_like(left)
    while (missing := size - int(taken.sum())) > 0:
        weights = np.where(left > taken, mix, 0.0)
        if not weights.sum() > 0:
            weights = (left - taken).astype(np.float64)
        taken = np.minimum(taken + random.multinomial(missing, weights / weights.sum()), left)
    return taken


@dataclass(frozen=True, eq=False)
class _Owners:
    """The owner of each record, and which owners are clients and which are held out.

    Nobody is, None, if the test split is the source's own.
    """

    of: Rows
    present: Rows
    held: Rows | None
    names: npt.NDArray[np.str_]


def _owners(records: Records, *, hold_out: bool) -> _Owners:
    if records.owners is None or records.owner_names is None:
        raise BadInput(
            f"{records.name} has no natural clients (femnist has, its writers): "
            "use another partition"
        )
    of, names = records.owners, records.owner_names
    everyone = np.unique(of)
    if not hold_out:
        return _Owners(of, everyone, None, names)
    held = choose_held_out(everyone, names)
    present = np.setdiff1d(everyone, held)
    if len(present) == 0:
        raise BadInput(
            f"{records.name} has one owner, and holding somebody out for testing leaves no client: "
            "use data.test = 'records'"
        )
    return _Owners(of, present, held, names)


def _natural(
    records: Records, owners: _Owners, clients: int | None, random: np.random.Generator
) -> FederatedData:
    present = owners.present
    if clients is not None:
        if not 1 <= clients <= len(present):
            held = owners.held
            kept = "" if held is None else f" beside {len(held)} held out for testing"
            raise BadInput(
                f"{clients} clients: {records.name} has {len(present)} owners{kept}, use 1 to that "
                "many"
            )
        present = np.sort(random.permutation(present)[:clients])
    client_of = np.full(len(owners.names), -1)
    client_of[present] = np.arange(len(present))
    return _of_owners(records, owners, client_of, owners.names[present])


def _grouped(records: Records, owners: _Owners, clients: int | None, seed: int) -> FederatedData:
    if clients is None or clients < 1:
        raise BadInput(f"clients is {clients}: a grouped partition needs a number of groups")
    client_of = np.full(len(owners.names), -1)
    for owner in owners.present.tolist():
        client_of[owner] = _group(str(owners.names[owner]), seed, clients)
    taken = len(np.unique(client_of[owners.present]))
    if taken < clients:
        raise BadInput(
            f"{clients - taken} of {clients} clients have none of {len(owners.present)} owners: "
            "use fewer clients"
        )
    data = _of_owners(records, owners, client_of, None)
    # Whoever joins or leaves a group replaces it by another one: out with the old, in with the new.
    remark = (
        f"clients are {clients} groups of owners, merged at random: a claim per client is about a "
        "whole group; one owner's records in it replace what the client sends, which has a larger "
        "epsilon unless neighbours replace clients"
    )
    return replace(data, remarks=(*data.remarks, remark))


def _group(name: str, seed: int, clients: int) -> int:
    """A number in 0 .. clients - 1 that follows from a name and a seed."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % clients


def _of_owners(
    records: Records, owners: _Owners, client_of: Rows, names: npt.NDArray[np.str_] | None
) -> FederatedData:
    """Clients with the records of their owners. `client_of` is -1 for owners of no client."""
    theirs: Rows = client_of[owners.of]
    order = np.argsort(theirs, kind="stable")
    order = order[theirs[order] >= 0]
    sizes = np.bincount(theirs[order])
    data = _federate(records, order, sizes, names, client_of)
    return data if owners.held is None else _tested_on(data, records, owners.of, owners.held)


def _tested_on(data: FederatedData, records: Records, of: Rows, held: Rows) -> FederatedData:
    """The same clients with the records of held-out owners as the test split."""
    rows = np.isin(of, held)
    x, y, whose = [taken(records.x, rows)], [records.y[rows]], [of[rows]]
    if records.test_owners is not None:
        more = np.isin(records.test_owners, held)
        x, y = [*x, taken(records.test_x, more)], [*y, records.test_y[more]]
        whose.append(records.test_owners[more])
    who = np.concatenate(whose)
    return replace(
        data,
        test_x=join_inputs(x, np.concatenate),
        test_y=np.concatenate(y),
        test_owners=np.full(len(who), PUBLIC) if records.public_test else held_out_number(who),
    )


def _federate(
    records: Records,
    order: Rows,
    sizes: Rows,
    names: npt.NDArray[np.str_] | None = None,
    client_of: Rows | None = None,
) -> FederatedData:
    """The records in `order`, cut into clients. `client_of` has the client of each owner."""
    return FederatedData(
        x=taken(records.x, order),
        y=records.y[order],
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        test_x=records.test_x,
        test_y=records.test_y,
        classes=records.classes,
        names=names,
        test_owners=_test_owners(records, order, sizes, client_of),
        fitted=records.fitted,
        fitted_on_test=records.fitted_on_test,
        remarks=records.remarks,
        schema=records.schema,
    )


def _test_owners(
    records: Records, order: Rows, sizes: Rows, client_of: Rows | None
) -> npt.NDArray[np.int64]:
    """The owner of every test record, by line and then by name.

    | test record | its owner |
    |---|---|
    | the same line of the same table is a client's | that client |
    | another line of that table | its owner, or one of its own where owners are not known |
    | of a client by its name | that client |
    | of anybody else, in a published split | public |
    | of anybody else, by name | that owner, held out |
    | of a table that names no owners | public |
    | of any other source that has owners and does not name them | the first client |
    """
    found = np.full(len(records.test_y), PUBLIC, dtype=np.int64)
    if records.test_owners is None and client_of is not None and records.lines is None:
        found[:] = 0
    if records.test_owners is not None and client_of is not None:
        at = client_of[records.test_owners]
        others = PUBLIC if records.public_test else held_out_number(records.test_owners)
        found = np.where(at >= 0, at, others).astype(np.int64)
    if records.lines is None or records.test_lines is None:
        return found
    lines, clients = records.lines[order], np.repeat(np.arange(len(sizes)), sizes)
    ranked = np.argsort(lines)
    place = np.minimum(np.searchsorted(lines[ranked], records.test_lines), len(lines) - 1)
    trained = lines[ranked][place] == records.test_lines
    unknown = (found == PUBLIC) & (records.test_lines >= 0) & (not records.public_test)
    found = np.where(unknown, held_out_number(records.test_lines), found)
    return np.where(trained, clients[ranked][place], found).astype(np.int64)
