"""`fedveil evaluate`, `predict`, `compare`, `report`, `audit`, and commands that look things up."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedveil.base.errors import BadInput
from fedveil.cli import options

_RUN_HELP = "The directory of a run that has ended."
Run = Annotated[Path, Argument(metavar="RUN", help=_RUN_HELP)]


def evaluate(
    run: Run,
    data: Annotated[
        Path | None,
        Option(
            help="A table with targets; or the folder with published data sets, for their test "
            "split; default: the recipe's own test split."
        ),
    ] = None,
    allow_code: options.AllowCode = False,
    json_: options.Json = False,
) -> None:
    """Measure a run's model on a table of your own, or on its test split again."""
    options.check_path("--data", data)
    from fedveil.runs.opened_run import OpenedRun, measure_run
    from fedveil.runs.run_directory import json_text

    metrics = measure_run(OpenedRun.at(run, allow_code=allow_code), data)
    if json_:
        print(json_text(metrics, indent=2), end="")
    else:
        print("\n".join(f"{name} {value:.6g}" for name, value in metrics.items()))


def predict(
    run: Run,
    rows: Annotated[Path, Argument(metavar="INPUT", help="A .csv, .parquet or .npy file.")],
    id_: Annotated[
        str | None, Option("--id", help="A column of the table that is kept, such as an id.")
    ] = None,
    out: Annotated[Path | None, Option(help="A CSV file; default: the screen.")] = None,
    allow_code: options.AllowCode = False,
) -> None:
    """Predict rows with a run's model: one line of CSV for each, labels as the table has them."""
    options.check_path("--out", out, writable=True)
    options.check_path("INPUT", rows)
    from fedveil.runs.opened_run import OpenedRun, predictions_csv
    from fedveil.runs.run_directory import write_new

    text = predictions_csv(OpenedRun.at(run, allow_code=allow_code), rows, id_)
    if out is None:
        print(text, end="")
    else:
        write_new(out, text.encode())


def compare(
    folders: Annotated[list[Path], Argument(metavar="RUN RUN ...", help="Run directories.")],
    json_: options.Json = False,
) -> None:
    """Put runs side by side: metrics, claims, recipes, and which promise is stronger."""
    from fedveil.runs.compare import (
        across_clients,
        comparison_rows,
        differing_keys,
        open_runs,
        verdict,
    )
    from fedveil.runs.run_directory import json_text

    runs = open_runs(folders)
    rows, keys, across = comparison_rows(runs), differing_keys(runs), across_clients(runs)
    sentence = verdict(runs)
    if json_:
        found = {"runs": rows, "across_clients": across, "differences": keys, "verdict": sentence}
        print(json_text(found, indent=2), end="")
        return

    from fedveil.console import print_rows, print_terms

    console = options.plain_console()
    print_rows(console, "runs", rows)
    if across:
        print_rows(console, "across clients, on their own records", across)
    if keys:
        print_rows(console, "where their recipes differ", keys)
    print_terms(console, [row["claim"] for row in rows])
    console.print(sentence, highlight=False)


def report(
    folders: Annotated[
        list[Path], Argument(metavar="RUN [RUN ...]", help="Run directories, or one sweep.")
    ],
    out: Annotated[
        Path | None,
        Option(help="An HTML file; default: report.html in the run's folder, or here for several."),
    ] = None,
    audit: Annotated[
        list[Path] | None,
        Option(help="A directory that `fedveil audit RUN --out` left; repeatable."),
    ] = None,
) -> None:
    """Write report.html again, with what an audit found, or compare runs on one page."""
    options.check_path("--out", out, writable=True)
    for path in folders:
        options.check_path("RUN", path)
    if audit and len(folders) > 1:
        raise BadInput(f"--audit is about one run and {len(folders)} are named: name one")
    print(f"written: {_write_report(folders, out, audit or [])}")


