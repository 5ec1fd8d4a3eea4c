"""Decide how a task is computed so that it cannot remember, and try the module contract.

A claim about clients or records holds if their gradients are functions of their own records.
A module can break that in ways that no list covers: it may draw random numbers, write to its
parameters, remember earlier records, or let records of one batch see each other. So code that is
not known to keep nothing is not run on clients' records; where it has to be, each client is
computed in a fork of a process in which it has never run on one (docs/proofs/isolation.md).

| module and loss | what runs |
|---|---|
| all torch's and ours (`models.memory`) | they themselves |
| other code that can be captured (`models.capture`) | graphs of pure operators |
| other code, where clients are the unit, on Linux on x86-64 | each client in a fork |
| other code, where records are the unit, or elsewhere | BadInput |

The contract (each record alone, no state, nothing written or drawn) is tried as well, on copies, on
records that are nobody's, before anything is charged.
"""

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fedveil.base.checks import OF_LABELS, OF_NUMBERS
from fedveil.base.errors import BadInput
from fedveil.base.forks import can_confine, can_fork, forked, sealed
from fedveil.base.inputs import PADDING, labelled, mapped, shape_of, taken, values_of
from fedveil.models.capture import Uncapturable, captured, prepare
from fedveil.models.graph import Graph, Kind, kind_of
from fedveil.models.memory import check_process, difference
from fedveil.models.metrics import is_of_labels, is_of_numbers
from fedveil.models.task import Features, Named, Task, first_line

_RECORDS = 4
_AWAY = 0.1
_STRETCH = 30.0
_NO_FIT = (AttributeError, RuntimeError, ValueError, IndexError, TypeError, KeyError)
"""What a module raises that was made for other records."""
_AGREEMENT = 1e-3


