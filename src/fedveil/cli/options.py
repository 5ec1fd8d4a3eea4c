"""Options that several commands take, and checks of what was given, before anything is loaded."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fedveil.checks import check, shown
from fedveil.errors import BadInput

Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress line.")]
Workers = Annotated[int, typer.Option(help="Processes; 0: one per core.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder with published data sets (mnist, ...); default: FEDVEIL_DATA."),
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run the code that the recipe names (model.path).")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; repeatable."),
]


def check_given(**options: float | None) -> None:
    """Refuse numbers that are wrong by themselves, before anything is loaded."""
    for name, value in options.items():
        if value is not None:
            check(f"--{name.replace('_', '-')}", value)


def check_path(option: str, path: Path | None) -> None:
    """Refuse a path that cannot be looked at: too long, or inside a folder that is closed."""
    if path is None:
        return
    try:
        if path.is_dir():
            os.scandir(path).close()
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise BadInput(f"{option} {shown(str(path))}: {reason}; choose another") from e


def check_out(path: Path | None) -> None:
    """Refuse, before anything is loaded, where nothing can be written."""
    check_path("--out", path)
    if path is None:
        return
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"--out {path}: nothing can be written in {there}; choose another")


def check_data(data: Path | None, names: Iterable[str]) -> None:
    """Refuse a data folder that none of the data sets is read from."""
    check_path("--data", data)
    if data is None:
        return
    from fedveil.data.load import EMBEDDED

    names = tuple(dict.fromkeys(names))
    if all(name in EMBEDDED for name in names):
        raise BadInput(
            f"--data {data} has no effect on {', '.join(names)}, which no data folder holds: "
            "leave it out, or name a data set that is in it (--set data.name=mnist)"
        )
