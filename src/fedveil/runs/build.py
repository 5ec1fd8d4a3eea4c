"""From a recipe to objects: with `data` and `plans`, where a recipe's words are resolved."""

from pathlib import Path
from typing import Any

from fedveil.data.federated import FederatedData
from fedveil.errors import BadInput
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin, Sampler
from fedveil.runs.attackers import attack_of
from fedveil.runs.models import task_of, words_of
from fedveil.runs.own import Model, asked_of, check_same, module_digest, own_task
from fedveil.runs.plans import plan_of, priced_of
from fedveil.runs.recipe import Recipe
from fedveil.runs.records import data_of
from fedveil.runs.sections.client_section import (
    ClientSection,
    DpSgdSection,
    EveryoneSection,
    FixedSection,
    GradientSection,
    PoissonSection,
    RoundRobinSection,
    SampleSection,
    SgdSection,
)
from fedveil.runs.sections.section import Section
from fedveil.runs.sections.server_section import EngineSection, EvaluateSection, ServerSection
from fedveil.training.aggregates import Aggregate, CoordinateMedian, Flame, Krum, TrimmedMean
from fedveil.training.batches import Batches
from fedveil.training.directions import Adam
from fedveil.training.dp_sgd import ClientDpSgd
from fedveil.training.engines.engine import EngineMaker
from fedveil.training.engines.housekeeping import one_thread
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.choice import Mode
from fedveil.training.rates import RateSchedule, RateShape
from fedveil.training.server import (
    AdagradServer,
    AdamServer,
    ServerOptimizer,
    SgdServer,
    Weights,
    YogiServer,
)
from fedveil.training.session import Training
from fedveil.training.work import ClientSgd, ClientWork, Decay, OneGradient

_MOMENTS = ("beta1", "beta2", "floor")

_SERVERS: dict[
    str, tuple[type[SgdServer | AdamServer | YogiServer | AdagradServer], tuple[str, ...]]
] = {
    "sgd": (SgdServer, ("lr", "momentum")),
    "adam": (AdamServer, ("lr", *_MOMENTS)),
    "yogi": (YogiServer, ("lr", *_MOMENTS)),
    "adagrad": (AdagradServer, ("lr", "floor")),
}
"""The server optimisers and the keys of [server] that they take."""


@one_thread()
def build(
    recipe: Recipe,
    data_root: Path | None = None,
    *,
    data: FederatedData | None = None,
    plan: PrivacyPlan | None = None,
    model: Model | None = None,
    allow_code: bool = False,
    make_engine: EngineMaker | None = None,
) -> Training:
    """Everything the recipe asks for, checked; what does not go together is refused.

    `data`, when given, are the caller's own, or what `data_of` has made of the recipe already,
    `plan` is the plan of the same recipe with another seed, and `model` the caller's own.
    `allow_code` says that the code which the recipe names may be run. `make_engine` is for clients
    that are not on this machine.
    """
    recipe.check_values()
    recipe.model.check_allowed(allow_code)
    rounds, sampler = recipe.total_rounds, _sampler(recipe.sample)
    work, server = _work(recipe.client, rounds), _server(recipe.server, rounds)
    data = data_of(recipe, data_root) if data is None else data
    if model is None:
        words = words_of(recipe.model, data)
        task = task_of(
            *(recipe.model, data.record_shape, data.target, recipe.seed, words),
            allow_code=allow_code,
        )
    else:
        task = own_task(model, data.target)
    asked_of(task, recipe.evaluate.metrics, model)
    check_same(task, recipe.model.digest)
    if plan is None:
        metrics = priced_of(recipe, sampler, data, task)
        plan = plan_of(recipe, sampler, data.clients, work, task, metrics)
    return Training(
        task=task,
        data=data,
        plan=plan,
        adversary=attack_of(recipe, data, plan),
        aggregate=_aggregate(recipe.server),
        work=work or _dp_sgd(recipe.client, plan, rounds),
        server=server,
        weights=Weights(recipe.server.weights),
        seed=recipe.seed,
        mode=None if recipe.engine.mode in (None, "fastest") else Mode(recipe.engine.mode),
        fastest=recipe.engine.mode == "fastest",
        chunk=recipe.engine.chunk,
        memory=recipe.engine.memory,
        workers=recipe.engine.workers,
        cluster=None if make_engine else _cluster(recipe.engine),
        every=recipe.evaluate.every or 1,
        diagnostics=recipe.evaluate.diagnostics,
        clients_every=_clients_every(recipe.evaluate, rounds),
        make_engine=make_engine,
    )


def _clients_every(section: EvaluateSection, rounds: int) -> int | None:
    """How often the model is measured across clients; None for never."""
    if not section.clients:
        if section.clients_every is not None:
            raise BadInput("evaluate.clients_every has no effect without evaluate.clients = true")
        return None
    if section.diagnostics is False:
        raise BadInput(
            "evaluate.clients is a diagnostic and evaluate.diagnostics is false: leave one out"
        )
    return section.clients_every or rounds


