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
| depends on the number of records | captured for one record, if that is the same; or Uncapturable |
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
from fedveil.base.inputs import Inputs, mapped, tensor_of, values_of
from fedveil.models.dropout import Dropout
from fedveil.models.graph import (
    PURE,
    SIZES,
    Graph,
    Operation,
    Ref,
    function_of,
    hollow_copy,
    kind_of,
    not_in_place,
    plain_tensor,
)
from fedveil.models.memory import is_plain
from fedveil.models.vmap_layers import unroll_

_RECORDS = 4
_ROOM = 1e-3
_PREFIX = "part."
_ONE_NUMBER = "it is written for one number of records"
_NO_VALUE = ("_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range")
"""Checks of what is known when a module is captured; they compute nothing."""


class Uncapturable(FedveilError):
    """Why a module or loss cannot be captured, in a few words."""


def prepare() -> None:
    """Import what capturing needs, so that every fork has it: about two seconds, once."""
    import torch._dynamo
    import torch._export.non_strict_utils
    import torch._functorch.aot_autograd
    import torch.export._trace  # noqa: F401

    _declare()


def captured(
    part: Any, given: Inputs[torch.Tensor], *, keyed: bool = False, loss: bool = False
) -> Graph:
    """The graph of a module, or of a loss of `outputs` and `y`, for inputs of this kind.

    The part is spoilt by it: call this in a fork, or on a copy. `keyed`: dropout is written down
    as such. Otherwise it is refused like every other draw. The graph is compared with the part's
    own code on the inputs given: outputs and gradients, for several numbers of records.
    """
    _declare()
    _CALLS.clear()
    if isinstance(part, nn.Module):
        not_in_place(unroll_(part))
    own = _same_tensors(part)
    made, reasons = _Called(part, keyed=keyed, loss=loss), []
    for records, length in ((_RECORDS, len), (_RECORDS, _length), (1, len)):
        zeros = mapped(partial(_some, records), mapped(torch.zeros_like, given))
        try:
            with _quiet(), torch.enable_grad(), _lengths_by(length):
                graph = _exported(made, zeros, alone=records == 1)
            with _quiet():
                reason = _disagreement(own, graph, given, keyed=keyed, loss=loss)
            if not reason:
                return graph
            reasons.append(reason)
        except Uncapturable as e:
            reasons.append(str(e))
    raise Uncapturable(reasons[-1] if reasons[0] == _ONE_NUMBER else reasons[0])


def _length(values: Any) -> Any:
    """The length of a tensor as one of its sizes, which is any number and not the one at hand."""
    if isinstance(values, torch.Tensor) and values.ndim:
        return values.shape[0]
    return _LEN(values)


_LEN = len


@contextmanager
def _lengths_by(length: Callable[..., Any]) -> Iterator[None]:
    """What `len` is for the module's code."""
    vars(builtins)["len"] = length
    try:
        yield
    finally:
        vars(builtins)["len"] = _LEN


def _some(records: int, values: torch.Tensor) -> torch.Tensor:
    return values[torch.arange(records) % len(values)]


def _same_tensors(part: Any) -> Any:
    """A copy with the same parameters and buffers."""
    if not isinstance(part, nn.Module):
        return part
    return copy.deepcopy(part, {id(v): v for v in (*part.parameters(), *part.buffers())})


def _exported(made: "_Called", x: Inputs[torch.Tensor], *, alone: bool) -> Graph:
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
    """How the graph differs from the part's own code, empty if it does not."""
    whole = isinstance(own, nn.Module)
    root = hollow_copy(own if whole else nn.Module(), lambda parameter: parameter)
    root.graphs[kind_of(given)] = graph
    learning = [p for p in own.parameters() if p.requires_grad] if whole else []
    for records in (1, 2, 3):
        x = mapped(partial(_some, records), given)
        results = []
        for what, computed in (("it", own), ("its graph", root)):
            try:
                results.append(
                    _result(computed, x, learning, keyed=keyed, loss=loss, graph=computed is root)
                )
            except (RuntimeError, IndexError, TypeError, ValueError, KeyError) as e:
                return f"{what} fails for {records} records: {one_line(e)}"
        for at, (a, b) in enumerate(zip(*results, strict=False)):
            room = _ROOM * float(a.detach().abs().nan_to_num(posinf=0).max()) if a.numel() else 0
            if a.shape != b.shape or not torch.allclose(a, b, _ROOM, room, equal_nan=True):
                what = "gradients" if at else "outputs"
                return f"its {what} are not those of the operators that it calls"
    return ""


