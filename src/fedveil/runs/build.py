"""From a recipe to a training: each section builds its part, and the parts are checked together."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedveil.base.checks import OWN, TABLE, shown
from fedveil.base.errors import BadInput
from fedveil.base.forks import one_thread
from fedveil.data.federated import FederatedData
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.secure import with_secure_noise
from fedveil.runs.modules import Model, add_metrics, module_digest, own_task
from fedveil.runs.recipe import Recipe
from fedveil.runs.sections.client_section import DpSgdSection
from fedveil.runs.sections.noise_section import GaussianSection, PlanInputs
from fedveil.runs.sections.section import in_keys
from fedveil.training.engines.engine import EngineMaker
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.engines.serial import Serial
from fedveil.training.gradients.modes import Mode
from fedveil.training.participants import Participants
from fedveil.training.server import Weights
from fedveil.training.session import Training

_RESAMPLED = (
    "records were drawn with replacement: one may be several clients' own, and the claim is about "
    "one client's copy of it"
)


RECIPE_KEYS = {
    "size": "sample.size",
    "population": "data.clients",
    "max_participations": "sample.max_participations",
    "malicious": "server.malicious",
    "delta": "budget.delta",
    "budgets": "budget.epsilons",
    "published": "budget.as_published",
    "multiplier": "noise.multiplier",
    "epsilon": "noise.epsilon",
    "c2": "noise.c2",
    "source": "noise.source",
    "norm": "clip.norm",
    "noise": "clip.bit_noise",
    "flip": "clip.bit_epsilon",
    "clip_epsilon": "clip.epsilon",
    "shuffled": "shuffle.minimum",
    "minimum": "shuffle.minimum",
    "dishonest": "shuffle.dishonest",
    "metrics": "evaluate.epsilon",
    "mechanism": "noise.kind",
    "schedule": "clip.kind",
}
"""The recipe's keys of arguments that are refused only beside other parts."""


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
    """Build the training of a recipe. Sections that contradict each other are refused.

    `data`, when given, are the caller's own, or what `Recipe.load_data` has loaded already,
    `plan` is the plan of the same recipe with another seed, and `model` the caller's own.
    `allow_code` says that the code which the recipe names may be run. `make_engine` is for clients
    that are not on this machine.
    """
    recipe.check_values()
    recipe.model.check_allowed(allow_code)
    rounds, sampler = recipe.total_rounds, recipe.sample.build()
    # The plan may depend on the work, but the work of DP-SGD depends on the plan.
    work = None if isinstance(recipe.client, DpSgdSection) else recipe.client.build(rounds)
    server = recipe.server.build(rounds)
    data = recipe.load_data(data_root) if data is None else data
    if model is None:
        words = recipe.model.vocabulary(data)
        task = recipe.model.build(
            data.record_shape, data.target, recipe.seed, words, allow_code=allow_code
        )
    else:
        task = own_task(model, data.target)
    add_metrics(task, recipe.evaluate.metrics, model)
    if recipe.model.digest is not None and module_digest(task) != recipe.model.digest:
        raise BadInput(
            f"the module {type(task.module).__name__} is not the one that the run was started "
            "with: its layers, loss, metrics and first weights must be the same; give the same, "
            "made after the same torch.manual_seed"
        )
    if plan is None:
        metrics = recipe.evaluate.build_price(recipe, sampler, data, task)
        inputs = PlanInputs(recipe, sampler, data.clients, work, task, metrics, rounds)
        with in_keys(**RECIPE_KEYS):
            plan = _plan(recipe, inputs)
    on_ray = recipe.engine.kind == "ray" and make_engine is None
    with in_keys(**RECIPE_KEYS):
        return Training(
            task=task,
            data=data,
            plan=plan,
            participants=recipe.attack.build(recipe, data, plan)
            if recipe.attack
            else Participants(),
            aggregate=recipe.server.build_aggregate(),
            work=work or recipe.client.build(rounds, plan.steps),
            server=server,
            weights=Weights(recipe.server.weights),
            seed=recipe.seed,
            mode=None if recipe.engine.mode in (None, "fastest") else Mode(recipe.engine.mode),
            fastest=recipe.engine.mode == "fastest",
            chunk=recipe.engine.chunk,
            memory=recipe.engine.memory,
            workers=recipe.engine.workers,
            cluster=RayCluster(recipe.engine.address) if on_ray else None,
            every=recipe.evaluate.every or 1,
            diagnostics=recipe.evaluate.diagnostics,
            clients_every=recipe.evaluate.rounds_between_clients(rounds),
            make_engine=make_engine,
        )


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


