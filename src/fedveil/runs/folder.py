"""The run directory: checks of its name and place, and its creation."""

import reprlib
from datetime import datetime
from pathlib import Path

from fedveil.errors import BadInput

_LONGEST_NAME = 100


def check_run_name(name: str) -> None:
    """Refuse a recipe name that cannot name a run directory below `runs`."""
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()) or "/" in name or name[0] == ".":
        raise BadInput(
            f"name is {reprlib.repr(name)}: it names the run directory, so 1 to {_LONGEST_NAME} "
            "printable characters are needed, without '/' and not beginning with '.'; or use --out"
        )


def check_free(out: Path) -> None:
    """Refuse a directory that is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(
            f"--out {out} exists and is not an empty directory: choose another, or --resume {out}"
        )


def reserve(out: Path | None, name: str) -> Path:
    """Create the run directory: `out`, or a new one below `runs` named after the recipe."""
    try:
        if out is not None:
            check_free(out)
            out.mkdir(parents=True, exist_ok=True)
            return out
        stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        for number in range(1, 1000):
            folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
            if not folder.exists():
                folder.mkdir(parents=True)
                return folder
    except OSError as e:
        raise BadInput(f"the run directory cannot be made: {e}; use --out") from e
    raise BadInput(f"runs/{stem} and 999 more exist: use --out")
