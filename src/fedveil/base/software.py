"""The software that is running: digests of the installed files, and versions of what they use."""

import hashlib
import importlib.metadata
import json
from contextlib import suppress
from functools import cache
from pathlib import Path

_PACKAGES = ("fedveil", "torch", "numpy", "scipy", "cryptography", "flwr")
_LEFT_OUT = ("__pycache__",)


@cache
def installed_software() -> dict[str, dict[str, str]]:
    """Return the files of the installed package and the versions of the packages that count.

    "files" has the SHA-256 of each file that the wheel of fedveil has, by its path in the package.
    "versions" has the version of each package that is installed. Computed once per process.
    """
    place = Path(__file__).resolve().parents[1]
    files = {}
    for path in sorted(place.rglob("*")):
        if path.is_file() and not {*path.parts} & {*_LEFT_OUT}:
            name = path.relative_to(place).as_posix()
            files[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    versions = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"files": files, "versions": versions}


def software_digest(software: dict[str, dict[str, str]]) -> str:
    """Return the SHA-256, in hexadecimal, of what `installed_software` returns."""
    return hashlib.sha256(json.dumps(software, sort_keys=True).encode()).hexdigest()
