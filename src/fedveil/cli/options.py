"""Options that several commands share, and checks of options before anything is loaded."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from fedveil.base.checks import check_address, check_option, check_workers, shown
from fedveil.base.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

    from fedveil.training.engines.ray_cluster import RayCluster

Json = Annotated[bool, Option("--json", help="Print JSON on standard output.")]
Quiet = Annotated[bool, Option("--quiet", help="No progress line.")]
Workers = Annotated[int, Option(help="Processes; 0: one per core.")]
Engine = Annotated[str | None, Option(help="Where to compute: processes (of this machine) or ray.")]
Address = Annotated[
    str | None, Option(help="The Ray cluster to join: auto or host:port; default: one of its own.")
]
Data = Annotated[
    Path | None, Option(help="Folder with published data sets (mnist, ...); default: FEDVEIL_DATA.")
]
AllowCode = Annotated[
    bool, Option("--allow-code", help="Run the code that the recipe names (model.path).")
]
Set = Annotated[
    list[str] | None,
    Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; repeatable."),
]

_LOADING = "loading ..."


def check_given(**options: float | None) -> None:
    """Refuse numbers out of their range."""
    for name, value in options.items():
        if value is not None:
            check_option(name, value)


def check_engine(engine: str | None, address: str | None) -> None:
    """Refuse an engine that is unknown, and an address that no engine would use."""
    if engine not in (None, "processes", "ray"):
        raise BadInput(f"--engine is {engine!r}: use processes or ray")
    if address is not None and engine != "ray":
        raise BadInput(f"--address is {address!r} and is for --engine ray: add that")
    check_address("--address", address)


def engine_settings(engine: str | None, address: str | None) -> list[str]:
    """The --engine and --address options as recipe overrides."""
    check_engine(engine, address)
    settings = [] if engine is None else [f"engine.kind={engine}"]
    return settings if address is None else [*settings, f"engine.address={address}"]


def cluster_of(engine: str | None, address: str | None, workers: int = 0) -> "RayCluster | None":
    """The Ray cluster that the options name, or None for processes of this machine."""
    check_workers("--workers", workers)
    check_engine(engine, address)
    if engine != "ray":
        return None
    from fedveil.training.engines.ray_cluster import RayCluster

    return RayCluster(address)


def check_path(option: str, path: Path | None) -> None:
    """Refuse a path that cannot be read: too long, or inside a folder without permission."""
    if path is None:
        return
    try:
        if path.is_dir():
            os.scandir(path).close()
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise BadInput(f"{option} {shown(str(path))}: {reason}; choose another") from e


def check_out(path: Path | None) -> None:
    """Refuse a path that cannot be written."""
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


@contextmanager
def loading(*, quiet: bool) -> Iterator[None]:
    """Show "loading ..." on a terminal while libraries and data are loaded, which takes seconds.

    The cursor waits at the beginning of the line, so that the next output overwrites the word.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    print(_LOADING, end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(" " * len(_LOADING), end="\r", file=sys.stderr, flush=True)


@contextmanager
def resumable(folder: Path | None) -> Iterator[None]:
    """Context manager: exit with 1 and one line after Ctrl-C, or after a worker was lost.

    `folder` is where the same command resumes, if there is one.
    """
    from fedveil.training.engines.processes import WorkerLost

    how = "" if folder is None else f": the same command resumes it in {folder}"
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted{how}", file=sys.stderr)
    except WorkerLost as e:
        print(f"error: {e}{how}", file=sys.stderr)
    else:
        return
    raise typer.Exit(1)


def screen(*, highlight: bool = True) -> "Console":
    """The console for results, on standard output."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=highlight)


def progress_console(quiet: bool) -> "Console":
    """The console for progress, on standard error."""
    from rich.console import Console

    return Console(stderr=True, quiet=quiet, markup=False, emoji=False)
