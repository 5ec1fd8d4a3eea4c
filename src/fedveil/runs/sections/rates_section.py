"""How a learning rate changes over the rounds: keys that clients and server have in common."""

from typing import Annotated, Literal

from pydantic import Field

from fedveil.checks import FRACTION, WARMUP

Schedule = Annotated[
    Literal["constant", "linear", "cosine", "step"] | None,
    Field(
        description="How lr changes over the rounds: 'linear' and 'cosine' fall to lr_floor of it, "
        "in a line or along half a cosine; 'step' falls to a tenth after half of the rounds, to a "
        "hundredth after three quarters. Left out: 'constant'."
    ),
]
Warmup = Annotated[
    int | None,
    WARMUP,
    Field(
        description="Rounds in which the learning rate first grows to lr, in equal steps; the "
        "schedule is for the rounds after them. Left out: 0."
    ),
]
LrFloor = Annotated[
    float | None,
    FRACTION,
    Field(
        description="Share of lr that the schedule does not fall below. For schedule 'linear', "
        "'cosine' and 'step'. Left out: 0.0."
    ),
]
