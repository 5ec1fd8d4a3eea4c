"""A classifier of updates: from a client with the property, or from one without it?

Linear discriminant analysis in the span of updates that the attacker computed itself. The means of
both kinds are known without noise, and the covariance is that of updates as they are seen, noise
included. Against noise that is the same in all directions it is a matched filter.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Values = npt.NDArray[np.float64]

_RANK = 1e-6
_LITTLE = 0.1


@dataclass(frozen=True, eq=False)
class PropertyClassifier:
    """A linear classifier of updates.

    Attributes:
        direction: Weights of the features, [P] or [2 P].
        middle: The threshold between the two kinds.
        magnitudes: Whether absolute values are features too. They are where there is hardly any
            noise: that a weight has a gradient at all shows what occurs in a client's records.
    """

    direction: Values
    middle: float
    magnitudes: bool

    @classmethod
    def fitted(cls, made: Rows, seen: Rows, has: npt.NDArray[np.bool_]) -> "PropertyClassifier":
        """Fit the classifier on the attacker's own updates.

        Args:
            made: Updates without noise, [N, P].
            seen: The same updates as they would be seen, D times with fresh noise, [D x N, P].
            has: Which of the N updates are of clients with the property.
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
        """Scores of updates [K, P], positive where the property is likelier."""
        features = _features(rows, self.magnitudes).astype(np.float64)
        return np.asarray(features @ self.direction - self.middle)


def _features(rows: Rows, magnitudes: bool) -> Rows:
    return np.concatenate([rows, np.abs(rows)], axis=1) if magnitudes else rows


def _span(rows: Values) -> Values:
    """An orthonormal basis [P, rank] of the rows' span, from their inner products."""
    lengths, vectors = np.linalg.eigh(rows @ rows.T)
    kept = lengths > max(float(lengths.max()), 0.0) * _RANK
    if not kept.any():
        first: Values = np.zeros((rows.shape[1], 1))
        first[0] = 1.0
        return first
    return np.asarray(rows.T @ vectors[:, kept] / np.sqrt(lengths[kept]))
