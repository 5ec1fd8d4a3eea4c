"""Whether a plan and what is really run agree: compared before anything is charged.

A claim is about numbers: rates, steps, learning rates, noise, coordinates. Each is written down
once, in the plan. The other parts of a training are compared with the plan here.
"""

import math
from collections.abc import Mapping

from fedveil.base.checks import ANY_COUNT, COUNT, SEED, check_workers, one_of, shown
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import Unit
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import MOST_RECORDS, NoisySteps
from fedveil.training.aggregates import Aggregate
from fedveil.training.gradients.modes import Mode
from fedveil.training.server import RateSchedule, ServerOptimizer, Weights
from fedveil.training.work import ClientDpSgd, ClientSgd, ClientWork, OneGradient, SiteSum

_STEPS_LOOKED_AT = 1 << 16
_ROUNDING = 1e-9
_SPREAD = 6.0


def check_agreement(
    plan: PrivacyPlan,
    work: ClientWork,
    server: ServerOptimizer,
    task: Task,
    data: FederatedData,
    weights: Weights,
) -> None:
    """Raise BadInput for parts of a training that the plan does not account for.

    | given | refused unless |
    |---|---|
    | a plan changed by hand | its lines account for what its parts do |
    | data | they have as many clients as the plan |
    | a claim about records or people | its delta is below 1 / their number |
    | a plan about persons | the data say whose records are whose, and are capped as the plan is |
    | records elsewhere | their numbers are public, for a claim or weights that need them |
    | a plan for DP-SGD | the work is `ClientDpSgd` itself, with the plan's own steps |
    | a plan for sums of sites | the work is `SiteSum` itself, with the plan's own steps |
    | `ClientDpSgd` or `SiteSum` | the plan has noisy steps |
    | a clip per gradient | the work is `ClientSgd`, and its rates add up to at most the accounted |
    | a clip from a median of norms | the work is `OneGradient`, so that norms are unclipped |
    | ranges, secure noise | the model has as many parameters as are accounted |
    | DP-SGD with secure noise | no client has more than 2^24 records |
    | a claim of secure noise | the plan was made by `with_secure_noise` |
    | weights by examples | the plan's release allows unequal weights (`Requirements`) |
    | a learning rate schedule | it is for the plan's number of rounds |
    """
    plan.check_lines()
    if plan.population != data.clients:
        raise BadInput(
            f"the plan is for {plan.population} clients and the data have {data.clients}: make the "
            "plan for these data"
        )
    if plan.secure and (plan.parameters is None or any(not line.slip for line in plan.lines)):
        # such claims are made by `with_secure_noise`, which pays for the sampler
        raise BadInput(
            "the plan claims secure noise and was not made for it: use planned_for and "
            "with_secure_noise"
        )
    if plan.parameters is not None and plan.parameters != task.size:
        raise BadInput(
            f"the plan accounts for {plan.parameters:,} parameters and the model has "
            f"{task.size:,}: make the plan for this model"
        )
    check_units(plan, data)
    within = [line for line in plan.lines if line.unit in (Unit.RECORD, Unit.PERSON)]
    if (within or weights is Weights.EXAMPLES) and 0 in data.elsewhere:
        unknown = data.client_name(data.elsewhere.index(0))
        of_people = plan.noisy_steps is not None and plan.noisy_steps.unit is Unit.PERSON
        raise BadInput(
            f"how many {'people' if of_people else 'records'} client {unknown!r} has is not known "
            "here, and the claim or server.weights needs it: say it in public, or use weights "
            "'uniform' and no claim about records or people"
        )
    for line in within:
        units, name = data.records, "records"
        if line.unit is Unit.PERSON:
            units, name = int(data.people.sum()), "people"
        if line.budget.delta >= 1 / units:
            raise BadInput(
                f"budget.delta is {line.budget.delta:g}, not below 1 / {units} {name}: a delta "
                "that large would allow publishing one outright"
            )
    reason = plan.release.requires.equal_weights
    if weights is Weights.EXAMPLES and reason:
        raise BadInput(f"server.weights is 'examples' {reason}: use 'uniform'")
    _check_work(plan, work)
    if plan.secure and plan.noisy_steps is not None:
        _check_secure_steps(plan.noisy_steps, data)
    for name, part in (("work", work), ("server", server)):
        rates = getattr(part, "schedule", None)
        if isinstance(rates, RateSchedule) and rates.rounds != plan.rounds:
            raise BadInput(
                f"the {name}'s learning rate is for {rates.rounds} rounds and the plan has "
                f"{plan.rounds}: make its schedule for those"
            )


