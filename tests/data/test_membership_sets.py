"""Purchase100 and Texas100, from files of their published form that are made here."""

import io
import tarfile

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.data.load import load_records
from fedveil.data.tabular_sets import load_purchase100, load_texas100

RANDOM = np.random.default_rng(0)
LABELS = np.arange(1, 101)
BOUGHT = RANDOM.integers(0, 2, (100, 600))
STAYS = RANDOM.integers(0, 2, (100, 6169))


def lines(rows):
    return "".join(",".join(map(str, row)) + "\n" for row in np.atleast_2d(rows).tolist())


def purchases(labels=LABELS, bits=BOUGHT):
    return {"dataset_purchase": lines(np.column_stack([labels, bits]))}


def stays(labels=LABELS, bits=STAYS):
    return {"texas/100/feats": lines(bits), "texas/100/labels": lines(labels[:, None])}


def unpacked(root, name, files):
    for path, text in files.items():
        place = root / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def packed(root, name, files):
    (root / name).mkdir(parents=True)
    archive = {"purchase100": "dataset_purchase.tgz", "texas100": "dataset_texas.tgz"}[name]
    with tarfile.open(root / name / archive, "w:gz", compresslevel=1) as tar:
        for path, text in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))


FORMS = {"purchase100": (purchases, BOUGHT), "texas100": (stays, STAYS)}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("write", [unpacked, packed])
def test_load(tmp_path, name, write):
    files, bits = FORMS[name]
    write(tmp_path, name, files())
    records = load_records(name, tmp_path)
    assert (records.name, records.classes) == (name, 100)
    assert (records.x.dtype, records.y.dtype) == (np.float32, np.int64)
    assert (len(records.x), len(records.test_x)) == (80, 20)
    np.testing.assert_array_equal(records.x, bits[records.y])
    np.testing.assert_array_equal(records.test_x, bits[records.test_y])


def test_files_of_texas_beside_each_other(tmp_path):
    files = {path.rsplit("/", 1)[1]: text for path, text in stays().items()}
    unpacked(tmp_path, "texas100", files)
    assert len(load_records("texas100", tmp_path).x) == 80


@pytest.mark.parametrize("name", FORMS)
def test_missing(tmp_path, name):
    with pytest.raises(BadInput, match=rf"has no {name}/.*: expected dataset_.*tgz"):
        load_records(name, tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (purchases(bits=BOUGHT[:, :599]), "found 600 values a line"),
        (purchases(bits=2 * BOUGHT), "values from 0 to 2"),
        (purchases(labels=LABELS + 1), r"labels 1\.\.100, found 101"),
        (purchases(labels=LABELS - 1), r"labels 1\.\.100, found 0"),
        ({"dataset_purchase": ""}, "an empty file"),
        ({"dataset_purchase": "1,0,x\n"}, "lines of a label and 600 bits"),
        ({"dataset_purchase": "300" + ",0" * 600 + "\n"}, "lines of a label and 600 bits"),
    ],
)
def test_broken_purchases(tmp_path, files, message):
    unpacked(tmp_path, "purchase100", files)
    with pytest.raises(BadInput, match=rf"dataset_purchase: expected .*{message}") as e:
        load_purchase100(tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (stays(bits=STAYS[:, 1:]), "6168 values a line"),
        (stays(labels=LABELS[:50]), "labels of 100 records"),
        (stays(labels=LABELS + 100), r"labels 1\.\.100, found 101"),
        ({"texas/100/feats": stays()["texas/100/feats"]}, "a file labels beside it"),
    ],
)
def test_broken_stays(tmp_path, files, message):
    unpacked(tmp_path, "texas100", files)
    with pytest.raises(BadInput, match=message):
        load_texas100(tmp_path)


def test_archives_that_are_none(tmp_path):
    packed(tmp_path, "purchase100", {"something": "1,0\n"})
    with pytest.raises(BadInput, match="no file dataset_purchase"):
        load_purchase100(tmp_path)
    (tmp_path / "purchase100" / "dataset_purchase.tgz").write_bytes(b"no archive")
    with pytest.raises(BadInput, match="tgz: expected lines of a label and 600 bits") as e:
        load_purchase100(tmp_path)
    assert "\n" not in str(e.value)
