"""The user's own module or records, given from Python in place of those a recipe names."""

import copy
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fedveil.base.checks import OWN, TABLE, shown
from fedveil.base.errors import BadInput
from fedveil.base.identity import digest_of
from fedveil.base.inputs import Target
from fedveil.data.federated import FederatedData
from fedveil.models.lineage import note_copy
from fedveil.models.task import Task, metric_of, usual
from fedveil.runs.recipe import Recipe

Model = nn.Module | Task
"""A module, which then gets the usual loss for its targets, or a task with one of its own."""


def own_task(model: Model, target: Target) -> Task:
    """A task on a copy of `model`: the caller's module keeps the weights it has.

    A module without a loss learns labels by cross-entropy, several at once by binary cross-entropy,
    and numbers by squared error.
    """
    if not isinstance(model, nn.Module | Task):
        raise BadInput(f"model is {shown(model)}: give an instance of nn.Module, or a Task")
    if isinstance(model, Task):
        return Task(_copied(model.module), model.loss, model.measures)
    return Task(_copied(model), *usual(target))


def asked_of(task: Task, names: Sequence[str] | None, model: Model | None) -> Task:
    """The task with the metrics that a recipe names, beside those of a `Task` that was given.

    If the recipe names none, the task stays as it is.
    """
    if names is None:
        return task
    metrics = dict(model.measures) if isinstance(model, Task) else {}
    for name in names:
        metric = metric_of(name)
        if metrics.setdefault(name, metric) != metric:
            raise BadInput(
                f"evaluate.metrics has {name!r}, and the Task another metric of that name: "
                "rename one of them"
            )
    return task.measuring(metrics)


def brought(
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


def changed_since(data: FederatedData, recipe: Recipe) -> list[str]:
    """A sentence if records that came from Python are no longer what they were at the start."""
    if recipe.data.name != OWN or replace(data).fingerprint == data.fingerprint:
        return []
    return ["the records were changed in place during the run: it cannot be repeated or resumed"]


def module_digest(task: Task) -> str:
    """A digest of a module: its layers, their code, loss, metrics and first weights."""
    parts = (task.module, task.loss, task.measures, task.parameters, task.frozen)
    return digest_of(*parts)


def check_same(task: Task, digest: str | None) -> None:
    """Refuse another module than the one that a run was started with."""
    if digest is not None and module_digest(task) != digest:
        raise BadInput(
            f"the module {type(task.module).__name__} is not the one that the run was started "
            "with: its layers, loss, metrics and first weights must be the same; give the same, "
            "made after the same torch.manual_seed"
        )


_WORDS = {"model": "a module", "data": "records"}


def _copied(module: nn.Module) -> nn.Module:
    try:
        copied = copy.deepcopy(module)
    except (RuntimeError, TypeError, AttributeError) as e:
        reason = " ".join(str(e).split())
        raise BadInput(f"the module cannot be copied, and a run trains a copy: {reason}") from e
    note_copy(copied, module)
    return copied