def resolved(recipe: Recipe, training: Training) -> Recipe:
    """The recipe with every choice that was left open filled in, so that it can be repeated.

    Noise that clients do not have in common, or that updates share with an adaptive clip's bits,
    is no single multiplier of a recipe: it is found from the budget again.
    """
    noise, plan = recipe.noise, training.plan
    noise = noise.model_copy(update=plan.release.settings(plan.schedule))
    engine, choice = training.engine, dict[str, Any]()
    if isinstance(engine, Serial):
        choice = {"mode": str(engine.mode), "chunk": engine.chunk}
        if training.timings:
            choice["timings"] = {str(mode): time for mode, time in training.timings.items()}
    changes: dict[str, Any] = {"noise": noise, "engine": recipe.engine.model_copy(update=choice)}
    if recipe.model.recorded:
        changes["model"] = recipe.model.model_copy(update={"digest": module_digest(training.task)})
    return recipe.model_copy(update=changes)


def _cluster(section: EngineSection) -> RayCluster | None:
    return RayCluster(section.address) if section.kind == "ray" else None


def _sampler(section: SampleSection) -> Sampler:
    match section:
        case PoissonSection():
            return Poisson(section.rate)
        case FixedSection():
            return FixedSize(section.size, section.max_participations)
        case RoundRobinSection():
            return RoundRobin(section.size)
        case EveryoneSection():
            return Everyone()


def _work(section: ClientSection, rounds: int) -> ClientWork | None:
    """The local work, or None for DP-SGD, whose noise the plan has yet to find."""
    if isinstance(section, DpSgdSection):
        return None
    if isinstance(section, GradientSection):
        return OneGradient()
    batches = Batches(section.batch, section.epochs, section.steps)
    decay = None
    if section.mu is not None or section.gamma is not None:
        if section.mu is None or section.gamma is None or section.lr is not None:
            raise BadInput("give client.lr, or both client.mu and client.gamma, not a mixture")
        if section.steps is None:
            raise BadInput("client.mu and client.gamma count local steps: give client.steps")
        decay = Decay(section.mu, section.gamma)
    elif section.lr is None:
        raise BadInput("client.lr is missing")
    lr = section.lr if decay is None or section.lr is not None else decay.rate(0)
    return ClientSgd(
        batches,
        lr or 0.0,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
        decay=decay,
        proximal=section.proximal or 0.0,
        adam=_adam(section),
        schedule=_rates("client", section, rounds),
    )


def _adam(section: SgdSection | DpSgdSection) -> Adam | None:
    """Adam at the clients, with what is left out as its own default; None for 'sgd'."""
    given = _given(section, *_MOMENTS)
    if section.optimizer == "adam":
        return Adam(**given)
    if given:
        key = next(iter(given))
        raise BadInput(f"client.{key} has no effect on sgd: leave it out, or use adam")
    return None


def _dp_sgd(section: ClientSection, plan: PrivacyPlan, rounds: int) -> ClientWork:
    steps = plan.steps
    if not isinstance(section, DpSgdSection) or steps is None:
        raise AssertionError("only DP-SGD is made from its plan")
    return ClientDpSgd(
        steps,
        section.lr,
        momentum=section.momentum or 0.0,
        weight_decay=section.weight_decay or 0.0,
        proximal=section.proximal or 0.0,
        adam=_adam(section),
        schedule=_rates("client", section, rounds),
    )


def _rates(
    name: str, section: SgdSection | DpSgdSection | ServerSection, rounds: int
) -> RateSchedule | None:
    """How the learning rate of a section changes over the rounds; None if it does not."""
    shape, warmup = RateShape(section.schedule or "constant"), section.warmup or 0
    floor = section.lr_floor or 0.0
    if shape is RateShape.CONSTANT and not warmup and not floor:
        return None
    try:
        return RateSchedule(shape, rounds, warmup, floor)
    except BadInput as e:
        raise BadInput(f"{name}.{e}") from e


def _aggregate(section: ServerSection) -> Aggregate | None:
    """What takes the place of the mean; None for the mean itself."""
    kind = section.aggregate
    allowed = {"trim": ("trimmed-mean",), "malicious": ("krum", "multi-krum")}
    for key in _given(section, *allowed):
        if kind not in allowed[key]:
            raise BadInput(f"server.{key} has no effect on {kind}: leave it out")
    expected = 1 if section.malicious is None else section.malicious
    match kind:
        case "mean":
            return None
        case "median":
            return CoordinateMedian()
        case "trimmed-mean":
            return TrimmedMean(**_given(section, "trim"))
        case "krum":
            return Krum(expected)
        case "multi-krum":
            return Krum(expected, chosen=None)
        case "flame":
            return Flame()


def _given(section: Section, *keys: str) -> dict[str, Any]:
    """The keys that were not left out."""
    return {key: value for key in keys if (value := getattr(section, key)) is not None}


def _server(section: ServerSection, rounds: int) -> ServerOptimizer:
    kind, known = _SERVERS[section.optimizer]
    given = _given(section, "lr", *_MOMENTS)
    if section.momentum:
        given["momentum"] = section.momentum
    for key in given.keys() - set(known):
        raise BadInput(f"server.{key} has no effect on {section.optimizer}: leave it out")
    return kind(**given, schedule=_rates("server", section, rounds))
