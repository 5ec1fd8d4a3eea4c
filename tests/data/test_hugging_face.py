"""Data sets of the Hugging Face library, as objects and as folders."""

import datasets
import numpy as np
import pytest

from fedveil import FederatedData
from fedveil.base.errors import BadInput


@pytest.fixture(autouse=True, scope="module")
def quiet():
    datasets.disable_progress_bars()


FEATURES = datasets.Features(
    {
        "site": datasets.Value("string"),
        "age": datasets.Value("int32"),
        "sex": datasets.ClassLabel(names=["f", "m", "x"]),
        "words": datasets.List(datasets.Value("int32"), length=3),
        "pixels": datasets.Array2D(shape=(2, 2), dtype="uint8"),
        "mood": datasets.ClassLabel(names=["sad", "so-so", "glad"]),
    }
)


def rows(count, sites, first=0):
    span = range(first, first + count)
    return {
        "site": [f"s{first + k % sites}" for k in span],
        "age": [20 + k % 50 for k in span],
        "sex": [k % 2 for k in span],
        "words": [[k % 5, 1, 2] for k in span],
        "pixels": [[[k % 256, 0], [0, 255]] for k in span],
        "mood": [2 * (k % 2) for k in span],
    }


def dataset(count=60, sites=12, first=0, **changes):
    return datasets.Dataset.from_dict({**rows(count, sites, first), **changes}, features=FEATURES)


def test_labels_by_name_are_declared():
    data = FederatedData.from_datasets(
        dataset(), client="site", target="mood", features=["age", "sex"], test="by-client"
    )
    assert data.schema.label_names == ("sad", "so-so", "glad")
    assert data.schema.feature_columns[1].values == ("f", "m", "x")
    assert set(data.y) == {0, 2}
    assert data.assumptions == (
        "means and standard deviations of 'age' were fitted on the test records, which no claim "
        "covers",
    )


def test_it_is_the_table_that_it_holds():
    whole = dataset()
    data = FederatedData.from_datasets(whole, client="site", target="age", features=["sex"],
                                       columns={"age": {"low": 0, "high": 100}})  # fmt: skip
    plain = {**rows(60, 12), "sex": ["fm"[k % 2] for k in range(60)]}
    same = FederatedData.from_table(
        plain, client="site", target="age", features=["sex"],
        columns={"age": {"low": 0, "high": 100}, "sex": {"values": ["f", "m", "x"]}},
    )  # fmt: skip
    assert data.fingerprint == same.fingerprint


def test_rows_that_were_chosen_are_the_rows_that_count():
    data = FederatedData.from_datasets(
        dataset().select(range(30)),
        client="site",
        target="mood",
        features=["age"],
        test="by-client",
    )
    assert len(data.x) + len(data.test_x) == 30


@pytest.mark.parametrize("on_disk", [False, True])
def test_splits_become_training_and_test(on_disk, tmp_path):
    source = datasets.DatasetDict({"train": dataset(), "test": dataset(10, 2, first=100)})
    if on_disk:
        source.save_to_disk(tmp_path / "moods")
        source = tmp_path / "moods"
    data = FederatedData.from_datasets(source, client="site", target="mood", features=["age"])
    assert (data.clients, len(data.x), len(data.test_x)) == (12, 60, 10)
    assert not data.test_of_clients
    own = FederatedData.from_datasets(
        source, client="site", target="mood", features=["age"], test="by-client"
    )
    assert own.clients < 12


def test_splits_with_the_same_clients_say_so():
    source = datasets.DatasetDict({"train": dataset(), "test": dataset(12, 12)})
    data = FederatedData.from_datasets(source, client="site", target="mood", features=["age"])
    assert data.test_of_clients
    assert data.fitted


def test_arrays_keep_their_shape():
    whole = dataset()
    words = FederatedData.from_datasets(whole, client="site", target="mood", features=["words"])
    assert (words.x.dtype, words.record_shape) == (np.int64, (3,))
    pixels = FederatedData.from_datasets(
        whole, client="site", target="mood", features=["pixels"],
        columns={"pixels": {"low": 0, "high": 255}},
    )  # fmt: skip
    assert (pixels.x.dtype, pixels.record_shape) == (np.float32, (2, 2))
    assert pixels.x.max() == 1


def test_pictures_are_arrays():
    pictures = [np.full((4, 4), k % 256, dtype=np.uint8) for k in range(60)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    source = datasets.Dataset.from_dict(
        {"image": pictures, "label": [k % 2 for k in range(60)]}, features=features
    )
    data = FederatedData.from_datasets(
        source, target="label", clients=6, columns={"image": {"low": 0, "high": 255}}
    )
    assert (data.record_shape, data.classes, data.clients) == ((4, 4), 2, 6)
    assert np.abs(data.x).max() <= 1


def test_missing_labels_are_refused():
    odd = dataset(mood=[-1] + [0, 2] * 29 + [0])
    with pytest.raises(BadInput, match="row 1 of column 'mood' is empty, and it is the target"):
        FederatedData.from_datasets(
            odd, client="site", target="mood", features=["age"], test="by-client"
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (5, "the data set is 5: a Dataset or DatasetDict of the datasets library"),
        ("nowhere", "nowhere is no data set that save_to_disk wrote"),
        ({"test": dataset()}, "the data set has splits 'test' and no 'train': add it"),
        (dataset().to_iterable_dataset(), "loaded and not streamed"),
    ],
)
def test_what_is_no_data_set_is_refused(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=message) as refused:
        FederatedData.from_datasets(source, target="mood", clients=2)
    assert "\n" not in str(refused.value)


def test_columns_that_are_not_there_are_named():
    with pytest.raises(BadInput, match="the training split has no column 'joy': its columns are"):
        FederatedData.from_datasets(dataset(), client="site", target="joy")
    with pytest.raises(BadInput, match="the training split has no column of 'a', 'joy'"):
        FederatedData.from_datasets(dataset(), target="joy", features=["a"], clients=2)