def isolate(task: Task, x: Features, y: torch.Tensor, classes: int) -> str:
    """Decide from a few public records how a task is computed. Returns one line about it, or "".

    The module's and the loss's own code runs in a fork here, which refuses what
    `mixes_records` refuses.
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
    check_fits(own, x, y, classes)
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


def mixes_records(task: Task, x: Features, y: torch.Tensor) -> bool:
    """Try a task once on a few public records. Returns whether records mix in a batch.

    It is tried at the task's parameters and away from them, where a gate that begins with zero
    hides nothing; on the records as they are and, where they are real numbers, stretched; and with
    a label where a target has none, since a record without labels shows nothing.

    | what the module or loss does | what happens |
    |---|---|
    | draws random numbers, from torch, NumPy or Python | BadInput that names the layer |
    | drops at random, by torch's functions | fine: from the records' keys (`models.dropout`) |
    | drops at random also when it is measured | BadInput |
    | drops at random, and lets records see each other | BadInput |
    | writes to a parameter, a buffer or an attribute | BadInput that names it |
    | gives a record another gradient after a pass over other records | BadInput |
    | gives two gradients for the same record | BadInput |
    | cannot take a record alone | BadInput |
    | uses parameters that are not listed, so that no client would move them | BadInput |
    | gives a record another gradient beside other records | True: never compute clients together |
    | the same, by as little as one bit where the other records alone are exchanged | True |
    """
    inputs = tuple((name, v.shape[1:], v.dtype) for name, v in sorted(labelled("x", x).items()))
    kind = (inputs, y.shape[1:], y.dtype)
    if kind not in task.tried:
        if task.needs_fork:
            found = forked(lambda: (_mixes(task, *_enough(x, y)), *task.look(x, y)))
            task.tried[kind], task.drops, task.one_by_one = found
        else:
            task.tried[kind] = _mixes(task, *_enough(x, y))
    return task.tried[kind]


def check_fits(
    task: Task, x: Features, y: torch.Tensor, classes: int, *, measured: bool = True
) -> None:
    """Refuse records this module, loss or these metrics cannot take. Two are tried.

    Without `measured` no metric is: a user's runs its own code, which clients' records are not
    for.
    """
    if task.needs_fork:

        def check() -> Named:
            check_fits(task, x, y, classes, measured=measured)
            return {}

        sealed(check)
        return
    x, y = taken(x, slice(2)), y[:2]
    try:
        with torch.no_grad():
            task.look(x, y)
            outputs = task.outputs(task.named(task.parameters.clone()), x)
            if classes and outputs.shape[-1] < classes:
                raise BadInput(
                    f"the model has {outputs.shape[-1]} outputs and the data {classes} labels: "
                    "give it one output per label"
                )
            values = [task.losses(task.named(task.parameters.clone()), x, y)]
            _check_metrics(task, classes)
            if measured:
                values += task.measure_batch(task.parameters, x, y).per_example.values()
    except BadInput:
        raise
    except _NO_FIT as e:
        shape = f"of shape {shape_of(x)}"
        if _needs_floats(task, x):
            kind = next(v.dtype for v in values_of(x) if not v.is_floating_point())
            raise BadInput(
                f"records {shape} are whole numbers ({kind}) and the model computes with "
                "real ones: give them as floats, or begin with an embedding"
            ) from e
        raise BadInput(f"the model does not fit records {shape}: {first_line(e)}") from e
    for value in values:
        if not isinstance(value, torch.Tensor) or value.shape != (len(y),):
            what = getattr(value, "shape", None)
            what = f"a {type(value).__name__}" if what is None else f"shape {tuple(what)}"
            raise BadInput(
                f"a loss or metric returned {what} for {len(y)} examples: return one number "
                "per example (reduction='none')"
            )


def _check_metrics(task: Task, classes: int) -> None:
    """Refuse a metric of ours that is not of such targets."""
    for name, measure in task.measures.items():
        if classes and is_of_numbers(measure):
            raise BadInput(
                f"metric {name!r} is of numbers and the data have {classes} labels: use "
                f"{', '.join(OF_LABELS)}"
            )
        if not classes and is_of_labels(measure):
            raise BadInput(
                f"metric {name!r} is of labels and the data have numbers: use "
                f"{', '.join(OF_NUMBERS)}"
            )


def _needs_floats(task: Task, x: Features) -> bool:
    """Whether whole numbers are all that the module cannot take of these records."""
    if all(value.is_floating_point() for value in values_of(x)):
        return False
    try:
        with torch.no_grad():
            task.outputs(task.named(task.parameters.clone()), mapped(torch.Tensor.float, x))
    except _NO_FIT:
        return False
    return True


def goes_together(task: Task, x: Features, y: torch.Tensor) -> bool:
    """Whether clients of this module can be computed together, as vmap does it."""
    try:
        check_together(task, x, y)
    except BadInput:
        return False
    return True


def check_together(task: Task, x: Features, y: torch.Tensor) -> None:
    """Refuse a module whose clients cannot be computed together, as vmap does it."""

    def loss(named: Named, x: Features, y: torch.Tensor) -> torch.Tensor:
        return task.losses(named, x, y).sum()

    clients = (task.named(task.parameters), x, y)
    try:
        vmap(grad(loss))(*tree_map(lambda values: torch.stack((values, values)), clients))
    except RuntimeError as e:
        raise BadInput(
            "engine.mode is 'vectorised' and the model cannot be computed for several clients at "
            f"once: {first_line(e)}; use 'looped'"
        ) from e


def _mixes(task: Task, x: Features, y: torch.Tensor) -> bool:
    away = torch.randn(task.size, generator=torch.Generator().manual_seed(0))
    real = any(value.is_floating_point() for value in values_of(x))
    stretched = [mapped(lambda v: v * _STRETCH if v.is_floating_point() else v, x)] if real else []
    full = with_labels(y)
    targets = (y,) if torch.equal(y, full) else (y, full)
    mixes = False
    with _same_randomness_afterwards():
        for flat in (task.parameters.clone(), task.parameters + _AWAY * away):
            for records in (x, *stretched):
                for given in targets:
                    mixes |= _tried(task, flat, records, given)
    return mixes


def _tried(task: Task, flat: torch.Tensor, x: Features, y: torch.Tensor) -> bool:
    first, second = ((taken(x, slice(k, k + 1)), y[k : k + 1]) for k in range(2))
    before = task.snapshot()
    try:
        task.look(x, y)
        alone = [_gradient(task, flat, *record, 0) for record in (first, second)]
        _check_own(task, flat, x, y)
        _check_draws(task, flat, x, y)
        again = _gradient(task, flat, *first, 0)
        beside = [_gradient(task, flat, x, y, k) for k in range(2)]
        others = []
        for k in range(2):
            rows = torch.full((len(y),), k)  # as many records, each of which is record k
            others.append(_gradient(task, flat, taken(x, rows), y[rows], k))
        after = _gradient(task, flat, *first, 0)
        keyed = _keyed(task, flat, x, y) if task.drops else [alone[0]]
    except (AttributeError, RuntimeError, ValueError, IndexError, TypeError) as e:
        if isinstance(e, BadInput):
            raise
        if "meta" in str(e):  # parameters of a copy have values in its forward pass only
            raise BadInput(
                f"the model {type(task.module).__name__} uses its parameters outside of its "
                f"forward pass: switch its checkpointing off, or its cache ({first_line(e)})"
            ) from e
        raise BadInput(f"the model does not take one record at a time: {first_line(e)}") from e
    if (name := difference(before, task.snapshot())) is not None:
        raise BadInput(
            f"{name!r} of the model changes when records pass through it: what one client's "
            "records leave there would reach others outside the clip; compute it in every "
            "pass, or leave it out"
        )
    every = (*alone, again, *beside, *others, after, *keyed)
    finite = [g for g in every if bool(torch.isfinite(g).all())]
    if len(finite) < len(every):
        return False  # nothing can be told from a gradient that overflows: it counts as zero
    room = _AGREEMENT * max(float(g.norm()) for g in finite)
    same = [(alone[0], again), (alone[0], after), *((keyed[0], other) for other in keyed)]
    if not all(float((a - b).norm()) <= room for a, b in same):
        raise BadInput(
            f"the model {type(task.module).__name__} gives one record two gradients: it draws "
            "random numbers, or remembers other records, which would reach others outside the "
            "clip; make its outputs a function of parameters and record alone"
        )
    pairs = zip(alone, beside, strict=True)
    mixes = not all(float((a - b).norm()) <= room for a, b in pairs)
    mixes |= not all(map(torch.equal, beside, others))  # the same sums, so the same bits
    if mixes and task.drops:
        raise BadInput(
            f"the model {type(task.module).__name__} has dropout, whose masks belong to single "
            "records, and lets the records of a batch see each other: leave one of the two out"
        )
    return mixes


def _keyed(task: Task, flat: torch.Tensor, x: Features, y: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of one record with its own key: alone, beside others, and once more."""
    keys, first = torch.arange(len(y)), (taken(x, slice(1)), y[:1])
    alone = [_gradient(task, flat, *first, 0, keys[:1]) for _ in range(2)]
    return [*alone, _gradient(task, flat, x, y, 0, keys)]


