"""The identity of a training: its parts as a text that can be compared and hashed.

A part of this package states its identity: pairs of a word and a value, in a property `identity`.
The words never change. Classes, fields, members of enumerations and files may be renamed and moved.
Functions of ours have a word from `known_as`. A user's parts state nothing: they are identified
by their code and by what they hold. Seeds follow from identities (`seed_of`), and words from a key
and a place, for all keys at once (SplitMix64, `words_at`). torch is used only if it is loaded
already: accounting does without it.
"""

import functools
import hashlib
import os
import random
import sys
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from fractions import Fraction
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedveil.base.errors import BadInput

if TYPE_CHECKING:
    import torch
    from torch import nn

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
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
"""Sources of randomness: their state is no part of anything."""

_APART = ("_parameters", "_modules", "_flat_weights", "_flat_weight_refs")
"""Attributes of a layer: its parameters and children, and references to these."""


def known_as(word: str) -> Callable[[_F], _F]:
    """Decorator: give a function of this package the word by which it enters identities.

    The word is stored in the function's attribute `identity`, and the function is returned.
    """

    def give(function: _F) -> _F:
        vars(function)["identity"] = word
        return function

    return give


def named_values(part: object, *words: str) -> Stated:
    """Pairs (word, value of the attribute `word` of `part`), for words that are attribute names."""
    return tuple((word, getattr(part, word)) for word in words)


def stated(word: str, value: str, *fields: str) -> property:
    """The property `identity` of a class: (word, value), then (name, value) of each field.

    Args:
        word: What the part is, such as "server".
        value: Which of these it is, such as "sgd".
        fields: Names of the attributes that it computes with, which are their words as well.
    """
    doc = f"Identity pairs: ({word!r}, {value!r}), then (name, value) of each of {fields}."
    return property(lambda part: ((word, value), *named_values(part, *fields)), doc=doc)


def identity(value: Any) -> str:
    """The identity of a value as a text, which is the same in every process.

    Equal parts have equal texts, and parts that differ have different ones.

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
            f"the {type(value).__name__} of this training is nested too deeply to be compared "
            "with others: nest it less"
        ) from e


def digest_of(*parts: Any) -> str:
    """SHA-256 of the identity of the parts, as 64 hexadecimal digits.

    Raises what `identity` raises. The order of the parts counts.
    """
    return hashlib.sha256(identity(parts).encode()).hexdigest()


def seed_of(*parts: Any) -> int:
    """A seed for the parts: the first 128 bits of `digest_of`, as an integer."""
    return int(digest_of(*parts)[:32], 16)


def without_recursion(step: Callable[[Any], _R | Generator[Any, _R, _R]], value: Any) -> _R:
    """The result of a recursive function, with a list of generators in place of Python's stack.

    Raises RecursionError if more than 1000 generators wait for each other.

    Args:
        step: Returns the result for a value, or a generator. The generator yields the values whose
            results it needs, receives each result, and returns its own. A result may not be a
            generator.
        value: The value whose result is returned.
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


