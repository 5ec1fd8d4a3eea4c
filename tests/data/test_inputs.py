"""Several inputs by name, and lists of different lengths: kept, checked, saved, or refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil import FederatedData
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Target
from fedveil.data import pad

IDS = np.array([[1, 2, 3], [4, 5, 0], [6, 0, 0]])
MASK = IDS > 0
NAMED = {"ids": IDS, "mask": MASK}


def made(clients=None, test=None, **changes):
    clients = clients or [
        ("ada", {name: value[:2] for name, value in NAMED.items()}, [0, 1]),
        ("bob", {name: value[2:] for name, value in NAMED.items()}, [1]),
    ]
    test = test or (NAMED, [0, 1, 0])
    return FederatedData.from_clients(clients, test=test, classes=2, **changes)


def test_inputs_keep_their_names_and_types():
    data = made()
    assert data.record_shape == {"ids": (3,), "mask": (3,)}
    assert (data.x["ids"].dtype, data.x["mask"].dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(data.x["ids"], IDS)
    np.testing.assert_array_equal(data.test_x["mask"], MASK)
    assert (data.records, data.sizes.tolist()) == (3, [2, 1])
    assert "records of shape {'ids': (3,), 'mask': (3,)}" in repr(data)
    data.check()


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ([[1.5]], np.float32),
        ([[1]], np.int64),
        ([[True]], np.bool_),
        (torch.ones(1, 1), np.float32),
    ],
)
def test_types_of_inputs(given, kind):
    data = made([("ada", {"x1": given}, [0])], ({"x1": given}, [0]))
    assert data.x["x1"].dtype == kind


def test_saved_inputs_are_mapped_into_memory(tmp_path):
    data = made()
    data.save(tmp_path / "saved")
    opened = FederatedData.open(tmp_path / "saved")
    assert isinstance(opened.x["ids"], np.memmap)
    assert opened.fingerprint == data.fingerprint
    np.testing.assert_array_equal(opened.test_x["mask"], data.test_x["mask"])
    (tmp_path / "saved" / "x.mask.npy").unlink()
    with pytest.raises(BadInput, match=r"x\.mask\.npy"):
        FederatedData.open(tmp_path / "saved")


@pytest.mark.parametrize("name", ["../../etc/x", "a b", "", 5])
def test_names_in_a_saved_folder_are_no_paths(tmp_path, name):
    made().save(tmp_path / "saved")
    (tmp_path / "saved" / "meta.json").write_text(json.dumps({"classes": 2, "inputs": [name]}))
    with pytest.raises(BadInput, match="inputs are keyword arguments"):
        FederatedData.open(tmp_path / "saved")


def test_the_fingerprint_covers_every_input_by_name():
    data = made()
    seen = {data.fingerprint}
    for split in ("x", "test_x"):
        for name in ("ids", "mask"):
            changed = {key: value.copy() for key, value in getattr(data, split).items()}
            changed[name][0, 0] ^= 1
            seen.add(replace(data, **{split: changed}).fingerprint)
    both = {"x": {"a": IDS, "b": IDS * 2}, "test_x": {"a": IDS, "b": IDS}}
    swapped = {"x": {"a": IDS * 2, "b": IDS}, "test_x": {"a": IDS, "b": IDS}}
    renamed = {key: {"c": v["a"], "b": v["b"]} for key, v in both.items()}
    seen |= {replace(data, **each).fingerprint for each in (both, swapped, renamed)}
    assert len(seen) == 8
    turned = {key: dict(reversed(value.items())) for key, value in both.items()}
    assert replace(data, **turned).fingerprint == replace(data, **both).fingerprint


def client(x, y=(0, 1, 0)):
    return [("ada", x, list(y))]


REFUSED = {
    "no inputs": ((client({}),), "no inputs in features of client 'ada'"),
    "a name that is no argument": ((client({"a b": IDS}),), "have an input called 'a b'"),
    "a number for a name": ((client({1: IDS}),), "have an input called 1"),
    "inputs of two lengths": (
        (client({"ids": IDS, "mask": MASK[:2]}),),
        "features of client 'ada'.mask has 2 rows and features of client 'ada'.ids 3",
    ),
    "texts": ((client({"ids": [["a"]] * 3}),), "input 'ids', are of type <U1"),
    "ragged inputs": (
        (client({"ids": [[1], [1, 2], []]}),),
        "input 'ids', are lists of different lengths: make them one array with fedveil.data.pad",
    ),
    "clients of other inputs": (
        ([("ada", NAMED, [0, 1, 0]), ("bob", {"ids": IDS}, [0, 1, 0])],),
        "client 'bob' has records of shape {'ids': (3,)}, client 'ada' of shape",
    ),
    "a test split of other inputs": (
        (None, ({"ids": IDS}, [0, 1, 0])),
        "test records have shape {'ids': (3,)}, training records {'ids': (3,), 'mask': (3,)}",
    ),
    "a test split without names": ((None, (IDS, [0, 1, 0])), "test records have shape (3,)"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_are_no_inputs_is_refused(given, message):
    with pytest.raises(BadInput) as refusal:
        made(*given)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("x", [{}, {"a b": IDS}, {"ids": IDS, "mask": MASK[:2]}, {"ids": [[1]]}])
def test_arrays_that_are_no_inputs_are_refused(x):
    with pytest.raises(BadInput):
        replace(made(), x=x)


def test_the_wrong_value_is_found_by_its_input():
    floats = {"ids": IDS, "age": np.array([[0.0], [np.nan], [1.0]], np.float32)}
    with pytest.raises(BadInput, match=r"x\.age row 1 \(client 'ada'\) is not finite"):
        made(client(floats), (floats, [0, 1, 0])).check()


def test_torch_data_sets_of_named_inputs():
    pairs = [({"ids": torch.tensor(IDS[k]), "mask": MASK[k]}, k % 2) for k in range(3)]
    data = FederatedData.from_torch({"ada": pairs}, test=pairs, classes=2)
    np.testing.assert_array_equal(data.x["ids"], IDS)
    assert data.x["mask"].dtype == np.bool_
    with pytest.raises(BadInput, match=r"record 1 of client 'ada' .*give all the same inputs"):
        FederatedData.from_torch({"ada": [pairs[0], ({"ids": IDS[0]}, 0)]}, test=pairs, classes=2)
    short = [({"ids": [1, 2, 3]}, 0), ({"ids": [1, 2]}, 0)]
    with pytest.raises(BadInput, match=r"record 1 .* 'ids' of shape \(2,\).*fedveil.data.pad"):
        FederatedData.from_torch({"ada": short}, test=pairs, classes=2)


TABLE = {
    "who": [f"s{k // 3}" for k in range(36)],
    "ids": np.arange(108).reshape(36, 3) % 7,
    "age": np.linspace(0, 1, 36),
    "sex": ["f", "m", "m"] * 12,
    "ill": [0, 1] * 18,
}


def test_columns_of_arrays_beside_others_are_inputs_by_name(tmp_path):
    options = {"client": "who", "target": "ill", "test": "by-client"}
    data = FederatedData.from_table(TABLE, **options)
    assert data.record_shape == {"ids": (3,), "age": (1,), "sex": (2,)}
    assert data.x["ids"].dtype == np.int64
    assert data.target == Target(2)
    data.save(tmp_path / "saved")
    opened = FederatedData.open(tmp_path / "saved")
    assert (opened.schema, opened.fingerprint) == (data.schema, data.fingerprint)
    odd = {("my age" if name == "age" else name): column for name, column in TABLE.items()}
    with pytest.raises(BadInput, match="have an input called 'my age'"):
        FederatedData.from_table(odd, **options)


def test_rows_of_named_inputs_are_dealt_whole():
    data = FederatedData.from_table(
        {"a": np.arange(72).reshape(36, 2), "b": np.arange(36.0), "y": np.arange(36.0) / 7},
        columns={"b": {"mean": 0, "std": 1}, "y": {"mean": 0, "std": 1}},
        target="y",
        clients=5,
    )
    np.testing.assert_array_equal(data.x["a"][:, 0], 2 * data.x["b"][:, 0])
    np.testing.assert_allclose(data.x["b"][:, 0] / 7, data.y, rtol=1e-6)


@pytest.mark.parametrize(
    ("lists", "options", "expected"),
    [
        ([[1], [1, 2, 3], []], {"length": 2}, [[1, 0], [1, 2], [0, 0]]),
        ([[1], [1, 2, 3]], {"length": 2, "keep": "end"}, [[1, 0], [2, 3]]),
        ([[1]], {"length": 2, "value": -100}, [[1, -100]]),
        ([[0.5]], {"length": 2}, [[0.5, 0.0]]),
        ((np.array([1, 2]), torch.tensor([3])), {"length": 2}, [[1, 2], [3, 0]]),
        ([[]], {"length": 2}, [[0, 0]]),
    ],
)
def test_lists_are_padded(lists, options, expected):
    found = pad(lists, **options)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == (np.float32 if expected[:1] == [[0.5, 0.0]] else np.int64)


@pytest.mark.parametrize(
    ("lists", "options", "message"),
    [
        ([[1]], {"length": 0}, "length is 0"),
        ([[1]], {"length": 2.5}, "length is 2.5"),
        ([[1]], {"length": True}, "length is True"),
        ([[1]], {"length": 1, "value": "x"}, "value is 'x'"),
        ([[1]], {"length": 1, "keep": "middle"}, "keep is 'middle'"),
        ("ab", {"length": 1}, "lists is 'ab'"),
        (5, {"length": 1}, "lists is 5"),
        (["ab"], {"length": 1}, "the entries of list 0 are 'ab'"),
        ([[1], [["a"]]], {"length": 1}, r"list 1 is [['a']]"),
        ([[1], [[1], [1, 2]]], {"length": 1}, "the entries of list 1 are lists of different"),
    ],
)
def test_what_cannot_be_padded_is_refused(lists, options, message):
    with pytest.raises(BadInput) as refusal:
        pad(lists, **options)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
