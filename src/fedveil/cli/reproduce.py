"""`fedveil reproduce`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedveil.base.checks import check_workers
from fedveil.base.errors import BadInput
from fedveil.base.interrupts import listen
from fedveil.cli.options import (
    Address,
    Data,
    Engine,
    Quiet,
    Workers,
    check_given,
    check_out,
    check_path,
    cluster_of,
)


def reproduce(
    paper: Annotated[str, typer.Argument(help="fu, clip-decay, ldp-fl or naseri.")],
    item: Annotated[
        list[str] | None, typer.Option(help="A table or figure; repeatable; default: all.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="quick: minutes; paper: the paper's sizes, as far as data allow.")
    ] = "quick",
    repeat: Annotated[int | None, typer.Option(help="Repetitions; default: by scale.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory; resumes what is found there.")
    ] = None,
    data: Data = None,
    workers: Workers = 0,
    engine: Engine = None,
    address: Address = None,
    quiet: Quiet = False,
) -> int:
    """Run a paper's experiments: the published number, ours with its interval, what was open."""
    if scale not in ("quick", "paper"):
        raise BadInput(f"--scale is {scale!r}: use quick or paper")
    check_given(repeat=repeat)
    check_workers("--workers", workers)
    cluster = cluster_of(engine, address)
    check_out(out)
    check_path("--data", data)
    from fedveil.papers.reproduction import items_of
    from fedveil.papers.reproduction import reproduce as run_items

    items = items_of(paper, item or ())

    from rich.console import Console

    from fedveil.console import Counter
    from fedveil.papers.experiment import Experiment, ExperimentScale
    from fedveil.papers.paper_page import Page
    from fedveil.training.engines.workers import WorkerLost

    listen()

    folder = out or Path("runs") / f"reproduce-{paper}-{scale}"
    console = Console(stderr=True, quiet=quiet, markup=False, emoji=False)
    parts = ["fedveil reproduce", paper, *(f"--item {name}" for name in item or ())]
    parts += [f"--scale {scale}"] + ([] if repeat is None else [f"--repeat {repeat}"])

    def show(name: str, page: Page) -> None:
        print(page.markdown())

    try:
        with Counter(console, "trials") as counter:
            experiment = Experiment(
                folder,
                scale=ExperimentScale(scale),
                repeat=repeat,
                root=data,
                workers=workers,
                on_trial=counter.show_of,
                cluster=cluster,
            )
            path = run_items(paper, items, experiment, " ".join(parts), show)
    except KeyboardInterrupt:
        print(f"interrupted: the same command resumes it in {folder}", file=sys.stderr)
        return 1
    except WorkerLost as e:
        print(f"error: {e}; the same command resumes it in {folder}", file=sys.stderr)
        return 1
    print(f"written: {path}", file=sys.stderr)
    return 0
