"""`CohortData`: the records of K clients as one padded batch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedveil.data.federated import FederatedData


@dataclass(frozen=True, eq=False)
class CohortData:
    """Row k holds the records of client `ids[k]`, of which the first `sizes[k]` are real."""

    ids: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def weights(self) -> torch.Tensor:
        """Weights by number of records, float64 [K]."""
        return torch.from_numpy(self.sizes.astype(np.float64))


def gather(data: FederatedData, ids: npt.NDArray[np.int64]) -> CohortData:
    """Copy the records of `ids` into one padded batch; padding repeats a client's last record."""
    starts = data.offsets[ids]
    sizes = data.offsets[ids + 1] - starts
    longest = int(sizes.max(initial=1))
    rows = starts[:, None] + np.minimum(np.arange(longest)[None, :], sizes[:, None] - 1)
    return CohortData(ids, sizes, torch.from_numpy(data.x[rows]), torch.from_numpy(data.y[rows]))
