"""The identity of a training: its parts as a text that can be compared and hashed.

A part of this package states its identity: pairs of a word and a value, in a property `identity`.
The words never change. Classes, fields, members of enumerations and files may be renamed and moved.
Functions of ours have a word from `known_as`. A user's parts state nothing: they are identified
by their code and by what they hold. Seeds follow from identities (`seed_of`), and words from a key
and a place, for all keys at once (SplitMix64, `words_at`).
"""

import functools
import hashlib
import os
import random
import sys
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedveil.base.errors import BadInput

Stated = tuple[tuple[str, Any], ...]
"""The identity that a part states: (word, value) pairs."""

_F = TypeVar("_F", bound=Callable[..., Any])
_R = TypeVar("_R")

_Writing = Generator[Any, str, str]
"""Writes one value: yields the values inside it, receives their texts, returns its own text."""

_DEEPEST = 1000
_OURS = __name__.split(".")[0]
_HEAP_TYPE = 1 << 9
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_BUILT_IN = (int, float, complex, str, bytes, Fraction)
_EQUAL_TO_PYTHONS = (np.float64, np.int64, np.bool_)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Sources of randomness: their state is no part of anything."""

_APART = ("_parameters", "_modules", "_flat_weights", "_flat_weight_refs")
"""Attributes of a layer: its parameters and children, and references to these."""

_OF_EVERY_LAYER = frozenset(vars(nn.Module()))
_WITHOUT_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def known_as(word: str) -> Callable[[_F], _F]:
    """Give a function of this package the word by which it enters identities."""

    def give(function: _F) -> _F:
        vars(function)["identity"] = word
        return function

    return give


def named_values(part: object, *words: str) -> Stated:
    """The pairs of words that are also names of attributes of the part."""
    return tuple((word, getattr(part, word)) for word in words)


def identity(value: Any) -> str:
    """The same text for equal parts in every process, and another for parts that differ.

    Guarantee: a part of this package enters by the pairs it states and by nothing else. Functions
    of a user enter by their code, closure, defaults and attributes, and by the global values,
    functions and classes that they read; objects by their class, its code and all they hold;
    modules by their layers, hooks, buffers and parameters' shapes, not by parameters' values.

    | edge | behaviour |
    |---|---|
    | a part of this package that states nothing | AssertionError |
    | the same, held by a user's part | its name and what it holds |
    | a user's subclass of our part | what ours states, the subclass's code, what it adds |
    | arrays | type, shape and all bytes |
    | objects that contain each other | each is written once |
    | nested more than 1000 levels deep | BadInput |

    >>> from fedveil.privacy.sampling import Poisson
    >>> identity((Poisson(0.5), 3))
    "([sampler='poisson',rate=0.5],3)"
    """
    try:
        return without_recursion(_Writer().text_of, value)
    except RecursionError as e:
        raise BadInput(
            f"the {type(value).__name__} of this training is nested too deeply to be told from "
            "others: hold less in it"
        ) from e


def digest_of(*parts: Any) -> str:
    """SHA-256 of the parts' identity."""
    return hashlib.sha256(identity(parts).encode()).hexdigest()


def seed_of(*parts: Any) -> int:
    """A seed of 128 bits that follows from the parts."""
    return int(digest_of(*parts)[:32], 16)


def without_recursion(step: Callable[[Any], _R | Generator[Any, _R, _R]], value: Any) -> _R:
    """The result of a recursive function, with a list of generators in place of Python's stack.

    Args:
        step: Returns the result for a value, or a generator that yields the values whose results
            it needs, receives these, and returns its own. Results are no generators.
        value: Where to begin. More than 1000 generators that wait for each other are refused.
    """
    waiting: list[Generator[Any, _R, _R]] = []
    result = step(value)
    while True:
        given: Any = result
        if isinstance(result, types.GeneratorType):
            waiting.append(result)
            given = None
        elif not waiting:
            return result  # type: ignore[return-value]
        if len(waiting) > _DEEPEST:
            raise RecursionError(f"more than {_DEEPEST} levels")
        try:
            inner = waiting[-1].send(given)
        except StopIteration as end:
            waiting.pop()
            result = end.value
        else:
            result = step(inner)


