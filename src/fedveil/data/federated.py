"""`FederatedData`: the records of many clients as slices of one array."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.data import saved
from fedveil.data.arrays import Array as Array
from fedveil.data.arrays import (
    check_classes,
    check_not_labels,
    joined_features,
    pair,
    targets_of,
    triples,
)
from fedveil.data.structure import check_structure
from fedveil.errors import BadInput

_SAID: dict[str, Any] = {"fitted": "", "declared_public": False, "test_of_clients": False}
"""What is said of the records beside the arrays, and what holds where nothing is said."""

_ARRAYS = ("x", "y", "offsets", "test_x", "test_y", "names")

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
        check_structure(
            {name: getattr(self, name) for name in _ARRAYS}, self.classes, self.client_name
        )
        if self.declared_public and not self.fitted:
            raise BadInput("declared_public is given and fitted is empty: name what is public")

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
        for name in _ARRAYS:
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
        meta = {"classes": self.classes, **{key: getattr(self, key) for key in _SAID}}
        saved.write(Path(folder), {name: getattr(self, name) for name in _ARRAYS}, meta)

    @classmethod
    def open(cls, folder: Path | str) -> "FederatedData":
        """Map a saved data set into memory: a million clients open without being read."""
        meta = saved.read_meta(Path(folder), {"classes": int}, _SAID)
        arrays: dict[str, Any] = saved.read_arrays(Path(folder), _ARRAYS, optional=("names",))
        return cls(**{**arrays, "offsets": np.asarray(arrays["offsets"]), **meta})


def _pieces(array: Array) -> Iterable[tuple[int, Array]]:
    """(first row, rows) over the leading axis, `_SCAN` elements at a time."""
    rows = max(1, _SCAN // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]


def _joined(targets: list[Array]) -> Array:
    """All clients' targets behind each other; `check_structure` refuses other than one each."""
    if len({y.shape[1:] for y in targets}) > 1:
        raise BadInput("clients' targets have different shapes: give one per record")
    return np.concatenate(targets)
