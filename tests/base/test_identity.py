"""What makes two trainings the same: equal parts have one text, parts that differ have two."""

import copy
import decimal
import enum
import functools
import inspect
import operator
import pathlib
import pickle
import sys
import types
from collections import deque, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from fedveil.base.errors import BadInput
from fedveil.base.identity import identity, seed_of
from fedveil.privacy.clip_schedules import Fixed, Poly
from fedveil.privacy.release import NoisySteps
from fedveil.privacy.sampling import Poisson
from fedveil.training.cohort import Batches
from fedveil.training.server import RateSchedule, RateShape
from fedveil.training.work import Adam, ClientDpSgd, ClientSgd


def test_every_choice_draws_for_itself():
    changes = [{}, {"proximal": 0.1}, {"adam": Adam()}, {"adam": Adam(0.5)}, {"momentum": 0.1}]
    changes += [{"schedule": RateSchedule(shape, 5)} for shape in RateShape]
    works = [ClientSgd(Batches(0, epochs=1), 0.5, **change) for change in changes]
    works += [ClientDpSgd(NoisySteps(0.5, 1, 2.0), 0.5, **change) for change in changes]
    assert len({seed_of(work) for work in works}) == len(works)


OWN = """
from torch import nn

SCALE = {scale}

def helper(x):
    return x * {helped}

def recursive(x, depth=3):
    return x if depth == 0 else helper(recursive(x, depth - 1))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def features(self, x):
        return x + {shift}

    def forward(self, x):
        return self.layer(self.features(x))

class Reading(Net):
    def forward(self, x):
        return self.layer(x * SCALE)

class Helped(Net):
    def forward(self, x):
        return [self.layer(helper(y)) for y in x]

class Recursive(Net):
    def forward(self, x):
        return self.layer(recursive(x))
"""


def written(kind, name="mine", **changes):
    """A module of a class in a file of one's own, as it is or written again."""
    file = {"__name__": name}
    exec(OWN.format(**{"scale": 2, "helped": 3, "shift": 4, **changes}), file)
    return file[kind]()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Net", {"shift": 5}),
        ("Reading", {"scale": 5}),
        ("Helped", {"helped": 5}),
        ("Recursive", {"helped": 5}),
    ],
)
def test_what_a_module_reads_and_calls_is_part_of_it(kind, changes):
    assert identity(written(kind)) == identity(written(kind))
    assert identity(written(kind)) != identity(written(kind, **changes))
    assert identity(nn.Sequential(written(kind))) != identity(
        nn.Sequential(written(kind, **changes))
    )


def test_what_it_does_not_read_is_no_part_of_it():
    assert identity(written("Net")) == identity(written("Net", scale=5, helped=5))


def test_a_function_of_no_file_has_an_identity():
    file = {}
    exec("def loss(outputs, targets): return outputs", file)
    assert identity(file["loss"]) != identity(torch.nn.functional.relu)


def loss(scale, outputs, targets):
    return scale * outputs


def reading(value):
    """A function that reads a global of its file."""
    file = {"WEIGHTS": value, "__name__": "mine"}
    exec("def loss(outputs, targets): return outputs * WEIGHTS", file)
    return file["loss"]


def elsewhere(value):
    """A function that reads a value of another file of the user's."""
    other = types.ModuleType("settings")
    other.__file__, other.WEIGHTS = "/home/user/settings.py", value
    file = {"settings": other, "__name__": "mine"}
    exec("def loss(outputs, targets): return outputs * settings.WEIGHTS", file)
    return file["loss"]


def instantiating(value):
    """A function that makes an object of a class of its file."""
    file = {"__name__": "mine"}
    exec(f"class Helper:\n    def __call__(self, x): return x * {value}", file)
    exec("def loss(outputs, targets): return Helper()(outputs)", file)
    return file["loss"]


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Listing(list):
    pass


class Colour(enum.Enum):
    ONE = 1
    TWO = 2


Pair = namedtuple("Pair", "a b")


@dataclass
class Holding:
    value: object


class Mine(Fixed):
    """A user's subclass of our part."""


class Wider(Poly):
    pass


def nested(value, depth=60):
    for _ in range(depth):
        value = [value]
    return value


def circular(value):
    first, second = Holding(value), Holding(None)
    first.other, second.other = second, first
    return first


def listing(value):
    found = Listing([1])
    found.extra = value
    return found


KINDS = {
    "a partial function": lambda n: functools.partial(loss, n),
    "a keyword of a partial function": lambda n: functools.partial(loss, scale=n),
    "a partial function of another": lambda n: functools.partial((loss, nested)[n - 1], 1),
    "a tensor that a function reads": lambda n: reading(torch.full((2,), n)),
    "a dict that a function reads": lambda n: reading({"weights": [n]}),
    "an array that a function reads": lambda n: reading(np.full(3, n)),
    "an object that a function reads": lambda n: reading(Holding(n)),
    "a value of another file": elsewhere,
    "a class that a function makes objects of": instantiating,
    "a number of NumPy": lambda n: np.float32(n),
    "a whole number of NumPy": lambda n: np.uint8(n),
    "a decimal number": lambda n: decimal.Decimal(n),
    "a path": lambda n: pathlib.PurePosixPath(str(n)),
    "a queue": lambda n: deque([n]),
    "a slice": lambda n: slice(n),
    "a range": lambda n: range(n),
    "a type of torch": lambda n: (torch.float16, torch.int8)[n - 1],
    "a function of operator": lambda n: operator.itemgetter(n),
    "a method of torch": lambda n: (torch.Tensor.relu, torch.Tensor.tanh)[n - 1],
    "a built-in function": lambda n: (torch.relu, torch.tanh)[n - 1],
    "a method of an object": lambda n: Holding(n).__repr__,
    "slots": Slots,
    "a dataclass": Holding,
    "a named tuple": lambda n: Pair(0, n),
    "an enumeration": Colour,
    "a list with attributes": listing,
    "a deep list": nested,
    "objects that hold each other": circular,
    "a set": lambda n: {0, n, "a"},
    "an array of objects": lambda n: np.array([None, n], dtype=object),
    "a structured array": lambda n: np.zeros(1, dtype=[(f"f{n}", "f4")]),
    "a sparse tensor": lambda n: torch.tensor([0.0, n]).to_sparse(),
    "a bfloat16 tensor": lambda n: torch.tensor([n], dtype=torch.bfloat16),
    "a shape": lambda n: torch.empty(n, device="meta"),
    "a subclass of our part": lambda n: Mine(float(n)),
    "the part it is a subclass of": lambda n: (Mine(1.0), Wider(1.0, 1.0, 2, 0.1))[n - 1],
    "a parameter's shape": lambda n: nn.ParameterList([torch.zeros(n, 3 - n)]),
    "a hook": lambda n: hooked((torch.relu, torch.tanh)[n - 1]),
    "the place of a layer": lambda n: nn.Sequential(*(nn.ReLU(), nn.Tanh())[:: 3 - 2 * n]),
}


