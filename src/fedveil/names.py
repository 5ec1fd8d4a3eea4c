"""The names that a recipe may use for data and models, and what was meant by one that is unknown.

Only the standard library is imported: a slip is told before anything heavy is.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar

from fedveil.checks import shown
from fedveil.errors import BadInput

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

    names: tuple[str, ...]
    unlisted: str | None = None
    text: ClassVar[str] = ""

    def check(self, key: str, value: str) -> None:
        """Refuse a name that is unknown.

        >>> MODEL_NAMES.check("model.name", "mlp")
        """
        if value not in (*self.names, self.unlisted):
            known = ", ".join(self.names)
            raise BadInput(
                f"{key} is {shown(value)}: choose one of {known}{hint(value, self.names)}"
            )


DATA_NAMES = OneOf((*DATA_SETS, "saved", TABLE), unlisted=OWN)
MODEL_NAMES = OneOf((*MODELS, CODE), unlisted=OWN)


def check_metric(key: str, name: str) -> None:
    """Refuse a name that no metric has.

    >>> check_metric("evaluate.metrics", "top-5")
    """
    known = [name for name in (*OF_LABELS, *OF_NUMBERS) if name != "top-K"]
    if name in known or re.fullmatch(TOP, name):
        return
    told, like = ", ".join((*known, "top-K (such as top-5)")), hint(name, (*known, "top-5"))
    raise BadInput(f"{key} has {shown(name)}: choose from {told}{like}")


def check_metrics(key: str, names: Sequence[str]) -> None:
    """Refuse names that no metric has, and one that is there twice."""
    for at, name in enumerate(names):
        check_metric(key, name)
        if name in names[:at]:
            raise BadInput(f"{key} has {name!r} twice: name it once")


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a message that lists what is known; "" if nothing of it is like the name.

    >>> hint("minst", DATA_SETS)
    '; did you mean mnist?'
    """
    found = nearest(name, known)
    return f"; {meant(found)}" if found else ""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three that look like the name, the most alike first."""
    return get_close_matches(name, list(known), cutoff=_ALIKE)


def meant(names: Sequence[str]) -> str:
    """A question.

    >>> meant(["client.lr", "clip.lr", "server.lr"])
    'did you mean client.lr, clip.lr or server.lr?'
    """
    *others, last = names
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
