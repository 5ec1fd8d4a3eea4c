"""CIFAR-10."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedveil.base.errors import BadInput
from fedveil.data import image_sets
from fedveil.data.image_sets import load_cifar10

REAL = os.environ.get("FEDVEIL_DATA")

BATCH = 4
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (1000, 3, 32, 32), dtype=np.uint8)
LABELS = (np.arange(1000) % 10).astype(np.uint8)


@pytest.fixture
def batches(tmp_path, monkeypatch):
    """A folder of binary batches with four records each."""
    monkeypatch.setattr(image_sets, "_BATCH", BATCH)
    folder = tmp_path / "cifar10"
    folder.mkdir()
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for batch, name in enumerate(names):
        rows = slice(batch * BATCH, (batch + 1) * BATCH)
        content = np.column_stack([LABELS[rows], IMAGES[rows].reshape(BATCH, -1)])
        (folder / name).write_bytes(content.tobytes())
    return folder


@pytest.fixture
def mosaics(tmp_path):
    """A folder with one mosaic of 1,000 images for training and one for test."""
    folder = tmp_path / "cifar10"
    folder.mkdir()
    tiles = IMAGES.reshape(25, 40, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(800, 1280, 3)
    for part in ("train", "test"):
        Image.fromarray(tiles).save(folder / f"{part}_00.webp", lossless=True, method=0, quality=0)
        np.save(folder / f"{part}_labels.npy", LABELS)
    return folder


def test_binary_batches(batches):
    records = load_cifar10(batches.parent)
    assert (records.name, records.classes) == ("cifar10", 10)
    assert records.x.dtype == np.float32
    np.testing.assert_allclose(records.x * 255, IMAGES[:20], rtol=1e-6)
    assert records.y.tolist() == LABELS[:20].tolist()
    np.testing.assert_allclose(records.test_x * 255, IMAGES[20:24], rtol=1e-6)
    assert records.test_y.dtype == np.int64


def test_binary_batches_in_the_published_folder(batches):
    inner = batches.parent / "cifar10/cifar-10-batches-bin"
    inner.mkdir()
    for path in batches.glob("*.bin"):
        path.rename(inner / path.name)
    assert len(load_cifar10(batches.parent).x) == 20


@pytest.mark.parametrize("size", [0, 3073, 4 * 3073 - 1, 4 * 3073 + 1])
def test_batch_of_another_size(batches, size):
    path = batches / "data_batch_3.bin"
    path.write_bytes(bytes(size))
    with pytest.raises(BadInput, match=r"data_batch_3\.bin: expected 12292 bytes of data, found"):
        load_cifar10(batches.parent)


def test_batch_with_a_wrong_label(batches):
    path = batches / "test_batch.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(BadInput, match=r"test_batch\.bin: expected labels 0\.\.9, found 10"):
        load_cifar10(batches.parent)


def test_missing_batch(batches):
    (batches / "data_batch_2.bin").unlink()
    with pytest.raises(BadInput, match=r"data_batch_2\.bin: expected a CIFAR-10 binary batch"):
        load_cifar10(batches.parent)


def test_python_batches_are_not_read(tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10/data_batch_1").write_bytes(b"\x80\x02}q\x01.")
    with pytest.raises(BadInput, match=r"data_batch_1\.bin or .*the binary version of CIFAR-10"):
        load_cifar10(tmp_path)


def test_mosaics(mosaics):
    records = load_cifar10(mosaics.parent)
    np.testing.assert_allclose(records.x * 255, IMAGES, rtol=1e-6)
    assert records.y.tolist() == LABELS.tolist()
    assert records.test_x.shape == (1000, 3, 32, 32)


def _cut(path):
    path.write_bytes(path.read_bytes()[:5000])


def _smaller(path):
    Image.new("RGB", (1280, 768)).save(path)


def _png(path):
    Image.new("RGB", (1280, 800)).save(path, "PNG")


@pytest.mark.parametrize("spoil", [_cut, _smaller, _png, lambda path: path.write_bytes(b"")])
def test_broken_mosaic(mosaics, spoil):
    spoil(mosaics / "train_00.webp")
    with pytest.raises(BadInput, match=r"train_00\.webp: expected a webp mosaic of 1280x800") as e:
        load_cifar10(mosaics.parent)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (LABELS[:999], "999 labels and 1 mosaics"),
        (LABELS + 1, r"labels 0\.\.9, found 10"),
        (LABELS.reshape(10, 100), "whole-number labels"),
        (LABELS / 1.0, "whole-number labels"),
    ],
)
def test_broken_mosaic_labels(mosaics, labels, message):
    np.save(mosaics / "test_labels.npy", labels)
    with pytest.raises(BadInput, match=rf"test_labels\.npy: expected .*{message}"):
        load_cifar10(mosaics.parent)


@pytest.mark.parametrize("keep", [0, 5, 200])
def test_truncated_mosaic_labels(mosaics, keep):
    path = mosaics / "test_labels.npy"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadInput, match=r"test_labels\.npy: expected an npy file of labels"):
        load_cifar10(mosaics.parent)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="FEDVEIL_DATA is not set")
def test_real():
    records = load_cifar10(Path(REAL))
    assert len(records.x) in (40_000, 50_000)
    assert len(records.test_x) == 10_000
    np.testing.assert_allclose(records.x.mean(axis=(0, 2, 3)), [0.491, 0.482, 0.447], atol=2e-3)
    assert np.bincount(records.test_y).tolist() == [1000] * 10