def _write_report(folders: list[Path], out: Path | None, audits: list[Path]) -> Path:
    """Write the page of one run, one sweep or several runs, and return its path.

    Raises BadInput if the file exists (`out`) or cannot be written, or an audit does not belong.
    """
    from fedveil.runs.evidence import REPORT, record_report
    from fedveil.runs.run_directory import write_atomic, write_new

    if len(folders) > 1:
        from fedveil.runs.compare import comparison_html, open_runs

        path = out or Path("report.html")
        write_new(path, comparison_html(open_runs(folders)))
        return path
    (folder,) = folders
    if (folder / "sweep.json").is_file():
        from fedveil.tuning.tuning_pages import sweep_page

        if audits:
            raise BadInput(f"--audit is about a run and {folder} holds a sweep: name a run")
        content = sweep_page(folder)
    else:
        from fedveil.audit.audit_folder import audit_section
        from fedveil.runs.report import report_html

        content = report_html(folder, [audit_section(path, folder) for path in audits])
    if out is not None:
        write_new(out, content)
        return out
    path = folder / REPORT
    try:
        if not (folder / "sweep.json").is_file():
            record_report(folder, content)
        write_atomic(path, content)
    except OSError as e:
        raise BadInput(f"{path} cannot be written: {e.strerror}; use --out") from e
    return path


def audit(
    run: Annotated[Path | None, Argument(metavar="[RUN]", help=_RUN_HELP)] = None,
    attacks: Annotated[
        str | None,
        Option(
            help="Of randomiser, sensitivity, statistics, canaries, one-run, membership, "
            "white-box, property, inversion; default: all that fit."
        ),
    ] = None,
    self_test: Annotated[
        bool, Option("--self-test", help="Audit every release of this installation.")
    ] = False,
    draws: Annotated[int, Option(help="Draws of each input of a randomiser.")] = 100_000,
    canaries: Annotated[int, Option(help="Canaries, of clients or of records.")] = 1_000,
    references: Annotated[int, Option(help="Reference models of a membership attack.")] = 16,
    property_: Annotated[
        str,
        Option(
            "--property",
            help="What is asked of clients: planted, a feature of images (thickness, slant, "
            "brightness), or COLUMN[=VALUE] of a table.",
        ),
    ] = "planted",
    seed: Annotated[int, Option(help="Seed of the audit's own draws.")] = 0,
    out: Annotated[
        Path | None,
        Option(help="Directory for figures and models' losses; resumes what is found there."),
    ] = None,
    data: options.Data = None,
    workers: options.Workers = 0,
    engine: options.Engine = None,
    address: options.Address = None,
    allow_code: options.AllowCode = False,
    quiet: options.Quiet = False,
    json_: options.Json = False,
) -> int:
    """Attack a finished run and show what is found beside its claim: exit 1 if it is violated."""
    if self_test == (run is not None):
        raise BadInput("give a run directory, or --self-test, and not both")
    if self_test and (attacks is not None or data is not None or out is not None):
        raise BadInput("--self-test audits releases alone: leave out --attacks, --data and --out")
    if seed < 0:
        raise BadInput(f"--seed is {seed}: a number from 0 on is needed")
    cluster = options.cluster_of(engine, address, workers)
    options.check_path("--out", out, writable=True)
    options.check_path("--data", data)
    options.check_path("RUN", run)
    with options.loading(quiet=quiet):
        from fedveil.audit.audit_command import AuditSettings
        from fedveil.audit.audit_command import audit as audit_run
        from fedveil.audit.randomisers import self_test as self_test_findings
        from fedveil.console import Counter, print_findings, print_leaks, print_rows, print_terms

        settings = AuditSettings(
            attacks=None if attacks is None else tuple(attacks.split(",")),
            draws=draws,
            canaries=canaries,
            references=references,
            property=property_,
            seed=seed,
            workers=workers,
            cluster=cluster,
        )
    with (
        options.exit_on_interrupt(out),
        Counter(options.plain_console(stderr=True, quiet=quiet), "steps") as counter,
    ):
        if run is None:
            findings = tuple(self_test_findings(settings.randomiser, counter.show))
            content = {"findings": [finding.to_dict() for finding in findings]}
        else:
            audited = audit_run(
                run,
                settings,
                data,
                out=out,
                allow_code=allow_code,
                on_step=lambda attack, done, of: counter.show(done, of, "", attack),
            )
            findings, content = audited.findings, audited.to_dict()
    violated = any(finding.violated for finding in findings)
    if json_:
        print(json.dumps({**content, "violated": violated}, indent=2))
        return 1 if violated else 0
    title = "self-test of every release" if run is None else str(run)
    console = options.plain_console()
    if findings:
        print_findings(console, title, findings)
    if run is not None:
        print_leaks(console, title, audited.leaks)
        print_rows(console, f"{title}: in one row", [audited.summary_row])
        for reason in audited.left_out:
            console.print(f"default: {reason}", highlight=False)
    print_terms(console, [finding.claim.short for finding in findings])
    return 1 if violated else 0


