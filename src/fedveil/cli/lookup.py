"""`fedveil recipes`, `explain`, `account` and `ledger`: commands that train nothing."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedveil.base.errors import BadInput
from fedveil.cli import options


def recipes(json_: options.Json = False) -> None:
    """List the shipped recipes: what each protects, and whose paper it is."""
    from fedveil.runs.recipe_file import shipped_recipes

    rows = shipped_recipes()
    if json_:
        print(json.dumps(rows, indent=2))
        return

    from fedveil.console import print_rows

    print_rows(options.screen(), "recipes", rows)


def explain(
    name: Annotated[
        list[str] | None,
        Argument(metavar="[SECTION[.KEY] | TERM]", help="None: all sections and terms."),
    ] = None,
    json_: options.Json = False,
) -> None:
    """Explain the keys of a recipe, or the terms of a claim.

    A key comes with its type, its range and the shipped recipes that set it. A term, such as
    zero-out, comes with its entry in the glossary.
    """
    from fedveil.runs.explain import overview
    from fedveil.runs.glossary import looked_up

    term, part = (None, None) if name is None else looked_up(" ".join(name))
    if json_:
        meaning = {
            **({} if part is None else part.to_dict()),
            **({"term": term.to_dict()} if term else {}),
        }
        print(json.dumps(overview() if name is None else meaning, indent=2))
        return
    from fedveil.console import print_overview, print_part, print_term

    console = options.screen(highlight=False)
    if name is None:
        print_overview(console, overview())
    if term is not None:
        print_term(console, term)
    if part is not None:
        print_part(console, part)


def account(
    delta: Annotated[float, Option(help="The delta of the claim.")],
    noise: Annotated[float | None, Option(help="Noise multiplier, std / clip.")] = None,
    rate: Annotated[float | None, Option(help="Poisson sampling rate.")] = None,
    rounds: Annotated[int | None, Option(help="Number of rounds.")] = None,
    epsilon: Annotated[float | None, Option(help="Target epsilon (PLD).")] = None,
    units: Annotated[
        int, Option(help="Claims for somebody with so many clients, at the same delta.")
    ] = 1,
    json_: options.Json = False,
) -> None:
    """Solve for the one of noise, rate, rounds and epsilon that is left out (central DP)."""
    options.check_given(delta=delta, noise=noise, rate=rate, rounds=rounds, epsilon=epsilon)
    from fedveil.privacy.accounting.calibration import solve
    from fedveil.runs.glossary import terms_line

    answer = solve(noise=noise, rate=rate, rounds=rounds, epsilon=epsilon, delta=delta)
    answer = replace(answer, claims=tuple(claim.for_units(units) for claim in answer.claims))
    if json_:
        print(json.dumps(answer.to_dict(), indent=2))
        return
    print(f"noise {answer.noise:.6g}, rate {answer.rate:.6g}, rounds {answer.rounds}")
    for claim in answer.claims:
        print(claim)
    print(terms_line(answer.claims))


def ledger(
    path: Annotated[Path, Argument(help="A run directory or a ledger.db.")],
    verify: Annotated[
        bool, Option("--verify", help="Check charges, and the files of a run directory.")
    ] = False,
    head: Annotated[
        str | None, Option(help="HASH:LENGTH as known from elsewhere, for --verify.")
    ] = None,
    export: Annotated[Path | None, Option(help="Write everything as JSON.")] = None,
    json_: options.Json = False,
) -> None:
    """Print what a run promises, under which conditions, what it spent, and every charge."""
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
    statements = statements_of(path)
    for warning in statements.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if json_:
        print(json.dumps(statements.to_dict(), indent=2))
        return
    from fedveil.console import print_charges, print_promise, print_terms, print_totals

    console = options.screen(highlight=False)
    for run in statements.runs:
        print_promise(console, run)
    for run in statements.runs:
        print_totals(console, run)
    if statements.common is not None:
        console.print(statements.common, soft_wrap=True)
    for run in statements.runs:
        print_charges(console, run)
    print_terms(console, [claim for run in statements.runs for claim in run.claims])
