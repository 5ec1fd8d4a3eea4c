"""Whose a record is: owners of test records, who is held out for testing, and copies of records.

A test record has an owner, as a number: k >= 0 is client k, PUBLIC is nobody, and any other
negative number is one owner who was held out of the clients (`held_out_number`). Owners follow from
where rows come from, and no caller's word is taken: rows of a file are known by file and line, rows
of arrays by their address in memory. Copies have neither, so contents are compared as well: test
records that equal clients' records more often than these equal each other are refused.

Which owners and rows are held out or dealt somewhere is one rule (`choose_held_out`, `row_words`,
docs/proofs/choices.md): it follows from the owner's name or the row's own entries, and a public
seed, never from which others there are. So neighbours by addition or removal of one record or owner
differ in that one alone. Held out is never decided by a seed.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import Words, words_at
from fedveil.base.inputs import Inputs, arrays_by_name, count
from fedveil.data.entries import forms
from fedveil.data.user_arrays import Array, Rows, pieces

Owners = npt.NDArray[np.int64]

PUBLIC = -1
"""The owner of a record that nobody's privacy depends on."""

FALSE_ALARM = 1e-6
"""How often test records that coincide with clients' by chance alone are refused, at most."""

HELD_OUT = 5  # one owner in so many

_AT_ONCE = 1 << 20  # numbers that are hashed together
_KEY = np.array([0x9E6C63D0676A9A99], dtype=np.uint64)
_STREAM = int.from_bytes(b"partition", "big")
_ROUNDING = 1e-9


def held_out_number(owner: npt.ArrayLike) -> Owners:
    """The numbers that stand for owners 0, 1, ... who are no clients: -2, -3, ...

    >>> held_out_number([0, 1]).tolist()
    [-2, -3]
    """
    return -2 - np.asarray(owner, dtype=np.int64)


def by_record(owners: Owners) -> bool:
    """Whether every held-out test record is an owner by itself. False without held-out records.

    Nobody can tell then which of them are one person's: what is said of an owner is said of a
    record.
    """
    held_out = owners[owners < PUBLIC]
    return len(held_out) > 0 and len(np.unique(held_out)) == len(held_out)


def owners_in_memory(parts: Sequence[Inputs[Array]], test: Inputs[Array]) -> Owners:
    """The owner of each test row: a client, found by the row's address in memory, or PUBLIC.

    Of several inputs by name, a row that several clients have, such as one mask for all, traces
    nobody.

    Args:
        parts: Each client's features as they were given, before any copy.
        test: The test features as they were given.
    """
    owners = np.full(count(test), PUBLIC, dtype=np.int64)
    for name, array in arrays_by_name("x", test).items():
        of_clients = [_addresses(arrays_by_name("x", part)[name]) for part in parts]
        unique = np.concatenate([np.unique(addresses) for addresses in of_clients])
        every, times = np.unique(unique, return_counts=True)
        common = every[times > 1] if isinstance(test, dict) else every[:0]
        of_test = _addresses(array)
        for client, addresses in enumerate(of_clients):
            owners[np.isin(of_test, np.setdiff1d(addresses, common))] = client
    return owners


def _addresses(array: Array) -> npt.NDArray[np.int64]:
    """The address in memory at which each row begins, [rows]."""
    start = int(array.__array_interface__["data"][0])
    return start + array.strides[0] * np.arange(len(array), dtype=np.int64)


def owners_by_name(
    owners: Sequence[str],
    clients: Sequence[object],
    records: int,
    persons: Mapping[str, int] | None = None,
) -> Owners:
    """The number of each test record's owner: k for clients[k], a number below -1 for others.

    A person who has records at client k is k too. Other owners have one number per name. Names are
    compared as texts.
    Raises BadInput unless there is one name for each of `records` test records.

    Args:
        owners: The name of each test record's owner.
        clients: Names of clients.
        records: The number of test records.
        persons: A client of each person with records at clients. None: nobody is known.
    """
    if isinstance(owners, str) or len(owners) != records:
        raise BadInput(
            f"test_owners is {shown(owners)}: one name for each of {records} test records is needed"
        )
    distinct = dict.fromkeys(map(str, owners))
    numbers = {name: int(held_out_number(k)) for k, name in enumerate(distinct)}
    numbers |= persons or {}
    numbers |= {str(name): k for k, name in enumerate(clients)}
    return np.array([numbers[str(name)] for name in owners], dtype=np.int64)


