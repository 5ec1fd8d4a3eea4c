"""Gradients of K clients on their way: the one thing that the execution modes do differently."""

from enum import StrEnum
from typing import Protocol

import numpy as np
import torch

from fedveil.base.inputs import taken
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.models.trial import with_labels
from fedveil.privacy.clip import Clip
from fedveil.privacy.rows import Norm
from fedveil.training.batches import Batch
from fedveil.training.cohort import CohortData, tensors
from fedveil.training.gradients.looped import Looped
from fedveil.training.gradients.vectorised import Vectorised

_FEW = 2


class Mode(StrEnum):
    """How a cohort is computed: all clients in one call, or one after the other."""

    VECTORISED = "vectorised"
    LOOPED = "looped"


class Walk(Protocol):
    """K clients leaving the round's model, each with its own records.

    `moved` [K, width] says how far each one has come, None that all are still at the start. Rows
    are parameters, or coordinates in the span of the clients' gradients: linear in either case,
    so that steps, momentum and scaling are the same arithmetic; `spanned` tells which. Modes agree
    up to rounding.
    """

    width: int
    spanned: bool

    def mean(self, moved: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """The gradient of each client's mean loss, [K, width]; zeros for an idle client."""
        ...

    def descend_(self, moved: torch.Tensor | None, batch: Batch, rate: float) -> torch.Tensor:
        """moved - rate x mean gradient, in place where there is a `moved`."""
        ...

    def clipped_sum(self, moved: torch.Tensor | None, batch: Batch, clip: Clip) -> torch.Tensor:
        """The sum of each client's single-example gradients, every one clipped by itself, [K, P].

        Guarantee: adding or removing one record moves a row by at most the clip; a record whose
        gradient is not finite counts as zero. Not for walks in the span.
        """
        ...

    def norms(self, moved: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The lengths of rows as parameters, float64 [K]; not finite where a row is not."""
        ...

    def rows(self, moved: torch.Tensor) -> torch.Tensor:
        """The rows as parameters, [K, P]; may be `moved` itself."""
        ...

    def add_weighted_(
        self, total: torch.Tensor, moved: torch.Tensor, weights: torch.Tensor
    ) -> None:
        """total += weights @ rows, in float64 throughout."""
        ...


class Gradients(Protocol):
    """Starts the walks of one execution mode.

    `forks`: the model's own code has to run, so that each client is computed in a fork.
    """

    @property
    def forks(self) -> bool: ...

    def walk(self, start: torch.Tensor, cohort: CohortData, *, spanned: bool) -> Walk:
        """A walk from `start`, [P] or, vectorised, [K, P].

        `spanned`: only L2 norms and sums of gradients are asked for.
        """
        ...


def gradients_of(
    task: Task,
    mode: Mode,
    data: FederatedData,
    *,
    whole: bool = False,
    mixes: bool = False,
    private: bool = False,
) -> Gradients:
    """The gradients of `task` over `data` in the given mode.

    `whole`: of full batches only; `mixes`: the records of a batch see each other; `private`: they
    are clipped one by one, and how that is done is found out here, not in the first round.
    """
    if mode is Mode.VECTORISED:
        return Vectorised(task, data, whole=whole)
    x, y = data.examples(_FEW)
    few = np.arange(_FEW) % len(y)
    labels = with_labels(torch.from_numpy(y[few]))
    return Looped(task, tensors(taken(x, few)), labels, mixes=mixes, private=private)
