"""Which layers have a formula for their single-example gradients, and which one.

A formula needs what the layer saw and what came back to it. A layer that anybody could have changed
(a subclass, a hook, another `forward`, a weight that is computed) has none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fedveil.models.vmap_layers import Product
from fedveil.training.gradients.convolutions import convolved
from fedveil.training.gradients.forms import Full, Gradient, Looked, Outer, cheaper, joined_uses

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def known(layer: nn.Module) -> bool:
    """Whether `gradient_of` has a formula for this layer as it is configured."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    if hooked or layer._backward_pre_hooks or "forward" in vars(layer):
        return False
    match layer:
        case Product():
            return True
        case nn.Embedding():
            plain = layer.max_norm is None and not layer.scale_grad_by_freq
            return type(layer) is nn.Embedding and plain
        case nn.Linear() | nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            own = {name for name, _ in layer.named_parameters(recurse=False)}
            return type(layer) in (nn.Linear, *_CONVOLUTIONS) and own <= {"weight", "bias"}
    return False


def names_of(name: str, layer: nn.Module) -> dict[str, str]:
    """What the module calls the parameters that the formula of a known layer is about."""
    if isinstance(layer, Product):
        name, own = name.rpartition(".")[0], layer.names
    else:
        own = {p: p for p, _ in layer.named_parameters(recurse=False)}
    return {p: f"{name}.{given}" if name else given for p, given in own.items()}


@contextmanager
def constant_inside(layers: dict[str, nn.Module]) -> Iterator[None]:
    """While a module runs, its known layers compute with parameters that have no gradient."""
    handles = []
    for layer in layers.values():
        held: dict[str, Any] = {}
        handles.append(layer.register_forward_pre_hook(partial(_detach, held)))
        handles.append(layer.register_forward_hook(partial(_restore, held)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _detach(held: dict[str, Any], layer: nn.Module, args: tuple[Any, ...]) -> Any:
    if isinstance(layer, Product):
        return args[0], *(None if given is None else given.detach() for given in args[1:])
    held.update(layer._parameters)
    for name, value in held.items():
        layer._parameters[name] = None if value is None else value.detach()
    return args


def _restore(held: dict[str, Any], layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    layer._parameters.update(held)


def gradient_of(
    layer: nn.Module, inputs: list[torch.Tensor], errors: list[torch.Tensor]
) -> Gradient:
    """The gradient of a known layer that was used once or more; `errors` are at its outputs.

    Several images that belong to one example are several uses of their layer.
    """
    match layer:
        case nn.Linear():
            return _outer(layer, inputs, errors, bias=layer.bias is not None)
        case Product():
            return _outer(layer, inputs, errors, bias="bias" in layer.names)
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            sides = layer.weight.ndim - 1
            a, e = (_images(values, sides) for values in (inputs, errors))
            return convolved(layer, a, e)
        case nn.Embedding():
            return _looked(layer, inputs, errors)
    raise AssertionError(f"no formula for {type(layer).__name__}")


def _outer(
    layer: nn.Linear | Product,
    inputs: list[torch.Tensor],
    errors: list[torch.Tensor],
    *,
    bias: bool,
) -> Outer | Full:
    """Multiplied out where that is less work than comparing all pairs of steps, or rounds less."""
    a = joined_uses([h.reshape(len(h), -1, layer.in_features) for h in inputs])
    e = joined_uses([g.reshape(len(g), -1, layer.out_features) for g in errors])
    outer = Outer(a, e, bias)
    if cheaper(a.shape[1], layer.in_features, layer.out_features) and not outer.cancels:
        return outer
    return outer.product


def _looked(
    layer: nn.Embedding, inputs: list[torch.Tensor], errors: list[torch.Tensor]
) -> Looked | Full:
    """Written out where an example's errors cancel each other."""
    count, table = len(inputs[0]), layer.weight.shape
    tokens = joined_uses([t.reshape(count, -1) for t in inputs])
    error = joined_uses([e.reshape(count, -1, table[1]) for e in errors])
    if layer.padding_idx is not None:
        error = torch.where((tokens == layer.padding_idx)[..., None], 0.0, error)
    looked = Looked(tokens, error)
    return looked.written_out(table) if looked.cancels else looked


def _images(values: list[torch.Tensor], sides: int) -> list[torch.Tensor]:
    """One tensor [B, channels, ...] for every image of an example."""
    return [
        image
        for v in values
        for image in v.reshape(len(v), -1, *v.shape[v.ndim - sides :]).unbind(1)
    ]
