"""`FederatedData`: structure, checks, fingerprint, saving and opening."""

import time
from dataclasses import replace

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData


def make(**changes):
    arrays = {
        "x": np.arange(10, dtype=np.float32).reshape(5, 2),
        "y": np.array([0, 1, 2, 0, 1]),
        "offsets": np.array([0, 2, 5]),
        "test_x": np.ones((2, 2), np.float32),
        "test_y": np.array([0, 2]),
        "classes": 3,
        "names": np.array(["ada", "bob"]),
    }
    return FederatedData(**{**arrays, **changes})


def test_properties():
    data = make()
    assert (data.clients, data.sizes.tolist(), data.record_shape) == (2, [2, 3], (2,))
    assert data.client_name(1) == "bob"
    assert make(names=None).client_name(1) == "1"


SAID = {"fitted": "means", "declared_public": True}


def test_what_is_said_of_the_records_is_kept(tmp_path):
    said = make(**SAID)
    said.save(tmp_path / "said")
    opened = FederatedData.open(tmp_path / "said")
    assert {key: getattr(opened, key) for key in SAID} == SAID
    assert opened.fingerprint == said.fingerprint
    clients = [("ada", [[0, 1]], [2])]
    built = FederatedData.from_clients(clients, test=([[1, 1]], [1]), classes=3, **SAID)
    assert {key: getattr(built, key) for key in SAID} == SAID


def test_data_saved_before_anything_was_said_open_as_they_were(tmp_path):
    make().save(tmp_path / "old")
    (tmp_path / "old" / "meta.json").write_text('{"classes": 3}')
    opened = FederatedData.open(tmp_path / "old")
    assert (opened.fitted, opened.assumptions) == ("", ())
    assert opened.fingerprint == make().fingerprint


def test_data_saved_as_tested_on_clients_records_still_are(tmp_path):
    make().save(tmp_path / "old")
    (tmp_path / "old" / "meta.json").write_text('{"classes": 3, "test_of_clients": true}')
    opened = FederatedData.open(tmp_path / "old")
    assert opened.test_of_clients
    with pytest.raises(BadInput, match="test records are the clients' own"):
        opened.check_secure()


@pytest.mark.parametrize("key", SAID)
def test_what_is_said_has_its_type(tmp_path, key):
    make().save(tmp_path / "odd")
    (tmp_path / "odd" / "meta.json").write_text(f'{{"classes": 3, "{key}": 5}}')
    with pytest.raises(BadInput, match=f"{key} is 5, not what save writes"):
        FederatedData.open(tmp_path / "odd")


def test_the_fingerprint_covers_what_was_fitted_and_whose_the_test_is():
    owned = make(test_owners=np.array([0, -2]))
    different = (make(), make(fitted="means"), make(fitted="sums"), owned)
    assert len({data.fingerprint for data in different}) == 4
    assert make(fitted="means", declared_public=True).fingerprint == different[1].fingerprint


def test_claims_say_what_was_fitted():
    (said,) = make(fitted="means").assumptions
    assert said == "means were fitted on clients' records in the clear: outside this claim"
    (said,) = make(fitted="means", declared_public=True).assumptions
    assert said == "declared public: means"
    with pytest.raises(BadInput, match="declared_public is given and fitted is empty"):
        make(declared_public=True)


def test_secure_noise_refuses_what_was_fitted_unless_it_is_public():
    with pytest.raises(BadInput, match=r"'secure' and means were fitted on .*'held-out'.*'public'"):
        make(fitted="means").check_secure()
    make(fitted="means", declared_public=True).check_secure()
    make().check_secure()


def test_from_clients():
    data = FederatedData.from_clients(
        [("ada", [[0, 1]], [2]), ("bob", [[2, 3], [4, 5]], [0, 1])], test=([[1, 1]], [1]), classes=3
    )
    assert (data.x.dtype, data.test_x.dtype, data.y.dtype) == (np.int64,) * 3
    assert data.offsets.tolist() == [0, 1, 3]
    assert data.y.tolist() == [2, 0, 1]
    regression = FederatedData.from_clients([("a", [[0]], [2.5])], test=([[1]], [1]), classes=0)
    assert regression.y.dtype == np.float32


