"""`Task`: a module with its loss and metric, seen through one flat parameter vector."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap

from fedveil.base.checks import OF_LABELS, OF_NUMBERS, shown
from fedveil.base.errors import BadInput
from fedveil.base.forks import can_fork, forked, in_fork, sealed
from fedveil.base.identity import Stated
from fedveil.base.inputs import Inputs, mapped, shape_of, taken, values_of
from fedveil.models.capture import Uncapturable, captured, prepare
from fedveil.models.dropout import Dropout
from fedveil.models.graph import Captured, Graph, Kind, hollow_copy, kind_of, tensor_of
from fedveil.models.lineage import adding, trainings_of
from fedveil.models.memory import Snapshot, is_plain, is_plain_function, snapshot
from fedveil.models.metrics import (
    Array,
    Measure,
    Metric,
    PerExample,
    is_of_labels,
    is_of_numbers,
    measures_of,
)
from fedveil.models.vmap_layers import attend_, norm_in_place_, plain_attention, under_vmap, unroll_

Named = dict[str, torch.Tensor]
"""Values under the names of the module's parameters."""

Features = Inputs[torch.Tensor]
"""The inputs of B records [B, ...]: one tensor, or several by name."""

Metrics = Mapping[str, Measure | str] | Sequence[Measure | str]
"""Metrics as people give them: by name, or as functions and objects of their own."""

_SENT = ("drops", "one_by_one", "tried", "forks")
"""What trials have learnt about a task, which goes along to other processes."""

_KEEPS_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
_NO_FIT = (AttributeError, RuntimeError, ValueError, IndexError, TypeError, KeyError)
"""What a module raises that was made for other records."""


PUBLIC_WEIGHTS = "are public: they were not learnt from these clients"
"""What claims assume of everything that a module brings along."""


