"""`fedveil evaluate`, `predict`, `compare` and `report`: commands on finished runs."""

from pathlib import Path
from typing import Annotated

import typer

from fedveil.base.errors import BadInput
from fedveil.cli.options import AllowCode, Json, check_out, check_path

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run that has ended.")]


def evaluate(
    run: Run,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A table with targets; or the folder with published data sets, for their test "
            "split; default: the recipe's own test split."
        ),
    ] = None,
    allow_code: AllowCode = False,
    json_: Json = False,
) -> None:
    """Measure a run's model on a table of your own, or on its test split again."""
    check_path("--data", data)
    from fedveil.runs.opened_run import OpenedRun, measure_run
    from fedveil.runs.run_directory import json_text

    metrics = measure_run(OpenedRun.at(run, allow_code=allow_code), data)
    if json_:
        print(json_text(metrics, indent=2), end="")
        return
    for name, value in metrics.items():
        print(f"{name} {value:.6g}")


def predict(
    run: Run,
    rows: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A .csv or .parquet table, or .npy records.")
    ],
    out: Annotated[Path | None, typer.Option(help="A CSV file; default: the screen.")] = None,
    allow_code: AllowCode = False,
) -> None:
    """Predict rows with a run's model: one line of CSV for each, labels as the table has them."""
    check_out(out)
    check_path("INPUT", rows)
    from fedveil.runs.opened_run import OpenedRun, predictions_csv
    from fedveil.runs.run_directory import write_new

    text = predictions_csv(OpenedRun.at(run, allow_code=allow_code), rows)
    if out is None:
        print(text, end="")
    else:
        write_new(out, text.encode())


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Run directories.")],
    json_: Json = False,
) -> None:
    """Put runs side by side: metrics, claims, and where their recipes differ."""
    from fedveil.runs.compare import (
        across_clients,
        differing_keys,
        not_comparable,
        opened,
        rows_of,
    )
    from fedveil.runs.run_directory import json_text

    runs = opened(folders)
    rows, keys, remark = rows_of(runs), differing_keys(runs), not_comparable(runs)
    across = across_clients(runs)
    if json_:
        comparison = {"runs": rows, "across_clients": across, "differences": keys, "remark": remark}
        print(json_text(comparison, indent=2), end="")
        return
    from rich.console import Console

    from fedveil.console import print_rows, print_terms

    console = Console(markup=False, emoji=False)
    print_rows(console, "runs", rows)
    if across:
        print_rows(console, "across clients, on their own records", across)
    if keys:
        print_rows(console, "where their recipes differ", keys)
    if remark is not None:
        console.print(remark, highlight=False, soft_wrap=True)
    print_terms(console, [row["claim"] for row in rows])


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Run directories, or one sweep.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="An HTML file; default: report.html in the run's directory, or here for several."
        ),
    ] = None,
    audit: Annotated[
        list[Path] | None,
        typer.Option(help="A directory that `fedveil audit RUN --out` left; repeatable."),
    ] = None,
) -> None:
    """Write report.html again, with what an audit found, or compare runs on one page."""
    check_out(out)
    for path in folders:
        check_path("RUN", path)
    if audit and len(folders) > 1:
        raise BadInput(f"--audit is about one run and {len(folders)} are named: name one")
    print(f"written: {_written(folders, out, audit or [])}")


def _written(folders: list[Path], out: Path | None, audits: list[Path]) -> Path:
    from fedveil.runs.run_directory import write_atomic, write_new

    if len(folders) > 1:
        from fedveil.runs.compare import comparison_html, opened

        path = out or Path("report.html")
        write_new(path, comparison_html(opened(folders)))
        return path
    (folder,) = folders
    if (folder / "sweep.json").is_file():
        from fedveil.tuning.sweep_page import sweep_page

        if audits:
            raise BadInput(f"--audit is about a run and {folder} holds a sweep: name a run")
        content = sweep_page(folder)
    else:
        from fedveil.audit.audit_folder import audit_section
        from fedveil.runs.report import report_of

        content = report_of(folder, [audit_section(path, folder) for path in audits])
    if out is not None:
        write_new(out, content)
        return out
    path = folder / "report.html"
    try:
        write_atomic(path, content)
    except OSError as e:
        raise BadInput(f"{path} cannot be written: {e.strerror}; use --out") from e
    return path