@pytest.mark.parametrize(
    ("first", "second", "test", "kind"),
    [
        (np.int32, np.uint8, np.int64, np.int64),
        (np.int64, np.float64, np.int64, np.float32),
        (np.int64, np.int64, np.float32, np.float32),
        (np.int64, bool, np.int64, np.float32),
        (bool, bool, bool, np.float32),
    ],
)
def test_features_are_whole_numbers_if_all_of_them_are(first, second, test, kind):
    clients = [("a", np.ones((2, 3), first), [0, 1]), ("b", np.ones((1, 3), second), [1])]
    data = FederatedData.from_clients(clients, test=(np.ones((1, 3), test), [0]), classes=2)
    assert (data.x.dtype, data.test_x.dtype) == (kind, kind)
    assert (data.x == 1).all()


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([], "no clients"),
        ([("ada", [[0.0]], [0, 1])], "client 'ada' has 1 feature rows and 2 targets"),
        ([("ada", [[0.0]], [0]), ("bob", [[0.0, 1.0]], [0])], r"'bob' has records of shape \(2,\)"),
        ([("ada", [[0.0]], [0]), ("ada", [[1.0]], [0])], "client 'ada' appears twice"),
    ],
)
def test_from_clients_refuses(clients, message):
    with pytest.raises(BadInput, match=message):
        FederatedData.from_clients(clients, test=([[0.0]], [0]), classes=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": np.array([0])}, "no clients"),
        ({"offsets": np.array([0, 2, 4])}, "offsets must rise from 0 to the number of records, 5"),
        ({"offsets": np.array([1, 2, 5])}, "offsets must rise"),
        ({"offsets": np.array([0, 6, 5])}, "offsets must rise"),
        ({"offsets": np.array([0, 5, 5])}, "client 'bob' has no records"),
        ({"y": np.array([0, 1])}, "5 feature rows and 2 targets"),
        ({"test_owners": np.array([0])}, "a whole number for each of 2 test records is needed"),
        ({"test_owners": np.array([0.0, 1.0])}, "a whole number for each of 2 test records"),
        ({"test_owners": np.array([0, 2])}, "test_owners has client 2: there are 2, from 0 on"),
        ({"test_y": np.array([0])}, "2 test rows and 1 test targets"),
        ({"test_x": np.ones((2, 3))}, r"test records have shape \(3,\), training records \(2,\)"),
        ({"classes": -1}, "classes is -1"),
        ({"names": np.array(["ada"])}, "1 names for 2 clients"),
        ({"names": np.array(["ada", "ada"])}, "client 'ada' appears twice"),
    ],
)
def test_structure_is_refused(changes, message):
    with pytest.raises(BadInput, match=message):
        make(**changes)


def test_check_accepts_good_data():
    """It reads them and changes nothing."""
    for changes in ({}, {"classes": 0, "y": np.linspace(-9, 9, 5), "test_y": np.ones(2)}):
        data, same = make(**changes), make(**changes)
        data.check()
        assert np.array_equal(data.x, same.x)
        assert np.array_equal(data.y, same.y)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_check_names_the_client_of_a_value_that_is_not_finite(value):
    data = make()
    data.x[3, 1] = value
    with pytest.raises(BadInput, match=r"x row 3 \(client 'bob'\) is not finite"):
        data.check()


def test_check_finds_values_in_test_records_and_targets():
    data = make()
    data.test_x[1, 0] = np.nan
    with pytest.raises(BadInput, match="test_x row 1 is not finite"):
        data.check()
    regression = make(classes=0, y=np.array([0, 1, np.nan, 0, 1]), test_y=np.ones(2))
    with pytest.raises(BadInput, match=r"y row 2 \(client 'bob'\) is not finite"):
        regression.check()


