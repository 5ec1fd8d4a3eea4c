"""Property inference: does what a client's records have beside the task show in its updates?

The attacker has records that belong to no client, the test split, with and without the property.
In every round it makes updates from them as clients do, learns to tell the two kinds apart as they
would be seen, and scores what it sees of the clients (Melis et al. 2019, passive). In the active
attack some clients train the joint model for the property as well.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
from fedveil.errors import BadInput
from fedveil.identity import seed_of
from fedveil.privacy.noise.streams import Streams
from fedveil.training.round import Ask
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


@dataclass(frozen=True, eq=False)
class PropertyScores:
    """What the attacker says of the clients it saw: scores, added up over rounds."""

    total: Values
    times: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", np.zeros(len(self.total), dtype=np.int64))

    def add_(self, ids: Ids, scores: Values) -> None:
        self.total[ids] += scores
        self.times[ids] += 1

    def leak(self, has: Flags) -> tuple[int, Measure]:
        """(how many clients were seen, the AUC of their mean scores)."""
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
    """The property, in how many rounds clients are watched, and with how many clients of one's own.

    `property` is "planted" (half of the clients' records are dimmed, whatever they are), a trait of
    images (thickness, slant, brightness), or `column` or `column=value` of a table: a client has it
    if its records have more of it, on average, than half of the clients'. `active` adds the attack
    in which `attackers` clients train for it, where the model has a hidden layer.

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
        """One for each view, passive; and as many active ones."""
        check_own(training, ATTACK)
        asked = property_labels(self.property, training.data, self.auxiliary, self.seed)
        rounds = min(self.rounds, training.plan.permitted)
        kinds = ["passively", "actively"] if self.active and _hidden(training) else ["passively"]
        for number, kind in enumerate(kinds):
            ids = np.zeros(0, dtype=np.int64)
            attacked = again(training, self.seed, data=asked.data, adversary=None)
            if kind == "actively":
                attacker = self._attacker(training, asked)
                ids = attacker.ids
                attacked = replace(attacked, adversary=attacker)
            clients = Witness(attacked, asked.data, attacked.streams)
            mine = [Witness(attacked, asked.own, own) for own in self._streams(training)]
            told = {view: PropertyScores(np.zeros(len(asked.has))) for view in views(training.plan)}
            for ask in replayed(attacked, rounds):
                self._watch(clients, mine, asked, ask, ids, told)
                on_step(number * rounds + ask.round, len(kinds) * rounds)
            for view, scores in told.items():
                seen, measure = scores.leak(asked.has)
                what = f"{self.property}, {kind}, of {seen} clients in {rounds} rounds, "
                what += view.told(training.plan)
                yield Leak(ATTACK, what, (measure,), beside(view, training.plan))

    def _watch(
        self,
        clients: Witness,
        mine: list[Witness],
        asked: PropertyLabels,
        ask: Ask,
        apart: Ids,
        told: dict[View, PropertyScores],
    ) -> None:
        """Score one round's reports, by what the attacker's own records make of its model."""
        ids = ask.ids[~np.isin(ask.ids, apart)]
        if not len(ids):
            return
        every = np.arange(len(asked.own_has))
        names = every % len(asked.has)
        made = mine[0].unnoised(ask.round, ask.state, names, every).numpy()
        for view, scores in told.items():
            shown = [each.seen(view, ask.round, ask.state, names, every).numpy() for each in mine]
            telling = PropertyClassifier.fitted(made, np.concatenate(shown), asked.own_has)
            rows = clients.seen(view, ask.round, ask.state, ids, ids).numpy()
            scores.add_(ids, telling.scores(rows))

    def _streams(self, training: Training) -> list[Streams]:
        """Of the attacker's own clients, one for each time that it noises their updates."""
        secure = training.plan.secure
        return [Streams(seed_of("property", self.seed, k), secure) for k in range(_DRAWS)]

    def _attacker(self, training: Training, asked: PropertyLabels) -> MultiTask:
        """Clients drawn at random that train on the attacker's records."""
        if self.attackers >= training.data.clients // 2:
            raise BadInput(
                f"--attackers is {self.attackers} of {training.data.clients} clients: fewer than "
                "half of them are needed"
            )
        generator = np.random.default_rng([self.seed, 0xAC])
        ids = np.sort(generator.choice(training.data.clients, self.attackers, replace=False))
        x: Any = asked.own.x
        has = np.repeat(asked.own_has, asked.own.sizes)
        few = generator.permutation(len(x))[:_LESSON]
        return MultiTask(
            training.task,
            ids.astype(np.int64),
            torch.tensor(x[few]),
            torch.tensor(asked.own.y[few]),
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
