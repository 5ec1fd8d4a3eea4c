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

from fedveil.attacks.auc import auc, auc_interval
from fedveil.attacks.multi_task import MultiTask, last_layer
from fedveil.attacks.telling import Telling
from fedveil.attacks.traits import Trait, check_real, relative, trait_of
from fedveil.audit.leak import Leak, Measure
from fedveil.audit.seen import View, Witness, again, check_own, claimed, replayed, views
from fedveil.data.arrays import Array
from fedveil.data.federated import FederatedData
from fedveil.errors import BadInput
from fedveil.privacy.identity import seed_of
from fedveil.privacy.noise.streams import Streams
from fedveil.training.round import Ask
from fedveil.training.session import Training

ATTACK = "property"
PLANTED = "planted"

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]

_CONFIDENCE = 0.95
_DIMMED = 0.6
_DRAWS = 3
_LESSON = 512
"""Records that an active attacker trains on."""

OnStep = Callable[[int, int], None]
"""(rounds seen, of how many)."""


@dataclass(frozen=True, eq=False)
class Question:
    """The clients' records, which clients have the property, and the attacker's own records."""

    data: FederatedData
    has: Flags
    own: FederatedData
    own_has: Flags


@dataclass(frozen=True, eq=False)
class Told:
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
        asked = self.question(training.data)
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
            told = {view: Told(np.zeros(len(asked.has))) for view in views(training.plan)}
            for ask in replayed(attacked, rounds):
                self._watch(clients, mine, asked, ask, ids, told)
                on_step(number * rounds + ask.round, len(kinds) * rounds)
            for view, scores in told.items():
                seen, measure = scores.leak(asked.has)
                what = f"{self.property}, {kind}, of {seen} clients in {rounds} rounds, "
                what += view.told(training.plan)
                yield Leak(ATTACK, what, (measure,), claimed(training.plan))

    def question(self, data: FederatedData) -> Question:
        """Who has the property, and the attacker's own clients with and without it."""
        generator = np.random.default_rng([self.seed, 0x9120])
        if self.property == PLANTED:
            check_real(data)
            has = generator.permutation(data.clients) < data.clients // 2
            _check_both(self.property, has)
            x: Any = data.x
            rows = np.repeat(has, data.sizes)
            planted = np.where(_across(rows, x), _dimmed(x), x).astype(x.dtype)
            own, own_has = self._own(data, None, generator)
            return Question(replace(data, x=planted), has, own, own_has)
        trait = trait_of(self.property, data)
        public = trait(np.asarray(data.test_x))
        values = relative(trait(np.asarray(data.x)), data.y, public, data.test_y, data.classes)
        means = np.add.reduceat(values, data.offsets[:-1]) / data.sizes
        has = means > np.median(means)
        _check_both(self.property, has)
        own, own_has = self._own(data, trait, generator)
        return Question(data, has, own, own_has)

    def _own(
        self, data: FederatedData, trait: Trait | None, generator: np.random.Generator
    ) -> tuple[FederatedData, Flags]:
        """Clients of test records, as large as half of the clients are: of either kind as many."""
        x: Any = data.test_x
        size = max(1, int(np.median(data.sizes)))
        has = np.arange(2 * self.auxiliary) % 2 == 1
        if trait is None:
            rows = generator.integers(len(x), size=(len(has), size))
            chosen = x[rows.reshape(-1)]
            chosen = np.where(_across(np.repeat(has, size), chosen), _dimmed(chosen), chosen)
        else:
            public = trait(np.asarray(x))
            above = relative(public, data.test_y, public, data.test_y, data.classes)
            upper = above > 0 if (above > 0).any() else above >= 0
            if upper.all() or not upper.any():
                raise BadInput(
                    f"property {self.property!r}: no test records to learn it from, all are alike"
                )
            share = generator.uniform(0.5, 1.0, size=len(has))
            share = np.where(has, share, 1 - share)[:, None]
            high = generator.random((len(has), size)) < share
            rows = np.where(
                high,
                generator.choice(np.flatnonzero(upper), size=high.shape),
                generator.choice(np.flatnonzero(~upper), size=high.shape),
            )
            chosen = x[rows.reshape(-1)]
        offsets = np.arange(len(has) + 1, dtype=np.int64) * size
        y = data.test_y[rows.reshape(-1)]
        own = replace(data, x=chosen.astype(x.dtype), y=y, offsets=offsets, names=None)
        return own, has

    def _watch(
        self,
        clients: Witness,
        mine: list[Witness],
        asked: Question,
        ask: Ask,
        apart: Ids,
        told: dict[View, Told],
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
            telling = Telling.fitted(made, np.concatenate(shown), asked.own_has)
            rows = clients.seen(view, ask.round, ask.state, ids, ids).numpy()
            scores.add_(ids, telling.scores(rows))

    def _streams(self, training: Training) -> list[Streams]:
        """Of the attacker's own clients, one for each time that it noises their updates."""
        secure = training.plan.secure
        return [Streams(seed_of("property", self.seed, k), secure) for k in range(_DRAWS)]

    def _attacker(self, training: Training, asked: Question) -> MultiTask:
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


def _dimmed(x: Array) -> Array:
    found: Array = x * np.asarray(_DIMMED, dtype=x.dtype)
    return found


def _across(flags: Flags, x: Array) -> Flags:
    """Flags [N] in the shape of records [N, ...]."""
    return flags.reshape(-1, *(1 for _ in x.shape[1:]))


def _check_both(name: str, has: Flags) -> None:
    if has.all() or not has.any():
        who = "everybody" if has.all() else "nobody"
        raise BadInput(
            f"property {name!r}: {who} of {len(has)} clients has it more than half of the others; "
            "a property that tells clients apart is needed"
        )
