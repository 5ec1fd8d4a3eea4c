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
    tensors = {"params": state.params.clone()}
    tensors |= {f"memory.{name}": value.clone() for name, value in state.memory.items()}
    content = safetensors.torch.save(tensors, {"round": json.dumps(state.round)})
    folder.mkdir(exist_ok=True)
    write_atomic(folder / f"round-{state.round:08d}.safetensors", content)
    for old in _files(folder)[:-KEEP]:
        old.unlink()


def load_latest(folder: Path, size: int) -> tuple[ServerState | None, list[str]]:
    """The newest checkpoint that can be read, and a remark on each that cannot."""
    remarks: list[str] = []
    for path in reversed(_files(folder)):
        try:
            return _load(path, size), remarks
        except BadInput as e:
            remarks.append(str(e))
    return None, remarks


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors"))


def _load(path: Path, size: int) -> ServerState:
    try:
        with safetensors.safe_open(path, framework="pt") as f:
            round = int(json.loads(f.metadata()["round"]))
            tensors = {name: f.get_tensor(name) for name in list(f.keys())}
        params = tensors.pop("params")
    except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as e:
        raise BadInput(f"checkpoint {path.name} cannot be read: {e}") from e
    memory = {name.removeprefix("memory."): value for name, value in tensors.items()}
    if any(t.shape != (size,) for t in (params, *memory.values())) or params.dtype != torch.float32:
        raise BadInput(f"checkpoint {path.name} holds another model: {size} parameters expected")
    return ServerState(round, params, memory)
