"""What a value may be by itself: limits and names that recipes and constructors share.

A wrong value is refused in one line: its name, the value, what is needed. Misspelt names of data
sets, models and metrics get suggestions. Nothing but the standard library is imported, so that
this happens before anything heavy is.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from numbers import Integral, Real
from typing import Any

from fedveil.base.errors import BadArgument, BadInput

MOST_ROUNDS = 1_000_000
"""The most rounds of a run, and the most local steps of a round."""

SMALLEST_CLIP = 1e-20
"""Below, float32 has no room for the rounding of a clipped row."""

SMALLEST_FLOOR = 1e-12
SMALLEST_RADIUS = 1e-6
SMALLEST_REPORT, LARGEST_REPORT = 1e-6, 1e6
"""Epsilons of one report: below, the grid of a draw would show; above, nothing is protected."""

_SMALLEST_RATE = 1e-12
_SMALLEST_DELTA = 1e-100
_MOST_NOISE = 1e6
_WORKERS_ANYWHERE, _WORKERS_PER_CORE = 64, 4

Test = Callable[[float], bool]


@dataclass(frozen=True)
class Limits:
    """The conditions that a number must meet.

    Attributes:
        tests: (condition, need) pairs, checked in order. `need` is a text such as "at least 1 is
            needed", which ends the message if the condition fails.
        whole: Whether only whole numbers pass.
    """

    tests: tuple[tuple[Test, str], ...] = ()
    whole: bool = False

    def check(self, name: str, value: object) -> None:
        """Raise BadArgument for a value that is not a number, or that fails a condition.

        `name` is the argument that messages name. True and False are not numbers here.

        >>> RATE.check("rate", 0.5)
        """
        wanted = Integral if self.whole else Real
        if isinstance(value, bool) or not isinstance(value, wanted):
            what = "a whole number" if self.whole else "a number"
            raise BadArgument(f"{{{name}}} is {shown(value)}: {what} is needed", name)
        for passes, need in self.tests:
            if not passes(value):  # type: ignore[arg-type]
                raise BadArgument(f"{{{name}}} is {value}: {need}", name)

    @property
    def text(self) -> str:
        """The conditions in words, joined by commas, without the "is needed" of messages.

        >>> RATE.text
        'a probability in (0, 1], at least 1e-12'
        """
        needs = [need for _, need in self.tests]
        for end in (" is needed", " are needed", " is possible", " are possible", ","):
            needs = [need.removesuffix(end) for need in needs]
        return ", ".join(needs)


@dataclass(frozen=True)
class Each:
    """The conditions that each number of a list must meet. The list may not be empty."""

    limits: Limits

    def check(self, name: str, values: list[float]) -> None:
        """Raise BadInput for an empty list, and BadArgument for the first number that fails.

        `name` is the argument that messages name.
        """
        if not values:
            raise BadInput(f"{name} is empty: give at least one number, or omit it")
        for value in values:
            self.limits.check(name, value)

    @property
    def text(self) -> str:
        """The conditions on each number, in words, as `Limits.text` has them."""
        return self.limits.text


@dataclass(frozen=True)
class Rule:
    """A function of name and value that raises for wrong values, and its condition in words."""

    refuse: Callable[[str, Any], None]
    text: str = ""

    def check(self, name: str, value: object) -> None:
        """Raise what the function raises for a wrong value. `name` is the argument."""
        self.refuse(name, value)


def shown(value: object) -> str:
    """A value of any type as a text of one line and at most 100 characters, for messages.

    Numbers are as `str` has them, other values as `repr` has them. Longer texts end with "...".
    """
    text = str(value) if isinstance(value, Real) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_option(name: str, value: object) -> None:
    """Raise BadArgument for a value that the command-line option `name` cannot have.

    `name` is a key of `OPTIONS`, such as "per_round". Messages have "--per-round".
    """
    OPTIONS[name].check(f"--{name.replace('_', '-')}", value)


def check_ledger_epsilon(name: str, epsilon: object, ledger: object) -> None:
    """Raise BadInput for a common budget that is not a positive number, or that has no ledger.

    Args:
        name: The name of the budget in messages.
        epsilon: The budget of all runs on a shared ledger. None always passes.
        ledger: The shared ledger, None if none was given. Its value is not checked.
    """
    if epsilon is None:
        return
    if ledger is None:
        raise BadInput(f"{name} is the budget of a shared ledger: name its file as well")
    BUDGET.check(name, epsilon)


def check_address(name: str, address: object) -> None:
    """Raise BadInput unless `address` is None, "auto" or the "host:port" of a Ray head.

    `name` is the setting that messages name. An address with a "/", such as ray://..., is refused.
    """
    if address is None:
        return
    if not isinstance(address, str) or not address.strip():
        raise BadInput(f"{name} is {shown(address)}: use 'auto' or 'host:port'")
    host, _, port = address.rpartition(":")
    if address != "auto" and ("/" in address or not host or not port.isdecimal()):
        raise BadInput(
            f"{name} is {shown(address)}: use 'auto', or the head's 'host:port' (not a client's "
            "ray:// address: run this on a node of the cluster)"
        )


def one_of(name: str, value: object, kind: type[Enum]) -> None:
    """Raise BadArgument for a value that is not a member of the enumeration `kind`.

    `name` is the argument that messages name. A string that equals a member is refused as well:
    members are compared by identity, so that the string would have no effect.
    """
    if not isinstance(value, kind):
        members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise BadArgument(f"{{{name}}} is {shown(value)}: use one of {members}", name)


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_workers(name: str, value: object) -> None:
    """Raise BadArgument unless `value` is a possible number of worker processes.

    It is a whole number from 0 (one per core) to the larger of 64 and 4 per core of this machine.
    More workers only wait for each other, for minutes. `name` is the argument that messages name.
    """
    most = max(_WORKERS_ANYWHERE, _WORKERS_PER_CORE * cores())
    need = f"a number from 1 to {most} is needed on this machine, or 0 for one per core"
    Limits(((lambda v: 0 <= v <= most, need),), whole=True).check(name, value)


def whole(least: int, need: str = "", most: int | None = None) -> Limits:
    """`Limits` of whole numbers from `least` to `most`, without upper limit if that is None.

    `need` is the end of the message below `least`, by default "at least {least} is needed".
    """
    tests: list[tuple[Test, str]] = [(lambda v: v >= least, need or f"at least {least} is needed")]
    if most is not None:
        tests.append((lambda v: v <= most, f"at most {most:,} are possible"))
    return Limits(tuple(tests), whole=True)


def number(passes: Test, need: str, most: float | None = None, *, whole: bool = False) -> Limits:
    """`Limits` of numbers that pass a test and whose absolute value is at most `most`.

    Args:
        passes: The test.
        need: The end of the message if the test fails, such as "a positive number is needed".
        most: The largest absolute value. None: no limit.
        whole: Whether only whole numbers pass.
    """
    tests = [(passes, need)]
    if most is not None:
        tests.append((lambda v: abs(v) <= most, f"at most {most:g} is possible"))
    return Limits(tuple(tests), whole)


ANY_COUNT = whole(0)
COUNT = whole(1)
CLIENTS = whole(1, most=100_000_000)
COHORT = whole(1, "at least one client per round is needed")
ROUNDS = whole(1, "at least one is needed", MOST_ROUNDS)
STEPS = whole(1, most=MOST_ROUNDS)
WARMUP = whole(0, most=MOST_ROUNDS)
BATCH = whole(0, "a size, or 0 for all records, is needed")
SEED = number(lambda v: 0 <= v < 2**63, "a number from 0 to 2^63 - 1 is needed", whole=True)
POWER = number(lambda v: -60 <= v <= 60, "a power of two from -60 to 60 is needed", whole=True)
SUM_BITS = Limits(
    ((lambda v: v == 64 or 16 <= v <= 32, "64, or 16 to 32, are possible"),), whole=True
)
NOMINAL = whole(1, "at least 1 record is needed")
CLIP_EVERY = whole(1, "at least 1 round is needed")
TEXT_LENGTH = whole(1, "at least one word is needed", 10_000)
VOCABULARY = whole(1, most=1_000_000)

PORT = number(lambda v: 0 <= v < 2**16, "0 (any) to 65535 is needed", whole=True)

POSITIVE = number(lambda v: 0 < v < math.inf, "a positive number is needed")
NOT_NEGATIVE = number(lambda v: 0 <= v < math.inf, "a number >= 0 is needed")
GROWTH = number(lambda v: 1 <= v < math.inf, "a number >= 1 is needed")
FINITE = number(math.isfinite, "a finite number is needed", 1e30)
FRACTION = number(lambda v: 0 <= v < 1, "a number in [0, 1) is needed")
QUANTILE = number(lambda v: 0 < v < 1, "a number in (0, 1) is needed")
PORTION = number(lambda v: 0 < v <= 1, "a share in (0, 1] is needed")
TRIM = number(lambda v: 0 <= v < 0.5, "a share in [0, 0.5) is needed")
RATE = Limits(
    (
        (lambda v: 0 < v <= 1, "a probability in (0, 1] is needed"),
        (lambda v: v >= _SMALLEST_RATE, f"at least {_SMALLEST_RATE:g} is possible"),
    )
)

BUDGET = number(lambda v: v > 0, "a positive number is needed")
DELTA = Limits(
    (*QUANTILE.tests, (lambda v: v >= _SMALLEST_DELTA, f"at least {_SMALLEST_DELTA:g} is possible"))
)
MULTIPLIER = number(lambda v: 0 <= v < math.inf, "a number >= 0 is needed", _MOST_NOISE)
SOME_NOISE = number(lambda v: 0 < v < math.inf, "a positive number is needed", _MOST_NOISE)
REPORT_EPSILON = number(
    lambda v: v >= SMALLEST_REPORT, "a number >= 1e-6 is needed", LARGEST_REPORT
)
BIT_EPSILON = number(lambda v: v >= 0, "a number >= 0 is needed", 50)
CLIP = number(
    lambda v: SMALLEST_CLIP <= v < math.inf, f"a number of at least {SMALLEST_CLIP} is needed", 1e30
)
RADIUS = number(
    lambda v: SMALLEST_RADIUS <= v < math.inf, f"at least {SMALLEST_RADIUS} is needed", 1e30
)
CLIP_FLOOR = number(
    lambda v: SMALLEST_FLOOR <= v < math.inf,
    f"a number from {SMALLEST_FLOOR} to the first clip is needed",
)
CLASS_WEIGHT = number(lambda v: 1e-6 <= v <= 1e6, "a number from 1e-6 to 1e6 is needed")
LOSS_CLIP = number(lambda v: 1e-6 <= v <= 1e6, "a number from 1e-6 to 1e6 is needed")

OPTIONS = {
    "repeat": number(lambda v: 1 <= v <= 10_000, "a number from 1 to 10000 is needed", whole=True),
    "clients": CLIENTS,
    "per_round": CLIENTS,
    "parameters": whole(1, most=10**15),
    "epsilon": POSITIVE,
    "delta": DELTA,
    "rounds": STEPS,
    "noise": SOME_NOISE,
    "rate": RATE,
}
"""The limits of the values of command-line options, by name: "per_round" is --per-round."""

WORKERS = Rule(
    check_workers,
    f"0 to {_WORKERS_ANYWHERE}, or to {_WORKERS_PER_CORE} per core where that is more",
)

DATA_SETS = (
    "digits",
    "diabetes",
    "mnist",
    "fashion-mnist",
    "femnist",
    "cifar10",
    "lending-club",
    "location30",
    "purchase100",
    "texas100",
    "sentiment140",
    "reddit",
)
NEXT_WORD = ("lstm-lm", "transformer-lm")
"""Models that predict the next word in each place of a text."""

TEXT_MODELS = ("lstm", "transformer", *NEXT_WORD)
"""Models that read rows of words."""

MODELS = ("linear", "softmax", "mlp", "fu-cnn", "small-cnn", "vgg", *TEXT_MODELS)

TABLE = "table"
"""Data in a file of the user's own."""

