"""Checkpoints: the server's state after a round, as one safetensors file."""

import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from fedveil.errors import BadInput
from fedveil.runs.disk import write_atomic
from fedveil.training.server import ServerState

KEEP = 2


def save(folder: Path, state: ServerState) -> None:
    """Write the state atomically and drop all but the newest two."""
    tensors = {"params": state.params.clone(), "moving": state.moving.clone()}
    tensors |= {f"memory.{name}": value.clone() for name, value in state.memory.items()}
    content = safetensors.torch.save(tensors, {"round": json.dumps(state.round)})
    folder.mkdir(exist_ok=True)
    write_atomic(folder / f"round-{state.round:08d}.safetensors", content)
    for old in _files(folder)[:-KEEP]:
        old.unlink()


def load_latest(folder: Path, like: ServerState) -> tuple[ServerState | None, list[str]]:
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


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors"))


def _load(path: Path, like: ServerState) -> ServerState:
    try:
        with safetensors.safe_open(path, framework="pt") as f:
            round = int(json.loads(f.metadata()["round"]))
            tensors = {name: f.get_tensor(name) for name in list(f.keys())}
        params, moving = tensors.pop("params"), tensors.pop("moving")
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as e:
        raise BadInput(f"checkpoint {path.name} cannot be read: {e}") from e
    memory = {name.removeprefix("memory."): value for name, value in tensors.items()}
    pairs = [(params, like.params), (moving, like.moving)]
    pairs += [(value, like.params.double()) for value in memory.values()]
    if any(_form(a) != _form(b) for a, b in pairs):
        raise BadInput(f"checkpoint {path.name} belongs to another model or plan")
    return ServerState(round, params, memory, moving)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype
