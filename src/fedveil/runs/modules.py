"""The module that a run trains: the user's own, or made by code that a recipe names."""

import copy
import hashlib
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
from fedveil.base.errors import BadInput, one_line
from fedveil.base.identity import digest_of
from fedveil.base.inputs import Target
from fedveil.models.lineage import earlier_claims, note_copy, note_training, note_weights
from fedveil.models.metrics import default_loss, metric_of
from fedveil.models.task import Task, first_line
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting

Model = nn.Module | Task
"""A module, which then gets the usual loss for its targets, or a task with one of its own."""


def own_task(model: Model, target: Target, class_weights: Sequence[float] | None = None) -> Task:
    """Return a task on a copy of `model`: the caller's module keeps the weights it has.

    A module without a loss learns labels by cross-entropy, several at once by binary cross-entropy,
    and numbers by squared error. `class_weights` weigh the cross-entropy, and are refused for a
    `Task`, which has a loss of its own.
    """
    if class_weights is not None and isinstance(model, Task):
        raise BadInput(
            "model.class_weights has no effect on a Task, which has its own loss: omit "
            "model.class_weights, or give the module without the Task"
        )
    if not isinstance(model, nn.Module | Task):
        raise BadInput(f"model is {shown(model)}: give an instance of nn.Module, or a Task")
    module = model.module if isinstance(model, Task) else model
    try:
        copied = copy.deepcopy(module)
    except (RuntimeError, TypeError, AttributeError) as e:
        raise BadInput(f"the module cannot be copied, and runs train a copy: {one_line(e)}") from e
    note_copy(copied, module)
    if isinstance(model, Task):
        return Task(copied, model.loss, model.measures)
    return Task(copied, *default_loss(target, class_weights))


def set_metrics(task: Task, names: Sequence[str], model: Model | None) -> None:
    """Set the task's metrics to those called `names`, after those of `model` if it is a `Task`.

    Raises BadInput for an unknown name, and if two different metrics share a name.
    """
    metrics = dict(model.measures) if isinstance(model, Task) else {}
    for name in names:
        metric = metric_of(name)
        if metrics.setdefault(name, metric) != metric:
            raise BadInput(
                f"evaluate.metrics has {name!r}, and the Task has another metric of that name: "
                f"rename the Task's, or omit {name!r} from evaluate.metrics"
            )
    task.measuring(metrics)


def module_digest(task: Task) -> str:
    """Return a hexadecimal digest of a task's layers and their code, loss, metrics and weights."""
    parts = (task.module, task.loss, task.measures, task.parameters, task.frozen)
    return digest_of(*parts)


_NAME = "model_path"
"""What the file is called as a module, wherever it is: classes are known by their module's name,
and one that is called like a package would be taken for it."""


def check_file(key: str, path: str, sha256: str | None) -> None:
    """Raise BadInput unless the file has this SHA-256, in hexadecimal. None is not compared.

    `key` is the recipe's key that names the file. A file that cannot be read is left to whoever
    uses it.
    """
    try:
        with Path(path).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except (OSError, ValueError):
        return
    if sha256 not in (None, found):
        raise BadInput(
            f"{key}: {shown(path)} is not the file that was deployed: its SHA-256 is {found}, and "
            f"model.sha256 has {sha256}; restore it"
        )


