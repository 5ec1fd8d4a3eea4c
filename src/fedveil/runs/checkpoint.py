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
_FILES = "round-*.safetensors"


def save(folder: Path, state: ServerState, head: Head) -> None:
    """Write a checkpoint of the state and the ledger's head, and delete all but the newest two.

    The folder is made if it is missing. The file is round-NNNNNNNN.safetensors.
    """
    tensors = {"params": state.params.clone(), "moving": state.adaptive_state.clone()}
    tensors |= {f"memory.{name}": value.clone() for name, value in state.memory.items()}
    about = {"round": json.dumps(state.round), "ledger": json.dumps(head.to_dict())}
    content = safetensors.torch.save(tensors, about | {"digest": _digest(tensors, about)})
    folder.mkdir(exist_ok=True)
    write_atomic(folder / f"round-{state.round:08d}.safetensors", content)
    for old in sorted(folder.glob(_FILES))[:-KEEP]:
        old.unlink()


@dataclass(frozen=True)
class Checkpoint:
    """The server's state after a round, and the head of the ledger at that time."""

    state: ServerState
    head: Head


def load_latest(folder: Path, like: ServerState) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest usable checkpoint or None, and a remark on each newer one that is not.

    A usable checkpoint can be read, is undamaged, and has the shapes of `like`, the run's first
    state. Never raises for a damaged file.
    """
    remarks: list[str] = []
    for path in sorted(folder.glob(_FILES), reverse=True):
        try:
            return _load(path, like), remarks
        except BadInput as e:
            remarks.append(str(e))
    return None, remarks


def recorded_head(folder: Path) -> Head | None:
    """Return the ledger's head from the newest checkpoint that can be read, None if there is none.

    The checkpoint's digest is not checked.
    """
    for path in sorted(folder.glob(_FILES), reverse=True):
        try:
            with safetensors.safe_open(path, framework="pt") as f:
                head = json.loads(f.metadata()["ledger"])
            return Head(str(head["head"]), int(head["length"]))
        except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError):
            continue
    return None


def _digest(tensors: dict[str, torch.Tensor], about: dict[str, str]) -> str:
    """Return the SHA-256, in hexadecimal, of a checkpoint's metadata and named tensors.

    `about` are the metadata without the digest itself.
    """
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"|{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


def _load(path: Path, like: ServerState) -> Checkpoint:
    """Read a checkpoint. Raises BadInput if it is damaged or its shapes are not those of `like`."""
    try:
        with safetensors.safe_open(path, framework="pt") as f:
            about = {name: f.metadata()[name] for name in ("round", "ledger")}
            round, head = int(json.loads(about["round"])), json.loads(about["ledger"])
            head = Head(str(head["head"]), int(head["length"]))
            tensors = {name: f.get_tensor(name) for name in list(f.keys())}
            if f.metadata()["digest"] != _digest(tensors, about):
                raise ValueError("it was changed after it was written")
        params, moving = tensors.pop("params"), tensors.pop("moving")
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as e:
        raise BadInput(f"checkpoint {path.name} cannot be read: {e}") from e
    memory = {name.removeprefix("memory."): value for name, value in tensors.items()}
    pairs = [(params, like.params), (moving, like.adaptive_state)]
    pairs += [(value, like.params.double()) for value in memory.values()]
    if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        raise BadInput(f"checkpoint {path.name} belongs to another model or plan")
    return Checkpoint(ServerState(round, params, memory, moving), head)