def _gradient(
    task: Task,
    flat: torch.Tensor,
    x: Features,
    y: torch.Tensor,
    record: int,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of one record's loss in a batch, on a copy of the parameters."""
    given = task.named(flat)
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
    before = {name: leaf._version for name, leaf in leaves.items()}
    with torch.enable_grad():
        if keys is not None and len(y) == 1:  # as it is, without vmap
            loss = task.each_loss(task.outputs(leaves, x, keys[0]), y)[record]
        else:
            loss = task.losses(leaves, x, y, keys)[record]
    with _NothingDrawn():  # type: ignore[no-untyped-call]
        found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    for name, leaf in leaves.items():
        if leaf._version != before[name] or not torch.equal(leaf.detach(), given[name]):
            raise BadInput(
                f"{name!r} of the model is written to in its forward pass, as by max_norm: what "
                "records leave there is outside clip and noise; leave it out"
            )
    return task.flattened(dict(zip(leaves, found, strict=True)))


class _NothingDrawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For the backward pass, where a module that computes its layers again would draw again."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and keeping a compiler out would load it: many seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise BadInput(
                "the model computes layers that draw again in its backward pass, where they would "
                "draw otherwise: switch its checkpointing off"
            )
        return func(*args, **(kwargs or {}))


def _check_own(task: Task, flat: torch.Tensor, x: Features, y: torch.Tensor) -> None:
    """Refuse outputs that depend on other parameters than those the module is given."""
    with torch.enable_grad():
        foreign = task.losses(task.named(flat.detach().clone()), x, y).requires_grad
    if foreign:
        raise BadInput(
            f"the model {type(task.module).__name__} computes with parameters that it does not "
            "list, such as those of a module that its forward or its loss holds on to: register "
            "them as its own"
        )


