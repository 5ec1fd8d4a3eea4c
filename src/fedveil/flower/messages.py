"""What passes between the server of a federation and its sites, whatever carries it.

A message is checked when it is made, on either side: what is read from the wire is a message or is
refused. What is in a report is not looked at here: that is what `server_sum` is for.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch

from fedveil.base.checks import MOST_ROUNDS, shown
from fedveil.base.errors import BadInput
from fedveil.runs.recipe import Recipe

FORMAT = 1
"""Of messages and of plan digests: the two sides of a federation have the same."""

LONGEST_REASON = 300

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RUN, _PLAN = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")
_NOT_CLAIMED = ("name", "data", "evaluate", "engine")


@dataclass(frozen=True, eq=False)
class RoundAsk:
    """The server asks a site for its report of a round.

    `plan` says under which plan (`plan_digest`); `params` is the round's model, float32 [P], and
    `moving` what moves from round to round beside it (a clip, ranges), float64 [M].
    """

    run: str
    round: int
    attempt: int
    plan: str
    params: torch.Tensor
    moving: torch.Tensor

    kind: ClassVar[str] = "ask"
    words: ClassVar[tuple[str, ...]] = ("run", "round", "attempt", "plan")
    arrays: ClassVar[tuple[str, ...]] = ("params", "moving")

    def __post_init__(self) -> None:
        _check_place(self.run, self.round, self.attempt)
        _check_text("plan", self.plan, _PLAN, "a SHA-256 in hexadecimal digits")
        _check_vector("params", self.params, torch.float32)
        _check_vector("moving", self.moving, torch.float64)


@dataclass(frozen=True, eq=False)
class Answer:
    """A site's report of a round, float32 [P], and what an adaptive clip watches, float64 [W].

    Tensors are as they came: the server accepts what it can use, and refuses the rest by name.
    """

    run: str
    round: int
    attempt: int
    site: str
    report: torch.Tensor
    watched: torch.Tensor

    kind: ClassVar[str] = "answer"
    words: ClassVar[tuple[str, ...]] = ("run", "round", "attempt", "site")
    arrays: ClassVar[tuple[str, ...]] = ("report", "watched")

    def __post_init__(self) -> None:
        _check_place(self.run, self.round, self.attempt)
        check_site_name(self.site)
        for name in self.arrays:
            if not isinstance(getattr(self, name), torch.Tensor):
                raise BadInput(f"{name} is {shown(getattr(self, name))}: a tensor is needed")


@dataclass(frozen=True)
class Refusal:
    """A site takes no part in a round, and says why in one line without anything private."""

    run: str
    round: int
    attempt: int
    site: str
    reason: str

    kind: ClassVar[str] = "refusal"
    words: ClassVar[tuple[str, ...]] = ("run", "round", "attempt", "site", "reason")
    arrays: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _check_place(self.run, self.round, self.attempt)
        check_site_name(self.site)
        if not isinstance(self.reason, str) or not self.reason.isprintable() or not self.reason:
            raise BadInput("the reason of a refusal is one line of text")
        if len(self.reason) > LONGEST_REASON:
            raise BadInput(f"the reason of a refusal has at most {LONGEST_REASON} characters")


SiteMessage = RoundAsk | Answer | Refusal
KINDS: dict[str, type[RoundAsk] | type[Answer] | type[Refusal]] = {
    kind.kind: kind for kind in (RoundAsk, Answer, Refusal)
}


@dataclass(frozen=True, eq=False)
class MessageParts:
    """A message as words and arrays, which is what carriers take."""

    words: dict[str, str | int]
    arrays: dict[str, np.ndarray]


def taken_apart(message: SiteMessage) -> MessageParts:
    """The parts of a message, of which `put_together` makes it again."""
    words: dict[str, str | int] = {"format": FORMAT, "kind": message.kind}
    words |= {name: getattr(message, name) for name in message.words}
    arrays = {name: getattr(message, name).detach().cpu().numpy() for name in message.arrays}
    return MessageParts(words, arrays)


def put_together(words: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> SiteMessage:
    """The message that these parts are.

    | edge | behaviour |
    |---|---|
    | another format, an unknown kind, a part too few or too many | BadInput |
    | a word of the wrong type, a number out of range, a name that is none | BadInput |
    | an ask whose arrays are not vectors of the right type, or not finite | BadInput |
    | an answer with an array that no tensor can hold (texts, objects) | BadInput |
    | an answer of another shape or type, or not finite | an `Answer`: `server_sum` refuses it |
    """
    if words.get("format") != FORMAT:
        raise BadInput(
            f"a message of format {shown(words.get('format'))} and not {FORMAT}: use the same "
            "version of fedveil on both sides"
        )
    kind = KINDS.get(str(words.get("kind")))
    if kind is None:
        raise BadInput(f"a message of kind {shown(words.get('kind'))}, which nobody knows")
    expected = {"format", "kind", *kind.words}
    if set(words) != expected or set(arrays) != set(kind.arrays):
        raise BadInput(f"a message of kind {kind.kind!r} with other parts than it has")
    rest = {name: words[name] for name in kind.words}
    return kind(**rest, **{name: _tensor(name, arrays[name]) for name in kind.arrays})  # type: ignore[arg-type]


def new_run_id() -> str:
    """A name for a run that no other run has."""
    return secrets.token_hex(16)


def plan_digest(recipe: Recipe, clients: int) -> str:
    """What a plan is known by on both sides: all of a recipe that a claim depends on.

    `clients` is the number of sites, online or not. Where records come from, how models are
    measured and how rounds are computed are each side's own, and so is what a recipe is called.
    """
    told = recipe.model_dump(mode="json", exclude_none=True, exclude=set(_NOT_CLAIMED))
    told = {"format": FORMAT, "clients": clients, "recipe": told}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def check_site_name(name: object) -> None:
    """Refuse what cannot be the name of a site, wherever it is written."""
    _check_text("site", name, _NAME, "up to 64 letters, digits, dots, dashes and underscores")


def _check_place(run: object, round: object, attempt: object) -> None:
    _check_text("run", run, _RUN, "32 hexadecimal digits")
    for name, value, least in (("round", round, 1), ("attempt", attempt, 0)):
        if type(value) is not int or not least <= value <= MOST_ROUNDS:
            raise BadInput(f"{name} is {shown(value)}: a whole number from {least} is needed")


def _check_text(name: str, value: object, pattern: re.Pattern[str], need: str) -> None:
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise BadInput(f"{name} is {shown(value)}: {need}")


def _check_vector(name: str, value: object, dtype: torch.dtype) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype is not dtype or value.ndim != 1:
        form = (
            f"{value.dtype} of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else shown(value)
        )
        raise BadInput(f"{name} is {form}: a vector of {dtype} is needed")
    if not bool(torch.isfinite(value).all()):
        raise BadInput(f"{name} holds a number that is not finite")


def _tensor(name: str, array: object) -> torch.Tensor:
    try:
        return torch.tensor(array)  # a copy: what carriers hand out may be read-only
    except (TypeError, ValueError, RuntimeError) as e:
        raise BadInput(f"{name} is no array of numbers") from e


@dataclass(frozen=True, eq=False)
class Arrival:
    """A message that came back.

    Attributes:
        site: Who sent it, by the key of the connection and not by the message.
        message: The answer or refusal, or one line on why it cannot be read.
    """

    site: str
    message: Answer | Refusal | str


class Transport(Protocol):
    """Asks sites, by name, and hands out what comes back.

    It vouches for who sent what. It may hand out anything at any time: the engine judges what is
    still in time and what was asked for.
    """

    def online(self) -> frozenset[str]:
        """The sites that could be asked now."""
        ...

    def ask(self, sites: Sequence[str], ask: RoundAsk, seconds: float) -> Iterator[Arrival]:
        """Send `ask` to the sites, and yield what arrives within `seconds`, as it comes.

        It ends when all have answered or the time is over. A site that is not online does not
        answer.
        """
        ...
