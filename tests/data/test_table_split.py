"""Rows of a table between training and test, with their owners."""

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.data.own_table import TableOptions, split_table
from fedveil.data.tables import read_table

SITES = [f"s{k}" for k in range(20)]
ROWS = read_table({"site": [SITES[k % 20] for k in range(100)], "a": [*range(100)]})


def split(rows, client, test, least, **options):
    return split_table(rows, TableOptions("a", client, test=test, min_records=least, **options))


def numbers(table):
    return sorted(table.arrays["a"].tolist())


@pytest.mark.parametrize("test", [None, "none"])
@pytest.mark.parametrize("client", [None, "site"])
def test_left_out_no_row_is_tested_on(client, test):
    found = split(ROWS, client, test, None)
    assert (len(found.train_rows), len(found.test_rows), found.of_clients) == (100, 0, False)


def test_by_client_or_a_share():
    by_client = split(ROWS, "site", "by-client", None)
    tested = set(by_client.test_rows.arrays["site"])
    assert 1 <= len(tested) < 10
    assert tested.isdisjoint(by_client.train_rows.arrays["site"])
    assert numbers(by_client.train_rows) + numbers(by_client.test_rows) != [*range(100)]
    assert sorted(numbers(by_client.train_rows) + numbers(by_client.test_rows)) == [*range(100)]
    assert not by_client.of_clients
    dealt = split(ROWS, None, 0.2, None)
    assert len(dealt.train_rows) + len(dealt.test_rows) == 100
    assert 5 < len(dealt.test_rows) < 40
    assert dealt.record_owners is None
    assert len(dealt.row_words) == len(dealt.train_rows)


@pytest.mark.parametrize("test", ["by-client", 0.2])
def test_owners_are_those_of_the_rows(test):
    found = split(ROWS, "site", test, None)
    for owners, part in (
        (found.record_owners, found.train_rows),
        (found.test_owners, found.test_rows),
    ):
        assert found.owner_names[owners].tolist() == part.arrays["site"].tolist()
    assert found.of_clients is (test == 0.2)


def test_a_share_is_taken_of_the_rows_of_all_clients():
    found = split(ROWS, "site", 0.2, None)
    assert 5 < len(found.test_owners) < 40
    assert len(set(found.test_owners.tolist())) > 5


@pytest.mark.parametrize(
    ("sites", "shared"), [(["new", "newer"], False), (["new", "s3"], True), (None, False)]
)
def test_a_test_table_is_clients_own_by_name(sites, shared):
    test = {"a": [1, 2], **({"site": sites} if sites else {})}
    found = split(ROWS, "site", test, None)
    assert found.of_clients is shared
    assert len(found.train_rows) == 100
    if sites:
        assert found.owner_names[found.test_owners].tolist() == sites
    assert found.owner_names[found.record_owners].tolist() == ROWS.arrays["site"].tolist()


def test_a_test_table_of_rows_that_are_dealt_is_nobody_s():
    assert not split(ROWS, None, {"a": [1]}, None).of_clients


@pytest.mark.parametrize("client", [None, "site"])
def test_rows_of_the_same_source_are_traced_whatever_they_are_called(tmp_path, client):
    text = "site,a\n" + "".join(f"s{k // 2},{k}\n" for k in range(6))
    for name in ("t.csv", "copy.csv"):
        (tmp_path / name).write_text(text)
    read = read_table(tmp_path / "t.csv")
    found = split(read, client, tmp_path / "copy.csv", None)
    assert found.of_clients
    assert found.test_row_numbers.tolist() == [1, 2, 3, 4, 5, 6]
    frame = {"site": ["a", "a", "b", "b"], "a": [1, 2, 3, 4]}
    assert split(read_table(frame), client, frame, None).of_clients
    other = {"site": ["c", "c"], "a": [1, 2]}
    assert split(read_table(frame), client, other, None).test_row_numbers.tolist() == [-1, -1]


def test_a_test_file_is_read(tmp_path):
    (tmp_path / "test.csv").write_text("site,a\nnew,1\n")
    found = split(ROWS, "site", str(tmp_path / "test.csv"), None)
    assert found.test_rows.arrays["a"].tolist() == ["1"]


@pytest.mark.parametrize("test", ["by-client", 0.5, {"a": [1], "site": ["new"]}])
def test_clients_with_too_few_rows_are_left_out_of_both_parts(test):
    few = ROWS.take(np.flatnonzero(~np.isin(np.arange(100), [20, 40, 60, 80, 1])))
    found = split(few, "site", test, 4)
    assert "s0" not in found.train_rows.arrays["site"]
    assert "s1" in [*found.train_rows.arrays["site"], *found.test_rows.arrays["site"]]
    kept = set(found.train_rows.arrays["site"])
    if test == 0.5:
        assert set(found.test_rows.arrays["site"]) <= kept


def test_numbers_are_names_too():
    ids = read_table({"site": [7, 7, 30], "a": [1, 2, 3]})
    assert split(ids, "site", {"a": [1]}, None).owner_names.tolist() == ["30", "7"]


@pytest.mark.parametrize("test", [0, 1, -0.5, 1.5, float("nan"), True])
def test_what_is_no_share_is_refused(test):
    with pytest.raises(BadInput, match="a share above 0 and below 1 is needed"):
        split(ROWS, None, test, None)
