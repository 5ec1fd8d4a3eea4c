"""Location30: 5,010 users as 446 visited-place bits, in 30 clusters (Shokri et al. 2017)."""

from pathlib import Path

import numpy as np

from fedveil.data.bits import check_bits, table_of
from fedveil.data.data_files import check_codes, find_file, malformed, read_npz
from fedveil.data.federated import Array
from fedveil.data.loaded_records import Records
from fedveil.data.split import holdout

_CLASSES = 30
_FEATURES = 446
_BYTES = (_FEATURES + 7) // 8


def load(root: Path) -> Records:
    """Bits as [N, 446] of 0 or 1 with a fixed 80/20 split.

    The text file wins over the npz.
    """
    path = find_file(
        root,
        ["location30/bangkok", "location30/location30.npz"],
        expected="the file bangkok of dataset_location.tgz, as published for membership inference",
    )
    bits, labels = _read_compact(path) if path.suffix == ".npz" else _read_text(path)
    x, y = bits.astype(np.float32), labels.astype(np.int64)
    train, test = holdout(len(x))
    return Records("location30", x[train], y[train], x[test], y[test], classes=_CLASSES)


def _read_compact(path: Path) -> tuple[Array, Array]:
    arrays = read_npz(path, ("x_packed", "n_features", "y"))
    packed, features = arrays["x_packed"], arrays["n_features"]
    if packed.dtype != np.uint8 or packed.shape[1:] != (_BYTES,) or features.tolist() != _FEATURES:
        raise malformed(
            path,
            f"{_FEATURES} features packed into x_packed of {_BYTES} bytes a record",
            f"n_features {features.tolist()} and x_packed {packed.dtype} {packed.shape}",
        )
    check_codes(path, arrays["y"], records=len(packed), count=_CLASSES)
    return np.unpackbits(packed, axis=1, count=_FEATURES), arrays["y"]


def _read_text(path: Path) -> tuple[Array, Array]:
    """Lines of a label counted from 1, then the bits, separated by commas."""
    wanted = f"lines of a label and {_FEATURES} bits, separated by commas"
    table = table_of(path, "bangkok", 1 + _FEATURES, wanted)
    labels, bits = table[:, 0], table[:, 1:]
    check_bits(path, bits, wanted)
    check_codes(path, labels, records=len(table), count=_CLASSES, first=1)
    return bits, labels - 1
