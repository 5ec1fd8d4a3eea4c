"""FEMNIST: handwritten characters by writer, from LEAF's json files or a compact npz.

Pixels are ink: 1 where the writer wrote, 0 for the paper. LEAF stores the opposite.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.base.errors import BadInput
from fedveil.data.data_files import check_codes, find_file, malformed, read_npz, reading
from fedveil.data.federated import Array
from fedveil.data.loaded_records import Records, left_out

_CLASSES, _DIGITS = 62, 10
_COMPACT = "femnist/femnist_673writers.npz"
_KEYS = ("x", "y", "writer", "split", "writer_id")


def load(root: Path, *, min_records: int = 20, digits: bool = False) -> Records:
    """Characters as [N, 1, 28, 28], owned by their writers.

    LEAF's files win over the npz. With `digits`, only those are kept, labels 0 to 9. Writers with
    fewer than `min_records` training records are left out with their test records: LEAF's sampler
    cuts a few writers down to a handful. The split is the source's own.
    """
    if min_records < 1:
        raise BadInput(f"min_records is {min_records}: use 1 or more")
    path = find_file(
        root,
        ["femnist/train", _COMPACT],
        expected="the train and test folders that LEAF's femnist preprocessing writes, or the npz",
    )
    if path.is_dir():
        ink, y, writer, names, train = _read_leaf(root / "femnist")
    else:
        ink, y, writer, names, train = _read_compact(path)
    if digits:
        kept = np.flatnonzero(y < _DIGITS)
        ink, y, writer, train = ink[kept], y[kept], writer[kept], train[kept]
    per_writer = np.bincount(writer[train], minlength=len(names))
    kept = np.flatnonzero(per_writer >= min_records)
    if len(kept) == 0:
        raise BadInput(
            f"no femnist writer has {min_records} training records, the most is "
            f"{per_writer.max()}: lower min_records"
        )
    index = np.full(len(names), -1)
    index[kept] = np.arange(len(kept))
    owner = index[writer]
    train_rows = np.flatnonzero(train & (owner >= 0))
    test_rows = np.flatnonzero(~train & (owner >= 0))
    return Records(
        "femnist",
        ink[train_rows],
        y[train_rows],
        ink[test_rows],
        y[test_rows],
        classes=_DIGITS if digits else _CLASSES,
        owners=owner[train_rows],
        owner_names=names[kept],
        test_owners=owner[test_rows],
        remarks=(left_out(min_records),),
    )


def _read_compact(path: Path) -> tuple[Array, Array, Array, Array, Array]:
    arrays = read_npz(path, _KEYS)
    x, writer, names = arrays["x"], arrays["writer"], arrays["writer_id"]
    if x.dtype != np.uint8 or x.shape[1:] != (28, 28) or len(x) == 0:
        raise malformed(path, "x as bytes of shape (N, 28, 28)", f"{x.dtype} {x.shape}")
    if names.ndim != 1 or names.dtype.kind != "U" or len(np.unique(names)) != len(names):
        raise malformed(path, "writer_id as distinct names", f"{names.dtype} {names.shape}")
    check_codes(path, arrays["y"], records=len(x), count=_CLASSES)
    check_codes(path, writer, records=len(x), count=len(names), what="writers")
    check_codes(path, arrays["split"], records=len(x), count=2, what="splits")
    ink = np.divide(255 - x[:, None], 255, dtype=np.float32)
    return ink, arrays["y"].astype(np.int64), writer, names, arrays["split"] == 0


def _read_leaf(folder: Path) -> tuple[Array, Array, Array, Array, Array]:
    names: dict[str, int] = {}
    pixels, labels, writers, trains = [], [], [], []
    for part in ("train", "test"):
        seen: set[str] = set()
        for path, user, x, y in _leaf_users(folder / part):
            if user in seen:
                raise malformed(path, "every writer once", f"writer {user!r} again")
            seen.add(user)
            pixels.append(x)
            labels.append(y)
            writers.append(np.full(len(y), names.setdefault(user, len(names))))
            trains.append(np.full(len(y), part == "train"))
    ink = 1 - np.concatenate(pixels).reshape(-1, 1, 28, 28)
    return (
        ink,
        np.concatenate(labels),
        np.concatenate(writers),
        np.array(list(names)),
        np.concatenate(trains),
    )


def _leaf_users(folder: Path) -> Iterator[tuple[Path, str, Array, Array]]:
    """(file, writer, pixels, labels) for every writer in the json files of a folder."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise BadInput(f"{folder} has no json file: expected what LEAF's preprocessing writes")
    for path in files:
        with reading(
            path, "LEAF json with users, num_samples, user_data", TypeError, RecursionError
        ):
            content = json.loads(path.read_bytes())
            users, counts, data = content["users"], content["num_samples"], content["user_data"]
            pairs = list(zip(users, counts, strict=True))
        if not pairs:
            raise malformed(path, "at least one writer", "none")
        for user, count in pairs:
            yield path, str(user), *_leaf_records(path, user, count, data)


def _leaf_records(path: Path, user: Any, count: Any, data: Any) -> tuple[Array, Array]:
    """One writer's pixels as [n, 784] and labels."""
    with reading(path, f"x and y of writer {user!r}", TypeError, IndexError):
        x = np.asarray(data[user]["x"], dtype=np.float32)
        y = np.asarray(data[user]["y"])
    if x.shape != (count, 784) or count == 0 or not ((x >= 0) & (x <= 1)).all():
        raise malformed(
            path, f"{count} x 784 pixels in 0..1 for writer {user!r}", f"shape {x.shape}"
        )
    check_codes(path, y, records=len(x), count=_CLASSES)
    return x, y.astype(np.int64)
