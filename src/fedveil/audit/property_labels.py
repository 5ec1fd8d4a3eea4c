"""Which clients have a property, and clients that an attacker makes up with and without it.

A client has a property if a feature of its records, other than the label, is high on average: how
thick or slanted its strokes are, how bright its images, how many of its rows have a certain value.
The property "planted" is made here, in a copy of the clients' records. The attacker's clients have
records of the test split, which belongs to no client.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.data.schema import TableSchema
from fedveil.data.user_arrays import Array

Values = npt.NDArray[np.float64]
RecordFeature = Callable[[Array], Values]
"""A feature of records: from records [N, ...] to one number each, [N]."""

_TINY = 1e-12


def brightness(x: Array) -> Values:
    """Return the mean value of each image, [N]."""
    return np.asarray(x.reshape(len(x), -1).mean(axis=1, dtype=np.float64))


def thickness(x: Array) -> Values:
    """Return the thickness of strokes in images [N, C, H, W], in pixels, [N].

    It is twice the ink over its outline: a straight stroke of thickness d and length l has ink d l
    and an outline of 2 l.
    """
    ink = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    down, across = np.diff(ink, axis=2)[..., :-1], np.diff(ink, axis=3)[..., :-1, :]
    outline = np.sqrt(down**2 + across**2).sum(axis=(1, 2, 3))
    return np.asarray(2 * ink.sum(axis=(1, 2, 3)) / (outline + _TINY))


def slant(x: Array) -> Values:
    """Return how many columns strokes in images [N, C, H, W] lean to the right per row upwards.

    The result is [N]. From second moments of the ink: the covariance of column and row over the
    variance of rows.
    """
    ink = x.astype(np.float64).sum(axis=1)
    total = ink.sum(axis=(1, 2)) + _TINY
    rows, columns = np.arange(ink.shape[1]), np.arange(ink.shape[2])
    row = (ink.sum(axis=2) @ rows) / total
    column = (ink.sum(axis=1) @ columns) / total
    off_row, off_column = rows[None, :] - row[:, None], columns[None, :] - column[:, None]
    both = np.einsum("nij,ni,nj->n", ink, off_row, off_column)
    own = np.einsum("nij,ni->n", ink, off_row**2)
    return np.asarray(-both / (own + _TINY))


IMAGE_FEATURES = {"brightness": brightness, "thickness": thickness, "slant": slant}


def check_real(data: FederatedData) -> Array:
    """Return the clients' records. Raise BadInput unless they are real numbers in one array."""
    if isinstance(data.x, dict):
        kind = f"one array and these have inputs {', '.join(data.x)}"
    elif data.x.dtype.kind != "f":
        kind = "real numbers, and these are texts or whole numbers"
    else:
        return data.x
    raise BadInput(f"properties are of records of {kind}: leave the attack out")


def feature_of(name: str, data: FederatedData) -> RecordFeature:
    """Return the feature called `name`, a function from records [N, ...] to one number each.

    Args:
        name: brightness, thickness or slant for images. For tables a column of numbers, `column`,
            or a category, `column=value`. "planted" is not a feature.
        data: The data, which decide whether the name fits. BadInput if it does not.
    """
    x = check_real(data)
    if name in IMAGE_FEATURES:
        if x.ndim != 4:
            raise BadInput(
                f"property {name!r} is of images [channels, height, width] and the records have "
                f"shape {x.shape[1:]}: name a column of the table"
            )
        return IMAGE_FEATURES[name]
    if data.schema is None:
        raise BadInput(f"property {shown(name)}: use planted, {', '.join(IMAGE_FEATURES)}")
    return _column_feature(name, data.schema)


def _column_feature(name: str, schema: TableSchema) -> RecordFeature:
    """Return the feature of a column: its number, or whether a record has a category (1 or 0).

    `name` is `column` or, for a category, `column=value`. An unknown column or value is BadInput.
    """
    column, _, value = name.partition("=")
    place = 0
    for feature in schema.feature_columns:
        if feature.name == column and not feature.shape:
            if feature.values is not None:
                known = [str(entry) for entry in feature.values]
                if value not in known:
                    raise BadInput(
                        f"property {shown(name)}: {column!r} has the values {', '.join(known[:8])}"
                        f"{', ...' if len(known) > 8 else ''}; name one, {column}=value"
                    )
                place += known.index(value)
            return lambda x: np.asarray(x[:, place], dtype=np.float64)
        place += feature.width
    names = ", ".join(feature.name for feature in schema.feature_columns)
    raise BadInput(f"property {shown(name)} is of no feature: use planted, or one of {names}")