def made_by_code(path: str, options: Mapping[str, Any], shape: object, classes: int) -> Model:
    """Run a Python file and return what a function in it makes: a module, or a task with one.

    The caller seeds torch. Raises BadInput if the file or the function fails, or returns another
    thing.

    Args:
        path: File and function, as "net.py:make".
        options: Keyword arguments of the function.
        shape: The shape of a record, passed if the function has a parameter `shape`.
        classes: The number of labels, passed if it has a parameter `classes`.
    """
    file, _, name = path.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise BadInput(f"model.path is {shown(path)}: write it as 'net.py:make', file and function")
    function = getattr(_run_file(file), name, None)
    if not callable(function):
        raise BadInput(f"model.path is {shown(path)}: {file} has no function {name!r}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as e:
        raise BadInput(f"model.path is {shown(path)}: its parameters are unknown: {e}") from e
    known = {"shape": shape, "classes": classes}
    arguments = {key: value for key, value in known.items() if key in signature.parameters}
    arguments |= options
    try:
        signature.bind(**arguments)
    except TypeError as e:
        raise BadInput(f"model.options does not fit {name}{signature}: {e}") from e
    try:
        module = function(**arguments)
    except (Exception, SystemExit) as e:
        raise BadInput(f"model.path: {_error_text(e, file)}") from e
    if not isinstance(module, nn.Module | Task):
        raise BadInput(
            f"model.path: {name} in {file} returned a {type(module).__name__}: return an instance "
            "of torch.nn.Module, or a Task"
        )
    return module


def _run_file(file: str) -> types.ModuleType:
    """Run a Python file as the module `model_path`, which is put into sys.modules, and return it.

    Raises BadInput if the file cannot be read or raises an exception.
    """
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
        raise BadInput(f"model.path: {_error_text(e, file)}") from e
    return module


def _error_text(error: BaseException, file: str) -> str:
    """Return one line: which line of `file` raised the error, the error's type and its message."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}, line {error.lineno}, is not Python: {error.msg}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f", line {lines[-1]}," if lines else ""
    text = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
    return f"{file}{where} raised {text}"


METADATA_KEY = "fedveil"
"""The one entry of a model file's metadata: several would be written in an order of their own."""


def read_weights_(module: nn.Module, path: str, new: Sequence[str]) -> None:
    """Copy the weights of a safetensors file into the module, except names that match `new`.

    `new` are shell patterns. Claims in the file are noted on the module, since training it further
    adds to them. Raises BadInput, with the module unchanged, unless all other names, of parameters
    and of buffers, and their shapes are those of the module and all numbers are finite. A tensor
    that has several names may have any of them in the file.
    """
    try:
        stored = load_file(path)
    except FileNotFoundError as e:
        raise BadInput(f"model.weights is {shown(path)}: there is no such file") from e
    except (OSError, ValueError, safetensors.SafetensorError) as e:
        raise BadInput(
            f"model.weights is {shown(path)}, which is no safetensors file: {one_line(e)}; write "
            "one with safetensors.torch.save_file(module.state_dict(), path)"
        ) from e
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
                "weights of this model, or list it in model.new to omit it"
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
    note_claims(module, path, _claims_in_file(path))


def note_claims(module: nn.Module, source: str, claims: Sequence[PrivacyClaim]) -> None:
    """Record on a module that its weights come from a run with these claims.

    Claims of runs that train it further then include them. Nothing is recorded without claims.
    `source` names the run.
    """
    claim = counting(claims)
    if claim is None:
        return
    note_training(module, source, lambda: claim)
    for number, text in enumerate(earlier_claims(claim.assumptions)):
        note_training(module, f"{source} {number}", lambda text=text: text)  # type: ignore[misc]
    note_weights(module)


def _claims_in_file(path: str) -> tuple[PrivacyClaim, ...]:
    """Return the claims in the model file of a fedveil run. () for other files."""
    with safetensors.safe_open(path, framework="pt") as file:
        about = (file.metadata() or {}).get(METADATA_KEY)
    try:
        return tuple(map(PrivacyClaim.from_dict, json.loads(about)["claims"])) if about else ()
    except (KeyError, TypeError, ValueError):
        return ()


def freeze_(module: nn.Module, patterns: Sequence[str]) -> None:
    """Set requires_grad to False for the parameters whose names match one of the shell patterns.

    Raises BadInput for a pattern that matches no parameter.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    _check_matches("model.freeze", patterns, list(parameters))
    for name, parameter in parameters.items():
        if _matches(name, patterns):
            parameter.requires_grad_(False)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name matches one of the shell patterns, such as 'head.*'."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_matches(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise BadInput for a pattern that matches none of `names`.

    `key` is the recipe's key that holds the patterns, for the message.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise BadInput(
                f"{key} has {shown(pattern)}, which is no name of the model: its names begin with "
                f"{', '.join(dict.fromkeys(name.split('.')[0] for name in names))}"
            )
