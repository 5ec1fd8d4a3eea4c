"""Which clients have a property, and clients that an attacker makes up with and without it.

The attacker's clients have records of the test split, which belongs to no client. The property
"planted" is made here, in a copy of the clients' records.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.audit.property_features import RecordFeature, check_real, feature_of, relative
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.data.user_arrays import Array

PLANTED = "planted"

Flags = npt.NDArray[np.bool_]

_DIMMED = 0.6


@dataclass(frozen=True, eq=False)
class PropertyLabels:
    """Clients and their property labels.

    Attributes:
        data: The clients' records.
        has: Which clients have the property.
        own: Clients that the attacker makes up.
        own_has: Which of these have the property.
    """

    data: FederatedData
    has: Flags
    own: FederatedData
    own_has: Flags


def property_labels(name: str, data: FederatedData, auxiliary: int, seed: int) -> PropertyLabels:
    """Label clients by the property `name`, and make up `auxiliary` clients of each kind.

    | edge | behaviour |
    |---|---|
    | a property that is unknown, or that nobody or everybody has | BadInput |
    | texts, whole numbers, several inputs by name | BadInput |
    """
    data.check_tested("an audit of properties")
    generator = np.random.default_rng([seed, 0x9120])
    if name == PLANTED:
        x: Any = check_real(data)
        has = generator.permutation(data.clients) < data.clients // 2
        _check_both(name, has)
        rows = np.repeat(has, data.sizes)
        planted = np.where(_across(rows, x), _dimmed(x), x).astype(x.dtype)
        return PropertyLabels(replace(data, x=planted), has, *_planted(data, auxiliary, generator))
    feature = feature_of(name, data)
    public = feature(np.asarray(data.test_x))
    values = relative(feature(np.asarray(data.x)), data.y, public, data.test_y, data.classes)
    means = np.add.reduceat(values, data.offsets[:-1]) / data.sizes
    has = means > np.median(means)
    _check_both(name, has)
    return PropertyLabels(data, has, *_drawn(name, feature, data, auxiliary, generator))


def _planted(
    data: FederatedData, auxiliary: int, generator: np.random.Generator
) -> tuple[FederatedData, Flags]:
    """Clients with random test records, dimmed for every other client."""
    has, size = _kinds(data, auxiliary)
    rows = generator.integers(len(data.test_y), size=(len(has), size))
    own = _owning(data, rows)
    x: Any = own.x
    dimmed = np.where(_across(np.repeat(has, size), x), _dimmed(x), x).astype(x.dtype)
    return replace(own, x=dimmed), has


def _drawn(
    name: str,
    feature: RecordFeature,
    data: FederatedData,
    auxiliary: int,
    generator: np.random.Generator,
) -> tuple[FederatedData, Flags]:
    """Clients with random test records.

    Between half and all of the records of a client with the property are from the feature's upper
    half, and as many from the lower half for a client without it.
    """
    has, size = _kinds(data, auxiliary)
    public = feature(np.asarray(data.test_x))
    above = relative(public, data.test_y, public, data.test_y, data.classes)
    upper = above > 0 if (above > 0).any() else above >= 0
    if upper.all():
        raise BadInput(f"property {name!r}: all test records are alike, nobody can learn it")
    share = generator.uniform(0.5, 1.0, size=len(has))
    high = generator.random((len(has), size)) < np.where(has, share, 1 - share)[:, None]
    rows = np.where(
        high,
        generator.choice(np.flatnonzero(upper), size=high.shape),
        generator.choice(np.flatnonzero(~upper), size=high.shape),
    )
    return _owning(data, rows), has


def _kinds(data: FederatedData, auxiliary: int) -> tuple[Flags, int]:
    """(mask of attacker clients with the property, records per client: the median)."""
    return np.arange(2 * auxiliary) % 2 == 1, max(1, int(np.median(data.sizes)))


def _owning(data: FederatedData, rows: npt.NDArray[np.intp]) -> FederatedData:
    """Clients that own these test records [clients, records]."""
    x: Any = data.test_x
    offsets = np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1]
    flat = rows.reshape(-1)
    found = data.with_clients(x[flat], data.test_y[flat], offsets)
    return replace(found, test_owners=np.zeros(len(data.test_y), dtype=np.int64))


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
