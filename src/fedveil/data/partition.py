"""`Records` of a data set, and how they are divided among clients."""

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput
from fedveil.base.identity import Words
from fedveil.base.inputs import Inputs, join_inputs, taken, values_of
from fedveil.data.federated import FederatedData
from fedveil.data.persons import numbered
from fedveil.data.provenance import PUBLIC, choose_held_out, held_out_number, holdout, places
from fedveil.data.schema import TableSchema
from fedveil.data.user_arrays import Array, Rows, records_text

KINDS = ("iid", "shards", "dirichlet", "natural", "grouped")
OWNED = ("natural", "grouped")
"""The kinds in which all records of one owner are one client's."""

TESTS = ("by-client", "records")

_SHARED = (
    *("test_x", "test_y", "classes", "fitted", "fitted_on_test", "remarks", "schema"),
    "test_persons",
)
_STREAM = int.from_bytes(b"partition", "big")
_RESAMPLING, _SHORTENING = 1, 2
_MOST_BYTES = 1 << 30  # of records drawn with replacement


@dataclass(frozen=True, eq=False)
class Records:
    """Training and test records of one data set, as its loader returns them.

    Attributes:
        name: The data set's name, for messages.
        x, test_x: float32, images as [N, channels, height, width], or several inputs by name.
        y, test_y: int64 labels, or float32 when `classes` is 0 (see `base.inputs.Target`).
        classes: The number of labels.
        record_owners: The place in `owner_names` of the person each training record came from. None
            if the data set has no natural clients.
        owner_names: Names of owners.
        test_owners: As `record_owners`, of each test record.
        row_numbers: The row of a table that each training record is.
        record_persons: The person of each training record, as a number. None if nobody knows.
        test_persons: The number of each test record's person if that person has no training
            records, otherwise -1. None if nobody knows.
        row_words: A word for each training record, by which it is dealt to a client (`places`).
            None for published records, which are dealt by their number.
        test_row_numbers: That of each test record in the same table, -1 if it is not from there.
        public_test: Whether the source has published the test split.
        fitted: Names what was fitted on clients' records in the clear, "" if nothing was.
        fitted_on_test: Names what was fitted on the test records.
        remarks: Further assumptions of claims about these records.
        schema: How the rows of a table became records.
    """

    name: str
    x: Inputs[Array]
    y: Array
    test_x: Inputs[Array]
    test_y: Array
    classes: int
    record_owners: Rows | None = None
    owner_names: Array | None = None
    test_owners: Rows | None = None
    row_numbers: Rows | None = None
    row_words: Words | None = None
    test_row_numbers: Rows | None = None
    public_test: bool = False
    fitted: str = ""
    fitted_on_test: str = ""
    remarks: tuple[str, ...] = ()
    schema: TableSchema | None = None
    record_persons: Rows | None = None
    test_persons: Rows | None = None

    @classmethod
    def with_holdout(cls, name: str, x: Array, y: Array, **options: Any) -> "Records":
        """The records x [N, ...] and y [N], with a fixed fifth of them as the test split.

        Features become float32. `options` are further fields.
        """
        train, test = holdout(len(x))
        train_x, test_x = (x[rows].astype(np.float32, copy=False) for rows in (train, test))
        return cls(name, train_x, y[train], test_x, y[test], **options)

    def __repr__(self) -> str:
        """Name, numbers of records, their shape and the target."""
        return f"Records({self.name}, {records_text(self.x, self.test_x, self.y, self.classes)})"


