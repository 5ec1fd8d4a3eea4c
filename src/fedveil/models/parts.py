"""The parts of a task, checked for what they are before anything is done with them."""

from torch import nn

from fedveil.checks import shown
from fedveil.errors import BadInput

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


def check_parts(module: object, loss: object, metrics: object) -> None:
    """Refuse what is no module, no loss or no metric, by name.

    | edge | behaviour |
    |---|---|
    | a class instead of a module | BadInput |
    | a metric called like a number of the run (epsilon, round, loss, ...) | BadInput |
    """
    if not isinstance(module, nn.Module):
        raise BadInput(f"module is {shown(module)}: an instance of torch.nn.Module is needed")
    if not callable(loss):
        raise BadInput(f"loss is {shown(loss)}: a function of (outputs, targets) is needed")
    if not isinstance(metrics, dict):
        raise BadInput(f"metrics is {shown(metrics)}: use {{'name': function}}")
    for name, metric in metrics.items():
        if not isinstance(name, str) or name in TAKEN:
            raise BadInput(f"metric {shown(name)} has a name that is taken: call it otherwise")
        if not callable(metric):
            raise BadInput(f"metric {name!r} is {shown(metric)}: a function is needed")