class _Writer:
    """Writes one identity. Whatever is written once is referred to by its number afterwards."""

    def __init__(self) -> None:
        self._written: dict[int, tuple[int, Any]] = {}
        self._users = 0  # how many parts of a user contain what is being written

    def text_of(self, value: Any) -> str | _Writing:
        """The text of a value, or a generator that writes it."""
        match value:
            case Enum():
                return self._member(value)
            case None | bool():
                return repr(value)
            case _ if type(value) in _BUILT_IN:
                return repr(value)
            case _ if isinstance(value, _EQUAL_TO_PYTHONS):
                return repr(value.item())
            case tuple() if _is_library(type(value)):
                return self._all("(", value, ")")
            case torch.Tensor():
                return self._tensor(value)
            case np.ndarray() | np.generic():
                return self._array(np.asarray(value))
            case type():
                return self._class(value)
            case types.MethodType():
                return self._method(value)
            case types.CodeType():
                return self._after(f"{value.co_code.hex()}{value.co_names}", value.co_consts)
            case types.ModuleType():
                return value.__name__
            case types.BuiltinFunctionType():
                return self._builtin(value)
            case _ if isinstance(value, _GENERATORS):
                return self._class(type(value))
            case _ if _states(type(value)) and not isinstance(value, nn.Module):
                return self._pairs(value.identity)
        # Mutable, or made of code: written where it is met first
        if (known := self._written.get(id(value))) is not None:
            return f"#{known[0]}"
        self._written[id(value)] = len(self._written), value  # held, so that its id stays its own
        match value:
            case types.FunctionType():
                return self._function(value)
            case nn.Module():
                return self._module(value)
            case functools.partial():
                return self._after("partial", (value.func, value.args, value.keywords, vars(value)))
            case list() if _is_library(type(value)):
                return self._all("[", value, "]")
            case dict() if _is_library(type(value)):
                return self._dict(value)
            case set() | frozenset() if _is_library(type(value)):
                return self._set(value)
        if _is_ours(type(value)) and not self._users:
            raise AssertionError(f"{type(value).__qualname__} states no identity")
        return self._object(value)

    def _after(self, prefix: str, value: Any) -> _Writing:
        text = yield value
        return f"{prefix}{text}"

    def _inside(self, prefix: str, value: Any) -> _Writing:
        """The prefix, then what a user's part holds."""
        self._users += 1
        text = yield value
        self._users -= 1
        return f"{prefix}{text}"

    def _all(self, start: str, values: Iterable[Any], end: str) -> _Writing:
        texts = []
        for value in values:
            texts.append((yield value))
        return f"{start}{','.join(texts)}{end}"

    def _dict(self, values: dict[Any, Any]) -> _Writing:
        texts = []
        for key, value in values.items():
            key_text = yield key
            value_text = yield value
            texts.append(f"{key_text}:{value_text}")
        return f"{{{','.join(texts)}}}"

    def _set(self, values: Iterable[Any]) -> _Writing:
        """Sets have no order, so a member may not refer to other members."""
        texts, before = [], len(self._written)
        for value in values:
            texts.append((yield value))
            while len(self._written) > before:
                self._written.popitem()
        return f"{{{','.join(sorted(texts))}}}"

    def _pairs(self, stated: Stated) -> _Writing:
        texts = []
        for word, value in stated:
            text = yield value
            texts.append(f"{word}={text}")
        return f"[{','.join(texts)}]"

    def _method(self, method: types.MethodType) -> _Writing:
        function = yield method.__func__
        owner = yield method.__self__
        return f"{function} of {owner}"

    def _member(self, member: Enum) -> _Writing:
        """One of our enums by its value, a user's also by class and name."""
        kind = "" if _is_ours(type(member)) else (yield type(member))
        value = yield member.value
        return f"{kind}.{member.name}={value}" if kind else value

    def _tensor(self, value: torch.Tensor) -> str | _Writing:
        if value.is_meta:
            return f"meta{tuple(value.shape)}{value.dtype}"
        plain = value.detach().cpu()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.dtype in _WITHOUT_NUMPY:
            content = plain.contiguous().view(torch.uint8).numpy()
            return f"{value.dtype}{self._array(content)}"
        return self._array(plain.resolve_conj().resolve_neg().numpy())

    def _array(self, value: np.ndarray[Any, Any]) -> str | _Writing:
        kind = f"{value.dtype.descr}{value.shape}"
        if value.dtype.hasobject:
            return self._after(kind, value.tolist())
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"{kind}{content}"

    def _class(self, kind: type) -> str | _Writing:
        """A library's class by its name. The code of a user's: a notebook may redefine it."""
        if _is_ours(kind):
            return kind.__qualname__
        name = f"{kind.__module__}.{kind.__qualname__}"
        if _is_library(kind):
            return name
        if (known := self._written.get(id(kind))) is not None:
            return f"#{known[0]}"
        self._written[id(kind)] = len(self._written), kind
        return self._inside(name, list(_own_code(kind)))

    def _function(self, function: types.FunctionType) -> str | _Writing:
        ours, name = _is_ours(function), function.__qualname__
        if ours and (word := vars(function).get("identity")) is not None:
            return f"[function={word!r}]"
        if ours and not self._users:
            raise AssertionError(f"{name} is known by no word")
        if not ours:
            name = f"{function.__module__}.{name}"
        if function.__closure__ is None and (ours or _is_library(function)):
            return name
        cells = [cell_content(cell) for cell in function.__closure__ or ()]
        made = (function.__code__, cells, function.__defaults__, function.__kwdefaults__)
        return self._inside(name, (*made, vars(function), _read_by(function)))

    def _builtin(self, function: types.BuiltinFunctionType) -> str | _Writing:
        name, owner = f"{function.__module__}.{function.__qualname__}", function.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            return name
        return self._inside(f"{name} of ", owner)

    def _object(self, value: Any) -> _Writing:
        """By class and content: a library's as it would be pickled, others by all they hold."""
        kind, inherited, known = type(value), "", set[str]()
        base = next((each for each in kind.__mro__ if _states(each)), None)
        if base is not None:
            inherited = yield from self._pairs(vars(base)["identity"].fget(value))
            known = {f.name for f in fields(base)} if is_dataclass(base) else set()
        held = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in known}
        content: Any = held
        if _is_library(kind):
            content = _taken_apart(value) or held
        elif any(map(_holds_more, kind.__mro__[:-1])):
            content = (held, _taken_apart(value))
        name = yield kind
        prefix = f"{name}{getattr(value, '__qualname__', '')}{inherited}"
        return (yield from self._inside(prefix, content))

    def _module(self, layer: nn.Module) -> _Writing:
        """A layer, its children and its hooks. The names inside a layer of ours are not written."""
        held = {
            key: value
            for key, value in _numbered(vars(layer)).items()
            if key not in _APART and (key not in _OF_EVERY_LAYER or value or key == "training")
        }
        parameters: dict[Any, nn.Parameter] = {
            name: each for name, each in layer._parameters.items() if each is not None
        }
        children: list[Any] = list(layer._modules.items())
        if _is_ours(type(layer)):
            if not _states(type(layer)):
                raise AssertionError(f"{type(layer).__qualname__} states no identity")
            name = yield from self._pairs(layer.identity)  # type: ignore[arg-type]
            held = {key: value for key, value in held.items() if key in _OF_EVERY_LAYER}
            parameters = dict(enumerate(parameters.values()))
            children = [child for _, child in children]
        else:
            kind = yield type(layer)
            name = yield from self._inside(kind, getattr(type(layer), "forward", None))
        shapes = [(key, tuple(p.shape), p.requires_grad) for key, p in parameters.items()]
        return (yield from self._inside(name, (held, shapes, children)))


