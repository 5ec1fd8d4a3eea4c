"""`Release`: how clipped updates become what is published.

To add a mechanism, subclass it: say what a client does to its report, what the server does to
reports and to their sum, and what one turn is as an event. `PrivacyPlan` and `Training` ask
nothing else, and know none by name.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.identity import Stated
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.clip import Clip
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.noise.streams import KeySource, Streams
from fedveil.privacy.noisy_steps import NoisySteps
from fedveil.privacy.rows import Norm, add_weighted_
from fedveil.privacy.sampling import Sampler
from fedveil.privacy.watching import Watched

Ids = npt.NDArray[np.int64]

NOBODY = np.zeros(1, dtype=np.int64)
"""Whose key the server's own noise has."""


class Asked(Protocol):
    """What a round asks of some clients: who they are, and what everybody knows."""

    @property
    def number(self) -> int: ...
    @property
    def ids(self) -> Ids: ...
    @property
    def start(self) -> torch.Tensor: ...
    @property
    def clip(self) -> Clip | None: ...
    @property
    def moving(self) -> torch.Tensor: ...
    @property
    def streams(self) -> KeySource: ...


class Parts(Protocol):
    """The other parts of the plan that a release belongs to."""

    @property
    def sampler(self) -> Sampler: ...
    @property
    def population(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def schedule(self) -> ClipSchedule | None: ...
    @property
    def lines(self) -> tuple[BudgetLine, ...]: ...
    @property
    def watched(self) -> Watched | None: ...
    @property
    def norm(self) -> Norm | None: ...
    @property
    def parameters(self) -> int | None: ...


def misnamed(line: BudgetLine, unit: Unit, relation: Relation, *trusts: Trust) -> str | None:
    """What a line says wrongly of whom it protects from whom, in words; None if nothing."""
    if line.unit is not unit:
        return f"a {unit} is protected, not a {line.unit}"
    if line.relation is not relation:
        return f"neighbours are {relation}, not {line.relation}"
    if line.trust not in trusts:
        return f"trust is {' or '.join(trusts)}, not {line.trust}"
    return None


class Release:
    """One way to protect clients; by itself, none: reports are summed as they are.

    `counted`: clients protect themselves, so that the server sees their reports, and each is
    charged for its own turns. `randomises`: they do so by `randomise_`, at the end of their work.
    `additive`: what they send is their clipped update and noise that does not depend on it.
    `moves`: what is asked of clients in a round depends on what was released before.
    A round with fewer than `minimum` reports publishes no mean.
    """

    counted = False
    randomises = False
    additive = False
    moves = False

    @property
    def identity(self) -> Stated:
        return (("release", "none"),)

    @property
    def minimum(self) -> int:
        """The least number of reports of which something is handed on."""
        return 0

    @property
    def multiplier(self) -> float:
        """Noise over sensitivity, where noise is added.

        It is the same for everyone unless a release has one for each client.
        """
        raise AssertionError(f"{type(self).__name__} has no noise multiplier")

    def settings(self, schedule: ClipSchedule | None) -> dict[str, float]:
        """The keys of a recipe's [noise] that get this noise again; none: its budget does."""
        return {}

    def describe(self, lines: tuple[BudgetLine, ...]) -> str:
        """The noise in a few words, for people."""
        return "no noise"

    # What has to be so for the lines to be true.

    def check(self, parts: Parts) -> None:
        """Refuse parts that do not go together with this release."""

    def difference(self, parts: Parts, line: BudgetLine) -> str | None:
        """What is done otherwise than a strict line says, in words; None if nothing is."""
        return "no noise is added"

    def check_secure(self, parts: Parts, parameters: int) -> None:
        """Refuse what cannot be done with secure noise."""

    @property
    def steps(self) -> NoisySteps | None:
        """What local work must be, where it protects by itself; None if the work is free."""
        return None

    @property
    def needs_equal_weights(self) -> str:
        """Why clients cannot be weighted by their numbers of records; empty if they can."""
        if not self.counted:
            return ""
        return "and the claim covers how many records a client has, which the weights would tell"

    # What happens in a round.

    def start(self, params: torch.Tensor) -> torch.Tensor:
        """What of the release moves from round to round, float64; empty if nothing does."""
        return torch.zeros(0, dtype=torch.float64)

    def move(self, moving: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The same for the next round, from the models before and after this one."""
        return moving

    def reachable(
        self, moving: torch.Tensor, params: torch.Tensor, first: torch.Tensor, round: int
    ) -> bool:
        """Whether that can be what moves in `round`, for the model `params`; `first` was the first.

        For a client that did not see it move, and does not trust who says so.
        """
        return moving.numel() == 0

    def randomise_(self, rows: torch.Tensor, asked: Asked) -> None:
        """What clients do to their clipped updates [K, P] before they send them, in place."""

    def unrandomised_(self, rows: torch.Tensor, asked: Asked) -> None:
        """What clients that skip the noise make of updates, in place, so that `read_` takes them.

        For attacks: nothing is claimed about such a client.
        """

    def read_(self, rows: torch.Tensor, asked: Asked) -> torch.Tensor:
        """What the server does to accepted reports [K, P], in place; which it refuses, bool [K]."""
        return torch.zeros(len(rows), dtype=torch.bool)

    def add_sum_(
        self, total: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, asked: Asked
    ) -> None:
        """Add the weighted sum of the updates behind reports [K, P] to `total`, float64 [P]."""
        add_weighted_(total, rows, weights)

    def updates_of(self, rows: torch.Tensor, asked: Asked) -> torch.Tensor:
        """The updates behind accepted reports [K, P], one by one, for a server that wants rows."""
        return rows

    def noise_(self, total: torch.Tensor, clip: Clip | None, round: int, streams: Streams) -> None:
        """What the server does to the sum of one round's rows (float64 [P]), in place."""

    @property
    def needs_sum(self) -> str:
        """Why the server may take nothing but the sum of all reports; empty if it may take more.

        What is computed of reports that are private by themselves is as private. A release that
        protects their sum has to say that it protects anything else.
        """
        if self.counted or type(self) is Release:
            return ""
        return "noise is for the sum, and a client can move anything else by more than the clip"

    def divisor(self, weight: float, expected: float) -> float:
        """What the sum is divided by: the weight that arrived, or the `expected` cohort.

        Each report is private by itself, or nothing is: the realised weight tells nothing new.
        """
        return max(weight, 1.0)

    def noise_length(self, ids: Ids, clip: Clip | None, moving: torch.Tensor, size: int) -> float:
        """The expected L2 length of all noise on a sum of `size` coordinates: a diagnostic."""
        return 0.0

    def clip_of_updates(self, clip: Clip | None) -> float | None:
        """The clip that `RoundResult.clipped` is about; None where updates have none."""
        return None if clip is None else clip.gradient or clip.value
