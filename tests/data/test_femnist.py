"""FEMNIST by writer."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.data.image_sets import load_femnist
from fedveil.data.partition import partition

REAL = os.environ.get("FEDVEIL_DATA")

SIZES = {"ada": (4, 1), "bob": (2, 2), "cy": (3, 1), "dee": (0, 3)}
"""Training and test records of each writer."""


def rows():
    """(writer, is test, grey value, label) of every record, grey 255 for white paper."""
    record = 0
    for writer, sizes in SIZES.items():
        for test, size in enumerate(sizes):
            for _ in range(size):
                yield writer, test, record * 15, record % 62
                record += 1


def write_compact(root, **changes):
    writers, tests, greys, labels = zip(*rows(), strict=True)
    names = list(SIZES)
    arrays = {
        "x": np.array([np.full((28, 28), grey) for grey in greys], dtype=np.uint8),
        "y": np.array(labels, dtype=np.uint8),
        "writer": np.array([names.index(w) for w in writers], dtype=np.int16),
        "split": np.array(tests, dtype=np.uint8),
        "writer_id": np.array(names),
    }
    (root / "femnist").mkdir()
    np.savez_compressed(root / "femnist/femnist_673writers.npz", **{**arrays, **changes})


def leaf(test, writers):
    data = {w: {"x": [], "y": []} for w in writers}
    for writer, is_test, grey, label in rows():
        if writer in data and is_test == test:
            data[writer]["x"].append([grey / 255] * 784)
            data[writer]["y"].append(label)
    data = {w: d for w, d in data.items() if d["y"]}
    counts = [len(d["y"]) for d in data.values()]
    return {"users": list(data), "num_samples": counts, "user_data": data}


def write_leaf(root):
    for part in ("train", "test"):
        (root / "femnist" / part).mkdir(parents=True)
    train, test = root / "femnist/train", root / "femnist/test"
    (train / "part_0.json").write_text(json.dumps(leaf(0, ["ada", "bob"])))
    (train / "part_1.json").write_text(json.dumps(leaf(0, ["cy", "dee"])))
    (test / "part_0.json").write_text(json.dumps(leaf(1, list(SIZES))))
    return train / "part_1.json"


@pytest.mark.parametrize("write", [write_compact, write_leaf])
def test_load(tmp_path, write):
    write(tmp_path)
    records = load_femnist(tmp_path, min_records=3)
    assert (records.name, records.classes) == ("femnist", 62)
    assert records.owner_names.tolist() == ["ada", "cy"]
    assert records.record_owners.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert records.test_owners.tolist() == [0, 1]
    assert (records.x.dtype, records.y.dtype) == (np.float32, np.int64)
    assert records.x.shape == (7, 1, 28, 28)
    kept = [(w, t, g, y) for w, t, g, y in rows() if w in ("ada", "cy")]
    ink = [1 - g / 255 for _, t, g, _ in kept if not t]
    np.testing.assert_allclose(records.x[:, 0, 5, 7], ink, atol=1e-6)
    assert records.y.tolist() == [y for _, t, _, y in kept if not t]
    assert records.test_y.tolist() == [y for _, t, _, y in kept if t]
    assert records.test_x.shape == (2, 1, 28, 28)


def test_both_formats_agree(tmp_path):
    for folder in ("compact", "leaf"):
        (tmp_path / folder).mkdir()
    write_compact(tmp_path / "compact")
    write_leaf(tmp_path / "leaf")
    compact = load_femnist(tmp_path / "compact", min_records=1)
    leaf_records = load_femnist(tmp_path / "leaf", min_records=1)
    np.testing.assert_allclose(compact.x, leaf_records.x, atol=1e-6)
    np.testing.assert_array_equal(compact.record_owners, leaf_records.record_owners)
    np.testing.assert_array_equal(compact.test_y, leaf_records.test_y)


def test_missing(tmp_path):
    with pytest.raises(BadInput, match=r"femnist/train or femnist/femnist_673writers\.npz: .*LEAF"):
        load_femnist(tmp_path)


def test_no_writer_left(tmp_path):
    write_compact(tmp_path)
    with pytest.raises(BadInput, match="no femnist writer has 20 training records, the most is 4"):
        load_femnist(tmp_path)


def test_min_records_below_one(tmp_path):
    with pytest.raises(BadInput, match="min_records is 0"):
        load_femnist(tmp_path, min_records=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros((16, 20, 20), np.uint8)}, "x as bytes"),
        ({"x": np.zeros((16, 28, 28), np.float32)}, "x as bytes"),
        ({"x": np.zeros((0, 28, 28), np.uint8)}, "x as bytes"),
        ({"y": np.full(16, 62)}, r"labels 0\.\.61, found 62"),
        ({"y": np.zeros(15, int)}, "labels of 16 records"),
        ({"writer": np.full(16, 4)}, r"writers 0\.\.3, found 4"),
        ({"split": np.full(16, 2)}, r"splits 0\.\.1, found 2"),
        ({"writer_id": np.array(["ada", "ada", "cy", "dee"])}, "distinct names"),
    ],
)
def test_broken_compact(tmp_path, changes, message):
    write_compact(tmp_path, **changes)
    with pytest.raises(BadInput, match=rf"femnist_673writers\.npz: expected .*{message}"):
        load_femnist(tmp_path, min_records=1)


def test_truncated_compact(tmp_path):
    write_compact(tmp_path)
    path = tmp_path / "femnist/femnist_673writers.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInput, match="expected an npz file with x, y"):
        load_femnist(tmp_path)


def _user(**changes):
    good = {
        "users": ["cy"],
        "num_samples": [1],
        "user_data": {"cy": {"x": [[0.5] * 784], "y": [1]}},
    }
    return {**good, **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(_user())[:100], "LEAF json"),
        ("[1]", "LEAF json"),
        (json.dumps({"users": []}), "LEAF json"),
        (json.dumps(_user(num_samples=[])), "LEAF json"),
        (json.dumps(_user(users=[], num_samples=[])), "at least one writer"),
        (json.dumps(_user(num_samples=[2])), "2 x 784 pixels"),
        (json.dumps(_user(user_data={})), "x and y of writer 'cy'"),
        (json.dumps(_user(user_data={"cy": {"x": [[0.5] * 783], "y": [1]}})), "1 x 784 pixels"),
        (json.dumps(_user(user_data={"cy": {"x": [[1.5] * 784], "y": [1]}})), r"in 0\.\.1"),
        (json.dumps(_user(user_data={"cy": {"x": [["a"] * 784], "y": [1]}})), "x and y of writer"),
        (json.dumps(_user(user_data={"cy": {"x": [[0.5] * 784], "y": [62]}})), r"labels 0\.\.61"),
        (json.dumps(_user(user_data={"cy": {"x": [[0.5] * 784], "y": []}})), "of 1 records"),
        (json.dumps(leaf(0, ["ada"])), "writer 'ada' again"),
    ],
)
def test_broken_leaf(tmp_path, content, message):
    path = write_leaf(tmp_path)
    path.write_text(content)
    with pytest.raises(BadInput, match=rf"part_1\.json: expected .*{message}") as e:
        load_femnist(tmp_path, min_records=1)
    assert "\n" not in str(e.value)


def test_leaf_without_test_files(tmp_path):
    write_leaf(tmp_path)
    (tmp_path / "femnist/test/part_0.json").unlink()
    with pytest.raises(BadInput, match="test has no json file"):
        load_femnist(tmp_path, min_records=1)


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="FEDVEIL_DATA is not set")
def test_real():
    records = load_femnist(Path(REAL))
    assert len(records.owner_names) >= 400
    assert np.bincount(records.record_owners).min() >= 20
    assert set(records.test_owners) == set(records.record_owners)
    data = partition(records, kind="natural", clients=None, seed=1)
    assert 0.75 < data.clients / len(records.owner_names) < 0.85
    held = np.flatnonzero(~np.isin(records.owner_names, data.names))
    count = np.isin(records.record_owners, held).sum() + np.isin(records.test_owners, held).sum()
    assert len(data.test_x) == count
    assert records.y.max() == 61
    assert 0.02 < records.x.mean() < 0.2  # mostly paper, which is 0
    assert len(records.x) > 5 * len(records.test_x) > 0


@pytest.mark.parametrize("write", [write_compact, write_leaf])
def test_only_digits_are_kept(tmp_path, write):
    write(tmp_path)
    records = load_femnist(tmp_path, min_records=1, digits=True)
    kept = [(w, t, y) for w, t, _, y in rows() if y < 10]
    assert records.classes == 10
    assert records.owner_names.tolist() == ["ada", "bob", "cy"]
    assert records.y.tolist() == [y for _, t, y in kept if not t]
    assert records.test_y.tolist() == [y for _, t, y in kept if t]
    fewer = load_femnist(tmp_path, min_records=3, digits=True)
    assert fewer.owner_names.tolist() == ["ada"]
