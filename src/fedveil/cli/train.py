"""`fedveil run` and `watch`, and commands that train many times: `plan`, `sweep`, `reproduce`."""

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
        str | None, Argument(help="A shipped recipe or a .toml file; default: central.")
    ] = None,
    set_: options.Set = None,
    out: Annotated[Path | None, Option(help="Run directory (new or empty).")] = None,
    data: options.Data = None,
    resume: Annotated[Path | None, Option(help="Resume an interrupted run.")] = None,
    ledger: Annotated[
        Path | None, Option(help="A ledger that runs on the same data share.")
    ] = None,
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
    options.check_out(out)
    options.check_path("--ledger", ledger)
    options.check_path("--resume", resume)
    if watch:
        check_installed()
    with options.loading(quiet=quiet):
        from fedveil.base.checks import TABLE
        from fedveil.runs.logs import check_logs
        from fedveil.runs.recipe import DEFAULT, load_recipe

        check_logs(log or ())
        chosen = own = None
        if resume is None:
            chosen = load_recipe(DEFAULT if recipe is None else recipe, [*(set_ or ()), *where])
            chosen.model.check_allowed(allow_code)
            options.check_data(data, [chosen.data.name])
            if chosen.data.name == TABLE:  # before torch is imported, which takes seconds
                own = chosen.load_data()

        from fedveil.console import Progress, print_result
        from fedveil.runs.ending import RESUMABLE
        from fedveil.runs.ledgers import Shared
        from fedveil.runs.run import Run

        listen()
        shared = None if ledger is None else Shared(ledger, ledger_epsilon)
        if chosen:
            prepared = Run.start(chosen, out, data, shared, data=own, allow_code=allow_code)
        else:
            prepared = Run.resume(resume or Path(), data, allow_code=allow_code, where=where)
            options.check_data(data, [prepared.recipe.data.name])
    prepared.logs = tuple(log or ())
    console = options.progress_console(quiet)
    with ExitStack() as stack:
        if watch:
            stack.enter_context(live_page(prepared.folder, _print_below_progress))
        progress = stack.enter_context(Progress(console, prepared))
        result = prepared.execute(
            progress.show,
            lambda: console.print(prepared.describe(), highlight=False, soft_wrap=True),
        )
    if not json_:
        print_result(options.screen(), result)
    else:
        print((prepared.folder / "result.json").read_text(), end="")
    if result["stopped"] in RESUMABLE:
        how = "interrupted" if result["stopped"] == "interrupted" else "ended on request"
        print(
            f"{how} after round {result['rounds']}: resume with {prepared.how_to_resume}",
            file=sys.stderr,
        )
        return 1
    return 0


def _print_below_progress(text: str) -> None:
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
    while_stdin: Annotated[bool, Option("--while-stdin", hidden=True)] = False,
) -> None:
    """Follow runs on a page while they train, and try what-if on its sliders."""
    options.check_path("DIR", folder)
    check_installed()
    if folder != _RUNS and not folder.is_dir():
        raise BadInput(f"{folder} is no directory: name one that runs are in, or will be")
    with options.loading(quiet=False):
        from fedveil.watch.watch_server import Served, serve

        served = Served(folder, host, port, outside)
    listen()

    def print_address(url: str) -> None:
        print(url, flush=True)
        print("Whoever has this address can open it; Ctrl-C ends it.", file=sys.stderr)

    serve(served, print_address, while_stdin=while_stdin)


