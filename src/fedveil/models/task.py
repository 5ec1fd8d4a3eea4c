"""`Task`: a module with its loss and metric, seen through one flat parameter vector."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.func import functional_call

from fedveil.errors import BadInput

PerExample = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(outputs [B, ...], targets [B, ...]) -> one number per example [B]."""

_MIXES_EXAMPLES = (nn.modules.batchnorm._BatchNorm,)
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [B, classes] against labels [B], per example."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Squared error of a prediction [B, 1] against targets [B], per example."""
    return (outputs.squeeze(-1) - targets) ** 2


def correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """1 where the largest logit is the label, per example; its mean is the accuracy."""
    return (outputs.argmax(-1) == targets).to(torch.float32)


@dataclass(frozen=True, eq=False)
class Task:
    """What is learnt: a module, its per-example loss, and metrics that are means over examples.

    The module's parameters become views into one contiguous vector, in the order of
    `named_parameters`; nothing is copied afterwards in either direction. Modules that mix
    examples (batch norm), draw their own randomness (dropout) or carry state other than
    parameters are refused.

    >>> task = Task(nn.Linear(10, 1), squared_error)
    >>> task.size
    11
    """

    module: nn.Module
    loss: PerExample
    metrics: dict[str, PerExample] = field(default_factory=dict)
    _flat: torch.Tensor = field(init=False, repr=False)
    _slots: tuple[tuple[str, int, int, torch.Size], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_module(self.module)
        named = list(self.module.named_parameters())
        flat = torch.cat([p.detach().reshape(-1) for _, p in named]).to(torch.float32)
        slots, start = [], 0
        for name, parameter in named:
            stop = start + parameter.numel()
            parameter.data = flat[start:stop].view(parameter.shape)
            slots.append((name, start, stop, parameter.shape))
            start = stop
        object.__setattr__(self, "_flat", flat)
        object.__setattr__(self, "_slots", tuple(slots))

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return len(self._flat)

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """The number of parameters of each tensor, in the order of the flat vector."""
        return tuple(stop - start for _, start, stop, _ in self._slots)

    @property
    def places(self) -> dict[str, int]:
        """Where each named parameter begins in the flat vector."""
        return {name: start for name, start, _, _ in self._slots}

    @property
    def parameters(self) -> torch.Tensor:
        """The module's parameters as one vector [P]: the module itself, not a copy of it."""
        return self._flat

    def named(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views into a vector [P] under the module's parameter names."""
        return {name: flat[a:b].view(shape) for name, a, b, shape in self._slots}

    def outputs(self, flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The module's outputs on x [B, ...] with the parameters `flat` [P]."""
        out: torch.Tensor = functional_call(self.module, self.named(flat), (x,))
        return out

    def losses(self, flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of each example [B]."""
        return self.loss(self.outputs(flat, x), y)

    def check_fits(self, x: torch.Tensor, y: torch.Tensor, classes: int) -> None:
        """Refuse records this module, loss or these metrics cannot take. One example is tried."""
        try:
            with torch.no_grad():
                outputs = self.outputs(self._flat, x[:2])
                if classes and outputs.shape[-1] < classes:
                    raise BadInput(
                        f"the model has {outputs.shape[-1]} outputs and the data {classes} labels: "
                        "give it one output per label"
                    )
                values = [f(outputs, y[:2]) for f in (self.loss, *self.metrics.values())]
        except BadInput:
            raise
        except (AttributeError, RuntimeError, ValueError, IndexError, TypeError) as e:
            reason = str(e).splitlines()[0]
            raise BadInput(
                f"the model does not fit records of shape {tuple(x.shape[1:])}: {reason}"
            ) from e
        for value in values:
            if value.shape != (len(x[:2]),):
                raise BadInput(
                    f"a loss or metric returned shape {tuple(value.shape)} for {len(x[:2])} "
                    "examples: return one number per example (reduction='none')"
                )


def _check_module(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        where = f"layer {name or 'model'!r} is a {kind}"
        if isinstance(layer, _MIXES_EXAMPLES):
            raise BadInput(
                f"{where}, which mixes examples and keeps statistics of clients' data outside "
                "the bound: use GroupNorm or LayerNorm"
            )
        if isinstance(layer, nn.Embedding) and layer.sparse:
            raise BadInput(f"{where} with sparse gradients, which no bound takes: set sparse=False")
        if isinstance(layer, _RANDOM) and getattr(layer, "p", 1) != 0:
            raise BadInput(
                f"{where}, whose draws are outside the keyed streams, so no round could be "
                "repeated: remove it or set p = 0"
            )
    for name, _ in module.named_buffers():
        raise BadInput(
            f"buffer {name!r} is state that no client sends: make it a parameter or a constant"
        )
    parameters = list(module.parameters())
    if not parameters:
        raise BadInput("the model has no parameters: there is nothing to learn")
    for name, parameter in module.named_parameters():
        if not parameter.dtype.is_floating_point:
            raise BadInput(f"parameter {name!r} is {parameter.dtype}: floating point is needed")
        if not parameter.requires_grad:
            raise BadInput(f"parameter {name!r} is frozen: remove it or let it learn")
