"""Property inference: do a client's updates show a property of its records?

The attacker has records that belong to no client, the test split, with and without the property.
In every round it computes updates from them as clients do, fits a classifier on these updates as
they would be seen, and scores the clients' updates (Melis et al. 2019, passive). In the active
attack some clients also train the joint model for the property.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.audit.findings import Leak, Measure
from fedveil.audit.multi_task import MultiTask, last_layer
from fedveil.audit.property_classifier import PropertyClassifier
from fedveil.audit.property_labels import PLANTED, Flags, PropertyLabels, property_labels
from fedveil.audit.roc import auc, auc_interval
from fedveil.audit.seen import View, Witness, again, beside, check_own, replayed, views
from fedveil.base.errors import BadInput
from fedveil.base.identity import seed_of
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.round import Round
from fedveil.training.session import Training

ATTACK = "property"

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

_CONFIDENCE = 0.95
_DRAWS = 3
_LESSON = 512
"""Records that an active attacker trains on."""

OnStep = Callable[[int, int], None]
"""(rounds seen, of how many)."""


class PropertyScores:
    """Scores of clients, summed over the rounds in which they were seen.

    Attributes:
        total: The sum of each client's scores.
        times: The number of rounds in which each client was seen.
    """

    def __init__(self, clients: int) -> None:
        self.total: Values = np.zeros(clients)
        self.times: Ids = np.zeros(clients, dtype=np.int64)

    def add_(self, ids: Ids, scores: Values) -> None:
        self.total[ids] += scores
        self.times[ids] += 1

    def leak(self, has: Flags) -> tuple[int, Measure]:
        """(the number of clients seen, the AUC of their mean scores)."""
        seen = np.flatnonzero(self.times > 0)
        kinds = has[seen]
        if kinds.all() or not kinds.any():
            raise BadInput(
                f"all of the {len(seen)} clients that took part have the property, or none has: "
                "attack more rounds"
            )
        area = auc(self.total[seen] / self.times[seen], kinds)
        low, high = auc_interval(area, int(kinds.sum()), int((~kinds).sum()), _CONFIDENCE)
        return len(seen), Measure("AUC", area, low, high)


@dataclass(frozen=True)
class PropertyAudit:
    """The property inference audit.

    A client has the property if its records have more of the feature, on average, than those of
    half of the clients.

    Attributes:
        property: "planted" (the records of half of the clients are dimmed), a feature of images
            (thickness, slant, brightness), or `column` or `column=value` of a table.
        rounds: Rounds in which clients are watched.
        auxiliary: Clients of each kind that the attacker makes up.
        active: Whether to add the active attack, if the model has a hidden layer.
        attackers: Clients that train for the property in the active attack.
        seed: Of the audit's own draws.

    | edge | behaviour |
    |---|---|
    | a property that nobody or everybody has, or an unknown one | BadInput |
    | texts, whole numbers, several inputs by name | BadInput |
    | fewer than 1 round, fewer than 10 clients of one's own, no attackers | BadInput |
    """

    property: str = PLANTED
    rounds: int = 10
    auxiliary: int = 100
    active: bool = True
    attackers: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("auxiliary", 10), ("attackers", 1)):
            if getattr(self, name) < least:
                raise BadInput(f"--{name} is {getattr(self, name)}: at least {least} is needed")

    def leaks(self, training: Training, on_step: OnStep = lambda done, of: None) -> Iterator[Leak]:
        """One leak for each view of the passive attack, then for each view of the active one."""
        check_own(training, ATTACK)
        labels = property_labels(self.property, training.data, self.auxiliary, self.seed)
        rounds = min(self.rounds, training.plan.permitted)
        kinds = ["passively", "actively"] if self.active and _hidden(training) else ["passively"]
        for number, kind in enumerate(kinds):
            ids = np.zeros(0, dtype=np.int64)
            attacked = again(training, self.seed, data=labels.data, adversary=None)
            if kind == "actively":
                attacker = self._attacker(training, labels)
                ids = attacker.ids
                attacked = replace(attacked, adversary=attacker)
            clients = Witness(attacked, labels.data, attacked.streams)
            mine = [Witness(attacked, labels.own, own) for own in self._streams(training)]
            by_view = {view: PropertyScores(len(labels.has)) for view in views(training.plan)}
            for round in replayed(attacked, rounds):
                self._watch(clients, mine, labels, round, ids, by_view)
                on_step(number * rounds + round.number, len(kinds) * rounds)
            for view, scores in by_view.items():
                seen, measure = scores.leak(labels.has)
                what = f"{self.property}, {kind}, of {seen} clients in {rounds} rounds, "
                what += view.told(training.plan)
                yield Leak(ATTACK, what, (measure,), beside(view, training.plan))

    def _watch(
        self,
        clients: Witness,
        mine: list[Witness],
        labels: PropertyLabels,
        round: Round,
        apart: Ids,
        by_view: dict[View, PropertyScores],
    ) -> None:
        """Score one round's reports by a classifier fitted on the attacker's own updates."""
        ids = round.ids[~np.isin(round.ids, apart)]
        if not len(ids):
            return
        every = np.arange(len(labels.own_has))
        names = every % len(labels.has)
        made = mine[0].unnoised(round, names, every).numpy()
        for view, scores in by_view.items():
            shown = [each.seen(view, round, names, every).numpy() for each in mine]
            classifier = PropertyClassifier.fitted(made, np.concatenate(shown), labels.own_has)
            rows = clients.seen(view, round, ids, ids).numpy()
            scores.add_(ids, classifier.scores(rows))

    def _streams(self, training: Training) -> list[Streams]:
        """Noise streams of the attacker's own clients, one for each draw of noise."""
        secure = training.plan.secure
        return [Streams(seed_of("property", self.seed, k), secure) for k in range(_DRAWS)]

    def _attacker(self, training: Training, labels: PropertyLabels) -> MultiTask:
        """Random clients that train for the property on the attacker's records."""
        if self.attackers >= training.data.clients // 2:
            raise BadInput(
                f"--attackers is {self.attackers} of {training.data.clients} clients: fewer than "
                "half of them are needed"
            )
        generator = np.random.default_rng([self.seed, 0xAC])
        ids = np.sort(generator.choice(training.data.clients, self.attackers, replace=False))
        x: Any = labels.own.x
        has = np.repeat(labels.own_has, labels.own.sizes)
        few = generator.permutation(len(x))[:_LESSON]
        return MultiTask(
            training.task,
            ids.astype(np.int64),
            torch.tensor(x[few]),
            torch.tensor(labels.own.y[few]),
            torch.from_numpy(has[few]),
            lr=float(getattr(training.work, "lr", 0.1)),
            seed=self.seed,
        )


def _hidden(training: Training) -> bool:
    try:
        last_layer(training.task)
    except BadInput:
        return False
    return True
