"""Products that a layer computes with weights of its own, as parts that can be watched."""

from functools import reduce
from typing import Any

import torch
from torch import nn


def under_vmap() -> bool:
    """Whether the code that asks is run by a transform of `torch.func`."""
    return torch._C._are_functorch_transforms_active()


class Product(nn.Module):
    """x -> x W' + b with a weight and a bias of the layer that this one is a part of.

    It has no parameters: `names` says what the layer calls them, `rows` which of their rows are
    meant, if not all, and they are passed in. So what goes into each product, and what comes back
    to it, can be watched from outside.
    """

    def __init__(
        self, inputs: int, outputs: int, names: dict[str, str], rows: dict[str, slice] | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.names, self.rows = names, rows or {}

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return nn.functional.linear(x, weight, bias)

    def of(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The product with the parameters that `layer` has at the moment."""
        held: dict[str, Any] = {
            name: reduce(getattr, given.split("."), layer) for name, given in self.names.items()
        }
        own = {name: self.part(name, parameter) for name, parameter in held.items()}
        out: torch.Tensor = self(x, own["weight"], own.get("bias"))
        return out

    def part(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of the layer's parameter that are this product's weight or bias."""
        return parameter[self.rows[name]] if name in self.rows else parameter
