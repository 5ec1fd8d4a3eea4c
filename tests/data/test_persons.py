"""Persons in data: how they are said, kept, divided and saved."""

from dataclasses import replace

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.data.own_table import TableOptions, table_records
from fedveil.data.partition import partition, resample, shorten_clients
from fedveil.data.persons import PersonIndex, alone, numbered

X = np.arange(7, dtype=np.float32)[:, None]


def made(persons, **more):
    clients = [("a", X[:4], [0, 1, 0, 1]), ("b", X[4:], [1, 0, 1])]
    return FederatedData.from_clients(clients, classes=2, persons=persons, **more)


def test_persons_are_numbered_within_each_client():
    for persons in (
        [["eve", "bob", "eve", "ann"], ["bob", "bob", "ann"]],
        {"b": ["bob", "bob", "ann"], "a": ["eve", "bob", "eve", "ann"]},
    ):
        data = made(persons)
        assert data.persons.tolist() == [2, 1, 2, 0, 1, 1, 0]
        assert data.people.tolist() == [3, 2]
        assert data.person_index.record_counts.tolist() == [1, 1, 2, 1, 2]
    assert made([[7, 5, 7, 7], [5, 5, 5]]).people.tolist() == [2, 1]
    assert made(None).persons is None


def test_numbers_and_texts_are_different_persons():
    data = made([[1, 1, 1, 1], np.array([1, "1", "1"], dtype=object)])
    assert data.people.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("persons", "words"),
    [
        ([["a"] * 4], "1 lists for 2 clients"),
        ([["a"] * 4, ["b"] * 2], "client 'b' has 3 records and 2 persons"),
        ({"a": ["a"] * 4}, "differ in 'b'"),
        (["aaaa", ["b"] * 3], "a list is needed"),
        ("people", "one list of ids"),
        ([[None] * 4, ["b"] * 3], "client 'a' has the person None"),
        ([[0.5] * 4, ["b"] * 3], "texts or whole numbers"),
        ([["a", "", "a", "a"], ["b"] * 3], "texts or whole numbers"),
        ([[True] * 4, ["b"] * 3], "texts or whole numbers"),
    ],
)
def test_persons_that_cannot_be_are_one_line(persons, words):
    with pytest.raises(BadInput, match=words) as refusal:
        made(persons)
    assert "\n" not in str(refusal.value)


def test_numbered_and_alone():
    offsets = np.array([0, 3, 4, 6])
    assert numbered(np.array([5, 3, 5, 5, 9, 2]), offsets).tolist() == [1, 0, 1, 0, 1, 0]
    assert alone(offsets).tolist() == [0, 1, 2, 0, 0, 1]
    index = PersonIndex.of(np.array([1, 0, 1, 0, 0, 0]), offsets)
    assert index.of_records(np.array([10, 11, 12, 13])).tolist() == [11, 10, 11, 12, 13, 13]


def test_persons_are_saved_and_loaded(tmp_path):
    data = made([["e", "b", "e", "a"], ["b", "b", "a"]], test=(X[:2] + 9, [0, 1]))
    for number, each in enumerate(
        (data, data.capped(1), replace(data, test_persons=np.array([-1, 8])))
    ):
        each.save(tmp_path / str(number))
        found = FederatedData.open(tmp_path / str(number))
        assert found.persons.tolist() == each.persons.tolist()
        assert found.cap == each.cap
        assert found.fingerprint == each.fingerprint
        assert found.capped(1).fingerprint == each.capped(1).fingerprint
        if each.test_persons is not None:
            assert found.test_persons.tolist() == [-1, 8]
    bare = made(None)
    bare.save(tmp_path / "bare")
    assert FederatedData.open(tmp_path / "bare").persons is None


def test_persons_follow_their_records_wherever_they_go():
    data = made([["e", "b", "e", "a"], ["b", "b", "a"]])
    joined = data.concatenated(data)
    assert joined.people.tolist() == [3, 2, 3, 2]
    assert data.concatenated(made(None), data).persons is None
    assert data.with_clients(X[:3], data.y[:3], np.array([0, 1, 3])).people.tolist() == [1, 2]
    fewer = shorten_clients(data, 2, seed=1)
    assert fewer.sizes.tolist() == [2, 2]
    assert len(fewer.persons) == 4
    away = data.at_sites(["a", "b"], [4, 3])
    assert away.persons is None
    capped = away.capped(2)
    assert (capped.cap, capped.persons, capped.people.tolist()) == (2, None, [4, 3])
    assert not any("not per person" in text for text in capped.assumptions)
    assert capped.fingerprint != away.fingerprint
    with pytest.raises(BadInput, match="have no persons"):
        _ = made(None).people


