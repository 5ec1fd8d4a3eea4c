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
    """Show every charge, the total claim, and what is left of the budget."""
    from fedveil.privacy.accounting.events import event_text, from_dict
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
            event = event_text(from_dict(charges[0].event))
            print_rows(console, f"{run.run}: {len(rows)} charges for {covers}, each {event}", rows)
        for claim in run.claims:
            console.print(str(claim), highlight=False)
        console.print(run.remainder(), highlight=False)
    if told.common is not None:
        console.print(told.common, highlight=False)