def few_records_assumption(least: int) -> str:
    """The assumption about clients that were left out because they have fewer than `least` records.

    How many there were is not stated: it is computed from their records.
    """
    return f"which clients have at least {least} records is public: the others were left out"


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
    """Divide the training records among clients.

    By `kind`, records are dealt, whoever owns them:

    - "iid": a random permutation cut into equal parts.
    - "shards": sorted by target and cut into equal shards, `shards_per_client` to each client;
      one each goes in order, several are dealt at random.
    - "dirichlet": equal parts, each client's label mix drawn from Dirichlet(alpha, ..., alpha).
      Smaller alpha, fewer labels per client. A label that has run out is replaced by the others
      in the client's own proportions, so the clients served last fit their mix least well.

    Equal parts differ by at most one record. Parts are equal for published records only: these are
    dealt before there are neighbours, and a claim is about the clients that were dealt. The rows of
    a user's table, which have `row_words`, are dealt one by one instead (`_by_row`).

    Or an owner's records stay together:

    - "natural": one client per owner; `clients` keeps that many, chosen at random, None all.
    - "grouped": owners merged into `clients` groups, each of which is a client. An owner's group
      follows from its name and the seed alone, so that nobody moves anybody else.

    For these two, `test` "by-client" (default) holds out about a fifth of the owners, the same with
    every seed: all their records are the test split, and nobody else's. With "records" the test
    split is the source's own, in which clients may have records. The result has the owner of each
    test record (`test_owners`). For the other kinds the test split is the source's own.

    The result depends on the arguments alone.

    | edge | behaviour |
    |---|---|
    | an option without effect on the kind, or any other `test`, a share among them | BadInput |
    | `clients` is None for another kind than "natural" | BadInput |
    | more clients than records or owners, or a client that gets nothing by chance | BadInput |
    | "natural" or "grouped" without owners, or without an owner to hold out | BadInput |
    | "dirichlet" without labels or a positive alpha, "shards" of a user's table | BadInput |
    | a negative seed | BadInput |
    """
    if kind not in KINDS:
        raise BadInput(f"partition {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if test not in (None, *TESTS):
        raise BadInput(f"test is {test!r}: use one of {', '.join(TESTS)}")
    for option, given, kinds in (
        (f"alpha {alpha}", alpha is not None, ("dirichlet",)),
        (f"shards_per_client {shards_per_client}", shards_per_client != 1, ("shards",)),
        (f"test {test!r}", test is not None, OWNED),
    ):
        if given and kind not in kinds:
            raise BadInput(f"{option} has no effect on partition {kind!r}: omit it")
    random = _generator(seed)
    if kind in OWNED:
        return _by_owner(records, kind, clients, seed, random, hold_out=test != "records")
    sizes = _equal_sizes(len(records.y), clients)
    if kind != "iid" and records.y.ndim > 1:
        raise BadInput(
            f"{records.name} has targets of shape {records.y.shape[1:]}, which partition {kind!r} "
            "cannot sort by: use iid"
        )
    if records.row_words is not None:
        return _by_row(records, kind, len(sizes), seed, alpha)
    match kind:
        case "iid":
            order = random.permutation(len(records.y))
        case "shards":
            order, sizes = _shards(records, len(sizes), shards_per_client, random)
        case _:
            order = _dirichlet(records, sizes, alpha, random)
    return _federate(_with_dealt_remarks(records), order, sizes)


def resample(records: Records, count: int, seed: int) -> Records:
    """The records with `count` training records, drawn with replacement.

    The test records stay as they are. The same record may then be several clients' own: a claim
    about a client is about one of them, and claims about records are refused. What is drawn is
    dealt by its number. Raises BadInput below 1, and for more than 1 GiB of
    records.
    """
    if count < 1:
        raise BadInput(f"resample is {count}: at least one record is needed")
    most = _MOST_BYTES // (sum(x[:1].nbytes for x in values_of(records.x)) + 16)
    if count > most:
        raise BadInput(f"resample is {count}: at most {most} records of this size are possible")
    rows = _generator(seed, _RESAMPLING).integers(len(records.y), size=count)
    names = ("y", "record_owners", "row_numbers", "record_persons")
    arrays = {name: getattr(records, name) for name in names}
    drawn = {name: array[rows] for name, array in arrays.items() if array is not None}
    return replace(records, x=taken(records.x, rows), row_words=None, **drawn)


def shorten_clients(data: FederatedData, most: int, seed: int) -> FederatedData:
    """The same clients, each with at most `most` of its records, chosen at random.

    Records keep their order. `most` is public from then on (`FederatedData.most_records`). Raises
    BadInput if `most` is below 1.

    Guarantee: which of a client's records stay depends on the seed, the client's name (its number
    if it has none) and how many it has, and on no other client. So it suits claims about clients,
    and claims about records whose number is public. Where that number is private, one record more
    changes which others of its client stay: such plans refuse the data
    (`training.agreement.check_agreement`).
    """
    if most < 1:
        raise BadInput(f"most_records is {most}: at least one record is needed")
    own = range(data.clients) if data.names is None else [_word(seed, str(n)) for n in data.names]
    chosen = [
        first + np.sort(_generator(seed, _SHORTENING, number).permutation(size)[:most])
        for number, first, size in zip(own, data.offsets, data.sizes, strict=False)
    ]
    short = data.of_records(np.concatenate(chosen), np.array([len(rows) for rows in chosen]))
    return replace(short, most_records=most)


def _generator(seed: int, *purpose: int) -> np.random.Generator:
    """A random generator that follows from the seed and a purpose. Raises BadInput below seed 0."""
    if seed < 0:
        raise BadInput(f"seed {seed} is negative: use 0 or more")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _STREAM, *purpose))))