def hooked(function):
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, args, output: function(output))
    return layer


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_what_differs_draws_for_itself(make):
    """Each of these once shared its noise with another of its kind, or could come to."""
    assert identity(make(1)) == identity(make(1))
    assert identity(make(1)) != identity(make(2))
    assert seed_of(make(1)) != seed_of(make(2))


ALIKE = {
    "floats": (Poisson(0.5), Poisson(np.float64(0.5))),
    "whole numbers": (3, np.int64(3)),
    "copies": (copy.deepcopy(circular(1)), circular(1)),
    "pickled layers": (pickle.loads(pickle.dumps(nn.LSTM(2, 3))), nn.LSTM(2, 3)),
    "generators": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "strided arrays": (np.arange(8)[::2], np.array([0, 2, 4, 6])),
}


@pytest.mark.parametrize(("a", "b"), ALIKE.values(), ids=ALIKE)
def test_what_is_equal_has_one_text(a, b):
    assert identity(a) == identity(b)


@given(
    values=arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(-1, 1, width=32)),
    place=st.integers(0, 10**6),
    end=st.booleans(),
)
def test_arrays_that_differ_anywhere_draw_for_themselves(values, place, end):
    """Late differences too: in one place, in the last one, in the length."""
    other = values.copy()
    place = len(values) - 1 if end else place % len(values)
    other[place] = np.nextafter(other[place], np.float32(2))
    seeds = [seed_of(x) for x in (values, other, torch.from_numpy(other), other[:-1], other[None])]
    assert seeds[1] == seeds[2]
    assert len(set(seeds)) == 4


@given(st.lists(st.one_of(st.integers(), st.text(max_size=3), st.booleans()), max_size=6))
def test_texts_tell_where_one_value_ends_and_the_next_begins(values):
    forms = [values, tuple(values), [values], {"a": values}, [*values, None], str(values)]
    assert len({identity(form) for form in forms}) == len(forms)


def test_a_part_of_ours_that_states_nothing_is_an_error():
    class Silent:
        __module__ = "fedveil.somewhere"

    with pytest.raises(AssertionError, match="states no identity"):
        identity((Poisson(0.5), Silent()))
    assert "Silent" in identity(Holding(Silent()))  # what users hold is theirs


def test_a_user_s_subclass_enters_by_what_ours_states():
    """And not by the names of our fields: renaming one would change a seeded run."""
    text = identity(Mine(1.5))
    assert "clip='fixed',value=1.5" in text
    assert text.count("1.5") == 1
    assert "'value'" not in text


def test_a_part_of_ours_in_a_user_s_set_is_the_user_s():
    class Silent:
        __module__ = "fedveil.somewhere"

    assert "Silent" in identity(Holding({Silent()}))


def test_what_is_nested_deeply_is_written_without_recursion():
    before = sys.getrecursionlimit()
    values = nested(1, 900)
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        assert identity(values) != identity(nested(2, 900))
    finally:
        sys.setrecursionlimit(before)


def test_what_is_nested_without_end_is_refused():
    with pytest.raises(BadInput, match="nested too deeply"):
        identity(nested(1, 5000))


def test_a_user_s_identity_is_no_statement():
    @dataclass(frozen=True)
    class Claiming:
        value: int

        @property
        def identity(self):
            return (("sampler", "mine"),)

    assert identity(Claiming(1)) != identity(Claiming(2))


def test_a_file_that_is_called_as_one_of_python_s_is_the_user_s():
    files = [{"__name__": "calendar"} for _ in range(2)]
    for number, file in enumerate(files):
        exec(f"def loss(outputs, targets): return outputs * {number}", file)
    assert identity(files[0]["loss"]) != identity(files[1]["loss"])


def scaled(x, factor):
    return x * factor


def with_factor(factor, kind):
    """An object of a class that has a function with an argument of its own."""
    return type("Scaling", (), {"__module__": __name__, "apply": kind(scaled, factor=factor)})()


@pytest.mark.parametrize("kind", [functools.partial, functools.partialmethod])
def test_arguments_of_partial_functions_of_a_class_count(kind):
    first, same, other = (identity(with_factor(factor, kind)) for factor in (0.1, 0.1, 0.2))
    assert first == same
    assert first != other


def test_all_functions_of_a_property_count():
    def holder(setter):
        area = property(lambda self: 1, setter)
        return type("Holder", (), {"__module__": __name__, "area": area})()

    assert identity(holder(None)) != identity(holder(lambda self, value: None))
