"""Checkpoints: the server's state after a round, as one safetensors file with its own digest."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from fedveil.errors import BadInput
from fedveil.privacy.ledger.hash_chain import Head
from fedveil.runs.disk import write_atomic
from fedveil.training.server import ServerState

KEEP = 2


def save(folder: Path, state: ServerState, head: Head) -> None:
    """Write the state and the ledger's head atomically and drop all but the newest two."""
    tensors = {"params": state.params.clone(), "moving": state.moving.clone()}
    tensors |= {f"memory.{name}": value.clone() for name, value in state.memory.items()}
    about = {"round": json.dumps(state.round), "ledger": json.dumps(head.to_dict())}
    content = safetensors.torch.save(tensors, about | {"digest": _digest(tensors, about)})
    folder.mkdir(exist_ok=True)
    write_atomic(folder / f"round-{state.round:08d}.safetensors", content)
    for old in _files(folder)[:-KEEP]:
        old.unlink()


@dataclass(frozen=True)
class Checkpoint:
    """The state after a round, and what the end of the ledger was then."""

    state: ServerState
    head: Head


def load_latest(folder: Path, like: ServerState) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that can be read and is `like` the run's first state in shape, and a
    remark on each that is not.
    """
    remarks: list[str] = []
    for path in reversed(_files(folder)):
        try:
            return _load(path, like), remarks
        except BadInput as e:
            remarks.append(str(e))
    return None, remarks


def recorded_head(folder: Path) -> Head | None:
    """What the newest checkpoint says of the end of the ledger, if there is one."""
    for path in reversed(_files(folder)):
        try:
            with safetensors.safe_open(path, framework="pt") as f:
                return _head(f.metadata())
        except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError):
            continue
    return None


def _head(about: dict[str, str]) -> Head:
    found = json.loads(about["ledger"])
    return Head(str(found["head"]), int(found["length"]))


def _digest(tensors: dict[str, torch.Tensor], about: dict[str, str]) -> str:
    """SHA-256 over everything a checkpoint holds."""
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"|{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.numpy().data)
    return found.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors"))


def _load(path: Path, like: ServerState) -> Checkpoint:
    try:
        with safetensors.safe_open(path, framework="pt") as f:
            round, head = int(json.loads(f.metadata()["round"])), _head(f.metadata())
            tensors = {name: f.get_tensor(name) for name in list(f.keys())}
            about = {name: f.metadata()[name] for name in ("round", "ledger")}
            if f.metadata()["digest"] != _digest(tensors, about):
                raise ValueError("it was changed after it was written")
        params, moving = tensors.pop("params"), tensors.pop("moving")
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as e:
        raise BadInput(f"checkpoint {path.name} cannot be read: {e}") from e
    memory = {name.removeprefix("memory."): value for name, value in tensors.items()}
    pairs = [(params, like.params), (moving, like.moving)]
    pairs += [(value, like.params.double()) for value in memory.values()]
    if any(_form(a) != _form(b) for a, b in pairs):
        raise BadInput(f"checkpoint {path.name} belongs to another model or plan")
    return Checkpoint(ServerState(round, params, memory, moving), head)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype
