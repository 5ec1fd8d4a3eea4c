"""`Captured`: a module as a list of steps, each an operator of torch without side effects.

A captured module has the parameters, buffers and plain layers of a user's module, under their
names, and none of its code. What it computes is written down in graphs, one for each kind of
inputs. A graph is data: operators are stored by name and looked up in a list.

Guarantee: a pass over a graph is a function of its inputs, of the parameters and of the keys of
dropout. Nothing of a pass is left for the next one.

| step | why it cannot remember |
|---|---|
| an operator of `PURE` | it writes to no argument, draws nothing, and reads its arguments alone |
| a plain layer (`models.memory`) | torch's own code or ours |
| dropout | its mask is a function of the record's key (`models.dropout`) |
| arithmetic of sizes | Python's own |
| memory that is not initialised (`empty`) | zeros are given instead |
"""

import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from fedveil.base.inputs import Inputs, Kind, kind_of, taken, values_of
from fedveil.models.memory import is_plain


@dataclass(frozen=True)
class Ref:
    """The value of an earlier operation of a graph, by its number."""

    index: int


@dataclass(frozen=True)
class Operation:
    """One operation of a graph.

    Attributes:
        op: "input", "held" (a parameter or buffer), "constant" or "layer", whose first argument is
            a name. Or "drop.KIND", or an operator's name, such as "aten.relu.default".
        args: Values, and `Ref`s for the values of earlier operations, nested in lists and dicts.
        kwargs: The same, by name.
    """

    op: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Graph:
    """The operations of one pass. The value of the last one is the output.

    Attributes:
        operations: The operations in order.
        constants: Tensors that captured code brought along, by name.
        alone: Whether it was captured for a single record, since it could not be for any number of
            them. A batch is then computed record by record.
    """

    operations: tuple[Operation, ...]
    constants: Mapping[str, torch.Tensor]
    alone: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: operations, constants and `alone`."""
        return Graph, (self.operations, dict(self.constants), self.alone)

    def compute(self, root: nn.Module, x: Inputs[torch.Tensor]) -> torch.Tensor:
        """The output for inputs x [B, ...], with the parameters, buffers and layers of `root`.

        A graph that is `alone` is computed for each record by vmap.
        """
        if not self.alone or len(values_of(x)[0]) == 1:
            return self._run(root, x)
        found: torch.Tensor = vmap(lambda one: self._run(root, taken(one, None))[0])(x)
        return found

    def _run(self, root: nn.Module, x: Inputs[torch.Tensor]) -> torch.Tensor:
        """The output for as many records as the graph was captured for.

        Each value is freed after its last use.
        """
        values: list[Any] = [None] * len(self.operations)
        for at, (function, step, unused) in enumerate(self._program):
            match step.op:
                case "input":
                    values[at] = x[step.args[0]] if isinstance(x, dict) else x
                case "held":
                    values[at] = reduce(getattr, step.args[0].split("."), root)
                case "constant":
                    values[at] = self.constants[step.args[0]]
                case "layer":
                    layer = root.get_submodule(step.args[0])
                    args, kwargs = _resolve(step.args[1], values), _resolve(step.args[2], values)
                    out = layer(*args, **kwargs)
                    values[at] = [v for v in tree_leaves(out) if isinstance(v, torch.Tensor)]
                case _:
                    args = [_resolve(a, values) for a in step.args]
                    kwargs = {k: _resolve(a, values) for k, a in step.kwargs.items()}
                    values[at] = function(*args, **kwargs)
            for number in unused:
                values[number] = None
        output: torch.Tensor = values[-1]
        return output

    @cached_property
    def _program(self) -> list[tuple[Callable[..., Any], Operation, tuple[int, ...]]]:
        """(function, operation, numbers of the values that are not used later) of each operation.

        Raises KeyError for an operator that is not listed. Cached.
        """
        last = dict[int, int]()
        for at, step in enumerate(self.operations):
            last |= dict.fromkeys(_refs((step.args, step.kwargs)), at)
        unused = dict[int, list[int]]()
        for number, at in last.items():
            unused.setdefault(at, []).append(number)
        return [
            (function_of(step.op), step, tuple(unused.get(at, ())))
            for at, step in enumerate(self.operations)
        ]


class Captured(nn.Module):
    """A module without code: the parameters, buffers and plain layers of another, and graphs."""

    def __init__(self) -> None:
        """Make one without parameters, layers and graphs."""
        super().__init__()
        self.graphs: dict[Kind, Graph] = {}

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """The output of the graph for inputs of this kind: one array, or named ones as keywords.

        Raises KeyError if there is no graph for this kind.
        """
        x: Inputs[torch.Tensor] = args[0] if args else kwargs
        return self.graphs[kind_of(x)].compute(self, x)


def hollow_copy(module: nn.Module, *, same_parameters: bool = False) -> Captured:
    """A copy of the module without its code: parameters, buffers and plain layers by name.

    It has no graphs yet. Learning parameters have a shape and no values or, with `same_parameters`,
    are the module's own, as frozen ones are. No layer works in place: it would write to what it is
    given, which may be a buffer.
    """
    memo: dict[int, Any] = {}
    for p in module.parameters():
        if p.requires_grad:
            shape_only = nn.Parameter(torch.empty(p.shape, device="meta"))
            memo[id(p)] = p if same_parameters else shape_only
        elif type(p) is nn.Parameter and not vars(p):
            memo[id(p)] = p
        else:
            memo[id(p)] = nn.Parameter(plain_tensor(p), requires_grad=False)
    made: dict[int, nn.Module] = {}
    root = Captured()
    _copy_into(root, module, memo, made)
    not_in_place(root)
    return root


def not_in_place(module: nn.Module) -> None:
    """Switch `inplace` off in all layers of `module` itself, so that none writes to its inputs."""
    for layer in module.modules():
        if getattr(layer, "inplace", False) is True:
            vars(layer)["inplace"] = False


def _copy_into(
    new: nn.Module, old: nn.Module, memo: dict[int, Any], made: dict[int, nn.Module]
) -> None:
    """Fill `new` with the parameters, buffers and children of `old`, under the same names.

    Parameters are those that `memo` has for them. Buffers are detached clones. `new` gets the mode
    of `old`, train or eval. A child is a deep copy if it is plain, otherwise a bare `nn.Module`
    that is filled in the same way. A child that occurs twice is one module in the copy.

    Args:
        new: The module to fill, in place.
        old: The module to copy from.
        memo: The parameter of the copy for each parameter of `old`, by the id of the latter.
        made: The copies of modules so far, by the id of the original. It is added to.
    """
    made[id(old)] = new
    new.training = old.training
    for name, parameter in old._parameters.items():
        new.register_parameter(name, None if parameter is None else memo[id(parameter)])
    for name, buffer in old._buffers.items():
        new.register_buffer(name, None if buffer is None else plain_tensor(buffer).clone())
    for name, child in old._modules.items():
        if child is not None and id(child) not in made:
            if (plain := _plain_copy(child, memo)) is not None:
                made[id(child)] = plain
            else:
                _copy_into(nn.Module(), child, memo, made)
        new.register_module(name, None if child is None else made[id(child)])


def _plain_copy(child: nn.Module, memo: dict[int, Any]) -> nn.Module | None:
    """A copy of a plain layer, None for other layers. `memo` has the parameters to use, by id.

    A copy's parameters have no attributes of their own, which other libraries put on them.
    """
    if not all(type(layer).__module__.startswith("torch.nn.") for layer in child.modules()):
        return copy.deepcopy(child, memo) if is_plain(child) else None
    made = copy.deepcopy(child, memo)
    return made if is_plain(made) else None


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached, as torch's own class, with the same memory.

    A class of a user's would run its code.
    """
    return tensor.detach().as_subclass(torch.Tensor)


def _resolve(value: Any, values: list[Any]) -> Any:
    """An argument with each `Ref` in it replaced by its value from `values`.

    Lists, tuples and dicts are looked through.
    """
    kind = type(value)
    if kind is Ref:
        return values[value.index]
    if kind is list or kind is tuple:
        return kind(_resolve(v, values) for v in value)
    if kind is dict:
        return {key: _resolve(v, values) for key, v in value.items()}
    return value


def _refs(value: Any) -> Iterator[int]:
    """Yield the numbers of all `Ref`s inside an argument."""
    if type(value) is Ref:
        yield value.index
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _refs(v)
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _refs(v)


_OWN = ("input", "held", "constant", "layer")

DROPS: dict[str, Callable[..., Any]] = {
    "drop.numbers": torch.dropout,
    "drop.channels": torch.feature_dropout,
    "drop.saturated": torch.alpha_dropout,
    "drop.saturated_channels": torch.feature_alpha_dropout,
}
"""Functions of torch that `models.dropout` gives keyed masks."""

SIZES: dict[str, Callable[..., Any]] = {
    f"{home.__name__}.{name}": getattr(home, name)
    for home, names in (
        (operator, "getitem add sub mul floordiv truediv mod neg pos pow lt le gt ge eq ne and_"),
        (operator, "or_ not_"),
        (math, "ceil floor trunc sqrt"),
        (torch, "sym_max sym_min sym_float sym_int sym_not sym_ite sym_sum"),
    )
    for name in names.split()
    if hasattr(home, name)
}
"""Arithmetic of sizes, and items of what an operator returns."""

