"""The sensitivity of a DP-SGD step in the run's own model: at most the clip.

Noise is switched off, every record joins, and an extreme record is added to a client's own. If the
model mixes records and nobody noticed, the sum of clipped gradients moves by more than the clip.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedveil.audit.bounds import ComputedBound
from fedveil.audit.findings import Finding
from fedveil.audit.randomisers import claim_of, strict_line
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled
from fedveil.privacy.noisy_steps import NoisySteps
from fedveil.training.cohort import CohortData
from fedveil.training.dp_sgd import ClientDpSgd
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.choice import gradients_of
from fedveil.training.session import Training
from fedveil.training.turn import Turn

ATTACK = "sensitivity"
_CLIENTS = 4
_WILD = (1.0, 30.0, 1000.0)
_ROUNDING = 1e-3


def findings(training: Training, seed: int = 0) -> Iterator[Finding]:
    """One finding if clients run DP-SGD on records of real numbers, and none otherwise."""
    plan, data = training.plan, training.data
    line = strict_line(plan)
    if line is None or plan.steps is None or isinstance(data.x, dict) or data.x.dtype.kind != "f":
        return
    reach, tried = _reach(training, np.random.default_rng([seed, 0x5E]))
    turns = line.participations(plan.permitted)
    claim = claim_of(line, turns)
    value = 0.0
    if reach > 1 + _ROUNDING:
        worse = Gaussian(plan.steps.multiplier / reach)
        event = PoissonSampled(plan.steps.rate, worse) if plan.steps.rate < 1 else worse
        value = epsilon(event, line.per * turns, claim.delta, line.relation)
    what = f"a record moves a step by {reach:.4g} clips at most"
    yield Finding(ATTACK, what, claim, ComputedBound(value, tried))


def _reach(training: Training, generator: np.random.Generator) -> tuple[float, int]:
    """(the most that an extreme record moves the sum, in clips; the number of records tried)."""
    plan, engine = training.plan, replace(training, workers=1).engine
    if not isinstance(engine, Serial):
        raise AssertionError("an audit runs in this process")
    data, job = training.data, engine.job
    gradients = gradients_of(job.task, engine.mode, data, mixes=job.mixes, private=True)
    x: Any = data.x
    most, tried = 0.0, 0
    for client in generator.integers(data.clients, size=_CLIENTS):
        own = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
        spread = float(np.asarray(x[own], dtype=np.float64).std()) or 1.0
        for wild in _WILD:
            record = (wild * spread * generator.normal(size=(1, *x.shape[1:]))).astype(x.dtype)
            label = data.y[own][generator.integers(len(data.y[own]), size=1)]
            both = data.with_clients(
                np.concatenate([x[own], x[own], record]),
                np.concatenate([data.y[own], data.y[own], label]),
                np.array([0, len(x[own]), 2 * len(x[own]) + 1], dtype=np.int64),
            )
            sums = []
            for k in (0, 1):
                work = ClientDpSgd(NoisySteps(1.0, 1, 0.0, nominal=1), lr=1.0)
                cohort = CohortData(both, np.array([k]))
                start = training.start()
                clip = plan.clip(start.moving, 1)
                turn = Turn(1, start.params, cohort, clip, gradients, training.streams)
                done: Any = work.updates(turn)
                sums.append(done.rows[0].double())
            if clip is None:
                raise AssertionError("DP-SGD has a clip")
            most = max(most, float(torch.linalg.vector_norm(sums[1] - sums[0])) / clip.value)
            tried += 1
    return most, tried
