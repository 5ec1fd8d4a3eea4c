"""`Gate`: the one place through which everything but the model leaves a training.

It knows on whose records something was computed and by which mechanism, and lets through what a
claim covers, what is public, and what a claim names as outside it. The model itself leaves through
its release (`training/round.py`). The contract is held by tests/contracts/test_gate.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fedveil.base.checks import INTERVAL
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import OVER_CLIENTS, correct
from fedveil.models.task import Task
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.priced_metrics import PricedMetrics
from fedveil.privacy.site_metrics import SiteMetrics
from fedveil.training.evaluate import Owners, owner_means, owners_to_measure, priced_names
from fedveil.training.round import RoundResult
from fedveil.training.server import ServerState

Numbers = dict[str, float]
Line = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Gate:
    """Everything that leaves a training beside its model, and in which form.

    Attributes:
        every: Rounds between measurements on the test records.
        clients_every: Rounds between measurements across clients, None for none.
        in_clear: Measures a model on the test records, without noise.
        across: Measures a model on each client's own records, without noise.
        diagnostics: Whether numbers from private data of a round may be seen.
        at_sites: Asks sites to measure a model after a round, at an attempt. Metrics by name.

    Guarantee: what passes, and how.

    | what | passes |
    |---|---|
    | metrics, where `plan.metrics` has a price | through its mechanism, charged before |
    | metrics of sites' people | with the noise of each site, charged before sites are asked |
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
    at_sites: Callable[[torch.Tensor, int, int], Numbers] | None = None

    def check(self, priced: PricedMetrics | SiteMetrics) -> None:
        """Raise BadInput unless the priced metrics are those of this task and these data.

        It is also raised if clients whose metrics have a price would be measured in the clear.
        """
        names = priced_names(self.task)
        if set(priced.names) != set(names):
            raise BadInput(
                f"the plan prices {', '.join(priced.names)} and the task has {', '.join(names)}: "
                "make the plan for this task"
            )
        if isinstance(priced, SiteMetrics):
            if not self.data.elsewhere or priced.sites != self.data.clients:
                raise BadInput(
                    f"the plan prices metrics of {priced.sites} sites and the data have "
                    f"{_whom(self.data.clients, of_clients=True)}: make the plan for these sites"
                )
            return
        owners = self._owners
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
        """Held-out owners, or else the clients: metrics with a price are measured on their records.

        Raises BadInput for data that `owners_to_measure` refuses.
        """
        return owners_to_measure(self.data)

    # Metrics.

    def first_numbers(self, params: torch.Tensor) -> Numbers:
        """The metrics of the model before the first round, in the clear.

        {} if metrics have a price.
        """
        return {} if self.plan.metrics is not None else self.in_clear(params)

    def evaluate_round(
        self, state: ServerState, ledger: Ledger, streams: Streams, attempt: int = 0
    ) -> Numbers:
        """Metrics of the model in `state` after its round, {} in rounds that are not measured.

        Without a price, every `every`-th round and the last one are measured. With a price, the
        rounds in `plan.metrics` are: metrics are charged to `ledger`, come with noise, and have for
        each name a second key with the suffix `INTERVAL`, the half-width of its interval. {} if the
        ledger refuses the charge. `streams` are those of the round's `attempt`, so that a round
        done again has other noise. Sites draw their own.
        """
        priced = self.plan.metrics
        if priced is None:
            due = state.round % self.every == 0 or state.round == self.plan.permitted
            return self.in_clear(state.params) if due else {}
        if state.round not in priced.rounds or not ledger.charge_measurement(state.round):
            return {}
        if isinstance(priced, SiteMetrics):
            if self.at_sites is None:
                raise AssertionError("metrics of sites were planned and no site can be asked")
            return self.at_sites(state.params, state.round, attempt)
        means = owner_means(self.task, state.params, self._owners, priced.names, priced.loss_clip)
        found = priced.measure(means, state.round, streams)
        return found | {f"{name}{INTERVAL}": width for name, width in priced.intervals.items()}

    def last(self, history: Sequence[Line], params: torch.Tensor) -> Line:
        """The entries about the last model in a run's result.

        Without a price: "metrics", measured on `params`. With a price: "metrics", "intervals" and
        "measured_after" (a round) of the last measurement in `history`, which are {}, {} and None
        if there is none. "over_clients" is a key only if metrics across clients are measured.
        `history` has the rounds' lines of the metrics file, in order (`RoundResult.numbers`).
        """
        priced = self.plan.metrics
        if priced is None:
            entries: Line = {"metrics": self.in_clear(params)}
        else:
            entries = {"metrics": {}, "intervals": {}, "measured_after": None}
            for line in history:
                if all(name in line for name in priced.names):
                    entries["metrics"] = {name: line[name] for name in priced.names}
                    intervals = {name: line[f"{name}{INTERVAL}"] for name in priced.names}
                    entries |= {"intervals": intervals, "measured_after": line["round"]}
        if self.clients_every is not None:
            last = history[-1] if history else {}
            known = {name: value for name, value in last.items() if name.startswith(OVER_CLIENTS)}
            entries["over_clients"] = known or self.across(params)
        return entries

    def commonest_share(self) -> float | None:
        """The accuracy on the test records of always predicting their commonest label.

        None where the accuracy of the model is not shown in the clear, or records have several
        labels.
        """
        accuracy, target = self.task.measures.get("accuracy"), self.data.target
        labels = self.data.test_y
        alone = target.classes > 1 and not target.shape and not target.several
        if self.plan.metrics is not None or accuracy is not correct or not alone or not len(labels):
            return None
        return float(np.bincount(labels).max() / len(labels))

    # Diagnostics.

    def result(self, result: RoundResult) -> RoundResult:
        """The part of a round's result that may leave the training.

        With diagnostics: all of it, and every `clients_every` rounds and after the last one metrics
        across clients. Without: a copy with None for `clients`, `clipped`, `snr` and `seconds`, and
        nothing in `over_clients`, `notes` and `refused`.
        """
        if not self.diagnostics:
            nothing: Line = {"over_clients": {}, "notes": {}, "refused": ()}
            for name in ("clients", "clipped", "snr", "seconds"):
                nothing[name] = None
            return replace(result, **nothing)
        every, last = self.clients_every, result.round == self.plan.permitted
        if every is None or (result.round % every and not last):
            return result
        return replace(result, over_clients=self.across(result.state.params))

    def refused_names(self, result: RoundResult) -> list[str]:
        """The names of the clients whose reports were refused, [] without diagnostics."""
        return [self.data.client_name(client) for client in result.refused if self.diagnostics]

    def timing(self, seconds: float, rounds: int, updates: int) -> Line:
        """Entries "seconds_per_round" and "client_updates_per_second" of a run's result.

        Both are None without diagnostics. `seconds` is the time that `rounds` rounds with `updates`
        client updates in total took.
        """
        if not self.diagnostics:
            return {"seconds_per_round": None, "client_updates_per_second": None}
        return {
            "seconds_per_round": seconds / max(rounds, 1),
            "client_updates_per_second": updates / seconds if rounds else 0.0,
        }


def _whom(owners: int, *, of_clients: bool) -> str:
    """A number of owners in words, such as "100 clients"."""
    return f"{owners:,} {'clients' if of_clients else 'held-out owners'}"
