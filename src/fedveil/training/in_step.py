"""Several trainings in step: repetitions of a small one as one computation, a cohort of cohorts.

Where a cohort is small, a round is mostly the overhead of its calls. Repetitions differ in their
seeds only, so that the same round of all of them can be one batch of rows, each with its own start
and its own keys. Draws are those of separate trainings; sums differ from theirs by rounding.
"""

import math
from collections.abc import Iterator, Sequence

from fedveil.training.engines.process import keep_memory, one_thread
from fedveil.training.gradients import Mode
from fedveil.training.loop import Course, RoundResult
from fedveil.training.training import Training, new_ledger


def fitting_together(training: Training) -> int:
    """How many repetitions of a training make up a chunk; 1 if they cannot be computed together."""
    if not _can(training):
        return 1
    expected = training.plan.sampler.expected(training.plan.population)
    return max(1, training.engine.chunk // max(1, math.ceil(expected)))


def _can(training: Training) -> bool:
    """Not client by client, which secret noise always is, nor where a bound or range moves.

    What moves with what clients send would be a different one for each repetition.
    """
    plan = training.plan
    moves = plan.ranges is not None or (plan.rule is not None and plan.rule.width > 0)
    return not (training.engine.mode is Mode.LOOPED or moves or training.adversary is not None)


def train_in_step(trainings: Sequence[Training]) -> Iterator[list[tuple[int, RoundResult]]]:
    """Train repetitions of one plan on the same data, a round of all of them at a time.

    Yields (number of the training, its result); one that reaches its budget drops out.
    """
    first = trainings[0]
    if any(t.plan is not first.plan or t.data is not first.data for t in trainings):
        raise AssertionError("in step are repetitions of one plan on the same data")
    if any(t.work != first.work or not _can(t) for t in trainings):
        raise AssertionError("in step is only what can be computed as one block")
    keep_memory(first.task.size)
    courses = [t.course(t.start(), new_ledger(t.plan)) for t in trainings]
    going: list[tuple[int, Course]] = list(enumerate(courses))
    while going:
        with one_thread():
            begun = [(n, course, course.ask()) for n, course in going]
            asked = [(ids, c.state, c.streams) for _, c, ids in begun if ids is not None]
            going = [(n, course) for n, course, ids in begun if ids is not None]
            if not asked:
                return
            sums = first.engine.run_in_step(going[0][1].state.round + 1, asked)
            results = [
                (n, course.take(done)) for (n, course), done in zip(going, sums, strict=True)
            ]
        yield results