@dataclass
class _TaskState:
    """What changes in a task after it was made.

    Attributes:
        measures: The metrics by name.
        learning: The copy or graphs that clients learn with.
        measuring: The copy or graphs in eval mode.
        loss: The graphs of the loss, None if its own code runs.
        forks: Why the module's own code runs, in forks; empty if it does not run.
        drops: Whether dropout is at work, None if nobody has looked.
        one_by_one: Whether vmap cannot see through the module's dropout.
        tried: Whether records see each other, by the kind of records.
    """

    measures: dict[str, Measure]
    learning: nn.Module
    measuring: nn.Module
    loss: Captured | None = None
    forks: str = ""
    drops: bool | None = None
    one_by_one: bool = False
    tried: dict[object, bool] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Task:
    """What is learnt: a module, its per-example loss, and what is measured beside the loss.

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
    well. What dropout drops of a record is said by the record's key (`models.dropout`).

    >>> from fedveil.models.metrics import squared_error
    >>> task = Task(nn.Linear(10, 1), squared_error)
    >>> task.size
    11
    """

    module: nn.Module
    loss: PerExample
    metrics: Metrics = field(default_factory=dict)
    _flat: torch.Tensor = field(init=False, repr=False)
    _slots: tuple[tuple[str, int, int, torch.Size], ...] = field(init=False, repr=False)
    _own: tuple[nn.Module, nn.Module] = field(init=False, repr=False)
    _state: _TaskState = field(init=False, repr=False)

    @property
    def identity(self) -> Stated:
        return (
            ("module", self.module),
            ("loss", self.loss),
            ("parameters", self.parameters),
            ("frozen", tuple(self.frozen.values())),
        )

    def __post_init__(self) -> None:
        check_parts(self.module, self.loss)
        measures = measures_of(self.metrics)
        _check_module(self.module)
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        flat = torch.cat([p.detach().reshape(-1) for _, p in named]).to(torch.float32)
        slots, start = [], 0
        for name, parameter in named:
            stop = start + parameter.numel()
            parameter.data = flat[start:stop].view(parameter.shape)
            slots.append((name, start, stop, parameter.shape))
            start = stop
        own = _written_out(_without_parameters(self.module)), _without_parameters(self.module)
        own[1].eval()
        state = _TaskState(measures, *own)
        if not is_plain(self.module):
            learning, measuring = (hollow_copy(self.module, _shape_only) for _ in own)
            state.learning, state.measuring = _written_out(learning), measuring.eval()
        if not is_plain_function(self.loss):
            held = self.loss if isinstance(self.loss, nn.Module) else nn.Module()
            state.loss = hollow_copy(held, _shape_only)
        object.__setattr__(self, "_flat", flat)
        object.__setattr__(self, "_slots", tuple(slots))
        object.__setattr__(self, "_own", own)
        object.__setattr__(self, "_state", state)

    def by_own_code(self) -> "Task":
        """The same task, computed by the module's and the loss's own code: for forks alone."""
        other = copy.copy(self)  # by `__reduce__`, so with a state of its own
        other._run_own_code()
        other._state.tried = {}
        return other

    def compute_in_forks(self, reason: str) -> None:
        """From here on run the module's own code, and only in forks: it cannot be captured."""
        self._run_own_code()
        self._state.forks = reason

    def _run_own_code(self) -> None:
        self._state.learning, self._state.measuring = self._own
        self._state.loss = None

    @property
    def measures(self) -> dict[str, Measure]:
        """The metrics by name."""
        return self._state.measures

    @property
    def forks(self) -> str:
        """Why the module's own code runs, in forks. Empty if it does not run at all."""
        return self._state.forks

    @property
    def module_captured(self) -> bool:
        """Whether graphs are computed instead of the module's own code."""
        return isinstance(self._state.learning, Captured)

    @property
    def loss_captured(self) -> bool:
        """Whether graphs are computed instead of the loss's own code."""
        return self._state.loss is not None

    @property
    def graphs(self) -> tuple[dict[Kind, Graph], ...]:
        """The graphs of the module as it learns, of the module as it is measured, of the loss."""
        parts = (self._state.learning, self._state.measuring, self._state.loss)
        return tuple(part.graphs if isinstance(part, Captured) else {} for part in parts)

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """Tensors that captured code brought along: taken as public, part of what is trained."""
        graphs = [graph for part in self.graphs for graph in part.values()]
        return tuple(value for graph in graphs for value in graph.constants.values())

    def __repr__(self) -> str:
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return f"Task({type(self.module).__name__}, {self.size:,} parameters, loss {name})"

    def __reduce__(self) -> tuple[Any, ...]:
        """To other processes: the module without its vector, the vector, and what trials found.

        Parameters that are views would each take the whole vector along.
        """
        hollow = _without_parameters(self.module, lambda p: nn.Parameter(torch.empty(0)))
        found: dict[str, Any] = {name: getattr(self._state, name) for name in _SENT}
        found["graphs"] = self.graphs
        vector = self._flat.numpy()
        return _sent, (hollow, self._slots, vector, self.loss, self.measures, found)

    @property
    def size(self) -> int:
        """P, the number of parameters that learn."""
        return len(self._flat)

    @property
    def frozen(self) -> Named:
        """The parameters that do not learn, by name: the module's own, never copied."""
        parameters = self.module.named_parameters()
        return {name: p.detach() for name, p in parameters if not p.requires_grad}

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of every claim about a training of this task."""
        earlier = trainings_of(self.module)
        buffers = " and buffers" if any(True for _ in self.module.buffers()) else ""
        assumptions = [f"the model's first weights{buffers} {PUBLIC_WEIGHTS}"]
        if earlier:
            assumptions = [adding(claim) for claim in earlier]
        frozen = sum(value.numel() for value in self.frozen.values())
        if frozen:
            assumptions.append(
                f"{self.size:,} of {self.size + frozen:,} parameters are trained on clients' "
                "records; the others are frozen and taken as public"
            )
        return tuple(assumptions)

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """The number of parameters of each tensor, in the order of the flat vector."""
        return tuple(stop - start for _, start, stop, _ in self._slots)

    @property
    def places(self) -> dict[str, int]:
        """Where each named parameter begins in the flat vector."""
        return {name: start for name, start, _, _ in self._slots}

    @property
    def parameters(self) -> torch.Tensor:
        """The module's parameters as one vector [P]: the module itself, not a copy of it."""
        return self._flat

    @property
    def tried(self) -> dict[object, bool]:
        """Whether records see each other, by the kind of records that `models.trial` has tried."""
        return self._state.tried

    def known_as(self, tried: dict[object, bool]) -> "Task":
        """The same task, sharing what trials found with others of the same module and loss."""
        self._state.tried = tried
        return self

    def measuring(self, metrics: Metrics) -> "Task":
        """The same task, measured by these metrics from here on."""
        self._state.measures = measures_of(metrics)
        return self

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers that `outputs` runs, by name."""
        return dict(self._state.learning.named_modules())

    def named(self, flat: torch.Tensor) -> Named:
        """Views into vectors [..., P] under the module's parameter names, [..., *shape] each."""
        parts = flat.split_with_sizes(self.layer_sizes, dim=-1)
        return {
            name: part.view((*flat.shape[:-1], *shape))
            for (name, _, _, shape), part in zip(self._slots, parts, strict=True)
        }

    def flattened(self, named: Named) -> torch.Tensor:
        """The reverse of `named`: a copy of values [..., *shape] as vectors [..., P]."""
        name, _, _, shape = self._slots[0]
        first = named[name]
        out = first.new_empty((*first.shape[: first.ndim - len(shape)], self.size))
        for name, place in self.named(out).items():
            place.copy_(named[name])
        return out

    @property
    def drops(self) -> bool:
        """Whether dropout is at work as clients learn, as `look` has seen it."""
        return bool(self._state.drops)

    def look(self, x: Features, y: torch.Tensor) -> tuple[bool, bool]:
        """Try on a few records whether the module drops, and whether vmap can run that.

        A module that does is run on one record at a time, by vmap or one after the other.
        """
        if not self._elsewhere:
            return self._looked(x, y)
        self.settle(*forked(lambda: self._looked(x, y)))
        return self.drops, self._state.one_by_one

    def settle(self, drops: bool, one_by_one: bool) -> None:
        """Record the result of a look in a fork."""
        self._state.drops, self._state.one_by_one = drops, one_by_one

    def _looked(self, x: Features, y: torch.Tensor) -> tuple[bool, bool]:
        named, given = self.named(self._flat.clone()), Dropout(None)
        with torch.no_grad(), given:
            self._run(named, x)
        self._state.drops = self.drops or given.calls > 0
        if self._state.drops and not self._state.one_by_one:
            try:
                with torch.no_grad():
                    self.losses(named, x, y, torch.arange(len(y)))
            except RuntimeError:
                self._state.one_by_one = True
        return self.drops, self._state.one_by_one

    @property
    def _elsewhere(self) -> bool:
        """Whether the module's own code is to run, and this process is no fork."""
        return bool(self._state.forks) and not in_fork()

    def outputs(self, named: Named, x: Features, key: torch.Tensor | None = None) -> torch.Tensor:
        """The module's outputs on x [B, ...] with these parameters, as clients learn.

        They are the caller's copy, never a model in use. Gradients are taken by name as well: a
        vector that is cut up inside of what is differentiated gets one vector per parameter back.
        `key` says what is dropped of the one record in x; without it nothing is.
        """
        if self._state.drops is False:
            return self._run(named, x)
        with Dropout(key):
            return self._run(named, x)

    def _run(self, named: Named, x: Features) -> torch.Tensor:
        if self._elsewhere:
            if torch.is_grad_enabled() or under_vmap():
                raise BadInput(
                    f"the model {type(self.module).__name__} could not be captured "
                    f"({self.forks}), so its gradients are computed in forks alone, one client "
                    "in each: leave out what asks for them otherwise"
                )
            return sealed(lambda: {"outputs": self._run(named, x)})["outputs"]
        self.ready(x)
        with plain_attention():
            return _called(self._state.learning, named, x)

    def each_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of each example [B], given the module's outputs on it."""
        if self._state.loss is None:
            return self.loss(outputs, y)
        self.ready_loss(outputs, y)
        found: torch.Tensor = self._state.loss(outputs=outputs, y=y)
        return found

    def ready_loss(self, outputs: torch.Tensor, y: torch.Tensor) -> None:
        """Capture the loss for outputs and targets of this kind, if need be."""
        given = {"outputs": outputs, "y": y}
        if self._state.loss is not None and kind_of(given) not in self._state.loss.graphs:
            self._state.loss.graphs[kind_of(given)] = self._graph(self.loss, given, loss=True)

    def ready(self, x: Features, y: torch.Tensor | None = None) -> None:
        """Capture the module, and with `y` the loss, for records of this kind, if need be.

        To be called before a task is computed inside of vmap or another transform.
        """
        part = self._state.learning
        if isinstance(part, Captured) and kind_of(x) not in part.graphs:
            part.graphs[kind_of(x)] = self._graph(self.module, x, keyed=True)
        if y is not None and self._state.loss is not None and not self._state.loss.graphs:
            with torch.no_grad():
                self.each_loss(self.answers(self._flat, taken(x, slice(1))), y[:1])

    def _graph(
        self, part: Any, given: Features, *, keyed: bool = False, loss: bool = False
    ) -> Graph:
        if under_vmap():
            raise BadInput("a module is captured before it is computed for several records at once")
        prepare()
        given = mapped(torch.detach, given)
        try:
            if can_fork() and not in_fork():
                return forked(lambda: captured(part, given, keyed=keyed, loss=loss))
            return captured(copy.deepcopy(part), given, keyed=keyed, loss=loss)
        except Uncapturable as e:
            raise BadInput(f"the {_word(part)} cannot be captured: {e.args[0]}") from None

    def losses(
        self, named: Named, x: Features, y: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss of each example [B]. With `keys` [B], each is computed alone with its key."""
        if keys is None:
            return self.each_loss(self.outputs(named, x), y)

        def one(x: Features, y: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return self.each_loss(self.outputs(named, taken(x, None), key), y[None])[0]

        self.ready(x, y)
        if self._state.one_by_one:
            return torch.stack([one(taken(x, k), y[k], keys[k]) for k in range(len(y))])
        found: torch.Tensor = vmap(one)(x, y, keys)
        return found

    def measure(self, flat: torch.Tensor, x: Features, y: torch.Tensor) -> "Measurements":
        """Loss and metrics on examples [B], in eval mode, on a copy of `flat`."""
        if self._elsewhere:
            return Measurements.from_tensors(sealed(lambda: self.measure(flat, x, y).to_tensors()))
        outputs = self.answers(flat, x)
        found = Measurements({"loss": self.each_loss(outputs, y)}, {})
        for name, measure in self.measures.items():
            if isinstance(measure, Metric):
                found.statistics[name] = measure.statistics(outputs, y)
            else:
                found.per_example[name] = measure(outputs, y)
        return found

    def value_of(self, name: str, statistics: Sequence[Array]) -> float:
        """The metric, from the joined statistics of all batches."""
        metric = self.measures[name]
        if not isinstance(metric, Metric):
            raise AssertionError(f"{name} is a mean over examples")
        return float(metric.value(*statistics))

    def answers(self, flat: torch.Tensor, x: Features) -> torch.Tensor:
        """The module's outputs on x [B, ...] in eval mode, on a copy of `flat`."""
        if self._elsewhere:
            return sealed(lambda: {"outputs": self.answers(flat, x)})["outputs"]
        part = self._state.measuring
        if isinstance(part, Captured) and kind_of(x) not in part.graphs:
            part.graphs[kind_of(x)] = self._graph(_in_eval_mode(self.module), x)
        return _called(part, self.named(flat.clone()), x)

    def snapshot(self) -> Snapshot:
        """A snapshot of module and loss without the parameters' values. Graphs have no state."""
        module = {} if self.module_captured else snapshot(self._state.learning)
        loss = {} if self.loss_captured else snapshot(self.loss)
        return {**module, **{f"loss {name}": token for name, token in loss.items()}}

    def check_fits(
        self, x: Features, y: torch.Tensor, classes: int, *, measured: bool = True
    ) -> None:
        """Refuse records this module, loss or these metrics cannot take. Two are tried.

        Without `measured` no metric is: a user's runs its own code, which clients' records are not
        for.
        """
        if self._elsewhere:

            def tried() -> Named:
                self.check_fits(x, y, classes, measured=measured)
                return {}

            sealed(tried)
            return
        x, y = taken(x, slice(2)), y[:2]
        try:
            with torch.no_grad():
                self.look(x, y)
                outputs = self.outputs(self.named(self._flat.clone()), x)
                if classes and outputs.shape[-1] < classes:
                    raise BadInput(
                        f"the model has {outputs.shape[-1]} outputs and the data {classes} labels: "
                        "give it one output per label"
                    )
                values = [self.losses(self.named(self._flat.clone()), x, y)]
                self._check_metrics(classes)
                if measured:
                    values += self.measure(self._flat, x, y).per_example.values()
        except BadInput:
            raise
        except _NO_FIT as e:
            shape = f"of shape {shape_of(x)}"
            if self._needs_floats(x):
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

    def _check_metrics(self, classes: int) -> None:
        """Refuse a metric of ours that is not of such targets."""
        for name, measure in self.measures.items():
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

    def _needs_floats(self, x: Features) -> bool:
        """Whether whole numbers are all that the module cannot take of these records."""
        if all(value.is_floating_point() for value in values_of(x)):
            return False
        try:
            with torch.no_grad():
                self.outputs(self.named(self._flat.clone()), mapped(torch.Tensor.float, x))
        except _NO_FIT:
            return False
        return True


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


def _in_eval_mode(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).eval()


def _word(part: object) -> str:
    """The name of a module or a loss in messages."""
    if isinstance(part, nn.Module):
        return f"model {type(part).__name__}"
    return f"loss {getattr(part, '__name__', type(part).__name__)}"


def _called(module: nn.Module, named: Named, x: Features) -> torch.Tensor:
    """The module's outputs with these parameters. Named inputs become keyword arguments."""
    args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
    return tensor_of(functional_call(module, named, args, kwargs))


@dataclass(frozen=True)
class Measurements:
    """Metrics of a batch of examples.

    Attributes:
        per_example: The loss and those metrics that are means over examples, [B] by name.
        statistics: What each `Metric` needs of the batch, by name.
    """

    per_example: dict[str, torch.Tensor]
    statistics: dict[str, tuple[Array, ...]]

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """All of it as tensors by name, which a sealed fork can return."""
        named = {f"per-example {name}": value for name, value in self.per_example.items()}
        for name, arrays in self.statistics.items():
            for k, array in enumerate(arrays):
                named[f"statistics {k} {name}"] = torch.from_numpy(array)
        return named

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> "Measurements":
        """Inverse of `to_tensors`."""
        found = cls({}, {})
        for text in sorted(tensors):
            kind, _, name = text.partition(" ")
            if kind == "per-example":
                found.per_example[name] = tensors[text]
            else:
                name = name.partition(" ")[2]
                found.statistics[name] = (*found.statistics.get(name, ()), tensors[text].numpy())
        return found


def first_line(error: BaseException) -> str:
    """The first line of torch's error message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _sent(
    module: nn.Module,
    slots: Sequence[tuple[str, int, int, torch.Size]],
    vector: Array,
    loss: PerExample,
    metrics: Metrics,
    found: Mapping[str, Any],
) -> Task:
    """Inverse of `Task.__reduce__`."""
    flat, parameters = torch.tensor(vector), dict(module.named_parameters())
    for name, start, stop, shape in slots:
        parameters[name].data = flat[start:stop].view(shape)
    task = Task(module, loss, metrics)
    for name in _SENT:
        setattr(task._state, name, found[name])
    if task.forks:
        task.compute_in_forks(task.forks)
    for own, graphs in zip(task.graphs, found["graphs"], strict=True):
        own.update(graphs)
    return task


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
    for name, layer in module.named_modules():
        where = f"layer {name or 'model'!r} is a {type(layer).__name__}"
        if isinstance(layer, _KEEPS_STATISTICS) and layer.running_mean is not None:
            raise BadInput(
                f"{where}, which mixes examples and keeps statistics of clients' data outside "
                "the clip: use fedveil.without_batch_norm(module), GroupNorm or LayerNorm"
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
