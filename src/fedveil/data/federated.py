"""`FederatedData`: the records of many clients as slices of one array."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated
from fedveil.base.inputs import (
    Inputs,
    Target,
    count,
    join_inputs,
    labelled,
    mapped,
    shape_of,
    taken,
)
from fedveil.data import data_files as saved
from fedveil.data.provenance import (
    PUBLIC,
    check_copies,
    held_out_number,
    owners_in_memory,
    sentences,
)
from fedveil.data.schema import TableSchema
from fedveil.data.user_arrays import Array as Array
from fedveil.data.user_arrays import (
    check_classes,
    check_input,
    check_not_labels,
    check_structure,
    check_values,
    described,
    joined_features,
    pair,
    pieces,
    same_form,
    target_of,
    targets_of,
    triples,
)

_SAID: dict[str, Any] = {
    "fitted": "",
    "fitted_on_test": "",
    "declared_public": False,
    "known_as": "",
}
_LISTS = ("remarks", "elsewhere")
"""What is said of the records beside the arrays, and what holds where nothing is said."""

_ARRAYS = ("x", "y", "offsets", "test_x", "test_y", "names", "test_owners")
_OPTIONAL = ("names", "test_owners")


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Records of N clients: client k owns rows `offsets[k]:offsets[k + 1]` of `x` and `y`.

    The arrays may be memory maps: nothing here copies them. `x` is [records, ...], floating
    point or integer; or several such arrays by name, a dict, which the module gets as keyword
    arguments. `classes` is the number of labels, `y` then [records] of integers; or
    [records, ...] for a label in each of several places, such as the next words of a text, where
    -100 is no label; or [records, classes] of real numbers from 0 to 1, where several labels hold
    at once. `classes` is 0 when `y` is real numbers [records, ...] to be predicted. `names` may be
    None: client k is then "k".

    There may be no test records. `test_owners` has the owner of each: client k as k, somebody held
    out of the clients as a number below -1, nobody as -1; None if all are public. `fitted` names
    what of the features was fitted on clients' records in the clear (means, say), "" if nothing
    was; `declared_public` says that it is known from elsewhere. `fitted_on_test` names what was
    fitted on the test records. `remarks` are what else claims have
    to say of the records. Claims say it all (`assumptions`, `test_assumptions`), and secure noise
    refuses what they do not cover (`check_secure`). `schema` is how the rows of a table became
    records.

    A federation's server has the test split and nobody's records: `elsewhere` then holds how many
    records each client has as far as that is public, 0 where it is not, and `x` and `y` are empty
    (`at_sites`). Nobody can tell here whether such records are the same as before: `known_as` is
    part of their fingerprint, so that two trainings on them share no noise.

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

    @property
    def identity(self) -> Stated:
        return (("data", self.fingerprint),)

    def __post_init__(self) -> None:
        check_structure(
            {name: getattr(self, name) for name in _ARRAYS},
            self.classes,
            self.client_name,
            self.elsewhere,
        )
        if self.declared_public and not self.fitted:
            raise BadInput("declared_public is given and fitted is empty: name what is public")
        if self.schema is not None and (self.classes, self.record_shape) != (
            self.schema.classes,
            self.schema.record_shape,
        ):
            raise BadInput(
                f"the schema is of {self.schema.classes} labels and records of shape "
                f"{self.schema.record_shape}, the data of {self.classes} and {self.record_shape}"
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
        clients: int | None = None,
        partition: str | None = None,
        alpha: float | None = None,
        shards_per_client: int = 1,
        seed: int = 0,
    ) -> "FederatedData":
        """The rows of a CSV or Parquet file, a data frame, an Arrow table or a dict of columns.

        `client` names the column with the client of a row. Without one, rows are dealt to a number
        of `clients`. `columns` declare in public how entries become numbers: `low` and `high`, or
        `mean` and `std`, or `values`; `fill` and `other`. What is not declared is fitted, and
        `statistics` says on what: "held-out" (default) on the test split, "clients" on clients'
        records, "public" on these as well, declared public. `test` is "by-client", which holds
        out a fifth of the clients, a share of the rows, or a table of test rows. By default there
        is no test split, and every row is a client's. docs/data.md says what claims make of each.

        >>> ages, wells = [20, 40, 60, 80] * 9, ["no", "yes"] * 18
        >>> data = FederatedData.from_table(
        ...     {"site": [f"s{k // 3}" for k in range(36)], "age": ages, "well": wells},
        ...     client="site", target="well", columns={"age": {"low": 0, "high": 100}},
        ...     test="by-client")
        >>> data.clients, data.held_out, data.classes, data.record_shape
        (10, 2, 2, (1,))
        >>> for text in (*data.assumptions, *data.test_assumptions):
        ...     print(text)
        labels of 'well' were fitted on the test records, which no claim covers
        2 owners are held out of 12 for testing, measured in the clear, and not protected by \
