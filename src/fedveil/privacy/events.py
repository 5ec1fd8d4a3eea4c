"""Events: what was released, as data. They say nothing about epsilon; accountants read them.

Rules of evolution, since ledgers outlive versions: an event is never removed and never changes
its meaning; an event that an accountant does not know is refused.
"""

import math
from dataclasses import dataclass
from typing import Any

from fedveil.errors import BadInput


@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise of standard deviation `multiplier` times the sensitivity.

    The sensitivity is the one under the claim's own relation: S for add-remove and zero-out,
    2 S for replacement. A multiplier of 0 is a release without noise.
    """

    multiplier: float

    def __post_init__(self) -> None:
        if not 0 <= self.multiplier < math.inf:
            raise BadInput(f"noise multiplier is {self.multiplier}: a number >= 0 is needed")


@dataclass(frozen=True)
class PoissonSampled:
    """`event` on a cohort that every unit joins independently with probability `rate`."""

    rate: float
    event: Gaussian

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise BadInput(f"rate is {self.rate}: a probability in (0, 1] is needed")


@dataclass(frozen=True)
class FixedSampled:
    """`event` on a uniformly random cohort of exactly `size` out of `population` units."""

    size: int
    population: int
    event: Gaussian

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.population:
            raise BadInput(f"a cohort of {self.size} out of {self.population} cannot be drawn")


Event = Gaussian | PoissonSampled | FixedSampled


def to_dict(event: Event) -> dict[str, Any]:
    """Plain JSON values, for the ledger.

    >>> to_dict(PoissonSampled(0.1, Gaussian(1.0)))
    {'kind': 'poisson-sampled', 'rate': 0.1, 'event': {'kind': 'gaussian', 'multiplier': 1.0}}
    """
    match event:
        case Gaussian(multiplier):
            return {"kind": "gaussian", "multiplier": multiplier}
        case PoissonSampled(rate, inner):
            return {"kind": "poisson-sampled", "rate": rate, "event": to_dict(inner)}
        case FixedSampled(size, population, inner):
            return {
                "kind": "fixed-sampled",
                "size": size,
                "population": population,
                "event": to_dict(inner),
            }


def from_dict(raw: dict[str, Any]) -> Event:
    """Inverse of `to_dict`; an unknown kind is refused."""
    try:
        match raw["kind"]:
            case "gaussian":
                return Gaussian(float(raw["multiplier"]))
            case "poisson-sampled":
                return PoissonSampled(float(raw["rate"]), _gaussian(raw["event"]))
            case "fixed-sampled":
                return FixedSampled(
                    int(raw["size"]), int(raw["population"]), _gaussian(raw["event"])
                )
            case unknown:
                raise BadInput(f"event kind {unknown!r} is unknown to this version of fedveil")
    except (KeyError, TypeError, ValueError) as e:
        raise BadInput(f"event {raw!r} cannot be read: {e}") from e


def _gaussian(raw: dict[str, Any]) -> Gaussian:
    event = from_dict(raw)
    if not isinstance(event, Gaussian):
        raise BadInput(f"a sampled event holds {raw!r}, which is not a Gaussian")
    return event
