"""Several trainings in step: those of one plan, if it is small, computed together round by round.

Where a cohort is small, a round is mostly the overhead of its calls. Trainings of one plan differ
in their seeds, or in their clients' records, so that the same round of all of them can be one batch
of rows, each with its own start and its own keys. Draws are those of separate trainings. Sums
differ from theirs by rounding.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fedveil.base.platforms import one_thread
from fedveil.training.engines.engine import keep_memory
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.modes import Mode
from fedveil.training.round import RoundResult
from fedveil.training.session import Training


def repetitions_per_chunk(training: Training) -> int:
    """The number of repetitions of a training that fit into one chunk of its engine, at least 1.

    1 as well if its repetitions cannot be computed together.
    """
    engine = _engine(training)
    if engine is None:
        return 1
    return max(1, engine.chunk // max(1, math.ceil(training.plan.expected_cohort)))


def _engine(training: Training) -> Serial | None:
    """The training's engine if it can compute several repetitions together, otherwise None.

    It can if it runs in this process and is not looped, if noise is seeded, if neither clip nor
    ranges adapt (each repetition would have different ones), and if no client is dishonest.
    """
    engine = training.engine
    if not isinstance(engine, Serial) or engine.mode is Mode.LOOPED:
        return None
    if training.plan.adaptive or training.plan.secure:
        return None
    return engine if training.dishonest is None else None


def train_in_step(trainings: Sequence[Training]) -> Iterator[list[tuple[int, RoundResult]]]:
    """Train one plan several times, on the same data or on others, a round of all at a time.

    Yields for each round a list of pairs (index of a training, its result). A training that reaches
    its budget is missing from then on. Ledgers are in memory, and models are in the results: the
    tasks' modules keep their parameters. AssertionError, when iteration begins, unless all have the
    same plan object and equal work and can be computed together (`repetitions_per_chunk`).
    """
    first = trainings[0]
    if any(t.plan is not first.plan for t in trainings):
        raise AssertionError("trainings in step must have one plan")
    engine = _engine(first)
    if engine is None or any(t.work != first.work or _engine(t) is None for t in trainings):
        raise AssertionError("trainings in step must be computable as one block")
    begins = [0] * len(trainings)
    if any(t.data is not first.data for t in trainings):
        records = first.data.concatenated(*(t.data for t in trainings[1:]))
        engine = replace(engine, job=replace(engine.job, data=records))
        begins = [n * first.data.clients for n in range(len(trainings))]
    keep_memory(first.task.size)
    states = {n: t.start() for n, t in enumerate(trainings)}
    ledgers = [t.new_ledger() for t in trainings]
    while states:
        results: dict[int, RoundResult] = {}
        with one_thread():
            begun = {n: trainings[n].begin(state, ledgers[n]) for n, state in states.items()}
            rounds = {n: round for n, round in begun.items() if round is not None}
            sums = engine.run_in_step([*rounds.values()], [begins[n] for n in rounds])
            for (n, round), total in zip(rounds.items(), sums, strict=True):
                results[n] = trainings[n].end(round, states[n], total, ledgers[n])
        states = {n: result.state for n, result in results.items()}
        if results:
            yield list(results.items())