def check_installed() -> None:
    """Refuse if the packages of the live page are not installed."""
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
    set_: options.Set = None,
    simulate: Annotated[
        bool, Option("--simulate", help="Rank by training, not by the theory's bound.")
    ] = False,
    against: Annotated[
        list[str] | None, Option(help="Another recipe to compare with; repeatable.")
    ] = None,
    steps: Annotated[str, Option(help="E to look at: local steps per round.")] = "1,2,3,4,6,12",
    iterations: Annotated[
        str, Option(help="T to look at: local steps in all.")
    ] = "12,24,36,60,120",
    clips: Annotated[str, Option(help="Clip norms to look at; none: the recipe's.")] = "",
    rates: Annotated[str, Option(help="Learning rates to look at; none: as given.")] = "",
    repeat: Annotated[
        int | None,
        Option(help="Repetitions of a full comparison; a tenth of its cost is spent; default: 20."),
    ] = None,
    clients: Annotated[int | None, Option(help="Clients (formulas only).")] = None,
    per_round: Annotated[int | None, Option(help="Clients per round.")] = None,
    parameters: Annotated[int | None, Option(help="Parameters of the model.")] = None,
    epsilon: Annotated[float | None, Option(help="The epsilon to be claimed.")] = None,
    delta: Annotated[float | None, Option(help="The delta to be claimed; default: 1e-5.")] = None,
    noise: Annotated[str | None, Option(help="laplace or gaussian; default: gaussian.")] = None,
    trust: Annotated[str | None, Option(help="local or central; default: local.")] = None,
    out: Annotated[
        Path | None, Option(help="The recipe to write; its page goes beside it.")
    ] = None,
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
    numbers = {
        "clients": clients,
        "per_round": per_round,
        "parameters": parameters,
        "epsilon": epsilon,
        "delta": delta,
    }
    options.check_given(repeat=repeat, **numbers)
    if repeat is not None and not simulate:
        raise BadInput(f"--repeat is {repeat} and nothing is repeated: add --simulate")
    cluster = options.cluster_of(engine, address, workers)
    options.check_out(out)
    if recipe is None and (simulate or against or set_ or out is not None or data is not None):
        raise BadInput("--simulate, --against, --set, --out and --data need a recipe: name one")
    if recipe is not None:
        from fedveil.runs.recipe import load_recipe

        options.check_data(data, [load_recipe(recipe, set_ or ()).data.name])
    from fedveil.tuning.plan_command import (
        by_formula,
        by_recipe,
        check_unused,
        space_of,
        write_and_print,
    )

    sizes = {**numbers, "noise": noise, "trust": trust}
    space = space_of(steps, iterations, clips, rates)
    if recipe is None:
        by_formula(sizes, space, as_json=json_)
        return
    check_unused(sizes)

    from fedveil.console import Counter
    from fedveil.tuning.trials import Laboratory

    listen()
    console = options.progress_console(quiet)
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
    write_and_print(report, recipe, out, as_json=json_)


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
    options.check_given(repeat=repeat)
    cluster = options.cluster_of(engine, address, workers)
    options.check_out(out)
    from fedveil.tuning.recipe_grid import axis, cells

    axes = [axis(text) for text in grid]
    options.check_data(data, (cell.recipe.data.name for cell in cells(recipe, set_ or (), axes)))

    from fedveil.console import Counter, print_rows, print_terms
    from fedveil.tuning.sweep import Sweep
    from fedveil.tuning.trials import Laboratory

    listen()
    laboratory = Laboratory(data, curves=curves, workers=workers, cluster=cluster)
    opened = Sweep.in_folder(out, recipe, set_ or (), axes, repeat, laboratory)
    with options.resumable(out), Counter(options.progress_console(quiet), "trials") as counter:
        opened.run(counter.show)
    if json_:
        print(json.dumps(opened.to_dict(), indent=2))
    else:
        screen = options.screen()
        print_rows(screen, f"{recipe}: {out}", opened.table())
        for line in opened.total_cost.sentences:
            screen.print(line, highlight=False, soft_wrap=True)
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
    options.check_given(repeat=repeat)
    cluster = options.cluster_of(engine, address, workers)
    options.check_out(out)
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
    with options.resumable(folder), Counter(options.progress_console(quiet), "trials") as counter:
        experiment = Experiment(
            folder,
            scale=ExperimentScale(scale),
            repeat=repeat,
            root=data,
            workers=workers,
            on_trial=counter.show_of,
            cluster=cluster,
        )
        path = run_items(
            paper, items, experiment, " ".join(parts), lambda name, page: print(page.markdown())
        )
    print(f"written: {path}", file=sys.stderr)
