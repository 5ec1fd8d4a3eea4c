"""Gradient inversion: search for records that would have produced an observed update.

The attacker guesses records, simulates the client's training on them (`SimulatedClient`), and
changes the guess until the simulated update matches the observed one.

- DLG minimises the squared distance and guesses labels along with records (Zhu et al. 2019).
- iDLG reads the labels off the last layer first (Zhao et al. 2020).
- The cosine method matches directions, which a clip does not change, and prefers images of little
  total variation (Geiping et al. 2020).

A simulated client takes the same steps as `training.work`, without noise.
What the attacker does not know is left out: the order of records in a pass, and which records
joined a Poisson batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.errors import BadInput
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip, Norm
from fedveil.training.cohort import Batches
from fedveil.training.server import scheduled
from fedveil.training.work import ClientDpSgd, ClientSgd, ClientWork, Directions, OneGradient

_LEAST = 1e-30


@dataclass(frozen=True, eq=False)
class SimulatedClient:
    """Simulates one client in one round, from what everybody knows.

    Labels are integers [B] where they are known, or probabilities [B, classes] where they are
    guessed along with the records.

    Attributes:
        task: Model and loss.
        work: What clients do in a round.
        start_params: The round's model, [P].
        clip: The round's clip.
        round_number: The number of the round.
        classes: The number of labels.
        clamp: Lower and upper ends [P] to which two-point reports clamp an update.
    """

    task: Task
    work: ClientWork
    start_params: torch.Tensor
    clip: Clip | None
    round_number: int
    classes: int
    clamp: tuple[torch.Tensor, torch.Tensor] | None = None

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
                    moved = _clipped(-self._gradient(self.start_params, x, labels), self.clip)
                case ClientSgd():
                    moved = self._sgd(self.work, x, labels)
                case _:
                    moved = self._dp_sgd(self.work, x, labels)
        if self.clamp is None:
            return moved
        low, high = self.clamp
        return torch.minimum(torch.maximum(moved, low), high)

    def _sgd(self, work: ClientSgd, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        per_gradient = None if self.clip is None else self.clip.per_gradient
        per_update = None if per_gradient is not None else self.clip

        def step(k: int, here: torch.Tensor) -> torch.Tensor:
            some = _batch(work.batches, len(x), k)
            return _clipped(self._gradient(here, x[some], labels[some]), per_gradient)

        steps = work.batches.steps or (work.batches.epochs or 1) * _per_pass(work.batches, len(x))
        rates = [work.rate(k, self.round_number) for k in range(steps)]
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

        rates = [scheduled(work.lr, work.schedule, self.round_number)] * work.noisy.steps
        return self._walked(work, step, rates, None)

    def _walked(
        self,
        work: ClientSgd | ClientDpSgd,
        step: Callable[[int, torch.Tensor], torch.Tensor],
        rates: list[float],
        per_update: Clip | None,
    ) -> torch.Tensor:
        directions = Directions(self.start_params, work)
        moved: torch.Tensor | None = None
        for k, rate in enumerate(rates):
            here = self.start_params if moved is None else self.start_params + moved
            direction = directions.next_(step(k, here).clone(), moved)
            moved = -rate * direction if moved is None else moved - rate * direction
            moved = _clipped(moved, per_update)
        assert moved is not None, "local work takes at least one step"
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
    length = row.abs().sum() if clip.norm is Norm.L1 else (row.square().sum() + _LEAST).sqrt()
    return row * (clip.value / length.clamp_min(_LEAST)).clamp_max(1.0)


def _per_pass(batches: Batches, records: int) -> int:
    return -(-records // (batches.size or records))


def _batch(batches: Batches, records: int, step: int) -> slice:
    """The records of a local step, in an order of the attacker that is the same in every pass."""
    size = batches.size or records
    first = (step % _per_pass(batches, records)) * size
    return slice(first, first + size)


_TINY = 1e-20
_INNER = 10
_DROPS = (3 / 8, 5 / 8, 7 / 8)


class Method(StrEnum):
    """The distance that is minimised, and by which optimiser."""

    DLG = "dlg"
    IDLG = "idlg"
    COSINE = "cosine"


@dataclass(frozen=True)
class Pixels:
    """The range of pixel values in public records."""

    lowest: float
    highest: float

    def __post_init__(self) -> None:
        if not self.lowest < self.highest:
            raise BadInput(
                f"public records have values from {self.lowest:g} to {self.highest:g}: a range "
                "is needed"
            )

    @property
    def peak(self) -> float:
        """The width of the range."""
        return self.highest - self.lowest

    def to_range(self, unit: torch.Tensor) -> torch.Tensor:
        """Scale values from [0, 1] to the range."""
        return self.lowest + self.peak * unit


@dataclass(frozen=True, eq=False)
class InvertedRecords:
    """Reconstructed records and labels.

    Attributes:
        x: Records [B, ...].
        labels: Labels [B].
        distance: Between the simulated and the observed update, as the method measures it. The
            attacker can compare guesses by it.
    """

    x: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    distance: float


@dataclass(frozen=True)
class Inversion:
    """Search by one method from several random guesses, and keep the closest result.

    Attributes:
        method: The distance and its optimiser.
        steps: Steps of the optimiser from each guess.
        restarts: The number of random guesses.
        lr: Learning rate of the cosine method.
        smooth: Weight of the total variation in the cosine method.
    """

    method: Method = Method.COSINE
    steps: int = 1000
    restarts: int = 2
    lr: float = 0.1
    smooth: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("steps", "restarts"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}: at least 1 is needed")

    def invert(
        self,
        client: SimulatedClient,
        seen: torch.Tensor,
        shape: tuple[int, ...],
        pixels: Pixels,
        labels: npt.NDArray[np.int64],
        seed: int,
    ) -> InvertedRecords:
        """Find records whose simulated update matches the update `seen`.

        Args:
            client: Simulates the client's work.
            seen: The observed update, [P].
            shape: The shape of one record.
            pixels: The range of values.
            labels: Labels [B] read off the update. DLG uses only their number.
            seed: Draws the guesses.
        """
        generator = torch.Generator().manual_seed(seed)
        guesses = []
        for _ in range(self.restarts):
            unit = torch.rand((len(labels), *shape), generator=generator)
            if self.method is Method.COSINE:
                guesses.append(self._aligned(client, seen, unit, pixels, labels))
            else:
                logits = torch.randn((len(labels), client.classes), generator=generator)
                known = None if self.method is Method.DLG else labels
                guesses.append(self._closest(client, seen, unit, pixels, logits, known))
        return min(guesses, key=lambda guess: guess.distance)

    def _aligned(
        self,
        client: SimulatedClient,
        seen: torch.Tensor,
        unit: torch.Tensor,
        pixels: Pixels,
        labels: npt.NDArray[np.int64],
    ) -> InvertedRecords:
        """The cosine method: Adam on the sign of the gradient, within the range of pixels."""
        certain = torch.from_numpy(labels)
        unit = unit.clone().requires_grad_()
        adam = torch.optim.Adam([unit], lr=self.lr)
        drops = [int(share * self.steps) for share in _DROPS]
        slower = torch.optim.lr_scheduler.MultiStepLR(adam, drops, gamma=0.1)
        best = InvertedRecords(_pixels(unit, pixels), labels, float("inf"))
        for _ in range(self.steps):
            away = _angle(client.update(pixels.to_range(unit), certain), seen)
            if float(away.detach()) < best.distance:
                best = InvertedRecords(_pixels(unit, pixels), labels, float(away.detach()))
            cost = away + self.smooth * variation(unit)
            (slope,) = torch.autograd.grad(cost, unit)
            unit.grad = slope.sign()
            adam.step()
            slower.step()
            with torch.no_grad():
                unit.clamp_(0.0, 1.0)
        return best

    def _closest(
        self,
        client: SimulatedClient,
        seen: torch.Tensor,
        unit: torch.Tensor,
        pixels: Pixels,
        logits: torch.Tensor,
        labels: npt.NDArray[np.int64] | None,
    ) -> InvertedRecords:
        """DLG and iDLG: L-BFGS on the squared distance, relative to the observed update."""
        unit, logits = unit.clone().requires_grad_(), logits.clone().requires_grad_()
        certain = None if labels is None else torch.from_numpy(labels)
        free = [unit] if certain is not None else [unit, logits]
        lbfgs = torch.optim.LBFGS(
            free, max_iter=_INNER, history_size=50, line_search_fn="strong_wolfe"
        )
        length = float(seen.square().sum()) + _TINY

        def distance() -> torch.Tensor:
            chances = logits.softmax(dim=1) if certain is None else certain
            made = client.update(pixels.to_range(unit), chances)
            return (made - seen).square().sum() / length

        def closure() -> torch.Tensor:
            loss = distance()
            for each, slope in zip(free, torch.autograd.grad(loss, free), strict=True):
                each.grad = slope
            return loss.detach()

        step: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lbfgs.step
        for _ in range(-(-self.steps // _INNER)):
            step(closure)
            with torch.no_grad():
                if not bool(torch.isfinite(unit).all()):
                    unit.nan_to_num_(0.5, 1.0, 0.0)
                    break
        guessed = logits.argmax(dim=1).numpy() if labels is None else labels
        return InvertedRecords(
            _pixels(unit, pixels), guessed, float(distance().detach().nan_to_num(torch.inf))
        )


def variation(unit: torch.Tensor) -> torch.Tensor:
    """The mean total variation of images [B, C, H, W]: how much neighbouring pixels differ."""
    across = (unit[..., 1:] - unit[..., :-1]).abs().mean()
    return across + (unit[..., 1:, :] - unit[..., :-1, :]).abs().mean()


def _angle(made: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """1 less the cosine between two updates."""
    lengths = (made.square().sum() * seen.square().sum() + _TINY).sqrt()
    return 1 - (made * seen).sum() / lengths


def _pixels(unit: torch.Tensor, pixels: Pixels) -> npt.NDArray[np.float32]:
    return np.asarray(pixels.to_range(unit.detach().clamp(0.0, 1.0)).numpy().copy())


def label_shares(task: Task, update: torch.Tensor, classes: int) -> npt.NDArray[np.float64]:
    """A score for each class from an update [P], larger if records have the label.

    The gradient of the cross-entropy at a logit is the probability of the class less the share of
    records with that label. One record makes exactly one of them negative (iDLG, Zhao et al. 2020).
    The score is the update of the last layer's bias. Without a bias it is the norm of the class's
    row of weights: for one record all rows are multiples of one vector, and its label's is longest.
    """
    named = task.named(update.detach().double())
    last = [value for value in named.values() if value.shape[:1] == (classes,)]
    if not last:
        raise BadInput(
            f"no parameter of the model has one row for each of {classes} labels: labels cannot be "
            "told from an update; use --method dlg, which guesses them"
        )
    scores = last[-1] if last[-1].ndim == 1 else last[-1].reshape(classes, -1).norm(dim=1)
    return np.asarray(scores.numpy(), dtype=np.float64)


def labels_of(
    shares: npt.NDArray[np.float64], chances: npt.NDArray[np.float64], records: int
) -> npt.NDArray[np.int64]:
    """The labels of `records` records, ascending, from the scores of `label_shares`.

    A class with n_c of n records has the score s (n_c / n - chance), where `chances` are the mean
    probabilities that the round's model gives to classes on public records. The scale s follows
    from a class without records. Exact for one record.
    """
    if records == 1:
        return np.array([int(np.argmax(shares))])
    scale = float(np.max(-shares / chances))
    left = shares / scale + chances if scale > 0 else shares.copy()
    labels = []
    for _ in range(records):
        labels.append(int(np.argmax(left)))
        left[labels[-1]] -= 1 / records
    return np.sort(np.array(labels, dtype=np.int64))
