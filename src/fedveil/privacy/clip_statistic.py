"""`ClipStatistic`: what an adaptive clip collects from clients, and how that stays private.

A schedule declares the statistic. Its rows are cut, flipped and noised here, so that a claim does
not depend on the code of the schedule.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.noise.grid import Grid
from fedveil.privacy.noise.mechanisms import GaussianMechanism, add_to_sum_
from fedveil.privacy.noise.streams import Keys, uniform_


@dataclass(frozen=True)
class ClipStatistic:
    """A statistic that an adaptive clip asks of clients: a row of numbers each, summed with noise.

    Attributes:
        width: The number of numbers in a row.
        norm_bound: The largest L2 norm of a row.
        word: Its name, which is also the name of its noise stream.
        description: What it is, in words.
        key: The setting that makes it cheaper, for a budget that it exceeds.
        setting: The value of that setting.
        remedy: How to change that setting, in words.
        nonnegative: Whether a row has no negative numbers.
        noise: The standard deviation of the Gaussian noise on the sum, added by the trusted server
            or a curator, or in shares by the clients of a secure sum.
        flip: The epsilon of randomised response, by which each client reports its one bit,
            +-`norm_bound`. Nobody need be trusted then.
        every: The number of rounds from one report to the next.

    | edge | behaviour |
    |---|---|
    | norm_bound outside (0, 1], width < 1, every < 1 | BadInput |
    | flip with several numbers, or beside noise | BadInput |
    | noise or flip negative, NaN or infinite | BadInput |
    """

    width: int
    norm_bound: float
    word: str
    description: str
    key: str
    setting: float
    remedy: str
    nonnegative: bool = False
    noise: float = 0.0
    flip: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        """Raise BadInput for the edges above."""
        if not (0 < self.norm_bound <= 1 and self.width >= 1 and self.every >= 1):
            raise BadInput(
                f"a clip statistic of {self.width} {self.word} with L2 norm "
                f"{self.norm_bound:g} in one of {self.every} rounds: at least one, a norm in "
                "(0, 1], at least one round"
            )
        if not (0 <= self.noise < math.inf and 0 <= self.flip < math.inf):
            raise BadInput(
                f"{self.word} with noise {self.noise} and flip {self.flip}: finite numbers >= 0"
            )
        if self.flip and self.width != 1:
            raise BadInput(
                f"only one bit can be flipped, and {self.width} {self.word} are reported"
            )
        if self.flip and self.noise:
            raise BadInput(
                f"{self.word} with noise {self.noise} and flip {self.flip}: leave one out; "
                "the noise is for bits that are not flipped"
            )

    @property
    def purpose(self) -> str:
        """The name of the noise stream:

        `word` if it is "bits" or "norms", else "watched " + `word`.

        So no other noise has this name.
        """
        return self.word if self.word in ("bits", "norms") else f"watched {self.word}"

    def sensitivity(self, relation: Relation) -> float:
        """How far one client can move the sum of rows, in L2.

        Under replacement it is twice the norm bound, or sqrt(2) times it for rows without negative
        numbers, which meet at a right angle at most. Otherwise it is the norm bound.
        """
        if relation is not Relation.REPLACE:
            return self.norm_bound
        return math.sqrt(2) * self.norm_bound if self.nonnegative else 2 * self.norm_bound

    def due(self, round: int) -> bool:
        """Whether clients report in `round`: rounds 1, every + 1, 2 every + 1, ..."""
        return (round - 1) % self.every == 0

    def cut(self, rows: torch.Tensor, clients: int) -> torch.Tensor:
        """Return a float64 copy of clients' rows [clients, width], cut to the accounted length.

        Numbers that are not finite become 0. Raises BadInput for rows of another shape.

        Guarantee: every row has an L2 norm of at most `norm_bound`, and no negative number if
        `nonnegative`.
        """
        self.check_shape(rows, clients)
        rows = rows.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
        if self.nonnegative:
            rows = rows.clamp_min(0.0)
        norms = rows.norm(dim=1, keepdim=True)
        exact = (rows != 0).sum(dim=1, keepdim=True) == 1  # one number's length is not rounded
        short = self.norm_bound * (1 - 1e-12)
        long = norms > torch.where(exact, self.norm_bound, short)
        return torch.where(long, rows * (short / norms), rows)

    def randomise_bits(self, bits: torch.Tensor, keys: Keys) -> torch.Tensor:
        """Randomise bits [K, 1] by randomised response. Returns unbiased values, float64 [K, 1].

        The sign of a number is its bit. Values are +-norm_bound / (2 p - 1), p the chance of
        keeping a bit.

        Guarantee: the draw is a multiple of 2^-52, and 2^-22 is taken off the chance of keeping the
        bit, so that epsilon `flip` holds exactly.
        """
        length = torch.tensor(self.norm_bound, dtype=torch.float64)
        bits = torch.where(bits >= 0, length, -length)
        keep = self._keep
        draw = uniform_(torch.empty(len(bits), 1, dtype=torch.float64), keys)
        flipped = torch.where(draw < max(0.0, 2 * keep - 1 - 2.0**-22), bits, -bits)
        return flipped / (2 * keep - 1)

    def share(self, honest: int) -> float:
        """The standard deviation of each client's noise, where `honest` of them add up to `noise`.

        AssertionError without `noise`: shares of nothing hide nothing.
        """
        if not self.noise:
            raise AssertionError("a statistic in a secure sum has noise")
        return self.noise / math.sqrt(honest)

    def share_grid(self, honest: int) -> Grid:
        """The grid of rows with secure shares of the noise."""
        share = self.share(honest)
        return GaussianMechanism(share).grid(share, self.width)

    def add_shares_(self, rows: torch.Tensor, honest: int, keys: Keys) -> None:
        """Add each client's share of the noise to its row of [K, width], in place.

        Guarantee: docs/proofs/secure-sum.md. The shares of `honest` clients have the variance of
        `noise` together. With secure keys, rows become multiples of the grid of `share_grid`.
        """
        share = self.share(honest)
        GaussianMechanism(share).add_(rows, np.full(len(rows), share), keys)

    def read(self, rows: torch.Tensor, *, secure: bool, shares: bool = False) -> torch.Tensor:
        """The rows [K, width] that arrived, made valid. What clients may not send becomes zero.

        With `secure`, rows with noise to come are cut to its grid. With `shares`, rows have their
        clients' noise, which is longer than `norm_bound`: only what is not finite becomes zero.

        Guarantee: whatever a client sends, it moves the sum by no more than is accounted for. Rows
        of `cut`, `cut_to_grid` and `randomise_bits` stay as they are.

        | edge | behaviour |
        |---|---|
        | NaN or infinity | that number is zero |
        | a row that is too long | scaled down to `norm_bound` |
        | bits by randomised response: another value than the two | zero |
        """
        if self.flip:
            # what a bit by randomised response counts for, without bias, on either side of zero
            bit = self.norm_bound / (2 * self._keep - 1)
            return torch.where(rows.abs() == bit, rows, 0.0)
        if shares:
            self.check_shape(rows, len(rows))
            return rows.to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
        rows = self.cut(rows, len(rows))
        return self.cut_to_grid(rows) if secure else rows

    def check_shape(self, rows: torch.Tensor, clients: int) -> None:
        """Raise BadInput unless `rows` are one row of `width` numbers for each client."""
        if rows.shape != (clients, self.width):
            raise BadInput(
                f"{self.word} of {clients} clients are rows of {tuple(rows.shape)}: "
                f"({clients}, {self.width}) are needed"
            )

    @property
    def _keep(self) -> float:
        """The probability e^flip / (1 + e^flip) with which randomised response keeps a bit."""
        return 1 / (1 + math.exp(-self.flip))

    def noisy(self, total: torch.Tensor, keys: Keys) -> torch.Tensor:
        """A copy of the sum of rows [width] with the server's or curator's Gaussian noise added.

        It is what is published. Without `noise` it is an unchanged copy.
        """
        total = total.clone()
        if self.noise:
            add_to_sum_(GaussianMechanism(self.noise), total, self.noise, keys)
        return total

    def cut_to_grid(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy of rows cut to the grid of secure noise, so that their sum is exact.

        Without `noise`, the rows themselves.
        """
        if not self.noise:
            return rows
        return GaussianMechanism(self.noise).grid(self.noise, self.width).cut_(rows.clone())
