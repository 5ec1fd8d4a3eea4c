"""The messages between the server of a federation and its sites, whatever transport carries them.

A message is checked when it is made, on either side: what is read from the wire is a valid message
or is refused. The numbers in a report are checked by `server_sum`, not here.
"""

import hashlib
import io
import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import torch

from fedveil.base.checks import MOST_ROUNDS, shown
from fedveil.base.errors import BadInput
from fedveil.flower.ledger_tail import most_tail_bytes
from fedveil.privacy.clip import BLOCK
from fedveil.privacy.ledger.hash_chain import json_digest
from fedveil.runs.recipe import Recipe

FORMAT = 1
"""The version of messages and plan digests. Both sides of a federation need the same."""

VERSION = ".".join(version("fedveil").split(".")[:2])
"""The minor version of fedveil, such as "0.2". All parties of a federation need the same."""

LONGEST_REASON = 300

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RUN, _PLAN = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")
_NOT_CLAIMED = ("name", "data", "evaluate", "engine")
_SIGNED_BYTES = 2048  # more than a signed head takes


def _nothing() -> torch.Tensor:
    """Return no bytes, as messages have them."""
    return torch.zeros(0, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class _RoundMessage:
    """A message about one attempt at one round of a run.

    Attributes:
        run: The id of the run, 32 hexadecimal digits.
        round: The round, from 1.
        attempt: The attempt at the round, from 0.
    """

    run: str
    round: int
    attempt: int

    def __post_init__(self) -> None:
        _check_text("run", self.run, _RUN, "32 hexadecimal digits")
        for name, value, least in (("round", self.round, 1), ("attempt", self.attempt, 0)):
            if type(value) is not int or not least <= value <= MOST_ROUNDS:
                raise BadInput(f"{name} is {shown(value)}: a whole number from {least} is needed")


@dataclass(frozen=True, eq=False)
class RoundAsk(_RoundMessage):
    """A server's ask for a site's report of a round.

    Attributes:
        plan: The digest of the plan (`plan_digest`).
        params: The round's model, float32 [P].
        moving: The adaptive state (a clip, ranges), float64 [M].
        ledger_tail: The end of the server's ledger (`LedgerTail`), uint8 [L].
    """

    plan: str
    params: torch.Tensor
    moving: torch.Tensor
    ledger_tail: torch.Tensor = field(default_factory=_nothing, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_text("plan", self.plan, _PLAN, "a SHA-256 in hexadecimal digits")
        _check_vector("params", self.params, torch.float32)
        _check_vector("moving", self.moving, torch.float64)
        _check_vector("ledger_tail", self.ledger_tail, torch.uint8)

    @property
    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of everything that the answer depends on.

        The server's ledger is not in it: it goes on from one ask to the next.
        """
        place = json.dumps([FORMAT, self.run, self.round, self.attempt, self.plan])
        digest = hashlib.sha256(place.encode())
        for vector in (self.params, self.moving):
            digest.update(f"\n{vector.numel()}\n".encode())
            digest.update(vector.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class RehearsalAsk(RoundAsk):
    """A server's ask to rehearse a round: as long as an ask, and answered by zeros.

    The site works on records that are made up, so that the time of its answer is public. `run` is
    no run's.
    """


@dataclass(frozen=True, eq=False)
class MaskedAsk(RoundAsk):
    """A server's ask for a site's report under the masks of a secure sum.

    Attributes:
        roster_message: The roster of `masking`, uint8 [L]: the keys of the sites that mask with
            each other.
    """

    roster_message: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_vector("roster_message", self.roster_message, torch.uint8)


@dataclass(frozen=True, eq=False)
class HeadAsk(_RoundMessage):
    """A server's ask for a site's signature of the end of its ledger, and for nothing else.

    Attributes:
        plan: The digest of the plan.
        ledger_tail: The end of the server's ledger (`LedgerTail`), uint8 [L].
    """

    plan: str
    ledger_tail: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_text("plan", self.plan, _PLAN, "a SHA-256 in hexadecimal digits")
        _check_vector("ledger_tail", self.ledger_tail, torch.uint8)


@dataclass(frozen=True, eq=False)
class HeadReply(_RoundMessage):
    """A site's signature of the end of the server's ledger.

    Attributes:
        site: The name of the site.
        signature: The signed head (`SignedHead`) as JSON, uint8 [L]. Empty if the site signs none.
    """

    site: str
    signature: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        check_site_name(self.site)
        _check_vector("signature", self.signature, torch.uint8)


@dataclass(frozen=True, eq=False)
class SumStep(_RoundMessage):
    """A step of a secure sum, to a site or from it: a message of `masking`, which names its kind.

    Attributes:
        plan: The digest of the plan.
        site: The name of the site that it is for, or from.
        content: The message, uint8 [L]. Empty in a server's ask for a site's keys.
    """

    plan: str
    site: str
    content: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_text("plan", self.plan, _PLAN, "a SHA-256 in hexadecimal digits")
        check_site_name(self.site)
        _check_vector("content", self.content, torch.uint8)

    @property
    def encoded(self) -> bytes:
        """Return the message of `masking`."""
        return self.content.numpy().tobytes()


@dataclass(frozen=True, eq=False)
class MetricsAsk(_RoundMessage):
    """A server's ask for the metrics of a model on the people whom a site holds out.

    `round` is the round after which the model is measured.

    Attributes:
        plan: The digest of the plan.
        params: The model, float32 [P].
    """

    plan: str
    params: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_text("plan", self.plan, _PLAN, "a SHA-256 in hexadecimal digits")
        _check_vector("params", self.params, torch.float32)


@dataclass(frozen=True, eq=False)
class MetricsAnswer(_RoundMessage):
    """A site's noisy sums over the people whom it holds out (`SiteMetrics.noisy_sum`).

    Attributes:
        site: The name of the site.
        noisy_sums: The sums, float64 [W], which are checked when they are combined.
    """

    site: str
    noisy_sums: torch.Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        check_site_name(self.site)
        if not isinstance(self.noisy_sums, torch.Tensor):
            raise BadInput(f"noisy_sums is {shown(self.noisy_sums)}: a tensor is needed")


@dataclass(frozen=True, eq=False)
class Answer(_RoundMessage):
    """A site's answer to an ask.

    Tensors are as they arrived: types, shapes and numbers are checked when reports are summed.

    Attributes:
        site: The name of the site.
        report: The report, float32 [P], or float64 where the release is wide.
        watched: The statistic of an adaptive clip, float64 [W].
        signature: The signed head of the ledger in the ask, as in `HeadReply`.
    """

    site: str
    report: torch.Tensor
    watched: torch.Tensor
    signature: torch.Tensor = field(default_factory=_nothing, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_site_name(self.site)
        _check_vector("signature", self.signature, torch.uint8)
        for name in ("report", "watched"):
            if not isinstance(getattr(self, name), torch.Tensor):
                raise BadInput(f"{name} is {shown(getattr(self, name))}: a tensor is needed")


@dataclass(frozen=True)
class Refusal(_RoundMessage):
    """A site's refusal to take part in a round.

    Attributes:
        site: The name of the site.
        reason: One line, without anything private.
    """

    site: str
    reason: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_site_name(self.site)
        if not isinstance(self.reason, str) or not self.reason.isprintable() or not self.reason:
            raise BadInput("the reason of a refusal is one line of text")
        if len(self.reason) > LONGEST_REASON:
            raise BadInput(f"the reason of a refusal has at most {LONGEST_REASON} characters")


ServerMessage = RoundAsk | MetricsAsk | HeadAsk | SumStep
Reply = Answer | MetricsAnswer | HeadReply | SumStep | Refusal
SiteMessage = ServerMessage | Reply
_KINDS: dict[str, type[SiteMessage]] = {
    "ask": RoundAsk,
    "masked-ask": MaskedAsk,
    "metrics-ask": MetricsAsk,
    "rehearsal-ask": RehearsalAsk,
    "answer": Answer,
    "metrics-answer": MetricsAnswer,
    "head-ask": HeadAsk,
    "head-reply": HeadReply,
    "sum-step": SumStep,
    "refusal": Refusal,
}
ASKS = ("ask", "masked-ask", "metrics-ask", "rehearsal-ask", "head-ask", "sum-step")
"""The kinds of messages that a server sends. Of these a site sends steps of a sum alone."""


@dataclass(frozen=True)
class VectorForm:
    """The type and length of a vector in a message, which both sides know from the plan.

    Attributes:
        dtype: "float32" or "float64".
        length: How many numbers the vector has.
    """

    dtype: str
    length: int

    @cached_property
    def header(self) -> bytes:
        """Return what precedes the numbers where numpy has written the vector (`np.save`)."""
        written = io.BytesIO()
        form = {"descr": np.dtype(self.dtype).str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(written, form)
        return written.getvalue()

    @property
    def encoded_length(self) -> int:
        """Return the number of bytes of the vector as numpy writes it."""
        return len(self.header) + self.length * np.dtype(self.dtype).itemsize

    def unpack(self, name: str, dtype: object, shape: object, data: bytes) -> np.ndarray:
        """Return the vector that numpy has written as `data`, without a copy.

        Nothing is decoded or allocated for another vector than this one.

        | edge | behaviour |
        |---|---|
        | another type or shape is stated beside the data | BadInput |
        | more or fewer bytes, none included | BadInput |
        | another type, shape, order or version stated in the data | BadInput |
        | numbers that are not finite | returned: whoever uses them looks |

        Args:
            name: The name of the vector, for messages.
            dtype: The type that is stated beside the data.
            shape: The shape that is stated beside the data.
            data: The encoded vector.
        """
        if dtype != self.dtype or shape != (self.length,):
            raise BadInput(
                f"{name} is {shown(dtype)} of shape {shown(shape)}, and the plan has "
                f"{self.dtype} of shape ({self.length},)"
            )
        if len(data) != self.encoded_length or not data.startswith(self.header):
            raise BadInput(
                f"{name} has {len(data):,} bytes that are not the plan's {self.length:,} numbers"
            )
        return np.frombuffer(data, dtype=self.dtype, offset=len(self.header))


class BytesForm(VectorForm):
    """The form of bytes in a message, of which `length` is the most that there may be."""

    def __init__(self, most: int) -> None:
        super().__init__("uint8", most)

    def unpack(self, name: str, dtype: object, shape: object, data: bytes) -> np.ndarray:
        """Return the bytes that numpy has written as `data`, without a copy.

        BadInput for more than `length`, and for all that another form refuses.
        """
        match shape:
            case (int() as length,) if 0 <= length <= self.length:
                return VectorForm(self.dtype, length).unpack(name, dtype, shape, data)
        raise BadInput(f"{name} has the shape {shown(shape)}: at most {self.length:,} bytes")


Forms = Mapping[str, VectorForm]
"""The forms of a message's vectors, by name."""


HEAD_FORMS: Forms = {"signature": BytesForm(_SIGNED_BYTES)}
"""The forms of a `HeadReply`."""


def ask_forms(size: int, moving: int, sites: int) -> Forms:
    """Return type and length of each vector of a `RoundAsk`.

    They are `size` parameters in float32, an adaptive state of `moving` numbers in float64, and the
    end of the server's ledger, with what each of the `sites` has signed of it.
    """
    numbers = {"params": VectorForm("float32", size), "moving": VectorForm("float64", moving)}
    return {**numbers, "ledger_tail": BytesForm(most_tail_bytes(sites))}


def answer_forms(size: int, width: int, *, wide: bool = False) -> Forms:
    """Return the forms of an answer: a report of `size` numbers, and a statistic of `width`.

    A `wide` report is float64, since sums of multiples of a grid are exact only there.
    """
    kind = "float64" if wide else "float32"
    numbers = {"report": VectorForm(kind, size), "watched": VectorForm("float64", width)}
    return {**numbers, **HEAD_FORMS}


def metrics_forms(width: int) -> Forms:
    """Return the forms of a site's metrics: `width` numbers."""
    return {"noisy_sums": VectorForm("float64", width)}


@dataclass(frozen=True, eq=False)
class Arrival:
    """A message that a transport has received.

    Attributes:
        site: The sender, by the key of the connection and not by the message.
        message: The answer or refusal, or one line on why it cannot be read.
    """

    site: str
    message: Reply | str


class Transport(Protocol):
    """A connection to sites, by name.

    It vouches for the sender of each message. It may yield any message at any time: the engine
    decides what is in time and was asked for.
    """

    def online(self) -> frozenset[str]:
        """Return the names of the sites that are online now."""
        ...

    def ask(
        self, sites: Sequence[str], ask: RoundAsk, seconds: float, forms: Forms
    ) -> Iterator[Arrival]:
        """Send `ask` to the sites, and yield messages as they arrive.

        It ends when all sites have answered or `seconds` are over. A site that is not online does
        not answer. An answer whose vectors have other forms is not decoded, and arrives as a text.
        """
        ...

    def send(
        self, messages: Mapping[str, ServerMessage], seconds: float, forms: Forms
    ) -> Iterator[Arrival]:
        """Send each site a message of its own, by name, and yield messages as `ask` does."""
        ...


def fault_of(
    arrival: Arrival, ask: ServerMessage, invited: Collection[str], known: set[str], *, late: bool
) -> str:
    """Return why a message does not count, as a clause such as "it answered twice".

    "" if it counts.

    Args:
        arrival: The message and its sender.
        ask: A message that was sent to the sites.
        invited: The sites that were asked.
        known: The sites that have answered or declined.
        late: Whether the deadline is over.
    """
    message = arrival.message
    if isinstance(message, str):
        return message
    if arrival.site not in invited:
        return "it was not asked"
    if message.site != arrival.site:
        return f"it answered in the name of {message.site!r}"
    if (message.run, message.round, message.attempt) != (ask.run, ask.round, ask.attempt):
        return f"it answered attempt {message.attempt} at round {message.round}, or another run"
    if late:
        return "it answered after the deadline"
    return "it answered twice" if arrival.site in known else ""


def to_parts(message: SiteMessage) -> tuple[dict[str, str | int], dict[str, np.ndarray]]:
    """Return a message as (values by name, arrays by name), which transports can carry.

    Values have "format", "version" and "kind" beside the message's own texts and numbers.
    """
    kind = next(kind for kind, known in _KINDS.items() if type(message) is known)
    values: dict[str, str | int] = {"format": FORMAT, "version": VERSION, "kind": kind}
    arrays = {}
    for name, value in vars(message).items():
        if isinstance(value, torch.Tensor):
            arrays[name] = value.detach().cpu().numpy()
        else:
            values[name] = value
    return values, arrays


def from_parts(values: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> SiteMessage:
    """Return the message with these values and arrays: the inverse of `to_parts`.

    | edge | behaviour |
    |---|---|
    | another format or version, an unknown kind, a part too few or too many | BadInput |
    | a value of the wrong type, a number out of range, a name that is none | BadInput |
    | an ask whose arrays are not vectors of the right type, or not finite | BadInput |
    | an answer with an array that no tensor can hold (texts, objects) | BadInput |
    | an answer of another shape or type, or not finite | an `Answer`: `server_sum` refuses it |
    """
    check_version(values)
    name = str(values.get("kind"))
    kind = _KINDS.get(name)
    if kind is None:
        raise BadInput(f"a message of kind {shown(values.get('kind'))}, which nobody knows")
    tensors = [field.name for field in fields(kind) if field.type is torch.Tensor]
    plain = [field.name for field in fields(kind) if field.name not in tensors]
    if set(values) != {"format", "version", "kind", *plain} or set(arrays) != set(tensors):
        raise BadInput(f"a message of kind {name!r} with other parts than it has")
    parts: dict[str, Any] = {name: values[name] for name in plain}
    for name in tensors:
        try:
            parts[name] = torch.tensor(arrays[name])  # a copy: a carrier's may be read-only
        except (TypeError, ValueError, RuntimeError) as e:
            raise BadInput(f"{name} is no array of numbers") from e
    return kind(**parts)


def check_version(values: Mapping[str, object]) -> None:
    """Raise BadInput for a message of another minor version of fedveil, or of another format."""
    for what, known in (("version", VERSION), ("format", FORMAT)):
        if values.get(what) != known:
            raise BadInput(
                f"a message of {what} {shown(values.get(what))} and not {known}: use the same "
                "version of fedveil on both sides"
            )


def bytes_tensor(content: bytes) -> torch.Tensor:
    """Return bytes as a tensor, uint8 [L], as messages have them."""
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def new_run_id() -> str:
    """Return a random id for a run, 32 hexadecimal digits."""
    return secrets.token_hex(16)


def plan_digest(recipe: Recipe, clients: int) -> str:
    """Return the SHA-256 digest, in hexadecimal, that identifies a plan on both sides.

    It covers everything in the recipe that a claim depends on, and the number of sites, `clients`,
    online or not. The recipe's name, data, evaluation and engine may differ between the sides. If
    sites measure (evaluate.where), the digest covers the evaluation as well.
    """
    return json_digest(plan_content(recipe, clients))


def plan_content(recipe: Recipe, clients: int) -> dict[str, Any]:
    """Return JSON values of everything that `plan_digest` covers.

    Keys: "format", "clients" and "recipe".
    """
    claimed = recipe.model_dump(mode="json", exclude_none=True, exclude=set(_NOT_CLAIMED))
    content: dict[str, Any] = {"format": FORMAT, "clients": clients, "recipe": claimed}
    if recipe.evaluate.where == "site":  # then sites measure, and claims depend on how
        content["evaluate"] = recipe.evaluate.model_dump(mode="json", exclude_none=True)
    return content


def check_site_name(name: object) -> None:
    """Raise BadInput unless `name` is a text that can be the name of a site.

    Up to 64 letters, digits, dots, dashes and underscores, with a letter or digit first.
    """
    _check_text("site", name, _NAME, "up to 64 letters, digits, dots, dashes and underscores")


def _check_text(name: str, value: object, pattern: re.Pattern[str], need: str) -> None:
    """Raise BadInput unless `value` is a text that matches `pattern` as a whole.

    `name` and `need`, the pattern in words, are for the message.
    """
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise BadInput(f"{name} is {shown(value)}: {need}")


def _check_vector(name: str, value: object, dtype: torch.dtype) -> None:
    """Raise BadInput unless `value` is a vector of type `dtype` with finite numbers.

    `name` is for the message.
    """
    if not isinstance(value, torch.Tensor):
        raise BadInput(f"{name} is {shown(value)}: a vector of {dtype} is needed")
    if value.dtype is not dtype or value.ndim != 1:
        form = f"{value.dtype} of shape {tuple(value.shape)}"
        raise BadInput(f"{name} is {form}: a vector of {dtype} is needed")
    if dtype.is_floating_point and not all(
        bool(torch.isfinite(piece).all()) for piece in torch.split(value, BLOCK)
    ):
        raise BadInput(f"{name} holds a number that is not finite")