def _plan(recipe: Recipe, inputs: PlanInputs) -> PrivacyPlan:
    """Build the privacy plan of a recipe. Sections that contradict each other are refused."""
    _check_sections(recipe)
    metrics, noise = inputs.metrics, recipe.noise
    beside = metrics if metrics is not None and metrics.of_clients else None
    if beside is not None and noise.where != "server":
        raise BadInput(
            "evaluate.epsilon would measure the clients themselves, and whoever measures sees "
            "records that this recipe keeps from everybody but their client: hold owners out "
            "(data.test = 'by-client'), or leave it out"
        )
    plan = noise.build(replace(inputs, metrics=beside))
    if metrics is not None:
        plan = plan.measuring(metrics, recipe.evaluate.every)
    if recipe.data.resample is not None:
        plan = plan.assuming(_RESAMPLED)
    if noise.source != "secure" or not plan.private:
        return plan
    return with_secure_noise(plan, inputs.task.size, diagnostics=bool(recipe.evaluate.diagnostics))


def _check_sections(recipe: Recipe) -> None:
    """Refuse sections that contradict each other."""
    if recipe.data.resample is not None and recipe.client.kind == "dp-sgd":
        raise BadInput(
            f"data.resample is {recipe.data.resample} and the claim is about one record, of which "
            "a client may then have several copies: leave it out"
        )
    noise, clip, budget = recipe.noise, recipe.clip, recipe.budget
    secure = noise.source == "secure"
    if budget is not None and not noise.claim:
        raise BadInput(
            "budget is given and nothing is claimed (noise.kind 'none' or noise.claim = false): "
            "leave the budget out (--set budget=none) or add noise that is claimed"
        )
    if noise.kind != "none" and clip is None:
        raise BadInput(f"noise.kind is {noise.kind!r} without a [clip]: noise protects nobody")
    if noise.claim and budget is None:
        raise BadInput(
            f"noise.kind is {noise.kind!r} without a [budget]: give at least budget.delta"
        )
    if (
        isinstance(noise, GaussianSection)
        and not noise.claim
        and (noise.where != "server" or noise.multiplier is None)
    ):
        raise BadInput("noise.claim = false is for noise.where = 'server' with a multiplier")
    if secure and not noise.claim:
        raise BadInput("noise.source = 'secure' is for noise that is claimed: use 'seeded'")
    if secure and budget is not None and budget.as_published:
        raise BadInput("budget.as_published is for simulations: use noise.source = 'seeded'")
    if secure and recipe.engine.checkpoint != 1:
        raise BadInput(
            f"engine.checkpoint is {recipe.engine.checkpoint}: with secure noise every round that "
            "is lost is charged again, so a checkpoint is written after each; leave it out"
        )
    if (noise.kind == "two-point") != (clip is not None and clip.kind == "range"):
        raise BadInput("clip.kind 'range' and noise.kind 'two-point' go together")
    if (recipe.client.kind == "dp-sgd") != (noise.where == "training"):
        raise BadInput("client.kind 'dp-sgd' and noise.where = 'training' go together")
    if recipe.shuffle is not None and noise.kind != "two-point":
        raise BadInput("[shuffle] is for noise.kind = 'two-point'")
    if getattr(noise, "c2", None) is not None and not (budget is not None and budget.as_published):
        raise BadInput("noise.c2 is for budget.as_published = true: leave it out")
    if budget is not None and budget.epsilons is not None:
        if not math.isinf(budget.epsilon):
            raise BadInput("budget.epsilon and budget.epsilons contradict each other: give one")
        if not budget.epsilons or noise.where != "client":
            raise BadInput("budget.epsilons is a list of one or more, for noise at the clients")


def check_given(
    recipe: Recipe, model: Model | None, data: FederatedData | None
) -> FederatedData | None:
    """Check the module and records given from Python, and return the records as they are now.

    A recipe that needs one of them is refused without it, and so is one that the recipe ignores.
    """
    for key, named, given in (
        ("model", recipe.model.name, model),
        ("data", recipe.data.name, data),
    ):
        if named == OWN and given is None:
            raise BadInput(
                f"{key}.name is {OWN!r}: this run has {_WORDS[key]} of its own, which no file "
                f"holds; use fedveil.run or fedveil.resume in Python, with {key}="
            )
        remote = isinstance(given, FederatedData) and bool(given.elsewhere)
        if named not in (OWN, TABLE) and given is not None and not remote:
            raise BadInput(
                f"{key} is given and the recipe has {key}.name = {named!r}: leave one out"
            )
    if data is not None and not isinstance(data, FederatedData):
        raise BadInput(f"data is {shown(data)}: make it with FederatedData.from_table or another")
    if data is None or recipe.data.name != OWN:
        return data
    return replace(data)  # whose fingerprint is taken again


_WORDS = {"model": "a module", "data": "records"}
