"""The inputs of a record: one array, or several by name. Both are treated alike here.

A module is called with the array, or with the named ones as keyword arguments.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

A = TypeVar("A")
B = TypeVar("B")

Inputs: TypeAlias = dict[str, A] | A
"""One array or tensor, or several of the same length by name."""


def mapped(function: Callable[[A], B], inputs: Inputs[A]) -> Inputs[B]:
    """Apply a function to the array, or to each named one.

    >>> mapped(len, [1, 2]), mapped(len, {"ids": [1, 2], "mask": [1]})
    (2, {'ids': 2, 'mask': 1})
    """
    if isinstance(inputs, dict):
        return {name: function(value) for name, value in inputs.items()}
    return function(inputs)


def single(inputs: Inputs[A]) -> A:
    """The array of records that have one input without a name. Fails for named inputs."""
    if isinstance(inputs, dict):
        raise AssertionError("records of one input are needed")
    return inputs


def values_of(inputs: Inputs[A]) -> list[A]:
    """The arrays, in the order of their names."""
    return list(inputs.values()) if isinstance(inputs, dict) else [inputs]


def labelled(what: str, inputs: Inputs[A]) -> dict[str, A]:
    """The arrays by their names in messages: "x", or "x.ids" and "x.mask"."""
    if isinstance(inputs, dict):
        return {f"{what}.{name}": value for name, value in inputs.items()}
    return {what: inputs}


def taken(inputs: Inputs[A], rows: Any) -> Inputs[A]:
    """Select rows by a slice, or by anything else that indexes the arrays."""

    def some(values: Any) -> Any:
        return values[rows]

    return mapped(some, inputs)


def count(inputs: Inputs[Any]) -> int:
    """The number of records."""
    return len(values_of(inputs)[0])


def join_inputs(parts: list[Inputs[A]], function: Callable[[list[A]], B]) -> Inputs[B]:
    """Apply a function to the list of all parts' arrays, for each input name.

    All parts have the names of the first.

    >>> join_inputs([{"a": 1}, {"a": 2}], sum), join_inputs([1, 2], sum)
    ({'a': 3}, 3)
    """
    first = parts[0]
    if isinstance(first, dict):
        named: list[Mapping[str, A]] = [part for part in parts if isinstance(part, dict)]
        return {name: function([part[name] for part in named]) for name in first}
    return function([part for part in parts if not isinstance(part, dict)])


def shape_of(inputs: Inputs[Any]) -> Inputs[tuple[int, ...]]:
    """The shape of one record."""

    def shape(values: Any) -> tuple[int, ...]:
        return tuple(values.shape[1:])

    return mapped(shape, inputs)
