"""`fedveil watch`, and the same page beside a run: `fedveil run --watch`."""

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedveil.base.errors import BadInput
from fedveil.base.interrupts import listen
from fedveil.cli.options import check_path, loading

DEFAULT = Path("runs")
_NEEDED = ("starlette", "uvicorn")
_PATIENCE = 10.0
"""Seconds to wait for the page's server to end."""


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Whose runs to follow, or one run's directory.")
    ] = DEFAULT,
    port: Annotated[int, typer.Option(help="Port; 0: any.")] = 0,
    host: Annotated[str, typer.Option(help="IP address to listen on.")] = "127.0.0.1",
    outside: Annotated[
        bool, typer.Option("--outside", help="Let --host be reached from other machines.")
    ] = False,
    while_stdin: Annotated[bool, typer.Option("--while-stdin", hidden=True)] = False,
) -> None:
    """Follow runs on a page while they train, and try what-if on its sliders."""
    check_path("DIR", folder)
    check_installed()
    if folder != DEFAULT and not folder.is_dir():
        raise BadInput(f"{folder} is no directory: name one that runs are in, or will be")
    with loading(quiet=False):
        from fedveil.watch.watch_server import Served, serve

        served = Served(folder, host, port, outside)
    listen()
    serve(served, _print_address, while_stdin=while_stdin)


def _print_address(url: str) -> None:
    print(url, flush=True)
    print("Whoever has this address can open it; Ctrl-C ends it.", file=sys.stderr)


def check_installed() -> None:
    """Refuse if the packages of the live page are not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"the live page needs {' and '.join(missing)}: pip install 'fedveil[watch]'")


@contextmanager
def watched(folder: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Context manager: serve the live page of one run from a process of its own.

    The process ends with this block or with this process. It shares only the run directory with the
    training, which does not wait for it. `show` is called with its address, or with a sentence if
    it could not start.
    """
    command = [sys.executable, "-m", "fedveil", "watch", str(folder), "--while-stdin"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        ended = threading.Event()
        waiting = threading.Thread(target=_show_address, args=(process, show, ended), daemon=True)
        waiting.start()
        try:
            yield
        finally:
            ended.set()
            if waiting.is_alive():  # the server has not started, and holds nothing
                process.kill()
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
            waiting.join()


def _show_address(
    process: "subprocess.Popen[str]", show: Callable[[str], None], ended: threading.Event
) -> None:
    url = process.stdout.readline().strip() if process.stdout is not None else ""
    if url:
        show(f"live page: {url}")
    elif not ended.is_set():
        show("the live page could not be started: fedveil watch says why")
