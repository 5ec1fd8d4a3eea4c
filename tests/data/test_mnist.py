"""MNIST and Fashion-MNIST."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.data.image_sets import load_mnist

REAL = os.environ.get("FEDVEIL_DATA")


def idx(array):
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write(root, name="mnist", *, packed=True):
    """Five training and two test records; returns the folder and the training images."""
    folder = root / name
    folder.mkdir()
    images = np.arange(5 * 784).reshape(5, 28, 28) % 256
    for file, array in (
        ("train-images-idx3-ubyte", images),
        ("train-labels-idx1-ubyte", np.array([3, 1, 4, 1, 9])),
        ("t10k-images-idx3-ubyte", images[:2]),
        ("t10k-labels-idx1-ubyte", np.array([2, 7])),
    ):
        content = idx(array)
        if packed:
            (folder / f"{file}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / file).write_bytes(content)
    return folder, images


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_load(tmp_path, name, packed):
    _, images = write(tmp_path, name, packed=packed)
    records = load_mnist(tmp_path, name)
    assert (records.name, records.classes, records.record_owners) == (name, 10, None)
    assert records.x.shape == (5, 1, 28, 28)
    assert records.x.dtype == np.float32
    np.testing.assert_allclose(records.x[:, 0] * 255, images, rtol=1e-6)
    assert records.y.dtype == np.int64
    assert records.y.tolist() == [3, 1, 4, 1, 9]
    assert len(records.test_x) == 2
    assert records.test_y.tolist() == [2, 7]


def test_missing_file_is_named_with_its_source(tmp_path):
    folder, _ = write(tmp_path)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(BadInput, match=r"no mnist/t10k-labels-idx1-ubyte\.gz or .*four idx files"):
        load_mnist(tmp_path)


BROKEN = {
    "truncated gzip": gzip.compress(idx(np.zeros((5, 28, 28))))[:-10],
    "not gzip": idx(np.zeros((5, 28, 28))),
    "empty": b"",
    "empty gzip": gzip.compress(b""),
    "header cut short": gzip.compress(idx(np.zeros((5, 28, 28)))[:10]),
    "labels for images": gzip.compress(idx(np.zeros(5))),
    "too few records": gzip.compress(idx(np.zeros((5, 28, 28)))[:-1]),
    "too many records": gzip.compress(idx(np.zeros((5, 28, 28))) + b"\0"),
    "other images": gzip.compress(idx(np.zeros((5, 32, 32)))),
    "no records": gzip.compress(idx(np.zeros((0, 28, 28)))),
    "a count in the billions": gzip.compress(b"\0\0\x08\x03\xff\xff\xff\xff\0\0\0\x1c\0\0\0\x1c"),
    "bad stream": gzip.compress(idx(np.zeros((5, 28, 28))))[:12] + bytes(range(200)),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_images(tmp_path, content):
    folder, _ = write(tmp_path)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(BadInput, match=r"train-images-idx3-ubyte\.gz: expected .*, found .") as e:
        load_mnist(tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("labels", "message"),
    [([3, 1, 4, 1, 10], r"labels 0\.\.9, found 10 at record 4"), ([3, 1, 4], "of 5 records")],
)
def test_broken_labels(tmp_path, labels, message):
    folder, _ = write(tmp_path)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array(labels))))
    with pytest.raises(BadInput, match=rf"train-labels-idx1-ubyte\.gz: .*{message}"):
        load_mnist(tmp_path)


@pytest.mark.skipif(not REAL, reason="FEDVEIL_DATA is not set")
@pytest.mark.parametrize(("name", "mean"), [("mnist", 0.1307), ("fashion-mnist", 0.2860)])
def test_real(name, mean):
    records = load_mnist(Path(REAL), name)
    assert (records.x.shape, records.test_x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert records.x.mean() == pytest.approx(mean, abs=1e-4)
    assert np.bincount(records.test_y).sum() == 10_000
    assert records.x.max() == 1.0
