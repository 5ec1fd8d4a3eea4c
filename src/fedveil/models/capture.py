"""Capture a module as a graph that cannot remember, by `torch.export`.

A module's code may keep what it sees anywhere: in a global, a closure, a cache, a file. So a module
that is not plain is run once, on tensors without numbers, to write down its operators; afterwards
those are computed, and its code no more. Capturing leaves such tensors in whatever the module
remembers, so it is done in a fork.

| what the module or loss does | what happens |
|---|---|
| writes to a parameter, a buffer, a constant or its inputs | Uncapturable |
| calls an operator of its own, or one that is not listed | Uncapturable that names it |
| draws random numbers, but for dropout | Uncapturable that names the operator |
| decides by the values of its inputs or weights | Uncapturable |
| has gradients (`autograd.Function`) that are not those of its operators | Uncapturable |
| depends on the number of records | captured for one record if results agree, or Uncapturable |
| keeps something, and uses it in a later pass | harmless: the graph has no later pass |
"""

import builtins
import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from fedveil.base.errors import FedveilError, one_line
from fedveil.base.inputs import Inputs, kind_of, mapped, tensor_of, values_of
from fedveil.models.dropout import Dropout
from fedveil.models.graph import (
    PURE,
    SIZES,
    Graph,
    Operation,
    Ref,
    function_of,
    hollow_copy,
    not_in_place,
    plain_tensor,
)
from fedveil.models.memory import is_plain
from fedveil.models.vmap_layers import write_out_

_RECORDS = 4
_ROOM = 1e-3
_PREFIX = "part."
_ONE_NUMBER = "it is written for one number of records"
_NO_VALUE = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range")
"""Checks of what is known when a module is captured; they compute nothing."""


class Uncapturable(FedveilError):
    """A module or loss cannot be captured. The message says why, in a few words."""


def prepare() -> None:
    """Load what capturing needs, so that every fork has it. Takes about two seconds, once.

    A small module is captured for that, since torch imports and builds much when it captures its
    first one. torch's global generator is left as it was.
    """
    if _DECLARED:
        return
    _declare()
    with warnings.catch_warnings(), torch.enable_grad(), torch.random.fork_rng([]):
        warnings.simplefilter("ignore")
        small = _Called(_Small(), keyed=False, loss=False)
        _export(small, torch.zeros(_RECORDS, 1), alone=False)


def capture_graph(
    part: Any, given: Inputs[torch.Tensor], *, keyed: bool = False, loss: bool = False
) -> Graph:
    """The graph of a module, or of a loss of `outputs` and `y`, for inputs like `given`.

    The graph is compared with the part's own code on the inputs: outputs and gradients, for several
    numbers of records. Raises Uncapturable if they differ, or if the part does what the table at
    the top of this module forbids.

    Args:
        part: The module or loss. Capturing spoils it: call this in a fork, or on a copy.
        given: A few records, or {"outputs": ..., "y": ...} for a loss.
        keyed: Whether dropout is captured as such. Otherwise it is refused like every other draw.
        loss: Whether `part` is a loss.
    """
    _declare()
    _CALLS.clear()
    if isinstance(part, nn.Module):
        not_in_place(write_out_(part, recurrent_only=True))
    own = _same_tensors(part)
    made, reasons = _Called(part, keyed=keyed, loss=loss), []
    for records, length in ((_RECORDS, len), (_RECORDS, _length), (1, len)):
        zeros = mapped(partial(_repeat_rows, records), mapped(torch.zeros_like, given))
        try:
            with _quiet(), torch.enable_grad(), _lengths_by(length):
                graph = _export(made, zeros, alone=records == 1)
            with _quiet():
                reason = _disagreement(own, graph, given, keyed=keyed, loss=loss)
            if not reason:
                return graph
            reasons.append(reason)
        except Uncapturable as e:
            reasons.append(str(e))
    raise Uncapturable(reasons[-1] if reasons[0] == _ONE_NUMBER else reasons[0])


def _length(values: Any) -> Any:
    """`len`, but for a tensor the size of its first axis, which may be symbolic.

    So a module that calls `len` is captured for any number of records.
    """
    if isinstance(values, torch.Tensor) and values.ndim:
        return values.shape[0]
    return _LEN(values)


_LEN = len


@contextmanager
def _lengths_by(length: Callable[..., Any]) -> Iterator[None]:
    """Context manager: replace the built-in `len` by `length`, for the whole process."""
    vars(builtins)["len"] = length
    try:
        yield
    finally:
        vars(builtins)["len"] = _LEN


