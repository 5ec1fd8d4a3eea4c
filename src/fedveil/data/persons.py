"""Persons: which records of a client are one person's, and which of them count.

A person is known within one client: somebody with records at two clients is two persons.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import words_at
from fedveil.data.user_arrays import Array, Rows

Ids = npt.NDArray[np.int64]

NOT_PER_PERSON = "this claim is not per person"

_RULE = np.uint64(0x5DEECE66D2545F49)
"""The public key of the rule that says which records of a person count."""


@dataclass(frozen=True, eq=False)
class PersonIndex:
    """Where the records of each person are. Persons are counted over all clients.

    Attributes:
        order: The records, person by person, each person's in their own order. [records]
        begins: Where the records of each person begin in `order`, and their number. [people + 1]
        first: The number of each client's first person, and that of all people. [clients + 1]
    """

    order: Rows
    begins: Ids
    first: Ids

    @classmethod
    def of(cls, persons: Array, offsets: Ids) -> "PersonIndex":
        """The index of `persons` [records], as `check_persons` has them, for these clients."""
        most = np.maximum.reduceat(persons, offsets[:-1]).astype(np.int64) + 1
        first = np.concatenate([[0], np.cumsum(most)])
        of_record = np.repeat(first[:-1], np.diff(offsets)) + persons
        counts = np.bincount(of_record, minlength=int(first[-1]))
        begins = np.concatenate([[0], np.cumsum(counts)])
        return cls(np.argsort(of_record, kind="stable"), begins, first)

    @property
    def record_counts(self) -> Ids:
        """How many records each person has, [people]."""
        return np.diff(self.begins)

    @property
    def people(self) -> Ids:
        """How many persons each client has, [clients]."""
        return np.diff(self.first)

    def of_records(self, values: Array) -> Array:
        """Values of people [people, ...], for each of their records [records, ...]."""
        out = np.empty((len(self.order), *values.shape[1:]), dtype=values.dtype)
        out[self.order] = np.repeat(values, self.record_counts, axis=0)
        return out

    def positions(self, people: Ids, width: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """(records of each of `people`, which of them are real), [*people.shape, width].

        A person with fewer than `width` records has the last one repeated, which is not real.
        """
        counts = self.record_counts[people][..., None]
        which = np.arange(width)
        places = self.begins[people][..., None] + np.minimum(which, counts - 1)
        return self.order[places].astype(np.int64), which < counts

    def counted_records(self, cap: int) -> npt.NDArray[np.bool_]:
        """Mask of the records that count, [records]: of each person at most `cap`.

        Guarantee: which records of a person count follows from their order and number, and from a
        public key. No other person's records decide it.
        """
        counts = self.record_counts
        of_person = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(of_person)) - self.begins[of_person]
        words = words_at(_RULE ^ counts[of_person].astype(np.uint64), number)
        ranked = np.lexsort((words, of_person))  # each person's records by word, in its own places
        mask = np.zeros(len(of_person), dtype=bool)
        mask[self.order[ranked[number < cap]]] = True
        return mask


def numbered(people: Array, offsets: Ids) -> Ids:
    """Numbers of persons from 0 within each client, for `people` of any type, [records].

    Equal entries of one client have equal numbers, in the order of the entries.

    >>> numbered(np.array(["b", "a", "b", "b"]), np.array([0, 3, 4])).tolist()
    [1, 0, 1, 0]
    """
    names, codes = np.unique(people, return_inverse=True)
    clients = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    pairs, place = np.unique(clients * max(1, len(names)) + codes, return_inverse=True)
    first = np.searchsorted(pairs, np.arange(len(offsets) - 1) * max(1, len(names)))
    numbers: Ids = (place - first[clients]).astype(np.int64)
    return numbers


def alone(offsets: Ids) -> Ids:
    """Numbers of persons with one record each."""
    sizes = np.diff(offsets)
    return np.arange(int(sizes.sum())) - np.repeat(offsets[:-1], sizes)


def persons_of_records(
    persons: object, names: Sequence[str], sizes: Sequence[int]
) -> list[str | int]:
    """The person of each record, in the order of clients, from the ids that a user gives by client.

    Raises BadInput unless there is one text or whole number for each record.

    Args:
        persons: A dict by client name, or one list for each client in their order.
        names: The clients' names.
        sizes: Records of each client.
    """
    if isinstance(persons, Mapping):
        given = {str(name): entries for name, entries in persons.items()}
        if set(given) != set(names):
            odd = sorted(set(given) ^ set(names))[0]
            raise BadInput(f"persons and clients differ in {odd!r}: give persons of every client")
        listed: list[Any] = [given[name] for name in names]
    elif isinstance(persons, Iterable) and not isinstance(persons, str | bytes):
        listed = list(persons)
    else:
        raise BadInput(f"persons is {shown(persons)}: one list of ids for each client is needed")
    if len(listed) != len(names):
        raise BadInput(f"persons has {len(listed)} lists for {len(names)} clients: give one each")
    ids = list[str | int]()
    for name, entries, size in zip(names, listed, sizes, strict=True):
        if isinstance(entries, str | bytes) or not hasattr(entries, "__len__"):
            raise BadInput(f"persons of client {name!r} are {shown(entries)}: a list is needed")
        if len(entries) != size:
            raise BadInput(
                f"client {name!r} has {size} records and {len(entries)} persons: say of each "
                "record whose it is"
            )
        for entry in np.asarray(entries).tolist():
            if isinstance(entry, bool) or not isinstance(entry, str | int) or entry == "":
                raise BadInput(
                    f"client {name!r} has the person {shown(entry)}: texts or whole numbers are "
                    "needed"
                )
            ids.append(entry)
    return ids


def numbered_ids(ids: Sequence[str | int], offsets: Ids) -> Ids:
    """The number of each record's person (`numbered`). The text "1" and the number 1 differ."""
    return numbered(np.array([f"{type(entry).__name__} {entry}" for entry in ids]), offsets)


def check_persons(persons: object, offsets: Ids, cap: int | None) -> None:
    """Raise BadInput for numbers of persons that are not from 0 within each client without gaps.

    Also for a `cap` without persons, or a person with more records than that. None passes.
    """
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 1):
        raise BadInput(f"cap is {shown(cap)}: at least 1 record of a person has to count")
    if persons is None:
        if cap is not None:
            raise BadInput(f"cap is {cap} and persons is None: say whose each record is")
        return
    records = int(offsets[-1])
    whole = isinstance(persons, np.ndarray) and persons.dtype.kind == "i"
    if not isinstance(persons, np.ndarray) or not whole or persons.shape != (records,):
        raise BadInput(
            f"persons is {shown(persons)}: a whole number for each of {records} records is needed"
        )
    if not records:
        raise BadInput("persons is given and there are no records: omit it")
    if persons.min() < 0 or persons.max() >= records:
        raise BadInput("persons must be numbered from 0 within each client: use from_clients")
    counts = PersonIndex.of(persons, offsets).record_counts
    if counts.min() == 0:
        raise BadInput("persons must be numbered without gaps in each client: use from_clients")
    if cap is not None and counts.max() > cap:
        raise BadInput(f"a person has {counts.max()} records and cap is {cap}: use capped({cap})")
