"""Purchase100: 197,324 shoppers as 600 bits, what they bought, in 100 clusters (Shokri et al.)."""

from pathlib import Path

import numpy as np

from fedveil.data.bits import check_bits, table_of
from fedveil.data.data_files import check_codes, find_file
from fedveil.data.loaded_records import Records
from fedveil.data.split import holdout

_CLASSES = 100
_FEATURES = 600
_FILE = "dataset_purchase"


def load(root: Path) -> Records:
    """Bits as [N, 600] of 0 or 1 with a fixed 80/20 split.

    The text file wins over the archive.
    """
    path = find_file(
        root,
        [f"purchase100/{_FILE}", f"purchase100/{_FILE}.tgz"],
        expected=f"{_FILE}.tgz, or the file in it, as published for membership inference",
    )
    wanted = f"lines of a label and {_FEATURES} bits, separated by commas"
    table = table_of(path, _FILE, 1 + _FEATURES, wanted)
    labels, bits = table[:, 0], table[:, 1:]
    check_bits(path, bits, wanted)
    check_codes(path, labels, records=len(table), count=_CLASSES, first=1)
    x, y = bits.astype(np.float32), labels.astype(np.int64) - 1
    train, test = holdout(len(x))
    return Records("purchase100", x[train], y[train], x[test], y[test], classes=_CLASSES)
