"""Finding and opening data data_files."""

import gzip
import io
import zipfile

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.data import data_files


def test_explicit_root_wins_over_the_variable(tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("FEDVEIL_DATA", str(other))
    assert data_files.data_root(tmp_path) == tmp_path
    assert data_files.data_root(None) == other


def test_no_root_names_both_ways_out(monkeypatch):
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    with pytest.raises(BadInput, match=r"--data.*FEDVEIL_DATA"):
        data_files.data_root(None)


def test_root_that_does_not_exist(tmp_path):
    with pytest.raises(BadInput, match="nowhere does not exist"):
        data_files.data_root(tmp_path / "nowhere")


def test_find_takes_the_first_candidate_that_exists(tmp_path):
    for name in ("b_2.csv", "b_1.csv", "c"):
        (tmp_path / name).touch()
    assert data_files.find_file(tmp_path, ["a", "b_*.csv", "c"], expected="x").name == "b_1.csv"
    assert data_files.find_file(tmp_path, ["c", "b_*.csv"], expected="x").name == "c"


def test_find_says_what_it_looked_for(tmp_path):
    with pytest.raises(BadInput) as e:
        data_files.find_file(tmp_path, ["set/a.gz", "set/a"], expected="the file a, from its page")
    assert (
        str(e.value) == f"{tmp_path} has no set/a.gz or set/a: expected the file a, from its page"
    )


def test_malformed_is_one_line(tmp_path):
    assert str(data_files.malformed(tmp_path, "this", "two\n  lines")) == (
        f"{tmp_path}: expected this, found two lines"
    )


@pytest.mark.parametrize("size", [9, 11])
def test_read_exactly_refuses_another_size(tmp_path, size):
    with pytest.raises(BadInput, match="expected 10 bytes of data, found"):
        data_files.read_exactly(tmp_path, io.BytesIO(bytes(size)), 10)


def test_read_exactly_stops_reading_a_file_that_unpacks_to_too_much(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(50_000_000)))
    with data_files.open_bytes(path) as stream:
        with pytest.raises(BadInput, match="found more"):
            data_files.read_exactly(path, stream, 1000)
        assert stream.tell() == 1001


def test_npz_round_trip(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(3), other=np.arange(9))
    arrays = data_files.read_npz(tmp_path / "a.npz", ("x",))
    assert list(arrays) == ["x"]
    np.testing.assert_array_equal(arrays["x"], [0, 1, 2])


def _truncated(path):
    np.savez(path, x=np.arange(1000))
    path.write_bytes(path.read_bytes()[:500])


def _without_key(path):
    np.savez(path, y=np.arange(3))


def _pickled(path):
    np.savez(path, x=np.array([{}], dtype=object))


def _not_an_array(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "text")


def _flipped_byte(path):
    np.savez(path, x=np.arange(1000))
    content = bytearray(path.read_bytes())
    content[4000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "write", [_truncated, _without_key, _pickled, _not_an_array, _flipped_byte]
)
def test_broken_npz(tmp_path, write):
    path = tmp_path / "a.npz"
    write(path)
    with pytest.raises(
        BadInput, match=r"a\.npz: expected an (npz file with|array) x, found ."
    ) as e:
        data_files.read_npz(path, ("x",))
    assert "\n" not in str(e.value)


def test_npz_that_unpacks_to_too_much(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1000))
    monkeypatch.setattr(data_files, "_NPZ_LIMIT", 1000)
    with pytest.raises(BadInput, match="at most 1000 bytes unpacked"):
        data_files.read_npz(tmp_path / "a.npz", ("x",))


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([0, 1, 3], r"expected labels 0\.\.2, found 3 at record 2"),
        ([0, -1, 1], r"expected labels 0\.\.2, found -1 at record 1"),
        ([0, 1], "whole-number labels of 3 records"),
        ([0.0, 1.0, 2.0], "whole-number labels of 3 records"),
    ],
)
def test_check_codes(tmp_path, codes, message):
    data_files.check_codes(tmp_path, np.array([0, 1, 2]), records=3, count=3)
    with pytest.raises(BadInput, match=message):
        data_files.check_codes(tmp_path, np.array(codes), records=3, count=3)


def test_missing_module_says_how_to_install_it():
    with pytest.raises(BadInput, match=r"x needs y: pip install 'fedveil\[data\]'"):
        data_files.optional_module("fedveil_has_no_such_module", package="y", needed_by="x")