@pytest.mark.parametrize("label", [-1, 3])
def test_check_refuses_labels_outside_the_classes(label):
    data = make(y=np.array([0, label, 0, 0, 0]))
    with pytest.raises(
        BadInput, match=rf"y row 1 \(client 'ada'\) has label {label}, outside 0..2"
    ):
        data.check()
    with pytest.raises(BadInput, match=f"test_y row 0 has label {label}"):
        make(test_y=np.array([label, 0])).check()


def test_check_looks_beyond_the_first_piece(monkeypatch):
    monkeypatch.setattr("fedveil.data.user_arrays._SCAN", 4)
    data = make()
    data.x[4, 0] = np.nan
    with pytest.raises(BadInput, match="x row 4 "):
        data.check()


def test_fingerprint_is_of_the_content(monkeypatch):
    first = make().fingerprint
    monkeypatch.setattr("fedveil.data.user_arrays._SCAN", 4)
    assert make().fingerprint == first


@pytest.mark.parametrize(
    "changes",
    [
        {"x": np.arange(10, dtype=np.float32).reshape(5, 2) + np.float32(1e-6)},
        {"x": np.arange(10, dtype=np.float64).reshape(5, 2)},
        {"y": np.array([0, 1, 2, 1, 1])},
        {"offsets": np.array([0, 3, 5])},
        {"test_x": np.zeros((2, 2), np.float32)},
        {"test_y": np.array([0, 1])},
        {"classes": 4},
        {"names": np.array(["ada", "bab"])},
        {"names": None},
    ],
)
def test_any_change_changes_the_fingerprint(changes):
    assert make(**changes).fingerprint != make().fingerprint


@pytest.mark.parametrize("names", [np.array(["ada", "bob"]), None])
def test_save_and_open(tmp_path, names):
    data = make(names=names)
    data.save(tmp_path / "saved")
    opened = FederatedData.open(tmp_path / "saved")
    assert isinstance(opened.x, np.memmap)
    assert isinstance(opened.test_y, np.memmap)
    assert opened.fingerprint == data.fingerprint
    assert opened.client_name(1) == data.client_name(1)
    opened.check()


def test_opened_data_cannot_be_changed(tmp_path):
    make().save(tmp_path / "saved")
    opened = FederatedData.open(tmp_path / "saved")
    with pytest.raises(ValueError, match="read-only"):
        opened.x[0, 0] = 1.0


def test_a_million_clients_open_without_being_read(tmp_path):
    """The features are a 4 GB hole in a sparse file."""
    clients = 1_000_000
    small = make(names=None)
    small.save(tmp_path / "many")
    np.save(tmp_path / "many/offsets.npy", np.arange(clients + 1))
    np.save(tmp_path / "many/y.npy", np.zeros(clients, np.int64))
    np.save(tmp_path / "many/test_x.npy", np.zeros((2, 1000), np.float32))
    np.lib.format.open_memmap(
        tmp_path / "many/x.npy", mode="w+", dtype=np.float32, shape=(clients, 1000)
    )
    start = time.perf_counter()
    data = FederatedData.open(tmp_path / "many")
    assert time.perf_counter() - start < 2
    assert data.clients == clients
    assert isinstance(data.x, np.memmap)


@pytest.mark.parametrize("name", ["x.npy", "offsets.npy", "test_y.npy", "meta.json"])
@pytest.mark.parametrize("content", [None, b"", b"garbage"])
def test_opening_a_broken_folder(tmp_path, name, content):
    folder = tmp_path / "saved"
    make().save(folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(BadInput, match=name.split(".")[0]):
        FederatedData.open(folder)


def test_opening_arrays_that_do_not_belong_together(tmp_path):
    make().save(tmp_path / "saved")
    np.save(tmp_path / "saved/y.npy", np.zeros(4, np.int64))
    with pytest.raises(BadInput, match="5 feature rows and 4 targets"):
        FederatedData.open(tmp_path / "saved")


def test_replace_checks_again():
    with pytest.raises(BadInput, match="5 feature rows and 1 targets"):
        replace(make(), y=np.array([0]))
