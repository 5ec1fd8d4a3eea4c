"""The rounds that a run has done, consistent at whatever moment it is interrupted."""

from dataclasses import dataclass, field
from typing import Any

from fedveil.training.server import ServerState


@dataclass(frozen=True)
class FinishedRound:
    """A finished round: its line of metrics, the number of clients, and who was refused."""

    line: dict[str, Any]
    clients: int
    refused: list[str]


@dataclass
class Done:
    """The server's state, the metrics from before the start, and the rounds since.

    A round is added before the state changes, so an interruption in between leaves it undone.
    """

    state: ServerState
    before: list[dict[str, Any]]
    rounds: list[FinishedRound] = field(default_factory=list)

    def add(self, round: FinishedRound, state: ServerState) -> None:
        """Add a round, which leads to `state`."""
        self.rounds.append(round)
        self.state = state

    @property
    def settled(self) -> list[FinishedRound]:
        """The rounds that the state includes."""
        return [round for round in self.rounds if round.line["round"] <= self.state.round]
