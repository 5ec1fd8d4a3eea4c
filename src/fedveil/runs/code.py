"""A module from a function in a file that a recipe names, `model.path = "net.py:make"`.

Whoever calls this runs the file: `ModelSection.check_allowed` has to be asked before.
"""

import inspect
import sys
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.models.task import first_line

_NAME = "model_path"
"""What the file is called as a module, wherever it is: classes are known by their module's name,
and one that is called like a package would be taken for it."""


def made(path: str, options: Mapping[str, Any], shape: object, classes: int) -> nn.Module:
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
