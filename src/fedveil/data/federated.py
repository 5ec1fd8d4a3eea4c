"""`FederatedData`: the records of many clients as slices of one array."""

import hashlib
import json
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.checks import shown
from fedveil.data.arrays import Array as Array
from fedveil.data.arrays import (
    check_classes,
    check_not_labels,
    described,
    joined_features,
    pair,
    targets_of,
    triples,
)
from fedveil.errors import BadInput

UNREADABLE = (
    *(OSError, EOFError, ValueError, TypeError, MemoryError, RuntimeError, SyntaxError, Warning),
    tokenize.TokenError,
)
"""What numpy raises for a broken .npy file, whose header is a Python literal."""


@contextmanager
def strictly() -> Iterator[None]:
    """Raise what would only be warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


_SAID: dict[str, Any] = {"fitted": "", "declared_public": False, "test_of_clients": False}
"""What is said of the records beside the arrays, and what holds where nothing is said."""

_SCAN = 1 << 24  # elements looked at in one go, so that a memory map is never loaded whole


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Records of N clients: client k owns rows `offsets[k]:offsets[k + 1]` of `x` and `y`.

    The arrays may be memory maps: nothing here copies them. `x` is [records, ...], floating
    point or integer. `classes` is the number of labels, `y` then [records] of integers; or 0
    when `y` is real numbers to be predicted. `names` may be None: client k is then "k".

    Test records are measured in the clear: they belong to no client, unless `test_of_clients` says
    that some do. `fitted` names what of the features was fitted on all clients' records in the
    clear (means, say), "" if nothing was; `declared_public` says that it is known from elsewhere.
    Claims say so (`assumptions`), and secure noise refuses what they do not cover (`check_secure`).

    >>> data = FederatedData.from_clients(
    ...     [("ada", [[0.0], [1.0]], [0, 1]), ("bob", [[2.0]], [1])],
    ...     test=([[1.0]], [1]), classes=2)
    >>> data.clients, data.sizes.tolist(), data.client_name(1)
    (2, [2, 1], 'bob')
    """

    x: Array
    y: Array
    offsets: npt.NDArray[np.int64]
    test_x: Array
    test_y: Array
    classes: int
    names: Array | None = None
    fitted: str = ""
    declared_public: bool = False
    test_of_clients: bool = False

    def __post_init__(self) -> None:
        _check_structure(self)
        if self.declared_public and not self.fitted:
            raise BadInput("declared_public is given and fitted is empty: name what is public")

    def __repr__(self) -> str:
        records = described(self.x, self.test_x, self.classes)
        return f"FederatedData({self.clients:,} clients, {records})"

    @classmethod
    def from_clients(
        cls,
        clients: Iterable[tuple[str, Any, Any]],
        *,
        test: tuple[Any, Any],
        classes: int,
        fitted: str = "",
        declared_public: bool = False,
        test_of_clients: bool = False,
    ) -> "FederatedData":
        """Build from (name, features, targets) triples, one per client.

        Features stay whole numbers (int64) if all of them are, and become float32 otherwise.
        """
        check_classes(classes)
        named, (test_x, test_y) = triples(clients), pair(test)
        if not named:
            raise BadInput("no clients: give at least one (name, x, y)")
        for name, x, y in named:
            if len(x) != len(y):
                raise BadInput(f"client {name!r} has {len(x)} feature rows and {len(y)} targets")
            if x.shape[1:] != named[0][1].shape[1:]:
                raise BadInput(
                    f"client {name!r} has records of shape {x.shape[1:]}, "
                    f"client {named[0][0]!r} of shape {named[0][1].shape[1:]}"
                )
        y = _joined([y for _, _, y in named])
        check_not_labels(y, classes)
        all_x, test_x = joined_features([x for _, x, _ in named], test_x)
        return cls(
            x=all_x,
            y=targets_of(y, classes),
            offsets=np.cumsum([0, *(len(x) for _, x, _ in named)], dtype=np.int64),
            test_x=test_x,
            test_y=targets_of(test_y, classes),
            classes=classes,
            names=np.array([name for name, _, _ in named]),
            fitted=fitted,
            declared_public=declared_public,
            test_of_clients=test_of_clients,
        )

    @cached_property
    def derived(self) -> dict[str, Any]:
        """What was computed from these records and is kept with them, by name.

        Like the fingerprint it is never computed again: records are replaced, not changed in place.
        """
        return {}

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Records per client."""
        return np.diff(self.offsets)

    @property
    def record_shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape[1:])

    def client_name(self, client: int) -> str:
        return str(client) if self.names is None else str(self.names[client])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What every claim about these clients has to say."""
        said = []
        if self.fitted and self.declared_public:
            said.append(f"declared public: {self.fitted}")
        elif self.fitted:
            said.append(
                f"{self.fitted} were fitted on all clients' records in the clear: outside this "
                "claim"
            )
        if self.test_of_clients:
            said.append(
                "test records of the clients themselves are measured in the clear: outside this "
                "claim"
            )
        return tuple(said)

    def check_secure(self) -> None:
        """Refuse, for secure noise, what was or will be computed of clients' records without any.

        | edge | behaviour |
        |---|---|
        | something was fitted on clients' records | BadInput |
        | it is declared public | allowed, and the claim says so |
        | some test records are clients' | BadInput |
        """
        if self.fitted and not self.declared_public:
            raise BadInput(
                f"noise.source is 'secure' and {self.fitted} were fitted on all clients' records "
                "in the clear: fit them on the test split (data.statistics = 'held-out'), or "
                "declare them public ('public', or declared_public=True)"
            )
        if self.test_of_clients:
            raise BadInput(
                "noise.source is 'secure' and test records are the clients' own, measured in the "
                "clear: hold clients out (data.test = 'by-client')"
            )

    def check(self) -> None:
        """Refuse values no model can learn from. Reads the arrays once, piece by piece."""
        for name, array in (
            ("x", self.x),
            ("y", self.y),
            ("test_x", self.test_x),
            ("test_y", self.test_y),
        ):
            for start, piece in _pieces(array):
                if array.dtype.kind == "f" and not np.isfinite(piece).all():
                    row = start + int(np.argwhere(~np.isfinite(piece))[0][0])
                    raise BadInput(
                        f"{name} row {row}{self._owner(name, row)} is not finite: "
                        "remove the record or fill the value in"
                    )
                if name.endswith("y") and self.classes:
                    bad = np.flatnonzero((piece < 0) | (piece >= self.classes))
                    if len(bad):
                        row = start + int(bad[0])
                        raise BadInput(
                            f"{name} row {row}{self._owner(name, row)} has label "
                            f"{piece[bad[0]]}, outside 0..{self.classes - 1}"
                        )

    def _owner(self, name: str, row: int) -> str:
        if name.startswith("test"):
            return ""
        client = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return f" (client {self.client_name(client)!r})"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything: two data sets with one fingerprint are the same data."""
        digest = hashlib.sha256(f"fedveil-data-1 classes={self.classes}".encode())
        if self.fitted or self.test_of_clients:
            digest.update(json.dumps([self.fitted, self.test_of_clients]).encode())
        for name in ("x", "y", "offsets", "test_x", "test_y", "names"):
            array = getattr(self, name)
            if array is None:
                digest.update(f"|{name} none".encode())
                continue
            if name == "names":
                digest.update(("|names " + json.dumps(array.tolist())).encode())
                continue
            digest.update(f"|{name} {array.dtype.str} {array.shape}".encode())
            for _, piece in _pieces(array):
                digest.update(np.ascontiguousarray(piece).tobytes())
        return digest.hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write one .npy per array into a new folder, the layout that `open` maps into memory."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True)
        except FileExistsError as e:
            raise BadInput(f"{folder} exists: save into a new folder") from e
        except OSError as e:
            raise BadInput(f"{shown(str(folder))} cannot be made: {e.strerror}") from e
        for name in ("x", "y", "offsets", "test_x", "test_y", "names"):
            if getattr(self, name) is not None:
                np.save(folder / f"{name}.npy", getattr(self, name), allow_pickle=False)
        meta = {"classes": self.classes, **{key: getattr(self, key) for key in _SAID}}
        (folder / "meta.json").write_text(json.dumps(meta) + "\n")

    @classmethod
    def open(cls, folder: Path | str) -> "FederatedData":
        """Map a saved data set into memory: a million clients open without being read."""
        folder = Path(folder)

        def load(name: str) -> Array:
            try:
                with strictly(), (folder / f"{name}.npy").open("rb") as stream:
                    np.lib.format.read_magic(stream)  # np.load would take other files as well
                with strictly():
                    array: Array = np.load(
                        folder / f"{name}.npy", mmap_mode="r", allow_pickle=False
                    )
                return array
            except UNREADABLE as e:
                reason = " ".join(str(e).split())
                raise BadInput(
                    f"{folder / name}.npy: {reason}; expected what FederatedData.save wrote"
                ) from e

        try:
            meta = json.loads((folder / "meta.json").read_text())
            classes = meta["classes"]
            said = {key: meta.get(key, plain) for key, plain in _SAID.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise BadInput(f"{folder / 'meta.json'}: not a saved data set ({e})") from e
        if type(classes) is not int:
            raise BadInput(f"{folder / 'meta.json'}: classes is {classes!r}, not a whole number")
        for key, value in said.items():
            if type(value) is not type(_SAID[key]):
                raise BadInput(f"{folder / 'meta.json'}: {key} is {value!r}, not what save writes")
        return cls(
            x=load("x"),
            y=load("y"),
            offsets=np.asarray(load("offsets")),
            test_x=load("test_x"),
            test_y=load("test_y"),
            classes=classes,
            names=load("names") if (folder / "names.npy").exists() else None,
            **said,
        )


def _pieces(array: Array) -> Iterable[tuple[int, Array]]:
    """(first row, rows) over the leading axis, `_SCAN` elements at a time."""
    rows = max(1, _SCAN // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]


def _joined(targets: list[Array]) -> Array:
    """All clients' targets behind each other; `_check_structure` refuses other than one each."""
    if len({y.shape[1:] for y in targets}) > 1:
        raise BadInput("clients' targets have different shapes: give one per record")
    return np.concatenate(targets)


