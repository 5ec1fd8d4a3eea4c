"""Parcels: what is opened is what was packed; files are mapped, not sent. No cluster is needed."""

import pickle
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.models.trial import check_fits
from fedveil.privacy.noise.secure_random import SecureRandom
from fedveil.training.engines.ray_pool import levels_on_nodes
from fedveil.training.engines.ray_tasks import MappedFile, pack


def sent(thing):
    parcel, _ = pack(thing, what="a thing")
    return pickle.loads(pickle.dumps(parcel)).open({})


@pytest.fixture
def saved(make_data, tmp_path):
    make_data(sizes=[50] * 40).save(tmp_path / "data")
    return FederatedData.open(tmp_path / "data")


def test_arrays_of_files_are_named_and_mapped_again(saved):
    parcel, mapped = pack(saved, what="data")
    assert {file.file_path.rpartition("/")[2] for file in parcel.mapped_files} >= {"x.npy", "y.npy"}
    assert len(mapped) == len(parcel.mapped_files)
    assert len(pickle.dumps(parcel)) < saved.x.nbytes / 4
    opened = parcel.open({})
    assert isinstance(opened.x, np.memmap)
    assert opened.fingerprint == saved.fingerprint


def test_an_array_that_is_used_twice_is_one_file(saved):
    parcel, _ = pack([saved.x, saved.x, saved], what="data")
    assert [file.file_path for file in parcel.mapped_files].count(str(saved.x.filename)) == 1


def test_a_file_that_has_gone_or_changed_is_missing_and_replaced_by_its_array(saved, tmp_path):
    parcel, mapped = pack(saved, what="data")
    path = tmp_path / "data" / "x.npy"
    whole = bytearray(path.read_bytes())
    names = [file.file_path.rpartition("/")[2] for file in parcel.mapped_files]
    (tmp_path / "data" / "y.npy").unlink()
    whole[-1] ^= 1
    path.rename(tmp_path / "kept.npy")
    path.write_bytes(whole)
    parcel = pickle.loads(pickle.dumps(parcel))
    missing = parcel.missing_files()
    assert sorted(names[k] for k in missing) == ["x.npy", "y.npy"]
    opened = parcel.open({k: np.asarray(mapped[k]) for k in missing})
    assert opened.fingerprint == saved.fingerprint


def test_a_part_of_a_mapped_array_is_sent_whole(saved):
    part = saved.x[100:300]
    assert MappedFile.behind(part) is None
    parcel, _ = pack(part, what="a part")
    assert not parcel.mapped_files
    assert np.array_equal(parcel.open({}), part)


def test_arrays_travel_beside_the_pickle(make_data):
    data = make_data(sizes=[500] * 4)
    parcel, _ = pack(data, what="data")
    assert sum(buffer.nbytes for buffer in parcel.buffers) >= data.x.nbytes
    assert len(parcel.pickled) < data.x.nbytes / 4


class Own(nn.Module):
    """A module that no other process could import by its name alone."""

    def __init__(self, size=6):
        super().__init__()
        self.first, self.second = nn.Linear(size, 400), nn.Linear(400, 3)
        self.second.bias.requires_grad = False

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_a_task_is_sent_with_its_vector_once_and_its_views(make_data):
    task = Task(Own(), cross_entropy, ["accuracy"])
    x, y = torch.tensor(make_data().x[:4]), torch.tensor(make_data().y[:4])
    check_fits(task, x, y, 3)
    parcel, _ = pack(task, what="a task")
    size = len(parcel.pickled) + sum(buffer.nbytes for buffer in parcel.buffers)
    assert size < 1.5 * 4 * task.size + 10_000
    other = sent(task)
    assert other.size == task.size
    assert other.layer_sizes == task.layer_sizes
    assert torch.equal(other.parameters, task.parameters)
    assert torch.equal(other.module(x), task.module(x))
    assert list(other.frozen) == list(task.frozen) == ["second.bias"]
    assert other.drops is task.drops
    other.parameters.zero_()
    assert float(other.module.first.weight.detach().abs().sum()) == 0.0
    assert other.measure_batch(task.parameters, x, y).per_example.keys() == {"loss", "accuracy"}


@pytest.mark.slow
def test_code_of_a_script_is_sent_along(tmp_path):
    parcel, _ = pack(Own(2), what="a module")
    (tmp_path / "parcel").write_bytes(pickle.dumps(parcel))
    code = (
        "import pickle, sys, torch\n"
        f"parcel = pickle.load(open({str(tmp_path / 'parcel')!r}, 'rb'))\n"
        "print(parcel.open({})(torch.ones(5, 2)).shape[0], type(parcel).__name__)\n"
        "print('tests' in sys.modules)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert told.stdout.split() == ["5", "Parcel", "False"]


class Locked(Own):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize("thing", [Locked(), SecureRandom(), (n for n in range(3))])
def test_what_cannot_be_sent_is_refused_with_one_line(thing):
    with pytest.raises(BadInput, match="engine 'ray' cannot send the model to its workers") as e:
        pack(thing, what="the model")
    assert "\n" not in str(e.value)
    assert "processes" in str(e.value)


def test_sums_are_added_on_the_nodes_where_they_are_many_and_large():
    large = 1 << 24
    assert [levels_on_nodes(n, 2, large) for n in (2, 63, 64, 511, 512, 4096)] == [0, 0, 1, 1, 2, 3]
    assert levels_on_nodes(4096, 1, large) == levels_on_nodes(4096, 9, 1000) == 0


def test_records_of_a_replaced_data_set_are_its_own(saved):
    half = replace(saved, x=np.asarray(saved.x) * 2)
    assert sent(half).fingerprint == half.fingerprint
