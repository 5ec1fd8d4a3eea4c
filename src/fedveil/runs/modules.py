"""The module that a run trains: the user's own, or made by code that a recipe names."""

import copy
import inspect
import json
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import digest_of
from fedveil.base.inputs import Target
from fedveil.models.lineage import earlier, note_copy, note_training, note_weights
from fedveil.models.metrics import metric_of, usual
from fedveil.models.task import Task, first_line
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting

Model = nn.Module | Task
"""A module, which then gets the usual loss for its targets, or a task with one of its own."""


def own_task(model: Model, target: Target) -> Task:
    """A task on a copy of `model`: the caller's module keeps the weights it has.

    A module without a loss learns labels by cross-entropy, several at once by binary cross-entropy,
    and numbers by squared error.
    """
    if not isinstance(model, nn.Module | Task):
        raise BadInput(f"model is {shown(model)}: give an instance of nn.Module, or a Task")
    if isinstance(model, Task):
        return Task(_copied(model.module), model.loss, model.measures)
    return Task(_copied(model), *usual(target))


def add_metrics(task: Task, names: Sequence[str] | None, model: Model | None) -> Task:
    """The task with the metrics that a recipe names, beside those of a `Task` that was given.

    If the recipe names none, the task stays as it is.
    """
    if names is None:
        return task
    metrics = dict(model.measures) if isinstance(model, Task) else {}
    for name in names:
        metric = metric_of(name)
        if metrics.setdefault(name, metric) != metric:
            raise BadInput(
                f"evaluate.metrics has {name!r}, and the Task another metric of that name: "
                "rename one of them"
            )
    return task.measuring(metrics)


def module_digest(task: Task) -> str:
    """A digest of a module: its layers, their code, loss, metrics and first weights."""
    parts = (task.module, task.loss, task.measures, task.parameters, task.frozen)
    return digest_of(*parts)


def _copied(module: nn.Module) -> nn.Module:
    try:
        copied = copy.deepcopy(module)
    except (RuntimeError, TypeError, AttributeError) as e:
        reason = " ".join(str(e).split())
        raise BadInput(f"the module cannot be copied, and a run trains a copy: {reason}") from e
    note_copy(copied, module)
    return copied


_NAME = "model_path"
"""What the file is called as a module, wherever it is: classes are known by their module's name,
and one that is called like a package would be taken for it."""


def module_from_code(
    path: str, options: Mapping[str, Any], shape: object, classes: int
) -> nn.Module:
    """What the function in `path` returns for these options.

    It also gets `shape` and `classes`, if it names such parameters. The caller seeds torch.
    """
    file, _, name = path.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise BadInput(f"model.path is {shown(path)}: write it as 'net.py:make', file and function")
    function = getattr(_executed(file), name, None)
    if not callable(function):
        raise BadInput(f"model.path is {shown(path)}: {file} has no function {name!r}")
    arguments = _arguments(path, function, options, {"shape": shape, "classes": classes})
    try:
        module = function(**arguments)
    except (Exception, SystemExit) as e:
        raise BadInput(f"model.path: {_told(e, file)}") from e
    if not isinstance(module, nn.Module):
        raise BadInput(
            f"model.path: {name} in {file} returned a {type(module).__name__}: return an instance "
            "of torch.nn.Module"
        )
    return module


def _executed(file: str) -> types.ModuleType:
    try:
        source = Path(file).read_bytes()
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise BadInput(f"model.path: {shown(file)} cannot be read: {reason}") from e
    module = types.ModuleType(_NAME)
    module.__file__ = file
    sys.modules[_NAME] = module  # where dataclasses and torch look for it
    try:
        exec(compile(source, file, "exec"), vars(module))
    except (Exception, SystemExit) as e:
        raise BadInput(f"model.path: {_told(e, file)}") from e
    return module


def _arguments(
    path: str, function: Any, options: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as e:
        raise BadInput(f"model.path is {shown(path)}: its parameters are unknown: {e}") from e
    filled = {name: value for name, value in known.items() if name in signature.parameters}
    arguments = {**filled, **options}
    try:
        signature.bind(**arguments)
    except TypeError as e:
        name = path.rpartition(":")[2]
        raise BadInput(f"model.options does not fit {name}{signature}: {e}") from e
    return arguments


def _told(error: BaseException, file: str) -> str:
    """Where it was raised in the file, and what it says, on one line."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}, line {error.lineno}, is not Python: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f", line {lines[-1]}," if lines else ""
    said = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
    return f"{file}{where} raised {said}"


METADATA_KEY = "fedveil"
"""The one entry of a model file's metadata: several would be written in an order of their own."""


def read_weights_(module: nn.Module, path: str, new: Sequence[str]) -> None:
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
        about = (file.metadata() or {}).get(METADATA_KEY)
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
