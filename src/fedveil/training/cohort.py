"""`CohortData`: the records of K clients as one padded batch."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedveil.base.inputs import Inputs, mapped
from fedveil.data.federated import Array, FederatedData
from fedveil.models.task import Features

_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class CohortData:
    """Row k holds the records of client `ids[k]`, of which the first `sizes[k]` are real.

    Records are copied when they are first looked at; padding repeats a client's last record. A
    client's row never holds another client's record, not even as padding: a loss that overflows
    there would reach this client's gradient through 0 x infinity.

    A client that cheats may train on other records: those of client `whose[k]` of `data`, which may
    hold more clients than take part.
    """

    data: FederatedData
    ids: npt.NDArray[np.int64]
    whose: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Records per client, [K]."""
        return self.data.offsets[self.owners + 1] - self._starts

    @cached_property
    def x(self) -> Features:
        """Records, [K, longest, ...]; of named inputs, each by its name."""
        return mapped(self._rows, self.data.x)

    @cached_property
    def y(self) -> torch.Tensor:
        """Targets, [K, longest, ...]."""
        return self._rows(self.data.y)

    @property
    def longest(self) -> int:
        """Records of the client that has most."""
        return int(self.sizes.max(initial=1))

    def _rows(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return _aligned(_padded(array, self._starts, self.sizes))

    @property
    def owners(self) -> npt.NDArray[np.int64]:
        """Whose records they are, [K]: the clients' own unless they cheat."""
        return self.ids if self.whose is None else self.whose

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return self.data.offsets[self.owners]

    @property
    def weights(self) -> torch.Tensor:
        """Weights by number of records, float64 [K]."""
        return torch.from_numpy(self.sizes.astype(np.float64))


def tensors(inputs: Inputs[Array]) -> Features:
    """A copy of records as tensors."""
    return mapped(torch.tensor, inputs)


def _aligned(array: npt.NDArray[Any]) -> torch.Tensor:
    """The array as a tensor that begins where torch's own do, on a line of the cache.

    The last bits of a product may depend on where its factors lie; from here on that is the same
    for a client's records wherever they were found.
    """
    found = torch.from_numpy(array)
    return found if found.data_ptr() % _ALIGNMENT == 0 else found.clone()


def _padded(
    array: npt.NDArray[Any], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """[K, longest, ...] from slices of `array`, each client's copied in one piece."""
    if len(starts) == 1:
        return np.array(array[starts[0] : starts[0] + sizes[0]], order="C")[None]
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
