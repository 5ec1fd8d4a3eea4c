"""From a recipe to a training: each section builds its part, and the parts are checked together."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from fedveil.base.checks import OWN, TABLE, TEXT_MODELS, shown
from fedveil.base.errors import BadInput
from fedveil.base.platforms import one_thread
from fedveil.data.federated import FederatedData
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.priced_metrics import PricedMetrics
from fedveil.privacy.secure import with_secure_noise
from fedveil.privacy.site_metrics import SiteMetrics
from fedveil.runs.modules import Model, module_digest, own_task, set_metrics
from fedveil.runs.recipe import Recipe
from fedveil.runs.sections.client_section import DpSgdSection, client_cap, samples_people
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
    "share": "noise.share",
    "unit": "client.unit",
    "cap": "client.cap",
    "threshold": "sum.threshold",
    "honest": "sum.honest",
    "bits": "sum.bits",
}
"""The recipe's key of each argument that another part of the training may refuse."""


class BuildOptions(TypedDict, total=False):
    """The arguments of `build` that a run passes on."""

    model: Model | None
    data: FederatedData | None
    allow_code: bool
    make_engine: EngineMaker | None
    on_step: Callable[[str], None]


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
    on_step: Callable[[str], None] = lambda step: None,
) -> Training:
    """Build the training of a recipe. Raises BadInput for a recipe, data or model that is refused.

    Nothing is written or charged. The caller's module is copied, not trained.

    Args:
        recipe: What to train.
        data_root: The folder with published data sets, None for that in FEDVEIL_DATA.
        data: The caller's own records, or those that `Recipe.load_data` has loaded already. None
            loads the recipe's.
        plan: The plan of the same recipe with another seed. None builds it.
        model: The caller's own module or task. None builds the recipe's.
        allow_code: Whether the code that the recipe names (model.path) may be run.
        make_engine: Makes an engine for clients that are not on this machine.
        on_step: Called with what is done next, such as "reading data".
    """
    recipe.check_values()
    recipe.model.check_allowed(allow_code)
    rounds, sampler, evaluate = recipe.rounds, recipe.sample.build(), recipe.evaluate
    # The plan may depend on the work, but the work of DP-SGD depends on the plan.
    from_plan = isinstance(recipe.client, DpSgdSection) or recipe.noise.where == "site"
    work = None if from_plan else recipe.client.build(rounds)
    server = recipe.server.build(rounds)
    on_step("reading data")
    data = recipe.load_data(data_root) if data is None else data
    cap = client_cap(recipe.client)
    if cap is not None:
        data = data.capped(cap)
    on_step("building the model")
    if model is None:
        words = recipe.model.vocabulary(data) if recipe.model.name in TEXT_MODELS else 0
        task = recipe.model.build(
            data.record_shape, data.target, recipe.seed, words, allow_code=allow_code
        )
    else:
        with in_keys("model"):
            task = own_task(model, data.target, recipe.model.class_weights)
    if evaluate.metrics is not None:
        set_metrics(task, evaluate.metrics, model)
    if recipe.model.digest is not None and module_digest(task) != recipe.model.digest:
        raise BadInput(
            f"the module {type(task.module).__name__} is not the one that the run was started "
            "with: its layers, loss, metrics and first weights must be the same; give the same, "
            "made after the same torch.manual_seed"
        )
    on_step("solving for the noise")
    if plan is None:
        priced = evaluate.epsilon is not None
        metrics = evaluate.build_price(recipe, sampler, data, task) if priced else None
        units = sum(unit_counts(recipe, data))
        inputs = PlanInputs(recipe, sampler, data.clients, work, task, None, rounds, units)
        with in_keys(recipe=recipe, **RECIPE_KEYS):
            plan = _build_plan(recipe, inputs, metrics)
    on_step("trying the model")
    on_ray = recipe.engine.kind == "ray" and make_engine is None
    with in_keys(recipe=recipe, **RECIPE_KEYS):
        return Training(
            task=task,
            data=data,
            plan=plan,
            participants=recipe.attack.build(recipe, data, plan)
            if recipe.attack
            else Participants(),
            aggregate=recipe.server.build_aggregate(),
            work=work or recipe.client.build(rounds, plan.noisy_steps),
            server=server,
            weights=Weights(recipe.server.weights),
            seed=recipe.seed,
            mode=None if recipe.engine.mode in (None, "fastest") else Mode(recipe.engine.mode),
            fastest=recipe.engine.mode == "fastest",
            chunk=recipe.engine.chunk,
            memory=recipe.engine.memory,
            workers=recipe.engine.workers,
            cluster=RayCluster(recipe.engine.address) if on_ray else None,
            every=evaluate.every or 1,
            diagnostics=evaluate.diagnostics,
            clients_every=(evaluate.clients_every or rounds) if evaluate.clients else None,
            make_engine=make_engine,
        )


