"""`fedveil recipes`, `explain`, `account` and `ledger`: nothing is trained."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import Json, check_given
from fedveil.errors import BadInput


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


def explain(
    name: Annotated[
        str | None, typer.Argument(metavar="[SECTION[.KEY]]", help="None: all sections.")
    ] = None,
    json_: Json = False,
) -> None:
    """Tell what a recipe's keys mean and may be, and which shipped recipes set them."""
    from fedveil.runs.explain import find_part, overview

    found = overview() if name is None else find_part(name)
    if json_:
        print(json.dumps(found if isinstance(found, list) else found.to_dict(), indent=2))
        return
    from rich.console import Console

    from fedveil.console import print_overview, print_part

    console = Console(markup=False, emoji=False, highlight=False)
    if isinstance(found, list):
        print_overview(console, found)
    else:
        print_part(console, found)


def account(
    delta: Annotated[float, typer.Option(help="The delta of the claim.")],
    noise: Annotated[float | None, typer.Option(help="Noise multiplier, std / clip.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson sampling rate.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target epsilon (PLD).")] = None,
    json_: Json = False,
) -> None:
    """Solve for the one of noise, rate, rounds and epsilon that is left out (central DP)."""
    check_given(delta=delta, noise=noise, rate=rate, rounds=rounds, epsilon=epsilon)
    from fedveil.privacy.accounting.solve import solve

    answer = solve(noise=noise, rate=rate, rounds=rounds, epsilon=epsilon, delta=delta)
    if json_:
        print(json.dumps(answer.to_dict(), indent=2))
        return
    print(f"noise {answer.noise:.6g}, rate {answer.rate:.6g}, rounds {answer.rounds}")
    for claim in answer.claims:
        print(claim)


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
    """Say what a run promises and when that holds, what it spent, and every charge."""
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

    from fedveil.console import print_charges, print_promise, print_totals

    console = Console(markup=False, emoji=False, highlight=False)
    for run in told.runs:
        print_promise(console, run)
    for run in told.runs:
        print_totals(console, run)
    if told.common is not None:
        console.print(told.common, soft_wrap=True)
    for run in told.runs:
        print_charges(console, run)
