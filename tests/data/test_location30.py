"""Location30."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.data.tabular_sets import load_location30

REAL = os.environ.get("FEDVEIL_DATA")

BITS = np.random.default_rng(0).integers(0, 2, (30, 446), dtype=np.uint8)
LABELS = np.arange(30, dtype=np.uint8)


def write_compact(root, **changes):
    (root / "location30").mkdir(exist_ok=True)
    arrays = {"x_packed": np.packbits(BITS, axis=1), "n_features": np.int32(446), "y": LABELS}
    np.savez(root / "location30/location30.npz", **{**arrays, **changes})


def write_text(root, labels=LABELS, bits=BITS, quote='"'):
    (root / "location30").mkdir(exist_ok=True)
    lines = (
        f"{quote}{label + 1}{quote}," + ",".join(map(str, row))
        for label, row in zip(labels.tolist(), bits.tolist(), strict=True)
    )
    (root / "location30/bangkok").write_text("\n".join(lines) + "\n")


def write_unquoted(root):
    write_text(root, quote="")


@pytest.mark.parametrize("write", [write_compact, write_text, write_unquoted])
def test_load(tmp_path, write):
    write(tmp_path)
    records = load_location30(tmp_path)
    assert (records.name, records.classes) == ("location30", 30)
    assert (records.x.dtype, records.y.dtype) == (np.float32, np.int64)
    assert (len(records.x), len(records.test_x)) == (24, 6)
    np.testing.assert_array_equal(records.x, BITS[records.y])
    np.testing.assert_array_equal(records.test_x, BITS[records.test_y])
    assert sorted([*records.y, *records.test_y]) == list(range(30))


def test_missing(tmp_path):
    with pytest.raises(BadInput, match=r"location30/bangkok or .*: expected the file bangkok"):
        load_location30(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_features": np.int32(440)}, "446 features packed.*n_features 440"),
        ({"x_packed": np.zeros((30, 50), np.uint8)}, "56 bytes a record"),
        ({"x_packed": BITS[:, :56].astype(float)}, "56 bytes a record"),
        ({"y": LABELS + 1}, r"labels 0\.\.29, found 30"),
        ({"y": LABELS[:9]}, "labels of 30 records"),
    ],
)
def test_broken_compact(tmp_path, changes, message):
    write_compact(tmp_path, **changes)
    with pytest.raises(BadInput, match=rf"location30\.npz: expected .*{message}"):
        load_location30(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": BITS[:, :445]}, "found 446 values a line"),
        ({"bits": BITS * 2}, "values from 0 to 2"),
        ({"labels": LABELS + 1}, r"labels 1\.\.30, found 31"),
    ],
)
def test_broken_text(tmp_path, changes, message):
    write_text(tmp_path, **changes)
    with pytest.raises(BadInput, match=rf"bangkok: expected .*{message}"):
        load_location30(tmp_path)


@pytest.mark.parametrize("content", ["", "1,0,x\n", "1,0\n1,0,1\n", "\0\0"])
def test_not_the_text(tmp_path, content):
    write_text(tmp_path)
    (tmp_path / "location30/bangkok").write_text(content)
    with pytest.raises(BadInput, match="bangkok: expected lines of a label and 446 bits") as e:
        load_location30(tmp_path)
    assert "\n" not in str(e.value)


def test_text_cut_in_a_line(tmp_path):
    write_text(tmp_path)
    path = tmp_path / "location30/bangkok"
    path.write_text(path.read_text()[:-100])
    with pytest.raises(BadInput, match="bangkok: expected lines"):
        load_location30(tmp_path)


@pytest.mark.skipif(not REAL, reason="FEDVEIL_DATA is not set")
def test_real():
    records = load_location30(Path(REAL))
    assert (records.x.shape, records.test_x.shape) == ((4008, 446), (1002, 446))
    assert set(np.unique(records.x)) == {0.0, 1.0}
    assert len(np.unique(records.y)) == 30
