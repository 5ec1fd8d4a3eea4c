"""Ranges: the public intervals that the two-point mechanism clamps weights to, layer by layer."""

from dataclasses import dataclass
from enum import StrEnum

import torch

from fedveil.base.checks import FINITE, RADIUS, SMALLEST_RADIUS, at_least
from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated

_LARGEST, _ROUNDING = 1e30, 1e-9
"""Beyond, a report would not be finite in float32; what products of factors may be off by."""


class Perturb(StrEnum):
    """What a client reports: its weights, as published, or its update around the model sent."""

    WEIGHTS = "weights"
    UPDATE = "update"


@dataclass(frozen=True)
class Ranges:
    """[c - r, c + r] for each layer, as published (adaptive) or fixed for the whole run.

    `sizes` are the layers' numbers of parameters. The moving state is c then r for each layer.
    `radius` None, for adaptive ranges of weights, starts from the first model, which is public.
    Adaptive ranges are recomputed from the model alone, which is the privatised aggregate and
    therefore public: c = (max + min)/2 and r = (max - min)/2 of each layer's weights; for
    updates c = 0 and r = half the spread of the layer's last mean update.

    Guarantee: ranges never depend on a client's data except through released models. Reports lie
    at c +- r kappa, outside the range, so an aggregate's spread can exceed r through noise alone
    and r would drift upwards: it may grow by `growth` a round at most. It never falls below 1e-6,
    and a layer in which nothing moved, or all values are equal, keeps its radius.
    """

    centre: float
    radius: float | None
    sizes: tuple[int, ...]
    adaptive: bool
    perturb: Perturb
    growth: float = 1.0

    @property
    def identity(self) -> Stated:
        return (
            ("ranges", "layers"),
            ("centre", self.centre),
            ("radius", self.radius),
            ("sizes", self.sizes),
            ("adaptive", self.adaptive),
            ("perturb", self.perturb),
            ("growth", self.growth),
        )

    def __post_init__(self) -> None:
        FINITE.check("centre", self.centre)
        if self.radius is None:
            if not self.adaptive or self.perturb is not Perturb.WEIGHTS:
                raise BadArgument(
                    "{radius} is missing: only adaptive ranges of weights need none", "radius"
                )
        else:
            RADIUS.check("radius", self.radius)
        at_least(1).check("growth", self.growth)
        if self.perturb is Perturb.UPDATE and self.centre != 0:
            raise BadArgument(
                f"{{centre}} is {self.centre}: updates are centred on the model sent, so leave it "
                "out",
                "centre",
            )

    def start(self, params: torch.Tensor) -> torch.Tensor:
        """The state before the first round: (c_0, r_0) for every layer, agreed in advance."""
        layers = len(self.sizes)
        if self.radius is None:
            low, high = self._extremes(params)
            return torch.cat([(high + low) / 2, ((high - low) / 2).clamp_min(SMALLEST_RADIUS)])
        return torch.tensor([self.centre] * layers + [self.radius] * layers, dtype=torch.float64)

    def per_coordinate(self, moving: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Centre and radius of every coordinate, float32 [P] each."""
        centres, radii = moving.to(torch.float32).chunk(2)
        repeats = torch.tensor(self.sizes)
        return centres.repeat_interleave(repeats), radii.repeat_interleave(repeats)

    def move(self, moving: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """The ranges of the next round, from the models before and after this one."""
        if not self.adaptive:
            return moving
        low, high = self._extremes(after if self.perturb is Perturb.WEIGHTS else after - before)
        centres, radii = moving.chunk(2)
        grown = ((high - low) / 2).clamp_min(SMALLEST_RADIUS).minimum(radii * self.growth)
        grown = torch.where(high > low, grown, radii)
        if self.perturb is Perturb.WEIGHTS:
            centres = (high + low) / 2
        return torch.cat([centres, grown])

    def reachable(
        self, moving: torch.Tensor, params: torch.Tensor, first: torch.Tensor, round: int
    ) -> bool:
        """Whether `moving` can be the ranges of `round`, for the model `params`.

        `first` is the model of the first round. For a client that did not see them move: every
        number that follows from the models, or is fixed, must be so; radii are within their limits.
        """
        begin = self.start(first)
        if moving.shape != begin.shape or not bool(torch.isfinite(moving).all()):
            return False
        if round == 1 or not self.adaptive:
            return bool(torch.equal(moving, begin))
        centres, radii = moving.chunk(2)
        wanted, first_radii = begin.chunk(2)
        if self.perturb is Perturb.WEIGHTS:
            low, high = self._extremes(params)
            wanted = (high + low) / 2
        growth = torch.tensor(self.growth, dtype=torch.float64) ** (round - 1)
        most = first_radii * growth * (1 + _ROUNDING)
        return bool(
            torch.equal(centres, wanted)
            and (radii >= SMALLEST_RADIUS).all()
            and (radii <= most.clamp_max(_LARGEST)).all()
            and (centres.abs() <= _LARGEST).all()
        )

    def _extremes(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the greatest value of each layer, float64."""
        layers = torch.split(values.to(torch.float64), list(self.sizes))
        low = torch.stack([layer.min() for layer in layers])
        return low, torch.stack([layer.max() for layer in layers])
