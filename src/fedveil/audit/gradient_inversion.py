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
from torch import Tensor

from fedveil.base.errors import BadInput
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip, Norm
from fedveil.training.server import scheduled
from fedveil.training.work import (
    ClientDpSgd,
    ClientSgd,
    ClientWork,
    Directions,
    OneGradient,
    SiteSum,
)

Labels = npt.NDArray[np.int64]
_LEAST = 1e-30


@dataclass(frozen=True, eq=False)
class SimulatedClient:
    """A differentiable, noise-free simulation of one client in one round, from public knowledge.

    Labels are integers [B] if they are known, or probabilities [B, classes] if they are guessed
    along with the records. Local work with Adam is BadInput.

    Attributes:
        task: Model and loss.
        work: The clients' local work.
        start_params: The round's model, [P].
        clip: The round's clip.
        round_number: The number of the round.
        classes: The number of labels.
        clamp: Lower and upper ends [P] to which two-point reports clamp an update. None if they
            do not.
    """

    task: Task
    work: ClientWork
    start_params: Tensor
    clip: Clip | None
    round_number: int
    classes: int
    clamp: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.work, SiteSum):
            raise BadInput(
                "inversion reconstructs the records of one update, and a site sends a sum of "
                "sampled records: audit it with canaries"
            )
        if isinstance(self.work, ClientSgd | ClientDpSgd) and self.work.adam is not None:
            raise BadInput(
                "inversion differentiates through local steps, and Adam's are not: omit it"
            )

    def update(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the update [P] of a client with records x [B, ...] and `labels`.

        It is differentiable in both.
        """
        with torch.enable_grad():
            if isinstance(self.work, OneGradient):
                moved = _clip(-self._gradient(self.start_params, x, labels), self.clip)
            else:
                assert not isinstance(self.work, SiteSum), "a site's sum was refused"
                moved = self._local_steps(self.work, x, labels)
        if self.clamp is None:
            return moved
        low, high = self.clamp
        return torch.minimum(torch.maximum(moved, low), high)

    def _local_steps(self, work: ClientSgd | ClientDpSgd, x: Tensor, labels: Tensor) -> Tensor:
        """Return the update [P] of local SGD, or of DP-SGD without noise.

        SGD takes batches in the order of the records. In DP-SGD every record is in every step, and
        the sum of clipped gradients is divided by the nominal number of records.
        """
        per_update = None
        if isinstance(work, ClientSgd):
            per_gradient = None if self.clip is None else self.clip.per_gradient
            per_update = None if per_gradient is not None else self.clip
            size = work.batches.size or len(x)
            per_pass = -(-len(x) // size)
            steps = work.batches.steps or (work.batches.epochs or 1) * per_pass
            rates = [work.rate(k, self.round_number) for k in range(steps)]
        else:
            rates = [scheduled(work.lr, work.schedule, self.round_number)] * work.noisy.steps
        directions, moved = Directions(self.start_params, work), None
        for k, rate in enumerate(rates):
            here = self.start_params if moved is None else self.start_params + moved
            if isinstance(work, ClientSgd):
                some = slice(k % per_pass * size, (k % per_pass + 1) * size)
                gradient = _clip(self._gradient(here, x[some], labels[some]), per_gradient)
            else:
                each = [
                    _clip(self._gradient(here, x[i : i + 1], labels[i : i + 1]), self.clip)
                    for i in range(len(x))
                ]
                gradient = torch.stack(each).sum(dim=0) / (work.noisy.nominal or len(x))
            direction = directions.next_(gradient.clone(), moved)
            moved = -rate * direction if moved is None else moved - rate * direction
            moved = _clip(moved, per_update)
        assert moved is not None, "local work takes at least one step"
        return moved

    def _gradient(self, params: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient [P] of the mean loss at `params`.

        The loss of a guessed label is the mean over classes, weighted by their probabilities.
        """
        if not params.requires_grad:
            params = params.clone().requires_grad_()
        named = self.task.named(params)
        outputs = self.task.outputs(named, x)
        if labels.is_floating_point():
            every = torch.arange(self.classes)[:, None].expand(-1, len(outputs))
            each = torch.stack([self.task.each_loss(outputs, label) for label in every], dim=1)
            loss = (labels * each).sum(dim=1).mean()
        else:
            loss = self.task.each_loss(outputs, labels).mean()
        gradient = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        return torch.cat([part.reshape(-1) for part in gradient])


def _clip(row: Tensor, clip: Clip | None) -> Tensor:
    """Return a row [P] scaled down to the clip, differentiable also at zero.

    None returns it unchanged.
    """
    if clip is None:
        return row
    length = row.abs().sum() if clip.norm is Norm.L1 else (row.square().sum() + _LEAST).sqrt()
    return row * (clip.value / length.clamp_min(_LEAST)).clamp_max(1.0)


_TINY = 1e-20
_INNER = 10
_DROPS = (3 / 8, 5 / 8, 7 / 8)


class Method(StrEnum):
    """Inversion methods, which differ in the distance they minimise and the optimiser."""

    DLG = "dlg"
    IDLG = "idlg"
    COSINE = "cosine"


@dataclass(frozen=True)
class Pixels:
    """The range of pixel values in public records. An empty range is BadInput."""

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
        """Return the width of the range: highest less lowest."""
        return self.highest - self.lowest

    def to_range(self, unit: Tensor) -> Tensor:
        """Return values of [0, 1] mapped linearly to the range."""
        return self.lowest + self.peak * unit

    def to_array(self, unit: Tensor) -> npt.NDArray[np.float32]:
        """Return values cut to [0, 1] and mapped to the range, as a new array without gradients."""
        return np.asarray(self.to_range(unit.detach().clamp(0.0, 1.0)).numpy().copy())


@dataclass(frozen=True, eq=False)
class InvertedRecords:
    """Reconstructed records and labels.

    Attributes:
        x: Records [B, ...].
        labels: Labels [B].
        distance: The method's distance between the simulated and the observed update: 1 less their
            cosine, or the squared distance relative to the observed update. The attacker keeps the
            guess with the smallest one.
    """

    x: npt.NDArray[np.float32]
    labels: Labels
    distance: float


@dataclass(frozen=True)
class Inversion:
    """A search by one method from several random guesses. The closest result counts.

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

    def invert(
        self,
        client: SimulatedClient,
        seen: Tensor,
        shape: tuple[int, ...],
        pixels: Pixels,
        labels: Labels,
        seed: int,
    ) -> InvertedRecords:
        """Return the records whose simulated update is closest to the update `seen`.

        Args:
            client: The simulation of the client.
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
                guesses.append(self._search_by_cosine(client, seen, unit, pixels, labels))
            else:
                logits = torch.randn((len(labels), client.classes), generator=generator)
                known = None if self.method is Method.DLG else labels
                guesses.append(self._search_by_distance(client, seen, unit, pixels, logits, known))
        return min(guesses, key=lambda guess: guess.distance)

    def _search_by_cosine(
        self, client: SimulatedClient, seen: Tensor, unit: Tensor, pixels: Pixels, labels: Labels
    ) -> InvertedRecords:
        """Return the closest guess on a search by the cosine method from `unit`, records in [0, 1].

        Adam follows the sign of the gradient. Of all steps the one with the smallest distance
        counts.
        """
        certain = torch.from_numpy(labels)
        unit = unit.clone().requires_grad_()
        adam = torch.optim.Adam([unit], lr=self.lr)
        drops = [int(share * self.steps) for share in _DROPS]
        slower = torch.optim.lr_scheduler.MultiStepLR(adam, drops, gamma=0.1)
        best = InvertedRecords(pixels.to_array(unit), labels, float("inf"))
        for _ in range(self.steps):
            away = _angle(client.update(pixels.to_range(unit), certain), seen)
            if float(away.detach()) < best.distance:
                best = InvertedRecords(pixels.to_array(unit), labels, float(away.detach()))
            cost = away + self.smooth * variation(unit)
            (slope,) = torch.autograd.grad(cost, unit)
            unit.grad = slope.sign()
            adam.step()
            slower.step()
            with torch.no_grad():
                unit.clamp_(0.0, 1.0)
        return best

    def _search_by_distance(
        self,
        client: SimulatedClient,
        seen: Tensor,
        unit: Tensor,
        pixels: Pixels,
        logits: Tensor,
        labels: Labels | None,
    ) -> InvertedRecords:
        """Return the last guess of a search by DLG or iDLG from `unit`, records in [0, 1].

        L-BFGS minimises the squared distance relative to `seen`. None for `labels` guesses them
        too, starting from `logits` [B, classes].
        """
        unit, logits = unit.clone().requires_grad_(), logits.clone().requires_grad_()
        certain = None if labels is None else torch.from_numpy(labels)
        free = [unit] if certain is not None else [unit, logits]
        lbfgs = torch.optim.LBFGS(
            free, max_iter=_INNER, history_size=50, line_search_fn="strong_wolfe"
        )
        length = float(seen.square().sum()) + _TINY

        def distance() -> Tensor:
            """Return the relative squared distance of the current guess."""
            chances = logits.softmax(dim=1) if certain is None else certain
            made = client.update(pixels.to_range(unit), chances)
            return (made - seen).square().sum() / length

        def closure() -> Tensor:
            """Set the gradients of the guess, and return its distance."""
            loss = distance()
            for each, slope in zip(free, torch.autograd.grad(loss, free), strict=True):
                each.grad = slope
            return loss.detach()

        step: Callable[[Callable[[], Tensor]], Tensor] = lbfgs.step
        for _ in range(-(-self.steps // _INNER)):
            step(closure)
            with torch.no_grad():
                if not bool(torch.isfinite(unit).all()):
                    unit.nan_to_num_(0.5, 1.0, 0.0)
                    break
        guessed = logits.argmax(dim=1).numpy() if labels is None else labels
        left = float(distance().detach().nan_to_num(torch.inf))
        return InvertedRecords(pixels.to_array(unit), guessed, left)


def variation(unit: Tensor) -> Tensor:
    """Return the total variation of images [B, C, H, W]: a scalar, the mean over neighbours."""
    across = (unit[..., 1:] - unit[..., :-1]).abs().mean()
    return across + (unit[..., 1:, :] - unit[..., :-1, :]).abs().mean()


def _angle(made: Tensor, seen: Tensor) -> Tensor:
    """Return 1 less the cosine between two updates [P], a scalar from 0 to 2."""
    lengths = (made.square().sum() * seen.square().sum() + _TINY).sqrt()
    return 1 - (made * seen).sum() / lengths


def label_shares(task: Task, update: Tensor, classes: int) -> npt.NDArray[np.float64]:
    """Return a score for each class [classes] from an update [P], larger if records have the label.

    The gradient of the cross-entropy at a logit is the probability of the class less the share of
    records with that label. One record makes exactly one of them negative (iDLG, Zhao et al. 2020).
    The score is the update of the last layer's bias. Without a bias it is the norm of the class's
    row of weights: for one record all rows are multiples of one vector, and its label's is longest.
    A model without a row per class is BadInput.
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
) -> Labels:
    """Return the labels [records], ascending, of an update with `records` records.

    A class with n_c of n records has the score s (n_c / n - chance). The scale s follows from a
    class without records. Exact for one record.

    Args:
        shares: The scores of `label_shares`, [classes].
        chances: Mean probabilities that the round's model gives to classes on public records.
        records: The number of records.
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