CODE = "code"
"""A model that a function in a file of the user's own makes."""

OWN = "own"
"""A model or data that come from Python, where a recipe would name one."""

INTERVAL = "/interval"
"""The end of the name of half a 95 % interval. The beginning is the name of a priced metric."""

OF_LABELS = ("accuracy", "balanced-accuracy", "top-K", "f1", "f1-macro", "auroc", "perplexity")
OF_NUMBERS = ("mae", "rmse", "r2")
"""Names of the metrics for targets that are labels, and for targets that are numbers."""

TOP = r"top-([1-9]\d{0,6})"
"""Pattern of the names "top-1", "top-2" and so on. Its group is the number."""

_ALIKE = 0.7  # names of four letters, of which two are swapped, have 0.75


@dataclass(frozen=True)
class OneOf:
    """The names that a key of a recipe may have.

    Attributes:
        choices: The names, which messages list.
        unlisted: One more name that passes, which messages do not list.
        text: Always "": the choices are listed elsewhere.
    """

    choices: tuple[str, ...]
    unlisted: str | None = None
    text = ""

    def check(self, key: str, value: str) -> None:
        """Raise BadInput for a name that is neither a choice nor `unlisted`.

        The message has all choices and, if some resemble the name, up to three of them.

        `key` is the recipe key that the message names.

        >>> MODEL_NAMES.check("model.name", "mlp")
        """
        if value not in (*self.choices, self.unlisted):
            known = ", ".join(self.choices)
            raise BadInput(
                f"{key} is {shown(value)}: choose one of {known}{hint(value, self.choices)}"
            )