def _result(
    computed: Any,
    x: Inputs[torch.Tensor],
    learning: list[nn.Parameter],
    *,
    keyed: bool,
    loss: bool,
    graph: bool,
) -> list[torch.Tensor]:
    """Outputs, and the gradients of their sum with different weights."""
    key = torch.tensor(1) if keyed and len(values_of(x)[0]) == 1 else None
    leaves = list(learning)
    if loss and isinstance(x, dict):
        x = {"outputs": x["outputs"].detach().clone().requires_grad_(), "y": x["y"]}
        leaves.append(x["outputs"])  # type: ignore[arg-type]
    with torch.enable_grad(), Dropout(key) if keyed else nullcontext():
        out = _output(computed, x, loss=loss and not graph)
        if not out.requires_grad or not leaves:
            return [out.detach()]
        weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape).to(out.dtype)
        found = torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True)
    return [out.detach(), *found]


def _reason(error: Exception) -> str:
    """torch's error message, on one line."""
    text = str(error)
    if "data-dependent" in text:
        return "it decides by the values of its inputs or weights"
    if "Constraints violated" in text:
        return _ONE_NUMBER
    if any(word in text for word in ("unbacked", "not tracked with proxy", "zuf", "zf")):
        return "it keeps numbers of its inputs from one operator to another outside of torch"
    return one_line(Exception(text.split("\n")[0] or type(error).__name__))


def _output(part: Any, x: Inputs[torch.Tensor], *, loss: bool) -> torch.Tensor:
    """Call a module, or a loss of `outputs` and `y`, as a task does."""
    if loss and isinstance(x, dict):
        losses: torch.Tensor = part(x["outputs"], x["y"])
        return losses
    return tensor_of(part(**x) if isinstance(x, dict) else part(x))


