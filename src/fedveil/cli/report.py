"""`fedveil report`: the page of a run or of a sweep, written again, or runs side by side."""

from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import check_out, check_path
from fedveil.errors import BadInput


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
    from fedveil.runs.disk import write_atomic, write_new

    if len(folders) > 1:
        from fedveil.runs.compare import opened
        from fedveil.runs.report.comparison import comparison_page

        path = out or Path("report.html")
        write_new(path, comparison_page(opened(folders)))
        return path
    (folder,) = folders
    if (folder / "sweep.json").is_file():
        from fedveil.tuning.sweep_page import sweep_page

        if audits:
            raise BadInput(f"--audit is about a run and {folder} holds a sweep: name a run")
        content = sweep_page(folder)
    else:
        from fedveil.audit.audit_section import audit_section
        from fedveil.runs.report.page import run_page
        from fedveil.runs.report.seen import Seen

        content = run_page(Seen.at(folder), [audit_section(path, folder) for path in audits])
    if out is not None:
        write_new(out, content)
        return out
    path = folder / "report.html"
    try:
        write_atomic(path, content)
    except OSError as e:
        raise BadInput(f"{path} cannot be written: {e.strerror}; use --out") from e
    return path