def unit_counts(recipe: Recipe, data: FederatedData) -> list[int]:
    """Return each client's number of people if the recipe samples people, otherwise of records.

    If the recipe has a cap, `data` must be capped already.
    """
    counts = data.people if samples_people(recipe.client) else data.sizes
    return [int(count) for count in counts]


def resolve_recipe(recipe: Recipe, training: Training) -> Recipe:
    """Return a copy of the recipe with the noise, engine mode and chunk, and digest of `training`.

    So filled in, it can be repeated. Noise that differs between clients, or that updates share with
    an adaptive clip's bits, has no single multiplier and is left as it is: it is found from the
    budget again. The model's digest is filled in only for modules that the recipe does not define.
    """
    noise, plan = recipe.noise, training.plan
    noise = noise.model_copy(update=plan.release.settings(plan.clip_schedule))
    engine, choice = training.engine, dict[str, Any]()
    if isinstance(engine, Serial):
        choice = {"mode": str(engine.mode), "chunk": engine.chunk}
        if training.fastest:
            choice["timings"] = {str(mode): time for mode, time in training.timings.items()}
    changes: dict[str, Any] = {"noise": noise, "engine": recipe.engine.model_copy(update=choice)}
    if recipe.model.needs_digest:
        changes["model"] = recipe.model.model_copy(update={"digest": module_digest(training.task)})
    return recipe.model_copy(update=changes)


