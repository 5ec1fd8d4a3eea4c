"""Rows of a table between training and test, with their owners."""

import numpy as np
import pytest

from fedveil.data.table_split import split_table
from fedveil.data.tables import read_table
from fedveil.errors import BadInput

SITES = [f"s{k}" for k in range(20)]
ROWS = read_table({"site": [SITES[k % 20] for k in range(100)], "a": [*range(100)]})


def numbers(table):
    return sorted(table.columns["a"].tolist())


def test_left_out_it_is_by_client_or_a_fifth():
    by_client = split_table(ROWS, "site", None, None)
    tested = set(by_client.test.columns["site"])
    assert 1 <= len(tested) < 10
    assert tested.isdisjoint(by_client.train.columns["site"])
    assert numbers(by_client.train) + numbers(by_client.test) != [*range(100)]
    assert sorted(numbers(by_client.train) + numbers(by_client.test)) == [*range(100)]
    assert not by_client.of_clients
    dealt = split_table(ROWS, None, None, None)
    assert (len(dealt.train), len(dealt.test), dealt.owners) == (80, 20, None)


@pytest.mark.parametrize("test", ["by-client", 0.2])
def test_owners_are_those_of_the_rows(test):
    found = split_table(ROWS, "site", test, None)
    for owners, part in ((found.owners, found.train), (found.test_owners, found.test)):
        assert found.names[owners].tolist() == part.columns["site"].tolist()
    assert found.of_clients is (test == 0.2)


def test_a_share_is_taken_of_every_client():
    found = split_table(ROWS, "site", 0.2, None)
    assert np.bincount(found.test_owners).tolist() == [1] * 20
    assert np.bincount(found.owners).tolist() == [4] * 20


@pytest.mark.parametrize(
    ("sites", "shared"), [(["new", "newer"], False), (["new", "s3"], True), (None, True)]
)
def test_a_test_table_is_clients_own_unless_it_says_otherwise(sites, shared):
    test = {"a": [1, 2], **({"site": sites} if sites else {})}
    found = split_table(ROWS, "site", test, None)
    assert found.of_clients is shared
    assert len(found.train) == 100
    if sites:
        assert found.names[found.test_owners].tolist() == sites
    assert found.names[found.owners].tolist() == ROWS.columns["site"].tolist()


def test_a_test_table_of_rows_that_are_dealt_is_nobody_s():
    assert not split_table(ROWS, None, {"a": [1]}, None).of_clients


def test_a_test_file_is_read(tmp_path):
    (tmp_path / "test.csv").write_text("site,a\nnew,1\n")
    found = split_table(ROWS, "site", str(tmp_path / "test.csv"), None)
    assert found.test.columns["a"].tolist() == ["1"]


@pytest.mark.parametrize("test", ["by-client", 0.5, {"a": [1], "site": ["new"]}])
def test_clients_with_too_few_rows_are_left_out_of_both_parts(test):
    few = ROWS.take(np.flatnonzero(~np.isin(np.arange(100), [20, 40, 60, 80, 1])))
    found = split_table(few, "site", test, 4)
    assert "s0" not in found.train.columns["site"]
    assert "s1" in [*found.train.columns["site"], *found.test.columns["site"]]
    kept = set(found.train.columns["site"])
    if test == 0.5:
        assert set(found.test.columns["site"]) == kept
    held = set(found.test.columns["site"]) if test == "by-client" else set()
    assert found.dropped == 20 - len(kept) - len(held)
    assert found.dropped == (0 if "s0" in held else 1)


def test_numbers_are_names_too():
    ids = read_table({"site": [7, 7, 30], "a": [1, 2, 3]})
    assert split_table(ids, "site", {"a": [1]}, None).names.tolist() == ["30", "7"]


@pytest.mark.parametrize("test", [0, 1, -0.5, 1.5, float("nan"), True])
def test_what_is_no_share_is_refused(test):
    with pytest.raises(BadInput, match="a share above 0 and below 1 is needed"):
        split_table(ROWS, None, test, None)
