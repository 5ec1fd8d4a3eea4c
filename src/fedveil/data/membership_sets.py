"""Data sets of labels and bits for membership inference (Shokri et al. 2017).

Purchase100, Texas100 and Location30, from the text files or archives as published. Bits are
[N, features] of 0 or 1, with a fixed 80/20 split.
"""

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np

from fedveil.data.data_files import check_codes, find_file, malformed, read_npz, reading
from fedveil.data.partition import Records
from fedveil.data.user_arrays import Array

_PLACES, _PLACE_BYTES = 446, 56  # features of Location30, and the bytes that they are packed into


def load_purchase100(root: Path) -> Records:
    """197,324 shoppers as 600 bits, what they bought, in 100 clusters.

    The text file wins over the archive.
    """
    file = "dataset_purchase"
    path = find_file(
        root,
        [f"purchase100/{file}", f"purchase100/{file}.tgz"],
        expected=f"{file}.tgz, or the file in it, as published for membership inference",
    )
    bits, y = _labelled_bits(path, file, features=600, classes=100)
    return Records.with_holdout("purchase100", bits, y, classes=100)


def load_texas100(root: Path) -> Records:
    """67,330 hospital stays as 6,169 bits, in 100 procedures. They take 1.7 GB as numbers.

    Unpacked files win over the archive.
    """
    path = find_file(
        root,
        ["texas100/feats", "texas100/texas/100/feats", "texas100/dataset_texas.tgz"],
        expected="dataset_texas.tgz, or feats and labels in it, as published for membership "
        "inference",
    )
    labels_path = path if path.suffix == ".tgz" else path.with_name("labels")
    if not labels_path.is_file():
        raise malformed(path, "a file labels beside it", "none")
    wanted = "lines of 6169 bits, separated by commas"
    bits = _table_of(path, "texas/100/feats", 6169, wanted)
    _check_bits(path, bits, wanted)
    labels = _table_of(labels_path, "texas/100/labels", 1, "lines of one label")[:, 0]
    check_codes(labels_path, labels, records=len(bits), count=100, first=1)
    return Records.with_holdout("texas100", bits, labels.astype(np.int64) - 1, classes=100)


def load_location30(root: Path) -> Records:
    """5,010 users as 446 bits, the places they visited, in 30 clusters.

    The text file wins over the npz.
    """
    path = find_file(
        root,
        ["location30/bangkok", "location30/location30.npz"],
        expected="the file bangkok of dataset_location.tgz, as published for membership inference",
    )
    if path.suffix == ".npz":
        bits, y = _read_location_npz(path)
    else:
        bits, y = _labelled_bits(path, "bangkok", features=_PLACES, classes=30)
    return Records.with_holdout("location30", bits, y, classes=30)


def _read_location_npz(path: Path) -> tuple[Array, Array]:
    arrays = read_npz(path, ("x_packed", "n_features", "y"))
    packed, features, labels = arrays["x_packed"], arrays["n_features"].tolist(), arrays["y"]
    if packed.dtype != np.uint8 or packed.shape[1:] != (_PLACE_BYTES,) or features != _PLACES:
        raise malformed(
            path,
            f"{_PLACES} features packed into x_packed of {_PLACE_BYTES} bytes a record",
            f"n_features {features} and x_packed {packed.dtype} {packed.shape}",
        )
    check_codes(path, labels, records=len(packed), count=30)
    return np.unpackbits(packed, axis=1, count=_PLACES), labels.astype(np.int64)


def _labelled_bits(path: Path, file: str, *, features: int, classes: int) -> tuple[Array, Array]:
    """Bits, and labels from 0 on, of lines that begin with a label counted from 1."""
    wanted = f"lines of a label and {features} bits, separated by commas"
    table = _table_of(path, file, 1 + features, wanted)
    labels, bits = table[:, 0], table[:, 1:]
    _check_bits(path, bits, wanted)
    check_codes(path, labels, records=len(table), count=classes, first=1)
    return bits, labels.astype(np.int64) - 1


@contextmanager
def _opened(path: Path, member: str, wanted: str) -> Iterator[TextIO]:
    """A text file, or the `member` of that name of an archive, which is not unpacked."""
    if path.suffix != ".tgz":
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