def _repeat_rows(records: int, values: torch.Tensor) -> torch.Tensor:
    """`records` rows of values, from the first on, and from the first again if there are fewer."""
    return values[torch.arange(records) % len(values)]


def _same_tensors(part: Any) -> Any:
    """A copy of a module with the same parameter and buffer objects. Functions are not copied."""
    if not isinstance(part, nn.Module):
        return part
    return copy.deepcopy(part, {id(v): v for v in (*part.parameters(), *part.buffers())})


def _export(made: "_Called", x: Inputs[torch.Tensor], *, alone: bool) -> Graph:
    """The graph of a module on records x, by `torch.export`. Raises Uncapturable if that fails.

    It holds for any number of records or, with `alone`, for one.
    """
    any_number = {0: torch.export.Dim.DYNAMIC}
    shapes = None if alone else (mapped(lambda _: any_number, x),)
    try:
        program = torch.export.export(made, (x,), dynamic_shapes=shapes, strict=False)
        program = program.run_decompositions({})
    except FedveilError:
        raise
    except Exception as e:
        raise Uncapturable(_reason(e)) from e
    return _graph(program, x, alone=alone)


def _disagreement(
    own: Any, graph: Graph, given: Inputs[torch.Tensor], *, keyed: bool, loss: bool
) -> str:
    """How the graph differs from the part's own code on `given`, "" if it does not.

    A clause for a message, such as "its gradients are not those of the operators that it calls".
    Outputs and gradients are compared for one, two and three records, to 0.1 %.

    Args:
        own: The module or loss.
        graph: Its graph.
        given: A few records, or {"outputs": ..., "y": ...} for a loss.
        keyed: Whether dropout is part of the graph.
        loss: Whether `own` is a loss.
    """
    whole = isinstance(own, nn.Module)
    root = hollow_copy(own if whole else nn.Module(), same_parameters=True)
    root.graphs[kind_of(given)] = graph
    learning = [p for p in own.parameters() if p.requires_grad] if whole else []
    for records in (1, 2, 3):
        x = mapped(partial(_repeat_rows, records), given)
        results = []
        for what, computed in (("it", own), ("its graph", root)):
            try:
                graphs = {"keyed": keyed, "loss": loss, "graph": computed is root}
                results.append(_outputs_and_gradients(computed, x, learning, **graphs))
            except (RuntimeError, IndexError, TypeError, ValueError, KeyError) as e:
                return f"{what} fails for {records} records: {one_line(e)}"
        for at, (a, b) in enumerate(zip(*results, strict=False)):
            room = _ROOM * float(a.detach().abs().nan_to_num(posinf=0).max()) if a.numel() else 0
            if a.shape != b.shape or not torch.allclose(a, b, _ROOM, room, equal_nan=True):
                what = "gradients" if at else "outputs"
                return f"its {what} are not those of the operators that it calls"
    return ""


def _outputs_and_gradients(
    computed: Any,
    x: Inputs[torch.Tensor],
    learning: list[nn.Parameter],
    *,
    keyed: bool,
    loss: bool,
    graph: bool,
) -> list[torch.Tensor]:
    """A list of the outputs of a module or loss on x, then of gradients, all detached.

    Gradients are of the outputs' weighted sum. There are none if the outputs need no gradient.

    Args:
        computed: The module, the loss, or a captured form of it.
        x: The records, or {"outputs": ..., "y": ...} for a loss.
        learning: The parameters whose gradients are computed. For a loss, that of `outputs`
            follows.
        keyed: Whether dropout is keyed. It drops if there is one record.
        loss: Whether `computed` is a loss.
        graph: Whether `computed` is called as a graph is, with named inputs.
    """
    key = torch.tensor(1) if keyed and len(values_of(x)[0]) == 1 else None
    leaves = list(learning)
    if loss and isinstance(x, dict):
        x = {"outputs": x["outputs"].detach().clone().requires_grad_(), "y": x["y"]}
        leaves.append(x["outputs"])  # type: ignore[arg-type]
    with torch.enable_grad(), Dropout(key) if keyed else nullcontext():
        out = _call(computed, x, loss=loss and not graph)
        if not out.requires_grad or not leaves:
            return [out.detach()]
        weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape).to(out.dtype)
        found = torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True)
    return [out.detach(), *found]