def _numbered(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a layer with its hooks numbered from 0: torch counts those of a process."""
    own = {key: value for key, value in attributes.items() if key in _OF_EVERY_LAYER}
    hooks = {key: value for key, value in own.items() if key.endswith("hooks") or "_hooks_" in key}
    order = sorted({number for each in hooks.values() for number in each})
    ranks = {number: rank for rank, number in enumerate(order)}
    return attributes | {
        key: {ranks[number]: hook for number, hook in each.items()} for key, each in hooks.items()
    }


def _states(kind: type) -> bool:
    """Whether a class of ours states an identity. A user's subclass of it does not."""
    return _is_ours(kind) and isinstance(vars(kind).get("identity"), property)


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).split(".")[0] == _OURS


def _is_library(value: Any) -> bool:
    """Whether torch, NumPy or Python brings this function or class.

    It is known by its name then: a run records the versions. A user's file may have the name of
    one of theirs.
    """
    name = str(getattr(value, "__module__", None))
    root = name.split(".")[0]
    if root not in ("torch", "numpy") and root not in sys.stdlib_module_names:
        return False
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
        home = os.path.dirname(getattr(sys.modules.get(root), "__file__", None) or _STANDARD)
        return file.startswith(("<frozen ", os.path.join(home, "")))
    found: Any = sys.modules.get(name)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value or (found is None and root == "builtins")


