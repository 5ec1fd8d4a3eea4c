"""Targets of any shape: kept, checked, saved, and refused with one line where they are none."""

import numpy as np
import pytest

from fedveil import FederatedData
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Target

X = [[0.0], [1.0]]
WORDS = [[0, 1, -100], [2, 2, 3]]
HOLDS = [[True, False, True], [False, False, False]]


def made(y, classes, test_y=None):
    test = y if test_y is None else test_y
    return FederatedData.from_clients([("ada", X, y)], test=(X, test), classes=classes)


TAKEN = {
    "labels": ([0, 1], 2, Target(2), np.int64),
    "whole floats": ([0.0, 1.0], 2, Target(2), np.int64),
    "words": (WORDS, 4, Target(4, (3,)), np.int64),
    "grids": ([[[0, 1]], [[1, -100]]], 4, Target(4, (1, 2)), np.int64),
    "several, as truth": (HOLDS, 3, Target(3, (3,), several=True), np.float32),
    "several, as floats": (np.array(HOLDS, float), 3, Target(3, (3,), True), np.float32),
    "a number": ([0.5, 1.0], 0, Target(0), np.float32),
    "numbers": ([[0.5, 1.0], [0.0, 2.0]], 0, Target(0, (2,)), np.float32),
}


@pytest.mark.parametrize(("y", "classes", "target", "kind"), TAKEN.values(), ids=TAKEN)
def test_targets_are_kept_as_they_are(y, classes, target, kind, tmp_path):
    data = made(y, classes)
    assert data.target == target
    assert data.y.dtype == data.test_y.dtype == kind
    np.testing.assert_array_equal(data.y, np.asarray(y))
    data.check()
    data.save(tmp_path / "saved")
    opened = FederatedData.open(tmp_path / "saved")
    assert (opened.target, opened.fingerprint) == (target, data.fingerprint)
    assert str(target) in repr(data)


REFUSED = {
    "a matrix of another width": ((np.ones((2, 2)), 3), "one column for each of 3 labels"),
    "whole quantities": ((WORDS, 0), "targets are of type int64 and classes is 0"),
    "test targets of another shape": (
        (WORDS, 4, [[0, 1], [1, 1]]),
        "test targets are int64 of shape (2,), training targets int64 of shape (3,)",
    ),
    "test targets of another kind": ((HOLDS, 3, [[0, 1, 1]] * 2), "training targets float32"),
    "texts": (([["a", "b"]] * 2, 0), "targets are of type <U1"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_target_is_refused(given, message):
    with pytest.raises(BadInput) as refusal:
        made(*given)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("y", "classes", "message"),
    [
        ([0, -100], 2, "y row 1 (client 'ada') has label -100, outside 0..1"),
        ([[0, 1], [1, -1]], 2, "y row 1 (client 'ada') has label -1, outside 0..1"),
        ([[0, 1], [2, 1]], 2, "y row 1 (client 'ada') has label 2, outside 0..1"),
        ([[0.0, 1.5], [1.0, 1.0]], 2, "y row 0 (client 'ada') says 1.5 of a label, outside 0..1"),
        ([[0.0, np.nan], [1.0, 1.0]], 2, "y row 0 (client 'ada') is not finite"),
    ],
)
def test_values_that_no_model_can_learn(y, classes, message):
    with pytest.raises(BadInput) as refusal:
        made(y, classes).check()
    assert str(refusal.value).startswith(message)


def test_the_shape_a_model_gives_for_a_record():
    assert Target(5).output_shape == (5,)
    assert Target(5, (7,)).output_shape == (7, 5)
    assert Target(5, (5,), several=True).output_shape == (5,)
    assert Target(0).output_shape == (1,)
    assert Target(0, (2, 3)).output_shape == (2, 3)


def test_tables_have_targets_of_arrays():
    table = {
        "who": [f"s{k // 3}" for k in range(36)],
        "age": np.arange(36.0),
        "next": np.arange(72).reshape(36, 2) % 5,
        "scores": np.ones((36, 3)),
    }
    options = {"client": "who", "features": ["age"], "test": "by-client"}
    columns = {"next": {"classes": 5}}
    data = FederatedData.from_table(table, target="next", columns=columns, **options)
    assert data.target == data.schema.target_column.as_target == Target(5, (2,))
    assert FederatedData.from_table(table, target="scores", **options).target == Target(0, (3,))
    with pytest.raises(BadInput, match=r"say how many labels there are \(columns.next.classes\)"):
        FederatedData.from_table(table, target="next", **options)
    with pytest.raises(BadInput, match=r"columns.age.classes is for the target"):
        FederatedData.from_table(table, target="scores", columns={"age": {"classes": 5}}, **options)
    with pytest.raises(BadInput, match="one for each label is needed"):
        FederatedData.from_table(
            table, target="scores", columns={"scores": {"classes": 5}}, **options
        )
    by_number = FederatedData.from_table(
        table | {"label": [0, 4] * 18}, target="label", columns={"label": {"classes": 9}}, **options
    )
    assert (by_number.target, by_number.schema.label_names) == (Target(9), tuple(range(9)))
    with pytest.raises(BadInput, match=r"is 4: a label of 0..3 is needed"):
        FederatedData.from_table(
            table | {"label": [0, 4] * 18},
            target="label",
            columns={"label": {"classes": 4}},
            **options,
        )


@pytest.mark.parametrize(("kind", "extra"), [("shards", {}), ("dirichlet", {"alpha": 1.0})])
def test_records_are_not_sorted_by_targets_of_several_places(kind, extra):
    table = {"age": np.arange(36.0), "next": np.arange(72).reshape(36, 2) % 5}
    with pytest.raises(BadInput, match="cannot sort by: use iid"):
        FederatedData.from_table(
            table,
            target="next",
            columns={"next": {"classes": 5}, "age": {"low": 0, "high": 36}},
            clients=4,
            partition=kind,
            **extra,
        )
