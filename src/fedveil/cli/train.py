"""`fedveil run` and `watch`, and commands that train many times: `plan`, `sweep`, `reproduce`."""

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedveil.base.checks import check_ledger_epsilon
from fedveil.base.errors import BadInput
from fedveil.base.interrupts import listen
from fedveil.cli import options

_RUNS = Path("runs")
_SERVER_END_SECONDS = 10.0  # the longest wait for the end of the page's server


def run(
    recipe: Annotated[
        str | None, Argument(help="A shipped recipe or a .toml file; default: people.")
    ] = None,
    set_: options.Set = None,
    out: Annotated[Path | None, Option(help="Run directory (new or empty).")] = None,
    data: options.Data = None,
    resume: Annotated[Path | None, Option(help="Resume an interrupted run.")] = None,
    ledger: Annotated[Path | None, Option(help="A ledger for all runs on the same data.")] = None,
    ledger_epsilon: Annotated[
        float | None, Option(help="Its common budget, when it is new; default: the run's.")
    ] = None,
    log: Annotated[
        list[str] | None, Option(help="Log to tensorboard, mlflow or wandb as well; repeatable.")
    ] = None,
    engine: options.Engine = None,
    address: options.Address = None,
    allow_code: options.AllowCode = False,
    watch: Annotated[
        bool, Option("--watch", help="Show the run on a live page while it trains.")
    ] = False,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> int:
    """Train a model over many clients, as a recipe says."""
    others = (recipe, set_ or None, out, ledger, ledger_epsilon)
    if resume is not None and any(other is not None for other in others):
        raise BadInput(
            "--resume takes the recipe from the run: leave out recipe, --set, --out and --ledger"
        )
    where = options.engine_settings(engine, address)
    check_ledger_epsilon("--ledger-epsilon", ledger_epsilon, ledger)
    options.check_path("--out", out, writable=True)
    options.check_path("--ledger", ledger)
    options.check_path("--resume", resume)
    if watch:
        check_installed()
    with options.loading(quiet=quiet) as show_step:
        from fedveil.base.checks import TABLE
        from fedveil.runs.logs import check_logs
        from fedveil.runs.recipe import DEFAULT, load_recipe

        if log:
            check_logs(log)
        chosen = own = None
        if resume is None:
            chosen = load_recipe(DEFAULT if recipe is None else recipe, [*(set_ or ()), *where])
            chosen.model.check_allowed(allow_code)
            options.check_data(data, [chosen.data.name])
            if chosen.data.name == TABLE:  # before torch is imported, which takes seconds
                show_step("reading data")
                own = chosen.load_data()

        from fedveil.console import header_lines, print_result, progress_line
        from fedveil.pages.run_report import ended_text
        from fedveil.runs.ending import RESUMABLE
        from fedveil.runs.ledgers import SharedLedger
        from fedveil.runs.run import Run

        listen()
        shared = None if ledger is None else SharedLedger(ledger, ledger_epsilon)
        if chosen:
            prepared = Run.start(
                chosen, out, data, shared, data=own, allow_code=allow_code, on_step=show_step
            )
        else:
            prepared = Run.resume(
                resume or Path(), data, allow_code=allow_code, where=where, on_step=show_step
            )
            options.check_data(data, [prepared.recipe.data.name])
    prepared.logs = tuple(log or ())
    with ExitStack() as stack:
        if watch:
            stack.enter_context(live_page(prepared.folder, _print_below_progress))
        if quiet:
            result = prepared.execute()
        else:
            console = options.plain_console(stderr=True)
            show = stack.enter_context(progress_line(console, prepared))
            result = prepared.execute(
                show, lambda: console.print("\n".join(header_lines(prepared)), highlight=False)
            )
    if prepared.already_complete:
        print(f"{prepared.folder} is already complete: nothing was changed", file=sys.stderr)
    if not json_:
        print_result(options.plain_console(), result)
    else:
        print((prepared.folder / "result.json").read_text(), end="")
    if result["stopped"] in RESUMABLE:
        ending = f"{ended_text(result['stopped'])} after round {result['rounds']}"
        print(f"{ending}: resume with {prepared.how_to_resume}", file=sys.stderr)
        return 1
    return 0


def _print_below_progress(text: str) -> None:
    """Print a line on standard error, so that a progress line on a terminal stays below it."""
    print(text, file=sys.stderr)  # looked up at each call: the progress line replaces sys.stderr


def watch(
    folder: Annotated[
        Path, Argument(metavar="[DIR]", help="Whose runs to follow, or one run's directory.")
    ] = _RUNS,
    port: Annotated[int, Option(help="Port; 0: any.")] = 0,
    host: Annotated[str, Option(help="IP address to listen on.")] = "127.0.0.1",
    outside: Annotated[
        bool, Option("--outside", help="Let --host be reached from other machines.")
    ] = False,
    prometheus: Annotated[
        bool, Option("--prometheus", help="Serve numbers for Prometheus on loopback instead.")
    ] = False,
    while_stdin: Annotated[bool, Option("--while-stdin", hidden=True)] = False,
) -> None:
    """Follow runs on a page while they train, and try what-if on its sliders."""
    options.check_path("DIR", folder)
    if not prometheus:
        check_installed()
    elif outside or host != "127.0.0.1":
        raise BadInput("--prometheus serves on 127.0.0.1 alone: leave out --host and --outside")
    if folder != _RUNS and not folder.is_dir():
        raise BadInput(f"{folder} is no directory: name one that runs are in, or will be")
    if prometheus:
        with options.loading(quiet=False):
            from fedveil.watch.followed_runs import RunsFolder
            from fedveil.watch.run_metrics import run_families
        options.serve_numbers(port, partial(run_families, RunsFolder(folder)))
        return
    with options.loading(quiet=False):
        from fedveil.watch.watch_server import WatchOptions, serve

        served = WatchOptions(folder, host, port, outside)
    listen()

    def print_address(url: str) -> None:
        print(url, flush=True)
        print("Whoever has this address can open it; Ctrl-C ends it.", file=sys.stderr)

    serve(served, print_address, while_stdin=while_stdin)


def check_installed() -> None:
    """Raise BadInput if the packages of the live page are not installed."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"the live page needs {' and '.join(missing)}: pip install 'fedveil[watch]'")


@contextmanager
def live_page(folder: Path, show: Callable[[str], None]) -> Iterator[None]:
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
                process.wait(_SERVER_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            waiting.join()


def _show_address(
    process: "subprocess.Popen[str]", show: Callable[[str], None], ended: threading.Event
) -> None:
    """Wait for the server's first line, and call `show` with its address.

    If the server prints none, `show` gets a sentence saying so, unless the block has `ended`.
    """
    url = process.stdout.readline().strip() if process.stdout is not None else ""
    if url:
        show(f"live page: {url}")
    elif not ended.is_set():
        show("the live page could not be started: fedveil watch says why")


_REPEAT = 20
"""The default number of repetitions of a comparison."""


def plan(
    recipe: Annotated[
        str | None, Argument(help="A recipe to plan on its data; none: formulas only.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key of the recipe; without a recipe: clients, per_round, parameters, "
            "epsilon, delta, noise, trust; repeatable.",
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        Option(
            "--grid",
            metavar="KEY=V,V,...",
            help="Values to try of steps (E: local steps per round), iterations (T: local steps in "
            "all), clips or rates; repeatable.",
        ),
    ] = None,
    simulate: Annotated[
        bool, Option("--simulate", help="Rank by training, not by the theory's bound.")
    ] = False,
    against: Annotated[
        list[str] | None, Option(help="Another recipe to compare with; repeatable.")
    ] = None,
    repeat: Annotated[
        int | None,
        Option(help="Repetitions of a full comparison; a tenth of its cost is spent; default: 20."),
    ] = None,
    out: Annotated[Path | None, Option(help="The recipe to write; its page is beside it.")] = None,
    data: options.Data = None,
    workers: options.Workers = 0,
    engine: options.Engine = None,
    address: options.Address = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> None:
    """Choose E (local steps per round) and T (local steps in all) for a claim.

    By formulas alone, by theory on a recipe's data, or by training (--simulate).
    """
    options.check_numbers(repeat=repeat)
    if repeat is not None and not simulate:
        raise BadInput(f"--repeat is {repeat} and nothing is repeated: add --simulate")
    cluster = options.cluster_of(engine, address, workers)
    options.check_path("--out", out, writable=True)
    if recipe is None and (simulate or against or out is not None or data is not None):
        raise BadInput("--simulate, --against, --out and --data need a recipe: name one")
    if recipe is not None:
        from fedveil.runs.recipe import load_recipe

        options.check_data(data, [load_recipe(recipe, set_ or ()).data.name])
    from fedveil.tuning.plan_command import by_formula, by_recipe, space_of, write_and_print

    space, screen = space_of(grid or ()), None if json_ else options.plain_console()
    if recipe is None:
        by_formula(set_ or (), space, screen)
        return

    from fedveil.console import Counter
    from fedveil.tuning.trials import Laboratory

    listen()
    console = options.plain_console(stderr=True, quiet=quiet)
    with Counter(console, "trials") as counter:
        report = by_recipe(
            recipe,
            set_ or (),
            space,
            Laboratory(data, workers=workers, cluster=cluster),
            simulated=simulate,
            against=against or (),
            repeat=_REPEAT if repeat is None else repeat,
            out=out,
            on_trial=counter.show,
        )
    write_and_print(report, recipe, out, screen)


def sweep(
    recipe: Annotated[str, Argument(help="A shipped recipe or a .toml file.")],
    grid: Annotated[
        list[str], Option("--grid", metavar="KEY=V,V,...", help="An axis of the grid; repeatable.")
    ],
    out: Annotated[Path, Option(help="Directory; resumes a sweep found there.")],
    repeat: Annotated[int, Option(help="Repetitions of every cell.")] = 1,
    set_: options.Set = None,
    curves: Annotated[
        bool, Option("--curves", help="Measure along the way, as evaluate.every says.")
    ] = False,
    data: options.Data = None,
    workers: options.Workers = 0,
    engine: options.Engine = None,
    address: options.Address = None,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> None:
    """Train every recipe of a grid, repeatedly, over all cores. The same command resumes it."""
    options.check_numbers(repeat=repeat)
    cluster = options.cluster_of(engine, address, workers)
    options.check_path("--out", out, writable=True)
    from fedveil.tuning.recipe_grid import axis, cells

    axes = [axis(text) for text in grid]
    options.check_data(data, (cell.recipe.data.name for cell in cells(recipe, set_ or (), axes)))

    from fedveil.console import Counter, print_rows, print_terms
    from fedveil.tuning.sweep import Sweep
    from fedveil.tuning.trials import Laboratory

    listen()
    laboratory = Laboratory(data, with_curves=curves, workers=workers, cluster=cluster)
    with options.loading(quiet=quiet) as show_step:
        show_step("reading data and solving for the noise of every cell")
        opened = Sweep.in_folder(out, recipe, set_ or (), axes, repeat, laboratory)
    with (
        options.exit_on_interrupt(out),
        Counter(options.plain_console(stderr=True, quiet=quiet), "trials") as counter,
    ):
        opened.run(counter.show)
    if json_:
        print(json.dumps(opened.to_dict(), indent=2))
    else:
        screen = options.plain_console()
        print_rows(screen, f"{recipe}: {out}", opened.table())
        for line in opened.total_cost.sentences:
            screen.print(line, highlight=False)
        print_terms(screen, [claim for total in opened.total_cost.totals for claim in total])


def reproduce(
    paper: Annotated[str, Argument(help="fu, clip-decay, ldp-fl or naseri.")],
    item: Annotated[
        list[str] | None, Option(help="A table or figure; repeatable; default: all.")
    ] = None,
    scale: Annotated[
        str, Option(help="quick: minutes; paper: the paper's sizes, as far as data allow.")
    ] = "quick",
    repeat: Annotated[int | None, Option(help="Repetitions; default: by scale.")] = None,
    out: Annotated[Path | None, Option(help="Directory; resumes what is found there.")] = None,
    data: options.Data = None,
    workers: options.Workers = 0,
    engine: options.Engine = None,
    address: options.Address = None,
    quiet: options.Quiet = False,
) -> None:
    """Run a paper's experiments: the published number, ours with its interval, what was open."""
    if scale not in ("quick", "paper"):
        raise BadInput(f"--scale is {scale!r}: use quick or paper")
    options.check_numbers(repeat=repeat)
    cluster = options.cluster_of(engine, address, workers)
    options.check_path("--out", out, writable=True)
    options.check_path("--data", data)
    from fedveil.papers.reproduction import items_of
    from fedveil.papers.reproduction import reproduce as run_items

    items = items_of(paper, item or ())

    from fedveil.console import Counter
    from fedveil.papers.reproduction import Experiment, ExperimentScale

    listen()
    folder = out or Path("runs") / f"reproduce-{paper}-{scale}"
    parts = ["fedveil reproduce", paper, *(f"--item {name}" for name in item or ())]
    parts += [f"--scale {scale}"] + ([] if repeat is None else [f"--repeat {repeat}"])
    with (
        options.exit_on_interrupt(folder),
        Counter(options.plain_console(stderr=True, quiet=quiet), "trials") as counter,
    ):
        experiment = Experiment(
            folder,
            scale=ExperimentScale(scale),
            repeat=repeat,
            root=data,
            workers=workers,
            on_trial=lambda of, done, total, name: counter.show(done, total, name, of),
            cluster=cluster,
        )
        path = run_items(
            paper, items, experiment, " ".join(parts), lambda name, page: print(page.markdown())
        )
    print(f"written: {path}", file=sys.stderr)
