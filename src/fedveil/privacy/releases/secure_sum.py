"""`SecureSum`: the channel behind which the server sees the sum of all sites, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fedveil.base.errors import BadArgument, BadInput
from fedveil.masking.rehearsal import rehearse
from fedveil.masking.sum_messages import least_honest
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.grid import LARGEST_SUM, Grid
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.rotation import RotatedGrid
from fedveil.privacy.release import Channel, Ids, Round
from fedveil.privacy.secure import check_grid

if TYPE_CHECKING:
    from fedveil.privacy.plan import PrivacyPlan

LEAST_STEPS, MOST_SITES = 2.0**16, 10**6
"""With these, rounded shares add up to a rounding of one Gaussian (docs/proofs/sites.md)."""


def least_threshold(sites: int, honest: int) -> int:
    """The smallest threshold that protects: more than half of the sites and the dishonest ones.

    >>> least_threshold(3, 3), least_threshold(10, 10), least_threshold(5, 4)
    (2, 6, 4)
    """
    return (2 * sites - honest) // 2 + 1


def site_grid(multiplier: float, clip: Clip | None, size: int) -> Grid:
    """The grid of the secure noise that a site adds to its sum, of `size` coordinates.

    Server and sites derive the same one from their plans. Raises AssertionError without a clip.

    Args:
        multiplier: The noise of one site, in clips, above 0.
        clip: The clip of the round.
        size: The number of coordinates.
    """
    if clip is None:
        raise AssertionError("sites clip")
    scale = multiplier * clip.sensitivity(Relation.ADD_REMOVE)
    return GaussianMechanism(multiplier).grid(scale, size)


EVERY_SITE = "the claim about the sum counts on the noise of every site"
"""Why no dishonest clients are simulated behind a secure sum."""


@dataclass(frozen=True)
class ReportGrid:
    """The grids of what a site sends: of its update, and of an adaptive clip's statistic behind it.

    Attributes:
        grids: The grid of each part, with its number of coordinates.
    """

    grids: tuple[tuple[Grid, int], ...]

    def holds(self, report: torch.Tensor) -> bool:
        """Whether every coordinate of a report is a multiple of its part's spacing."""
        pieces = zip(self.grids, self._pieces(report), strict=True)
        return all(grid.holds(piece) for (grid, _), piece in pieces)

    def quantise(self, report: torch.Tensor) -> torch.Tensor:
        """A report as numbers of steps, int64 [size], as `Grid.quantise`."""
        pieces = zip(self.grids, self._pieces(report), strict=True)
        return torch.cat([grid.quantise(piece) for (grid, _), piece in pieces])

    def dequantise(self, steps: torch.Tensor) -> torch.Tensor:
        """The values of numbers of steps, float64 [size]."""
        pieces = zip(self.grids, self._pieces(steps), strict=True)
        return torch.cat([grid.dequantise(piece) for (grid, _), piece in pieces])

    def _pieces(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The parts of a vector. Raises ValueError or RuntimeError for one of another length."""
        return torch.split(whole, [size for _, size in self.grids])


def report_grid(plan: "PrivacyPlan", clip: Clip | None, size: int) -> ReportGrid:
    """The grid of what a site of a secure sum sends. Server and sites derive the same one.

    Raises AssertionError without a clip.

    Args:
        plan: The plan.
        clip: The clip of the round.
        size: The number of parameters.
    """
    release, statistic = plan.release, plan.statistic
    channel = release.channel
    if isinstance(channel, SecureSum) and channel.rotated is not None:
        grids = [(channel.rotated.report_grid, size)]
    else:
        grids = [(site_grid(release.report_noise, clip, size), size)]
    if statistic is not None:
        honest = release.statistic_channel.divisor
        grids.append((statistic.share_grid(honest), statistic.width))
    return ReportGrid(tuple(grids))


def check_shares(plan: "PrivacyPlan", multiplier: float, sites: int, units: int, what: str) -> None:
    """Raise BadInput if secure noise in shares has no grid, or its sums are not exact on it.

    Does nothing for a plan with seeded noise, or without a number of parameters.

    Args:
        plan: The plan.
        multiplier: The noise of one site, in clips.
        sites: The number of sites.
        units: The largest number of rows, each as long as the clip, in a sum.
        what: Whose rows these are, in words.
    """
    if not plan.secure or plan.parameters is None:
        return
    check_grid(plan.clip_schedule, multiplier, Relation.ADD_REMOVE, plan.parameters)
    spacing = GaussianMechanism(multiplier).grid(multiplier, plan.parameters).spacing
    if multiplier / spacing < LEAST_STEPS or sites > MOST_SITES:
        raise BadArgument(
            f"{{multiplier}} is {multiplier:g} at each of {sites} sites: secure "
            "shares need noise of 2^16 steps of the grid and at most "
            f"{MOST_SITES:,} sites",
            "multiplier",
        )
    # Rows as long as the clip, all in one coordinate. A clip that is no power of two has up
    # to twice as many steps.
    if units * 2.0 / spacing > LARGEST_SUM:
        raise BadArgument(
            f"{{source}} is 'secure', {{multiplier}} {multiplier:.4g} and {units:,} {what}: their "
            "sum is too long for the grid; raise the multiplier",
            "source",
            "multiplier",
        )


def check_statistic_shares(plan: "PrivacyPlan", clients: int) -> None:
    """Raise BadInput if shares of the noise of a clip's statistic do not add up to one Gaussian.

    Also if the sum of `clients` statistics is not exact on their grid. Does nothing for a plan with
    seeded noise, or without such a statistic.
    """
    statistic, honest = plan.statistic, plan.release.statistic_channel.divisor
    if not plan.secure or statistic is None or not honest:
        return
    spacing = statistic.share_grid(honest).spacing
    if statistic.share(honest) / spacing < LEAST_STEPS or clients / spacing > LARGEST_SUM:
        raise BadArgument(
            f"{{noise}} is {statistic.noise:g} on the sum of {clients:,} clients' "
            f"{statistic.word}: secure shares of it need 2^16 steps of a grid that holds the sum; "
            f"{statistic.remedy}",
            "noise",
        )


@dataclass(frozen=True)
class SecureSum(Channel):
    """Hands on the sum of the sites' reports, and nothing with fewer of them than the threshold.

    Guarantee: docs/proofs/secure-sum.md. Every sum has the noise of `divisor` honest sites or more.
    In a simulation reports are added up in the clear, unless there are masks. Between real sites
    masks hide them.

    Attributes:
        sites: The number of sites.
        threshold: The least number of sites of which a sum is handed on.
        honest: How many sites the claim takes to be honest.
        masks: Whether a simulation goes through the protocol's messages.
        rotated: The grid of sums of fewer than 64 bits. None: 64 bits.
        minimum: The threshold.
        keeps_reports: True with masks: the protocol begins with the reports of all sites.
        bits: The number of bits of a word.
        divisor: The least number of honest sites in a sum, threshold - (sites - honest). A site's
            share of the noise has that part of its variance.

    | edge | behaviour |
    |---|---|
    | fewer than 3 sites, a divisor below 1, 2 threshold <= 2 sites - honest | BadInput |
    | masks, and reports that are not on the grid of secure noise | BadInput |
    """

    sites: int
    threshold: int
    honest: int
    masks: bool = False
    rotated: RotatedGrid | None = None
    minimum: int = field(init=False, repr=False, compare=False)
    keeps_reports: bool = field(init=False, repr=False, compare=False)
    bits: int = field(init=False, repr=False, compare=False)
    divisor: int = field(init=False, repr=False, compare=False)

    hides_reports = "the secure sum hides what a single site sent"

    def __post_init__(self) -> None:
        divisor = least_honest(self.sites, self.threshold, self.honest)
        object.__setattr__(self, "divisor", divisor)
        object.__setattr__(self, "minimum", self.threshold)
        object.__setattr__(self, "keeps_reports", self.masks)
        object.__setattr__(self, "bits", 64 if self.rotated is None else self.rotated.bits)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a claim about the sum takes for granted of the server and the sites."""
        least, sites = self.threshold, self.sites
        seen = "the server sees only the sum of all sites' reports (a secure sum)"
        who = f"all {sites} sites" if self.honest == sites else f"{self.honest} of {sites} sites"
        noise = f"{who} add their noise honestly, and keep it to themselves"
        if least == sites:
            return seen, noise
        seen = f"the server sees only one sum a round, of {least} or more of {sites} sites' reports"
        answers = "whether a site answers does not depend on its records"
        return f"{seen} (a secure sum)", noise, answers

    def hand_on_(
        self,
        total: torch.Tensor,
        reports: list[tuple[Ids, torch.Tensor]],
        grid: ReportGrid,
    ) -> None:
        """Replace the total by the sum that the protocol opens. Sites without a report drop out."""
        by_site = {
            int(site): row for ids, rows in reports for site, row in zip(ids, rows, strict=True)
        }
        if not all(grid.holds(row) for row in by_site.values()):
            raise BadInput(
                "masks are for integers, and these reports are not on a grid: make the plan secure "
                "(noise.source = 'secure'), or leave sum.masks out"
            )
        vectors = [
            grid.quantise(by_site[site]).numpy() if site in by_site else None
            for site in range(self.sites)
        ]
        limit = int(LARGEST_SUM)
        summed = rehearse(vectors, self.threshold, self.honest, limit, self.bits)
        total.copy_(grid.dequantise(torch.from_numpy(summed)))

    def decode_(self, total: torch.Tensor, round: Round) -> None:
        """Turn a sum of fewer than 64 bits into that of the rows. Others stay as they are."""
        if self.rotated is not None:
            self.rotated.open_(total, round.number)