def digests(x: Inputs[Array], y: Array, like: tuple[Inputs[Array], Array] | None = None) -> Array:
    """A 64-bit digest of each record's features and target, [records].

    Equal records have equal ones. To compare with the records `like` (x, y), call it on both sides:
    numbers are taken in the coarser type of both.
    """
    sums = np.zeros(len(y), dtype=np.uint64)
    other_x, other_y = like or (x, y)
    others = {**arrays_by_name("x", other_x), "y": other_y}
    for place, (name, array) in enumerate(sorted({**arrays_by_name("x", x), "y": y}.items())):
        real = [each.dtype for each in (array, others[name]) if each.dtype.kind == "f"]
        dtype = min(real, key=lambda kind: kind.itemsize) if real else np.dtype(np.int64)
        key = words_at(_KEY, np.array([place]))
        for start, piece in pieces(array, _AT_ONCE):
            flat = np.ascontiguousarray(piece, dtype=dtype).reshape(len(piece), -1)
            if dtype.kind == "f":
                flat = flat + dtype.type(0)  # -0.0 is 0.0
            padding = -flat.shape[1] % (8 // dtype.itemsize)
            words = (np.pad(flat, ((0, 0), (0, padding))) if padding else flat).view(np.uint64)
            # a weighted sum of each row's words, with weights that no data were made for
            weights = words_at(key, np.arange(words.shape[1])) | np.uint64(1)
            sums[start : start + len(piece)] += words @ weights
    return sums


def check_copies(x: Inputs[Array], y: Array, test_x: Inputs[Array], test_y: Array) -> None:
    """Raise BadInput if test records are copies of clients' records.

    Records may be equal by chance: two of the clients', or a client's and a test record. Of the
    clients' records a share p occurs more than once. More test records than Binomial(n, 2 p)
    allows, at a false-alarm rate of 1e-6, are copies, if the same holds where equal records count
    once: then neither records that everybody has nor one that is repeated is taken for a copy.
    Nothing is dropped: which record was would tell who is a client.

    | edge | behaviour |
    |---|---|
    | no test records, or no records of clients here | fine |
    | a table of few columns, where every record occurs many times | fine |
    | all test records are clients' | BadInput, from a few records on |
    """
    if not len(test_y) or not len(y):
        return
    of_clients = digests(x, y, like=(test_x, test_y))
    of_test = digests(test_x, test_y, like=(x, y))
    distinct, places, times = np.unique(of_clients, return_inverse=True, return_counts=True)
    several = times > 1
    equal = np.isin(of_test, distinct)
    once = np.isin(np.unique(of_test), distinct)
    # the share of clients' records that occur more than once gives the chance of an equal record
    pairs = ((equal, several[places]), (once, several))
    chances = [min(1.0, 2 * (int(shared.sum()) + 1) / (len(shared) + 2)) for _, shared in pairs]
    counts = [int(found.sum()) for found, _ in pairs]
    if all(
        count > 0 and bdtrc(count - 1, len(found), chance) < FALSE_ALARM
        for (found, _), count, chance in zip(pairs, counts, chances, strict=True)
    ):
        raise BadInput(
            f"{equal.sum():,} of {len(of_test):,} test records equal clients' records, far more "
            "than chance explains: they would be measured in the clear as nobody's; "
            "hold owners out (test = 'by-client'), name the test records' owners, or leave the "
            "test split out"
        )


def holdout(records: int) -> tuple[Rows, Rows]:
    """(training rows, test rows) of `records` records: a fixed fifth for testing, the same always.

    It is for published data sets alone, whose records and number are public: a fixed split of a
    benchmark's records comes before there are neighbours. Raises BadInput below two records.
    """
    if records < 2:
        raise BadInput(f"{records} records cannot be split: training and test need one each")
    seed = np.random.SeedSequence((0, _STREAM))
    rows = np.random.Generator(np.random.Philox(seed)).permutation(records)
    cut = max(1, int(records * (1 - 1 / HELD_OUT) + _ROUNDING))
    return rows[:cut], rows[cut:]


def choose_held_out(owners: Rows, names: npt.NDArray[np.str_], share: float = 1 / HELD_OUT) -> Rows:
    """The owners among `owners` who are held out: about this share.

    `names[k]` is owner k's name.

    Guarantee: whether an owner is held out follows from the owner's name alone, whatever the seed
    and whoever else is there. Whoever is held out of one run is held out of all, so that a test
    split is never another run's clients. Raises BadInput if nobody is held out, which owners who
    train have no part in.
    """
    chosen = [owner for owner in owners.tolist() if _place_of(str(names[owner])) < share]
    if not chosen:
        raise BadInput(
            f"no name falls into the share of {share:.3g} that is held out for testing: use "
            "another test split (data.test), or none"
        )
    return np.array(chosen, dtype=np.intp)


def _place_of(name: str) -> float:
    """The place of a name in [0, 1), by its digest."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def row_words(columns: Sequence[Array]) -> Words:
    """A word for each row, which says where the row belongs: `places` makes a place of it.

    Guarantee: adding or removing one row changes the word of no other row, up to the order of equal
    rows. The word is a digest of the row's own entries and of how many equal rows come before it,
    so that rows that occur many times have many places.

    | edge | behaviour |
    |---|---|
    | equal rows | words 0, 1, ... of this row: one row less is the last word less |
    | entries that are written differently, such as 0.5 and 0.50 | rows that differ, of one word |

    Args:
        columns: The columns whose entries make the record, its owner and its person.
    """
    words, before = [], Counter[tuple[object, ...]]()
    for row in zip(*map(forms, columns), strict=True):
        exact = tuple(form for form, _ in row)
        text = repr((before[exact], *(form for _, form in row)))
        words.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
        before[exact] += 1
    return np.array(words, dtype=np.uint64)


def places(words: Words, purpose: str) -> npt.NDArray[np.float64]:
    """Places in [0, 1) that follow from the words of rows and a purpose, a text with a public seed.

    The places of one row for two purposes are as good as independent.
    """
    key = np.frombuffer(hashlib.sha256(purpose.encode()).digest()[:8], dtype=np.uint64)
    mixed = words_at(words_at(words, np.array([0])) ^ key, np.array([0]))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
