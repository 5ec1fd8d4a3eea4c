"""Data sets of images: digits, MNIST and Fashion-MNIST, CIFAR-10, FEMNIST.

Images are [N, channels, height, width] of numbers from 0 to 1.
"""

import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from fedveil.base.errors import BadInput
from fedveil.data.data_files import (
    check_codes,
    find_file,
    malformed,
    open_bytes,
    read_exactly,
    read_npz,
    reading,
    warnings_as_errors,
)
from fedveil.data.partition import Records, few_records_assumption
from fedveil.data.user_arrays import Array


def load_digits() -> Records:
    """The 1,797 handwritten 8x8 digits that come with scikit-learn, with a fixed 80/20 split.

    Every call returns arrays of its own.
    """
    x, y = _read_digits()
    return Records.with_holdout("digits", x, y, classes=10)


@cache
def _read_digits() -> tuple[Array, Array]:
    """(images [1797, 1, 8, 8] from 0 to 1, labels) in scikit-learn's order.

    They are read from a file in scikit-learn's folder, since importing scikit-learn takes a second.
    It is imported only if the file is missing.
    """
    library = importlib.util.find_spec("sklearn")
    path = Path(library.origin if library and library.origin else "").parent
    path = path / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        rows = np.loadtxt(path, delimiter=",")
        images, labels = rows[:, :-1], rows[:, -1]
    else:
        from sklearn import datasets

        images, labels = datasets.load_digits(return_X_y=True)
    x = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return x, labels.astype(np.int64)


_MNIST_RECORDS = 60_000
_UNSIGNED_BYTES = 0x08


def load_mnist(root: Path, name: str = "mnist") -> Records:
    """The 28x28 images of MNIST or Fashion-MNIST from four idx files, gzip-ed or not.

    They are in the subfolder `name` of `root`: mnist or fashion-mnist. Raises BadInput if one is
    missing or malformed.
    """
    arrays: list[Array] = []
    for part in ("train", "t10k"):
        images, _ = _read_idx(root, name, f"{part}-images-idx3-ubyte", (28, 28))
        labels, path = _read_idx(root, name, f"{part}-labels-idx1-ubyte", ())
        check_codes(path, labels, records=len(images), count=10)
        arrays += [np.divide(images[:, None], 255, dtype=np.float32), labels.astype(np.int64)]
    x, y, test_x, test_y = arrays
    return Records(name, x, y, test_x, test_y, classes=10)


def _read_idx(
    root: Path, name: str, file: str, record_shape: tuple[int, ...]
) -> tuple[Array, Path]:
    """(the bytes of an idx file as uint8 [records, *record_shape], its path).

    Raises BadInput if there is no such file in the subfolder `name`, or its records have another
    shape.
    """
    path = find_file(
        root,
        [f"{name}/{file}.gz", f"{name}/{file}"],
        expected=f"the four idx files of {name}, from its page or any mirror",
    )
    dimensions = 1 + len(record_shape)
    wanted = f"an idx file of bytes, at most {_MNIST_RECORDS} records of shape {record_shape}"
    with reading(path, wanted), open_bytes(path) as stream:
        header = stream.read(4 + 4 * dimensions)
        whole = len(header) == 4 + 4 * dimensions
        if not whole or header[:4] != bytes((0, 0, _UNSIGNED_BYTES, dimensions)):
            raise malformed(path, wanted, f"first bytes {header[:4].hex(' ') or 'missing'}")
        shape = tuple(int(n) for n in np.frombuffer(header, ">u4", offset=4))
        if shape[1:] != record_shape or not 0 < shape[0] <= _MNIST_RECORDS:
            raise malformed(path, wanted, f"shape {shape}")
        content = read_exactly(path, stream, math.prod(shape))
    return np.frombuffer(content, np.uint8).reshape(shape), path


_PIXELS = 3 * 32 * 32
_BATCH = 10_000  # records in a binary batch
_ROWS, _COLUMNS = 25, 40  # images in a mosaic
_CIFAR_FOLDERS = ("cifar10", "cifar10/cifar-10-batches-bin")


