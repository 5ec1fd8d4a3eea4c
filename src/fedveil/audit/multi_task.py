"""The active attack on properties: clients that train the joint model for the property.

They train on their own records for the task and, at the same time, for a second head that separates
records with the property from records without it (Melis et al. 2019, multi-task learning). Their
reports are clipped and randomised like all others, so they follow the protocol.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated
from fedveil.models.task import Named, Task
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.adversary import Adversary, Chance, Ids
from fedveil.training.exchange import Sent

_STEEP = 4.0


@dataclass(frozen=True, eq=False)
class MultiTask(Adversary):
    """Clients that train for the task and for a property.

    They take part in every round, drawn or not. The second head is drawn once and stays fixed, so
    that all rounds pull the model's last hidden layer in the same direction.

    Attributes:
        task: The joint model and its loss.
        ids: The clients.
        x: Their records.
        y: Targets.
        has: Which records have the property.
        weight: Weight of the second head's loss.
        steps: Local steps.
        lr: Learning rate.
        seed: Draws the second head.
    """

    task: Task
    ids: Ids
    x: torch.Tensor
    y: torch.Tensor
    has: torch.Tensor
    weight: float = 1.0
    steps: int = 10
    lr: float = 0.1
    seed: int = 0

    @property
    def identity(self) -> Stated:
        return (
            ("adversary", "multi-task"),
            ("task", self.task),
            ("ids", self.ids),
            ("x", self.x),
            ("y", self.y),
            ("has", self.has),
            ("weight", self.weight),
            ("steps", self.steps),
            ("lr", self.lr),
            ("seed", self.seed),
        )

    def cohort(self, round: int, ids: Ids) -> Ids:
        return np.union1d(ids, self.ids)

    def cheats(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        return np.isin(ids, self.ids)

    def report(self, chance: Chance) -> Sent:
        row = self.trained(chance.turn.start)
        rows = row.expand(len(chance.turn.ids), -1).clone()
        return chance.sent(chance.complying(rows))

    def trained(self, start: torch.Tensor) -> torch.Tensor:
        """The update [P] of local training for both objectives."""
        params = start.clone()
        for _ in range(self.steps):
            with torch.enable_grad():
                named = {k: v.clone().requires_grad_() for k, v in self.task.named(params).items()}
                found = torch.autograd.grad(self._cost(named), list(named.values()))
            step = torch.cat([part.reshape(-1) for part in found])
            params = params - self.lr * step
        return params - start

    def _cost(self, named: Named) -> torch.Tensor:
        """The mean loss of the task, plus that of the second head."""
        seen: list[torch.Tensor] = []
        layer = last_layer(self.task)
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            outputs = self.task.outputs(named, self.x)
        finally:
            hook.remove()
        logits = seen[0].flatten(1) @ self._head
        second = nn.functional.binary_cross_entropy_with_logits(logits, self.has.float())
        return self.task.each_loss(outputs, self.y).mean() + self.weight * second

    @cached_property
    def _head(self) -> torch.Tensor:
        width = last_layer(self.task).in_features
        drawn = torch.randn(width, generator=torch.Generator().manual_seed(self.seed))
        head: torch.Tensor = drawn / drawn.norm() * _STEEP
        return head

    def told(self, claims: tuple[PrivacyClaim, ...]) -> dict[str, Any]:
        return {"kind": "multi-task", "attackers": len(self.ids)}

    def assumption(self, plan: PrivacyPlan) -> str:
        return f"{len(self.ids)} clients train for a property in this simulation"


def last_layer(task: Task) -> nn.Linear:
    """The last layer of the model, refused if no layer with parameters comes before it."""
    layers = [layer for layer in task.layers.values() if list(layer.parameters(recurse=False))]
    if len(layers) < 2 or not isinstance(layers[-1], nn.Linear):
        raise BadInput(
            f"the model {type(task.module).__name__} has no hidden layer before a linear one: the "
            "active attack has nothing to teach it"
        )
    return layers[-1]
