"""Models, their losses, and the flat parameter vector they share with the rest of fedveil."""

from fedveil.models.metrics import Metric
from fedveil.models.zoo import Lstm, without_batch_norm

__all__ = [
    "Lstm",
    "Metric",
    "without_batch_norm",
]
