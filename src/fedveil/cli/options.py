"""Options that several commands share, and checks of options before anything is loaded."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from fedveil.base.checks import check_address, check_option, check_workers, shown
from fedveil.base.errors import BadInput

if TYPE_CHECKING:
    from rich.console import Console

    from fedveil.base.metrics_page import MetricFamily
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

COLUMNS = 100
"""The width of what is printed to a file or a pipe."""


def check_numbers(**options: float | None) -> None:
    """Raise BadInput for an option's number that is out of its range. None is not checked."""
    for name, value in options.items():
        if value is not None:
            check_option(name, value)


def engine_settings(engine: str | None, address: str | None) -> list[str]:
    """Return the --engine and --address options as overrides of a recipe.

    Raises BadInput for an unknown engine, and for an address without --engine ray.
    """
    if engine not in (None, "processes", "ray"):
        raise BadInput(f"--engine is {engine!r}: use processes or ray")
    settings = [] if engine is None else [f"engine.kind={engine}"]
    if address is not None:
        if engine != "ray":
            raise BadInput(f"--address {address!r} needs --engine ray: add it, or drop --address")
        check_address("--address", address)
        settings.append(f"engine.address={address}")
    return settings


def cluster_of(engine: str | None, address: str | None, workers: int = 0) -> "RayCluster | None":
    """Return the Ray cluster that the options name, or None for processes of this machine.

    Raises BadInput for options that are out of range or have no effect.
    """
    check_workers("--workers", workers)
    engine_settings(engine, address)
    if engine != "ray":
        return None
    from fedveil.training.engines.ray_cluster import RayCluster

    return RayCluster(address)


def check_path(option: str, path: Path | None, *, writable: bool = False) -> None:
    """Raise BadInput for a path that cannot be read: too long, or in a folder without permission.

    With `writable`, also if nothing can be written in the nearest folder that exists. None is not
    checked. The message names the `option`.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            os.scandir(path).close()
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise BadInput(f"{option} {shown(str(path))}: {reason}; choose another") from e
    if not writable:
        return
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"{option} {path}: nothing can be written in {there}; choose another")


def check_data(data: Path | None, names: Iterable[str]) -> None:
    """Raise BadInput if --data cannot be read, or none of the data sets `names` is read from it."""
    check_path("--data", data)
    if data is None:
        return
    from fedveil.data.load import EMBEDDED

    names = tuple(dict.fromkeys(names))
    if all(name in EMBEDDED for name in names):
        raise BadInput(
            f"--data {data} has no effect on {', '.join(names)}, which no data folder holds: "
            "omit it, or name a data set that is in it (--set data.name=mnist)"
        )


@contextmanager
def loading(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Context manager: show on a terminal what is being done before the first result.

    Yields a function that shows another step, such as "reading data". The first one is "loading
    libraries". The cursor waits at the beginning of the line, so that the next output overwrites
    it.
    """
    shown_last = ""

    def show(step: str) -> None:
        nonlocal shown_last
        text = f"{step} ..." if step else ""
        print(text.ljust(len(shown_last)), end="\r", file=sys.stderr, flush=True)
        shown_last = text

    if quiet or not sys.stderr.isatty():
        yield lambda step: None
        return
    show("loading libraries")
    try:
        yield show
    finally:
        show("")


@contextmanager
def exit_on_interrupt(folder: Path | None) -> Iterator[None]:
    """Context manager: after Ctrl-C or a lost worker, print one line and exit with 1.

    The line says that the same command resumes in `folder`, unless that is None.
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


def plain_console(
    *, stderr: bool = False, quiet: bool = False, highlight: bool = True
) -> "Console":
    """Return a rich console that prints texts as they are: [x] is no markup, :x: is no emoji.

    Results go to standard output, progress to standard error (`stderr`). A `quiet` one prints
    nothing. Lines are as wide as the terminal, or 100 columns in a file or a pipe, unless the
    environment variable COLUMNS asks for more.
    """
    from rich.console import Console

    stream, asked = sys.stderr if stderr else sys.stdout, os.environ.get("COLUMNS", "")
    return Console(
        stderr=stderr,
        quiet=quiet,
        markup=False,
        emoji=False,
        highlight=highlight,
        width=None if stream.isatty() else max(COLUMNS, int(asked) if asked.isdecimal() else 0),
    )


def serve_numbers(port: int, draw: "Callable[[], Sequence[MetricFamily]]") -> None:
    """Serve a page of numbers for Prometheus on loopback until Ctrl-C or SIGTERM.

    Its address is printed first. Raises BadInput for a port that cannot be listened on.

    Args:
        port: The port, 0 for any.
        draw: Returns the numbers.
    """
    from fedveil.base.interrupts import listen
    from fedveil.base.metrics_page import MetricsPage

    listen()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with MetricsPage(port, draw, lambda line: print(line, file=sys.stderr)) as page:
        print(page.url, flush=True)
        with suppress(KeyboardInterrupt):
            page.serve_forever()