def _is_installed(value: Any) -> bool:
    """Whether some other package brings this function or class."""
    if isinstance(value, types.FunctionType):
        return _INSTALLED in value.__code__.co_filename
    return _INSTALLED in (getattr(sys.modules.get(value.__module__), "__file__", None) or "")


def _holds_more(kind: type) -> bool:
    """Whether instances hold what is not in their `__dict__`: slots, or a built-in's content."""
    written_in_c = not kind.__flags__ & _HEAP_TYPE
    return written_in_c or bool(vars(kind).get("__slots__"))


def _taken_apart(value: Any) -> Any:
    """How an object without a `__dict__` would be pickled, None if it cannot be."""
    try:
        found = value.__reduce_ex__(2)
    except (TypeError, AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None
    if isinstance(found, str):
        return found
    return [list(part) if isinstance(part, Iterator) else part for part in found]


def _own_code(kind: type) -> Iterator[tuple[str, Any]]:
    """The methods and constants of a class and of those that it inherits from."""
    for each in kind.__mro__:
        if _is_ours(each) or _is_library(each):
            continue
        for name, value in sorted(vars(each).items()):
            function = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
            function = getattr(function, "func", function)  # of a cached property
            if isinstance(function, types.FunctionType):
                yield name, function
            elif name[:2] != "__" and _is_users(value, within=each):
                yield name, value


def _read_by(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The global values, functions and classes of a user that a function reads by name.

    Those of the user's other files that it reads through a file's name are among them.
    """
    names = sorted({name for name in names_in(function.__code__) if name[:2] != "__"})
    found = []
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            if not _is_users_file(value):
                continue
            inside = [(f"{name}.{each}", vars(value).get(each)) for each in names]
            found += [pair for pair in inside if _is_users(pair[1], within=function)]
        elif _is_users(value, within=function):
            found.append((name, value))
    return found


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names that code, and the functions inside it, look up, also as attributes."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from names_in(const)


def _is_users(value: Any, within: Any) -> bool:
    """Whether a value that code reads is a user's. In installed packages, only constants are."""
    if value is None or isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return False
    if isinstance(value, bool | int | float | str | tuple):
        return True
    if isinstance(value, types.FunctionType | type):
        return not (_is_ours(value) or _is_library(value) or _is_installed(value))
    return not _is_installed(within) and (
        _is_library(type(value)) or isinstance(value, nn.Module) or not _is_installed(type(value))
    )


def _is_users_file(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    ours = module.__name__.split(".")[0] == _OURS
    return bool(file) and not (ours or file.startswith(_STANDARD) or _INSTALLED in file)


def cell_content(cell: types.CellType) -> Any:
    """The value of a closure's variable, None before it has one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


Words = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(z: Words) -> Words:
    """The finaliser of SplitMix64: a bijection in which every input bit reaches every output."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def words_at(keys: Words, places: npt.NDArray[np.integer]) -> Words:
    """Word number `places` of the sequence of each key. The two are broadcast.

    >>> words_at(np.array([7, 8], dtype=np.uint64)[:, None], np.arange(3)).shape
    (2, 3)
    """
    with np.errstate(over="ignore"):
        return mix(keys + (places.astype(np.uint64) + np.uint64(1)) * GOLDEN)
