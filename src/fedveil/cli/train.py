"""`fedveil run`."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from fedveil.base.checks import check_ledger_epsilon
from fedveil.base.errors import BadInput
from fedveil.base.interrupts import listen
from fedveil.cli.options import (
    Address,
    AllowCode,
    Data,
    Engine,
    Json,
    Quiet,
    Set,
    check_data,
    check_out,
    check_path,
    engine_settings,
    loading,
)
from fedveil.cli.watch import check_installed, watched


def run(
    recipe: Annotated[
        str | None, typer.Argument(help="A shipped recipe or a .toml file; default: central.")
    ] = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="Run directory (new or empty).")] = None,
    data: Data = None,
    resume: Annotated[Path | None, typer.Option(help="Resume an interrupted run.")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="A ledger that runs on the same data share.")
    ] = None,
    ledger_epsilon: Annotated[
        float | None, typer.Option(help="Its common budget, when it is new; default: the run's.")
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(help="Log to tensorboard, mlflow or wandb as well; repeatable."),
    ] = None,
    engine: Engine = None,
    address: Address = None,
    allow_code: AllowCode = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run on a live page while it trains.")
    ] = False,
    quiet: Quiet = False,
    json_: Json = False,
) -> int:
    """Train a model over many clients, as a recipe says."""
    others = (recipe, set_ or None, out, ledger, ledger_epsilon)
    if resume is not None and any(other is not None for other in others):
        raise BadInput(
            "--resume takes the recipe from the run: leave out recipe, --set, --out and --ledger"
        )
    where = engine_settings(engine, address)
    check_ledger_epsilon("--ledger-epsilon", ledger_epsilon, ledger)
    check_out(out)
    check_path("--ledger", ledger)
    check_path("--resume", resume)
    if watch:
        check_installed()
    with loading(quiet=quiet):
        from fedveil.base.checks import TABLE
        from fedveil.runs.logs import check_logs
        from fedveil.runs.recipe_file import DEFAULT, load_recipe

        check_logs(log or ())
        chosen = own = None
        if resume is None:
            chosen = load_recipe(DEFAULT if recipe is None else recipe, [*(set_ or ()), *where])
            chosen.model.check_allowed(allow_code)
            check_data(data, [chosen.data.name])
            if chosen.data.name == TABLE:  # before torch is imported, which takes seconds
                own = chosen.load_data()

        from rich.console import Console

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
            check_data(data, [prepared.recipe.data.name])
    prepared.logs = tuple(log or ())
    console = Console(stderr=True, quiet=quiet, markup=False, emoji=False)

    def describe() -> None:
        console.print(prepared.describe(), highlight=False, soft_wrap=True)

    with ExitStack() as stack:
        if watch:
            stack.enter_context(watched(prepared.folder, _print_below_progress))
        progress = stack.enter_context(Progress(console, prepared))
        result = prepared.execute(progress.show, describe)
    if not json_:
        print_result(Console(markup=False, emoji=False), result)
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
