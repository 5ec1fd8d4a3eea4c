"""Checkpoints: whole or not there, the newest that can be read."""

import pytest
import safetensors.torch
import torch

from fedveil.runs import checkpoint
from fedveil.runs.disk import write_atomic
from fedveil.training.server import ServerState

SIZE = 6


def state(round, **memory):
    return ServerState(round, torch.full((SIZE,), float(round)), memory)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def newest(folder):
    return folder / names(folder)[-1]


def test_a_state_survives(tmp_path):
    memory = torch.arange(SIZE, dtype=torch.float64) / 3
    checkpoint.save(tmp_path / "c", state(3, velocity=memory))
    read, remarks = checkpoint.load_latest(tmp_path / "c", SIZE)
    assert (read.round, remarks) == (3, [])
    assert torch.equal(read.params, state(3).params)
    assert torch.equal(read.memory["velocity"], memory)
    assert read.memory["velocity"].dtype == torch.float64


def test_the_newest_two_are_kept(tmp_path):
    for round in (9, 10, 11, 100):
        checkpoint.save(tmp_path, state(round))
    assert names(tmp_path) == ["round-00000011.safetensors", "round-00000100.safetensors"]
    assert checkpoint.load_latest(tmp_path, SIZE)[0].round == 100


def test_no_checkpoint_is_no_state(tmp_path):
    assert checkpoint.load_latest(tmp_path / "nowhere", SIZE) == (None, [])


def damage(path, how):
    content = path.read_bytes()
    damaged = {
        "cut": content[: len(content) // 2],
        "empty": b"",
        "noise": b"\xff" * len(content),
        "no round": safetensors.torch.save({"params": torch.zeros(SIZE)}),
        "no params": safetensors.torch.save({"x": torch.zeros(SIZE)}, {"round": "5"}),
        "bad round": safetensors.torch.save({"params": torch.zeros(SIZE)}, {"round": "five"}),
        "other model": safetensors.torch.save({"params": torch.zeros(SIZE + 1)}, {"round": "5"}),
        "other memory": safetensors.torch.save(
            {"params": torch.zeros(SIZE), "memory.velocity": torch.zeros(2)}, {"round": "5"}
        ),
        "other type": safetensors.torch.save(
            {"params": torch.zeros(SIZE, dtype=torch.float64)}, {"round": "5"}
        ),
    }
    path.write_bytes(damaged[how])


DAMAGES = [
    "cut",
    "empty",
    "noise",
    "no round",
    "no params",
    "bad round",
    "other model",
    "other memory",
    "other type",
]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(tmp_path, how):
    for round in (4, 5):
        checkpoint.save(tmp_path, state(round))
    damage(newest(tmp_path), how)
    read, remarks = checkpoint.load_latest(tmp_path, SIZE)
    assert read.round == 4
    assert len(remarks) == 1
    assert "checkpoint round-00000005.safetensors" in remarks[0]


def test_two_damaged_checkpoints_are_two_remarks(tmp_path):
    for round in (4, 5):
        checkpoint.save(tmp_path, state(round))
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    read, remarks = checkpoint.load_latest(tmp_path, SIZE)
    assert read is None
    assert len(remarks) == 2


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def crash(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("fedveil.runs.disk.os.fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_half_written_checkpoint_is_not_looked_at(tmp_path):
    checkpoint.save(tmp_path, state(4))
    (tmp_path / ".round-00000005.safetensors.tmp").write_bytes(b"half")
    read, remarks = checkpoint.load_latest(tmp_path, SIZE)
    assert (read.round, remarks) == (4, [])


def test_writing_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file"]