def _reason(error: Exception) -> str:
    """Why torch failed to capture a module, as a clause on one line, from torch's error."""
    text = str(error)
    if "data-dependent" in text:
        return "it decides by the values of its inputs or weights"
    if "Constraints violated" in text:
        return _ONE_NUMBER
    if any(word in text for word in ("unbacked", "not tracked with proxy", "zuf", "zf")):
        return "it keeps numbers of its inputs from one operator to another outside of torch"
    return one_line(Exception(text.split("\n")[0] or type(error).__name__))


def _call(part: Any, x: Inputs[torch.Tensor], *, loss: bool) -> torch.Tensor:
    """The outputs of a module, or of a loss of `outputs` and `y`, called as a task calls it.

    Raises BadInput if a module's outputs are not one tensor.
    """
    if loss and isinstance(x, dict):
        losses: torch.Tensor = part(x["outputs"], x["y"])
        return losses
    return tensor_of(part(**x) if isinstance(x, dict) else part(x))


class _Called(nn.Module):
    """A module or loss as a task calls it. Its plain layers are recorded as single operators.

    Attributes:
        part: The module or loss, whose plain layers are changed.
        keyed: Whether dropout is recorded.
        loss: Whether `part` is a loss.
    """

    def __init__(self, part: Any, *, keyed: bool, loss: bool) -> None:
        """Replace `forward` of each plain layer of `part` by one that records the call."""
        super().__init__()
        self.part, self.keyed, self.loss = part, keyed, loss
        layers = part.named_modules() if isinstance(part, nn.Module) else ()
        plain = [(n, layer, _same_tensors(layer)) for n, layer in layers if is_plain(layer)]
        for name, layer, same in plain:
            vars(layer)["forward"] = self._recording_forward(name, same)

    def forward(self, x: Inputs[torch.Tensor]) -> torch.Tensor:
        """The output, one tensor. All inputs must have as many records as the first."""
        first, *others = values_of(x)
        for values in others:  # they have as many records
            torch._check(values.shape[0] == first.shape[0])  # type: ignore[no-untyped-call]
        with _Recorder(keyed=self.keyed):
            return _call(self.part, x, loss=self.loss)

    def _recording_forward(self, name: str, layer: nn.Module) -> Callable[..., Any]:
        """A forward function that adds a call of the plain layer `name` to `_CALLS`.

        It returns what the layer returns, with tensors from the operator `fedveil.layer`. It raises
        Uncapturable for arguments that are no tensors, numbers or strings.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            given, spec = tree_flatten((args, kwargs))
            if not all(v is None or isinstance(v, _GIVEN) for v in given):
                raise Uncapturable(f"layer {name!r} gets something that is no tensor or number")
            tensors, form = _split_tensors(given)
            call = _Call(name, layer, spec.unflatten(form))
            _CALLS.append(call)
            outputs = torch.ops.fedveil.layer(len(_CALLS) - 1, tensors)
            return tree_map(partial(_tensor_at_place, outputs), call.gives)

        return forward


class _Small(nn.Module):
    """A layer of torch's own and some operators, for `prepare` to capture."""

    def __init__(self) -> None:
        """Draws the layer's weights from torch's global generator."""
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output for records x [N, 1]."""
        return torch.tanh(nn.functional.linear(self.layer(x), self.layer.weight)) * 2


_GIVEN = (torch.Tensor, bool, int, float, str, torch.SymInt, torch.dtype)


@dataclass(frozen=True)
class _Place:
    """The number of a tensor among those that a layer receives or returns."""

    index: int


def _split_tensors(values: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """(the tensors among values, the values with a `_Place` instead of each tensor)."""
    tensors: list[torch.Tensor] = []
    form = list(values)
    for at, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            form[at] = _Place(len(tensors))
            tensors.append(value)
    return tensors, form


def _tensor_at_place(tensors: Sequence[Any], value: Any) -> Any:
    """The tensor of `tensors` that a `_Place` stands for. Other values are returned as they are."""
    return tensors[value.index] if isinstance(value, _Place) else value


@dataclass
class _Call:
    """A call of a plain layer.

    Attributes:
        name: The layer's name in the module.
        layer: The layer.
        gets: (args, kwargs) with a `_Place` instead of each tensor.
        gives: What it returns, in the same form, None before it is known.
    """

    name: str
    layer: nn.Module
    gets: Any
    gives: Any = None


_CALLS: list[_Call] = []
"""The calls of the capture at work: an operator of torch can be given their numbers alone."""

_DECLARED: list[torch.library.Library] = []


def _declare() -> None:
    """Declare the operators that stand for a plain layer and for dropout during a capture, once."""
    if _DECLARED:
        return
    library: Any = torch.library.Library("fedveil", "DEF")  # type: ignore[no-untyped-call]
    library.define("layer(int number, Tensor[] inputs) -> Tensor[]")
    library.define("drop(str kind, Tensor x, float p) -> Tensor")
    torch.library.register_fake("fedveil::layer", _layer_shapes, lib=library)
    torch.library.register_fake("fedveil::drop", lambda kind, x, p: x.clone(), lib=library)
    _DECLARED.append(library)


def _layer_shapes(number: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of recorded call `number` as tensors without numbers, in a list.

    Also stores the form of what the layer returns in the call's `gives`.
    """
    call = _CALLS[number]
    mode = torch._guards.detect_fake_mode(inputs)
    held = {
        name: value if mode is None else mode.from_tensor(value, static_shapes=True)
        for name, value in (*call.layer.named_parameters(), *call.layer.named_buffers())
    }
    args, kwargs = tree_map(partial(_tensor_at_place, inputs), call.gets)
    leaves, spec = tree_flatten(torch.func.functional_call(call.layer, held, args, kwargs))
    tensors, form = _split_tensors(leaves)
    call.gives = spec.unflatten(form)
    return [v.clone() for v in tensors]


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """torch's cross-entropy written out: `torch.export` gets the shape of its operator wrong.

    Raises Uncapturable for targets of floats, and for weights with a mean or with smoothing.
    """
    soft = target.is_floating_point()
    if soft or (weight is not None and (label_smoothing or reduction == "mean")):
        raise Uncapturable("it calls cross_entropy with soft or weighted labels: write it out")
    along = 1 if input.ndim > 1 else 0
    scores, without = nn.functional.log_softmax(input, along), target == ignore_index
    labels = target.masked_fill(without, 0)
    losses = -scores.gather(along, labels.unsqueeze(along)).squeeze(along)
    if weight is not None:
        losses = losses * weight[labels]
    if label_smoothing:
        smooth = label_smoothing / input.shape[along] * -scores.sum(along)
        losses = (1 - label_smoothing) * losses + smooth
    losses = losses.masked_fill(without, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~without).sum()