def subtract_label_medians(
    values: Values, y: Array, public: Values, public_y: Array, classes: int
) -> Values:
    """Return each value less the public median of its record's label, so that labels do not show.

    A label without public records has the median of all public records.

    Args:
        values: The feature of each record.
        y: The targets of these records.
        public: The feature of public records.
        public_y: The targets of public records.
        classes: The number of labels. 0 means numbers, and subtracts one median from all. So do
            targets with several labels each.
    """
    if not classes or y.ndim != 1:
        return values - np.median(public)
    middle = np.full(classes, np.median(public))
    for label in np.unique(public_y):
        middle[label] = np.median(public[public_y == label])
    return values - middle[y]


PLANTED = "planted"

Flags = npt.NDArray[np.bool_]

_DIMMED = 0.6


@dataclass(frozen=True, eq=False)
class PropertyLabels:
    """Clients and made-up clients, with the property label of each.

    Attributes:
        data: The clients' records. For "planted" a copy in which the property is planted.
        has: Mask of clients with the property.
        own: Clients that the attacker makes up from the test split.
        own_has: Mask of made-up clients with the property.
    """

    data: FederatedData
    has: Flags
    own: FederatedData
    own_has: Flags


def property_labels(name: str, data: FederatedData, auxiliary: int, seed: int) -> PropertyLabels:
    """Label clients by the property `name`, and make up `auxiliary` clients of each kind.

    A client has the property if its mean feature, less the medians of labels, is above the median
    of all clients. "planted" is planted in a random half of the clients.

    | edge | behaviour |
    |---|---|
    | a property that is unknown, or that nobody or everybody has | BadInput |
    | texts, whole numbers, several inputs by name | BadInput |
    | no test split, or test records without any difference in the feature | BadInput |
    """
    data.check_tested("an audit of properties")
    generator = np.random.default_rng([seed, 0x9120])
    own_has = np.arange(2 * auxiliary) % 2 == 1
    shape = len(own_has), max(1, int(np.median(data.sizes)))
    if name == PLANTED:
        check_real(data)
        has = generator.permutation(data.clients) < data.clients // 2
        _check_both(name, has)
        own = _clients_from_test(data, generator.integers(len(data.test_y), size=shape))
        return PropertyLabels(_dim_records(data, has), has, _dim_records(own, own_has), own_has)
    feature = feature_of(name, data)
    public = feature(np.asarray(data.test_x))
    compared = public, data.test_y, data.classes
    values = subtract_label_medians(feature(np.asarray(data.x)), data.y, *compared)
    means = np.add.reduceat(values, data.offsets[:-1]) / data.sizes
    has = means > np.median(means)
    _check_both(name, has)
    # Of a client with the property between half and all of the records are from the feature's
    # upper half, and as many from the lower half of a client without it.
    above = subtract_label_medians(public, data.test_y, *compared)
    upper = above > 0 if (above > 0).any() else above >= 0
    if upper.all():
        raise BadInput(f"property {name!r}: all test records are alike, nobody can learn it")
    share = generator.uniform(0.5, 1.0, size=len(own_has))
    high = generator.random(shape) < np.where(own_has, share, 1 - share)[:, None]
    rows = np.where(
        high,
        generator.choice(np.flatnonzero(upper), size=shape),
        generator.choice(np.flatnonzero(~upper), size=shape),
    )
    return PropertyLabels(data, has, _clients_from_test(data, rows), own_has)


def _clients_from_test(data: FederatedData, rows: npt.NDArray[np.intp]) -> FederatedData:
    """Return data whose client k has the test records rows[k]. `rows` is [clients, records]."""
    x: Any = data.test_x
    offsets = np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1]
    flat = rows.reshape(-1)
    clients = data.with_clients(x[flat], data.test_y[flat], offsets)
    return replace(clients, test_owners=np.zeros(len(data.test_y), dtype=np.int64))


def _dim_records(data: FederatedData, has: Flags) -> FederatedData:
    """Return a copy of the data with the records of clients in the mask `has` times 0.6."""
    x: Any = data.x
    rows = np.repeat(has, data.sizes).reshape(-1, *(1 for _ in x.shape[1:]))
    dimmed = x * np.asarray(_DIMMED, dtype=x.dtype)
    return replace(data, x=np.where(rows, dimmed, x).astype(x.dtype))


def _check_both(name: str, has: Flags) -> None:
    """Raise BadInput, with the property's name, if all clients have the property or none has."""
    if has.all() or not has.any():
        who = "everybody" if has.all() else "nobody"
        raise BadInput(
            f"property {name!r}: {who} of {len(has)} clients has it: choose a property that some "
            "clients have and others do not"
        )
