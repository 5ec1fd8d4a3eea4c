"""`Engine`: whatever computes the sum over a cohort, and `Job`: all it needs to know for that.

To add an engine, implement the protocol and give its maker to `Training(make_engine=...)`. Cores
are used by workers, each of which computes with one thread (`one_thread` in base/platforms.py), on
memory that it keeps (`keep_memory`), so that rounding does not depend on the number of threads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch

from fedveil.base.platforms import c_function
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Round
from fedveil.training.cohort import Batches
from fedveil.training.participants import Participants
from fedveil.training.reports import CohortSum
from fedveil.training.round import Unfinished
from fedveil.training.server import ServerState, Weights
from fedveil.training.work import BUILTIN_WORK, WORK_PARTS, ClientWork


class Engine(Protocol):
    """Where clients train, clip and randomise, and where reports are accepted and summed.

    An engine calls `client_report` and `server_sum` (training/exchange.py) for every client, on
    whatever machine; what it returns must not depend on how it divides the work.
    """

    def run(self, round: Round) -> CohortSum:
        """Compute and return the sum of the reports of all clients `round.ids`."""
        ...

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over the test split, by name. {} without a test split."""
        ...

    def close(self) -> None:
        """Release processes and connections. A later call of `run` starts new ones."""
        ...


@runtime_checkable
class GoesOn(Protocol):
    """An engine that finishes rounds which a process before it began."""

    def unfinished(self, state: ServerState) -> Unfinished | None:
        """Return the attempt at the round after `state` that was cut off before its sum, or None.

        The ledger was charged for it. The server drew no noise for it and released nothing.
        """
        ...


@runtime_checkable
class MeasuresAtSites(Protocol):
    """An engine whose clients measure a model themselves, and add the noise (`SiteMetrics`)."""

    def site_metrics(self, params: torch.Tensor, round: int, attempt: int) -> dict[str, float]:
        """Return the metrics of a model after an attempt at a round, by name, with intervals."""
        ...


@dataclass(frozen=True, eq=False)
class Job:
    """Everything but the round itself that a client's report depends on.

    Attributes:
        participants: Dishonest clients, None if all clients are honest.
        mixes: Whether the module lets records of a batch see each other. Clients are then computed
            one by one, and so are examples where each is clipped.
        keeps_updates: Whether the sum comes with every client's update.
        room: How many records a client has room for where secure noise is computed side by side,
            and that was tried. 0 if clients are then computed one by one.
    """

    task: Task
    data: FederatedData
    work: ClientWork
    plan: PrivacyPlan
    streams: Streams
    weights: Weights = Weights.UNIFORM
    participants: Participants | None = None
    mixes: bool = False
    keeps_updates: bool = False
    room: int = 0

    def zero(self) -> CohortSum:
        """A new sum over no clients, with tensors of this job's sizes."""
        noisy = self.plan.release.adds_noise
        return CohortSum.zero(self.task.size, self.plan.width, noisy=noisy, keep=self.keeps_updates)

    @cached_property
    def records(self) -> FederatedData:
        """The clients' records, followed by the records that dishonest participants bring.

        These may be more than `most_records`, which is then left out. Whatever depends on it, such
        as the room of a slot, follows from `data`.
        """
        more = None if self.participants is None else self.participants.records
        if more is None:
            return self.data
        own, brought = (replace(data, most_records=None) for data in (self.data, more))
        return own.concatenated(brought)


def why_one_by_one(work: ClientWork, plan: PrivacyPlan, *, mixes: bool, forks: str = "") -> str:
    """The reason why clients must be computed one by one, as a clause.

    "" if side by side is allowed. A client's update must not depend on other clients, under secure
    noise not even in its last digits: there side by side is also tried (`side_by_side`).

    Args:
        work: The local work.
        plan: The privacy plan.
        mixes: Whether the module lets records of a batch see each other.
        forks: Why the model cannot be captured, "" if it can.
    """
    if forks:
        return f"each client is computed in a fork, as the model cannot be captured ({forks})"
    if mixes:
        return "the model lets the records of a batch see each other, padding included"
    if type(work) not in BUILTIN_WORK:
        return f"the work {type(work).__name__} may let clients see each other"
    if plan.secure and plan.noisy_steps is not None:
        return "noise.source is 'secure' and what lies side by side are a client's records"
    own = {
        type(part).__name__
        for part in vars(work).values()
        if not isinstance(part, float | int | None) and type(part) not in (Batches, *WORK_PARTS)
    }
    if plan.secure and own:
        return f"noise.source is 'secure' and {min(own)} may let clients see each other"
    return ""


EngineMaker = Callable[[Job], Engine]


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT, _LARGE = 1 << 28, 1 << 25

LARGE_MODEL = 1 << 24
"""The number of parameters above which memory matters more than time."""


def keep_memory(size: int) -> None:
    """Set how much freed memory this process's malloc keeps, for a model of `size` parameters.

    By default malloc returns large blocks at once, and every step then waits for the same pages to
    be mapped and cleared again, which is a fifth of a ResNet's or an LSTM's time and more. A large
    model's rows are better returned: keeping them would cost more memory than the waiting is worth.
    Does nothing where the C library is not glibc.
    """
    mallopt = c_function("mallopt")
    if mallopt is None:
        return
    if size <= LARGE_MODEL:
        mallopt(_TRIM_THRESHOLD, max(_KEPT, 64 * size))
        mallopt(_MMAP_MAX, 0)
    else:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _LARGE)