class _Recorder(Dropout):
    """Mode in which dropout is recorded, and outputs computed under `no_grad` are detached.

    `run_decompositions` forgets `no_grad`, and `detach` says the same.
    """

    def __init__(self, *, keyed: bool) -> None:
        """`keyed`: dropout is recorded. Otherwise it runs, and is refused as a draw."""
        super().__init__(None)
        self._keyed = keyed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, with dropout and cross-entropy replaced. Returns its result."""
        if func is nn.functional.cross_entropy:
            func = _cross_entropy
        if self._keyed:
            out = super().__torch_function__(func, types, args, kwargs)
        else:
            out = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() or getattr(func, "__name__", "").endswith("_"):
            return out
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            return out.detach()
        return out

    def drop(self, kind: str, x: torch.Tensor, p: float) -> torch.Tensor:
        """The result of an operator that is recorded as dropout. It drops nothing here."""
        found: torch.Tensor = torch.ops.fedveil.drop(kind, x, p)
        return found


def _graph(program: Any, x: Inputs[torch.Tensor], *, alone: bool) -> Graph:
    """The nodes of an exported program as a `Graph`, `alone` if it holds for one record.

    Raises Uncapturable if an operator may remember, draw or write, or if there are several outputs.
    `x` are the inputs that it was exported with, whose names count.
    """
    signature = program.graph_signature
    written = [spec for spec in signature.output_specs if spec.kind.name != "USER_OUTPUT"]
    if written:  # a buffer, a parameter or an input
        raise Uncapturable(f"it writes to {str(written[0].target).removeprefix(_PREFIX)!r}")
    if len(signature.output_specs) != 1:
        raise Uncapturable("it gives more than one tensor")
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    inputs = iter(x if isinstance(x, dict) else [None])
    steps: list[Operation] = []
    constants: dict[str, torch.Tensor] = {}
    places: dict[Any, Ref] = {}

    def referred(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return places[value]
        if isinstance(value, list | tuple):
            items = [referred(v) for v in value]
            return tuple(items) if type(value) is tuple else items
        if isinstance(value, dict):
            return {key: referred(v) for key, v in value.items()}
        if value is None or isinstance(value, _WRITTEN):
            return value
        raise Uncapturable(f"it computes with a {type(value).__name__}")

    for node in program.graph.nodes:
        if node.op == "placeholder":
            step = _placeholder_step(specs[node.name], program, constants, inputs)
        elif node.op == "output":
            (output,) = node.args[0]
            step = Operation("operator.getitem", ([referred(output)], 0))
        elif node.op != "call_function":
            raise Uncapturable(f"it holds a {node.target}, which is no operator")
        elif _operator_name(node.target).split(".")[1:2] in ([name] for name in _NO_VALUE):
            continue
        else:
            step = _call_step(node, referred)
        places[node] = Ref(len(steps))
        steps.append(step)
    return Graph(tuple(steps), constants, alone)


_WRITTEN = (
    *(bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _placeholder_step(
    spec: Any, program: Any, constants: dict[str, torch.Tensor], inputs: Iterator[Any]
) -> Operation:
    """The operation for an input, parameter, buffer or constant of the program.

    A constant is copied into `constants`. Raises Uncapturable for anything else.

    Args:
        spec: torch's description of the input.
        program: The exported program.
        constants: The constants so far, by name. It is added to.
        inputs: The names of the module's inputs in order, None for a single one. One is taken.
    """
    match spec.kind.name:
        case "USER_INPUT":
            return Operation("input", (next(inputs),))
        case "PARAMETER" | "BUFFER":
            return Operation("held", (spec.target.removeprefix(_PREFIX),))
        case "CONSTANT_TENSOR":
            constant = program.constants[spec.target]
            if not isinstance(constant, torch.Tensor) or constant.requires_grad:
                raise Uncapturable(f"it computes with {spec.target!r}, which is not its own")
            constants[spec.target] = plain_tensor(constant).clone()
            return Operation("constant", (spec.target,))
    raise Uncapturable(f"it holds a {spec.kind.name.lower()}")


def _operator_name(target: Any) -> str:
    """The name of an operator, such as aten.relu.default, operator.add or fedveil.drop.default."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    home = getattr(target, "__module__", "").replace("_operator", "operator")
    return f"{home}.{getattr(target, '__name__', target)}"


