"""`data.person`: nobody has rows on both sides of a test split, by name and by no seed."""

import numpy as np
import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.data.own_table import TableOptions, _words_of, split_table
from fedveil.data.tables import read_table

PEOPLE = 80


def table(seed=0, drop=()):
    """Rows of people, some of whom are at two sites."""
    random = np.random.default_rng(seed)
    rows = []
    for person in range(PEOPLE):
        sites = random.choice(12, size=1 + person % 2, replace=False)
        for visit in range(1 + person % 4):
            rows.append((f"p{person}", f"s{sites[visit % len(sites)]}", visit, person % 2))
    kept = [row for row in rows if row[0] not in drop]
    names = ("patient", "site", "visit", "well")
    return dict(zip(names, map(list, zip(*kept, strict=True)), strict=True))


def split(rows, **options):
    return split_table(read_table(rows), TableOptions("well", person="patient", **options))


SPLITS = {
    "by client": {"client": "site", "test": "by-client"},
    "a share of people": {"client": "site", "test": 0.3},
    "dealt": {"test": 0.3},
}


@pytest.mark.parametrize("options", SPLITS.values(), ids=SPLITS)
def test_nobody_is_on_both_sides(options):
    found = split(table(), **options)
    trained, tested = set(found.train_rows["patient"]), set(found.test_rows["patient"])
    assert trained
    assert tested
    assert trained.isdisjoint(tested)
    without = split_table(read_table(table()), TableOptions("well", **options))
    both = set(without.train_rows["patient"]) & set(without.test_rows["patient"])
    assert both  # the table is one in which it matters


def test_a_share_of_people_leaves_no_row_out():
    for options in (SPLITS["a share of people"], SPLITS["dealt"]):
        found = split(table(), **options)
        assert len(found.train_rows) + len(found.test_rows) == len(table()["well"])
        share = len(set(found.test_rows["patient"])) / PEOPLE
        assert 0.15 < share < 0.45


def test_of_held_out_clients_all_rows_are_tested_and_people_of_theirs_are_not_trained_on():
    rows = table()
    alone = split_table(read_table(rows), TableOptions("well", client="site", test="by-client"))
    found = split(rows, client="site", test="by-client")
    assert found.test_row_numbers.tolist() == alone.test_row_numbers.tolist()
    tested = set(alone.test_rows["patient"])
    kept = [name for name in alone.train_rows["patient"] if name not in tested]
    assert found.train_rows["patient"].tolist() == kept
    owners = found.owner_names[found.record_owners].tolist()
    assert owners == found.train_rows["site"].tolist()


@pytest.mark.parametrize("options", SPLITS.values(), ids=SPLITS)
def test_who_is_held_out_follows_from_names_alone(options):
    """Whoever else is there, and in whichever order rows are."""
    found = split(table(), **options)
    tested = set(found.test_rows["patient"])
    gone = "p77" if "p77" not in tested else "p75"
    again = split(table(drop=(gone,)), **options)
    assert set(again.test_rows["patient"]) == tested - {gone}
    order = np.random.default_rng(1).permutation(len(table()["well"]))
    turned = {name: [column[k] for k in order] for name, column in table().items()}
    assert set(split(turned, **options).test_rows["patient"]) == tested


@pytest.mark.parametrize("column", ["patient", "site"])
def test_equal_rows_of_two_owners_do_not_count_each_other(column):
    rows = {"patient": ["p", "p"], "site": ["s", "s"], "visit": [1, 1], "well": [0, 0]}
    rows[column] = ["a", "b"]
    client = "site" if column == "site" else None
    options = TableOptions("well", client, ["visit"], person="patient")
    both, alone = (
        _words_of(read_table(each), options)
        for each in (rows, {name: entries[1:] for name, entries in rows.items()})
    )
    assert both[1:].tolist() == alone.tolist()
    named = dict(rows, unused=[3, 4])
    assert _words_of(read_table(named), options).tolist() == both.tolist()


def test_no_seed_moves_anybody():
    options = {"target": "well", "person": "patient", "test": 0.3, "clients": 4}
    columns = {"site": {"values": [f"s{k}" for k in range(12)]}, "visit": {"low": 0, "high": 4}}
    options["columns"] = columns
    one, other = (fv.FederatedData.from_table(table(), seed=seed, **options) for seed in (0, 5))
    assert one.test_x.tolist() == other.test_x.tolist()
    assert one.x.tolist() != other.x.tolist()


def made(**options):
    columns = {"visit": {"low": 0, "high": 4}, "well": {"values": [0, 1]}}
    options = {"client": "site", "test": "by-client", "person": "patient", **options}
    return fv.FederatedData.from_table(table(), target="well", columns=columns, **options)


def test_a_person_is_no_feature_and_claims_are_not_per_person():
    data = made()
    assert [column.name for column in data.schema.feature_columns] == ["visit"]
    assert data.assumptions == (
        "people ('patient') with test records are not trained on: which clients keep training "
        "records is taken as public",
        "a person ('patient') may have several records: this claim is not per person",
    )
    assert made(test=None).assumptions == data.assumptions[1:]
    with pytest.raises(BadInput, match="feature 'patient' is the person column: leave it out"):
        made(features=["patient", "visit"])


def test_test_rows_of_a_share_are_the_clients_own():
    data = made(test=0.3)
    assert (data.owners_of_test >= 0).any()
    with pytest.raises(BadInput, match="test records are the clients' own"):
        data.check_secure()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"person": "nobody"}, "the table has no column 'nobody': its columns are"),
        ({"person": "site"}, "column 'site' is person and client: name two columns"),
        ({"person": "well"}, "column 'well' is person and target: name two columns"),
        ({"person": 5}, "person is 5: name a column"),
    ],
)
def test_columns_that_are_no_people_are_refused(options, message):
    with pytest.raises(BadInput, match=message):
        made(**options)


def test_a_row_without_a_person_is_refused():
    rows = table()
    rows["patient"][4] = ""
    with pytest.raises(BadInput, match="row 5 of column 'patient' is empty: say whose row it is"):
        split(rows, test=0.3)


def test_people_who_are_all_on_one_side_are_refused():
    rows = {"site": ["a", "b"] * 6, "patient": ["p", "q"] * 6, "well": [0, 1] * 6}
    rows["patient"] = ["p"] * 12
    with pytest.raises(BadInput, match="everyone in 'patient' would be held out"):
        split(rows, test=0.3)
    rows["site"] = ["s7", "b"] * 6  # s7 is held out by its name
    with pytest.raises(BadInput, match="everyone in 'patient' has rows of a held-out client"):
        split(rows, client="site", test="by-client")