@dataclass
class _Writer:
    """Writes one identity.

    Attributes:
        _written: (number, object) of whatever has been written and is referred to by its number
            from then on, by the object's id.
        _users: How many parts of a user contain the value that is being written.
    """

    _written: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _users: int = 0

    def text_of(self, value: Any) -> str | _Writing:
        """The text of a value, or a generator that makes it (`without_recursion`).

        A mutable value that was written before is "#n", n its number. Raises AssertionError for a
        part of ours without an identity, unless a user's part holds it.
        """
        match value:
            case Enum() if _is_ours(type(value)):
                return self.text_of(value.value)
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
            case _ if _is_torchs("Tensor", value):
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
            case _ if isinstance(value, _GENERATORS) or _is_torchs("Generator", value):
                return self._class(type(value))
            case _ if _states(type(value)) and not _is_torchs("nn.Module", value):
                return self._pairs(value.identity)
        # Mutable, or made of code: written where it is met first
        if (known := self._written.get(id(value))) is not None:
            return f"#{known[0]}"
        self._written[id(value)] = len(self._written), value  # held, so that its id stays its own
        match value:
            case types.FunctionType():
                return self._function(value)
            case _ if _is_torchs("nn.Module", value):
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
        """Generator that makes a text: the prefix, then the text of `value`."""
        text = yield value
        return f"{prefix}{text}"

    def _inside(self, prefix: str, value: Any) -> _Writing:
        """Generator that makes a text: the prefix, then the text of what a user's part holds.

        Meanwhile `_users` is one higher, so that parts of ours need no identity.
        """
        self._users += 1
        text = yield value
        self._users -= 1
        return f"{prefix}{text}"

    def _all(self, start: str, values: Iterable[Any], end: str) -> _Writing:
        """Generator that makes a text: the values' texts with commas, between `start` and `end`."""
        texts = []
        for value in values:
            texts.append((yield value))
        return f"{start}{','.join(texts)}{end}"

    def _dict(self, values: dict[Any, Any]) -> _Writing:
        """Generator that makes a text: a dict as {key:value,...}, in its own order."""
        texts = []
        for key, value in values.items():
            key_text = yield key
            value_text = yield value
            texts.append(f"{key_text}:{value_text}")
        return f"{{{','.join(texts)}}}"

    def _set(self, values: Iterable[Any]) -> _Writing:
        """Generator that makes a text: a set as {member,...}, sorted by the members' texts.

        Numbers given to objects inside a member are dropped after it, so that no member refers to
        another.
        """
        texts, before = [], len(self._written)
        for value in values:
            texts.append((yield value))
            while len(self._written) > before:
                self._written.popitem()
        return f"{{{','.join(sorted(texts))}}}"

    def _pairs(self, stated: Stated) -> _Writing:
        """Generator that makes a text: stated pairs as [word=value,...]."""
        texts = []
        for word, value in stated:
            text = yield value
            texts.append(f"{word}={text}")
        return f"[{','.join(texts)}]"

    def _method(self, method: types.MethodType) -> _Writing:
        """Generator that makes a text: "function of object" for a bound method."""
        function = yield method.__func__
        owner = yield method.__self__
        return f"{function} of {owner}"

    def _member(self, member: Enum) -> _Writing:
        """Generator that makes a text: "class.name=value" for a member of an enumeration.

        Class and value are written as texts themselves: a user's class with its code.
        """
        kind = yield type(member)
        value = yield member.value
        return f"{kind}.{member.name}={value}"

    def _tensor(self, value: "torch.Tensor") -> str | _Writing:
        """The text of a tensor: that of its array of values, or shape and type if it is on "meta".

        Sparse tensors are made dense first. bfloat16 and float8 are hashed as bytes, after their
        type.
        """
        import torch

        if value.is_meta:
            return f"meta{tuple(value.shape)}{value.dtype}"
        plain = value.detach().cpu()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):  # not NumPy's
            content = plain.contiguous().view(torch.uint8).numpy()
            return f"{value.dtype}{self._array(content)}"
        return self._array(plain.resolve_conj().resolve_neg().numpy())

    def _array(self, value: np.ndarray[Any, Any]) -> str | _Writing:
        """The text of an array: its type and shape, then the SHA-256 of its bytes in hexadecimal.

        For an array of Python objects, a generator: the text of the nested list takes the hash's
        place.
        """
        kind = f"{value.dtype.descr}{value.shape}"
        if value.dtype.hasobject:
            return self._after(kind, value.tolist())
        content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"{kind}{content}"

    def _class(self, kind: type) -> str | _Writing:
        """The text of a class: ours or a library's is its name, a user's its name and its code.

        A user's class makes a generator, and "#n" if it was written before. Its code counts because
        a notebook may redefine it.
        """
        if _is_ours(kind):
            return kind.__qualname__
        name = f"{kind.__module__}.{kind.__qualname__}"
        if _is_library(kind):
            return name
        if (known := self._written.get(id(kind))) is not None:
            return f"#{known[0]}"
        self._written[id(kind)] = len(self._written), kind
        return self._inside(name, list(_class_code(kind)))

    def _function(self, function: types.FunctionType) -> str | _Writing:
        """The text of a function: ours by its word, a library's by its name, a user's by its code.

        The code comes with closure, defaults, attributes and the globals that it reads, as a
        generator. Raises AssertionError for a function of ours without a word, unless a user's part
        holds it.
        """
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
        return self._inside(name, (*made, vars(function), _globals_read_by(function)))

    def _builtin(self, function: types.BuiltinFunctionType) -> str | _Writing:
        """The text of a built-in function: its name or, for a bound method, a generator.

        The generator adds the text of the object that the method is bound to.
        """
        name, owner = f"{function.__module__}.{function.__qualname__}", function.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            return name
        return self._inside(f"{name} of ", owner)

    def _object(self, value: Any) -> _Writing:
        """Generator that makes a text: an object's class, then its content.

        The content is the attributes in `__dict__`, for a library's object the parts that pickle
        writes, and both if a base class has slots or is written in C. For a user's subclass of
        ours, what ours states comes before.
        """
        kind, inherited, known = type(value), "", set[str]()
        base = next((each for each in kind.__mro__ if _states(each)), None)
        if base is not None:
            inherited = yield from self._pairs(vars(base)["identity"].fget(value))
            known = {f.name for f in fields(base)} if is_dataclass(base) else set()
        held = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in known}
        content: Any = held
        if _is_library(kind):
            content = _pickled_parts(value) or held
        elif any(map(_holds_more, kind.__mro__[:-1])):
            content = (held, _pickled_parts(value))
        name = yield kind
        prefix = f"{name}{getattr(value, '__qualname__', '')}{inherited}"
        return (yield from self._inside(prefix, content))

    def _module(self, layer: "nn.Module") -> _Writing:
        """Generator that makes a text: a layer's class, attributes, hooks, shapes and children.

        The shapes are those of its parameters. Of a layer of ours, what it states takes the place
        of class and attributes, and names of its parameters and children are left out. Raises
        AssertionError if it states no identity.
        """
        from torch import nn

        of_every_layer = vars(nn.Module())
        hook_tables = {
            key: table
            for key, table in vars(layer).items()
            if key in of_every_layer and (key.endswith("hooks") or "_hooks_" in key)
        }
        # torch numbers the hooks of a process, and those of a layer count from 0 here
        order = sorted({number for table in hook_tables.values() for number in table})
        ranks = {number: rank for rank, number in enumerate(order)}
        for key, table in hook_tables.items():
            hook_tables[key] = {ranks[number]: hook for number, hook in table.items()}
        held = {
            key: value
            for key, value in {**vars(layer), **hook_tables}.items()
            if key not in _APART and (key not in of_every_layer or value or key == "training")
        }
        parameters: dict[Any, nn.Parameter] = {
            name: each for name, each in layer._parameters.items() if each is not None
        }
        children: list[Any] = list(layer._modules.items())
        if _is_ours(type(layer)):
            if not _states(type(layer)):
                raise AssertionError(f"{type(layer).__qualname__} states no identity")
            name = yield from self._pairs(layer.identity)  # type: ignore[arg-type]
            held = {key: value for key, value in held.items() if key in of_every_layer}
            parameters = dict(enumerate(parameters.values()))
            children = [child for _, child in children]
        else:
            kind = yield type(layer)
            name = yield from self._inside(kind, getattr(type(layer), "forward", None))
        shapes = [(key, tuple(p.shape), p.requires_grad) for key, p in parameters.items()]
        return (yield from self._inside(name, (held, shapes, children)))


