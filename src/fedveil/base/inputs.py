"""The inputs and targets of records.

Inputs are one array, or several by name, and the functions below treat both alike. A module is
called with the array, or with the named ones as keyword arguments. `Target` describes what is to
be predicted, `tensor_of` finds the tensor among what a module returns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from fedveil.base.errors import BadInput

A = TypeVar("A")
B = TypeVar("B")

Inputs: TypeAlias = dict[str, A] | A
"""One array or tensor, or several of the same length by name."""

Kind = tuple[tuple[str, torch.Size, torch.dtype], ...]
"""What inputs look like but for the number of records: (name, shape of a record, dtype) of each."""

PADDING = -100
"""The label of a place that counts for nothing, such as one behind the end of a text."""


@dataclass(frozen=True)
class Target:
    """What a model predicts for a record: labels, several labels at once, or numbers.

    | `classes` | targets | what they are |
    |---|---|---|
    | 0 | real numbers [records, *shape] | numbers, one without a `shape` |
    | C | whole numbers [records, *shape] | one of C labels in each place; -100 in none |
    | C | real numbers [records, C] | `several` of C labels at once: how true each is, 0 to 1 |

    >>> print(Target(10), Target(500, (20,)), Target(0, (3,)), sep="; ")
    10 labels; 500 labels in each of (20,) places; (3,) numbers to predict
    """

    classes: int
    shape: tuple[int, ...] = ()
    several: bool = False

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of a model's outputs for one record, without the batch axis.

        (*shape, classes) for labels, otherwise `shape`, and (1,) for one number.
        """
        if self.classes and not self.several:
            return (*self.shape, self.classes)
        return self.shape or (1,)

    def __str__(self) -> str:
        """The target in a few words, for messages."""
        if self.several:
            return f"{self.classes} labels, several of them at once"
        if not self.classes:
            return f"{self.shape} numbers to predict" if self.shape else "a number to predict"
        return f"{self.classes} labels" + (f" in each of {self.shape} places" if self.shape else "")


def mapped(function: Callable[[A], B], inputs: Inputs[A]) -> Inputs[B]:
    """The result of a function on the array or, for named inputs, a dict of its results by name.

    >>> mapped(len, [1, 2]), mapped(len, {"ids": [1, 2], "mask": [1]})
    (2, {'ids': 2, 'mask': 1})
    """
    if isinstance(inputs, dict):
        return {name: function(value) for name, value in inputs.items()}
    return function(inputs)


def single(inputs: Inputs[A]) -> A:
    """The one array of the inputs, as it is. Raises AssertionError for named inputs."""
    if isinstance(inputs, dict):
        raise AssertionError("records of one input are needed")
    return inputs


def values_of(inputs: Inputs[A]) -> list[A]:
    """A list of the arrays: the one, or all named ones in the order of the dict. No copies."""
    return list(inputs.values()) if isinstance(inputs, dict) else [inputs]


def arrays_by_name(what: str, inputs: Inputs[A]) -> dict[str, A]:
    """A dict of the arrays: {what: array} or, for named inputs, {"what.name": array, ...}."""
    if isinstance(inputs, dict):
        return {f"{what}.{name}": value for name, value in inputs.items()}
    return {what: inputs}


def taken(inputs: Inputs[A], rows: Any) -> Inputs[A]:
    """The inputs with some rows of each array, in the form of `inputs`.

    `rows` is anything that indexes an array: a slice, numbers, a mask. None adds an axis in front,
    which makes one record a batch.
    """
    if isinstance(inputs, dict):
        return {name: values[rows] for name, values in inputs.items()}  # type: ignore[index]
    return inputs[rows]  # type: ignore[index,no-any-return]


def count(inputs: Inputs[Any]) -> int:
    """The number of records: the length of the first array. Lengths are not compared."""
    return len(values_of(inputs)[0])


def join_inputs(parts: list[Inputs[A]], function: Callable[[list[A]], B]) -> Inputs[B]:
    """The inputs of several parts, joined by a function of the list of their arrays.

    Named inputs are joined name by name. `parts` may not be empty, and all parts have the names of
    the first: a missing name raises KeyError.

    >>> join_inputs([{"a": 1}, {"a": 2}], sum), join_inputs([1, 2], sum)
    ({'a': 3}, 3)
    """
    first = parts[0]
    if isinstance(first, dict):
        named: list[Mapping[str, A]] = [part for part in parts if isinstance(part, dict)]
        return {name: function([part[name] for part in named]) for name in first}
    return function([part for part in parts if not isinstance(part, dict)])


def shape_of(inputs: Inputs[Any]) -> Inputs[tuple[int, ...]]:
    """The shape of one record, without the first axis, or a dict of such shapes by input name."""
    return mapped(lambda values: tuple(values.shape[1:]), inputs)


def kind_of(x: Inputs[torch.Tensor]) -> Kind:
    """The kind of some inputs: (name, shape of one record, type) of each, sorted by name.

    A single input is called "x", named ones "x.NAME".

    >>> kind_of(torch.zeros(4, 2))
    (('x', torch.Size([2]), torch.float32),)
    """
    return tuple((name, v.shape[1:], v.dtype) for name, v in sorted(arrays_by_name("x", x).items()))


def tensor_of(returned: object) -> torch.Tensor:
    """The tensor in the value that a module returns: its `logits`, or the only tensor in it.

    So tuples, lists, dicts and the `ModelOutput` of Hugging Face are taken. Raises BadInput if
    there are no tensors, or several of which none is called "logits".

    >>> tensor_of({"logits": torch.ones(2), "hidden": torch.zeros(2)})
    tensor([1., 1.])
    """
    if isinstance(returned, torch.Tensor):
        return returned
    kind = f"a {type(returned).__name__}"
    if isinstance(returned, Mapping):
        named, parts = returned.get("logits"), list(returned.values())
        kind += f" of {', '.join(map(repr, returned))}"
    else:
        named = getattr(returned, "logits", None)
        parts = list(returned) if isinstance(returned, tuple | list) else []
    if isinstance(named, torch.Tensor):
        return named
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) != 1:
        raise BadInput(
            f"the model returned {kind}, with {len(tensors)} tensors and none called 'logits': "
            "return one tensor of outputs, one row per example"
        )
    return tensors[0]
