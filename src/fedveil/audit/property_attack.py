"""Property inference: do a client's updates show a property of its records? (Melis et al. 2019)

The attacker has records that belong to no client, the test split, with and without the property.
In every round it computes updates from them as clients do, fits a classifier on these updates as
they would be seen, and scores the clients' updates.

The classifier is linear discriminant analysis in the span of updates that the attacker computed
itself. The means of both kinds are known without noise, and the covariance is that of updates as
they are seen, noise included. Against noise that is the same in all directions it is a matched
filter.

In the active attack some clients train on their own records for the task and, at the same time, for
a second head that separates records with the property from records without it. Their reports are
clipped and randomised like all others, so they follow the protocol.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedveil.attacks.adversary import Adversary, AttackContext
from fedveil.audit import observations
from fedveil.audit.findings import Attack, Leak, Measure, OnStep, auc, auc_interval, ignore
from fedveil.audit.observations import Observer
from fedveil.audit.property_labels import PLANTED, Flags, PropertyLabels, Values, property_labels
from fedveil.base.checks import whole
from fedveil.base.errors import BadInput
from fedveil.base.identity import Stated, named_values, seed_of
from fedveil.models.task import Named, Task
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import Ids
from fedveil.training.reports import ClientReports
from fedveil.training.session import Training

Rows = npt.NDArray[np.float32]

_RANK = 1e-6
_LITTLE = 0.1


@dataclass(frozen=True, eq=False)
class PropertyClassifier:
    """A linear classifier of updates.

    Attributes:
        direction: Weights of the features, [P] or, with magnitudes, [2 P].
        middle: The threshold between the two kinds of clients.
        magnitudes: Whether absolute values are features too. They help if there is hardly any
            noise: that a weight has a gradient at all shows what occurs in a client's records.
    """

    direction: Values
    middle: float
    magnitudes: bool

    @classmethod
    def fit(cls, made: Rows, seen: Rows, has: npt.NDArray[np.bool_]) -> "PropertyClassifier":
        """Return the classifier fitted on the attacker's own updates.

        Args:
            made: Updates without noise, [N, P].
            seen: The same updates as they would be seen, D times with fresh noise, [D x N, P].
            has: Mask of the N updates of clients with the property.
        """
        from sklearn.covariance import ledoit_wolf

        off = np.square(seen[: len(made)] - made).sum()
        magnitudes = bool(off < _LITTLE * np.square(made).sum())
        made, seen = _features(made, magnitudes), _features(seen, magnitudes)
        centre = made.mean(axis=0, dtype=np.float64)
        basis = _span(made - centre)
        coordinates, noisy = (made - centre) @ basis, (seen - centre) @ basis
        mean = [coordinates[has == kind].mean(axis=0) for kind in (False, True)]
        every = np.tile(has, len(seen) // len(made))
        within = noisy - np.where(every[:, None], mean[1], mean[0])
        spread, _ = ledoit_wolf(within, assume_centered=True)
        spread += (np.trace(spread) / len(spread) or 1.0) * _RANK * np.eye(len(spread))
        along = basis @ np.linalg.solve(spread, mean[1] - mean[0])
        middle = float(centre @ along + (mean[0] + mean[1]) @ (basis.T @ along) / 2)
        return cls(along, middle, magnitudes)

    def scores(self, rows: Rows) -> Values:
        """Return scores [K] of updates [K, P], positive where the property is likelier."""
        features = _features(rows, self.magnitudes).astype(np.float64)
        return np.asarray(features @ self.direction - self.middle)


def _features(rows: Rows, magnitudes: bool) -> Rows:
    """Return updates, with their absolute values as further columns if `magnitudes`."""
    return np.concatenate([rows, np.abs(rows)], axis=1) if magnitudes else rows


def _span(rows: Values) -> Values:
    """Return an orthonormal basis [P, rank] of the rows' span, the first axis if all are zero."""
    lengths, vectors = np.linalg.eigh(rows @ rows.T)
    kept = lengths > max(float(lengths.max()), 0.0) * _RANK
    if not kept.any():
        return np.eye(rows.shape[1], 1)
    return np.asarray(rows.T @ vectors[:, kept] / np.sqrt(lengths[kept]))


