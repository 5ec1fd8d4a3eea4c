"""Checkpoints: the server's state after a round, as one safetensors file with its own digest."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from fedveil.base.errors import BadInput
from fedveil.privacy.ledger.hash_chain import Head
from fedveil.runs.run_directory import write_atomic
from fedveil.training.server import ServerState

KEEP = 2


def save(folder: Path, state: ServerState, head: Head) -> None:
    """Write the state and the ledger's head atomically, and delete all but the newest two."""
    tensors = {"params": state.params.clone(), "moving": state.adaptive_state.clone()}
    tensors |= {f"memory.{name}": value.clone() for name, value in state.memory.items()}
    about = {"round": json.dumps(state.round), "ledger": json.dumps(head.to_dict())}
    content = safetensors.torch.save(tensors, about | {"digest": _digest(tensors, about)})
    folder.mkdir(exist_ok=True)
    write_atomic(folder / f"round-{state.round:08d}.safetensors", content)
    for old in _files(folder)[:-KEEP]:
        old.unlink()


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round, and the head of the ledger at that time."""

    state: ServerState
    head: Head


def load_latest(folder: Path, like: ServerState) -> tuple[Checkpoint | None, list[str]]:
    """The newest usable checkpoint, and a remark on each newer one that is not.

    A usable checkpoint can be read, and has the shapes of the run's first state, `like`.
    """
    remarks: list[str] = []
    for path in reversed(_files(folder)):
        try:
            return _load(path, like), remarks
        except BadInput as e:
            remarks.append(str(e))
    return None, remarks


def recorded_head(folder: Path) -> Head | None:
    """The ledger's head in the newest checkpoint whose header can be read, or None."""
    for path in reversed(_files(folder)):
        try:
            with safetensors.safe_open(path, framework="pt") as f:
                return _head(f.metadata())
        except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError):
            continue
    return None


def _head(about: dict[str, str]) -> Head:
    head = json.loads(about["ledger"])
    return Head(str(head["head"]), int(head["length"]))


def _digest(tensors: dict[str, torch.Tensor], about: dict[str, str]) -> str:
    """SHA-256 over everything a checkpoint holds."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"|{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


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
    pairs = [(params, like.params), (moving, like.adaptive_state)]
    pairs += [(value, like.params.double()) for value in memory.values()]
    if any(_form(a) != _form(b) for a, b in pairs):
        raise BadInput(f"checkpoint {path.name} belongs to another model or plan")
    return Checkpoint(ServerState(round, params, memory, moving), head)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype
