"""`CohortData`: the records of K clients as one padded batch."""

from dataclasses import dataclass
from typing import Any

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
    """Copy the records of `ids` into one padded batch; padding repeats a client's last record.

    A client's row never holds another client's record, not even as padding: a loss that overflows
    there would reach this client's gradient through 0 x infinity.
    """
    starts = data.offsets[ids]
    sizes = data.offsets[ids + 1] - starts
    x, y = _padded(data.x, starts, sizes), _padded(data.y, starts, sizes)
    return CohortData(ids, sizes, torch.from_numpy(x), torch.from_numpy(y))


def _padded(
    array: npt.NDArray[Any], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """[K, longest, ...] from slices of `array`, each client's copied in one piece."""
    longest = int(sizes.max(initial=1))
    last = len(array) - longest
    if not array.flags.c_contiguous:
        rows = starts[:, None] + np.minimum(np.arange(longest)[None, :], sizes[:, None] - 1)
        return np.ascontiguousarray(array[rows])
    width = int(np.prod(array.shape[1:], dtype=np.int64))
    size = array.itemsize
    windows = np.lib.stride_tricks.as_strided(
        array, (last + 1, longest * width), (width * size, size), writeable=False
    )
    out = windows[np.minimum(starts, last)].reshape(len(starts), longest, *array.shape[1:])
    for k in np.flatnonzero(starts > last):
        out[k, : sizes[k]] = array[starts[k] : starts[k] + sizes[k]]
    if int(sizes.min(initial=longest)) < longest:
        row, column = np.nonzero(np.arange(longest)[None, :] >= sizes[:, None])
        out[row, column] = out[row, sizes[row] - 1]
    return out
