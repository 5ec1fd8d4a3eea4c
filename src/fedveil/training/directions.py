"""Where a client goes from its gradients: momentum, weight decay, a proximal term, Adam.

All of it is computed from gradients and public numbers. Where the gradients are private already, as
those of DP-SGD are, so is what becomes of them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from fedveil.base.checks import FRACTION, NOT_NEGATIVE, POSITIVE, shown
from fedveil.base.errors import BadArgument, BadInput
from fedveil.base.identity import Stated


@dataclass(frozen=True)
class Adam:
    """Adam in place of plain steps (Kingma and Ba 2015); it starts afresh in every round.

    `beta1` and `beta2` are the shares that the two moments keep from step to step, `floor` is added
    to the root of the second.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    floor: float = 1e-8

    @property
    def identity(self) -> Stated:
        return (
            ("direction", "adam"),
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("floor", self.floor),
        )

    def __post_init__(self) -> None:
        FRACTION.check("beta1", self.beta1)
        FRACTION.check("beta2", self.beta2)
        POSITIVE.check("floor", self.floor)


class Stepping(Protocol):
    """What a work says of its local steps."""

    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def proximal(self) -> float: ...
    @property
    def adam(self) -> Adam | None: ...


class Directions:
    """The directions of K clients over the local steps of one round, rows [K, width].

    direction = gradient + proximal x (model - round's model) + weight_decay x model, then momentum.
    Adam comes before weight decay, which is then decoupled (AdamW): the moments do not scale it.
    Rows may be coordinates in a span where there is neither weight decay nor Adam.
    """

    def __init__(self, start: torch.Tensor, work: Stepping) -> None:
        """`start` is the round's model, [P] or [K, P]."""
        self._start, self._work = start, work
        self._velocity: torch.Tensor | None = None
        self._moments: tuple[torch.Tensor, torch.Tensor] | None = None
        self._steps = 0

    def of_(self, gradient: torch.Tensor, moved: torch.Tensor | None) -> torch.Tensor:
        """The direction of the next step from `moved`; `gradient` is used up."""
        work = self._work
        if work.proximal and moved is not None:
            gradient.add_(moved, alpha=work.proximal)
        if work.adam is not None:
            gradient = self._adapted_(gradient, work.adam)
        if work.weight_decay:
            here = self._start if moved is None else self._start + moved
            gradient.add_(here, alpha=work.weight_decay)
        if work.momentum:
            before = 0 if self._velocity is None else work.momentum * self._velocity
            self._velocity = gradient + before
            return self._velocity.clone()
        return gradient

    def _adapted_(self, gradient: torch.Tensor, adam: Adam) -> torch.Tensor:
        """The first moment over the root of the second, both unbiased, in the gradient's place."""
        if self._moments is None:
            self._moments = torch.zeros_like(gradient), torch.zeros_like(gradient)
        first, second = self._moments
        self._steps += 1
        first.mul_(adam.beta1).add_(gradient, alpha=1 - adam.beta1)
        second.mul_(adam.beta2).addcmul_(gradient, gradient, value=1 - adam.beta2)
        torch.div(second, 1 - adam.beta2**self._steps, out=gradient)
        gradient.sqrt_().add_(adam.floor)
        return torch.div(first, gradient, out=gradient).div_(1 - adam.beta1**self._steps)


def check_directions(work: Stepping) -> None:
    """Refuse numbers of a client's steps that are none, and momentum beside Adam's own."""
    FRACTION.check("momentum", work.momentum)
    NOT_NEGATIVE.check("weight_decay", work.weight_decay)
    NOT_NEGATIVE.check("proximal", work.proximal)
    if work.adam is not None and not isinstance(work.adam, Adam):
        raise BadInput(f"adam is {shown(work.adam)}: use Adam(beta1, beta2, floor), or None")
    if work.adam is not None and work.momentum:
        raise BadArgument(
            "{momentum} has no effect on adam, which has beta1: leave it out", "momentum"
        )
