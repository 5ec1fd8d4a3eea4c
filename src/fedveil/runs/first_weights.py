"""First weights from a file, and which parameters do not learn: `model.weights` and `model.freeze`.

Every claim takes what was learnt elsewhere as public (`Task.assumptions`).
"""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase

import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.models.lineage import earlier, note_training, note_weights
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting

ABOUT = "fedveil"
"""The one entry of a model file's metadata: several would be written in an order of their own."""


def read_(module: nn.Module, path: str, new: Sequence[str]) -> None:
    """Write the file's weights into the module, but for names that match `new`.

    All other names, of parameters and of buffers, must be those of the module, with its shapes. A
    tensor that has several names may have any of them in the file.
    """
    stored = _stored(path)
    places = module.state_dict()
    _check_matches("model.new", new, [*places, *stored])
    stored = {name: value for name, value in stored.items() if not _matches(name, new)}
    read = {places[name].data_ptr() for name in stored if name in places}
    for name, place in places.items():
        if name not in stored and not _matches(name, new) and place.data_ptr() not in read:
            raise BadInput(
                f"model.weights: {path} has no {name!r}, which the model has: list it in "
                "model.new to keep what was drawn"
            )
    for name, value in stored.items():
        if name not in places:
            raise BadInput(
                f"model.weights: {path} has {name!r}, which the model does not have: give the "
                "weights of this model, or list it in model.new to leave it out"
            )
        if value.shape != places[name].shape:
            raise BadInput(
                f"model.weights: {name!r} has shape {tuple(value.shape)} in {path} and "
                f"{tuple(places[name].shape)} in the model: give the weights of this model, or "
                "list it in model.new to keep what was drawn"
            )
        if value.is_floating_point() and not value.isfinite().all():
            raise BadInput(f"model.weights: {name!r} in {path} holds a number that is not finite")
    with torch.no_grad():
        for name, value in stored.items():
            places[name].copy_(value)
    note_claims(module, path, _claims(path))


def note_claims(module: nn.Module, source: str, claims: Sequence[PrivacyClaim]) -> None:
    """Record that a module has weights of a fedveil run, whose claims add to the next one."""
    claim = counting(claims)
    if claim is None:
        return
    note_training(module, source, lambda: claim)
    for number, text in enumerate(earlier(claim.assumptions)):
        note_training(module, f"{source} {number}", lambda text=text: text)  # type: ignore[misc]
    note_weights(module)


def _claims(path: str) -> tuple[PrivacyClaim, ...]:
    """The claims in a model file that a fedveil run wrote. Empty for other files."""
    with safetensors.safe_open(path, framework="pt") as file:
        about = (file.metadata() or {}).get(ABOUT)
    try:
        return tuple(map(PrivacyClaim.from_dict, json.loads(about)["claims"])) if about else ()
    except (KeyError, TypeError, ValueError):
        return ()


def freeze_(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    _check_matches("model.freeze", patterns, list(parameters))
    for name, parameter in parameters.items():
        if _matches(name, patterns):
            parameter.requires_grad_(False)


def _stored(path: str) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as e:
        raise BadInput(f"model.weights is {shown(path)}: there is no such file") from e
    except (OSError, ValueError, safetensors.SafetensorError) as e:
        reason = " ".join(str(e).split())
        raise BadInput(
            f"model.weights is {shown(path)}, which is no safetensors file: {reason}; write one "
            "with safetensors.torch.save_file(module.state_dict(), path)"
        ) from e


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_matches(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise BadInput(
                f"{key} has {shown(pattern)}, which is no name of the model: its names begin with "
                f"{', '.join(dict.fromkeys(name.split('.')[0] for name in names))}"
            )
