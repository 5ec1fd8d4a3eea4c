"""Checkpoints: whole or not there, the newest that can be read."""

import json

import pytest
import safetensors.torch
import torch

from fedveil.privacy.ledger.hash_chain import Head
from fedveil.runs import checkpoint
from fedveil.runs.run_directory import write_atomic
from fedveil.training.server import ServerState

SIZE = 6


def state(round, **memory):
    moving = torch.tensor([0.5 / (1 + round)], dtype=torch.float64)
    return ServerState(round, torch.full((SIZE,), float(round)), memory, moving)


HEAD = Head("0" * 64, 7)
LIKE = state(0)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def newest(folder):
    return folder / names(folder)[-1]


def test_a_state_survives(tmp_path):
    memory = torch.arange(SIZE, dtype=torch.float64) / 3
    checkpoint.save(tmp_path / "c", state(3, velocity=memory), HEAD)
    read, remarks = checkpoint.load_latest(tmp_path / "c", LIKE)
    assert (read.state.round, remarks) == (3, [])
    assert torch.equal(read.state.params, state(3).params)
    assert torch.equal(read.state.memory["velocity"], memory)
    assert read.state.memory["velocity"].dtype == torch.float64
    assert torch.equal(read.state.adaptive_state, state(3).adaptive_state)


def test_the_newest_two_are_kept(tmp_path):
    for round in (9, 10, 11, 100):
        checkpoint.save(tmp_path, state(round), HEAD)
    assert names(tmp_path) == ["round-00000011.safetensors", "round-00000100.safetensors"]
    assert checkpoint.load_latest(tmp_path, LIKE)[0].state.round == 100


def test_no_checkpoint_is_no_state(tmp_path):
    assert checkpoint.load_latest(tmp_path / "nowhere", LIKE) == (None, [])


def stored(round="5", **changes):
    """A file like that of state(5), with tensors changed or, by None, left out."""
    tensors = {"params": LIKE.params, "moving": LIKE.adaptive_state, **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    about = {"round": str(round), "ledger": json.dumps(HEAD.to_dict())}
    about["digest"] = checkpoint._digest(kept, about)
    return safetensors.torch.save(kept, None if round is None else about)


DAMAGES = {
    "cut": stored()[:-50],
    "empty": b"",
    "noise": b"\xff" * 200,
    "no round": stored(round=None),
    "bad round": stored(round="five"),
    "no params": stored(params=None),
    "no moving": stored(moving=None),
    "other model": stored(params=torch.zeros(SIZE + 1)),
    "other memory": stored(**{"memory.velocity": torch.zeros(2)}),
    "other moving": stored(moving=torch.zeros(2, dtype=torch.float64)),
    "other type": stored(params=LIKE.params.double()),
}


def test_what_is_not_damaged_is_read(tmp_path):
    checkpoint.save(tmp_path, state(5), HEAD)
    newest(tmp_path).write_bytes(stored())
    assert checkpoint.load_latest(tmp_path, LIKE)[0].state.round == 5


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(tmp_path, how):
    for round in (4, 5):
        checkpoint.save(tmp_path, state(round), HEAD)
    newest(tmp_path).write_bytes(DAMAGES[how])
    read, remarks = checkpoint.load_latest(tmp_path, LIKE)
    assert read.state.round == 4
    assert len(remarks) == 1
    assert "checkpoint round-00000005.safetensors" in remarks[0]


def test_two_damaged_checkpoints_are_two_remarks(tmp_path):
    for round in (4, 5):
        checkpoint.save(tmp_path, state(round), HEAD)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    read, remarks = checkpoint.load_latest(tmp_path, LIKE)
    assert read is None
    assert len(remarks) == 2


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def crash(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("fedveil.runs.run_directory.os.fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_half_written_checkpoint_is_not_looked_at(tmp_path):
    checkpoint.save(tmp_path, state(4), HEAD)
    (tmp_path / ".round-00000005.safetensors.tmp").write_bytes(b"half")
    read, remarks = checkpoint.load_latest(tmp_path, LIKE)
    assert (read.state.round, remarks) == (4, [])


def test_writing_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["file"]
