"""Ranges: the public intervals that the two-point mechanism clamps weights to, layer by layer."""

from dataclasses import dataclass
from enum import StrEnum

import torch

from fedveil.base.checks import FINITE, GROWTH, RADIUS, SMALLEST_RADIUS
from fedveil.base.errors import BadArgument
from fedveil.base.identity import Stated, named_values
from fedveil.privacy.clip import Clip
from fedveil.privacy.clip_schedules import ClipSchedule

_LARGEST, _ROUNDING = 1e30, 1e-9
"""Beyond, a report would not be finite in float32; what products of factors may be off by."""


class Perturb(StrEnum):
    """The subject of a report: a client's weights, as published, or its update."""

    WEIGHTS = "weights"
    UPDATE = "update"


@dataclass(frozen=True)
class Ranges(ClipSchedule):
    """[c - r, c + r] for each layer, as published (adaptive) or fixed for the whole run.

    They take the place of a clip for two-point reports. The adaptive state is c for each layer,
    then r for each layer. Adaptive ranges are recomputed from the model alone, which is the
    privatised aggregate and therefore public: c = (max + min)/2 and r = (max - min)/2 of each
    layer's weights; for updates c = 0 and r = half the spread of the layer's last mean update.

    Guarantee: ranges never depend on a client's data except through released models. Reports lie
    at c +- r kappa, outside the range, so an aggregate's spread can exceed r through noise alone
    and r would drift upwards: it may grow by `growth` a round at most. It never falls below 1e-6,
    and a layer in which nothing moved, or all values are equal, keeps its radius.

    Attributes:
        centre: c of every layer in the first round.
        radius: r of every layer in the first round. None, for adaptive ranges of weights: from the
            first model, which is public.
        tensor_sizes: The numbers of parameters of the layers.
        adaptive: Whether ranges follow the model.
        perturb: Whether reports are weights or updates.
        growth: The largest factor by which r grows in a round.
    """

    centre: float
    radius: float | None
    tensor_sizes: tuple[int, ...]
    adaptive: bool
    perturb: Perturb
    growth: float = 1.0

    @property
    def identity(self) -> Stated:
        """Identity pairs: ranges "layers", then all fields."""
        return (
            ("ranges", "layers"),
            *named_values(self, "centre", "radius"),
            ("sizes", self.tensor_sizes),
            *named_values(self, "adaptive", "perturb", "growth"),
        )

    def __post_init__(self) -> None:
        """Raise BadArgument for a number outside its limits or a missing radius.

        Only adaptive ranges of weights need no radius. Ranges of updates have the centre 0.
        """
        FINITE.check("centre", self.centre)
        if self.radius is None:
            if not self.adaptive or self.perturb is not Perturb.WEIGHTS:
                raise BadArgument(
                    "{radius} is missing: only adaptive ranges of weights need none", "radius"
                )
        else:
            RADIUS.check("radius", self.radius)
        GROWTH.check("growth", self.growth)
        if self.perturb is Perturb.UPDATE and self.centre != 0:
            raise BadArgument(
                f"{{centre}} is {self.centre}: updates are centred on the model sent, so omit it",
                "centre",
            )

    @property
    def norm(self) -> None:
        """None: reports are clamped to ranges, and nothing is clipped."""
        return None

    def first_value(self) -> float:
        """Raise AssertionError: the state of ranges is not one value."""
        raise AssertionError("ranges have a state for each layer")

    def clip(self, value: float, round: int) -> Clip:
        """Raise AssertionError: ranges clip nothing."""
        raise AssertionError("ranges clip nothing")

    def first_state(self, params: torch.Tensor) -> torch.Tensor:
        """The centres, then the radii, of all layers, float64 [2 x layers].

        Without a `radius` they are those of the weights in `params` [P], radii at least 1e-6.
        """
        layers = len(self.tensor_sizes)
        if self.radius is None:
            low, high = self._extremes(params)
            return torch.cat([(high + low) / 2, ((high - low) / 2).clamp_min(SMALLEST_RADIUS)])
        return torch.tensor([self.centre] * layers + [self.radius] * layers, dtype=torch.float64)

    def per_coordinate(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(centre, radius) of every coordinate, float32 [P] each, from an adaptive state."""
        centres, radii = state.to(torch.float32).chunk(2)
        repeats = torch.tensor(self.tensor_sizes)
        return centres.repeat_interleave(repeats), radii.repeat_interleave(repeats)

    def next_state(
        self,
        state: torch.Tensor,
        noisy: torch.Tensor | None,
        expected: float,
        before: torch.Tensor,
        after: torch.Tensor,
        round: int,
    ) -> torch.Tensor:
        """The centres, then the radii, of all layers after this round.

        `state` itself if not adaptive.

        They follow from the models `before` and `after` alone. The other arguments are not used.
        """
        if not self.adaptive:
            return state
        low, high = self._extremes(after if self.perturb is Perturb.WEIGHTS else after - before)
        centres, radii = state.chunk(2)
        grown = ((high - low) / 2).clamp_min(SMALLEST_RADIUS).minimum(radii * self.growth)
        grown = torch.where(high > low, grown, radii)
        if self.perturb is Perturb.WEIGHTS:
            centres = (high + low) / 2
        return torch.cat([centres, grown])

    def reachable(
        self, state: torch.Tensor, params: torch.Tensor, first: torch.Tensor, round: int
    ) -> bool:
        """As `ClipSchedule.reachable`: whether `state` is possible in `round`.

        Every number that is fixed, or follows from the models, must be exactly so. Radii that grow
        must be from 1e-6 to what `growth` permits by then.
        """
        begin = self.first_state(first)
        if state.shape != begin.shape or not bool(torch.isfinite(state).all()):
            return False
        if round == 1 or not self.adaptive:
            return bool(torch.equal(state, begin))
        centres, radii = state.chunk(2)
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
        """(least, greatest) value of each layer, float64 [layers] each, of values [P]."""
        layers = torch.split(values.to(torch.float64), list(self.tensor_sizes))
        low = torch.stack([layer.min() for layer in layers])
        return low, torch.stack([layer.max() for layer in layers])
