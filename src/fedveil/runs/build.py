"""From a recipe to objects: with `data` and `plans`, where a recipe's words are resolved."""

import itertools
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedveil.data.federated import FederatedData
from fedveil.errors import BadInput
from fedveil.inputs import Inputs, single
from fedveil.models.task import Task
from fedveil.models.zoo import Reading, build_task
from fedveil.names import NEXT_WORD, OWN, TEXT_MODELS
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin, Sampler
from fedveil.runs.attack import attack_of
from fedveil.runs.data import data_of
from fedveil.runs.own import FIRST_WEIGHTS, Model, asked_of, check_same, digest_of, own_task
from fedveil.runs.plans import plan_of
from fedveil.runs.recipe import Recipe, check_values
from fedveil.runs.sections.clients import (
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
from fedveil.runs.sections.data import ModelSection
from fedveil.runs.sections.section import Section
from fedveil.runs.sections.server import EvaluateSection, ServerSection
from fedveil.targets import Target
from fedveil.training.aggregates import Aggregate, CoordinateMedian, Flame, Krum, TrimmedMean
from fedveil.training.batches import Batches
from fedveil.training.directions import Adam
from fedveil.training.dp_sgd import ClientDpSgd
from fedveil.training.engines.housekeeping import one_thread
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

_SERVERS: dict[str, type[SgdServer | AdamServer | YogiServer | AdagradServer]] = {
    "sgd": SgdServer,
    "adam": AdamServer,
    "yogi": YogiServer,
    "adagrad": AdagradServer,
}

_MOST_PARAMETERS, _MOST_LAYERS = 1 << 25, 100

_SIZES = {
    "hidden": ("mlp", "lstm", "lstm-lm"),
    "embedding": TEXT_MODELS,
    "layers": ("transformer", "transformer-lm"),
    "heads": ("transformer", "transformer-lm"),
    "words": TEXT_MODELS,
}
"""Which models each key of sizes is for."""

_HIDDEN = {"mlp": (200,), "lstm": (64,), "lstm-lm": (64,)}


@one_thread()
def build(
    recipe: Recipe,
    data_root: Path | None = None,
    *,
    data: FederatedData | None = None,
    plan: PrivacyPlan | None = None,
    model: Model | None = None,
) -> Training:
    """Everything the recipe asks for, checked; what does not go together is refused.

    `data`, when given, are the caller's own, or what `data_of` has made of the recipe already,
    `plan` is the plan of the same recipe with another seed, and `model` the caller's own.
    """
    check_values(recipe)
    rounds, sampler = recipe.total_rounds, _sampler(recipe.sample)
    work, server = _work(recipe.client, rounds), _server(recipe.server, rounds)
    data = data_of(recipe, data_root) if data is None else data
    if model is None:
        words = words_of(recipe.model, data)
        task = task_of(recipe.model, data.record_shape, data.target, recipe.seed, words)
    else:
        task = own_task(model, data.target)
    asked_of(task, recipe.evaluate.metrics, model)
    if model is not None:
        check_same(task, recipe.model.digest)
    if plan is None:
        plan = plan_of(recipe, sampler, data.clients, work, task)
    if model is not None:
        plan = plan.assuming(FIRST_WEIGHTS)
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
        mode=Mode(recipe.engine.mode) if recipe.engine.mode else None,
        chunk=recipe.engine.chunk,
        memory=recipe.engine.memory,
        workers=recipe.engine.workers,
        every=recipe.evaluate.every,
        clients_every=_clients_every(recipe.evaluate, rounds),
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
    engine = training.engine
    if not isinstance(engine, Serial):
        raise AssertionError("recipes run on this machine's engine")
    choice: dict[str, Any] = {"mode": str(engine.mode), "chunk": engine.chunk}
    if training.mode is None:
        choice["timings"] = {str(mode): time for mode, time in training.timings.items()}
    changes: dict[str, Any] = {"noise": noise, "engine": recipe.engine.model_copy(update=choice)}
    if recipe.model.name == OWN:
        changes["model"] = recipe.model.model_copy(update={"digest": digest_of(training.task)})
    return recipe.model_copy(update=changes)


def task_of(
    section: ModelSection,
    shape: Inputs[tuple[int, ...]],
    target: Target,
    seed: int,
    words: int,
) -> Task:
    """The model of the zoo that a recipe names, for records of that shape, of so many words."""
    for key in _SIZES:
        if getattr(section, key) is not None and section.name not in _SIZES[key]:
            raise BadInput(f"model.{key} has no effect on {section.name!r}: leave it out")
    if section.digest is not None:
        raise BadInput("model.digest is what a run records of an own module: leave it out")
    if isinstance(shape, dict):
        raise BadInput(
            f"model {section.name!r} takes one array per record and the data have inputs by name "
            f"({', '.join(shape)}): bring a module (fedveil.run(model=...))"
        )
    _check_target(section.name, shape, target)
    hidden = tuple(section.hidden or ()) or _HIDDEN.get(section.name, ())
    reading, outputs = None, target.classes or 1
    if section.name in TEXT_MODELS:
        reading = Reading(words, **_given(section, "embedding", "layers", "heads"))
        _check_count(reading.count(section.name, shape, hidden, outputs))
    else:
        _check_widths(math.prod(shape), hidden, outputs)
    return build_task(
        section.name, shape, target.classes, seed=seed, hidden=hidden, reading=reading
    )


def _check_target(name: str, shape: tuple[int, ...], target: Target) -> None:
    """Refuse a model of the zoo that predicts something else than the data have."""
    if name in NEXT_WORD:
        if not target.classes or target.shape != shape:
            raise BadInput(
                f"model {name!r} predicts the next word in each place of a text and the data have "
                f"{target}: make a column of texts the target, or use another model"
            )
    elif not target.plain:
        raise BadInput(
            f"model {name!r} predicts one label or one number per record and the data have "
            f"{target}: bring a module (fedveil.run(model=...))"
        )


def words_of(section: ModelSection, data: FederatedData) -> int:
    """How many numbers stand for words in records that are texts; 0 for other models."""
    if section.name not in TEXT_MODELS:
        return 0
    told = 0 if data.schema is None else data.schema.words
    if told:
        if section.words not in (None, told):
            raise BadInput(
                f"model.words is {section.words} and the data's vocabulary has {told}: leave it out"
            )
        return told
    if section.words is None or isinstance(data.x, dict) or data.x.dtype.kind not in "iu":
        raise BadInput(
            f"model {section.name!r} reads texts and the records have no vocabulary: declare a "
            "column of texts (data.columns.NAME.length), or give model.words for records that are "
            "rows of whole numbers"
        )
    for name, records in (("", data.x), ("test ", single(data.test_x))):
        low, high = int(records.min()), int(records.max())
        if low < 0 or high >= section.words:
            raise BadInput(
                f"model.words is {section.words} and {name}records have numbers from {low} to "
                f"{high}: they are to be 0 to {section.words - 1}"
            )
    return section.words


def _check_widths(features: int, hidden: tuple[int, ...], outputs: int) -> None:
    """Refuse hidden layers that would fill the memory, before there are any."""
    if len(hidden) > _MOST_LAYERS:
        raise BadInput(
            f"model.hidden has {len(hidden)} layers: at most {_MOST_LAYERS} are possible"
        )
    widths = (features, *hidden, outputs)
    if min(widths) > 0:
        _check_count(sum((a + 1) * b for a, b in itertools.pairwise(widths)))


def _check_count(count: int) -> None:
    if count > _MOST_PARAMETERS:
        raise BadInput(
            f"the model's sizes ask for {count:,} parameters: at most {_MOST_PARAMETERS:,} are "
            "possible"
        )


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
    kind = _SERVERS[section.optimizer]
    given = _given(section, "lr", *_MOMENTS)
    if section.momentum:
        given["momentum"] = section.momentum
    for key in given.keys() - {field.name for field in fields(kind)}:
        raise BadInput(f"server.{key} has no effect on {section.optimizer}: leave it out")
    return kind(**given, schedule=_rates("server", section, rounds))