def check_units(plan: PrivacyPlan, data: FederatedData) -> None:
    """Raise BadInput for data whose limits on records are not those of the plan's noisy steps.

    | given | refused if |
    |---|---|
    | steps with a nominal number of records, or a cap | the data have `most_records` |
    | a claim about persons | the steps have no cap |
    | steps with a cap | the data have another cap, or none (`FederatedData.capped`) |

    With `most_records`, one record more or less would change which of a client's other records are
    trained on, and the claim hides how many records there are. Of records at sites the server sees
    the cap alone, so each site makes this check again.
    """
    steps = plan.noisy_steps
    cap, nominal = (None, None) if steps is None else (steps.cap, steps.nominal)
    if data.most_records is not None and (nominal is not None or cap is not None):
        key = "client.nominal" if nominal is not None else "client.cap"
        raise BadInput(
            f"most_records is {data.most_records} and the claim hides how many records a client "
            f"has ({key}), on which it depends which records stay: leave data.most_records out"
        )
    if cap is None:
        if any(line.unit is Unit.PERSON for line in plan.lines):
            raise BadInput("the plan claims to protect persons and its steps have no cap for them")
        return
    if data.cap != cap:
        have = "nobody's" if data.persons is None else "any number of records of a person"
        if data.cap is not None:
            have = f"at most {data.cap} records of a person"
        raise BadInput(
            f"the plan counts at most {cap} records of a person and the data have {have}: say "
            f"whose each record is (persons), and use data.capped({cap})"
        )


def check_aggregate(
    aggregate: Aggregate, plan: PrivacyPlan, task: Task, weights: Weights, memory: int
) -> None:
    """Raise BadInput for an aggregate that a claim, the weights or the memory do not allow.

    `memory` is in MiB.

    | given | refused if |
    |---|---|
    | a class, or an object without `check` and `combine` | always |
    | noise at the server, a shuffler, sites | always: the claim, or the server, has a sum only |
    | weights by examples | always: an aggregate counts all updates alike |
    | the expected cohort | the aggregate's `check` raises for it |
    | a large cohort | its updates take more than `memory` MiB |
    """
    for method in ("check", "combine"):
        if isinstance(aggregate, type) or not callable(getattr(aggregate, method, None)):
            raise BadInput(f"aggregate is {shown(aggregate)}: give an instance of Krum or the like")
    name = type(aggregate).__name__
    requires = plan.release.requires
    reason = requires.only_sum or requires.all_honest
    if reason:
        raise BadInput(
            f"the aggregate {name} looks at updates one by one and {reason}: use "
            "the mean, or protect clients by themselves (noise at the clients, or dp-sgd)"
        )
    if weights is Weights.EXAMPLES:
        raise BadInput(f"server.weights is 'examples' and {name} counts all alike: use 'uniform'")
    aggregate.check(plan.expected_cohort)
    most = plan.expected_cohort + _SPREAD * math.sqrt(plan.expected_cohort)
    needed = math.ceil(min(most, plan.population)) * task.size * 4 / 2**20
    if needed > memory:
        raise BadInput(
            f"the aggregate {name} keeps every update of a round, {needed:,.0f} MiB, and "
            f"engine.memory is {memory}: raise it, or ask fewer clients"
        )


