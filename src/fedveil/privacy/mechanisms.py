"""Mechanisms: noise that asks a bound for its sensitivity."""

import math
from dataclasses import dataclass

import torch

from fedveil.errors import BadInput
from fedveil.privacy import events
from fedveil.privacy.claims import Relation
from fedveil.privacy.clipping import FixedBound
from fedveil.privacy.randomness import Keys, normal_


@dataclass(frozen=True)
class GaussianMechanism:
    """Add N(0, (multiplier x sensitivity)^2) to every coordinate of a sum of bounded rows.

    Guarantee: when `total` is the sum of rows bounded by `bound`, and nothing else depends on
    the clients, the result is the Gaussian mechanism with the event `release`. Noise goes on
    the sum, once; dividing by a public constant afterwards is post-processing.

    | edge | behaviour |
    |---|---|
    | multiplier < 0, NaN or infinite | BadInput |
    | multiplier 0 | no noise; the event has multiplier 0 and its epsilon is infinite |
    | sum of no rows (zeros) | noise all the same |
    """

    multiplier: float

    def __post_init__(self) -> None:
        if not (self.multiplier >= 0 and math.isfinite(self.multiplier)):
            raise BadInput(f"noise.multiplier is {self.multiplier}: a number >= 0 is needed")

    @property
    def release(self) -> events.Gaussian:
        """What one application releases."""
        return events.Gaussian(self.multiplier)

    def std(self, bound: FixedBound, relation: Relation) -> float:
        """The standard deviation of the noise per coordinate of the sum."""
        return self.multiplier * bound.sensitivity(relation)

    def apply(
        self, total: torch.Tensor, bound: FixedBound, relation: Relation, keys: Keys
    ) -> torch.Tensor:
        """The noised sum: `total` is float64 [P], `keys` holds the one key of this release."""
        # float64: float32 normals end at 5.77 standard deviations, which breaks delta
        noise = normal_(torch.empty(1, len(total), dtype=torch.float64), keys)[0]
        return total + self.std(bound, relation) * noise
