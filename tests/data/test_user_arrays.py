"""What users hand over becomes arrays, or is refused with one line: never a traceback of numpy."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil import FederatedData
from fedveil.base.errors import BadInput

RECORD = ("a", [[0.0], [1.0]], [0, 1])


def made(client=RECORD, **changes):
    usual = {"clients": [client], "test": ([[1.0]], [1]), "classes": 2}
    return FederatedData.from_clients(**{**usual, **changes})


REFUSED = {
    "half a test split": ({"test": ([[1.0]],)}, "test is ([[1.0]],)"),
    "a text for a test split": ({"test": "ab"}, "test is 'ab'"),
    "a dict for a test split": ({"test": {"x": [1.0], "y": [1]}}, "test is {'x'"),
    "dict test inputs": ({"test": ({"x": 1}, [1])}, "test features, input 'x', are 1"),
    "ragged test inputs": (
        {"test": ([[1.0], [1.0, 2.0]], [1, 1])},
        "test features are lists of different lengths",
    ),
    "no test inputs": ({"test": (None, [1])}, "test features are None"),
    "no test targets": ({"test": ([[1.0]], None)}, "test targets are None"),
    "no classes": ({"classes": None}, "classes is None: give the number of labels"),
    "classes as text": ({"classes": "2"}, "classes is '2'"),
    "half a class": ({"classes": 2.5}, "classes is 2.5"),
    "classes true": ({"classes": True}, "classes is True"),
    "negative classes": ({"classes": -1}, "classes is -1"),
    "labels as quantities": ({"classes": 0}, "targets are of type int64 and classes is 0"),
    "no clients": ({"clients": None}, "clients is None"),
    "a number of clients": ({"clients": 5}, "clients is 5"),
    "a dict of clients": ({"clients": {"a": ([[0.0]], [0])}}, "clients is {'a'"),
    "a text of clients": ({"clients": "ab"}, "clients is 'ab'"),
    "clients without targets": ({"clients": [("a", [[0.0]])]}, "client number 0 is ('a'"),
    "clients that are numbers": ({"clients": iter([1])}, "client number 0 is 1"),
    "no name": ({"client": (None, [[0.0]], [0])}, "client number 0 is called None"),
    "a list for a name": ({"client": (["a"], [[0.0]], [0])}, "client number 0 is called ['a']"),
    "dict inputs": ({"client": ("a", {"x": [0.0]}, [0])}, "training records {'x': ()}"),
    "ragged inputs": ({"client": ("a", [[0.0], [1.0, 2.0]], [0, 1])}, "features of client 'a'"),
    "ragged targets": ({"client": ("a", [[0.0]], [[0], [0, 1]])}, "targets of client 'a'"),
    "one number": ({"client": ("a", 1.0, [0])}, "features of client 'a' are 1.0"),
    "one target": ({"client": ("a", [[1.0]], 0)}, "targets of client 'a' are 0"),
    "text": ({"client": ("a", [["x"]], [0])}, "features of client 'a' are of type <U1"),
    "objects": ({"client": ("a", [[object()]], [0])}, "are of type object"),
    "complex numbers": ({"client": ("a", [[1j]], [0])}, "are of type complex128"),
    "dates": ({"client": ("a", np.zeros((1, 1), dtype="M8[D]"), [0])}, "are of type datetime64"),
    "tensors that learn": (
        {"client": ("a", torch.zeros(1, 1, requires_grad=True), [0])},
        "features of client 'a' cannot be made an array",
    ),
    "quantities as text": ({"client": ("a", [[1.0]], ["x"]), "classes": 0}, "of type <U1"),
    "targets of two shapes": (
        {"clients": [("a", [[1.0]], [0]), ("b", [[1.0]], [[0]])]},
        "different shapes",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_data_is_refused(changes, message):
    with pytest.raises(BadInput) as refusal:
        made(**changes)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_data_is_taken():
    data = made(("a", torch.tensor([[True], [False]]), np.array([1, 0], dtype=np.uint8)))
    assert (data.x.dtype, data.y.dtype) == (np.float32, np.int64)
    assert made(classes=np.int64(2)).classes == 2
    assert made(("a", [[1]], [0.5]), classes=0, test=([[1]], [1])).test_y.dtype == np.float32


ARRAYS = {
    "x": np.zeros((1, 1)),
    "y": np.zeros(1, dtype=int),
    "offsets": np.array([0, 1]),
    "test_x": np.zeros((1, 1)),
    "test_y": np.zeros(1, dtype=int),
    "classes": 2,
}


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "classes"])
@pytest.mark.parametrize("value", [None, [[0.0]], "x", np.array(0.0)])
def test_arrays_that_are_none(name, value):
    with pytest.raises(BadInput, match=f"^{name} is "):
        FederatedData(**{**ARRAYS, name: value})


def test_where_nothing_can_be_saved(tmp_path):
    with pytest.raises(BadInput, match="cannot be made: File name too long"):
        made().save(tmp_path / ("x" * 5000))
    with pytest.raises(BadInput, match="cannot be made: Not a directory"):
        made().save(Path(__file__) / "inside")
    made().save(str(tmp_path / "new"))
    assert FederatedData.open(str(tmp_path / "new")).clients == 1
    with pytest.raises(BadInput, match="exists: save into a new folder"):
        made().save(tmp_path / "new")