def _check_work(plan: PrivacyPlan, work: ClientWork) -> None:
    """Raise BadInput for local work whose class, noisy steps or rates are not the plan's.

    A plan with noisy steps needs exactly `ClientDpSgd`, or `SiteSum` if sites send sums, with the
    plan's own steps. A plan without them needs any other work. A median of norms needs
    `OneGradient`. A clip per gradient needs `ClientSgd`, whose rates are added up for each round,
    or for the first ones and the last if there are many.
    """
    steps, schedule = plan.noisy_steps, plan.clip_schedule
    right = SiteSum if plan.release.requires.sends_sum else ClientDpSgd
    fits = not isinstance(work, ClientDpSgd | SiteSum) if steps is None else type(work) is right
    if not fits:
        raise BadInput(
            "client.kind 'dp-sgd' and noise.where 'training' go together, and so do sums of sites "
            "(SiteSum) and noise.where 'site'"
        )
    if isinstance(work, ClientDpSgd | SiteSum) and work.noisy != steps:
        made = (
            "SiteSum(plan.noisy_steps)"
            if right is SiteSum
            else "ClientDpSgd(plan.noisy_steps, lr=...)"
        )
        raise BadInput(
            f"the plan accounts for {steps} and the work takes {work.noisy}: make the work as "
            f"{made}"
        )
    if schedule is None:
        return
    if schedule.needs_raw_gradients and not isinstance(work, OneGradient):
        raise BadInput(
            "clip.kind 'median' needs the norms of unclipped gradients: use client.kind = "
            "'gradient'"
        )
    if schedule.rates_allowed(1) is None:
        return
    if not isinstance(work, ClientSgd):
        raise BadInput("clip.each = 'gradient' needs client.kind = 'sgd'")
    # all rounds, or as many as can be checked quickly, and the last
    quick = min(plan.rounds, max(1, _STEPS_LOOKED_AT // (work.batches.steps or 1)))
    for round in (*range(1, quick + 1), plan.rounds):
        taken, accounted = work.reach(round), schedule.rates_allowed(round) or 0.0
        if taken > accounted * (1 + _ROUNDING):
            raise BadInput(
                f"the learning rates of round {round} add up to {taken:g} and the plan accounts "
                f"for {accounted:g}: make the schedule as PerGradient(clip, work.reach)"
            )


def _check_secure_steps(steps: NoisySteps, data: FederatedData) -> None:
    """Raise BadInput if a client has more than 2^24 records, or people if these are sampled.

    A claim of secure noise counts the random words of 2^24 at most.
    """
    sizes, units = data.sizes, "records"
    if steps.unit is Unit.PERSON:
        sizes, units = data.people, "people"
    if int(sizes.max()) > MOST_RECORDS:
        raise BadInput(
            f"client {data.client_name(int(sizes.argmax()))!r} has {sizes.max()} {units}: with "
            f"secure noise at most {MOST_RECORDS} are possible; give that client fewer"
        )


def check_arguments(arguments: Mapping[str, object]) -> None:
    """Raise BadInput for arguments of `Training` that are of a wrong type or out of range.

    `arguments` maps the names of all fields of `Training` to their values.

    | edge | behaviour |
    |---|---|
    | task, data or plan of another class | BadInput, for the plan of a subclass as well |
    | weights "examples", mode "looped" as strings | BadInput: use the enumeration |
    | seed, chunk, memory, workers, every, clients_every | BadInput unless whole and in range |
    | work or server that is a class, or has no `updates` or `step` | BadInput |
    """
    for name, kind in (("task", Task), ("data", FederatedData), ("plan", PrivacyPlan)):
        value = arguments[name]
        if not isinstance(value, kind) or (kind is PrivacyPlan and type(value) is not kind):
            raise BadInput(f"{name} is {shown(value)}: a {kind.__name__} is needed")
    for name, method, such in (
        ("work", "updates", "ClientSgd, ClientDpSgd or OneGradient"),
        ("server", "step", "SgdServer, AdamServer or another server optimiser"),
    ):
        value = arguments[name]
        if isinstance(value, type) or not callable(getattr(value, method, None)):
            raise BadInput(f"{name} is {shown(value)}: an instance of {such} is needed")
    one_of("weights", arguments["weights"], Weights)
    if arguments["mode"] is not None:
        one_of("mode", arguments["mode"], Mode)
    check_workers("workers", arguments["workers"])
    limits = {"seed": SEED, "chunk": ANY_COUNT, "memory": COUNT, "every": COUNT}
    if arguments["clients_every"] is not None:
        limits["clients_every"] = COUNT
    for name, limit in limits.items():
        limit.check(name, arguments[name])
