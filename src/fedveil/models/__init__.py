"""Models, their losses, and the flat parameter vector they share with the rest of fedveil."""

from fedveil.models.metrics import Metric, squared_error
from fedveil.models.zoo import Lstm, without_batch_norm

__all__ = ["Lstm", "Metric", "squared_error", "without_batch_norm"]
