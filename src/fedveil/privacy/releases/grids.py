"""Whether secure noise of a size has a grid of integers, asked before anything is trained."""

import math

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.noise.grid import grid_for
from fedveil.privacy.rows import Norm

_LARGEST_NOISE = 3 * 2.0**30
"""Multiplier x sqrt(parameters), or x parameters in L1: beyond, noise may exceed 2^32 steps."""


def check_grid(
    schedule: ClipSchedule | None, most: float, relation: Relation, parameters: int
) -> None:
    """Refuse noise of up to `most` sensitivities that has no grid."""
    if schedule is None:
        raise AssertionError("noise without a clip was refused")
    clip = schedule.clip(schedule.start(), 1)
    spread = parameters if clip.norm is Norm.L1 else math.sqrt(parameters)
    if most * spread > _LARGEST_NOISE:
        raise BadInput(
            f"noise.multiplier is {most:g}: secure noise on {parameters:,} parameters can be at "
            f"most {_LARGEST_NOISE / spread:.4g} times the clip; use less, or 'seeded'"
        )
    sensitivity = clip.sensitivity(relation)
    grid_for(sensitivity, most * sensitivity, parameters, clip.norm)