PURE = frozenset(Path(__file__).with_name("pure_operators.txt").read_text().split())
"""Operators of torch's `aten` that a graph may consist of.

Left out on purpose: `instance_norm` and `batch_norm`, which write to running statistics and whose
schema does not say so; `as_strided`, `set` and `resize`, which read beside their argument;
`from_file` and everything else that reads what is no argument; everything that draws.
"""

_OPERATORS: dict[str, torch._ops.OpOverload] = {
    f"aten.{name}.{overload}": found
    for name in PURE
    if hasattr(torch.ops.aten, name)
    for overload in getattr(torch.ops.aten, name).overloads()
    for found in (getattr(getattr(torch.ops.aten, name), overload),)
    if not found._schema.is_mutable
}
"""Their overloads, as torch had them when this was imported: others may be added to it later."""

_FILLED: dict[str, Callable[..., Any]] = {
    "empty": torch.zeros,
    "empty_like": torch.zeros_like,
    "new_empty": torch.Tensor.new_zeros,
}
"""Memory that is not initialised may hold what another client left there."""

_IN_ANY_LAYOUT: dict[str, Callable[..., Any]] = {
    "view": torch.reshape,
    "_unsafe_view": torch.reshape,
}
"""A view of numbers in one layout is a copy of them in another, such as channels last."""


_SIZES: dict[str, Callable[..., Any]] = {
    "sym_size": lambda x, at: x.shape[at],
    "sym_numel": torch.Tensor.numel,
}
"""Sizes of tensors: vmap has no rule for the operators."""


def function_of(op: str) -> Callable[..., Any]:
    """The function that computes the operation named `op`.

    Raises KeyError for operators that are not listed. Operations that the graph computes itself
    (input, held, constant, layer) have a placeholder.
    """
    if op in _OWN:
        return operator.is_  # these are computed by the graph itself
    if op in DROPS:
        return lambda x, p: DROPS[op](x, p, True)  # as in training
    if op in SIZES:
        return SIZES[op]
    home, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    if home != "aten" or name not in PURE:
        raise KeyError(op)
    if name in _IN_ANY_LAYOUT and overload == "default":
        return _IN_ANY_LAYOUT[name]
    if name in _SIZES:
        return _SIZES[name]
    if name in _FILLED and overload != "out":
        return _zero_filled(_FILLED[name])
    return _OPERATORS[op]


def _zero_filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which makes zeros, with the arguments of one that makes uninitialised memory.

    It ignores `memory_format`.
    """

    def filled(*args: Any, memory_format: object = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return filled
