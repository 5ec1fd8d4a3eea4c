"""Text files of labels and bits, as published for membership inference (Shokri et al. 2017)."""

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np

from fedveil.data.data_files import malformed, reading
from fedveil.data.user_arrays import Array

ARCHIVE = ".tgz"


@contextmanager
def opened(path: Path, member: str, wanted: str) -> Iterator[TextIO]:
    """A text file, or the `member` of that name of an archive, which is not unpacked."""
    if path.suffix != ARCHIVE:
        with path.open() as stream:
            yield stream
        return
    with tarfile.open(path, "r:gz") as archive:
        try:
            found = archive.extractfile(member)
        except KeyError as e:
            raise malformed(path, wanted, f"no file {member}") from e
        if found is None:
            raise malformed(path, wanted, f"{member}, which is no file")
        with io.TextIOWrapper(found) as stream:
            yield stream


def table_of(path: Path, member: str, width: int, wanted: str) -> Array:
    """Lines of `width` whole numbers from 0 to 255, separated by commas, as uint8 [N, width]."""
    with reading(path, wanted, OverflowError, tarfile.TarError):
        if path.stat().st_size == 0:
            raise malformed(path, wanted, "an empty file")
        with opened(path, member, wanted) as stream:
            table: Array = np.loadtxt(
                stream, dtype=np.uint8, delimiter=",", quotechar='"', ndmin=2, comments=None
            )
    if len(table) == 0 or table.shape[1] != width:
        raise malformed(path, wanted, f"{table.shape[1]} values a line")
    return table


def check_bits(path: Path, bits: Array, wanted: str) -> None:
    """Refuse values other than 0 and 1."""
    if bits.max(initial=0) > 1:
        raise malformed(path, wanted, f"values from {bits.min()} to {bits.max()}")
