"""Texas100: 67,330 hospital stays as 6,169 bits, in 100 procedures (Shokri et al. 2017)."""

from pathlib import Path

import numpy as np

from fedveil.data.bits import ARCHIVE, check_bits, table_of
from fedveil.data.data_files import check_codes, find_file, malformed
from fedveil.data.loaded_records import Records
from fedveil.data.split import holdout

_CLASSES = 100
_FEATURES = 6169
_FOLDER = "texas/100"


def load(root: Path) -> Records:
    """Bits as [N, 6169] of 0 or 1 with a fixed 80/20 split.

    Unpacked files win over the archive. They take 1.7 GB as numbers.
    """
    places = ["texas100/feats", f"texas100/{_FOLDER}/feats", f"texas100/dataset_texas{ARCHIVE}"]
    path = find_file(
        root,
        places,
        expected="dataset_texas.tgz, or feats and labels in it, as published for membership "
        "inference",
    )
    beside = path if path.suffix == ARCHIVE else path.with_name("labels")
    if not beside.is_file():
        raise malformed(path, "a file labels beside it", "none")
    wanted = f"lines of {_FEATURES} bits, separated by commas"
    bits = table_of(path, f"{_FOLDER}/feats", _FEATURES, wanted)
    check_bits(path, bits, wanted)
    labels = table_of(beside, f"{_FOLDER}/labels", 1, "lines of one label")[:, 0]
    check_codes(beside, labels, records=len(bits), count=_CLASSES, first=1)
    y = labels.astype(np.int64) - 1
    train, test = holdout(len(y))
    x, test_x = bits[train].astype(np.float32), bits[test].astype(np.float32)
    return Records("texas100", x, y[train], test_x, y[test], classes=_CLASSES)
