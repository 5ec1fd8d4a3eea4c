"""`NoisySteps`: what every local step of DP-SGD has to be for its claim to hold."""

from dataclasses import dataclass

from fedveil.errors import BadInput


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

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise BadInput(f"local.rate is {self.rate}: a probability in (0, 1] is needed")
        if self.steps < 1:
            raise BadInput(f"local.steps is {self.steps}: at least 1 is needed")
        if not self.multiplier >= 0:
            raise BadInput(f"noise.multiplier is {self.multiplier}: a number >= 0 is needed")
        if self.nominal is not None and self.nominal < 1:
            raise BadInput(f"local.nominal is {self.nominal}: at least 1 record is needed")