def load_cifar10(root: Path) -> Records:
    """Images of 3x32x32 from the published binary batches, or else from lossless webp mosaics.

    The published *python* batches are pickles, which can run code, so they are not read. Raises
    BadInput if files are missing or malformed.
    """
    first = find_file(
        root,
        [*(f"{folder}/data_batch_1.bin" for folder in _CIFAR_FOLDERS), "cifar10/train_labels.npy"],
        expected="the binary version of CIFAR-10 (six .bin files), from its page or any mirror",
    )
    folder = first.parent
    if first.suffix == ".bin":
        train = _read_batches([folder / f"data_batch_{batch}.bin" for batch in range(1, 6)])
        test = _read_batches([folder / "test_batch.bin"])
    else:
        train, test = _read_mosaics(folder, "train"), _read_mosaics(folder, "test")
    return Records("cifar10", *train, *test, classes=10)


def _read_batches(paths: Sequence[Path]) -> tuple[Array, Array]:
    """(images [N, 3, 32, 32] from 0 to 1, labels) of CIFAR-10's binary batches.

    Raises BadInput for a file of another length, or labels above 9.
    """
    size = _BATCH * (1 + _PIXELS)
    x = np.empty((len(paths) * _BATCH, 3, 32, 32), np.float32)
    labels = []
    for batch, path in enumerate(paths):
        wanted = f"a CIFAR-10 binary batch of {size} bytes"
        with reading(path, wanted), open_bytes(path) as stream:
            content = read_exactly(path, stream, size)
        records = np.frombuffer(content, np.uint8).reshape(_BATCH, 1 + _PIXELS)
        check_codes(path, records[:, 0], records=_BATCH, count=10)
        labels.append(records[:, 0])
        images = records[:, 1:].reshape(_BATCH, 3, 32, 32)
        np.divide(images, 255, out=x[batch * _BATCH : (batch + 1) * _BATCH], dtype=np.float32)
    return x, np.concatenate(labels).astype(np.int64)


def _read_mosaics(folder: Path, part: str) -> tuple[Array, Array]:
    """(images, labels) of `<part>_00.webp`, ... of 1,000 images each, and `<part>_labels.npy`.

    Images are [N, 3, 32, 32] from 0 to 1. Raises BadInput unless labels and images are as many.
    """
    tile = _ROWS * _COLUMNS
    path = folder / f"{part}_labels.npy"
    with reading(path, "an npy file of labels"), warnings_as_errors(), open_bytes(path) as stream:
        labels = np.lib.format.read_array(stream, allow_pickle=False)
    check_codes(path, labels, records=labels.size, count=10)
    mosaics = sorted(folder.glob(f"{part}_*.webp"))
    if len(labels) == 0 or len(labels) != len(mosaics) * tile:
        raise malformed(
            path,
            f"{tile} labels for each {part}_*.webp beside it",
            f"{len(labels)} labels and {len(mosaics)} mosaics",
        )
    x = np.empty((len(labels), 3, 32, 32), np.float32)
    for number, mosaic in enumerate(mosaics):
        place = x[number * tile : (number + 1) * tile]
        np.divide(_read_mosaic(mosaic), 255, out=place, dtype=np.float32)
    return x, labels.astype(np.int64)


def _read_mosaic(path: Path) -> Array:
    """The 1,000 images of one mosaic as bytes [1000, 3, 32, 32]."""
    from PIL import Image

    size = (_COLUMNS * 32, _ROWS * 32)
    wanted = f"a webp mosaic of {size[0]}x{size[1]} pixels"
    with (
        reading(path, wanted, SyntaxError, Image.DecompressionBombError),
        Image.open(path, formats=["WEBP"]) as image,
    ):
        if image.size != size:
            raise malformed(path, wanted, f"{image.size[0]}x{image.size[1]}")
        pixels = np.asarray(image.convert("RGB"))
    tiles = pixels.reshape(_ROWS, 32, _COLUMNS, 32, 3)
    return tiles.transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)


_CHARACTERS, _DIGITS = 62, 10
_FEMNIST_FILE = "femnist/femnist_673writers.npz"
_FEMNIST_ARRAYS = ("x", "y", "writer", "split", "writer_id")