_STEEP = 4.0


@dataclass(frozen=True, eq=False)
class MultiTask(Adversary):
    """Clients of the active attack, which train for the task and for a property.

    They take part in every round, sampled or not. The second head is drawn once and stays fixed, so
    that all rounds pull the model's last hidden layer in the same direction.

    Attributes:
        task: The joint model and its loss.
        ids: The clients.
        x: The attacker's records, which all of them train on.
        y: Targets of the records.
        has: Mask of records with the property.
        weight: Weight of the second head's loss.
        steps: Local steps.
        lr: Learning rate.
        seed: Draws the second head.
    """

    task: Task
    ids: Ids
    x: Tensor
    y: torch.Tensor
    has: Tensor
    weight: float = 1.0
    steps: int = 10
    lr: float = 0.1
    seed: int = 0

    @property
    def identity(self) -> Stated:
        """Return pairs (word, value) from which seeds follow."""
        return (
            ("adversary", "multi-task"),
            *named_values(self, "task", "ids", "x", "y", "has", "weight", "steps", "lr", "seed"),
        )

    def cohort(self, round: int, ids: Ids) -> Ids:
        """Return the cohort `ids` with all attackers added, ascending."""
        return np.union1d(ids, self.ids)

    def malicious_mask(self, round: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return the mask of attackers among `ids`, the same in every round."""
        return np.isin(ids, self.ids)

    def send(self, context: AttackContext) -> ClientReports:
        """Return attackers' reports: one update for all, clipped, and noised for each as asked."""
        round = context.clients.round
        rows = self.local_update(round.start).expand(len(round.ids), -1).clone()
        return context.sent(context.complying(rows))

    def local_update(self, start: Tensor) -> Tensor:
        """Return the update [P] of local training for both objectives from the model `start`."""
        params = start.clone()
        for _ in range(self.steps):
            with torch.enable_grad():
                named = {k: v.clone().requires_grad_() for k, v in self.task.named(params).items()}
                gradient = torch.autograd.grad(self._loss(named), list(named.values()))
            params = params - self.lr * torch.cat([part.reshape(-1) for part in gradient])
        return params - start

    def _loss(self, named: Named) -> Tensor:
        """Return the mean loss of the task plus the weighted loss of the second head."""
        seen: list[Tensor] = []
        layer = last_layer(self.task)
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            outputs = self.task.outputs(named, self.x)
        finally:
            hook.remove()
        logits = seen[0].flatten(1) @ self._head
        second = nn.functional.binary_cross_entropy_with_logits(logits, self.has.float())
        return self.task.each_loss(outputs, self.y).mean() + self.weight * second

    @cached_property
    def _head(self) -> Tensor:
        """Return the second head: a random direction of length 4, [inputs of the last layer]."""
        width = last_layer(self.task).in_features
        drawn = torch.randn(width, generator=torch.Generator().manual_seed(self.seed))
        head: Tensor = drawn / drawn.norm() * _STEEP
        return head


def last_layer(task: Task) -> nn.Linear:
    """Return the model's last layer with parameters.

    BadInput unless it is linear and another layer with parameters comes before it.
    """
    layers = [
        layer for layer in task.named_layers.values() if list(layer.parameters(recurse=False))
    ]
    if len(layers) < 2 or not isinstance(layers[-1], nn.Linear):
        raise BadInput(
            f"the model {type(task.module).__name__} has no hidden layer before a linear one: the "
            "active attack has nothing to teach it"
        )
    return layers[-1]


_CONFIDENCE = 0.95
_DRAWS = 3
_LESSON = 512
"""Records that an active attacker trains on."""


class PropertyScores:
    """Sums of clients' scores over the rounds in which they were seen.

    Attributes:
        total: The sum of each client's scores.
        times: The number of rounds in which each client was seen.
    """

    def __init__(self, clients: int) -> None:
        self.total: Values = np.zeros(clients)
        self.times: Ids = np.zeros(clients, dtype=np.int64)

    def add_(self, ids: Ids, scores: Values) -> None:
        """Add one round's scores [K] of the clients `ids` [K], in place. No id may occur twice."""
        self.total[ids] += scores
        self.times[ids] += 1

    def leak(self, has: Flags) -> tuple[int, Measure]:
        """Return (the number of clients seen, the AUC of their mean scores with its interval).

        `has` is the mask of clients with the property. BadInput if all clients seen have it, or
        none has.
        """
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

    A client has the property if the mean feature of its records is above the median of all clients.

    Attributes:
        property: "planted" (the records of half of the clients are dimmed), a feature of images
            (thickness, slant, brightness), or `column` or `column=value` of a table.
        rounds: Rounds in which clients are watched.
        auxiliary: The number of made-up clients with the property, and of those without it.
        active: Whether to add the active attack, if the model has a hidden layer.
        attackers: Clients that train for the property in the active attack.
        seed: The seed of the audit's own draws.

    | edge | behaviour |
    |---|---|
    | a property that nobody or everybody has, or an unknown one | BadInput |
    | texts, whole numbers, several inputs by name | BadInput |
    | fewer than 1 round, fewer than 10 made-up clients, no attackers | BadInput |
    """

    property: str = PLANTED
    rounds: int = 10
    auxiliary: int = 100
    active: bool = True
    attackers: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("auxiliary", 10), ("attackers", 1)):
            whole(least).check(f"--{name}", getattr(self, name))

    def leaks(self, training: Training, on_step: OnStep = ignore) -> Iterator[Leak]:
        """Yield a leak for each view of the passive attack, then for each view of the active one.

        The active attack is skipped silently if the model has no hidden layer. `on_step` is called
        with (rounds done, rounds of both attacks).

        Raises BadInput, on iteration, if the run has dishonest clients, if the property cannot be
        computed, and if all observed clients have it or none has. Too many `attackers` are refused
        when the active attack begins.
        """
        observations.check_unattacked(training, Attack.PROPERTY)
        labels = property_labels(self.property, training.data, self.auxiliary, self.seed)
        rounds = min(self.rounds, training.plan.permitted)
        kinds = ["passively"]
        with contextlib.suppress(BadInput):  # a model without a hidden layer
            kinds += ["actively"] if self.active and last_layer(training.task) else []
        for number, kind in enumerate(kinds):
            attacked = observations.audit_rerun(training, self.seed, data=labels.data)
            apart: Ids = np.zeros(0, dtype=np.int64)
            if kind == "actively":
                attacker = self._attacker(training, labels)
                attacked, apart = replace(attacked, participants=attacker), attacker.ids
            clients = Observer(attacked, labels.data, attacked.streams)
            # the attacker's own clients, with several draws of noise
            seeds = [seed_of("property", self.seed, k) for k in range(_DRAWS)]
            noises = [Streams(seed, training.plan.secure) for seed in seeds]
            own = [Observer(attacked, labels.own, streams) for streams in noises]
            views = observations.views(training.plan)
            by_view = {view: PropertyScores(len(labels.has)) for view in views}
            every = np.arange(len(labels.own_has))
            names = every % len(labels.has)
            for round in observations.replay(attacked, rounds):
                ids = round.ids[~np.isin(round.ids, apart)]
                made = own[0].noiseless_updates(round, names, every).numpy()
                for view, scores in by_view.items() if len(ids) else ():
                    noisy = [one.observed_updates(view, round, names, every).numpy() for one in own]
                    seen = np.concatenate(noisy)
                    classifier = PropertyClassifier.fit(made, seen, labels.own_has)
                    rows = clients.observed_updates(view, round, ids, ids).numpy()
                    scores.add_(ids, classifier.scores(rows))
                on_step(number * rounds + round.number, len(kinds) * rounds)
            for view, scores in by_view.items():
                count, measure = scores.leak(labels.has)
                what = f"{self.property}, {kind}, of {count} clients in {rounds} rounds, "
                what += view.description(training.plan)
                claim = observations.claim_against(view, training.plan)
                yield Leak(Attack.PROPERTY, what, (measure,), claim)

    def _attacker(self, training: Training, labels: PropertyLabels) -> MultiTask:
        """Return the active attack by random clients, which train on made-up clients' records.

        BadInput if the attackers are half of all clients or more.
        """
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
