"""What a value may be by itself: limits and names that recipes and constructors share.

A wrong value is refused in one line: its name, the value, what is needed. Misspelt names of data
sets, models and metrics get suggestions. Nothing but the standard library is imported, so that
this happens before anything heavy is.
"""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from numbers import Integral, Real
from typing import Any

from fedveil.base.errors import BadArgument, BadInput

MOST_ROUNDS = 1_000_000
"""Rounds of a run, and local steps of a round."""

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
    """What a number may be.

    Attributes:
        tests: Conditions that it meets one after the other, each with what is needed.
        whole: Whether it is a whole number.
    """

    tests: tuple[tuple[Test, str], ...] = ()
    whole: bool = False

    def check(self, name: str, value: object) -> None:
        """Refuse a value that is no number, or not such a one.

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
        """What a value may be, in the words in which others are refused.

        >>> RATE.text
        'a probability in (0, 1], at least 1e-12'
        """
        needs = [need for _, need in self.tests]
        for end in (" is needed", " are needed", " is possible", " are possible", ","):
            needs = [need.removesuffix(end) for need in needs]
        return ", ".join(needs)


@dataclass(frozen=True)
class Each:
    """What each number of a list that is not empty may be."""

    limits: Limits

    def check(self, name: str, values: list[float]) -> None:
        """Refuse an empty list, and the first number that is not such a one."""
        if not values:
            raise BadInput(f"{name} is empty: give at least one number, or leave it out")
        for value in values:
            self.limits.check(name, value)

    @property
    def text(self) -> str:
        """What each may be."""
        return self.limits.text


@dataclass(frozen=True)
class Rule:
    """A function that refuses wrong values, and `text`, which says what a value may be."""

    check: Callable[[str, Any], None]
    text: str = ""


def shown(value: object) -> str:
    """A value of any type as a short text, for messages."""
    text = str(value) if isinstance(value, Real) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_option(name: str, value: object) -> None:
    """Refuse a number that an option of the command line cannot be."""
    OPTIONS[name].check(f"--{name.replace('_', '-')}", value)


def check_ledger_epsilon(name: str, epsilon: object, ledger: object) -> None:
    """Refuse a common budget that is none, or that no ledger would keep."""
    if epsilon is None:
        return
    if ledger is None:
        raise BadInput(f"{name} is the budget of a shared ledger: name its file as well")
    BUDGET.check(name, epsilon)


def check_address(name: str, address: object) -> None:
    """Refuse a text that is not the address of a cluster's head."""
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
    """Refuse a value that is not a member of the enumeration. An equal string is not enough.

    A member is compared by identity, so that its text would be accepted and have no effect.
    """
    if not isinstance(value, kind):
        members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise BadArgument(f"{{{name}}} is {shown(value)}: use one of {members}", name)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def most_workers() -> int:
    """The largest useful number of processes. More only wait for each other, for minutes."""
    return max(_WORKERS_ANYWHERE, _WORKERS_PER_CORE * cores())


def check_workers(name: str, value: object) -> None:
    """Refuse a number of processes that no machine like this one can use."""
    most = most_workers()
    need = f"a number from 1 to {most} is needed on this machine, or 0 for one per core"
    Limits(((lambda v: 0 <= v <= most, need),), whole=True).check(name, value)


def whole(least: int, need: str = "", most: int | None = None) -> Limits:
    """Whole numbers from `least` on."""
    tests: list[tuple[Test, str]] = [(lambda v: v >= least, need or f"at least {least} is needed")]
    if most is not None:
        tests.append((lambda v: v <= most, f"at most {most:,} are possible"))
    return Limits(tuple(tests), whole=True)


def within(least: int, most: int, need: str) -> Limits:
    """Whole numbers from `least` to `most`."""
    return Limits(((lambda v: least <= v <= most, need),), whole=True)


def number(passes: Test, need: str, most: float | None = None) -> Limits:
    """Numbers that pass a test, up to `most` without their signs."""
    tests = [(passes, need)]
    if most is not None:
        tests.append((lambda v: abs(v) <= most, f"at most {most:g} is possible"))
    return Limits(tuple(tests))


def at_least(least: float) -> Limits:
    """Finite numbers from `least` on."""
    return number(lambda v: least <= v < math.inf, f"a number >= {least:g} is needed")


