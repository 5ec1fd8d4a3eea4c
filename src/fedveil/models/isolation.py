"""How a task is computed so that it cannot remember: as it is, as graphs, or in forks.

What is claimed about a client or a record holds if its gradient is a function of its own records.
Looking for state cannot show that, since a list of hiding places cannot be completed. So code that
is not known to keep nothing is not run on clients' records; where it has to be, each client is
computed in a fork of a process in which it has never run on one (docs/proofs/isolation.md).

| module and loss | what runs |
|---|---|
| all torch's and ours (`models.plain`) | they themselves |
| other code that can be captured (`models.capture`) | graphs of pure operators |
| other code, where clients are the unit, on Linux on x86-64 | each client in a fork |
| other code, where records are the unit, or elsewhere | BadInput |
"""

import copy
import time

import torch

from fedveil.base.errors import BadInput
from fedveil.base.forks import can_confine, can_fork, forked
from fedveil.base.inputs import mapped
from fedveil.models.capture import Uncapturable, captured, prepare
from fedveil.models.graph import Graph, Kind, kind_of
from fedveil.models.plain import check_process
from fedveil.models.task import Features, Task
from fedveil.models.trial import mixes_records


def isolate(task: Task, x: Features, y: torch.Tensor, classes: int) -> str:
    """Decide from a few public records how a task is computed. Returns one line about it, or "".

    The module's and the loss's own code runs in a fork here, which refuses what `models.trial`
    refuses.
    """
    check_process()
    if not task.module_captured and not task.loss_captured:
        return ""
    if (kind_of(x) in task.graphs[0] or not task.module_captured) and (
        task.graphs[2] or not task.loss_captured
    ):
        return ""
    started = time.monotonic()
    prepare()
    x, y = mapped(torch.clone, x), y.clone()
    look = forked(lambda: _look(task, x, y, classes)) if can_fork() else _look(task, x, y, classes)
    if isinstance(look, str):
        task.compute_in_forks(look)
        return f"each client is computed in a fork, since the model cannot be captured: {look}"
    for own, graph in zip(task.graphs, look, strict=True):
        own.update(graph)
    return f"the model runs as a captured graph ({time.monotonic() - started:.1f} s to capture)"


def check_unit(task: Task, *, records: bool) -> None:
    """Refuse forks where a record is the unit, or where processes cannot be confined."""
    if not task.forks:
        return
    name = type(task.module).__name__
    if records:
        raise BadInput(
            f"the model {name} or its loss cannot be captured ({task.forks}), and might let a "
            "record reach another's gradient: write it in operators of torch without side effects"
        )
    if not can_confine():
        raise BadInput(
            f"the model {name} or its loss cannot be captured ({task.forks}), and this platform "
            "cannot confine a process for each client: write it in operators of torch without side "
            "effects, or use Linux on x86-64"
        )


def _look(
    task: Task, x: Features, y: torch.Tensor, classes: int
) -> str | tuple[dict[Kind, Graph], ...]:
    """The graphs of module and loss for records of this kind, or why there are none."""
    own = task.by_own_code()
    own.check_fits(x, y, classes)
    mixes_records(own, x, y)
    with torch.no_grad():
        outputs = own.outputs(own.named(own.parameters.clone()), x)
    module = task.module
    learning, measuring, loss = (dict[Kind, Graph]() for _ in range(3))
    try:
        if task.module_captured:
            learning[kind_of(x)] = captured(copy.deepcopy(module), x, keyed=True)
            measuring[kind_of(x)] = captured(copy.deepcopy(module).eval(), x)
        if task.loss_captured:
            given = {"outputs": outputs, "y": y}
            loss[kind_of(given)] = captured(copy.deepcopy(task.loss), given, loss=True)
    except Uncapturable as e:
        return str(e)
    return learning, measuring, loss
