"""The command line. Heavy imports stay inside the commands, so that --help answers at once."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fedveil.checks import VALUES, check, check_workers, shown
from fedveil.errors import BadInput, FedveilError
from fedveil.interrupts import listen

app = typer.Typer(
    name="fedveil",
    help="Differentially private federated learning: train, plan, and know the epsilon.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress line.")]
Workers = Annotated[int, typer.Option(help="Processes; 0: one per core.")]
Data = Annotated[Path | None, typer.Option(help="Folder with data sets; default: FEDVEIL_DATA.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; repeatable."),
]


_REPEAT = 20
"""Repetitions of a comparison, unless others are asked for."""

_CTRL_C = 130
"""What typer returns when a command ends in KeyboardInterrupt."""


def main() -> None:
    """Run a command: exit 0 when done, 2 with one line on bad input, 1 on anything else."""
    try:
        code = app(standalone_mode=False)
    except BadInput as e:
        _fail(str(e))
    except FedveilError as e:
        _fail(str(e), code=1)
    except BrokenPipeError:
        _stop_printing()
        code = 1
    except OSError as e:
        _fail(f"{shown(e.filename)}: {e.strerror}" if e.filename else str(e))
    except MemoryError:
        _fail("memory ran out: use fewer clients, a smaller model or a lower engine.memory", 1)
    except Exception as e:
        if not hasattr(e, "format_message"):
            raise
        if not e.format_message():
            sys.exit(2)
        _fail(f"{e.format_message()} (see fedveil --help)")
    if code == _CTRL_C:
        print("interrupted", file=sys.stderr)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _stop_printing() -> None:
    """Nobody reads what is printed any more; what is left of it goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_given(**options: float | None) -> None:
    """Refuse numbers that are wrong by themselves, before anything is loaded."""
    for name, value in options.items():
        if value is not None:
            check(f"--{name.replace('_', '-')}", value)


def _check_path(option: str, path: Path | None) -> None:
    """Refuse a path that cannot be looked at: too long, or inside a folder that is closed."""
    if path is None:
        return
    try:
        if path.is_dir():
            os.scandir(path).close()
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise BadInput(f"{option} {shown(str(path))}: {reason}; choose another") from e


def _check_out(path: Path | None) -> None:
    """Refuse, before anything is loaded, where nothing can be written."""
    _check_path("--out", path)
    if path is None:
        return
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"--out {path}: nothing can be written in {there}; choose another")


def _check_data(data: Path | None, names: Iterable[str]) -> None:
    """Refuse a data folder that none of the data sets is read from."""
    _check_path("--data", data)
    if data is None:
        return
    from fedveil.data.load import EMBEDDED

    names = tuple(dict.fromkeys(names))
    if all(name in EMBEDDED for name in names):
        raise BadInput(
            f"--data {data} has no effect on {', '.join(names)}, which no data folder holds: "
            "leave it out, or name a data set that is in it (--set data.name=mnist)"
        )


