"""`Budget`: what may be spent."""

from dataclasses import dataclass

from fedveil.checks import BUDGET, DELTA


@dataclass(frozen=True)
class Budget:
    """What may be spent: epsilon (infinite: report, never stop) at a fixed delta."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        BUDGET.check("epsilon", self.epsilon)
        DELTA.check("delta", self.delta)
