"""`fedveil plan`, `sweep` and `reproduce`: commands that train many times."""

import json
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedveil.base.errors import BadInput
from fedveil.base.interrupts import listen
from fedveil.cli import options

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
        from fedveil.runs.recipe_file import load_recipe

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
