"""`FederatedData`: the records of many clients as slices of one array."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import COUNT, shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated
from fedveil.base.inputs import Inputs, Target, arrays_by_name, join_inputs, mapped, shape_of, taken
from fedveil.data import data_files, provenance, user_arrays
from fedveil.data.persons import (
    NOT_PER_PERSON,
    PersonIndex,
    alone,
    check_persons,
    numbered,
    numbered_ids,
    persons_of_records,
)
from fedveil.data.provenance import PUBLIC
from fedveil.data.schema import TableSchema
from fedveil.data.user_arrays import Array as Array

Ids = npt.NDArray[np.int64]

_META: dict[str, Any] = {
    "fitted": "",
    "fitted_on_test": "",
    "declared_public": False,
    "known_as": "",
    "remarks": [],
    "elsewhere": [],
}
"""Fields that are saved beside the arrays, with their defaults."""

_ARRAYS = ("x", "y", "offsets", "test_x", "test_y", "names", "test_owners")
_OF_PERSONS = ("persons", "test_persons")
_OPTIONAL = ("names", "test_owners", *_OF_PERSONS)


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Records of N clients: client k owns rows `offsets[k]:offsets[k + 1]` of `x` and `y`.

    The arrays may be memory maps: nothing here copies them. Claims say what of the features and of
    the test split they do not cover (`assumptions`, `test_assumptions`), and secure noise refuses
    it (`check_secure`).

    A federation's server has the test split and nobody's records: `elsewhere` is then set, and `x`
    and `y` are empty (`at_sites`). Nobody can check there whether records are the same as before:
    `known_as` is part of their fingerprint, so that two trainings on them share no noise.

    Attributes:
        x: Features [records, ...], floating point or integer; or several such arrays by name, a
            dict, which the module gets as keyword arguments.
        y: Targets, as `classes` says.
        offsets: Where the rows of each client begin, and the number of records.
        test_x, test_y: The test records. There may be none.
        classes: The number of labels; `y` is then [records] of integers; or [records, ...] for a
            label in each of several places, such as the next words of a text, where -100 is no
            label; or [records, classes] of real numbers from 0 to 1, where several labels hold at
            once. 0 where `y` is real numbers [records, ...] to be predicted.
        names: The clients' names. Without them, client k is "k".
        fitted: Names what of the features was fitted on clients' records in the clear (means, say),
            "" if nothing was.
        fitted_on_test: Names what was fitted on the test records.
        declared_public: Whether `fitted` is known from elsewhere.
        test_owners: The owner of each test record: client k as k, somebody held out of the clients
            as a number below -1, nobody as -1. None if all are public.
        remarks: Further assumptions of claims about the records.
        schema: How the rows of a table became records.
        elsewhere: Records per client as far as that is public, 0 where it is not, if they are at
            their sites. People where these are sampled (`client.unit`).
        known_as: Distinguishes records at sites from those of other trainings.
        persons: The person of each record, as a number from 0 within its client, None if nobody
            knows. Somebody with records at two clients is two persons.
        test_persons: The number of each test record's person if that person has no records here,
            otherwise -1. None if nobody knows.
        cap: The most records that a person has, where claims are about persons (`capped`). None:
            persons are known and nothing depends on them.
        most_records: The most records that a client may have, a public number that does not depend
            on the records. None: nobody declares one.
        derived: A cache of values that were computed from these records, by name. Records are
            replaced, never changed in place, so that none is computed again.

    >>> data = FederatedData.from_clients(
    ...     [("ada", [[0.0], [1.0]], [0, 1]), ("bob", [[2.0]], [1])],
    ...     test=([[1.0]], [1]), classes=2)
    >>> data.clients, data.sizes.tolist(), data.client_name(1)
    (2, [2, 1], 'bob')
    """

    x: Inputs[Array]
    y: Array
    offsets: npt.NDArray[np.int64]
    test_x: Inputs[Array]
    test_y: Array
    classes: int
    names: Array | None = None
    fitted: str = ""
    fitted_on_test: str = ""
    declared_public: bool = False
    test_owners: npt.NDArray[np.int64] | None = None
    remarks: tuple[str, ...] = ()
    schema: TableSchema | None = None
    elsewhere: tuple[int, ...] = ()
    known_as: str = ""
    persons: Array | None = None
    test_persons: Array | None = None
    cap: int | None = None
    most_records: int | None = None
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def identity(self) -> Stated:
        """The pair ("data", fingerprint), from which seeds follow."""
        return (("data", self.fingerprint),)

    def __post_init__(self) -> None:
        """Raise BadInput for arrays that do not belong together."""
        user_arrays.check_structure(self)
        if not self.elsewhere and (self.persons is not None or self.cap is not None):
            check_persons(self.persons, self.offsets, self.cap)
        if self.most_records is not None:
            COUNT.check("most_records", self.most_records)
            if len(self.sizes) and self.sizes.max() > self.most_records:
                client = int(self.sizes.argmax())
                raise BadInput(
                    f"client {self.client_name(client)!r} has {self.sizes[client]} records and "
                    f"most_records is {self.most_records}: use data.shortened({self.most_records})"
                )
        if self.declared_public and not self.fitted:
            raise BadInput("declared_public is given and fitted is empty: name what is public")
        schema, form = self.schema, (self.classes, self.record_shape)
        if schema is not None and form != (schema.classes, schema.record_shape):
            raise BadInput(
                f"the schema is of {schema.classes} labels and records of shape "
                f"{schema.record_shape}, the data of {self.classes} and {self.record_shape}"
            )

    @staticmethod
    def from_table(
        table: object,
        *,
        target: str,
        client: str | None = None,
        features: Iterable[str] | None = None,
        columns: Mapping[str, object] | None = None,
        test: object = None,
        statistics: str | None = None,
        min_records: int | None = None,
        missing: str | None = None,
        person: str | None = None,
        clients: int | None = None,
        partition: str | None = None,
        alpha: float | None = None,
        shards_per_client: int = 1,
        seed: int = 0,
    ) -> "FederatedData":
        """The rows of CSV or Parquet files, a data frame, an Arrow table or a dict of columns.

        `client` names the column with the client of a row. Without one, each of several files (a
        list, or a folder) is a client, and the rows of a single table are dealt to a number of
        `clients`. `columns` declare in public how entries become numbers: `low` and `high`, or
        `mean` and `std`, or `values`; `fill` and `other`. What is not declared is fitted, and
        `statistics` says on what: "held-out" (default) on the test split, "clients" on clients'
        records, "public" on these as well, declared public. `test` is "by-client", which holds
        out about a fifth of the clients by name, a share of the rows, each chosen by what it is, or
        a table of test rows. By default there
        is no test split, and every row is a client's. `person` names the column with the person of
        a row, who has rows on one side of the split alone, and whom claims may be about. With
        `missing` "fill", a missing feature becomes zeros and a row without a target is left out.
        docs/data.md says what claims make of each.

        >>> ages, wells = [20, 40, 60, 80] * 9, ["no", "yes"] * 18
        >>> data = FederatedData.from_table(
        ...     {"site": [f"s{k // 3}" for k in range(36)], "age": ages, "well": wells},
        ...     client="site", target="well", columns={"age": {"low": 0, "high": 100}},
        ...     test="by-client")
        >>> data.clients, data.held_out_owners, data.classes, data.record_shape
        (10, 2, 2, (1,))
        >>> for text in (*data.assumptions, *data.test_assumptions):
        ...     print(text)
        labels of 'well' were fitted on the test records, which no claim covers
        2 owners are held out of 12 for testing, measured in the clear, and not protected by \
this claim
        """
        from fedveil.data.own_table import (
            TableOptions,
            each_file_a_client,
            table_partition,
            table_records,
            table_test,
        )
        from fedveil.data.partition import partition as divide

        each = each_file_a_client(table, client, partition)
        options = TableOptions(
            target, client, features, columns, test, statistics, min_records, missing, person, each
        )
        kind = table_partition(options.client_column, partition, clients)
        data = divide(
            table_records(table, options),
            kind=kind,
            clients=clients,
            seed=seed,
            alpha=alpha,
            shards_per_client=shards_per_client,
            test=table_test(kind),
        )
        return replace(data, declared_public=statistics == "public")

    @staticmethod
    def from_datasets(
        dataset: object,
        *,
        target: str,
        client: str | None = None,
        features: Iterable[str] | None = None,
        columns: Mapping[str, object] | None = None,
        test: object = None,
        **options: Any,
    ) -> "FederatedData":
        """The records of a `Dataset` or `DatasetDict` of Hugging Face, or of its saved folder.

        Arguments are those of `from_table`. The split "test", if there is one and `test` is left
        out, is the test table. Label names that the data set declares are declared values. Raises
        BadInput for a `DatasetDict` without a split "train".
        """
        from fedveil.data.tables import tables_of

        features = None if features is None else list(features)
        table, tested, declared = tables_of(dataset, target, client, features)
        return FederatedData.from_table(
            table,
            target=target,
            client=client,
            features=features,
            columns={**declared, **(columns or {})},
            test=tested if test is None else test,
            **options,
        )

    @classmethod
    def from_torch(
        cls, datasets: object, *, test: object = None, classes: int, **options: Any
    ) -> "FederatedData":
        """The records of one PyTorch data set per client, or of any sequences of (x, y).

        Args:
            datasets: A dict by client name, or a list, whose clients are called "0", "1", ...
            test: The data set of test records. None: there are none.
            classes: The number of labels, 0 for numbers to be predicted.
            options: Further arguments of `from_clients`.
        """
        from fedveil.data.tables import arrays_of, clients_from_datasets

        test_arrays = None if test is None else arrays_of(test, "the test split")
        clients = clients_from_datasets(datasets)
        return cls.from_clients(clients, test=test_arrays, classes=classes, **options)

    @classmethod
    def from_clients(
        cls,
        clients: Iterable[tuple[str, Any, Any]],
        *,
        test: tuple[Any, Any] | None = None,
        test_owners: Sequence[str] | None = None,
        classes: int,
        fitted: str = "",
        declared_public: bool = False,
        persons: object = None,
    ) -> "FederatedData":
        """Build from (name, features, targets) triples, one per client.

        Features stay whole numbers (int64) if all of them are, and become float32 otherwise. A
        matrix of floats or truth values with a column for each of the `classes` says of each label
        whether it holds. Whole numbers are labels. Raises BadInput for arrays that do not fit
        together. Values, and copies of clients' records in the test split, are refused by `check`.

        Args:
            clients: The triples.
            test: A pair (features, targets). None: there are no test records.
            test_owners: The name of each test record's owner: a client's, or another for somebody
                held out. Without names, test records are a client's own if they lie in the same
                memory, and otherwise public, which claims say.
            classes: The number of labels, 0 for numbers to be predicted.
            fitted: What of the features was fitted on clients' records, in words, "" if nothing
                was.
            declared_public: Whether `fitted` is known from elsewhere.
            persons: For each client, in a list or a dict by name, the person of each record: texts
                or whole numbers. An id means one person within a client, and another at another.

        >>> data = FederatedData.from_clients(
        ...     [("north", [[0.0], [1.0], [2.0]], [0, 1, 1])], classes=2, persons=[["a", "b", "a"]])
        >>> data.people.tolist(), data.capped(1).records
        ([2], 2)
        """
        user_arrays.check_classes(classes)
        triples = user_arrays.client_triples(clients)
        _, first_x, first_y = triples[0]
        if test is None:
            test_x, test_y = taken(first_x, slice(0)), first_y[:0]
        elif isinstance(test, tuple | list) and len(test) == 2:
            test_x = user_arrays.features_of("test features", test[0])
            test_y = user_arrays.array_of("test targets", test[1])
        else:
            raise BadInput(f"test is {shown(test)}: use a pair (x, y) of records of no client")
        if shape_of(test_x) != shape_of(first_x):
            raise BadInput(
                f"test records have shape {shape_of(test_x)}, training records {shape_of(first_x)}"
            )
        y = np.concatenate([targets for _, _, targets in triples])
        if not classes and y.dtype.kind in "biu":
            raise BadInput(
                f"targets are of type {y.dtype} and classes is 0, for quantities to be predicted: "
                "give the number of labels, or the targets as floats"
            )
        parts = [features for _, features, _ in triples]
        names = np.array([name for name, _, _ in triples])
        sizes = [len(targets) for _, _, targets in triples]
        ids = None if persons is None else persons_of_records(persons, list(map(str, names)), sizes)
        owners = provenance.owners_in_memory(parts, test_x)
        if test_owners is not None:
            clients_of = np.repeat(np.arange(len(names)), sizes).tolist()
            whose = dict(zip(map(str, ids or ()), clients_of, strict=False))
            named = provenance.owners_by_name(test_owners, names.tolist(), len(test_y), whose)
            owners = np.where(owners >= 0, owners, named)
        x, test_x = user_arrays.join_features(parts, test_x)
        offsets = np.cumsum([0, *sizes], dtype=np.int64)
        numbers = None if ids is None else numbered_ids(ids, offsets)
        several = f"a person may have several records: {NOT_PER_PERSON}"
        return cls(
            x=x,
            y=user_arrays.targets_of(y, classes),
            offsets=offsets,
            test_x=test_x,
            test_y=user_arrays.targets_of(test_y, classes),
            classes=classes,
            names=names,
            test_owners=owners,
            fitted=fitted,
            declared_public=declared_public,
            remarks=() if numbers is None else (several,),
            persons=numbers,
        )

    def concatenated(self, *others: "FederatedData") -> "FederatedData":
        """One data set of these clients followed by those of each of the `others`, as a copy.

        Clients lose their names, and their persons unless those of all parts are known. The test
        split, cap and types are those of the first. The assumptions of one hold for all, and what
        the others fitted on their test records counts as fitted on clients': these may be
        anybody's here. Raises BadInput for records at sites, and for different schemas, shapes,
        numbers of classes or caps, types that lose digits in the first's, and capped data beside
        others whose persons nobody knows.
        """
        parts = [self, *others]
        if any(part.elsewhere for part in parts):
            raise BadInput("records that are at their sites cannot be joined")
        schemas = [part.schema for part in parts if part.schema is not None]
        if any(schema != schemas[0] for schema in schemas):
            raise BadInput("tables of different columns or encodings cannot be joined: use one")
        if len({part.classes for part in parts}) > 1:
            counts = ", ".join(str(part.classes) for part in parts)
            raise BadInput(f"data with different numbers of classes ({counts}) cannot be joined")
        with_fits = [part for part in parts if part.fitted]
        fitted = [part.fitted for part in with_fits]
        fitted += [part.fitted_on_test for part in others if part.fitted_on_test]
        public = bool(with_fits) and all(part.declared_public for part in with_fits)

        def in_first_type(arrays: list[Array]) -> Array:
            first = arrays[0]
            for array in arrays[1:]:
                if array.shape[1:] != first.shape[1:] or not np.can_cast(
                    array.dtype, first.dtype, "same_kind"
                ):
                    raise BadInput(
                        f"records of type {array.dtype} and shape {list(array.shape[1:])} cannot "
                        f"be joined with {first.dtype} and {list(first.shape[1:])}"
                    )
            return np.concatenate(arrays, dtype=first.dtype, casting="same_kind")

        sizes = np.concatenate([part.sizes for part in parts])
        known = [part.persons for part in parts if part.persons is not None]
        caps = {part.cap for part in parts if part.persons is not None} - {None}
        if caps and (len(known) < len(parts) or caps != {self.cap}):
            raise BadInput(
                "data of which a number of records per person counts (capped) cannot be joined "
                "with others: cap all of them alike, or none"
            )
        persons = np.concatenate(known) if len(known) == len(parts) else None
        return replace(
            self,
            x=join_inputs([part.x for part in parts], in_first_type),
            y=np.concatenate([part.y for part in parts]),
            offsets=np.cumsum([0, *sizes], dtype=np.int64),
            names=None,
            fitted=", ".join(dict.fromkeys(fitted)),
            declared_public=public and len(fitted) == len(with_fits),
            remarks=tuple(dict.fromkeys(text for part in parts for text in part.remarks)),
            persons=persons,
        )

    def with_clients(
        self,
        x: Inputs[Array],
        y: Array,
        offsets: npt.NDArray[np.int64],
        persons: Array | None = None,
    ) -> "FederatedData":
        """The same data with other clients, without names: these records, cut at these offsets.

        Test records that were a client's become the first client's, as they may be anybody's of the
        new clients. `persons` are the new records' persons, each with one record if left out.
        """
        owners = np.minimum(self.owners_of_test, 0)
        if persons is None and self.persons is not None:
            persons = alone(offsets)
        more: dict[str, Any] = {"names": None, "test_owners": owners, "persons": persons}
        more |= {"cap": None, "most_records": None}
        return replace(self, x=x, y=y, offsets=offsets, **more)

    def shortened(self, most: int, seed: int = 0) -> "FederatedData":
        """The same clients, each with at most `most` of its records (`data.most_records`).

        The others are left out by a public rule, which looks at one client at a time
        (`shorten_clients`). With secure
        noise, clients can then be computed side by side: the shape of a block is public.
        """
        from fedveil.data.partition import shorten_clients

        return shorten_clients(self, most, seed)

    @property
    def longest(self) -> int:
        """`most_records`, or without it the largest number of records of a client."""
        return self.most_records or int(self.sizes.max())

    def of_records(self, rows: npt.NDArray[Any], sizes: Ids) -> "FederatedData":
        """The same clients with the records at `rows` alone: `sizes` of each, in their order.

        Persons without records are none any more, and the others are numbered anew.
        """
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        persons = self.persons
        if persons is not None:
            persons = numbered(persons[rows], offsets)
        new = {"y": self.y[rows], "offsets": offsets, "persons": persons}
        return replace(self, x=taken(self.x, rows), **new)

    def capped(self, cap: int) -> "FederatedData":
        """The data for claims about persons: at most `cap` records of each person count.

        The others are left out by a public rule: which records of a person these are follows from
        their order and number alone. Test records of people who have no records here are theirs,
        whichever client they are at. Fingerprints, and so seeds, depend on who has which records.

        Guarantee: removing one person removes at most `cap` records, and changes no other's.

        | edge | behaviour |
        |---|---|
        | nobody knows whose records are whose | BadInput |
        | records at sites | none is here to leave out: each site does it with its own |
        | everybody has `cap` records or fewer | all records |
        | `cap` below 1 | BadInput |
        """
        if self.persons is None and not self.elsewhere:
            raise BadInput(
                f"at most {cap} records of a person count (client.cap), and nobody says which "
                "records are whose: name the column (data.person), or give from_clients persons"
            )
        COUNT.check("cap", cap)
        if cap not in self._by_cap:
            data = self if self.elsewhere else self._of_counted_records(cap)
            owners = self.owners_of_test
            if self.test_persons is not None:
                known = (self.test_persons >= 0) & (owners != PUBLIC)
                free = min(int(owners.min(initial=0)), PUBLIC) - 1
                owners = np.where(known, free - np.asarray(self.test_persons), owners)
                trained = (np.asarray(self.test_persons) < 0) & (owners <= PUBLIC)
                owners = np.where(trained, 0, owners)  # people who are trained on are not public
            remarks = tuple(text for text in self.remarks if not text.endswith(NOT_PER_PERSON))
            more: dict[str, Any] = {"test_owners": owners, "remarks": remarks, "cap": cap}
            self._by_cap[cap] = replace(data, **more)
        return self._by_cap[cap]

    def _of_counted_records(self, cap: int) -> "FederatedData":
        """The same clients with at most `cap` records of each person, by the public rule."""
        mask = self.person_index.counted_records(cap)
        whose = np.repeat(np.arange(self.clients), self.sizes)
        sizes = np.bincount(whose[mask], minlength=self.clients)
        return self.of_records(np.flatnonzero(mask), sizes)

    def at_sites(
        self, names: Sequence[str], records: Sequence[int] = (), known_as: str = ""
    ) -> "FederatedData":
        """The test split alone, for clients of these names whose records stay at their sites.

        Args:
            names: The clients' names.
            records: Records of each client where that is public, 0 where it is not. () is 0 for
                all.
            known_as: Distinguishes these records from those of other trainings.
        """
        return replace(
            self,
            x=taken(self.x, slice(0)),
            y=self.y[:0],
            offsets=np.zeros(len(names) + 1, dtype=np.int64),
            names=np.array(names),
            test_owners=np.minimum(self.owners_of_test, 0),
            elsewhere=tuple(records) or (0,) * len(names),
            known_as=known_as,
            persons=None,
            cap=None,
        )

    def __repr__(self) -> str:
        records = user_arrays.records_text(self.x, self.test_x, self.y, self.classes)
        return f"FederatedData({self.clients:,} clients, {records})"

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ids:
        """The number of records of each client.

        For clients at sites the public number, 0 if unknown.
        """
        if self.elsewhere:
            return np.array(self.elsewhere, dtype=np.int64)
        return np.diff(self.offsets)

    @property
    def records(self) -> int:
        """The number of records of all clients. Unknown numbers of clients at sites count as 0."""
        return int(self.sizes.sum())

    @cached_property
    def person_index(self) -> PersonIndex:
        """Where the records of each person are. Raises BadInput if nobody knows."""
        if self.persons is None:
            raise BadInput("the records have no persons: say whose each of them is")
        return PersonIndex.of(self.persons, self.offsets)

    @property
    def people(self) -> Ids:
        """The number of persons of each client. Raises BadInput if nobody knows.

        For clients at sites the public number, of people where these are sampled. Where records
        are, it is that of records, and there are no more people.
        """
        return self.sizes if self.elsewhere else self.person_index.people

    @cached_property
    def _by_cap(self) -> "dict[int, FederatedData]":
        """The results of `capped`, so that repetitions train on one object."""
        return {}

    @property
    def record_shape(self) -> Inputs[tuple[int, ...]]:
        """The shape of one record, or a dict of shapes by input name."""
        return shape_of(self.x)

    @property
    def target(self) -> Target:
        """The form of what is to be predicted: labels or numbers, and their shape."""
        return user_arrays.target_of(self.y, self.classes)

    def client_name(self, client: int) -> str:
        """The name of client number `client`, or the number as text if clients have no names."""
        return str(client) if self.names is None else str(self.names[client])

    @property
    def owners_of_test(self) -> npt.NDArray[np.int64]:
        """`test_owners`, or PUBLIC for every test record where that is None."""
        if self.test_owners is None:
            return np.full(len(self.test_y), PUBLIC, dtype=np.int64)
        return self.test_owners

    @property
    def test_of_clients(self) -> bool:
        """Whether some test records are clients' own."""
        return bool((self.owners_of_test >= 0).any())

    @property
    def held_out_owners(self) -> int:
        """The number of owners who are no clients and have test records."""
        return len(np.unique(self.owners_of_test[self.owners_of_test < PUBLIC]))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of every claim about these clients, as texts. () if there are none."""
        assumptions = []
        if self.fitted and self.declared_public:
            assumptions.append(f"declared public: {self.fitted}")
        elif self.fitted:
            assumptions.append(
                f"{self.fitted} were fitted on clients' records in the clear: outside this claim"
            )
        if self.fitted_on_test:
            assumptions.append(
                f"{self.fitted_on_test} were fitted on the test records, which no claim covers"
            )
        return (*assumptions, *self.remarks)

    @property
    def test_assumptions(self) -> tuple[str, ...]:
        """The assumptions of a claim where the test split is measured in the clear, as texts.

        () without test records.
        """
        owners, assumptions = self.owners_of_test, []
        if (owners >= 0).any():
            assumptions.append(
                "test records of the clients themselves are measured in the clear: outside this "
                "claim"
            )
        if (owners < PUBLIC).any():
            number = self.held_out_owners
            clear = "for testing, measured in the clear, and"
            if self.cap is not None:
                who, protected = "person", f"{clear} not protected"
            elif provenance.by_record(owners):
                who, protected = "record", f"{clear} nobody whose they are is protected"
            else:
                who, protected = "owner", f"of {number + self.clients:,} {clear} not protected"
            several = "people" if who == "person" else f"{who}s"
            noun = f"{who} is" if number == 1 else f"{several} are"
            assumptions.append(f"{number:,} {noun} held out {protected} by this claim")
        if (owners == PUBLIC).any():
            assumptions.append("the test records are taken as public")
        return tuple(assumptions)

    def check_secure(self, *, priced: bool = False) -> None:
        """Raise BadInput for data that secure noise refuses: clients' numbers in the clear.

        `priced` is whether metrics on test records have noise and a charge of their own.

        | edge | behaviour |
        |---|---|
        | something was fitted on clients' records | BadInput |
        | it is declared public | allowed, and the claim says so |
        | some test records are clients' | BadInput, unless metrics have a price |
        | owners are held out for testing | allowed, and the claim counts them |
        """
        if self.fitted and not self.declared_public:
            raise BadInput(
                f"noise.source is 'secure' and {self.fitted} were fitted on clients' records in "
                "the clear: fit them on the test split (data.statistics = 'held-out'), or "
                "declare them public ('public', or declared_public=True)"
            )
        if self.test_of_clients and not priced:
            raise BadInput(
                "noise.source is 'secure' and test records are the clients' own, measured in the "
                "clear: give metrics a price (evaluate.epsilon), hold clients out (data.test = "
                "'by-client'), or leave the test split out"
            )

    def check(self) -> None:
        """Raise BadInput for values no model can learn from, and test records copied from clients'.

        Reads the arrays once, piece by piece.
        """
        user_arrays.check_values(self)
        if "copies" not in self.derived:
            rows = self.owners_of_test < 0
            provenance.check_copies(self.x, self.y, taken(self.test_x, rows), self.test_y[rows])
            self.derived["copies"] = None

    def check_tested(self, what: str) -> None:
        """Raise BadInput if there are no test records. `what` is the subject of the message."""
        if not len(self.test_y):
            raise BadInput(f"{what} needs test records and the data have none: set data.test")

    def examples(self, count: int) -> tuple[Inputs[Array], Array]:
        """(features, targets) of records that a module may be tried on.

        They are public test records, at most `count`. Without any they are `count` made-up ones
        with the shapes and types of the records, and nothing else of them: normal numbers, and
        zeros and ones where numbers are whole.
        """
        rows = np.flatnonzero(self.owners_of_test == PUBLIC)[:count]
        if len(rows):
            return taken(self.test_x, rows), self.test_y[rows]
        random = np.random.Generator(np.random.Philox(0))

        def made_up(values: Array) -> Array:
            drawn = random.normal(size=(count, *values.shape[1:]))
            whole = values.dtype.kind != "f"
            return (drawn > 0 if whole else drawn).astype(values.dtype)

        y = np.zeros((count, *self.y.shape[1:]), dtype=self.y.dtype)
        if self.classes and self.y.dtype.kind in "iu":
            y[...] = random.integers(self.classes, size=y.shape)
        return mapped(made_up, self.x), y

    def _named_arrays(self) -> dict[str, Array | None]:
        """All arrays by name in a fixed order, None for optional ones that are missing.

        Named inputs are x.NAME and test_x.NAME.
        """
        arrays: dict[str, Array | None] = {}
        for name in _ARRAYS:
            value = getattr(self, name)
            if isinstance(value, dict):
                value = dict(sorted(value.items()))
            arrays |= arrays_by_name(name, value)
        return arrays

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 digest, in hexadecimal, of all arrays, labels, fitted features and the schema.

        Two data sets with one fingerprint are the same data. It reads all records once. Persons
        are part of it where claims are about them (`capped`).
        """
        digest = hashlib.sha256(f"fedveil-data-2 classes={self.classes}".encode())
        digest.update(json.dumps(self.fitted).encode())
        if self.schema is not None:
            digest.update(json.dumps(self.schema.to_dict(), sort_keys=True).encode())
        if self.elsewhere:
            digest.update(f"|elsewhere {json.dumps([self.elsewhere, self.known_as])}".encode())
        for name, array in self._named_arrays().items():
            if array is None:
                digest.update(f"|{name} none".encode())
            elif name == "names":
                digest.update(("|names " + json.dumps(array.tolist())).encode())
            else:
                digest.update(f"|{name} {array.dtype.str} {array.shape}".encode())
                for _, piece in user_arrays.pieces(array):
                    digest.update(np.ascontiguousarray(piece).tobytes())
        if self.cap is not None:
            here = np.zeros(0) if self.persons is None else self.persons
            persons = np.ascontiguousarray(here, dtype="<i8").tobytes()
            digest.update(f"|persons {self.cap} ".encode() + persons)
        return digest.hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write one .npy per array and meta.json into a new folder, for `open`.

        Raises BadInput if the folder exists or cannot be made.
        """
        meta = {key: getattr(self, key) for key in ("classes", *_META)}
        meta |= {"cap": self.cap or 0, "most_records": self.most_records or 0}
        meta["inputs"] = sorted(self.x) if isinstance(self.x, dict) else []
        if self.schema is not None:
            meta["schema"] = self.schema.to_dict()
        arrays = {**self._named_arrays(), **{name: getattr(self, name) for name in _OF_PERSONS}}
        data_files.save_arrays(Path(folder), arrays, meta)

    @classmethod
    def open(cls, folder: Path | str) -> "FederatedData":
        """A saved data set, mapped into memory: a million clients open without being read.

        Raises BadInput for a folder that `save` did not write.
        """
        meta = data_files.read_meta(
            Path(folder),
            # Older data have no owners of test records and say whether they are clients'.
            {**_META, "schema": {}, "inputs": [], "test_of_clients": False}
            | {"cap": 0, "most_records": 0},
        )
        of_clients, inputs = meta.pop("test_of_clients"), meta.pop("inputs")
        meta["schema"] = TableSchema.from_dict(meta["schema"]) if meta["schema"] else None
        meta["remarks"] = tuple(map(str, meta["remarks"]))
        meta["elsewhere"] = tuple(meta["elsewhere"])
        meta |= {key: meta[key] or None for key in ("cap", "most_records")}
        for name in inputs:
            user_arrays.check_input_name(f"{folder}: records", name)
        arrays: dict[str, Any] = {}
        for name in (*_ARRAYS, *_OF_PERSONS):
            if inputs and name in ("x", "test_x"):
                files = {key: Path(folder) / f"{name}.{key}.npy" for key in inputs}
                arrays[name] = {key: data_files.mapped_array(path) for key, path in files.items()}
                continue
            path = Path(folder) / f"{name}.npy"
            missing = name in _OPTIONAL and not path.exists()
            arrays[name] = None if missing else data_files.mapped_array(path)
        if of_clients and arrays["test_owners"] is None:
            arrays["test_owners"] = np.zeros(len(arrays["test_y"]), dtype=np.int64)
        return cls(**{**arrays, "offsets": np.asarray(arrays["offsets"]), **meta})