def _check_structure(data: FederatedData) -> None:
    """Refuse shapes that do not belong together. Looks at offsets and names, not at records."""
    check_classes(data.classes)
    for name in ("x", "y", "offsets", "test_x", "test_y"):
        if not isinstance(getattr(data, name), np.ndarray):
            raise BadInput(
                f"{name} is {shown(getattr(data, name))}: an array is needed (or use from_clients)"
            )
    if data.test_x.shape[:1] == (0,):
        raise BadInput("the test split is empty: hold some records back")
    for name, array, kinds, dims in (
        ("offsets", data.offsets, "iu", (1,)),
        ("x", data.x, "iuf", range(1, 9)),
        ("test_x", data.test_x, "iuf", range(1, 9)),
        ("y", data.y, "i" if data.classes else "f", (1,)),
        ("test_y", data.test_y, "i" if data.classes else "f", (1,)),
    ):
        if array.dtype.kind not in kinds or array.ndim not in dims:
            raise BadInput(
                f"{name} is a {array.ndim}-dimensional array of {array.dtype}: see FederatedData "
                "for what it must be"
            )
    offsets, n = data.offsets, len(data.x)
    if len(offsets) < 2:
        raise BadInput("no clients: offsets need at least two entries")
    if offsets[0] != 0 or offsets[-1] != n or (np.diff(offsets) < 0).any():
        raise BadInput(f"offsets must rise from 0 to the number of records, {n}")
    if len(data.y) != n:
        raise BadInput(f"{n} feature rows and {len(data.y)} targets")
    if len(data.test_x) != len(data.test_y):
        raise BadInput(f"{len(data.test_x)} test rows and {len(data.test_y)} test targets")
    if data.test_x.shape[1:] != data.x.shape[1:]:
        raise BadInput(
            f"test records have shape {data.test_x.shape[1:]}, training records {data.x.shape[1:]}"
        )
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        raise BadInput(
            f"client {data.client_name(int(empty[0]))!r} has no records: "
            "leave it out or use fewer clients"
        )
    if data.names is not None:
        if len(data.names) != len(offsets) - 1:
            raise BadInput(f"{len(data.names)} names for {len(offsets) - 1} clients")
        unique, counts = np.unique(data.names, return_counts=True)
        if (counts > 1).any():
            raise BadInput(
                f"client {str(unique[counts > 1][0])!r} appears twice: "
                "merge its records or rename one"
            )