this claim
        """
        from fedveil.data.own_table import TableOptions, federated_table

        asked = TableOptions(target, client, features, columns, test, statistics, min_records)
        return federated_table(
            table,
            asked,
            clients=clients,
            kind=partition,
            alpha=alpha,
            shards_per_client=shards_per_client,
            seed=seed,
        )

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
        """A `Dataset` or `DatasetDict` of Hugging Face, or the folder that one was saved to.

        As `from_table`, whose options it takes. The split "test", if there is one and `test` is
        left out, is the test table. Label names that the data set declares are declared values.
        """
        from fedveil.data.library_datasets import tables_of

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
        """One PyTorch data set per client, or any sequence of (x, y): a dict by name, or a list.

        `test` is another one; `options` are further arguments of `from_clients`.
        """
        from fedveil.data.library_datasets import arrays_of, clients_from_datasets

        tested = None if test is None else arrays_of(test, "the test split")
        return cls.from_clients(
            clients_from_datasets(datasets), test=tested, classes=classes, **options
        )

    def __repr__(self) -> str:
        records = described(self.x, self.test_x, self.target)
        return f"FederatedData({self.clients:,} clients, {records})"

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
    ) -> "FederatedData":
        """Build from (name, features, targets) triples, one per client.

        `test` is a pair of features and targets, `test_owners` the name of each test record's
        owner: a client's, or another for somebody held out. Without names, test records are a
        client's own if they lie in the same memory, and otherwise public, which claims say. Copies
        of clients' records are refused.

        Features stay whole numbers (int64) if all of them are, and become float32 otherwise. A
        matrix of floats or truth values with a column for each of the `classes` says of each label
        whether it holds; whole numbers are labels.
        """
        check_classes(classes)
        named = triples(clients)
        if not named:
            raise BadInput("no clients: give at least one (name, x, y)")
        test_x, test_y = (taken(named[0][1], slice(0)), named[0][2][:0])
        if test is not None:
            test_x, test_y = pair(test)
        for name, x, y in named:
            if count(x) != len(y):
                raise BadInput(f"client {name!r} has {count(x)} feature rows and {len(y)} targets")
            if not same_form(x, named[0][1]):
                raise BadInput(
                    f"client {name!r} has records of shape {shape_of(x)}, "
                    f"client {named[0][0]!r} of shape {shape_of(named[0][1])}"
                )
        if not same_form(test_x, named[0][1]):
            raise BadInput(
                f"test records have shape {shape_of(test_x)}, training records "
                f"{shape_of(named[0][1])}"
            )
        y = _joined([y for _, _, y in named])
        check_not_labels(y, classes)
        parts = [x for _, x, _ in named]
        names = np.array([name for name, _, _ in named])
        owners = owners_in_memory(parts, test_x)
        if test_owners is not None:
            owners = np.where(owners >= 0, owners, _owners_named(test_owners, names, len(test_y)))
        all_x, test_x = joined_features(parts, test_x)
        return cls(
            x=all_x,
            y=targets_of(y, classes),
            offsets=np.cumsum([0, *(len(y) for _, _, y in named)], dtype=np.int64),
            test_x=test_x,
            test_y=targets_of(test_y, classes),
            classes=classes,
            names=names,
            test_owners=owners,
            fitted=fitted,
            declared_public=declared_public,
        )

    def joined(self, *others: "FederatedData") -> "FederatedData":
        """One data set of these clients followed by those of each of the `others`, as a copy.

        The test split is that of the first. Whatever claims have to say of one is said of all, and
        what the others fitted on their test records counts as fitted on clients': these may be
        anybody's here.
        """
        every = [self, *others]
        if any(each.elsewhere for each in every):
            raise BadInput("records that are at their sites cannot be joined")
        schemas = [each.schema for each in every if each.schema is not None]
        if any(schema != schemas[0] for schema in schemas):
            raise BadInput("tables of different columns or encodings cannot be joined: use one")
        fitted = [each for each in every if each.fitted]
        seen = [each.fitted for each in fitted]
        seen += [each.fitted_on_test for each in others if each.fitted_on_test]
        public = bool(fitted) and all(each.declared_public for each in fitted)
        return replace(
            self,
            x=join_inputs([each.x for each in every], _behind),
            y=np.concatenate([each.y for each in every]),
            offsets=np.cumsum([0, *np.concatenate([each.sizes for each in every])], dtype=np.int64),
            names=None,
            fitted=", ".join(dict.fromkeys(seen)),
            declared_public=public and len(seen) == len(fitted),
            remarks=tuple(dict.fromkeys(text for each in every for text in each.remarks)),
        )

    def with_clients(
        self, x: Inputs[Array], y: Array, offsets: npt.NDArray[np.int64]
    ) -> "FederatedData":
        """The same data with other clients.

        Test records that were a client's may be anybody's of the new ones: the first one's.
        """
        owners = np.minimum(self.owners_of_test, 0)
        return replace(self, x=x, y=y, offsets=offsets, names=None, test_owners=owners)

    def at_sites(
        self, names: Sequence[str], records: Sequence[int] = (), known_as: str = ""
    ) -> "FederatedData":
        """The test split alone, for clients of these names whose records stay where they are.

        `records` are how many each has, where that is public; `known_as` tells them apart from
        those of other trainings.
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
        )

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Values that were computed from these records, cached by name.

        Like the fingerprint it is never computed again: records are replaced, not changed in place.
        """
        return {}

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Records per client. For clients elsewhere, the public numbers."""
        if self.elsewhere:
            return np.array(self.elsewhere, dtype=np.int64)
        return np.diff(self.offsets)

    @property
    def records(self) -> int:
        """All clients' records together."""
        return int(self.sizes.sum()) if self.elsewhere else len(self.y)

    @property
    def record_shape(self) -> Inputs[tuple[int, ...]]:
        """The shape of one record, or a dict of shapes by input name."""
        return shape_of(self.x)

    @property
    def target(self) -> Target:
        """What is to be predicted."""
        return target_of(self.y, self.classes)

    def client_name(self, client: int) -> str:
        return str(client) if self.names is None else str(self.names[client])

    @cached_property
    def owners_of_test(self) -> npt.NDArray[np.int64]:
        """The owner of each test record (`test_owners`)."""
        if self.test_owners is None:
            return np.full(len(self.test_y), PUBLIC, dtype=np.int64)
        return self.test_owners

    @property
    def test_of_clients(self) -> bool:
        """Whether some test records are clients' own."""
        return bool((self.owners_of_test >= 0).any())

    @property
    def held_out(self) -> int:
        """The number of owners who are no clients, and whose records are tested on."""
        return len(np.unique(self.owners_of_test[self.owners_of_test < PUBLIC]))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of every claim about these clients."""
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
        """The assumptions of a claim where the test split is measured in the clear."""
        return sentences(self.owners_of_test, self.clients)

    def check_secure(self, *, priced: bool = False) -> None:
        """Refuse, for secure noise, what was or will be computed of clients' records without any.

        `priced`: what is measured on test records has noise and a charge of its own.

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
        """Refuse values no model can learn from, and test records copied from clients'.

        Reads the arrays once, piece by piece.
        """
        check_values({name: getattr(self, name) for name in _ARRAYS}, self.classes, self._owner)
        if "copies" not in self.derived:
            rows = self.owners_of_test < 0
            check_copies(self.x, self.y, taken(self.test_x, rows), self.test_y[rows])
            self.derived["copies"] = None

    def check_tested(self, what: str) -> None:
        """Refuse what needs test records where there are none."""
        if not len(self.test_y):
            raise BadInput(f"{what} needs test records and the data have none: set data.test")

    def examples(self, count: int) -> tuple[Inputs[Array], Array]:
        """Records that a module may be tried on: public ones, or made up where there are none.

        Made-up records have the shapes and types of the records, and nothing else of them: normal
        numbers, and zeros and ones where numbers are whole.
        """
        rows = np.flatnonzero(self.owners_of_test == PUBLIC)
        if len(rows):
            chosen = rows[:count]
            return taken(self.test_x, chosen), self.test_y[chosen]
        random = np.random.Generator(np.random.Philox(0))

        def some(values: Array) -> Array:
            shape = (count, *values.shape[1:])
            drawn = random.normal(size=shape)
            return (
                drawn.astype(values.dtype)
                if values.dtype.kind == "f"
                else ((drawn > 0).astype(values.dtype))
            )

        y = np.zeros((count, *self.y.shape[1:]), dtype=self.y.dtype)
        if self.classes and self.y.dtype.kind in "iu":
            y[...] = random.integers(self.classes, size=y.shape)
        return mapped(some, self.x), y

    @property
    def _inputs(self) -> list[str]:
        """The names of the inputs, in order. Empty if there is one input without a name."""
        return sorted(self.x) if isinstance(self.x, dict) else []

    @property
    def _arrays(self) -> dict[str, Array | None]:
        """All arrays by name, those of named inputs as x.NAME and test_x.NAME, in their order."""
        found: dict[str, Array | None] = {}
        for name in _ARRAYS:
            value = getattr(self, name)
            if isinstance(value, dict):
                value = {key: value[key] for key in self._inputs}
            found |= labelled(name, value)
        return found

    def _owner(self, row: int) -> str:
        client = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return self.client_name(client)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything: two data sets with one fingerprint are the same data."""
        digest = hashlib.sha256(f"fedveil-data-2 classes={self.classes}".encode())
        digest.update(json.dumps(self.fitted).encode())
        if self.schema is not None:
            digest.update(json.dumps(self.schema.to_dict(), sort_keys=True).encode())
        if self.elsewhere:
            digest.update(f"|elsewhere {json.dumps([self.elsewhere, self.known_as])}".encode())
        for name, array in self._arrays.items():
            if array is None:
                digest.update(f"|{name} none".encode())
                continue
            if name == "names":
                digest.update(("|names " + json.dumps(array.tolist())).encode())
                continue
            digest.update(f"|{name} {array.dtype.str} {array.shape}".encode())
            for _, piece in pieces(array):
                digest.update(np.ascontiguousarray(piece).tobytes())
        return digest.hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write one .npy per array into a new folder, the layout that `open` maps into memory."""
        meta = {"classes": self.classes, **{key: getattr(self, key) for key in _SAID}}
        meta |= {key: list(getattr(self, key)) for key in _LISTS} | {"inputs": self._inputs}
        if self.schema is not None:
            meta["schema"] = self.schema.to_dict()
        saved.write(Path(folder), self._arrays, meta)

    @classmethod
    def open(cls, folder: Path | str) -> "FederatedData":
        """Map a saved data set into memory: a million clients open without being read."""
        meta = saved.read_meta(
            Path(folder),
            {"classes": int},
            {
                **_SAID,
                **{key: [] for key in _LISTS},
                "schema": {},
                "inputs": [],
                "test_of_clients": False,  # what data said before they had owners
            },
        )
        of_clients = meta.pop("test_of_clients")
        schema = TableSchema.from_dict(meta["schema"]) if meta["schema"] else None
        meta |= {"remarks": tuple(map(str, meta["remarks"])), "schema": schema}
        meta["elsewhere"] = tuple(meta["elsewhere"])
        inputs = [check_input(f"{folder}: records", name) for name in meta.pop("inputs")]
        named = [f"{x}.{name}" for x in ("x", "test_x") for name in inputs]
        alone = [name for name in _ARRAYS if not (inputs and name in ("x", "test_x"))]
        arrays: dict[str, Any] = saved.read_arrays(Path(folder), [*alone, *named], _OPTIONAL)
        if inputs:
            for x in ("x", "test_x"):
                arrays[x] = {name: arrays.pop(f"{x}.{name}") for name in inputs}
        if of_clients and arrays["test_owners"] is None:
            arrays["test_owners"] = np.zeros(len(arrays["test_y"]), dtype=np.int64)
        return cls(**{**arrays, "offsets": np.asarray(arrays["offsets"]), **meta})


def _behind(parts: list[Array]) -> Array:
    """Concatenate arrays, in the type of the first."""
    return np.concatenate([part.astype(parts[0].dtype, copy=False) for part in parts])


def _owners_named(owners: Sequence[str], clients: Array, records: int) -> npt.NDArray[np.int64]:
    """The number of each test record's owner, a client's or one below -1."""
    if isinstance(owners, str) or len(owners) != records:
        raise BadInput(
            f"test_owners is {shown(owners)}: one name for each of {records} test records is needed"
        )
    place = {str(name): k for k, name in enumerate(clients.tolist())}
    others = {name: k for k, name in enumerate(dict.fromkeys(map(str, owners)))}
    named = map(str, owners)
    return np.array([place.get(n, int(held_out_number(others[n]))) for n in named], dtype=np.int64)


def _joined(targets: list[Array]) -> Array:
    """Concatenate all clients' targets."""
    if len({y.shape[1:] for y in targets}) > 1:
        raise BadInput("clients' targets have different shapes: give all one shape")
    return np.concatenate(targets)
