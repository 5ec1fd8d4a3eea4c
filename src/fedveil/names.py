"""The names of data sets, models and metrics in recipes, with suggestions for misspelt ones.

Only the standard library is imported: a misspelt name is refused before anything heavy is imported.
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
