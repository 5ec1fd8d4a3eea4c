"""Modules that are a chain of linear layers with pointwise functions in between."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedveil.models.task import Task

_POINTWISE = (
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
)


@dataclass(frozen=True)
class Layer:
    """One linear layer and the function that follows it; where its weights lie in the vector."""

    inputs: int
    outputs: int
    weight: int
    bias: int | None
    after: Callable[[torch.Tensor], torch.Tensor] | None


def chain_of(task: Task) -> tuple[bool, tuple[Layer, ...]]:
    """Whether records are flattened first, and the linear layers; none if it is no such chain."""
    if task.module_captured:
        return False, ()
    modules = list(_in_order(task.module))
    names = {module: name for name, module in task.module.named_modules()}
    if not all(map(_plain, modules)):
        return False, ()
    flatten = bool(modules) and _flattens(modules[0])
    layers: list[Layer] = []
    after: list[list[nn.Module]] = []
    covered: set[str] = set()
    for module in modules[flatten:]:
        if type(module) is nn.Linear:
            prefix = f"{names[module]}." if names[module] else ""
            own = [f"{prefix}{name}" for name, _ in module.named_parameters()]
            if not covered.isdisjoint(own) or not task.places.keys() >= set(own):
                return False, ()  # used twice, or one layer's parameter is also another's
            covered.update(own)
            weight, bias = task.places[f"{prefix}weight"], task.places.get(f"{prefix}bias")
            layers.append(Layer(module.in_features, module.out_features, weight, bias, None))
            after.append([])
        elif type(module) in _POINTWISE and layers:
            after[-1].append(_not_in_place(module))
        else:
            return False, ()
    if covered != set(task.places):
        return False, ()
    functions = [nn.Sequential(*modules) if modules else None for modules in after]
    return flatten, tuple(replace(a, after=b) for a, b in zip(layers, functions, strict=True))


def _in_order(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested `nn.Sequential`s, one after the other."""
    if type(module) is nn.Sequential and _plain(module):
        for child in module:
            yield from _in_order(child)
    else:
        yield module


def _flattens(module: nn.Module) -> bool:
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def _plain(module: nn.Module) -> bool:
    """Whether a module does what its class says."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return not any(hooks) and "forward" not in vars(module)


def _not_in_place(module: nn.Module) -> nn.Module:
    module = copy.copy(module)
    if hasattr(module, "inplace"):
        setattr(module, "inplace", False)  # noqa: B010
    return module
