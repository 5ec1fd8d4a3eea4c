"""MNIST and Fashion-MNIST from their four idx files, gzip-ed or not."""

import math
from pathlib import Path

import numpy as np

from fedveil.data.data_files import (
    check_codes,
    find_file,
    malformed,
    open_bytes,
    read_exactly,
    reading,
)
from fedveil.data.federated import Array
from fedveil.data.loaded_records import Records

_CLASSES = 10
_SIDE = 28
_MOST_RECORDS = 60_000
_UNSIGNED_BYTES = 0x08


def load(root: Path, name: str = "mnist") -> Records:
    """Images as [N, 1, 28, 28] in 0..1, from the subfolder `name`: mnist or fashion-mnist."""
    x, y = _split(root, name, "train")
    test_x, test_y = _split(root, name, "t10k")
    return Records(name, x, y, test_x, test_y, classes=_CLASSES)


def _split(root: Path, name: str, part: str) -> tuple[Array, Array]:
    images = _read(_find(root, name, f"{part}-images-idx3-ubyte"), (_SIDE, _SIDE))
    path = _find(root, name, f"{part}-labels-idx1-ubyte")
    labels = _read(path, ())
    check_codes(path, labels, records=len(images), count=_CLASSES)
    x = np.divide(images[:, None], 255, dtype=np.float32)
    return x, labels.astype(np.int64)


def _find(root: Path, name: str, file: str) -> Path:
    return find_file(
        root,
        [f"{name}/{file}.gz", f"{name}/{file}"],
        expected=f"the four idx files of {name}, from its page or any mirror",
    )


def _read(path: Path, record_shape: tuple[int, ...]) -> Array:
    """The unsigned bytes of an idx file whose records have the given shape."""
    dimensions = 1 + len(record_shape)
    wanted = f"an idx file of bytes, at most {_MOST_RECORDS} records of shape {record_shape}"
    with reading(path, wanted), open_bytes(path) as stream:
        header = stream.read(4 + 4 * dimensions)
        whole = len(header) == 4 + 4 * dimensions
        if not whole or header[:4] != bytes((0, 0, _UNSIGNED_BYTES, dimensions)):
            raise malformed(path, wanted, f"first bytes {header[:4].hex(' ') or 'missing'}")
        shape = tuple(int(n) for n in np.frombuffer(header, ">u4", offset=4))
        if shape[1:] != record_shape or not 0 < shape[0] <= _MOST_RECORDS:
            raise malformed(path, wanted, f"shape {shape}")
        content = read_exactly(path, stream, math.prod(shape))
    return np.frombuffer(content, np.uint8).reshape(shape)