@app.command()
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
    quiet: Quiet = False,
    json_: Json = False,
) -> int:
    """Train a model over many clients, as a recipe says."""
    others = (recipe, set_ or None, out, ledger, ledger_epsilon)
    if resume is not None and any(other is not None for other in others):
        raise BadInput(
            "--resume takes the recipe from the run: leave out recipe, --set, --out and --ledger"
        )
    if ledger_epsilon is not None and ledger is None:
        raise BadInput("--ledger-epsilon is the budget of a shared ledger: name it with --ledger")
    if ledger_epsilon is not None:
        VALUES["budget.epsilon"].check("--ledger-epsilon", ledger_epsilon)
    _check_out(out)
    _check_path("--ledger", ledger)
    _check_path("--resume", resume)
    from fedveil.runs.recipe import DEFAULT, load_recipe

    chosen = None
    if resume is None:
        chosen = load_recipe(DEFAULT if recipe is None else recipe, set_ or ())
        _check_data(data, [chosen.data.name])

    from rich.console import Console

    from fedveil.console import Progress, print_result
    from fedveil.runs.ledgers import Shared
    from fedveil.runs.run import Run

    listen()
    shared = None if ledger is None else Shared(ledger, ledger_epsilon)
    if chosen:
        prepared = Run.start(chosen, out, data, shared)
    else:
        prepared = Run.resume(resume or Path(), data)
        _check_data(data, [prepared.recipe.data.name])
    training = prepared.training
    console = Console(stderr=True, quiet=quiet, markup=False, emoji=False)
    metric = next(iter(training.task.metrics), "loss")

    def describe() -> None:
        console.print(prepared.describe(), highlight=False, soft_wrap=True)

    plan = training.plan
    with Progress(console, plan.rounds, metric, plan.limit, plan.promise) as progress:
        result = prepared.execute(progress.show, describe)
    if not json_:
        print_result(Console(markup=False, emoji=False), result)
    else:
        print((prepared.folder / "result.json").read_text(), end="")
    if result["stopped"] == "interrupted":
        print(
            f"interrupted after round {result['rounds']}: resume with "
            f"fedveil run --resume {result['run_dir']}",
            file=sys.stderr,
        )
        return 1
    return 0