def _check_draws(task: Task, flat: torch.Tensor, x: Features, y: torch.Tensor) -> None:
    """Refuse a module or loss that moves one of the common generators."""
    before = _states()
    with torch.no_grad():
        outputs = task.outputs(task.named(flat.clone()), x)
    if before != _states():
        name, kind = _drawing_layer(task, flat, x)
        raise BadInput(
            f"layer {name!r} is a {kind} that draws random numbers outside the keyed streams, so "
            "no round could be repeated: use dropout, which is keyed, or put it into eval mode"
        )
    task.each_loss(outputs, y)
    if before != _states():
        raise BadInput("the loss draws random numbers, so no round could be repeated: remove them")
    task.measure_batch(flat, x, y)
    if before != _states():
        raise BadInput(
            f"the model {type(task.module).__name__} draws random numbers when it is measured, in "
            "eval mode: give functional.dropout training=self.training"
        )


def _drawing_layer(task: Task, flat: torch.Tensor, x: Features) -> tuple[str, str]:
    """The innermost layer that drew: the first to end with other generators than it began with."""
    begun: dict[str, list[Any]] = {}
    drew: list[str] = []

    def begin(name: str) -> Callable[..., None]:
        return lambda *_: begun.__setitem__(name, _states())

    def end(name: str) -> Callable[..., None]:
        return lambda *_: drew.append(name) if begun[name] != _states() else None

    layers = task.named_layers
    handles = [layer.register_forward_pre_hook(begin(n)) for n, layer in layers.items()]
    handles += [layer.register_forward_hook(end(n)) for n, layer in layers.items()]
    try:
        with torch.no_grad():
            task.outputs(task.named(flat.clone()), x)
    finally:
        for handle in handles:
            handle.remove()
    name = drew[0] if drew else ""
    return name or "model", type(layers[name]).__name__


def _enough(x: Features, y: torch.Tensor) -> tuple[Features, torch.Tensor]:
    """A few records that differ where they can."""
    rows = torch.arange(_RECORDS) % len(y)

    def shaken(values: torch.Tensor) -> torch.Tensor:
        if not values.is_floating_point():
            return values.clone()
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
        return values + (0.1 * noise).to(values.dtype)

    return mapped(shaken, taken(x, rows)), y[rows].clone()


def with_labels(y: torch.Tensor) -> torch.Tensor:
    """Targets with a label where they have none: a record without labels has no gradient."""
    return y if y.is_floating_point() else torch.where(y == PADDING, 0, y)


def _states() -> list[Any]:
    """The states of the generators that code uses without naming one."""
    legacy = np.random.get_state(legacy=False)
    return [torch.get_rng_state().numpy().tobytes(), repr(legacy), random.getstate()]


@contextmanager
def _same_randomness_afterwards() -> Iterator[None]:
    """Leave the common generators as they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