def _equal_sizes(records: int, clients: int | None) -> Rows:
    """The number of records of each client, [clients]. Sizes differ by at most one.

    Raises BadInput unless 1 <= clients <= records.
    """
    if clients is None or clients < 1:
        raise BadInput(f"clients is {clients}: give a number from 1 to {records}")
    if clients > records:
        raise BadInput(f"{clients} clients for {records} training records: use fewer clients")
    sizes = np.full(clients, records // clients, dtype=np.intp)
    sizes[: records % clients] += 1
    return sizes


def _by_row(
    records: Records, kind: str, clients: int, seed: int, alpha: float | None
) -> FederatedData:
    """The data with the rows of a user's table dealt to `clients`, each by itself.

    The arguments are those of `partition`.

    Guarantee: a row's client follows from the seed, `clients`, and the row's own word and label.
    Adding or removing one row moves no other. How many rows a client gets is random, therefore.

    | edge | behaviour |
    |---|---|
    | "shards" | BadInput: which shard a row is in follows from how many rows there are |
    | as many clients as rows | each row is a client: with one row less, the same is refused |
    | a client gets no row | BadInput |
    """
    if kind == "shards":
        raise BadInput(
            f"{records.name}: partition 'shards' goes by how many rows there are, so that one row "
            "more would move others: use iid, or dirichlet"
        )
    assert records.row_words is not None
    spots = places(records.row_words, f"{kind} {seed}")
    if kind == "dirichlet":
        mixes = _label_mixes(records, clients, alpha, _generator(seed))
        ends = np.cumsum(mixes / mixes.sum(axis=0), axis=0)
        chosen = np.zeros(len(spots), dtype=np.intp)
        for label in range(records.classes):
            rows = records.y == label
            chosen[rows] = np.searchsorted(ends[:, label], spots[rows], side="right")
    else:
        chosen = (spots * clients).astype(np.intp)
        if clients == len(spots):
            chosen = np.arange(clients)
    chosen = np.minimum(chosen, clients - 1)
    sizes = np.bincount(chosen, minlength=clients)
    if not sizes.all():
        raise BadInput(
            f"clients is {clients} and {(sizes == 0).sum()} of them get no row of {records.name}, "
            "whose rows are dealt one by one: use fewer clients"
        )
    return _federate(_with_dealt_remarks(records), np.argsort(chosen, kind="stable"), sizes)


def _with_dealt_remarks(records: Records) -> Records:
    """The records with the remarks of claims about records that are dealt, whoever owns them."""
    remarks = list(records.remarks)
    if records.record_owners is not None:
        remark = "records of one owner are dealt to several clients"
        remarks.append(f"{remark}: a claim per client is not about an owner")
    if records.record_persons is not None:
        remarks.append(
            "records of one person are dealt to several clients, and count as several persons"
        )
    return replace(records, remarks=tuple(remarks))


def _shards(
    records: Records, clients: int, shards_per_client: int, random: np.random.Generator
) -> tuple[Rows, Rows]:
    """(row numbers in the order of clients, records per client) of shards sorted by target.

    Raises BadInput for more shards than records.
    """
    if shards_per_client < 1:
        raise BadInput(f"shards_per_client is {shards_per_client}: use 1 or more")
    count = clients * shards_per_client
    if count > len(records.y):
        raise BadInput(
            f"{count} shards ({clients} clients x {shards_per_client}) for {len(records.y)} "
            "training records: use fewer"
        )
    order = np.argsort(records.y, kind="stable")
    sizes = _equal_sizes(len(order), count)
    if shards_per_client == 1:
        return order, sizes
    shards = np.split(order, np.cumsum(sizes)[:-1])
    dealt = random.permutation(count)
    sizes = sizes[dealt].reshape(clients, shards_per_client).sum(axis=1)
    return np.concatenate([shards[shard] for shard in dealt]), sizes


def _dirichlet(
    records: Records, sizes: Rows, alpha: float | None, random: np.random.Generator
) -> Rows:
    """Row numbers in the order of clients, whose label mixes are drawn from Dirichlet(alpha, ...).

    `sizes` are the records of each client. Raises BadInput without labels or a positive alpha.
    """
    alpha = _checked_alpha(records, alpha)
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


def _label_mixes(
    records: Records, clients: int, alpha: float | None, random: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Each client's label mix, drawn from Dirichlet(alpha, ..., alpha), [clients, labels].

    A label that is in nobody's mix is in everybody's. Raises BadInput without labels or a positive
    alpha.
    """
    alpha = _checked_alpha(records, alpha)
    mixes: npt.NDArray[np.float64] = random.dirichlet(np.full(records.classes, alpha), clients)
    mixes[:, mixes.sum(axis=0) == 0] = 1.0
    return mixes


def _checked_alpha(records: Records, alpha: float | None) -> float:
    """The parameter of a dirichlet partition. Raises BadInput without labels or a positive one."""
    if not records.classes:
        other = "shards, which sorts by the number to be predicted"
        raise BadInput(
            f"{records.name} has no labels, so no dirichlet partition: use "
            f"{other if records.row_words is None else 'iid'}"
        )
    if alpha is None or not (alpha > 0 and math.isfinite(alpha)):
        raise BadInput(f"alpha is {alpha}: a dirichlet partition needs a number above 0")
    return alpha


def _take(size: int, mix: npt.NDArray[np.float64], left: Rows, random: np.random.Generator) -> Rows:
    """How many records of each label a client gets, [labels].

    Args:
        size: Records of the client in all.
        mix: The share of each label in the client's mix.
        left: Records of each label that are left. A label that has run out is replaced by others.
        random: Draws the numbers.
    """
    taken = np.zeros_like(left)
    while (missing := size - int(taken.sum())) > 0:
        weights = np.where(left > taken, mix, 0.0)
        if not weights.sum() > 0:
            weights = (left - taken).astype(np.float64)
        taken = np.minimum(taken + random.multinomial(missing, weights / weights.sum()), left)
    return taken


def _by_owner(
    records: Records,
    kind: str,
    clients: int | None,
    seed: int,
    random: np.random.Generator,
    *,
    hold_out: bool,
) -> FederatedData:
    """The data with one client per owner ("natural") or per group of owners ("grouped").

    With `hold_out`, some owners are no clients, and their records are the test split. Raises
    BadInput without owners, or if no client is left. The other arguments are those of `partition`.
    """
    owners, names = records.record_owners, records.owner_names
    if owners is None or names is None:
        raise BadInput(
            f"{records.name} does not say whose its records are (femnist does: its writers'): use "
            "a partition other than 'natural' and 'grouped'"
        )
    everyone = np.unique(owners)
    held_out = choose_held_out(everyone, names) if hold_out else everyone[:0]
    present = np.setdiff1d(everyone, held_out)
    if len(present) == 0:
        raise BadInput(
            f"{records.name} has one owner, and holding somebody out for testing leaves no client: "
            "use data.test = 'records'"
        )
    client_of = np.full(len(names), -1)  # the client of each owner, -1 if none
    if kind == "natural":
        if clients is not None:
            if not 1 <= clients <= len(present):
                others = f" beside {len(held_out)} held out for testing" if hold_out else ""
                raise BadInput(
                    f"{clients} clients: {records.name} has {len(present)} owners{others}, use 1 "
                    "to that many"
                )
            if records.row_numbers is None:
                present = np.sort(random.permutation(present)[:clients])
            else:  # a user's: one owner more takes the place of one at most
                ranked = sorted(present, key=lambda owner: _word(seed, str(names[owner])))
                present = np.sort(ranked[:clients])
        client_of[present] = np.arange(len(present))
        client_names, remarks = names[present], records.remarks
    else:
        if clients is None or clients < 1:
            raise BadInput(f"clients is {clients}: a grouped partition needs a number of groups")
        for owner in present.tolist():
            client_of[owner] = _word(seed, str(names[owner])) % clients
        used = len(np.unique(client_of[present]))
        if used < clients:
            raise BadInput(
                f"{clients - used} of {clients} clients have none of {len(present)} owners: "
                "use fewer clients"
            )
        # Whoever joins or leaves a group replaces it by another: out with the old, in with the new.
        remark = (
            f"clients are {clients} groups of owners, merged at random: a claim per client is "
            "about a whole group; one owner's records in it replace what the client sends, which "
            "has a larger epsilon unless neighbours replace clients"
        )
        client_names, remarks = None, (*records.remarks, remark)
    clients_of_rows: Rows = client_of[owners]
    order = np.argsort(clients_of_rows, kind="stable")
    order = order[clients_of_rows[order] >= 0]
    sizes = np.bincount(clients_of_rows[order])
    data = _federate(replace(records, remarks=remarks), order, sizes, client_names, client_of)
    return _with_held_out_test(data, records, owners, held_out) if hold_out else data


def _word(seed: int, name: str) -> int:
    """A number that follows from a seed and an owner's name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big")


def _with_held_out_test(
    data: FederatedData, records: Records, owners: Rows, held_out: Rows
) -> FederatedData:
    """The same clients, with all records of held-out owners as the test split.

    Args:
        data: The clients.
        records: The records that they come from.
        owners: The owner of each training record.
        held_out: The owners that are held out.
    """
    parts = [(records.x, records.y, owners)]
    if records.test_owners is not None:
        parts.append((records.test_x, records.test_y, records.test_owners))
    rows = [np.isin(part_owners, held_out) for _, _, part_owners in parts]
    chosen = [(taken(x, r), y[r], o[r]) for (x, y, o), r in zip(parts, rows, strict=True)]
    who = np.concatenate([o for _, _, o in chosen])
    return replace(
        data,
        test_x=join_inputs([x for x, _, _ in chosen], np.concatenate),
        test_y=np.concatenate([y for _, y, _ in chosen]),
        test_owners=np.full(len(who), PUBLIC) if records.public_test else held_out_number(who),
        test_persons=None,
    )


def _federate(
    records: Records,
    order: Rows,
    sizes: Rows,
    names: npt.NDArray[np.str_] | None = None,
    client_of: Rows | None = None,
) -> FederatedData:
    """The records in `order`, cut into clients of these sizes, and the owner of every test record.

    Owners are found by row and then by name. `client_of` has the client of each owner, -1 for none.

    | test record | its owner |
    |---|---|
    | the same row of the same table is a client's | that client |
    | another row of that table | its owner, or one of its own where owners are not known |
    | of a client by its name | that client |
    | of anybody else, in a published split | public |
    | of anybody else, by name | that owner, held out |
    | of a table that names no owners | public |
    | of any other source that has owners and does not name them | the first client |
    """
    owners = np.full(len(records.test_y), PUBLIC, dtype=np.int64)
    if records.test_owners is None and client_of is not None and records.row_numbers is None:
        owners[:] = 0
    if records.test_owners is not None and client_of is not None:
        clients_of_test = client_of[records.test_owners]
        others = PUBLIC if records.public_test else held_out_number(records.test_owners)
        owners = np.where(clients_of_test >= 0, clients_of_test, others).astype(np.int64)
    test_numbers = records.test_row_numbers
    if records.row_numbers is not None and test_numbers is not None:
        numbers, clients = records.row_numbers[order], np.repeat(np.arange(len(sizes)), sizes)
        ranked = np.argsort(numbers)
        place = np.minimum(np.searchsorted(numbers[ranked], test_numbers), len(numbers) - 1)
        trained = numbers[ranked][place] == test_numbers
        unknown = (owners == PUBLIC) & (test_numbers >= 0) & (not records.public_test)
        owners = np.where(unknown, held_out_number(test_numbers), owners)
        owners = np.where(trained, clients[ranked][place], owners).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    persons = records.record_persons
    return FederatedData(
        x=taken(records.x, order),
        y=records.y[order],
        offsets=offsets,
        persons=None if persons is None else numbered(persons[order], offsets),
        names=names,
        test_owners=owners,
        **{name: getattr(records, name) for name in _SHARED},
    )
