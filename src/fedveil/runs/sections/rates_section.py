"""How a learning rate changes over the rounds: keys that clients and server have in common."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedveil.base.checks import FRACTION, WARMUP
from fedveil.runs.sections.section import in_keys

if TYPE_CHECKING:
    from fedveil.runs.sections.client_section import DpSgdSection, SgdSection
    from fedveil.runs.sections.server_section import ServerSection
    from fedveil.training.rates import RateSchedule

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


def build_rates(
    where: str, section: "SgdSection | DpSgdSection | ServerSection", rounds: int
) -> "RateSchedule | None":
    """How the learning rate of the section called `where` changes; None if it does not."""
    from fedveil.training.rates import RateSchedule, RateShape

    shape, warmup = RateShape(section.schedule or "constant"), section.warmup or 0
    floor = section.lr_floor or 0.0
    if shape is RateShape.CONSTANT and not warmup and not floor:
        return None
    with in_keys(where, shape=f"{where}.schedule", floor=f"{where}.lr_floor"):
        return RateSchedule(shape, rounds, warmup, floor)