def recipes(json_: options.Json = False) -> None:
    """List the shipped recipes: what each protects, and whose paper it is."""
    from fedveil.runs.recipe import shipped_recipes

    rows = shipped_recipes()
    if json_:
        print(json.dumps(rows, indent=2))
        return

    from fedveil.console import print_rows

    print_rows(options.plain_console(), "recipes", rows)


def explain(
    name: Annotated[
        list[str] | None,
        Argument(metavar="[RECIPE | SECTION[.KEY] | TERM]", help="None: all sections and terms."),
    ] = None,
    json_: options.Json = False,
) -> None:
    """Explain a recipe, a key of recipes, or a term of claims.

    A recipe comes with the meaning of every key that it sets. A key comes with its type, its range
    and the shipped recipes that set it. A term, such as zero-out, comes with its entry in the
    glossary.
    """
    from fedveil.runs.explain import find_recipe, overview
    from fedveil.runs.glossary import find_term, look_up

    recipe = None if name is None else find_recipe(" ".join(name))
    term, part = None, None
    if name is not None:
        word = " ".join(name)
        term, part = look_up(word) if recipe is None else (find_term(word), None)
    if json_:
        meaning = {} if recipe is None else recipe.to_dict()
        meaning |= {} if part is None else asdict(part)
        meaning |= {"term": asdict(term)} if term else {}
        print(json.dumps(overview() if name is None else meaning, indent=2))
        return
    from fedveil.console import print_overview, print_part, print_recipe, print_term

    console = options.plain_console(highlight=False)
    if name is None:
        print_overview(console, overview())
    if recipe is not None:
        print_recipe(console, recipe)
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
        int, Option(help="Claims for somebody with so many clients. --epsilon is for one client.")
    ] = 1,
    json_: options.Json = False,
) -> None:
    """Solve for the one of noise, rate, rounds and epsilon that is left out (central DP)."""
    options.check_numbers(delta=delta, noise=noise, rate=rate, rounds=rounds, epsilon=epsilon)
    from fedveil.privacy.accounting.calibration import solve
    from fedveil.runs.glossary import terms_line

    answer = solve(noise=noise, rate=rate, rounds=rounds, epsilon=epsilon, delta=delta)
    answer = replace(answer, claims=tuple(claim.for_units(units) for claim in answer.claims))
    if json_:
        print(json.dumps(answer.to_dict(), indent=2))
        return
    numbers = f"noise {answer.noise:.6g}, rate {answer.rate:.6g}, rounds {answer.rounds}"
    console = options.plain_console(highlight=False)
    for line in (numbers, *map(str, answer.claims), terms_line(answer.claims)):
        console.print(line)


def ledger(
    path: Annotated[Path, Argument(help="A run directory or a ledger.db.")],
    verify: Annotated[
        bool, Option("--verify", help="Check charges, and the files of a run directory.")
    ] = False,
    head: Annotated[str | None, Option(help="HASH:LENGTH from elsewhere, for --verify.")] = None,
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
    from fedveil.console import print_statements

    print_statements(options.plain_console(highlight=False), statements)
