"""The parts of a task, checked for what they are before anything is done with them."""

from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedveil.checks import shown
from fedveil.errors import BadInput

TAKEN = frozenset(
    (
        "round",
        "clients",
        "clipped",
        "snr",
        "refused",
        "bound",
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
    | lazy layers, whose parameters have no shape yet | BadInput |
    | sparse gradients, of bags too | BadInput |
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
    for name, layer in module.named_modules():
        _check_layer(f"layer {name or 'model'!r} is a {type(layer).__name__}", layer)


def _check_layer(where: str, layer: nn.Module) -> None:
    own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
    if any(isinstance(value, UninitializedParameter | UninitializedBuffer) for value in own):
        raise BadInput(f"{where}, whose shape is not known yet: give its sizes, or use it once")
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
        raise BadInput(f"{where} with sparse gradients, which no bound takes: set sparse=False")
