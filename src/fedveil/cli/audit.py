"""`fedveil audit`: attacks on a finished run, or on this installation, beside the claims."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedveil.base.checks import check_workers
from fedveil.base.errors import BadInput
from fedveil.cli.options import (
    Address,
    AllowCode,
    Data,
    Engine,
    Json,
    Quiet,
    Workers,
    check_out,
    check_path,
    cluster_of,
    loading,
)


def audit(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="The directory of a run that has ended."),
    ] = None,
    attacks: Annotated[
        str | None,
        typer.Option(
            help="Of randomiser, sensitivity, statistics, canaries, one-run, membership, "
            "white-box, property, inversion; default: all that fit."
        ),
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Audit every release of this installation.")
    ] = False,
    draws: Annotated[int, typer.Option(help="Draws of each input of a randomiser.")] = 100_000,
    canaries: Annotated[int, typer.Option(help="Canaries, of clients or of records.")] = 1_000,
    references: Annotated[int, typer.Option(help="Reference models of a membership attack.")] = 16,
    property_: Annotated[
        str,
        typer.Option(
            "--property",
            help="What is asked of clients: planted, a feature of images (thickness, slant, "
            "brightness), or COLUMN[=VALUE] of a table.",
        ),
    ] = "planted",
    seed: Annotated[int, typer.Option(help="Seed of the audit's own draws.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for figures and models' losses; resumes what is found there."),
    ] = None,
    data: Data = None,
    workers: Workers = 0,
    engine: Engine = None,
    address: Address = None,
    allow_code: AllowCode = False,
    quiet: Quiet = False,
    json_: Json = False,
) -> int:
    """Attack a finished run and show what is found beside its claim: exit 1 if it is violated."""
    if self_test == (run is not None):
        raise BadInput("give a run directory, or --self-test, and not both")
    if self_test and (attacks is not None or data is not None or out is not None):
        raise BadInput(
            "--self-test audits releases by themselves: leave out --attacks, --data and --out"
        )
    if seed < 0:
        raise BadInput(f"--seed is {seed}: a number from 0 on is needed")
    check_workers("--workers", workers)
    cluster = cluster_of(engine, address)
    check_out(out)
    check_path("--data", data)
    check_path("RUN", run)
    with loading(quiet=quiet):
        from rich.console import Console

        from fedveil.audit.audit_command import AuditSettings
        from fedveil.audit.audit_command import audit as audited
        from fedveil.audit.randomisers import self_test as tested
        from fedveil.console import Counter, print_findings, print_leaks, print_rows, print_terms
        from fedveil.training.engines.workers import WorkerLost

        chosen = None if attacks is None else tuple(attacks.split(","))
        settings = AuditSettings(
            attacks=chosen,
            draws=draws,
            canaries=canaries,
            references=references,
            property=property_,
            seed=seed,
            workers=workers,
            cluster=cluster,
        )
    progress = Console(stderr=True, quiet=quiet, markup=False, emoji=False)
    console = Console(markup=False, emoji=False)
    again = "" if out is None else f": the same command resumes it in {out}"
    try:
        with Counter(progress, "steps") as counter:
            if run is None:
                found = tuple(tested(settings.randomiser, counter.show))
                told = {"findings": [finding.to_dict() for finding in found]}
            else:
                whole = audited(
                    run,
                    settings,
                    data,
                    out=out,
                    allow_code=allow_code,
                    on_step=lambda attack, done, of: counter.show_of(attack, done, of, ""),
                )
                found, told = whole.findings, whole.to_dict()
    except KeyboardInterrupt:
        print(f"interrupted{again}", file=sys.stderr)
        return 1
    except WorkerLost as e:
        print(f"error: {e}{again}", file=sys.stderr)
        return 1
    violated = any(finding.violated for finding in found)
    if json_:
        print(json.dumps({**told, "violated": violated}, indent=2))
        return 1 if violated else 0
    title = "self-test of every release" if run is None else str(run)
    if found:
        print_findings(console, title, found)
    if run is not None:
        print_leaks(console, title, whole.leaks)
        print_rows(console, f"{title}: in one row", [whole.row])
        for reason in whole.left_out:
            console.print(f"left out: {reason}", highlight=False, soft_wrap=True)
    print_terms(console, [finding.claim.short for finding in found])
    return 1 if violated else 0
