"""CIFAR-10 from the published binary batches, or from lossless webp mosaics.

The published *python* batches are pickles, which can run code, so they are not read.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedveil.data.data_files import (
    check_codes,
    find_file,
    malformed,
    open_bytes,
    read_exactly,
    reading,
    warnings_as_errors,
)
from fedveil.data.loaded_records import Records
from fedveil.data.user_arrays import Array

_CLASSES = 10
_PIXELS = 3 * 32 * 32
_BATCH = 10_000  # records in a binary batch
_ROWS, _COLUMNS = 25, 40  # images in a mosaic
_FOLDERS = ("cifar10", "cifar10/cifar-10-batches-bin")


def load(root: Path) -> Records:
    """Images as [N, 3, 32, 32] in 0..1. Binary batches win over mosaics."""
    first = find_file(
        root,
        [*(f"{folder}/data_batch_1.bin" for folder in _FOLDERS), "cifar10/train_labels.npy"],
        expected="the binary version of CIFAR-10 (six .bin files), from its page or any mirror",
    )
    folder = first.parent
    if first.suffix == ".bin":
        x, y = _read_batches([folder / f"data_batch_{batch}.bin" for batch in range(1, 6)])
        test_x, test_y = _read_batches([folder / "test_batch.bin"])
    else:
        x, y = _read_mosaics(folder, "train")
        test_x, test_y = _read_mosaics(folder, "test")
    return Records("cifar10", x, y, test_x, test_y, classes=_CLASSES)


def _read_batches(paths: Sequence[Path]) -> tuple[Array, Array]:
    size = _BATCH * (1 + _PIXELS)
    x = np.empty((len(paths) * _BATCH, 3, 32, 32), np.float32)
    labels = []
    for batch, path in enumerate(paths):
        wanted = f"a CIFAR-10 binary batch of {size} bytes"
        with reading(path, wanted), open_bytes(path) as stream:
            content = read_exactly(path, stream, size)
        records = np.frombuffer(content, np.uint8).reshape(_BATCH, 1 + _PIXELS)
        check_codes(path, records[:, 0], records=_BATCH, count=_CLASSES)
        labels.append(records[:, 0])
        images = records[:, 1:].reshape(_BATCH, 3, 32, 32)
        np.divide(images, 255, out=x[batch * _BATCH : (batch + 1) * _BATCH], dtype=np.float32)
    return x, np.concatenate(labels).astype(np.int64)


def _read_mosaics(folder: Path, part: str) -> tuple[Array, Array]:
    """`<part>_00.webp`, ... of 1,000 images each, and `<part>_labels.npy` in the same order."""
    tile = _ROWS * _COLUMNS
    path = folder / f"{part}_labels.npy"
    with reading(path, "an npy file of labels"), warnings_as_errors(), open_bytes(path) as stream:
        labels = np.lib.format.read_array(stream, allow_pickle=False)
    check_codes(path, labels, records=labels.size, count=_CLASSES)
    mosaics = sorted(folder.glob(f"{part}_*.webp"))
    if len(labels) == 0 or len(labels) != len(mosaics) * tile:
        raise malformed(
            path,
            f"{tile} labels for each {part}_*.webp beside it",
            f"{len(labels)} labels and {len(mosaics)} mosaics",
        )
    x = np.empty((len(labels), 3, 32, 32), np.float32)
    for number, mosaic in enumerate(mosaics):
        np.divide(
            _read_mosaic(mosaic), 255, out=x[number * tile : (number + 1) * tile], dtype=np.float32
        )
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