ANY_COUNT = whole(0)
COUNT = whole(1)
CLIENTS = whole(1, most=100_000_000)
COHORT = whole(1, "at least one client per round is needed")
ROUNDS = whole(1, "at least one is needed", MOST_ROUNDS)
STEPS = whole(1, most=MOST_ROUNDS)
WARMUP = whole(0, most=MOST_ROUNDS)
BATCH = whole(0, "a size, or 0 for all records, is needed")
SEED = within(0, 2**63 - 1, "a number from 0 to 2^63 - 1 is needed")
POWER = within(-60, 60, "a power of two from -60 to 60 is needed")
NOMINAL = whole(1, "at least 1 record is needed")
CLIP_EVERY = whole(1, "at least 1 round is needed")
TEXT_LENGTH = whole(1, "at least one word is needed", 10_000)
VOCABULARY = whole(1, most=1_000_000)

POSITIVE = number(lambda v: 0 < v < math.inf, "a positive number is needed")
NOT_NEGATIVE = at_least(0)
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
    (
        *QUANTILE.tests,
        (lambda v: v >= _SMALLEST_DELTA, f"at least {_SMALLEST_DELTA:g} is possible"),
    )
)
MULTIPLIER = number(lambda v: 0 <= v < math.inf, "a number >= 0 is needed", _MOST_NOISE)
SOME_NOISE = number(lambda v: 0 < v < math.inf, "a positive number is needed", _MOST_NOISE)
REPORT_EPSILON = number(
    lambda v: v >= SMALLEST_REPORT, "a number >= 1e-6 is needed", LARGEST_REPORT
)
BIT_EPSILON = number(lambda v: v >= 0, "a number >= 0 is needed", 50)
CLIP = number(
    lambda v: SMALLEST_CLIP <= v < math.inf,
    f"a number of at least {SMALLEST_CLIP} is needed",
    1e30,
)
RADIUS = number(
    lambda v: SMALLEST_RADIUS <= v < math.inf, f"at least {SMALLEST_RADIUS} is needed", 1e30
)
CLIP_FLOOR = number(
    lambda v: SMALLEST_FLOOR <= v < math.inf,
    f"a number from {SMALLEST_FLOOR} to the first clip is needed",
)
LOSS_CLIP = number(lambda v: 1e-6 <= v <= 1e6, "a number from 1e-6 to 1e6 is needed")

OPTIONS = {
    "repeat": within(1, 10_000, "a number from 1 to 10000 is needed"),
    "clients": CLIENTS,
    "per_round": CLIENTS,
    "parameters": whole(1, most=10**15),
    "epsilon": POSITIVE,
    "delta": DELTA,
    "rounds": STEPS,
    "noise": SOME_NOISE,
    "rate": RATE,
}
"""By the command line's option."""

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
"""How the number ends that is half the 95 % interval of a metric with a price."""

OF_LABELS = ("accuracy", "top-K", "f1", "f1-macro", "auroc", "perplexity")
OF_NUMBERS = ("mae", "rmse", "r2")
"""Metrics, by the targets that they are of."""

TOP = r"top-([1-9]\d{0,6})"
"""What stands for top-K: a number in the place of the K."""

_ALIKE = 0.7  # two letters of four exchanged are


@dataclass(frozen=True)
class OneOf:
    """The names that a key of a recipe may have, and one that messages do not list."""

    choices: tuple[str, ...]
    unlisted: str | None = None
    text = ""

    def check(self, key: str, value: str) -> None:
        """Refuse a name that is unknown.

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
    """Refuse an unknown metric.

    >>> check_metric("evaluate.metrics", "top-5")
    """
    known = [name for name in (*OF_LABELS, *OF_NUMBERS) if name != "top-K"]
    if name in known or re.fullmatch(TOP, name):
        return
    listed, like = ", ".join((*known, "top-K (such as top-5)")), hint(name, (*known, "top-5"))
    raise BadInput(f"{key} has {shown(name)}: choose from {listed}{like}")


def check_metrics(key: str, names: Sequence[str]) -> None:
    """Refuse unknown metrics, and one that is listed twice."""
    for at, name in enumerate(names):
        check_metric(key, name)
        if name in names[:at]:
            raise BadInput(f"{key} has {name!r} twice: name it once")


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known ones, "" if none is near.

    >>> hint("minst", DATA_SETS)
    '; did you mean mnist?'
    """
    found = nearest(name, known)
    return f"; {meant(found)}" if found else ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that resemble the name, the nearest first."""
    return get_close_matches(name, list(known), cutoff=_ALIKE)


def meant(names: Sequence[str]) -> str:
    """ "did you mean ...?" with these names.

    >>> meant(["client.lr", "clip.lr", "server.lr"])
    'did you mean client.lr, clip.lr or server.lr?'
    """
    *others, last = names
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
