"""Saved data: a folder with one .npy file per array, and a meta.json that describes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.data.data_files import UNREADABLE, warnings_as_errors
from fedveil.data.user_arrays import Array

_META = "meta.json"


def write(folder: Path, arrays: Mapping[str, Array | None], meta: Mapping[str, Any]) -> None:
    """Write into a new folder, without the arrays that are None."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError as e:
        raise BadInput(f"{folder} exists: save into a new folder") from e
    except OSError as e:
        raise BadInput(f"{shown(str(folder))} cannot be made: {e.strerror}") from e
    for name, array in arrays.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
    (folder / _META).write_text(json.dumps(meta) + "\n")


def read_meta(
    folder: Path, needed: Mapping[str, type], optional: Mapping[str, Any]
) -> dict[str, Any]:
    """Read meta.json: `needed` keys with their types, `optional` ones with their defaults."""
    path = folder / _META
    try:
        meta = json.loads(path.read_text())
        found = {key: meta[key] for key in needed}
        found |= {key: meta.get(key, plain) for key, plain in optional.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise BadInput(f"{path}: not a saved data set ({e})") from e
    kinds = {**needed, **{key: type(plain) for key, plain in optional.items()}}
    for key, value in found.items():
        if type(value) is not kinds[key]:
            raise BadInput(f"{path}: {key} is {shown(value)}, not what save writes")
    return found


def read_arrays(
    folder: Path, names: Sequence[str], optional: Sequence[str]
) -> dict[str, Array | None]:
    """The arrays mapped into memory. An optional one that is missing is None."""
    return {
        name: None
        if name in optional and not (folder / f"{name}.npy").exists()
        else _mapped(folder / f"{name}.npy")
        for name in names
    }


def _mapped(path: Path) -> Array:
    try:
        with warnings_as_errors(), path.open("rb") as stream:
            np.lib.format.read_magic(stream)  # np.load would take other files as well
        with warnings_as_errors():
            array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    except UNREADABLE as e:
        reason = " ".join(str(e).split())
        raise BadInput(f"{path}: {reason}; expected what FederatedData.save wrote") from e
