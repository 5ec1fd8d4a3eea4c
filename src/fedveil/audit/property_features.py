"""Features of records that define properties of clients, apart from the labels.

A client has a property if a feature of its records is high on average: how thick or slanted its
strokes are, how bright its images, how many of its rows have a certain value.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.data.schema import TableSchema
from fedveil.data.user_arrays import Array

Values = npt.NDArray[np.float64]
RecordFeature = Callable[[Array], Values]
"""Records [N, ...] -> one number each, [N]."""

_TINY = 1e-12


def brightness(x: Array) -> Values:
    """The mean value of each image."""
    found: Values = x.reshape(len(x), -1).mean(axis=1, dtype=np.float64)
    return found


def thickness(x: Array) -> Values:
    """The thickness of strokes in images [N, C, H, W], in pixels: twice the ink over its outline.

    A straight stroke of thickness d and length l has ink d l and an outline of 2 l.
    """
    ink = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    down, across = np.diff(ink, axis=2)[..., :-1], np.diff(ink, axis=3)[..., :-1, :]
    outline = np.sqrt(down**2 + across**2).sum(axis=(1, 2, 3))
    found: Values = 2 * ink.sum(axis=(1, 2, 3)) / (outline + _TINY)
    return found


def slant(x: Array) -> Values:
    """How far strokes in images [N, C, H, W] lean to the right, per row upwards.

    From second moments of the ink: the covariance of column and row over the variance of rows.
    """
    ink = x.astype(np.float64).sum(axis=1)
    total = ink.sum(axis=(1, 2)) + _TINY
    rows, columns = np.arange(ink.shape[1]), np.arange(ink.shape[2])
    row = (ink.sum(axis=2) @ rows) / total
    column = (ink.sum(axis=1) @ columns) / total
    off_row = rows[None, :] - row[:, None]
    off_column = columns[None, :] - column[:, None]
    both = np.einsum("nij,ni,nj->n", ink, off_row, off_column)
    own = np.einsum("nij,ni->n", ink, off_row**2)
    found: Values = -both / (own + _TINY)
    return found


IMAGE_FEATURES = {"brightness": brightness, "thickness": thickness, "slant": slant}


def check_real(data: FederatedData) -> Array:
    """Return the records if they are real numbers in one array, and refuse others."""
    if isinstance(data.x, dict):
        raise BadInput(
            f"properties are of records of one array and these have inputs {', '.join(data.x)}: "
            "leave the attack out"
        )
    if data.x.dtype.kind != "f":
        raise BadInput(
            "properties are of records of real numbers, and these are texts or whole numbers: "
            "leave the attack out"
        )
    return data.x


def feature_of(name: str, data: FederatedData) -> RecordFeature:
    """The feature called `name`: of images, or `column` or `column=value` of a table."""
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
    return _of_column(name, data.schema)


def _of_column(name: str, schema: TableSchema) -> RecordFeature:
    """The value of a number column, or 1 where a category column has the value."""
    column, _, value = name.partition("=")
    first = 0
    for each in schema.features:
        if each.name == column and not each.shape:
            if each.values is None:
                return lambda x: np.asarray(x[:, first], dtype=np.float64)
            known = [str(entry) for entry in each.values]
            if value not in known:
                raise BadInput(
                    f"property {shown(name)}: {column!r} has the values {', '.join(known[:8])}"
                    f"{', ...' if len(known) > 8 else ''}; name one, {column}=value"
                )
            place = first + known.index(value)
            return lambda x: np.asarray(x[:, place], dtype=np.float64)
        first += each.width
    names = ", ".join(each.name for each in schema.features)
    raise BadInput(f"property {shown(name)} is of no feature: use planted, or one of {names}")


def relative(values: Values, y: Array, public: Values, public_y: Array, classes: int) -> Values:
    """Subtract the median of public records with the same label, so that labels do not show.

    Where targets are numbers, the median of all public records is subtracted.
    """
    if not classes or y.ndim != 1:
        return values - np.median(public)
    middle = np.full(classes, np.median(public))
    for label in np.unique(public_y):
        middle[label] = np.median(public[public_y == label])
    return values - middle[y]
