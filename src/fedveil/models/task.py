"""`Task`: a module with its loss and metrics, seen through one flat parameter vector."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.base.forks import in_fork, run_in_fork, run_in_sealed_fork
from fedveil.base.identity import Stated, named_values
from fedveil.base.inputs import Inputs, Kind, kind_of, mapped, taken, tensor_of
from fedveil.base.platforms import can_fork
from fedveil.models.capture import Uncapturable, capture_graph, prepare
from fedveil.models.dropout import Dropout
from fedveil.models.graph import Captured, Graph, hollow_copy
from fedveil.models.lineage import earlier_training, trainings_of
from fedveil.models.memory import Snapshot, is_plain, is_plain_function, snapshot
from fedveil.models.metrics import (
    Array,
    Measure,
    Measurements,
    Metric,
    PerExample,
    WeightedCrossEntropy,
    named_metrics,
)
from fedveil.models.vmap_layers import under_vmap, write_out_

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
        graphs: The graphs of the module as it learns, of the module as it is measured, and of the
            loss, each by the kind of inputs.
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
        """Check the module, copy it, and make its learning parameters views of one vector.

        So the module's parameters are changed in place, to float32. Raises BadInput for a module,
        loss or metric that cannot be used.
        """
        if not isinstance(module, nn.Module):
            raise BadInput(f"module is {shown(module)}: an instance of torch.nn.Module is needed")
        if not callable(loss):
            raise BadInput(f"loss is {shown(loss)}: a function of (outputs, targets) is needed")
        self.module, self.loss, self.measures = module, loss, named_metrics(metrics)
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
        own = write_out_(_without_parameters(module)), _without_parameters(module).eval()
        self._own_code, (self._learning, self._measuring) = own, own
        if not is_plain(module):
            self._learning = write_out_(hollow_copy(module))
            self._measuring = hollow_copy(module).eval()
        self._loss_graphs: Captured | None = None
        if not is_plain_function(loss):
            held = loss if isinstance(loss, nn.Module) else nn.Module()
            self._loss_graphs = hollow_copy(held)
        self.module_captured = isinstance(self._learning, Captured)
        self.loss_captured = self._loss_graphs is not None
        parts = (self._learning, self._measuring, self._loss_graphs)
        self.graphs: tuple[dict[Kind, Graph], ...] = tuple(
            part.graphs if isinstance(part, Captured) else {} for part in parts
        )
        self.forks = ""
        self.drops: bool | None = None
        self.one_by_one = False
        self.tried: dict[object, bool] = {}

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute. Raises AttributeError for another module, loss or vector."""
        if name in ("module", "loss", "parameters") and name in vars(self):
            raise AttributeError(f"the {name} of a Task cannot be replaced: make another Task")
        super().__setattr__(name, value)

    @property
    def identity(self) -> Stated:
        """Identity pairs: (name, value) of module, loss and parameters, then of `frozen`.

        The value of `frozen` is the tuple of the tensors, without names.
        """
        return (
            *named_values(self, "module", "loss", "parameters"),
            ("frozen", tuple(self.frozen.values())),
        )

    def __repr__(self) -> str:
        """The names of module and loss, and the number of parameters that learn."""
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return f"Task({type(self.module).__name__}, {self.size:,} parameters, loss {name})"

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: module, vector, loss, metrics, results of trials and graphs.

        The module goes without its vector: parameters that are views would each take all of it
        along.
        """
        parameters = {
            id(p): nn.Parameter(torch.empty(0)) if p.requires_grad else p
            for p in self.module.parameters()
        }
        hollow = copy.deepcopy(self.module, parameters)
        found: dict[str, Any] = {name: getattr(self, name) for name in _SENT}
        vector = self.parameters.numpy()
        return _sent, (hollow, self._shapes, vector, self.loss, self.measures, found, self.graphs)

    def measuring(self, metrics: Metrics) -> "Task":
        """Replace the metrics of this task, and return the task itself.

        Raises BadInput for what `named_metrics` refuses.
        """
        self.measures = named_metrics(metrics)
        return self

    def by_own_code(self) -> "Task":
        """A copy of the task that runs the module's and the loss's own code, for forks only.

        It has no results of trials on records.
        """
        other = copy.copy(self)  # by `__reduce__`, so with a state of its own
        other.compute_in_forks(other.forks)
        other.tried = {}
        return other

    def compute_in_forks(self, reason: str) -> None:
        """Run the module's and the loss's own code from now on, in forks only. Drops all graphs.

        `reason` says why it cannot be captured, and becomes `forks`: with "" it runs in this
        process.
        """
        self._learning, self._measuring = self._own_code
        self._loss_graphs = None
        self.module_captured = self.loss_captured = False
        self.graphs = ({}, {}, {})
        self.forks = reason

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """The tensors that captured code brought along, of all graphs. They count as public."""
        graphs = [graph for part in self.graphs for graph in part.values()]
        return tuple(value for graph in graphs for value in graph.constants.values())

    @property
    def frozen(self) -> Named:
        """The parameters that do not learn, detached, by name.

        They share memory with the module's.
        """
        parameters = self.module.named_parameters()
        return {name: p.detach() for name, p in parameters if not p.requires_grad}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions, as sentences, of every claim about a training of this task.

        They are on where the first weights come from, and on frozen parameters if there are any.
        """
        assumptions = [earlier_training(claim) for claim in trainings_of(self.module)]
        if not assumptions:
            buffers = " and buffers" if list(self.module.buffers()) else ""
            assumptions = [
                f"the model's first weights{buffers} are public: they were not learnt from these "
                "clients"
            ]
        if isinstance(self.loss, WeightedCrossEntropy):
            assumptions.append(
                "the class weights are public: they were not computed from these clients' records"
            )
        frozen = sum(value.numel() for value in self.frozen.values())
        if frozen:
            assumptions.append(
                f"{self.size:,} of {self.size + frozen:,} parameters are trained on clients' "
                "records; the others are frozen and taken as public"
            )
        return tuple(assumptions)

    @property
    def named_layers(self) -> dict[str, nn.Module]:
        """The layers of the copy or graph that `outputs` runs, by name. "" is the whole."""
        return dict(self._learning.named_modules())

    def named(self, flat: torch.Tensor) -> Named:
        """Views into vectors [..., P] under the module's parameter names, [..., *shape] each."""
        parts = flat.split_with_sizes(self.layer_sizes, dim=-1)
        return {
            name: part.view((*flat.shape[:-1], *shape))
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def flattened(self, named: Named) -> torch.Tensor:
        """Vectors [..., P] of values [..., *shape] by parameter name, copied. Inverse of `named`.

        `named` must have all parameters that learn.
        """
        name, shape = next(iter(self._shapes.items()))
        first = named[name]
        out = first.new_empty((*first.shape[: first.ndim - len(shape)], self.size))
        for name, place in self.named(out).items():
            place.copy_(named[name])
        return out

    @property
    def needs_fork(self) -> bool:
        """Whether the module's own code is to run, and this process is not a fork yet."""
        return bool(self.forks) and not in_fork()

    def look(self, x: Features, y: torch.Tensor) -> tuple[bool, bool]:
        """Find out on records x, y whether the module drops, and whether vmap can run that.

        Sets and returns (`drops`, `one_by_one`), of which none goes back from True to False. A
        module that drops is run on one record at a time, by vmap or, with `one_by_one`, one after
        the other.
        """
        if self.needs_fork:
            self.drops, self.one_by_one = run_in_fork(lambda: self.look(x, y))
            return self.drops, self.one_by_one
        named, counting = self.named(self.parameters.clone()), Dropout(None)
        with torch.no_grad():
            self.outputs(named, x, dropout=counting)
        self.drops = bool(self.drops) or counting.calls > 0
        if self.drops and not self.one_by_one:
            try:
                with torch.no_grad():
                    self.losses(named, x, y, torch.arange(len(y)))
            except RuntimeError:
                self.one_by_one = True
        return self.drops, self.one_by_one

    def outputs(
        self,
        named: Named,
        x: Features,
        key: torch.Tensor | None = None,
        *,
        dropout: Dropout | None = None,
    ) -> torch.Tensor:
        """The module's outputs on x [B, ...] with the parameters in `named`, as clients learn.

        If the module's own code must run, it runs in a fork: gradients and vmap then raise
        BadInput.

        Args:
            named: The parameters that learn, by name. They are the caller's copy, never a model in
                use. Gradients are taken by name as well: a vector that is cut up inside of what is
                differentiated gets one vector per parameter back.
            x: The inputs of the records.
            key: Decides what is dropped of the one record in x. None: nothing is dropped.
            dropout: Takes the place of the mode that drops by `key`.
        """
        if self.needs_fork:
            if torch.is_grad_enabled() or under_vmap():
                raise BadInput(
                    f"the model {type(self.module).__name__} could not be captured "
                    f"({self.forks}), so its gradients are computed in forks alone, one client "
                    "in each: leave out what asks for them otherwise"
                )
            return run_in_sealed_fork(
                lambda: {"outputs": self.outputs(named, x, key, dropout=dropout)}
            )["outputs"]
        if self.module_captured:
            self._capture(self._learning, x)
        if dropout is None and self.drops is not False:
            dropout = Dropout(key)
        # under vmap attention uses operations that vmap can run
        with (
            nullcontext() if dropout is None else dropout,
            sdpa_kernel(SDPBackend.MATH) if under_vmap() else nullcontext(),
        ):
            return _run_module(self._learning, named, x)

    def answers(self, flat: torch.Tensor, x: Features) -> torch.Tensor:
        """The module's outputs on x [B, ...] in eval mode, with a copy of the vector `flat` [P].

        If the module's own code must run, it runs in a sealed fork.
        """
        if self.needs_fork:
            return run_in_sealed_fork(lambda: {"outputs": self.answers(flat, x)})["outputs"]
        if self.module_captured:
            self._capture(self._measuring, x)
        return _run_module(self._measuring, self.named(flat.clone()), x)

    def each_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of each example [B], given the module's outputs on it.

        Captures the loss if need be.
        """
        if self._loss_graphs is None:
            return self.loss(outputs, y)
        self.ready_loss(outputs, y)
        losses: torch.Tensor = self._loss_graphs(outputs=outputs, y=y)
        return losses

    def losses(
        self, named: Named, x: Features, y: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss of each example [B] as clients learn, with the parameters in `named`.

        With dropout `keys` [B], each example is computed alone with its key. Without, all are
        computed together and nothing is dropped.
        """
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

        To be called before a task is computed inside of vmap or another transform. Raises BadInput
        if a part cannot be captured.
        """
        if self.module_captured:
            self._capture(self._learning, x)
        if y is not None and self._loss_graphs is not None and not self._loss_graphs.graphs:
            with torch.no_grad():
                self.each_loss(self.answers(self.parameters, taken(x, slice(1))), y[:1])

    def ready_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> None:
        """Capture the loss for outputs and targets of this kind, unless that was done."""
        self._capture(self._loss_graphs, {"outputs": outputs, "y": y})

    def _capture(self, part: nn.Module | None, given: Features) -> None:
        """Add the graph for inputs like `given` to a captured module or loss that lacks it.

        Does nothing for other parts. Raises BadInput under vmap, or if it cannot be captured.
        """
        if not isinstance(part, Captured) or kind_of(given) in part.graphs:
            return
        if under_vmap():
            raise BadInput("a module cannot be captured inside of vmap: call Task.ready before it")
        prepare()
        given = mapped(torch.detach, given)
        source: Any = self.loss if part is self._loss_graphs else self.module
        forking = can_fork() and not in_fork()

        def capture() -> Graph:
            own = source if forking else copy.deepcopy(source)
            own = own.eval() if part is self._measuring else own
            keyed, loss = part is self._learning, part is self._loss_graphs
            return capture_graph(own, given, keyed=keyed, loss=loss)

        try:
            graph = run_in_fork(capture) if forking else capture()
        except Uncapturable as e:
            name = f"model {type(source).__name__}"
            if not isinstance(source, nn.Module):
                name = f"loss {getattr(source, '__name__', type(source).__name__)}"
            raise BadInput(f"the {name} cannot be captured: {e.args[0]}") from None
        part.graphs[kind_of(given)] = graph

    def measure_batch(self, flat: torch.Tensor, x: Features, y: torch.Tensor) -> Measurements:
        """Loss and metrics of the examples x, y [B] in eval mode, with a copy of `flat` [P].

        The loss is under "loss" in `per_example`. If the module's own code must run, it runs in a
        sealed fork.
        """
        if self.needs_fork:
            return Measurements.from_tensors(
                run_in_sealed_fork(lambda: self.measure_batch(flat, x, y).to_tensors())
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
        """The value of the `Metric` called `name`, from its statistics of all batches.

        `statistics` has one array per statistic, in the order of `Metric.value`, with those of all
        batches concatenated. AssertionError for a metric that is a mean over examples.
        """
        metric = self.measures[name]
        assert isinstance(metric, Metric), f"{name} is a mean over examples"
        return float(metric.value(*statistics))

    def snapshot(self) -> Snapshot:
        """The attributes of module and loss, to compare before and after a pass (`difference`).

        Those of the loss are under "loss NAME". Captured and plain parts have none, so that the
        result is {} if both are: a graph has no state, and of a plain part all code is torch's or
        ours and writes to no attribute (docs/proofs/isolation.md). Whether a part is plain is
        looked up anew, since it may have been changed after the task was made.
        """
        stateless = self.module_captured or is_plain(self._learning)
        module = {} if stateless else snapshot(self._learning)
        stateless = self.loss_captured or is_plain_function(self.loss)
        loss = {} if stateless else snapshot(self.loss)
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
    """Inverse of `Task.__reduce__`: the task, made again in another process.

    Args:
        module: The module, whose learning parameters are empty.
        shapes: The shapes of the learning parameters by name.
        vector: All of them as one vector [P].
        loss: The loss.
        metrics: The metrics.
        found: The values of the attributes in `_SENT`.
        graphs: The graphs, as `Task.graphs` has them.
    """
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


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _run_module(module: nn.Module, named: Named, x: Features) -> torch.Tensor:
    """The module's outputs on x with the parameters in `named`.

    Named inputs become keyword arguments. Raises BadInput if the outputs are not one tensor.
    """
    args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
    return tensor_of(functional_call(module, named, args, kwargs))


def _without_parameters(module: nn.Module) -> nn.Module:
    """A copy of `module` whose learning parameters have a shape and no values.

    It runs with the parameters that it is given. A module that uses such a parameter in another way
    than by its name then fails, instead of learning nothing. Frozen parameters are those of the
    module itself, not copied. Raises BadInput for a module that cannot be copied.
    """
    parameters = {
        id(p): nn.Parameter(torch.empty(p.shape, device="meta")) if p.requires_grad else p
        for p in module.parameters()
    }
    try:
        return copy.deepcopy(module, parameters)
    except (RuntimeError, TypeError, AttributeError) as e:
        raise BadInput(
            f"the model cannot be copied, and training runs a copy: {first_line(e)}; compute "
            "tensors that are not parameters in forward, or by torch.nn.utils.parametrizations"
        ) from e


def _check_module(module: nn.Module) -> None:
    """Raise BadInput for a module that cannot be trained under a clip.

    Refused are batch norm with running statistics, sparse gradients, modules without learning
    parameters, parameters without a shape, and learning ones that are not floating point.
    """
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
            raise BadInput(f"parameter {name!r} has no shape yet: pass one batch through the model")
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise BadInput(f"parameter {name!r} is {parameter.dtype}: floating point is needed")
