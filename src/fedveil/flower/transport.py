"""The interface of whatever carries asks to sites and answers back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedveil.flower.messages import Answer, Refusal, RoundAsk


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