def _build_plan(
    recipe: Recipe, inputs: PlanInputs, metrics: PricedMetrics | SiteMetrics | None
) -> PrivacyPlan:
    """Build the privacy plan of a recipe, with priced `metrics` and secure noise if it has any.

    Raises BadInput if sections contradict each other, or metrics would measure clients that protect
    themselves.
    """
    _check_sections(recipe)
    noise, beside = recipe.noise, None
    if isinstance(metrics, PricedMetrics) and metrics.of_clients:
        beside = metrics
    if beside is not None and (noise.where != "server" or recipe.sum is not None):
        raise BadInput(
            "evaluate.epsilon would measure the clients themselves, and whoever measures sees "
            "records that this recipe keeps from everybody but their client: hold owners out "
            "(data.test = 'by-client'), or omit it"
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
    """Raise BadInput if keys of a recipe contradict each other, mostly across sections."""
    evaluate = recipe.evaluate
    for key in (
        evaluate.present_values("delta", "loss_clip", "where") if evaluate.epsilon is None else ()
    ):
        raise BadInput(f"evaluate.{key} has no effect without evaluate.epsilon")
    if evaluate.clients_every is not None and not evaluate.clients:
        raise BadInput("evaluate.clients_every has no effect without evaluate.clients = true")
    if evaluate.clients and evaluate.diagnostics is False:
        raise BadInput("evaluate.clients is a diagnostic, evaluate.diagnostics is false: omit one")
    of_records = recipe.client.kind == "dp-sgd" or recipe.noise.where == "site"
    if recipe.data.resample is not None and of_records:
        raise BadInput(
            f"data.resample is {recipe.data.resample} and the claim is about one record, of which "
            "a client may then have several copies: omit it"
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
        raise BadInput(f"noise.kind is {noise.kind!r} without a [budget]: give at least its delta")
    if (
        isinstance(noise, GaussianSection)
        and not noise.claim
        and (noise.where != "server" or noise.multiplier is None)
    ):
        raise BadInput("noise.claim = false is for noise.where = 'server' with a multiplier")
    if secure and not noise.claim:
        raise BadInput("noise.source = 'secure' has no use with noise.claim = false: use 'seeded'")
    if secure and budget is not None and budget.as_published:
        raise BadInput("budget.as_published is for simulations: use noise.source = 'seeded'")
    if secure and recipe.engine.checkpoint != 1:
        raise BadInput(
            f"engine.checkpoint is {recipe.engine.checkpoint}: with secure noise every round that "
            "is lost is charged again, so a checkpoint is written after each; omit it"
        )
    if (noise.kind == "two-point") != (clip is not None and clip.kind == "range"):
        raise BadInput("clip.kind 'range' and noise.kind 'two-point' go together")
    if noise.where == "site" and recipe.client.kind != "gradient":
        raise BadInput(
            f"client.kind is {recipe.client.kind!r} and noise.where is 'site', where every record "
            "has one gradient: use client.kind = 'gradient'"
        )
    if (recipe.client.kind == "dp-sgd") != (noise.where == "training"):
        raise BadInput("client.kind 'dp-sgd' and noise.where = 'training' go together")
    if recipe.sum is not None:
        adaptive = clip is not None and clip.kind in ("quantile", "median")
        of_clip = noise.where == "client" and noise.kind == "gaussian" and adaptive
        if not noise.claim or not (noise.where in ("site", "server") or of_clip):
            raise BadInput(
                "[sum] is for noise that is claimed and of noise.where 'site' or 'server', as in "
                "the recipes 'sites' and 'central', and for clip.kind 'quantile' or 'median' where "
                "clients add Gaussian noise: omit it (--set sum=none)"
            )
        if getattr(noise, "share", None) == "whole":
            raise BadInput(
                "sum.kind is 'secure' and noise.share is 'whole': a secure sum adds up parts of "
                "the noise; use noise.share = 'part', or leave [sum] out (--set sum=none)"
            )
        if recipe.sum.masks and not secure:
            raise BadInput(
                "sum.masks is true and noise.source is 'seeded': masks are for integers, and "
                "seeded noise is not on a grid; use noise.source = 'secure', or leave sum.masks out"
            )
        if recipe.sum.bits != 64 and noise.where != "site":
            raise BadInput(
                f"sum.bits is {recipe.sum.bits} and noise.where {noise.where!r}: fewer than 64 "
                "bits are for noise.where = 'site', as in the recipe 'sites'; omit sum.bits"
            )
        if recipe.sum.bits != 64 and not secure:
            raise BadInput(
                f"sum.bits is {recipe.sum.bits} and noise.source is 'seeded': sums of fewer than "
                "64 bits have secure noise only; use noise.source = 'secure', or omit sum.bits"
            )
    if recipe.shuffle is not None and noise.kind != "two-point":
        raise BadInput("[shuffle] is for noise.kind = 'two-point'")
    if getattr(noise, "c2", None) is not None and not (budget is not None and budget.as_published):
        raise BadInput("noise.c2 is for budget.as_published = true: omit it")
    if budget is not None and budget.epsilons is not None:
        if not math.isinf(budget.epsilon):
            raise BadInput("budget.epsilon and budget.epsilons contradict each other: give one")
        if not budget.epsilons or noise.where != "client":
            raise BadInput("budget.epsilons is a list of one or more, for noise at the clients")


def check_own_parts(
    recipe: Recipe, model: Model | None, data: FederatedData | None
) -> FederatedData | None:
    """Check that `model` and `data` are given from Python exactly if the recipe says "own".

    Returns `data`, or if the recipe says "own" a copy, whose fingerprint is computed again. Data of
    a table that are loaded already, and data whose records are elsewhere, may be given too. Raises
    BadInput if a part is missing or has no effect on this recipe, and if `data` is of the wrong
    type. The model's type is checked when it is built.
    """
    for key, what, named, given in (
        ("model", "a module", recipe.model.name, model),
        ("data", "records", recipe.data.name, data),
    ):
        if named == OWN and given is None:
            raise BadInput(
                f"{key}.name is {OWN!r}: this run has {what} of its own, which no file "
                f"holds; use fedveil.run or fedveil.resume in Python, with {key}="
            )
        remote = isinstance(given, FederatedData) and bool(given.elsewhere)
        if named not in (OWN, TABLE) and given is not None and not remote:
            raise BadInput(f"{key} is given beside {key}.name = {named!r}: leave one out")
    if data is not None and not isinstance(data, FederatedData):
        raise BadInput(f"data is {shown(data)}: make it with FederatedData.from_table or another")
    if data is None or recipe.data.name != OWN:
        return data
    return replace(data)  # whose fingerprint is taken again
