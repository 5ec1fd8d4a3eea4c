"""`Task`: a module with its loss and metrics, seen through one flat parameter vector."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.forks import can_fork, forked, in_fork, sealed
from fedveil.base.identity import Stated, named_values
from fedveil.base.inputs import Inputs, mapped, taken, tensor_of
from fedveil.models.capture import Uncapturable, captured, prepare
from fedveil.models.dropout import Dropout
from fedveil.models.graph import Captured, Graph, Kind, hollow_copy, kind_of
from fedveil.models.lineage import adding, trainings_of
from fedveil.models.memory import Snapshot, is_plain, is_plain_function, snapshot
from fedveil.models.metrics import Array, Measure, Metric, PerExample, measures_of
from fedveil.models.vmap_layers import attend_, norm_in_place_, under_vmap, unroll_

Named = dict[str, torch.Tensor]
"""Values under the names of the module's parameters."""

Features = Inputs[torch.Tensor]
"""The inputs of B records [B, ...]: one tensor, or several by name."""

Metrics = Mapping[str, Measure | str] | Sequence[Measure | str]
"""Metrics as users give them: by name, or as functions and objects of their own."""

_SENT = ("drops", "one_by_one", "tried", "forks")
"""What trials have found out about a task, which goes along to other processes."""


class Task:
    """A module to learn, its per-example loss, and the metrics measured beside the loss.

    A metric is a function of (outputs, targets) whose mean over examples it is, a `Metric`, which
    sees all of them, or the name of one: `metrics=["accuracy", "f1"]`, `{"mine": function}`.

    The parameters that learn become views into one contiguous vector, in the order of
    `named_parameters`; nothing is copied afterwards in either direction. Frozen ones
    (`requires_grad=False`) are constants, of which there is one copy for everybody; buffers are
    constants as well. The module itself is never run. A plain one (`models.memory`) is computed in
    copies, which have no learning parameters of their own and get those they are to run with. Of
    any other one a captured graph is computed (`models.graph`), which has none of its code and
    cannot remember. Where it cannot be captured either, its code runs in forks alone
    (`models.trial`). One copy or graph keeps the module's mode (train, unless it was set
    otherwise), the other is in eval mode, for measuring. A loss that is not plain is captured as
    well. The record's key decides what dropout drops of a record (`models.dropout`).

    Attributes:
        module: The module, which is never run itself.
        loss: The loss of (outputs, targets), one number per example.
        measures: The metrics by name.
        parameters: The module's parameters as one vector [P]: the module itself, not a copy.
        size: P, the number of parameters that learn.
        layer_sizes: The number of parameters of each tensor, in the order of the flat vector.
        places: Where each named parameter begins in the flat vector.
        module_captured: Whether graphs are computed instead of the module's own code.
        loss_captured: Whether graphs are computed instead of the loss's own code.
        forks: Why the module's own code runs, in forks. Empty if it does not run at all.
        drops: Whether dropout is at work as clients learn, None before `look`.
        one_by_one: Whether vmap cannot run the module's dropout.
        tried: Whether records see each other, by the kind of records that were tried.

    >>> from fedveil.models.metrics import squared_error
    >>> task = Task(nn.Linear(10, 1), squared_error)
    >>> task.size
    11
    """

    def __init__(self, module: nn.Module, loss: PerExample, metrics: Metrics = ()) -> None:
        if not isinstance(module, nn.Module):
            raise BadInput(f"module is {shown(module)}: an instance of torch.nn.Module is needed")
        if not callable(loss):
            raise BadInput(f"loss is {shown(loss)}: a function of (outputs, targets) is needed")
        self.module, self.loss, self.measures = module, loss, measures_of(metrics)
        _check_module(module)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._shapes = {name: p.shape for name, p in named}
        self.parameters = torch.cat([p.detach().reshape(-1) for _, p in named]).to(torch.float32)
        self.size = len(self.parameters)
        self.layer_sizes = tuple(p.numel() for _, p in named)
        self.places: dict[str, int] = {}
        start = 0
        for name, parameter in named:
            self.places[name], stop = start, start + parameter.numel()
            parameter.data = self.parameters[start:stop].view(parameter.shape)
            start = stop
        own = _written_out(_without_parameters(module)), _without_parameters(module).eval()
        self._own_code, (self._learning, self._measuring) = own, own
        if not is_plain(module):
            self._learning = _written_out(hollow_copy(module, _shape_only))
            self._measuring = hollow_copy(module, _shape_only).eval()
        self._loss_graphs: Captured | None = None
        if not is_plain_function(loss):
            held = loss if isinstance(loss, nn.Module) else nn.Module()
            self._loss_graphs = hollow_copy(held, _shape_only)
        self.module_captured = isinstance(self._learning, Captured)
        self.loss_captured = self._loss_graphs is not None
        self.forks = ""
        self.drops: bool | None = None
        self.one_by_one = False
        self.tried: dict[object, bool] = {}

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("module", "loss", "parameters") and name in vars(self):
            raise AttributeError(f"the {name} of a Task cannot be replaced: make another Task")
        super().__setattr__(name, value)

    @property
    def identity(self) -> Stated:
        return (
            *named_values(self, "module", "loss", "parameters"),
            ("frozen", tuple(self.frozen.values())),
        )

    def __repr__(self) -> str:
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return f"Task({type(self.module).__name__}, {self.size:,} parameters, loss {name})"

    def __reduce__(self) -> tuple[Any, ...]:
        """To other processes: the module without its vector, the vector, and results of trials.

        Parameters that are views would each take the whole vector along.
        """
        hollow = _without_parameters(self.module, lambda p: nn.Parameter(torch.empty(0)))
        found: dict[str, Any] = {name: getattr(self, name) for name in _SENT}
        vector = self.parameters.numpy()
        return _sent, (hollow, self._shapes, vector, self.loss, self.measures, found, self.graphs)

    def measuring(self, metrics: Metrics) -> "Task":
        """The same task, measured by these metrics from now on."""
        self.measures = measures_of(metrics)
        return self

    def by_own_code(self) -> "Task":
        """The same task, computed by the module's and the loss's own code: for forks alone."""
        other = copy.copy(self)  # by `__reduce__`, so with a state of its own
        other.compute_in_forks(other.forks)
        other.tried = {}
        return other

    def compute_in_forks(self, reason: str) -> None:
        """From now on run the module's own code, and only in forks: it cannot be captured."""
        self._learning, self._measuring = self._own_code
        self._loss_graphs = None
        self.module_captured = self.loss_captured = False
        self.forks = reason

    @property
    def graphs(self) -> tuple[dict[Kind, Graph], ...]:
        """The graphs of the module as it learns, of the module as it is measured, of the loss."""
        parts = (self._learning, self._measuring, self._loss_graphs)
        return tuple(part.graphs if isinstance(part, Captured) else {} for part in parts)

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """Tensors that captured code brought along: taken as public, part of what is trained."""
        graphs = [graph for part in self.graphs for graph in part.values()]
        return tuple(value for graph in graphs for value in graph.constants.values())

    @property
    def frozen(self) -> Named:
        """The parameters that do not learn, by name: the module's own, never copied."""
        parameters = self.module.named_parameters()
        return {name: p.detach() for name, p in parameters if not p.requires_grad}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of every claim about a training of this task."""
        assumptions = [adding(claim) for claim in trainings_of(self.module)]
        if not assumptions:
            buffers = " and buffers" if list(self.module.buffers()) else ""
            assumptions = [
                f"the model's first weights{buffers} are public: they were not learnt from these "
                "clients"
            ]
        frozen = sum(value.numel() for value in self.frozen.values())
        if frozen:
            assumptions.append(
                f"{self.size:,} of {self.size + frozen:,} parameters are trained on clients' "
                "records; the others are frozen and taken as public"
            )
        return tuple(assumptions)

    @property
    def named_layers(self) -> dict[str, nn.Module]:
        """The layers that `outputs` runs, by name."""
        return dict(self._learning.named_modules())

    def named(self, flat: torch.Tensor) -> Named:
        """Views into vectors [..., P] under the module's parameter names, [..., *shape] each."""
        parts = flat.split_with_sizes(self.layer_sizes, dim=-1)
        return {
            name: part.view((*flat.shape[:-1], *shape))
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def flattened(self, named: Named) -> torch.Tensor:
        """The reverse of `named`: a copy of values [..., *shape] as vectors [..., P]."""
        name, shape = next(iter(self._shapes.items()))
        first = named[name]
        out = first.new_empty((*first.shape[: first.ndim - len(shape)], self.size))
        for name, place in self.named(out).items():
            place.copy_(named[name])
        return out

    @property
    def needs_fork(self) -> bool:
        """Whether the module's own code is to run, and this process is no fork."""
        return bool(self.forks) and not in_fork()

    def look(self, x: Features, y: torch.Tensor) -> tuple[bool, bool]:
        """Try on a few records whether the module drops, and whether vmap cannot run that.

        A module that does is run on one record at a time, by vmap or one after the other.
        """
        if self.needs_fork:
            self.drops, self.one_by_one = forked(lambda: self.look(x, y))
            return self.drops, self.one_by_one
        named, counting = self.named(self.parameters.clone()), Dropout(None)
        with torch.no_grad(), counting:
            self._run(named, x)
        self.drops = bool(self.drops) or counting.calls > 0
        if self.drops and not self.one_by_one:
            try:
                with torch.no_grad():
                    self.losses(named, x, y, torch.arange(len(y)))
            except RuntimeError:
                self.one_by_one = True
        return self.drops, self.one_by_one

    def outputs(self, named: Named, x: Features, key: torch.Tensor | None = None) -> torch.Tensor:
        """The module's outputs on x [B, ...] with these parameters, as clients learn.

        They are the caller's copy, never a model in use. Gradients are taken by name as well: a
        vector that is cut up inside of what is differentiated gets one vector per parameter back.
        `key` decides what is dropped of the one record in x; without it nothing is.
        """
        if self.drops is False:
            return self._run(named, x)
        with Dropout(key):
            return self._run(named, x)

    def _run(self, named: Named, x: Features) -> torch.Tensor:
        if self.needs_fork:
            if torch.is_grad_enabled() or under_vmap():
                raise BadInput(
                    f"the model {type(self.module).__name__} could not be captured "
                    f"({self.forks}), so its gradients are computed in forks alone, one client "
                    "in each: leave out what asks for them otherwise"
                )
            return sealed(lambda: {"outputs": self._run(named, x)})["outputs"]
        self.ready(x)
        # under vmap attention uses operations that vmap can run
        with sdpa_kernel(SDPBackend.MATH) if under_vmap() else nullcontext():
            return _called(self._learning, named, x)

    def answers(self, flat: torch.Tensor, x: Features) -> torch.Tensor:
        """The module's outputs on x [B, ...] in eval mode, on a copy of `flat`."""
        if self.needs_fork:
            return sealed(lambda: {"outputs": self.answers(flat, x)})["outputs"]
        self._capture(self._measuring, x)
        return _called(self._measuring, self.named(flat.clone()), x)

    def each_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of each example [B], given the module's outputs on it."""
        if self._loss_graphs is None:
            return self.loss(outputs, y)
        self.ready_loss(outputs, y)
        losses: torch.Tensor = self._loss_graphs(outputs=outputs, y=y)
        return losses

    def losses(
        self, named: Named, x: Features, y: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss of each example [B]. With `keys` [B], each is computed alone with its key."""
        if keys is None:
            return self.each_loss(self.outputs(named, x), y)

        def one(x: Features, y: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return self.each_loss(self.outputs(named, taken(x, None), key), y[None])[0]

        self.ready(x, y)
        if self.one_by_one:
            return torch.stack([one(taken(x, k), y[k], keys[k]) for k in range(len(y))])
        losses: torch.Tensor = vmap(one)(x, y, keys)
        return losses

    def ready(self, x: Features, y: torch.Tensor | None = None) -> None:
        """Capture the module, and with `y` the loss, for records of this kind, if need be.

        To be called before a task is computed inside of vmap or another transform.
        """
        self._capture(self._learning, x)
        if y is not None and self._loss_graphs is not None and not self._loss_graphs.graphs:
            with torch.no_grad():
                self.each_loss(self.answers(self.parameters, taken(x, slice(1))), y[:1])

    def ready_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> None:
        """Capture the loss for outputs and targets of this kind, if need be."""
        self._capture(self._loss_graphs, {"outputs": outputs, "y": y})

    def _capture(self, part: nn.Module | None, given: Features) -> None:
        """Add the graph for inputs of this kind to a captured module or loss that lacks it."""
        if not isinstance(part, Captured) or kind_of(given) in part.graphs:
            return
        if under_vmap():
            raise BadInput("a module is captured before it is computed for several records at once")
        prepare()
        given = mapped(torch.detach, given)
        source: Any = self.loss if part is self._loss_graphs else self.module
        forking = can_fork() and not in_fork()

        def capture() -> Graph:
            own = source if forking else copy.deepcopy(source)
            own = own.eval() if part is self._measuring else own
            keyed, loss = part is self._learning, part is self._loss_graphs
            return captured(own, given, keyed=keyed, loss=loss)

        try:
            graph = forked(capture) if forking else capture()
        except Uncapturable as e:
            name = f"model {type(source).__name__}"
            if not isinstance(source, nn.Module):
                name = f"loss {getattr(source, '__name__', type(source).__name__)}"
            raise BadInput(f"the {name} cannot be captured: {e.args[0]}") from None
        part.graphs[kind_of(given)] = graph

    def measure_batch(self, flat: torch.Tensor, x: Features, y: torch.Tensor) -> "Measurements":
        """Loss and metrics on examples [B], in eval mode, on a copy of `flat`."""
        if self.needs_fork:
            return Measurements.from_tensors(
                sealed(lambda: self.measure_batch(flat, x, y).to_tensors())
            )
        outputs = self.answers(flat, x)
        measured = Measurements({"loss": self.each_loss(outputs, y)}, {})
        for name, measure in self.measures.items():
            if isinstance(measure, Metric):
                measured.batch_statistics[name] = measure.statistics(outputs, y)
            else:
                measured.per_example[name] = measure(outputs, y)
        return measured

    def value_of(self, name: str, statistics: Sequence[Array]) -> float:
        """The metric, from the joined statistics of all batches."""
        metric = self.measures[name]
        if not isinstance(metric, Metric):
            raise AssertionError(f"{name} is a mean over examples")
        return float(metric.value(*statistics))

    def snapshot(self) -> Snapshot:
        """A snapshot of module and loss without the parameters' values. Graphs have no state."""
        module = {} if self.module_captured else snapshot(self._learning)
        loss = {} if self.loss_captured else snapshot(self.loss)
        return {**module, **{f"loss {name}": token for name, token in loss.items()}}


def _sent(
    module: nn.Module,
    shapes: Mapping[str, torch.Size],
    vector: Array,
    loss: PerExample,
    metrics: Metrics,
    found: Mapping[str, Any],
    graphs: tuple[dict[Kind, Graph], ...],
) -> Task:
    """Inverse of `Task.__reduce__`."""
    parameters, flat, start = dict(module.named_parameters()), torch.tensor(vector), 0
    for name, shape in shapes.items():
        stop = start + shape.numel()
        parameters[name].data = flat[start:stop].view(shape)
        start = stop
    task = Task(module, loss, metrics)
    for name in _SENT:
        setattr(task, name, found[name])
    if task.forks:
        task.compute_in_forks(task.forks)
    for own, sent in zip(task.graphs, graphs, strict=True):
        own.update(sent)
    return task


@dataclass(frozen=True)
class Measurements:
    """Metrics of a batch of examples.

    Attributes:
        per_example: The loss and those metrics that are means over examples, [B] by name.
        batch_statistics: What each `Metric` needs of the batch, by name.
    """

    per_example: dict[str, torch.Tensor]
    batch_statistics: dict[str, tuple[Array, ...]]

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """All of it as tensors by name, which a sealed fork can return."""
        tensors = {f"per-example {name}": value for name, value in self.per_example.items()}
        for name, arrays in self.batch_statistics.items():
            for k, array in enumerate(arrays):
                tensors[f"statistics {k} {name}"] = torch.from_numpy(array)
        return tensors

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> "Measurements":
        """Inverse of `to_tensors`."""
        made = cls({}, {})
        for text in sorted(tensors):
            kind, _, name = text.partition(" ")
            if kind == "per-example":
                made.per_example[name] = tensors[text]
            else:
                name = name.partition(" ")[2]
                made.batch_statistics[name] = (
                    *made.batch_statistics.get(name, ()),
                    tensors[text].numpy(),
                )
        return made


def first_line(error: BaseException) -> str:
    """The first line of torch's error message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _called(module: nn.Module, named: Named, x: Features) -> torch.Tensor:
    """The module's outputs with these parameters. Named inputs become keyword arguments."""
    args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
    return tensor_of(functional_call(module, named, args, kwargs))


def _written_out(module: nn.Module) -> nn.Module:
    """A copy whose layers have forms for vmap."""
    return norm_in_place_(attend_(unroll_(module)))


def _shape_only(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, device="meta"))


def _without_parameters(
    module: nn.Module, hollow: Callable[[nn.Parameter], nn.Parameter] = _shape_only
) -> nn.Module:
    """A copy whose learning parameters have a shape and no values: it runs with those it is given.

    One that uses such a parameter in another way than by its name then fails, instead of learning
    nothing. Frozen parameters are those of the module itself.
    """
    empty: dict[int, object] = {
        id(p): hollow(p) if p.requires_grad else p for p in module.parameters()
    }
    try:
        return copy.deepcopy(module, empty)
    except (RuntimeError, TypeError, AttributeError) as e:
        raise BadInput(
            f"the model cannot be copied, and is run as a copy: {first_line(e)}; compute what is "
            "no parameter in forward, or by torch.nn.utils.parametrizations"
        ) from e


def _check_module(module: nn.Module) -> None:
    """Refuse layers that mix or cannot be clipped, and parameters that cannot learn."""
    for name, layer in module.named_modules():
        where = f"layer {name or 'model'!r} is a {type(layer).__name__}"
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if batch_norm and layer.running_mean is not None:
            raise BadInput(
                f"{where}, which mixes examples and keeps statistics of clients' data outside "
                "the clip: use fedveil.models.without_batch_norm(module), GroupNorm or LayerNorm"
            )
        if getattr(layer, "sparse", False) is True:
            raise BadInput(f"{where} with sparse gradients, which cannot be clipped: sparse=False")
    parameters = dict(module.named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        kind = "they are all frozen" if parameters else "it has none"
        raise BadInput(f"the model has no parameters that learn, {kind}: there is nothing to learn")
    for name, parameter in parameters.items():
        if nn.parameter.is_lazy(parameter):
            raise BadInput(
                f"parameter {name!r} has no shape yet: pass one batch through the model first"
            )
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise BadInput(f"parameter {name!r} is {parameter.dtype}: floating point is needed")
