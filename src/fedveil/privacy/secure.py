"""Plans whose randomness is the operating system's: the same promise, kept in production."""

import math
from dataclasses import replace

from fedveil.base.errors import BadArgument
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.claims import SEEDED, NoiseSource, Relation, Trust, Unit
from fedveil.privacy.clip import Norm
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.noise.grid import delta_of_sampler, grid_for
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import STEP_DRAWS
from fedveil.privacy.sampling import Poisson

SLIP = 2.0**-20
"""The share of delta that pays for the sampler."""

SECURE = (
    "the operating system's entropy is unpredictable and AES-256 is a good cipher; nobody sees the "
    "memory of a machine that draws noise, or measures its time"
)
KERNELS = (
    "a record's gradient in a batch is the same to the last bit whatever its place and the other "
    "records of the batch are, which is tried on this model and machine before it is relied on"
)
DIAGNOSTICS = (
    "the share of clipped updates, signal/noise, cohort sizes and refused reports were recorded as "
    "asked for: they are computed from private data and outside this claim"
)


def planned_for(budget: Budget) -> Budget:
    """The budget less the sampler's share of delta, with which a plan for secure noise is made.

    `with_secure_noise` adds the share again.
    """
    return Budget(budget.epsilon, budget.delta * (1 - SLIP))


def with_secure_noise(plan: PrivacyPlan, parameters: int, *, diagnostics: bool) -> PrivacyPlan:
    """The plan with secure noise on `parameters` coordinates.

    Args:
        plan: The plan, made with budgets of `planned_for`.
        parameters: The number of coordinates of an update.
        diagnostics: Whether numbers outside the claim are recorded. An assumption then says so.

    Guarantee: docs/proofs/secure.md. Every claim is the plan's own; its delta contains what the
    sampler's distance from the exact law may cost, and a pure claim has that as its delta.

    | edge | behaviour |
    |---|---|
    | nothing is claimed | the plan as it is |
    | noise in every local step | each step's draws count |
    | an epsilon so large that the sampler's share of delta is not enough | BadInput |
    | sums of so many clients that float64 would round them on the grid | BadInput |
    | another account of the same release with such an epsilon | claimed as not vouched for |
    """
    plan = replace(plan, parameters=parameters)
    lines = [
        _secure_line(line, plan, parameters, diagnostics=diagnostics) for line in plan.every_line
    ]
    return plan.with_lines(lines)


def _secure_line(
    line: BudgetLine, plan: PrivacyPlan, parameters: int, *, diagnostics: bool
) -> BudgetLine:
    """The line for secure noise: delta with the sampler's share, its source and assumptions.

    Raises BadArgument if the sampler's share of delta is too small for the claim of all rounds. A
    line that is only another reading is then not vouched for instead.
    """
    whole = line.budget.delta / (1 - SLIP)
    measured = 0 if plan.metrics is None else len(plan.metrics.clip.weights)
    reports = 1  # of a round, among which one client's is hidden: its own, or all that are added up
    if line.trust is Trust.SECURE_SUM or (line.trust is Trust.CENTRAL and plan.release.local):
        reports = plan.population
    elif line.trust is Trust.SHUFFLED:
        everyone = isinstance(plan.sampler, Poisson)
        reports = plan.population if everyone else math.ceil(plan.expected_cohort)
    draws = reports * (parameters + plan.width) + plan.population + measured
    if plan.noisy_steps is not None:
        draws += plan.noisy_steps.steps * (reports * parameters + STEP_DRAWS)
    slip = whole - line.budget.delta
    attempts = 2 * plan.rounds  # the ledger permits no more
    vouched = math.log(slip / delta_of_sampler(draws, attempts, 0.0))
    most = line.claims(line.participations(plan.rounds))[0]
    if most.epsilon > vouched and not line.reading:
        raise BadArgument(
            f"{{source}} is 'secure' and the claim {most.short}: at that size the sampler's "
            "error, however small, cannot be vouched for; lower it, or use 'seeded'",
            "source",
        )
    assumptions = [SECURE if a == SEEDED else a for a in line.assumptions]
    if plan.noisy_steps is not None:
        of_persons = plan.noisy_steps.unit is Unit.PERSON
        assumptions.append(KERNELS.replace("record's", "person's") if of_persons else KERNELS)
    return replace(
        line,
        budget=Budget(line.budget.epsilon, whole),
        noise=NoiseSource.SECURE,
        slip=slip,
        vouched=vouched,
        assumptions=(*assumptions, DIAGNOSTICS) if diagnostics else tuple(assumptions),
    )


_LARGEST_NOISE = 3 * 2.0**30
"""Multiplier x sqrt(parameters), or x parameters in L1: beyond, noise may exceed 2^32 steps."""


def check_grid(
    schedule: ClipSchedule | None, most: float, relation: Relation, parameters: int
) -> None:
    """Raise BadInput if secure noise on this many parameters has no grid.

    Args:
        schedule: The clip schedule, whose first clip counts. None raises AssertionError.
        most: The largest noise multiplier.
        relation: The relation whose sensitivity scales the noise.
        parameters: The number of coordinates.
    """
    if schedule is None:
        raise AssertionError("noise without a clip was refused")
    clip = schedule.clip(schedule.first_value(), 1)
    spread = parameters if clip.norm is Norm.L1 else math.sqrt(parameters)
    if most * spread > _LARGEST_NOISE:
        raise BadArgument(
            f"{{multiplier}} is {most:g}: secure noise on {parameters:,} parameters can be at "
            f"most {_LARGEST_NOISE / spread:.4g} times the clip; use less, or 'seeded'",
            "multiplier",
        )
    sensitivity = clip.sensitivity(relation)
    grid_for(sensitivity, most * sensitivity, parameters, clip.norm)
