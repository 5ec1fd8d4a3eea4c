"""Gradient inversion: records that would have made an update, found by making them.

A guess is trained on as the client would have trained (`audit.simulated_client`), and moved until what
comes out is what was seen. DLG matches by the squared distance and guesses labels along with the
records (Zhu et al. 2019); iDLG reads the labels off the last layer first (Zhao et al. 2020); the
cosine method matches directions, which a clip does not change, and prefers images of little total
variation (Geiping et al. 2020).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from fedveil.audit.simulated_client import SimulatedClient
from fedveil.errors import BadInput
from fedveil.models.task import Task

_TINY = 1e-20
_INNER = 10
_DROPS = (3 / 8, 5 / 8, 7 / 8)


class Method(StrEnum):
    """Which distance is made small, by which optimiser."""

    DLG = "dlg"
    IDLG = "idlg"
    COSINE = "cosine"


@dataclass(frozen=True)
class Pixels:
    """The range of the records' values, as public records have it."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise BadInput(
                f"public records have values from {self.low:g} to {self.high:g}: a range is needed"
            )

    @property
    def peak(self) -> float:
        """How far apart two values can be."""
        return self.high - self.low

    def of(self, unit: torch.Tensor) -> torch.Tensor:
        """Values in the range from values in [0, 1]."""
        return self.low + self.peak * unit


@dataclass(frozen=True, eq=False)
class InvertedRecords:
    """Reconstructed records [B, ...] and labels [B], and how far what they make is from the seen.

    `distance` is that of the method: what the attacker itself can compare guesses by.
    """

    x: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    distance: float


@dataclass(frozen=True)
class Inversion:
    """`steps` of the optimiser from each of `restarts` random guesses; the closest one is kept.

    `lr` and `smooth`, the weight of the total variation, are those of the cosine method.
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
        rehearsal: SimulatedClient,
        seen: torch.Tensor,
        shape: tuple[int, ...],
        pixels: Pixels,
        labels: npt.NDArray[np.int64],
        seed: int,
    ) -> InvertedRecords:
        """Records of `shape` that make the update `seen` [P].

        `labels` [B] are those that were read off it; DLG takes their number, and guesses them.
        """
        generator = torch.Generator().manual_seed(seed)
        guesses = []
        for _ in range(self.restarts):
            unit = torch.rand((len(labels), *shape), generator=generator)
            if self.method is Method.COSINE:
                guesses.append(self._aligned(rehearsal, seen, unit, pixels, labels))
            else:
                logits = torch.randn((len(labels), rehearsal.classes), generator=generator)
                known = None if self.method is Method.DLG else labels
                guesses.append(self._closest(rehearsal, seen, unit, pixels, logits, known))
        return min(guesses, key=lambda found: found.distance)

    def _aligned(
        self,
        rehearsal: SimulatedClient,
        seen: torch.Tensor,
        unit: torch.Tensor,
        pixels: Pixels,
        labels: npt.NDArray[np.int64],
    ) -> InvertedRecords:
        """By Adam on the sign of the gradient, within the range of pixels throughout."""
        certain = torch.from_numpy(labels)
        unit = unit.clone().requires_grad_()
        adam = torch.optim.Adam([unit], lr=self.lr)
        drops = [int(share * self.steps) for share in _DROPS]
        slower = torch.optim.lr_scheduler.MultiStepLR(adam, drops, gamma=0.1)
        best = InvertedRecords(_pixels(unit, pixels), labels, float("inf"))
        for _ in range(self.steps):
            away = _angle(rehearsal.update(pixels.of(unit), certain), seen)
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
        rehearsal: SimulatedClient,
        seen: torch.Tensor,
        unit: torch.Tensor,
        pixels: Pixels,
        logits: torch.Tensor,
        labels: npt.NDArray[np.int64] | None,
    ) -> InvertedRecords:
        """By L-BFGS on the squared distance over the squared length of what was seen."""
        unit, logits = unit.clone().requires_grad_(), logits.clone().requires_grad_()
        certain = None if labels is None else torch.from_numpy(labels)
        free = [unit] if certain is not None else [unit, logits]
        lbfgs = torch.optim.LBFGS(
            free, max_iter=_INNER, history_size=50, line_search_fn="strong_wolfe"
        )
        length = float(seen.square().sum()) + _TINY

        def distance() -> torch.Tensor:
            chances = logits.softmax(dim=1) if certain is None else certain
            made = rehearsal.update(pixels.of(unit), chances)
            return (made - seen).square().sum() / length

        def closure() -> torch.Tensor:
            found = distance()
            for each, slope in zip(free, torch.autograd.grad(found, free), strict=True):
                each.grad = slope
            return found.detach()

        step: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lbfgs.step
        for _ in range(-(-self.steps // _INNER)):
            step(closure)
            with torch.no_grad():
                if not bool(torch.isfinite(unit).all()):
                    unit.nan_to_num_(0.5, 1.0, 0.0)
                    break
        told = logits.argmax(dim=1).numpy() if labels is None else labels
        return InvertedRecords(
            _pixels(unit, pixels), told, float(distance().detach().nan_to_num(torch.inf))
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
    found: npt.NDArray[np.float32] = pixels.of(unit.detach().clamp(0.0, 1.0)).numpy().copy()
    return found


def label_shares(task: Task, update: torch.Tensor, classes: int) -> npt.NDArray[np.float64]:
    """How much each class is asked for by an update [P]: larger where records have the label.

    The last layer's bias says it by its sign. Without one, rows of the weights are multiples of
    one vector if there is one record, and the label's is the longest.
    """
    named = task.named(update.detach().double())
    last = [value for value in named.values() if value.shape[:1] == (classes,)]
    if not last:
        raise BadInput(
            f"no parameter of the model has one row for each of {classes} labels: labels cannot be "
            "told from an update; use --method dlg, which guesses them"
        )
    found = last[-1] if last[-1].ndim == 1 else last[-1].reshape(classes, -1).norm(dim=1)
    return np.asarray(found.numpy(), dtype=np.float64)


def labels_of(
    shares: npt.NDArray[np.float64], chances: npt.NDArray[np.float64], records: int
) -> npt.NDArray[np.int64]:
    """The labels of `records` records, ascending, from what an update asks for.

    `chances` are the probabilities that the round's model gives classes on public records. A class
    that has n_c of n records is asked for by s (n_c / n - chance). What it is scaled by, s, is told
    by a class that has none. Exact for one record.
    """
    if records == 1:
        return np.array([int(np.argmax(shares))])
    scale = float(np.max(-shares / chances))
    left = shares / scale + chances if scale > 0 else shares.copy()
    found = []
    for _ in range(records):
        found.append(int(np.argmax(left)))
        left[found[-1]] -= 1 / records
    return np.sort(np.array(found, dtype=np.int64))
