"""`TableSchema`: how rows of a table become records, and a model's outputs predictions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedveil.checks import shown
from fedveil.data.arrays import Array
from fedveil.data.columns import Column
from fedveil.data.tables import read_table
from fedveil.data.text import Text
from fedveil.errors import BadInput


@dataclass(frozen=True)
class TableSchema:
    """The columns that are features, in their order, and the one that is predicted.

    It is public: what of it was not declared was fitted, and `FederatedData.assumptions` says on
    whose records. Tables are whatever `FederatedData.from_table` takes; columns that are neither
    are ignored.

    >>> age, sex = Column("age", low=0, high=100), Column("sex", values=("f", "m"))
    >>> schema = TableSchema((age, sex), Column("well", values=("no", "yes")))
    >>> schema.encode({"age": [50, 75], "sex": ["m", "f"]}).tolist()
    [[0.0, 0.0, 1.0], [0.5, 1.0, 0.0]]
    >>> schema.decode(np.array([[0.0, 2.0]]))["prediction"].tolist()
    ['yes']
    """

    features: tuple[Column, ...]
    target: Column

    def __post_init__(self) -> None:
        if not self.features:
            raise BadInput("no features: name at least one column")
        if len(self.features) > 1 and any(column.shape for column in self.features):
            array, what = next((c.name, c.what) for c in self.features if c.shape)
            raise BadInput(
                f"column {array!r} holds {what} and is one of {len(self.features)} features: make "
                f"it the only one (features = [{array!r}])"
            )
        if self.target.shape:
            raise BadInput(f"target {self.target.name!r} holds arrays: one value per row is needed")
        if self.target.fill is not None or self.target.other:
            raise BadInput(
                f"{self.target.where} is the target, which has no fill and no other: remove "
                "the rows"
            )

    @property
    def classes(self) -> int:
        """The number of labels; 0 if a number is predicted."""
        return len(self.labels)

    @property
    def labels(self) -> tuple[Any, ...]:
        """The labels, in the order of the model's outputs."""
        return self.target.values or ()

    @property
    def words(self) -> int:
        """How many numbers stand for words in the records; 0 if they are no texts."""
        text = self.features[0].text
        return 0 if text is None else text.known.size

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one record."""
        return self.features[0].shape or (sum(column.width for column in self.features),)

    def encode(self, table: object) -> Array:
        """Records [rows, ...] of a table with the features: float32, or int64 for whole arrays."""
        rows = read_table(table)
        encoded = [column.encode(rows) for column in self.features]
        return encoded[0] if len(encoded) == 1 else np.concatenate(encoded, axis=1)

    def targets(self, table: object) -> Array:
        """What is to be predicted [rows]: places of labels, int64, or scaled numbers, float32."""
        rows, target = read_table(table), self.target
        if not self.classes:
            return target.numbers(rows, target=True).astype(np.float32)
        return target.codes(rows, target=True)

    def decode(self, outputs: Array) -> dict[str, Array]:
        """Predictions of a model's outputs [rows, labels], or [rows, 1] of a number.

        "prediction" is the likeliest label, and "p(LABEL)" the probability of each; or it is the
        number in the target's own unit.
        """
        found = np.asarray(outputs, dtype=np.float64)
        width = self.classes or 1
        if found.ndim != 2 or found.shape[1] != width:
            raise BadInput(
                f"outputs have shape {found.shape}: one row per record and {width} columns are "
                "needed"
            )
        if not self.classes:
            return {"prediction": self.target.restored(found[:, 0])}
        weights = np.exp(found - found.max(axis=1, keepdims=True))
        shares = weights / weights.sum(axis=1, keepdims=True)
        likeliest = np.array(self.labels)[found.argmax(axis=1)]
        named = {f"p({label})": shares[:, k] for k, label in enumerate(self.labels)}
        return {"prediction": likeliest, **named}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "features": [column.to_dict() for column in self.features],
            "target": self.target.to_dict(),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "TableSchema":
        """What `to_dict` wrote."""
        try:
            return cls(tuple(map(_column, plain["features"])), _column(plain["target"]))
        except (TypeError, KeyError, AttributeError, ValueError) as e:
            raise BadInput(f"{shown(plain)} is no schema of a table: {e}") from e


def _column(plain: Mapping[str, Any]) -> Column:
    lists: dict[str, Callable[[Any], Any]] = {
        "values": tuple,
        "shape": tuple,
        "text": Text.from_dict,
    }
    return Column(**{key: lists.get(key, lambda v: v)(value) for key, value in plain.items()})