def load_femnist(root: Path, *, min_records: int = 20, digits: bool = False) -> Records:
    """Characters as [N, 1, 28, 28], owned by their writers, from LEAF's json files or an npz.

    Pixels are ink: 1 where the writer wrote, 0 for the paper. LEAF stores the opposite, and its
    files win over the npz. With `digits`, only those are kept, labels 0 to 9. Writers with fewer
    than `min_records` training records are left out with their test records: LEAF's sampler cuts a
    few writers down to a handful. The split is the source's own. Raises BadInput if no writer has
    so many, or files are missing or malformed.
    """
    if min_records < 1:
        raise BadInput(f"min_records is {min_records}: use 1 or more")
    path = find_file(
        root,
        ["femnist/train", _FEMNIST_FILE],
        expected="the train and test folders that LEAF's femnist preprocessing writes, or the npz",
    )
    read = _read_leaf(path.parent) if path.is_dir() else _read_femnist_npz(path)
    ink, y, writer, train, names = read
    if digits:
        ink, y, writer, train = (array[y < _DIGITS] for array in (ink, y, writer, train))
    per_writer = np.bincount(writer[train], minlength=len(names))
    writers = np.flatnonzero(per_writer >= min_records)
    if len(writers) == 0:
        raise BadInput(
            f"no femnist writer has {min_records} training records, the most is "
            f"{per_writer.max()}: lower min_records"
        )
    index = np.full(len(names), -1)
    index[writers] = np.arange(len(writers))
    owner = index[writer]
    train_rows, test_rows = (np.flatnonzero(rows & (owner >= 0)) for rows in (train, ~train))
    return Records(
        "femnist",
        ink[train_rows],
        y[train_rows],
        ink[test_rows],
        y[test_rows],
        classes=_DIGITS if digits else _CHARACTERS,
        record_owners=owner[train_rows],
        owner_names=names[writers],
        test_owners=owner[test_rows],
        remarks=(few_records_assumption(min_records),),
    )


def _read_femnist_npz(path: Path) -> tuple[Array, ...]:
    """(ink [N, 1, 28, 28] from 0 to 1, labels, writers, mask of training records, writers' names).

    A writer is a place in the names. Raises BadInput for arrays of other forms.
    """
    arrays = read_npz(path, _FEMNIST_ARRAYS)
    x, writer, names = arrays["x"], arrays["writer"], arrays["writer_id"]
    if x.dtype != np.uint8 or x.shape[1:] != (28, 28) or len(x) == 0:
        raise malformed(path, "x as bytes of shape (N, 28, 28)", f"{x.dtype} {x.shape}")
    if names.ndim != 1 or names.dtype.kind != "U" or len(np.unique(names)) != len(names):
        raise malformed(path, "writer_id as distinct names", f"{names.dtype} {names.shape}")
    check_codes(path, arrays["y"], records=len(x), count=_CHARACTERS)
    check_codes(path, writer, records=len(x), count=len(names), what="writers")
    check_codes(path, arrays["split"], records=len(x), count=2, what="splits")
    ink = np.divide(255 - x[:, None], 255, dtype=np.float32)
    return ink, arrays["y"].astype(np.int64), writer, arrays["split"] == 0, names


def _read_leaf(folder: Path) -> tuple[Array, ...]:
    """The arrays of `_read_femnist_npz`, from the json files in `train` and `test` of a folder."""
    names: dict[str, int] = {}
    parts = []
    for part in ("train", "test"):
        files = sorted((folder / part).glob("*.json"))
        if not files:
            raise BadInput(f"{folder / part} has no json file: expected what LEAF writes")
        writers: set[str] = set()
        for path in files:
            for user, x, y in _leaf_users(path):
                if user in writers:
                    raise malformed(path, "every writer once", f"writer {user!r} again")
                writers.add(user)
                number = names.setdefault(user, len(names))
                parts.append((x, y, np.full(len(y), number), np.full(len(y), part == "train")))
    pixels, labels, owners, trains = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return 1 - pixels.reshape(-1, 1, 28, 28), labels, owners, trains, np.array(list(names))


def _leaf_users(path: Path) -> Iterator[tuple[str, Array, Array]]:
    """Yield (writer, pixels [n, 784], labels) for every writer in a json file of LEAF's."""
    with reading(path, "LEAF json with users, num_samples, user_data", TypeError, RecursionError):
        content = json.loads(path.read_bytes())
        users, counts, data = content["users"], content["num_samples"], content["user_data"]
        pairs = list(zip(users, counts, strict=True))
    if not pairs:
        raise malformed(path, "at least one writer", "none")
    for user, count in pairs:
        with reading(path, f"x and y of writer {user!r}", TypeError, IndexError):
            x = np.asarray(data[user]["x"], dtype=np.float32)
            y = np.asarray(data[user]["y"])
        if x.shape != (count, 784) or count == 0 or not ((x >= 0) & (x <= 1)).all():
            wanted = f"{count} x 784 pixels in 0..1 for writer {user!r}"
            raise malformed(path, wanted, f"shape {x.shape}")
        check_codes(path, y, records=len(x), count=_CHARACTERS)
        yield str(user), x, y.astype(np.int64)