def _states(kind: type) -> bool:
    """Whether a class is ours and itself defines the property `identity`.

    Inherited ones do not count.
    """
    return _is_ours(kind) and isinstance(vars(kind).get("identity"), property)


def _is_ours(value: Any) -> bool:
    """Whether a function or class belongs to this package."""
    return str(getattr(value, "__module__", "")).split(".")[0] == _OURS


def _is_torchs(name: str, value: Any) -> bool:
    """Whether a value is an instance of that class of torch. Never, if torch is not loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, attrgetter(name)(torch))


def _is_library(value: Any) -> bool:
    """Whether a function or class comes from torch, NumPy or Python's standard library.

    Its name then identifies it, since a run records the versions. A user's file with the name of a
    library does not count.
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
    """Whether a function or class is defined in a file below site-packages."""
    if isinstance(value, types.FunctionType):
        return _INSTALLED in value.__code__.co_filename
    return _INSTALLED in (getattr(sys.modules.get(value.__module__), "__file__", None) or "")


def _holds_more(kind: type) -> bool:
    """Whether a class may keep values outside `__dict__`: it is written in C, or has slots.

    Its bases are not looked at.
    """
    written_in_c = not kind.__flags__ & _HEAP_TYPE
    return written_in_c or bool(vars(kind).get("__slots__"))