DATA_NAMES = OneOf((*DATA_SETS, "saved", TABLE), unlisted=OWN)
MODEL_NAMES = OneOf((*MODELS, CODE), unlisted=OWN)


def check_metric(key: str, name: str) -> None:
    """Raise BadInput unless `name` is the name of a metric. The message has the nearest ones.

    Any top-K with a number from 1 to 9,999,999 passes, the literal "top-K" does not. `key` is the
    recipe key that the message names.

    >>> check_metric("evaluate.metrics", "top-5")
    """
    known = [name for name in (*OF_LABELS, *OF_NUMBERS) if name != "top-K"]
    if name in known or re.fullmatch(TOP, name):
        return
    listed, like = ", ".join((*known, "top-K (such as top-5)")), hint(name, (*known, "top-5"))
    raise BadInput(f"{key} has {shown(name)}: choose from {listed}{like}")


def check_metrics(key: str, names: Sequence[str]) -> None:
    """Raise BadInput for an unknown metric, or for one that is in the list twice.

    `key` is the recipe key that the message names.
    """
    for at, name in enumerate(names):
        check_metric(key, name)
        if name in names[:at]:
            raise BadInput(f"{key} has {name!r} twice: name it once")


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: a question with near names, or "".

    It lists up to three known names that resemble `name`, and is "" if none does.

    >>> hint("minst", DATA_SETS)
    '; did you mean mnist?'
    """
    found = nearest(name, known)
    return f"; {meant(found)}" if found else ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that resemble `name`, the nearest first. [] if none does."""
    return get_close_matches(name, list(known), cutoff=_ALIKE)


def meant(names: Sequence[str]) -> str:
    """The question "did you mean ...?" with all of `names`, which may not be empty.

    >>> meant(["client.lr", "clip.lr", "server.lr"])
    'did you mean client.lr, clip.lr or server.lr?'
    """
    *others, last = names
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