def test_joining_makes_up_no_persons_for_claims_about_persons():
    data = made([["e", "b", "e", "a"], ["b", "b", "a"]])
    assert data.capped(2).concatenated(data.capped(2)).capped(1).people.tolist() == [3, 2, 3, 2]
    few = made([["a", "b", "c", "d"], ["a", "b", "c"]])
    assert data.capped(2).concatenated(few).cap == 2  # nobody has more
    for first, others in (
        (data.capped(2), [made(None)]),
        (data.capped(2), [data.capped(2), made(None)]),
        (data, [data.capped(2)]),
        (made(None), [data.capped(2)]),
        (data.capped(1), [data.capped(2)]),
    ):
        with pytest.raises(BadInput, match="cap all of them alike, or none"):
            first.concatenated(*others)
    with pytest.raises(BadInput, match="a person has 2 records and cap is 1"):
        data.capped(1).concatenated(data)


def test_a_cap_may_fall_and_the_claim_s_remark_goes():
    data = made([["e", "e", "e", "a"], ["b", "b", "b"]])
    assert any("not per person" in text for text in data.assumptions)
    assert not any("not per person" in text for text in data.capped(2).assumptions)
    assert data.capped(3).capped(1).fingerprint == data.capped(1).fingerprint
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises(BadInput, match="cap"):
            data.capped(wrong)


TABLE = {
    "ward": ["n"] * 12 + ["s"] * 12,
    "who": [f"p{k // 3}" for k in range(24)],
    "age": list(range(24)),
    "well": ["no", "yes"] * 12,
}


def of_table(**more):
    options = {"target": "well", "person": "who", "columns": {"age": {"low": 0, "high": 30}}}
    return FederatedData.from_table(
        TABLE, **{**options, "client": "ward", "statistics": "public", **more}
    )


def test_a_table_s_persons_are_its_records_owners():
    data = of_table()
    assert data.people.tolist() == [4, 4]
    split = of_table(test=0.3, statistics=None)
    trained = int(split.people.sum())
    held_out = set(split.test_persons.tolist())
    assert -1 not in held_out
    assert trained + len(held_out) == 8
    assert split.capped(3).held_out_owners == len(held_out)


def test_test_rows_of_people_who_train_are_not_held_out_people():
    rows = {name: column[:4] for name, column in TABLE.items()}
    rows["who"] = ["p0", "p0", "other", "else"]
    data = of_table(test=rows)
    assert data.test_persons.tolist()[:2] == [-1, -1]
    assert min(data.test_persons[2:]) >= 0
    owners = data.capped(3).test_owners
    assert owners[:2].tolist() == data.test_owners[:2].tolist()
    assert len(set(owners[2:].tolist())) == 2
    assert max(owners[2:]) < -1


def test_rows_that_are_dealt_out_make_a_person_several():
    data = of_table(client=None, clients=3)
    assert any("records of one person are dealt to several clients" in t for t in data.assumptions)
    assert int(data.people.sum()) > 8


def test_records_drawn_with_replacement_keep_their_persons():
    options = TableOptions(
        "well",
        None,
        ["age"],
        {"age": {"low": 0, "high": 30}, "well": {"values": ["no", "yes"]}},
        person="who",
    )
    records = resample(table_records(TABLE, options), 50, seed=2)
    ages = np.round((records.x[:, 0] + 1) * 15).astype(int)
    assert records.record_persons.tolist() == (ages // 3).tolist()
    data = partition(records, kind="iid", clients=2, seed=0)
    assert len(data.persons) == 50


def test_torch_data_sets_have_persons_too():
    sets = {"a": [(X[k], k % 2) for k in range(4)], "b": [(X[k], k % 2) for k in range(3)]}
    data = FederatedData.from_torch(sets, classes=2, persons={"a": [1, 1, 2, 2], "b": [1, 2, 3]})
    assert data.people.tolist() == [2, 3]


def test_hugging_face_data_sets_have_persons_too():
    datasets = pytest.importorskip("datasets")
    data = FederatedData.from_datasets(
        datasets.Dataset.from_dict(TABLE),
        target="well",
        client="ward",
        person="who",
        columns={"age": {"low": 0, "high": 30}},
        statistics="public",
    )
    assert data.people.tolist() == [4, 4]


def test_several_files_have_persons_of_their_own(tmp_path):
    for name, first in (("north", 0), ("south", 1)):
        rows = [f"p{k // 2},{first + k},{'yes' if k % 3 else 'no'}" for k in range(8)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["who,age,well", *rows]))
    data = FederatedData.from_table(
        str(tmp_path),
        target="well",
        person="who",
        columns={"age": {"low": 0, "high": 9}},
        statistics="public",
    )
    assert data.people.tolist() == [4, 4]
    assert data.capped(1).sizes.tolist() == [4, 4]


def test_joining_refuses_other_types_shapes_and_numbers_of_classes():
    def records(dtype, width, classes):
        x, y = np.zeros((2, width), dtype=dtype), np.zeros(2, dtype=np.int64)
        return FederatedData.from_clients([("a", x, y)], classes=classes)

    whole = FederatedData.from_clients([("a", np.zeros((2, 3)), np.zeros(2, np.int64))], classes=2)
    assert whole.concatenated(records("float32", 3, 2)).clients == 2
    with pytest.raises(BadInput, match="numbers of classes"):
        whole.concatenated(records("float64", 3, 3))
    with pytest.raises(BadInput, match="shape"):
        whole.concatenated(records("float64", 4, 2))
