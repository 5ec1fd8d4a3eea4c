"""`NoisySteps`: what every local step of DP-SGD has to be for its claim to hold."""

from dataclasses import dataclass

from fedveil.base.checks import MULTIPLIER, NOMINAL, RATE, STEPS
from fedveil.base.identity import Stated


@dataclass(frozen=True)
class NoisySteps:
    """`steps` steps a round, on records that join with `rate`, with noise of `multiplier` clips.

    A sum is divided by rate x n, where n is the client's public number of records, or `nominal`
    for everyone. A plan makes this, its account counts it, and the work is made from it: nobody
    types these numbers twice.

    | edge | behaviour |
    |---|---|
    | rate outside (0, 1], steps < 1, nominal < 1, multiplier < 0 | BadInput |
    """

    rate: float
    steps: int
    multiplier: float
    nominal: int | None = None

    @property
    def identity(self) -> Stated:
        return (
            ("steps", "noisy"),
            ("rate", self.rate),
            ("count", self.steps),
            ("multiplier", self.multiplier),
            ("nominal", self.nominal),
        )

    def __post_init__(self) -> None:
        RATE.check("rate", self.rate)
        STEPS.check("steps", self.steps)
        MULTIPLIER.check("multiplier", self.multiplier)
        if self.nominal is not None:
            NOMINAL.check("nominal", self.nominal)
