"""What a run has done so far, whatever the moment at which it is interrupted."""

from dataclasses import dataclass, field
from typing import Any

from fedveil.training.server import ServerState


@dataclass(frozen=True)
class Round:
    """What is kept of a round: its line of metrics, how many took part, who was refused."""

    line: dict[str, Any]
    clients: int
    refused: list[str]


@dataclass
class Done:
    """The state, the metrics from before the start, and the rounds since.

    A round is added before the state becomes its: an interruption between the two leaves it undone.
    """

    state: ServerState
    before: list[dict[str, Any]]
    rounds: list[Round] = field(default_factory=list)

    def add(self, round: Round, state: ServerState) -> None:
        """One more round, which leads to `state`."""
        self.rounds.append(round)
        self.state = state

    @property
    def settled(self) -> list[Round]:
        """The rounds that the state has."""
        return [round for round in self.rounds if round.line["round"] <= self.state.round]
