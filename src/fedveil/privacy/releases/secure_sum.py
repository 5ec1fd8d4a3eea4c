"""`SecureSum`: the channel behind which the server sees the sum of all sites, and nothing else."""

from dataclasses import dataclass, field

import torch

from fedveil.base.errors import BadInput
from fedveil.masking.rehearsal import rehearse
from fedveil.masking.sum_messages import least_honest
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.grid import LARGEST_SUM, Grid
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.rotation import RotatedGrid
from fedveil.privacy.release import Channel, Ids, Round


def least_threshold(sites: int, honest: int) -> int:
    """The smallest threshold that protects: more than half of the sites and the dishonest ones.

    >>> least_threshold(3, 3), least_threshold(10, 10), least_threshold(5, 4)
    (2, 6, 4)
    """
    return (2 * sites - honest) // 2 + 1


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
        decodes: True with `rotated`.
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
    decodes: bool = field(init=False, repr=False, compare=False)
    bits: int = field(init=False, repr=False, compare=False)
    divisor: int = field(init=False, repr=False, compare=False)

    hides_reports = "the secure sum hides what a single site sent"

    def __post_init__(self) -> None:
        divisor = least_honest(self.sites, self.threshold, self.honest)
        object.__setattr__(self, "divisor", divisor)
        object.__setattr__(self, "minimum", self.threshold)
        object.__setattr__(self, "keeps_reports", self.masks)
        object.__setattr__(self, "decodes", self.rotated is not None)
        object.__setattr__(self, "bits", 64 if self.rotated is None else self.rotated.bits)

    def site_grid(self, multiplier: float, clip: Clip | None, size: int) -> Grid:
        """The grid of a site's report of `size` coordinates.

        Server and sites derive the same one from their plans. Raises AssertionError without a clip.

        Args:
            multiplier: The noise of one site, in clips, above 0.
            clip: The clip of the round.
            size: The number of coordinates.
        """
        if self.rotated is not None:
            return self.rotated.report_grid
        if clip is None:
            raise AssertionError("sites clip")
        scale = multiplier * clip.sensitivity(Relation.ADD_REMOVE)
        return GaussianMechanism(multiplier).grid(scale, size)

    def hand_on_(
        self,
        total: torch.Tensor,
        reports: list[tuple[Ids, torch.Tensor]] | None,
        multiplier: float,
        round: Round,
    ) -> None:
        """Replace the total by the sum that the server learns.

        With masks and reports it is what the protocol opens: sites without a report drop out. A sum
        of fewer than 64 bits is decoded.
        """
        if self.masks and reports is not None:
            self._unmask_(total, reports, multiplier, round)
        if self.rotated is not None:
            self.rotated.open_(total, round.number)

    def _unmask_(
        self,
        total: torch.Tensor,
        reports: list[tuple[Ids, torch.Tensor]],
        multiplier: float,
        round: Round,
    ) -> None:
        """Replace the total by the sum of the reports, which goes through the messages."""
        grid = self.site_grid(multiplier, round.clip, len(total))
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
