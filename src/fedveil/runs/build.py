"""From a recipe to objects: the one place where a recipe's words are resolved."""

import os
from pathlib import Path

import torch

from fedveil.data.federated import FederatedData
from fedveil.data.load import load_records
from fedveil.data.partition import partition
from fedveil.errors import BadInput
from fedveil.models.zoo import build_task
from fedveil.privacy.clipping import FixedBound
from fedveil.privacy.plan import PrivacyPlan, central, unprotected
from fedveil.privacy.sampling import Everyone, FixedSize, Poisson, RoundRobin, Sampler
from fedveil.privacy.terms import Budget
from fedveil.runs.recipe import (
    DataSection,
    EveryoneSection,
    FixedSection,
    GaussianSection,
    GradientSection,
    LocalSection,
    PoissonSection,
    Recipe,
    RoundRobinSection,
    SampleSection,
    ServerSection,
)
from fedveil.training.batches import Batches
from fedveil.training.client import LocalSgd, LocalWork, OneGradient
from fedveil.training.gradients import Mode
from fedveil.training.server import AdamServer, ServerOptimizer, SgdServer, Weights
from fedveil.training.training import Training


def build(recipe: Recipe, data_root: Path | None = None) -> Training:
    """Everything the recipe asks for, checked; what does not go together is refused."""
    if not 0 <= recipe.seed < 2**63:
        raise BadInput(f"seed is {recipe.seed}: a number from 0 to 2^63 - 1 is needed")
    threads = recipe.engine.threads
    if threads is not None and not 1 <= threads <= 1024:
        raise BadInput(f"engine.threads is {threads}: a number from 1 to 1024 is needed")
    if recipe.engine.checkpoint < 1:
        raise BadInput(f"engine.checkpoint is {recipe.engine.checkpoint}: at least 1 is needed")
    work, server = _work(recipe.local), _server(recipe.server)
    sampler = _sampler(recipe.sample)
    bound = FixedBound(recipe.bound.value) if recipe.bound else None
    _check_noise(recipe)
    data = _data(recipe.data, recipe.seed, data_root)
    torch.set_num_threads(threads or os.cpu_count() or 1)
    hidden = tuple(recipe.model.hidden or ())
    if hidden and recipe.model.name != "mlp":
        raise BadInput(f"model.hidden has no effect on {recipe.model.name!r}: leave it out")
    task = build_task(
        recipe.model.name,
        data.record_shape,
        data.classes,
        seed=recipe.seed,
        hidden=hidden or (200,),
    )
    return Training(
        task=task,
        data=data,
        plan=_plan(recipe, sampler, bound, data.clients),
        work=work,
        server=server,
        weights=Weights(recipe.server.weights),
        seed=recipe.seed,
        mode=Mode(recipe.engine.mode) if recipe.engine.mode else None,
        chunk=recipe.engine.chunk,
        every=recipe.evaluate.every,
    )


def resolved(recipe: Recipe, training: Training) -> Recipe:
    """The recipe with every choice that was left open filled in, so that it can be repeated."""
    noise = recipe.noise
    if isinstance(noise, GaussianSection) and training.plan.mechanism is not None:
        noise = noise.model_copy(update={"multiplier": training.plan.mechanism.multiplier})
    engine = recipe.engine.model_copy(
        update={
            "mode": str(training.engine.mode),
            "chunk": training.engine.chunk,
            "threads": torch.get_num_threads(),
        }
    )
    return recipe.model_copy(update={"noise": noise, "engine": engine})


def _data(section: DataSection, seed: int, root: Path | None) -> FederatedData:
    divided = ("clients", "partition", "alpha", "shards_per_client", "grades", "min_records")
    if section.name == "saved":
        for key in divided:
            if getattr(section, key) is not None:
                raise BadInput(f"data.{key} has no effect on saved data: leave it out")
        if section.path is None:
            raise BadInput("data.path is missing: name the folder FederatedData.save wrote")
        return FederatedData.open(Path(section.path))
    if section.path is not None:
        raise BadInput(f"data.path has no effect on {section.name!r}: use --data, or name 'saved'")
    options = {
        key: getattr(section, key)
        for key in ("grades", "min_records")
        if getattr(section, key) is not None
    }
    return partition(
        load_records(section.name, root, **options),
        kind=section.partition or "iid",
        clients=section.clients,
        seed=seed,
        alpha=section.alpha,
        shards_per_client=1 if section.shards_per_client is None else section.shards_per_client,
    )


def _sampler(section: SampleSection) -> Sampler:
    match section:
        case PoissonSection():
            return Poisson(section.rate)
        case FixedSection():
            return FixedSize(section.size)
        case RoundRobinSection():
            return RoundRobin(section.size)
        case EveryoneSection():
            return Everyone()


def _work(section: LocalSection) -> LocalWork:
    if isinstance(section, GradientSection):
        return OneGradient()
    batches = Batches(section.batch, section.epochs, section.steps)
    return LocalSgd(batches, section.lr, section.momentum, section.weight_decay)


def _server(section: ServerSection) -> ServerOptimizer:
    if section.optimizer == "adam":
        if section.momentum:
            raise BadInput("server.momentum has no effect on adam: leave it out")
        return AdamServer(0.01 if section.lr is None else section.lr)
    return SgdServer(1.0 if section.lr is None else section.lr, section.momentum)


def _check_noise(recipe: Recipe) -> None:
    if recipe.noise.kind == "none" and recipe.budget is not None:
        raise BadInput(
            "budget is given and noise.kind is 'none': nothing can be claimed without noise; "
            "leave the budget out (--set budget=none) or use noise.kind = 'gaussian'"
        )
    if recipe.noise.kind != "none" and recipe.bound is None:
        raise BadInput("noise.kind is 'gaussian' without a [bound]: noise alone protects nobody")
    if recipe.noise.kind != "none" and recipe.budget is None:
        raise BadInput("noise.kind is 'gaussian' without a [budget]: give at least budget.delta")


def _plan(recipe: Recipe, sampler: Sampler, bound: FixedBound | None, clients: int) -> PrivacyPlan:
    noise, budget = recipe.noise, recipe.budget
    if not isinstance(noise, GaussianSection) or bound is None or budget is None:
        return unprotected(sampler, clients, rounds=recipe.rounds, bound=bound)
    return central(
        sampler,
        clients,
        bound,
        rounds=recipe.rounds,
        budget=Budget(budget.epsilon, budget.delta),
        multiplier=noise.multiplier,
    )
