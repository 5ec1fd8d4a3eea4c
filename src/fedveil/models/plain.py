"""Which modules and losses cannot remember, because all their code is torch's or ours.

A plain module is a tree whose layers are exactly classes of `torch.nn` or of the shipped models,
and whose attributes are numbers, words, tensors and functions of torch. Its code writes nothing
that outlives a pass, so it is run as it is. Every other module is run as a captured graph
(`models.capture`).
"""

import sys
import types
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fedveil.base.errors import BadInput

_HOMES = ("torch.nn.modules.", "fedveil.models.")
"""Where the classes of plain layers are."""

_STATEFUL = (nn.modules.batchnorm._NormBase, nn.modules.lazy.LazyModuleMixin)
"""Classes of torch whose passes may write: running statistics, parameters without a shape."""

_RENORMED = (nn.Embedding, nn.EmbeddingBag)
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
_GLOBAL_HOOKS = tuple(name for name in vars(hooks) if name.startswith("_global_"))
_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_TENSORS = (torch.Tensor, nn.Parameter)
_ACTIVATIONS = (
    *(torch.relu, torch.tanh, torch.sigmoid, torch.selu, torch.celu, torch.softmax),
    *(nn.functional.relu, nn.functional.gelu, nn.functional.silu, nn.functional.elu),
    *(nn.functional.selu, nn.functional.celu, nn.functional.leaky_relu, nn.functional.mish),
    *(nn.functional.softplus, nn.functional.hardswish, nn.functional.relu6),
)
"""Functions that layers may hold. Others of torch's may read memory that is not initialised."""

_KEPT = ("_flat_weights", "_flat_weight_refs")
"""torch's recurrent layers keep references to their own weights in these."""


def is_plain(module: nn.Module) -> bool:
    """Whether a module runs no code but torch's and ours, and keeps nothing between passes.

    | edge | answer |
    |---|---|
    | a subclass of a layer of torch | no |
    | a hook, on a layer or on all modules | no |
    | a parametrisation | no: it changes the layer's class |
    | an attribute that hides a method, such as `forward` | no |
    | a function that is not torch's, as an activation | no |
    | a tensor of another class than torch's | no |
    | running statistics, `max_norm` | no: passes write to them |
    """
    if any(getattr(hooks, name) for name in _GLOBAL_HOOKS):
        return False
    return all(map(_is_plain_layer, module.modules()))


def is_plain_function(part: object) -> bool:
    """Whether a loss or metric is a function or metric of torch or ours, or a plain module.

    >>> is_plain_function(nn.functional.mse_loss), is_plain_function(lambda outputs, y: y)
    (True, False)
    """
    if isinstance(part, nn.Module):
        return is_plain(part) and not list(part.parameters())
    if type(part).__module__ == "fedveil.models.metrics" and _is_known(type(part)):
        return all(map(_is_value, vars(part).values()))
    if type(part) is partial:
        given = (*part.args, *part.keywords.values())
        return is_plain_function(part.func) and not part.__dict__ and all(map(_is_value, given))
    return _is_known(part)


def check_process() -> None:
    """Refuse a process in which torch's own operators run somebody's code.

    A mode that is entered sees every operator of every client, whatever module is trained.
    """
    entered: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    function_modes = [mode for mode in entered if not _is_ours(mode)]
    modes = [*function_modes, *_get_current_dispatch_mode_stack()]
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise BadInput(
            "hooks on saved tensors are entered and would see every client's numbers: leave them "
            "before you train"
        )
    if modes:
        raise BadInput(
            f"the mode {type(modes[0]).__name__} is entered and would see every client's numbers: "
            "leave it before you train"
        )


def _is_ours(mode: object) -> bool:
    """A mode of this package, or torch's default device."""
    ours = type(mode).__module__.startswith("fedveil.") and _is_known(type(mode))
    return type(mode) is DeviceContext or ours


def _is_plain_layer(layer: nn.Module) -> bool:
    kind = type(layer)
    if isinstance(layer, _STATEFUL) and not _without_statistics(layer):
        return False
    if not (kind.__module__.startswith(_HOMES) and _is_known(kind)):
        return False
    if isinstance(layer, _RENORMED) and layer.max_norm is not None:
        return False
    if not str(getattr(kind.forward, "__module__", None)).startswith(("torch.", "fedveil.")):
        return False  # somebody has replaced the method of the class
    held = dict(vars(layer))
    tables = [held.get(name) for name in ("_modules", "_parameters", "_buffers", *_HOOKS)]
    if any(type(table) not in (dict, OrderedDict, set, type(None), bool) for table in tables):
        return False  # a table of somebody's class runs its code
    if any(held.pop(name, None) for name in _HOOKS):
        return False
    held.pop("_modules")
    tensors = [*held.pop("_parameters").values(), *held.pop("_buffers").values()]
    if not all(tensor is None or _is_plain_tensor(tensor) for tensor in tensors):
        return False
    for name in _KEPT if isinstance(layer, nn.RNNBase) else ():
        held.pop(name, None)
    hides = any(callable(getattr(kind, name, None)) for name in held)
    return not hides and all(map(_is_value, held.values()))


def _is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is torch's own, without attributes such as a `__deepcopy__` of its own."""
    return type(tensor) in _TENSORS and not vars(tensor) and not tensor._backward_hooks


def _without_statistics(layer: nn.Module) -> bool:
    return getattr(layer, "running_mean", layer) is None


def _is_value(value: Any) -> bool:
    """Something that a pass of plain code leaves as it is."""
    if type(value) in _VALUES:
        return True
    if type(value) in (tuple, list, set):
        return all(map(_is_value, value))
    if type(value) is dict:
        return all(map(_is_value, _flat(value)))
    if isinstance(value, type):
        return _is_known(value)
    return any(value is activation for activation in _ACTIVATIONS)


def _flat(table: dict[Any, Any]) -> Iterable[Any]:
    return (*table.keys(), *table.values())


def _is_known(part: object) -> bool:
    """Whether a function or class is found under its name in a module of torch or of ours."""
    if not isinstance(part, type | types.FunctionType | types.BuiltinFunctionType):
        return False
    home = str(getattr(part, "__module__", ""))
    if home.split(".")[0] not in ("torch", "fedveil"):
        return getattr(torch, part.__name__, None) is part and home in ("", "None", "torch._C")
    return getattr(sys.modules.get(home), part.__name__, None) is part