class _Called(nn.Module):
    """A module or loss, called as a task calls it, while its plain layers are recorded."""

    def __init__(self, part: Any, *, keyed: bool, loss: bool) -> None:
        super().__init__()
        self.part, self.keyed, self.loss = part, keyed, loss
        layers = part.named_modules() if isinstance(part, nn.Module) else ()
        plain = [(n, layer, _same_tensors(layer)) for n, layer in layers if is_plain(layer)]
        for name, layer, same in plain:
            vars(layer)["forward"] = self._written_down(name, same)

    def forward(self, x: Inputs[torch.Tensor]) -> torch.Tensor:
        """The output, one tensor."""
        first, *others = values_of(x)
        for values in others:  # they have as many records
            torch._check(values.shape[0] == first.shape[0])  # type: ignore[no-untyped-call]
        with _Recorded(keyed=self.keyed):
            return _output(self.part, x, loss=self.loss)

    def _written_down(self, name: str, layer: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given, spec = tree_flatten((args, kwargs))
            if not all(v is None or isinstance(v, _GIVEN) for v in given):
                raise Uncapturable(f"layer {name!r} gets something that is no tensor or number")
            tensors, form = _marked(given)
            call = _Call(name, layer, spec.unflatten(form))
            _CALLS.append(call)
            outputs = torch.ops.fedveil.layer(len(_CALLS) - 1, tensors)
            return tree_map(partial(_put, outputs), call.gives)

        return forward


_GIVEN = (torch.Tensor, bool, int, float, str, torch.SymInt, torch.dtype)


@dataclass(frozen=True)
class _Place:
    """A tensor's number among those that a layer gets or gives."""

    index: int


def _marked(values: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors among values, and the values with places instead of these."""
    tensors: list[torch.Tensor] = []
    form = list(values)
    for at, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            form[at] = _Place(len(tensors))
            tensors.append(value)
    return tensors, form


def _put(tensors: Sequence[Any], value: Any) -> Any:
    return tensors[value.index] if isinstance(value, _Place) else value


@dataclass
class _Call:
    """A call of a plain layer: (args, kwargs) that it gets and what it gives, tensors as places."""

    name: str
    layer: nn.Module
    gets: Any
    gives: Any = None


_CALLS: list[_Call] = []
"""The calls of the capture at work: an operator of torch can be given their numbers alone."""

_DECLARED: list[torch.library.Library] = []


def _declare() -> None:
    """Two operators that stand for a plain layer and for dropout while a module is captured."""
    if _DECLARED:
        return
    library: Any = torch.library.Library("fedveil", "DEF")  # type: ignore[no-untyped-call]
    library.define("layer(int number, Tensor[] inputs) -> Tensor[]")
    library.define("drop(str kind, Tensor x, float p) -> Tensor")
    torch.library.register_fake("fedveil::layer", _layer_shapes, lib=library)
    torch.library.register_fake("fedveil::drop", lambda kind, x, p: x.clone(), lib=library)
    _DECLARED.append(library)


def _layer_shapes(number: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a plain layer, as tensors without numbers."""
    call = _CALLS[number]
    mode = torch._guards.detect_fake_mode(inputs)
    held = {
        name: value if mode is None else mode.from_tensor(value, static_shapes=True)
        for name, value in (*call.layer.named_parameters(), *call.layer.named_buffers())
    }
    args, kwargs = tree_map(partial(_put, inputs), call.gets)
    leaves, spec = tree_flatten(torch.func.functional_call(call.layer, held, args, kwargs))
    tensors, form = _marked(leaves)
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
    """Cross-entropy written out: `torch.export` gets the shape of torch's own operator wrong."""
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


class _Recorded(Dropout):
    """Inside, dropout is recorded, and so is what is computed without gradients.

    `run_decompositions` forgets `no_grad`: `detach` says the same.
    """

    def __init__(self, *, keyed: bool) -> None:
        super().__init__(None)
        self._keyed = keyed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
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

    def dropped(self, kind: str, x: torch.Tensor, p: float) -> torch.Tensor:
        found: torch.Tensor = torch.ops.fedveil.drop(kind, x, p)
        return found


def _graph(program: Any, x: Inputs[torch.Tensor], *, alone: bool) -> Graph:
    """The program's nodes as steps. Raises Uncapturable if one of them may remember."""
    signature = program.graph_signature
    _check_outputs(signature)
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
            step = _held(specs[node.name], program, constants, inputs)
        elif node.op == "output":
            (output,) = node.args[0]
            step = Operation("operator.getitem", ([referred(output)], 0))
        elif node.op != "call_function":
            raise Uncapturable(f"it holds a {node.target}, which is no operator")
        elif _name(node.target).split(".")[1:2] in ([name] for name in _NO_VALUE):
            continue
        else:
            step = _step(node, referred)
        places[node] = Ref(len(steps))
        steps.append(step)
    return Graph(tuple(steps), constants, alone)


_WRITTEN = (
    *(bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _check_outputs(signature: Any) -> None:
    """Refuse writes: to a buffer, a parameter or an input."""
    written = [spec for spec in signature.output_specs if spec.kind.name != "USER_OUTPUT"]
    if written:
        name = str(written[0].target).removeprefix(_PREFIX)
        raise Uncapturable(f"it writes to {name!r}")
    if len(signature.output_specs) != 1:
        raise Uncapturable("it gives more than one tensor")


def _held(
    spec: Any, program: Any, constants: dict[str, torch.Tensor], inputs: Iterator[Any]
) -> Operation:
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


def _name(target: Any) -> str:
    """The name of an operator, such as aten.relu.default, operator.add or fedveil.drop.default."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    home = getattr(target, "__module__", "").replace("_operator", "operator")
    return f"{home}.{getattr(target, '__name__', target)}"


def _step(node: Any, referred: Callable[[Any], Any]) -> Operation:
    name = _name(node.target)
    if name == "fedveil.layer.default":
        number, tensors = node.args
        args, kwargs = tree_map(partial(_put, referred(list(tensors))), _CALLS[number].gets)
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
    """Suppress what torch warns and prints while it captures.

    In a fork nobody reads it.
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
