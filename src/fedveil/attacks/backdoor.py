"""Backdoors: inputs for which a model is to give the attacker's answer."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedveil.base.inputs import single
from fedveil.data.federated import FederatedData
from fedveil.data.user_arrays import Array

Pairs = tuple[Array, Array]
"""Records and targets."""


class Backdoor(Protocol):
    """What an attacker wants of the model.

    To add a backdoor, implement the protocol and give it to `BackdoorAttack.of`.
    """

    def check(self, data: FederatedData) -> None:
        """Refuse records that this backdoor is not for."""
        ...

    def lesson(self, data: FederatedData, client: int, attacker: int) -> Pairs:
        """Records with the attacker's answers, to train on.

        Made from the records of client `client`, or from what attackers know. `attacker` is its
        number among the attackers, who may divide a trigger among them.
        """
        ...

    def held_out(self, data: FederatedData) -> Pairs:
        """Records with the attacker's answers that measure the backdoor, never trained on."""
        ...


def own_records(data: FederatedData, client: int) -> Pairs:
    """The records of one client, which are one array each."""
    rows = slice(int(data.offsets[client]), int(data.offsets[client + 1]))
    return np.asarray(single(data.x)[rows]), np.asarray(data.y[rows])


def poisoned(
    data: FederatedData,
    backdoor: Backdoor,
    attackers: npt.NDArray[np.int64],
    share: float,
    rng: np.random.Generator,
) -> FederatedData:
    """Each attacker's own records, with so many of its lesson that these are `share` of all.

    Client j of the result is attacker j. A short lesson is repeated, a long one is sampled.
    """
    xs, ys = [], []
    for number, client in enumerate(attackers.tolist()):
        x, y = own_records(data, client)
        taught_x, taught_y = backdoor.lesson(data, client, number)
        if share >= 1:
            honest, count = 0, max(len(taught_x), 1)
        else:
            honest, count = len(x), max(1, round(share / (1 - share) * len(x)))
        chosen = _chosen(len(taught_x), count, rng)
        xs.append(np.concatenate([x[:honest], taught_x[chosen].astype(x.dtype, copy=False)]))
        ys.append(np.concatenate([y[:honest], taught_y[chosen].astype(y.dtype, copy=False)]))
    return FederatedData(
        x=np.concatenate(xs),
        y=np.concatenate(ys),
        offsets=np.cumsum([0, *map(len, xs)], dtype=np.int64),
        test_x=data.test_x,
        test_y=data.test_y,
        classes=data.classes,
    )


def _chosen(there: int, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    order = rng.permutation(there)
    return np.resize(order, count)
