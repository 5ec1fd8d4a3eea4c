"""`Engine`: whatever computes the sum over a cohort, and `Job`: all it needs to know for that.

To add an engine, implement the protocol and give its maker to `Training(make_engine=...)`. Cores
are used by workers, each of which computes with one thread (`one_thread` in base/forks.py), on
memory that it keeps (`keep_memory`), so that rounding does not depend on the number of threads.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Round
from fedveil.training.cohort import CohortData
from fedveil.training.participants import Group, Participants
from fedveil.training.reports import CohortSum
from fedveil.training.server import Weights
from fedveil.training.work import ClientWork, is_builtin_work


class Engine(Protocol):
    """Where clients train, clip and randomise, and their reports are accepted and summed.

    An engine calls `client_report` and `server_sum` (training/exchange.py) for every client, on
    whatever machine; what it returns must not depend on how it divides the work.
    """

    def run(self, round: Round) -> CohortSum:
        """The sum over the clients of a round."""
        ...

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over the test split."""
        ...

    def close(self) -> None:
        """Release processes and connections. A later call starts new ones."""
        ...


@dataclass(frozen=True, eq=False)
class Job:
    """What an engine computes: all that a client's report depends on but the round itself.

    `mixes`: the module lets records of a batch see each other, so that clients, and where examples
    are clipped also those, are computed one by one. `keeps_updates`: the sum
    comes with every client's update.
    """

    task: Task
    data: FederatedData
    work: ClientWork
    plan: PrivacyPlan
    streams: Streams
    weights: Weights = Weights.UNIFORM
    participants: Participants = field(default_factory=Participants)
    mixes: bool = False
    keeps_updates: bool = False

    def zero(self) -> CohortSum:
        """The sum over nobody."""
        noisy = self.plan.release.adds_noise
        return CohortSum.zero(self.task.size, self.plan.width, noisy=noisy, keep=self.keeps_updates)

    @cached_property
    def records(self) -> FederatedData:
        """The clients' records, followed by those that the participants bring."""
        more = self.participants.records
        return self.data if more is None else self.data.concatenated(more)

    def cohort(self, group: Group, block: slice) -> CohortData:
        """The records of a block of a group's clients."""
        ids = group.ids[block]
        if group.other_records is None:
            return CohortData(self.records, ids)
        others = group.other_records[block]
        return CohortData(self.records, ids, np.where(others < 0, ids, self.data.clients + others))


def one_by_one(work: ClientWork, plan: PrivacyPlan, *, mixes: bool, forks: str = "") -> str:
    """Why clients cannot be computed side by side: a client's update must be its own."""
    if forks:
        return f"each client is computed in a fork, as the model cannot be captured ({forks})"
    if mixes:
        return "the model lets the records of a batch see each other, padding included"
    if plan.secure:
        return (
            "noise.source 'secure': computed side by side, clients' updates depend on each other "
            "in their last digits"
        )
    if is_builtin_work(work):
        return ""
    return f"the work {type(work).__name__} may let clients see each other"


EngineMaker = Callable[[Job], Engine]


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT, _LARGE = 1 << 28, 1 << 25

LARGE_MODEL = 1 << 24
"""Parameters from which on memory counts for more than time."""


def keep_memory(size: int) -> None:
    """Tell malloc what to keep of what is freed, for a model of `size` parameters.

    By default it returns large blocks at once, and every step then waits for the same pages to be
    mapped and cleared again, which is a fifth of a ResNet's or an LSTM's time and more. A large
    model's rows are better returned: keeping them would cost more memory than the waiting is worth.
    Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if size <= LARGE_MODEL:
        mallopt(_TRIM_THRESHOLD, max(_KEPT, 64 * size))
        mallopt(_MMAP_MAX, 0)
    else:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _LARGE)