def _call_step(node: Any, referred: Callable[[Any], Any]) -> Operation:
    """The operation for a node that calls an operator.

    `referred` turns the node's arguments to `Ref`s and values. Raises Uncapturable for an operator
    that is not allowed.
    """
    name = _operator_name(node.target)
    if name == "fedveil.layer.default":
        number, tensors = node.args
        fill = partial(_tensor_at_place, referred(list(tensors)))
        args, kwargs = tree_map(fill, _CALLS[number].gets)
        return Operation("layer", (_CALLS[number].name, args, kwargs))
    if name == "fedveil.drop.default":
        kind, x, p = node.args
        return Operation(f"drop.{kind}", (referred(x), p))
    args, kwargs = referred(tuple(node.args)), referred(dict(node.kwargs))
    _check_operator(name, node.target, args, kwargs)
    return Operation(name, args, kwargs)


_DROPOUT_AT = {"scaled_dot_product_attention": 4, "lstm": 5, "gru": 5, "rnn_tanh": 5, "rnn_relu": 5}
"""Where operators that may draw have the share that they drop."""


def _check_operator(name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise Uncapturable for an operator that draws, writes, or is not on the list `PURE`.

    An operator that may draw passes if its arguments say that it drops nothing.
    """
    if name in SIZES:
        return
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        raise Uncapturable(f"it calls {name}, which is no operator of torch's own")
    word = target._schema.name.partition("::")[2]
    if torch.Tag.nondeterministic_seeded in target.tags:
        at = _DROPOUT_AT.get(word)
        share = 1.0 if at is None else kwargs.get("dropout_p", args[at] if len(args) > at else 0.0)
        learns = word == "scaled_dot_product_attention" or at is None or bool(args[at + 1])
        if share and learns:
            raise Uncapturable(f"it draws random numbers ({word}), which only dropout may")
    try:
        listed = bool(function_of(name)) and word in PURE and not target._schema.is_mutable
    except KeyError:
        listed = False
    if not listed:
        raise Uncapturable(f"it calls {word}, which is not on the list of operators without memory")


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager: drop what torch warns and prints while it captures.

    Standard output and error of the whole process lead nowhere inside.
    """
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        sys.stdout.flush()
        sys.stderr.flush()
        before = [(stream, os.dup(stream)) for stream in (1, 2)]
        for stream, _ in before:
            os.dup2(nowhere.fileno(), stream)
        try:
            yield
        finally:
            for stream, own in before:
                os.dup2(own, stream)
                os.close(own)
