"""`Budget`: the epsilon and delta that may be spent."""

from dataclasses import dataclass

from fedveil.base.checks import BUDGET, DELTA


@dataclass(frozen=True)
class Budget:
    """The epsilon that may be spent at a fixed delta. If infinite, it is only reported."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        BUDGET.check("epsilon", self.epsilon)
        DELTA.check("delta", self.delta)
