"""`Gate`: the one place through which everything but the model leaves a training.

It knows on whose records something was computed and by which mechanism, and lets through what a
claim covers, what is public, and what a claim names as outside it. The model itself leaves through
its release (`training/round.py`). The contract is held by tests/contracts/test_gate.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fedveil.base.checks import INTERVAL
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import OVER_CLIENTS
from fedveil.models.task import Task
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.training.evaluate import Owners, measured_owners, owner_means, priced_names
from fedveil.training.round import RoundResult
from fedveil.training.server import ServerState

Numbers = dict[str, float]
Line = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Gate:
    """What leaves a training beside its model, and in which form.

    `in_clear` measures a model on the test records, `across` on each client's own records, both
    without noise. `diagnostics`: what comes from private data of a round may be seen.

    Guarantee: what passes, and how.

    | what | passes |
    |---|---|
    | metrics, where `plan.metrics` has a price | through its mechanism, charged before |
    | metrics, otherwise | in the clear: the claim names whose they are, or they are public |
    | the first model's metrics | as above; with a price never |
    | numbers across clients | with diagnostics, and never beside a price on the same records |
    | cohort sizes, shares clipped, signal/noise, refused reports and names | with diagnostics |
    | times | with diagnostics: they grow with the cohort |
    | rounds, clip norms, epsilons | always: they follow from public numbers and released models |
    """

    task: Task
    data: FederatedData
    plan: PrivacyPlan
    every: int
    clients_every: int | None
    in_clear: Callable[[torch.Tensor], Numbers]
    across: Callable[[torch.Tensor], Numbers]
    diagnostics: bool

    def check(self) -> None:
        """Refuse metrics with a price that are not those of this task and these data."""
        priced = self.plan.metrics
        if priced is None:
            return
        names, owners = priced_names(self.task), self._owners
        if set(priced.names) != set(names):
            raise BadInput(
                f"the plan prices {', '.join(priced.names)} and the task has {', '.join(names)}: "
                "make the plan for this task"
            )
        if (priced.owners, priced.of_clients) != (len(owners), owners.of_clients):
            raise BadInput(
                f"the plan prices metrics of {_whom(priced.owners, of_clients=priced.of_clients)} "
                f"and the data have {_whom(len(owners), of_clients=owners.of_clients)}: make the "
                "plan for these data"
            )
        if priced.of_clients and self.clients_every is not None:
            raise BadInput(
                "evaluate.clients would measure in the clear the clients that evaluate.epsilon "
                "pays for: leave one out"
            )

    @cached_property
    def _owners(self) -> Owners:
        return measured_owners(self.data)

    # Metrics.

    def first(self, params: torch.Tensor) -> Numbers:
        """What is known of the first model."""
        return {} if self.plan.metrics is not None else self.in_clear(params)

    def evaluate_round(self, state: ServerState, ledger: Ledger, streams: Streams) -> Numbers:
        """Metrics of the model after a round, empty in rounds that are not measured.

        `streams` are those of the round's attempt, so that a round done again has other noise.
        """
        priced = self.plan.metrics
        if priced is None:
            return self.in_clear(state.params) if self._due(state, self.every) else {}
        if state.round not in priced.rounds or not ledger.charge_measurement(state.round):
            return {}
        means = owner_means(self.task, state.params, self._owners, priced.names, priced.loss_clip)
        found = priced.released(means, state.round, streams)
        return found | {f"{name}{INTERVAL}": width for name, width in priced.intervals.items()}

    def last(self, history: Sequence[Line], params: torch.Tensor) -> Line:
        """What a result says of the last model.

        With a price that is the last measurement there was, with its intervals and its round.
        """
        priced = self.plan.metrics
        if priced is None:
            return {"metrics": self.in_clear(params)}
        for line in reversed(history):
            if all(name in line for name in priced.names):
                return {
                    "metrics": {name: line[name] for name in priced.names},
                    "intervals": {name: line[f"{name}{INTERVAL}"] for name in priced.names},
                    "measured_after": line["round"],
                }
        return {"metrics": {}, "intervals": {}, "measured_after": None}

    def over_clients(self, state: ServerState) -> Numbers:
        """How the model does across clients, in the clear."""
        if self.clients_every is None or not self._due(state, self.clients_every):
            return {}
        return self.across(state.params)

    def last_over_clients(self, history: Sequence[Line], params: torch.Tensor) -> Line:
        """The same at the end, if it was asked for: as the last line has it."""
        if self.clients_every is None:
            return {}
        last = history[-1] if history else {}
        found = {name: value for name, value in last.items() if name.startswith(OVER_CLIENTS)}
        return {"over_clients": found or self.across(params)}

    def _due(self, state: ServerState, every: int) -> bool:
        return state.round % every == 0 or state.round == self.plan.permitted

    # What a round tells of clients.

    def result(self, result: RoundResult) -> RoundResult:
        """A round's result, without what only diagnostics may show."""
        if self.diagnostics:
            return result
        nothing: Line = {"over_clients": {}, "notes": {}, "refused": ()}
        for name in ("clients", "clipped", "snr", "seconds"):
            nothing[name] = None
        return replace(result, **nothing)

    def names(self, result: RoundResult) -> list[str]:
        """Whose reports were refused, by name."""
        return [self.data.client_name(client) for client in result.refused if self.diagnostics]

    def timing(self, seconds: float, rounds: int, updates: int) -> Line:
        """How fast the run was."""
        if not self.diagnostics:
            return {"seconds_per_round": None, "client_updates_per_second": None}
        return {
            "seconds_per_round": seconds / max(rounds, 1),
            "client_updates_per_second": updates / seconds if rounds else 0.0,
        }


def _whom(owners: int, *, of_clients: bool) -> str:
    return f"{owners:,} {'clients' if of_clients else 'held-out owners'}"
