"""Data sets of labels and bits for membership inference (Shokri et al. 2017).

Purchase100, Texas100 and Location30, from the text files or archives as published.
"""

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np

from fedveil.data.data_files import check_codes, find_file, malformed, read_npz, reading
from fedveil.data.loaded_records import Records
from fedveil.data.split import holdout
from fedveil.data.user_arrays import Array

_PURCHASE_CLASSES = 100
_PURCHASE_FEATURES = 600
_PURCHASE_FILE = "dataset_purchase"
_TEXAS_CLASSES = 100
_TEXAS_FEATURES = 6169
_TEXAS_FOLDER = "texas/100"
_LOCATION_CLASSES = 30
_LOCATION_FEATURES = 446
_LOCATION_BYTES = (_LOCATION_FEATURES + 7) // 8
_ARCHIVE = ".tgz"


def load_purchase100(root: Path) -> Records:
    """197,324 shoppers as 600 bits, what they bought, in 100 clusters.

    Bits are [N, 600] of 0 or 1, with a fixed 80/20 split. The text file wins over the archive.
    """
    path = find_file(
        root,
        [f"purchase100/{_PURCHASE_FILE}", f"purchase100/{_PURCHASE_FILE}.tgz"],
        expected=f"{_PURCHASE_FILE}.tgz, or the file in it, as published for membership inference",
    )
    wanted = f"lines of a label and {_PURCHASE_FEATURES} bits, separated by commas"
    table = _table_of(path, _PURCHASE_FILE, 1 + _PURCHASE_FEATURES, wanted)
    labels, bits = table[:, 0], table[:, 1:]
    _check_bits(path, bits, wanted)
    check_codes(path, labels, records=len(table), count=_PURCHASE_CLASSES, first=1)
    x, y = bits.astype(np.float32), labels.astype(np.int64) - 1
    train, test = holdout(len(x))
    return Records("purchase100", x[train], y[train], x[test], y[test], classes=_PURCHASE_CLASSES)


def load_texas100(root: Path) -> Records:
    """67,330 hospital stays as 6,169 bits, in 100 procedures.

    Bits are [N, 6169] of 0 or 1, with a fixed 80/20 split, and take 1.7 GB as numbers. Unpacked
    files win over the archive.
    """
    places = [
        "texas100/feats",
        f"texas100/{_TEXAS_FOLDER}/feats",
        f"texas100/dataset_texas{_ARCHIVE}",
    ]
    path = find_file(
        root,
        places,
        expected="dataset_texas.tgz, or feats and labels in it, as published for membership "
        "inference",
    )
    beside = path if path.suffix == _ARCHIVE else path.with_name("labels")
    if not beside.is_file():
        raise malformed(path, "a file labels beside it", "none")
    wanted = f"lines of {_TEXAS_FEATURES} bits, separated by commas"
    bits = _table_of(path, f"{_TEXAS_FOLDER}/feats", _TEXAS_FEATURES, wanted)
    _check_bits(path, bits, wanted)
    labels = _table_of(beside, f"{_TEXAS_FOLDER}/labels", 1, "lines of one label")[:, 0]
    check_codes(beside, labels, records=len(bits), count=_TEXAS_CLASSES, first=1)
    y = labels.astype(np.int64) - 1
    train, test = holdout(len(y))
    x, test_x = bits[train].astype(np.float32), bits[test].astype(np.float32)
    return Records("texas100", x, y[train], test_x, y[test], classes=_TEXAS_CLASSES)


def load_location30(root: Path) -> Records:
    """5,010 users as 446 bits, the places they visited, in 30 clusters.

    Bits are [N, 446] of 0 or 1, with a fixed 80/20 split. The text file wins over the npz.
    """
    path = find_file(
        root,
        ["location30/bangkok", "location30/location30.npz"],
        expected="the file bangkok of dataset_location.tgz, as published for membership inference",
    )
    bits, labels = _read_compact(path) if path.suffix == ".npz" else _read_text(path)
    x, y = bits.astype(np.float32), labels.astype(np.int64)
    train, test = holdout(len(x))
    return Records("location30", x[train], y[train], x[test], y[test], classes=_LOCATION_CLASSES)


def _read_compact(path: Path) -> tuple[Array, Array]:
    arrays = read_npz(path, ("x_packed", "n_features", "y"))
    packed, features = arrays["x_packed"], arrays["n_features"]
    if (
        packed.dtype != np.uint8
        or packed.shape[1:] != (_LOCATION_BYTES,)
        or features.tolist() != _LOCATION_FEATURES
    ):
        raise malformed(
            path,
            f"{_LOCATION_FEATURES} features packed into x_packed of {_LOCATION_BYTES} bytes a "
            "record",
            f"n_features {features.tolist()} and x_packed {packed.dtype} {packed.shape}",
        )
    check_codes(path, arrays["y"], records=len(packed), count=_LOCATION_CLASSES)
    return np.unpackbits(packed, axis=1, count=_LOCATION_FEATURES), arrays["y"]


def _read_text(path: Path) -> tuple[Array, Array]:
    """Lines of a label counted from 1, then the bits, separated by commas."""
    wanted = f"lines of a label and {_LOCATION_FEATURES} bits, separated by commas"
    table = _table_of(path, "bangkok", 1 + _LOCATION_FEATURES, wanted)
    labels, bits = table[:, 0], table[:, 1:]
    _check_bits(path, bits, wanted)
    check_codes(path, labels, records=len(table), count=_LOCATION_CLASSES, first=1)
    return bits, labels - 1


@contextmanager
def _opened(path: Path, member: str, wanted: str) -> Iterator[TextIO]:
    """A text file, or the `member` of that name of an archive, which is not unpacked."""
    if path.suffix != _ARCHIVE:
        with path.open() as stream:
            yield stream
        return
    with tarfile.open(path, "r:gz") as archive:
        try:
            found = archive.extractfile(member)
        except KeyError as e:
            raise malformed(path, wanted, f"no file {member}") from e
        if found is None:
            raise malformed(path, wanted, f"{member}, which is no file")
        with io.TextIOWrapper(found) as stream:
            yield stream


def _table_of(path: Path, member: str, width: int, wanted: str) -> Array:
    """Lines of `width` whole numbers from 0 to 255, separated by commas, as uint8 [N, width]."""
    with reading(path, wanted, OverflowError, tarfile.TarError):
        if path.stat().st_size == 0:
            raise malformed(path, wanted, "an empty file")
        with _opened(path, member, wanted) as stream:
            table: Array = np.loadtxt(
                stream, dtype=np.uint8, delimiter=",", quotechar='"', ndmin=2, comments=None
            )
    if len(table) == 0 or table.shape[1] != width:
        raise malformed(path, wanted, f"{table.shape[1]} values a line")
    return table


def _check_bits(path: Path, bits: Array, wanted: str) -> None:
    """Refuse values other than 0 and 1."""
    if bits.max(initial=0) > 1:
        raise malformed(path, wanted, f"values from {bits.min()} to {bits.max()}")
