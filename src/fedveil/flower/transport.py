"""What carries asks to sites and answers back, whatever it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedveil.flower.messages import Answer, Refusal, RoundAsk


@dataclass(frozen=True, eq=False)
class Arrival:
    """Something that came back, and from which site: as its key says, not as it says itself.

    `message` is one line of why nothing can be read, where that is so.
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
        """Send `ask` to each of the sites; what arrives within `seconds`, as it comes.

        It ends when all have answered or the time is over. A site that is not online does not
        answer.
        """
        ...