@app.command()
def plan(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe to plan on its data; none: formulas only.")
    ] = None,
    set_: Set = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Rank by training, not by the theory's bound.")
    ] = False,
    against: Annotated[
        list[str] | None, typer.Option(help="Another recipe to compare with; repeatable.")
    ] = None,
    steps: Annotated[
        str, typer.Option(help="E to look at: local steps per round.")
    ] = "1,2,3,4,6,12",
    iterations: Annotated[
        str, typer.Option(help="T to look at: local steps in all.")
    ] = "12,24,36,60,120",
    clips: Annotated[str, typer.Option(help="Clip norms to look at; none: the recipe's.")] = "",
    rates: Annotated[str, typer.Option(help="Learning rates to look at; none: as given.")] = "",
    repeat: Annotated[
        int | None,
        typer.Option(
            help="Repetitions of a full comparison; a tenth of its cost is spent; default: 20."
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Clients (formulas only).")] = None,
    per_round: Annotated[int | None, typer.Option(help="Clients per round.")] = None,
    parameters: Annotated[int | None, typer.Option(help="Parameters of the model.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The epsilon to be claimed.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="The delta to be claimed; default: 1e-5.")
    ] = None,
    noise: Annotated[
        str | None, typer.Option(help="laplace or gaussian; default: gaussian.")
    ] = None,
    trust: Annotated[str | None, typer.Option(help="local or central; default: local.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The recipe to write; a heat map goes beside it.")
    ] = None,
    data: Data = None,
    workers: Workers = 0,
    quiet: Quiet = False,
    json_: Json = False,
) -> int:
    """Choose E (local steps per round) and T (local steps in all) for a claim.

    By formulas alone, by theory on a recipe's data, or by training (--simulate).
    """
    _check_given(
        repeat=repeat,
        clients=clients,
        per_round=per_round,
        parameters=parameters,
        epsilon=epsilon,
        delta=delta,
    )
    if repeat is not None and not simulate:
        raise BadInput(f"--repeat is {repeat} and nothing is repeated: add --simulate")
    check_workers("--workers", workers)
    _check_out(out)
    if recipe is None and (simulate or against or set_ or out is not None or data is not None):
        raise BadInput("--simulate, --against, --set, --out and --data need a recipe: name one")
    if recipe is not None:
        from fedveil.runs.recipe import load_recipe

        _check_data(data, [load_recipe(recipe, set_ or ()).data.name])
    from fedveil.tuning.command import Sizes, by_formula, by_recipe, space_of, tell

    sizes = Sizes(clients, per_round, parameters, epsilon, delta, noise, trust)
    space = space_of(steps, iterations, clips, rates)
    if recipe is None:
        by_formula(sizes, space, as_json=json_)
        return 0
    sizes.check_unused()

    from rich.console import Console

    from fedveil.console import Counter
    from fedveil.tuning.trials import Laboratory

    listen()

    console = Console(stderr=True, quiet=quiet, markup=False, emoji=False)
    with Counter(console, "trials") as counter:
        report = by_recipe(
            recipe,
            set_ or (),
            space,
            Laboratory(data, workers=workers),
            simulated=simulate,
            against=against or (),
            repeat=_REPEAT if repeat is None else repeat,
            out=out,
            on_trial=counter.show,
        )
    tell(report, recipe, out, as_json=json_)
    return 0


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe or a .toml file.")],
    grid: Annotated[
        list[str],
        typer.Option("--grid", metavar="KEY=V,V,...", help="An axis of the grid; repeatable."),
    ],
    out: Annotated[Path, typer.Option(help="Directory; resumes a sweep found there.")],
    repeat: Annotated[int, typer.Option(help="Repetitions of every cell.")] = 1,
    set_: Set = None,
    curves: Annotated[
        bool, typer.Option("--curves", help="Measure along the way, as evaluate.every says.")
    ] = False,
    data: Data = None,
    workers: Workers = 0,
    quiet: Quiet = False,
    json_: Json = False,
) -> int:
    """Train every recipe of a grid, repeatedly, over all cores; resumes after an interruption."""
    _check_given(repeat=repeat)
    check_workers("--workers", workers)
    _check_out(out)
    from fedveil.tuning.grid import axis, cells

    axes = [axis(text) for text in grid]
    _check_data(data, (cell.recipe.data.name for cell in cells(recipe, set_ or (), axes)))

    from rich.console import Console

    from fedveil.console import Counter, print_rows
    from fedveil.training.engines.workers import WorkerLost
    from fedveil.tuning.sweep import Sweep
    from fedveil.tuning.trials import Laboratory

    listen()

    found = Sweep.open(
        out, recipe, set_ or (), axes, repeat, Laboratory(data, curves=curves, workers=workers)
    )
    console = Console(stderr=True, quiet=quiet, markup=False, emoji=False)
    try:
        with Counter(console, "trials") as counter:
            found.run(counter.show)
    except KeyboardInterrupt:
        print(f"interrupted: the same command resumes it in {out}", file=sys.stderr)
        return 1
    except WorkerLost as e:
        print(f"error: {e}; the same command resumes it in {out}", file=sys.stderr)
        return 1
    if json_:
        print(json.dumps(found.report(), indent=2))
    else:
        screen = Console(markup=False, emoji=False)
        print_rows(screen, f"{recipe}: {out}", found.table())
        for line in found.cost.sentences:
            screen.print(line, highlight=False, soft_wrap=True)
    return 0


@app.command()
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
    quiet: Quiet = False,
) -> int:
    """Run a paper's experiments: the published number, ours with its interval, what was open."""
    if scale not in ("quick", "paper"):
        raise BadInput(f"--scale is {scale!r}: use quick or paper")
    _check_given(repeat=repeat)
    check_workers("--workers", workers)
    _check_out(out)
    _check_path("--data", data)
    from fedveil.papers.reproduce import items_of
    from fedveil.papers.reproduce import reproduce as run_items

    items = items_of(paper, item or ())

    from rich.console import Console

    from fedveil.console import Counter
    from fedveil.papers.experiment import Experiment, Scale
    from fedveil.papers.page import Page
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
            experiment = Experiment(folder, Scale(scale), repeat, data, workers, counter.show_of)
            path = run_items(paper, items, experiment, " ".join(parts), show)
    except KeyboardInterrupt:
        print(f"interrupted: the same command resumes it in {folder}", file=sys.stderr)
        return 1
    except WorkerLost as e:
        print(f"error: {e}; the same command resumes it in {folder}", file=sys.stderr)
        return 1
    print(f"written: {path}", file=sys.stderr)
    return 0


