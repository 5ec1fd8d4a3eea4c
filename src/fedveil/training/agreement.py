"""Whether a plan and what is really run agree: compared before anything is charged.

A claim is about numbers: rates, steps, learning rates, noise, coordinates. Each is written down
once, in the plan; what a training is given besides is held to it here.
"""

import math
from collections.abc import Iterator

from fedveil.base.checks import ANY_COUNT, COUNT, SEED, check_workers, one_of, shown
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import Unit
from fedveil.privacy.clip_schedules import ClipSchedule
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.aggregates import Aggregate
from fedveil.training.gradients.modes import Mode
from fedveil.training.server import Weights
from fedveil.training.work import ClientDpSgd, ClientSgd, ClientWork, OneGradient

_STEPS_LOOKED_AT = 1 << 16
_ROUNDING = 1e-9
_SPREAD = 6.0


def check_agreement(
    plan: PrivacyPlan, work: ClientWork, task: Task, data: FederatedData, weights: Weights
) -> None:
    """Refuse what the plan's account is not about.

    | given | refused unless |
    |---|---|
    | a plan changed by hand | its lines account for what its parts do |
    | data | they have as many clients as the plan; delta is below 1 / records at record level |
    | records elsewhere | their numbers are public, for a claim or weights that need them |
    | a plan for DP-SGD | the work is `ClientDpSgd` itself, with the plan's own steps |
    | DP-SGD | the plan is for it |
    | a clip per gradient | the work is `ClientSgd`, and its rates add up to what is accounted |
    | a median of norms | the work is one gradient, whose norm is not clipped before |
    | ranges, secure noise | the model has as many parameters as are accounted |
    | a claim of secure noise | the plan was made by `with_secure_noise` |
    | weights by examples | nothing is claimed about how many records a client has |
    """
    plan.check_lines()
    if plan.population != data.clients:
        raise BadInput(
            f"the plan is for {plan.population} clients and the data have {data.clients}"
        )
    if plan.secure:
        _check_secure(plan)
    if plan.parameters is not None and plan.parameters != task.size:
        raise BadInput(
            f"the plan accounts for {plan.parameters:,} parameters and the model has "
            f"{task.size:,}: make the plan for this model"
        )
    by_records = weights is Weights.EXAMPLES or any(line.unit is Unit.RECORD for line in plan.lines)
    if by_records and 0 in data.elsewhere:
        unknown = data.client_name(data.elsewhere.index(0))
        raise BadInput(
            f"how many records client {unknown!r} has is not known here, and the claim or "
            "server.weights needs it: say it in public, or use weights 'uniform' and no claim "
            "about records"
        )
    for line in plan.lines:
        if line.unit is Unit.RECORD and line.budget.delta >= 1 / data.records:
            raise BadInput(
                f"budget.delta is {line.budget.delta:g}, not below 1 / {data.records} "
                "records: a delta that large would allow publishing one outright"
            )
    reason = plan.release.requires.equal_weights
    if weights is Weights.EXAMPLES and reason:
        raise BadInput(f"server.weights is 'examples' {reason}: use 'uniform'")
    _check_steps(plan, work)
    if plan.schedule is not None:
        _check_schedule(plan.schedule, plan.rounds, work)


def check_aggregate(
    aggregate: Aggregate, plan: PrivacyPlan, task: Task, weights: Weights, memory: int
) -> None:
    """Refuse an aggregate of rows that a claim, weights or the memory do not allow.

    | given | refused if |
    |---|---|
    | noise for the sum, a shuffler | always: the claim, or what a server sees, is a sum |
    | weights by examples | always: rows count alike |
    | a cohort of which the rows do not fit | they take more than `memory` MiB |
    """
    for method in ("check", "combine"):
        if isinstance(aggregate, type) or not callable(getattr(aggregate, method, None)):
            raise BadInput(f"aggregate is {shown(aggregate)}: an instance of Krum or another")
    name = type(aggregate).__name__
    reason = plan.release.requires.only_sum
    if reason:
        raise BadInput(
            f"the aggregate {name} looks at updates one by one and {reason}: use "
            "the mean, or protect clients by themselves (noise at the clients, or dp-sgd)"
        )
    if weights is Weights.EXAMPLES:
        raise BadInput(f"server.weights is 'examples' and {name} counts all alike: use 'uniform'")
    aggregate.check(plan.expected)
    most = plan.expected + _SPREAD * math.sqrt(plan.expected)
    needed = math.ceil(min(most, plan.population)) * task.size * 4 / 2**20
    if needed > memory:
        raise BadInput(
            f"the aggregate {name} keeps every update of a round, {needed:,.0f} MiB, and "
            f"engine.memory is {memory}: raise it, or ask fewer clients"
        )