def _pickled_parts(value: Any) -> Any:
    """The parts as which pickle would write an object, as a list, None if pickle cannot.

    A string if pickle would write a global name. Iterators in the parts are read into lists.
    """
    try:
        found = value.__reduce_ex__(2)
    except (TypeError, AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None
    if isinstance(found, str):
        return found
    return [list(part) if isinstance(part, Iterator) else part for part in found]


def _class_code(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of methods and constants of a user's class and of its user's bases.

    Methods are yielded as functions, also those of properties, and partial ones with their
    arguments. Dunder constants are left out.
    """
    for each in kind.__mro__:
        if _is_ours(each) or _is_library(each):
            continue
        for name, value in sorted(vars(each).items()):
            match value:
                case property():
                    parts = [part for part in (value.fget, value.fset, value.fdel) if part]
                case classmethod() | staticmethod():
                    parts = [value.__func__]
                case functools.cached_property():
                    parts = [value.func]
                case functools.partialmethod():
                    parts = [functools.partial(value.func, *value.args, **value.keywords)]
                case _:
                    parts = [value]
            for part in parts:
                is_code = isinstance(part, types.FunctionType | functools.partial)
                if is_code or (name[:2] != "__" and _is_users(part, within=each)):
                    yield name, part


def _globals_read_by(function: types.FunctionType) -> list[tuple[str, Any]]:
    """(name, value) of a user's global values, functions and classes that a function reads.

    Attributes of the user's other files are among them, as ("module.name", value). Sorted by name.
    """
    names = sorted({name for name in names_looked_up(function.__code__) if name[:2] != "__"})
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


def names_looked_up(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code, and the functions inside it, look up.

    A name may come more than once.
    """
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from names_looked_up(const)


def _is_users(value: Any, within: Any) -> bool:
    """Whether a value that the code of `within` reads is a user's own, and not a library's.

    Numbers, strings and tuples always are. None, modules and built-in functions never are.
    Functions and classes are if a user's file defines them. Other objects are not if `within` is
    installed, or if their class is; layers and objects of torch, NumPy and Python count as the
    user's.
    """
    if value is None or isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return False
    if isinstance(value, bool | int | float | str | tuple):
        return True
    if isinstance(value, types.FunctionType | type):
        return not (_is_ours(value) or _is_library(value) or _is_installed(value))
    return not _is_installed(within) and (
        _is_library(type(value)) or _is_torchs("nn.Module", value) or not _is_installed(type(value))
    )


def _is_users_file(module: types.ModuleType) -> bool:
    """Whether a Python module is a file of the user's.

    Ours, installed ones and those of the standard library are not, nor are modules without a file.
    """
    file = getattr(module, "__file__", None) or ""
    ours = module.__name__.split(".")[0] == _OURS
    return bool(file) and not (ours or file.startswith(_STANDARD) or _INSTALLED in file)


def cell_content(cell: types.CellType) -> Any:
    """The value of a variable in a closure. None if nothing was assigned to it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


Words = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(z: Words) -> Words:
    """Each word after the finaliser of SplitMix64: a bijection that spreads every bit."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def words_at(keys: Words, places: npt.NDArray[np.integer]) -> Words:
    """The words at `places`, counted from 0, of the random sequence of each key, uint64.

    `keys` and `places` are broadcast against each other. No state is kept.

    >>> words_at(np.array([7, 8], dtype=np.uint64)[:, None], np.arange(3)).shape
    (2, 3)
    """
    with np.errstate(over="ignore"):
        return mix(keys + (places.astype(np.uint64) + np.uint64(1)) * GOLDEN)