@app.command()
def recipes(json_: Json = False) -> None:
    """List the shipped recipes: what each protects, and whose paper it is."""
    from fedveil.runs.recipe import shipped

    rows = shipped()
    if json_:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console

    from fedveil.console import print_rows

    print_rows(Console(), "recipes", rows)


@app.command()
def account(
    delta: Annotated[float, typer.Option(help="The delta of the claim.")],
    noise: Annotated[float | None, typer.Option(help="Noise multiplier, std / clip.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson sampling rate.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target epsilon (PLD).")] = None,
    json_: Json = False,
) -> None:
    """Solve for the one of noise, rate, rounds and epsilon that is left out (central DP)."""
    _check_given(delta=delta, noise=noise, rate=rate, rounds=rounds, epsilon=epsilon)
    from fedveil.privacy.accounting.solve import solve

    answer = solve(noise=noise, rate=rate, rounds=rounds, epsilon=epsilon, delta=delta)
    if json_:
        print(json.dumps(answer.to_dict(), indent=2))
        return
    print(f"noise {answer.noise:.6g}, rate {answer.rate:.6g}, rounds {answer.rounds}")
    for claim in answer.claims:
        print(claim)


@app.command()
def ledger(
    path: Annotated[Path, typer.Argument(help="A run directory or a ledger.db.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check charges, and the files of a run directory.")
    ] = False,
    head: Annotated[
        str | None, typer.Option(help="HASH:LENGTH as known from elsewhere, for --verify.")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    json_: Json = False,
) -> None:
    """Show every charge, the total claim, and what is left of the budget."""
    from fedveil.privacy.accounting.events import from_dict
    from fedveil.privacy.accounting.events import told as told_of
    from fedveil.runs.evidence import export_ledger, statements_of, verify_ledger

    if head is not None and not verify:
        raise BadInput("--head is for --verify: add it")
    if verify + json_ + (export is not None) > 1:
        raise BadInput("--verify, --export and --json are three ways to look: give one")
    if verify:
        print(verify_ledger(path, head))
        return
    if export is not None:
        export_ledger(path, export)
        print(f"written: {export}")
        return
    told = statements_of(path)
    for warning in told.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if json_:
        print(json.dumps(told.to_dict(), indent=2))
        return
    from rich.console import Console

    from fedveil.console import print_rows

    console = Console()
    for run in told.runs:
        for covers in sorted({charge.covers for charge in run.charges}):
            charges = [charge for charge in run.charges if charge.covers == covers]
            rows = [{"round": c.round, "attempt": c.attempt, "at": c.charged_at} for c in charges]
            event = told_of(from_dict(charges[0].event))
            print_rows(console, f"{run.run}: {len(rows)} charges for {covers}, each {event}", rows)
        for claim in run.claims:
            console.print(str(claim), highlight=False)
        console.print(run.remainder(), highlight=False)
    if told.common is not None:
        console.print(told.common, highlight=False)


@app.command()
def mixer(
    positions: Annotated[int, typer.Option(help="Weights per report.")],
    minimum: Annotated[int, typer.Option(help="Fewest reports that are handed on.")],
    expected: Annotated[int, typer.Option(help="Reports after which a round closes.")],
    rounds: Annotated[int, typer.Option(help="Rounds to serve.")] = 1,
    deadline: Annotated[float, typer.Option(help="Seconds a round stays open.")] = 60.0,
    idle: Annotated[float, typer.Option(help="Seconds a client may be silent.")] = 30.0,
    seconds: Annotated[float, typer.Option(help="Seconds after which it stops.")] = 3600.0,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0: any.")] = 0,
) -> None:
    """Run a mixer for two-point reports: it hands on, per position, only how many were high."""
    from fedveil.mixing.server import MixerConfig, run_mixer

    run_mixer(
        MixerConfig(
            positions=positions,
            minimum=minimum,
            expected=expected,
            rounds=rounds,
            deadline=deadline,
            idle=idle,
            seconds=seconds,
            port=port,
        )
    )
