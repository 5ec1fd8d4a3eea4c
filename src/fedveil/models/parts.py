"""Checks of what users give a task: module, loss, metrics, and what the module returns."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedveil.base.checks import INTERVAL, shown
from fedveil.base.errors import BadInput
from fedveil.models.metrics import Measure, Metric

TAKEN = frozenset(
    (
        "round",
        "clients",
        "clipped",
        "snr",
        "refused",
        "clip",
        "epsilon",
        "claim",
        "seconds",
        "loss",
    )
)
"""What a run's metrics already call something else: a metric of that name would overwrite it."""

OVER_CLIENTS = "clients/"
"""How the numbers begin that tell how a model does across clients."""


def check_parts(module: object, loss: object) -> None:
    """Refuse a module or loss of the wrong type.

    | edge | behaviour |
    |---|---|
    | a class instead of a module | BadInput |
    """
    if not isinstance(module, nn.Module):
        raise BadInput(f"module is {shown(module)}: an instance of torch.nn.Module is needed")
    if not callable(loss):
        raise BadInput(f"loss is {shown(loss)}: a function of (outputs, targets) is needed")


def measures_of(metrics: object, known: Callable[[str], Measure]) -> dict[str, Measure]:
    """Metrics by name. `known` looks up those that are given by name only.

    | edge | behaviour |
    |---|---|
    | a name that no metric has | BadInput with the nearest |
    | a metric called like a number of the run (epsilon, round, loss, ...) | BadInput |
    | two of one name, or a function without one | BadInput |
    """
    if isinstance(metrics, dict):
        pairs = list(metrics.items())
    elif isinstance(metrics, list | tuple):
        pairs = [(_name_of(metric), metric) for metric in metrics]
    else:
        raise BadInput(f"metrics is {shown(metrics)}: use {{'name': function}}, or a list of names")
    found: dict[str, Measure] = {}
    for name, metric in pairs:
        taken = not isinstance(name, str) or name in TAKEN
        if taken or name.startswith(OVER_CLIENTS) or name.endswith(INTERVAL):
            raise BadInput(f"metric {shown(name)} has a name that is taken: call it otherwise")
        if name in found:
            raise BadInput(f"metric {name!r} is there twice: name it once")
        measure = known(metric) if isinstance(metric, str) else metric
        if isinstance(measure, type) or not (callable(measure) or isinstance(measure, Metric)):
            raise BadInput(f"metric {name!r} is {shown(metric)}: a name or a function is needed")
        found[name] = measure
    return found


def _name_of(metric: object) -> str:
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "")
    if not name or "<" in name:
        raise BadInput(f"metric {shown(metric)} has no name: use {{'name': metric}}")
    return str(name)


def tensor_of(returned: object) -> torch.Tensor:
    """The tensor in what a module returns: the `logits`, or the only tensor.

    So tuples, dicts and the `ModelOutput` of Hugging Face are taken. Which of several tensors is
    meant is not guessed.

    >>> tensor_of({"logits": torch.ones(2), "hidden": torch.zeros(2)})
    tensor([1., 1.])
    """
    if isinstance(returned, torch.Tensor):
        return returned
    kind = f"a {type(returned).__name__}"
    if isinstance(returned, Mapping):
        named, parts = returned.get("logits"), list(returned.values())
        kind += f" of {', '.join(map(repr, returned))}"
    else:
        named = getattr(returned, "logits", None)
        parts = list(returned) if isinstance(returned, tuple | list) else []
    if isinstance(named, torch.Tensor):
        return named
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) != 1:
        raise BadInput(
            f"the model returned {kind}, with {len(tensors)} tensors and none called 'logits': "
            "return one tensor of outputs, one row per example"
        )
    return tensors[0]