def _check_secure(plan: PrivacyPlan) -> None:
    """Claims of secure noise are made by `with_secure_noise`, which pays for the sampler."""
    if plan.parameters is None or any(not line.slip for line in plan.lines):
        raise BadInput(
            "the plan claims secure noise and was not made for it: use planned_for and "
            "with_secure_noise"
        )


def _check_steps(plan: PrivacyPlan, work: ClientWork) -> None:
    """DP-SGD protects inside the work, so that the work is ours and takes the plan's steps."""
    steps = plan.steps
    if steps is None and not isinstance(work, ClientDpSgd):
        return
    if steps is None or type(work) is not ClientDpSgd:
        raise BadInput("client.kind 'dp-sgd' and noise.where 'training' go together")
    if work.noisy != steps:
        raise BadInput(
            f"the plan accounts for {steps} and the work takes {work.noisy}: make the work as "
            "ClientDpSgd(plan.steps, lr=...)"
        )


def _check_schedule(schedule: ClipSchedule, rounds: int, work: ClientWork) -> None:
    if schedule.needs_raw_gradients and not isinstance(work, OneGradient):
        raise BadInput(
            "clip.kind 'median' needs the norms of unclipped gradients: use client.kind = "
            "'gradient'"
        )
    if schedule.rates_allowed(1) is None:
        return
    if not isinstance(work, ClientSgd):
        raise BadInput("clip.each = 'gradient' needs client.kind = 'sgd'")
    for round in _looked_at(rounds, work.batches.steps or 1):
        taken, accounted = work.reach(round), schedule.rates_allowed(round) or 0.0
        if taken > accounted * (1 + _ROUNDING):
            raise BadInput(
                f"the learning rates of round {round} add up to {taken:g} and the plan accounts "
                f"for {accounted:g}: make the schedule as PerGradient(clip, work.reach)"
            )


def _looked_at(rounds: int, steps: int) -> Iterator[int]:
    """The rounds to check: all, or as many as can be checked quickly, and the last."""
    yield from range(1, min(rounds, max(1, _STEPS_LOOKED_AT // steps)) + 1)
    yield rounds


def check_arguments(
    *,
    task: object,
    data: object,
    plan: object,
    work: object,
    server: object,
    weights: object,
    seed: object,
    mode: object,
    chunk: object,
    memory: object,
    workers: object,
    every: object,
    clients_every: object,
) -> None:
    """Refuse arguments of `Training` of a wrong type or out of range, each by itself.

    | edge | behaviour |
    |---|---|
    | weights "examples", mode "looped" as strings | BadInput: use the enumeration |
    | seed, chunk, memory, workers or every that is not whole | BadInput |
    | work or server that is a class and not one of its instances | BadInput |
    """
    for name, value, kind in (
        ("task", task, Task),
        ("data", data, FederatedData),
        ("plan", plan, PrivacyPlan),
    ):
        if not isinstance(value, kind) or (kind is PrivacyPlan and type(value) is not kind):
            raise BadInput(f"{name} is {shown(value)}: a {kind.__name__} is needed")
    _check_method("work", work, "updates", "ClientSgd, ClientDpSgd or OneGradient")
    _check_method("server", server, "step", "SgdServer, AdamServer or another server optimiser")
    one_of("weights", weights, Weights)
    if mode is not None:
        one_of("mode", mode, Mode)
    SEED.check("seed", seed)
    ANY_COUNT.check("chunk", chunk)
    COUNT.check("memory", memory)
    check_workers("workers", workers)
    COUNT.check("every", every)
    if clients_every is not None:
        COUNT.check("clients_every", clients_every)


def _check_method(name: str, value: object, method: str, such: str) -> None:
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        raise BadInput(f"{name} is {shown(value)}: an instance of {such} is needed")
