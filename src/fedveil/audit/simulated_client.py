"""A client's local work, simulated by an attacker and differentiable in the records.

The same steps as `training.work` and `training.dp_sgd`, without noise. What the attacker does not
know is left out: the order of records in a pass, and which records joined a Poisson batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedveil.base.errors import BadInput
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip
from fedveil.privacy.rows import Norm
from fedveil.training.batches import Batches
from fedveil.training.directions import Directions
from fedveil.training.dp_sgd import ClientDpSgd
from fedveil.training.rates import scheduled
from fedveil.training.work import ClientSgd, ClientWork, OneGradient

_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class SimulatedClient:
    """Simulates one client in one round, from what everybody knows.

    Labels are integers [B] where they are known, or probabilities [B, classes] where they are
    guessed along with the records.

    Attributes:
        task: Model and loss.
        work: What clients do in a round.
        start: The round's model, [P].
        clip: The round's clip.
        round: The number of the round.
        classes: The number of labels.
        low: Lower ends [P] to which two-point reports clamp an update.
        high: Upper ends [P].
    """

    task: Task
    work: ClientWork
    start: torch.Tensor
    clip: Clip | None
    round: int
    classes: int
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.work, ClientSgd | ClientDpSgd) and self.work.adam is not None:
            raise BadInput(
                "inversion differentiates through local steps, and Adam's are not: leave it out"
            )

    def update(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The update [P] of a client with records x [B, ...], differentiable in both."""
        with torch.enable_grad():
            match self.work:
                case OneGradient():
                    moved = _clipped(-self._gradient(self.start, x, labels), self.clip)
                case ClientSgd():
                    moved = self._sgd(self.work, x, labels)
                case _:
                    moved = self._dp_sgd(self.work, x, labels)
        if self.low is None or self.high is None:
            return moved
        return torch.minimum(torch.maximum(moved, self.low), self.high)

    def _sgd(self, work: ClientSgd, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        per_gradient = None if self.clip is None else self.clip.per_gradient
        per_update = None if per_gradient is not None else self.clip

        def step(k: int, here: torch.Tensor) -> torch.Tensor:
            some = _batch(work.batches, len(x), k)
            return _clipped(self._gradient(here, x[some], labels[some]), per_gradient)

        steps = work.batches.steps or (work.batches.epochs or 1) * _per_pass(work.batches, len(x))
        rates = [work.rate(k, self.round) for k in range(steps)]
        return self._walked(work, step, rates, per_update)

    def _dp_sgd(self, work: ClientDpSgd, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """DP-SGD with every record in every step, weighted by how often it joins on average."""
        size = work.noisy.nominal or len(x)

        def step(k: int, here: torch.Tensor) -> torch.Tensor:
            each = [
                _clipped(self._gradient(here, x[i : i + 1], labels[i : i + 1]), self.clip)
                for i in range(len(x))
            ]
            return torch.stack(each).sum(dim=0) / size

        rates = [scheduled(work.lr, work.schedule, self.round)] * work.noisy.steps
        return self._walked(work, step, rates, None)

    def _walked(
        self,
        work: ClientSgd | ClientDpSgd,
        step: Callable[[int, torch.Tensor], torch.Tensor],
        rates: list[float],
        per_update: Clip | None,
    ) -> torch.Tensor:
        directions = Directions(self.start, work)
        moved: torch.Tensor | None = None
        for k, rate in enumerate(rates):
            here = self.start if moved is None else self.start + moved
            direction = directions.of_(step(k, here).clone(), moved)
            moved = -rate * direction if moved is None else moved - rate * direction
            moved = _clipped(moved, per_update)
        if moved is None:
            raise AssertionError("local work takes at least one step")
        return moved

    def _gradient(
        self, params: torch.Tensor, x: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the mean loss at `params`, [P], over guessed labels by probability."""
        if not params.requires_grad:
            params = params.clone().requires_grad_()
        named = self.task.named(params)
        outputs = self.task.outputs(named, x)
        found = torch.autograd.grad(
            self._loss(outputs, labels), list(named.values()), create_graph=True
        )
        return torch.cat([part.reshape(-1) for part in found])

    def _loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not labels.is_floating_point():
            return self.task.each_loss(outputs, labels).mean()
        every = torch.arange(self.classes)[:, None].expand(-1, len(outputs))
        each = torch.stack([self.task.each_loss(outputs, label) for label in every], dim=1)
        return (labels * each).sum(dim=1).mean()


def _clipped(row: torch.Tensor, clip: Clip | None) -> torch.Tensor:
    if clip is None:
        return row
    length = row.abs().sum() if clip.norm is Norm.L1 else (row.square().sum() + _TINY).sqrt()
    return row * (clip.value / length.clamp_min(_TINY)).clamp_max(1.0)


def _per_pass(batches: Batches, records: int) -> int:
    return -(-records // (batches.size or records))


def _batch(batches: Batches, records: int, step: int) -> slice:
    """The records of a local step, in an order of the attacker that is the same in every pass."""
    size = batches.size or records
    first = (step % _per_pass(batches, records)) * size
    return slice(first, first + size)
