"""`fedveil compare`: what finished runs have come to."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.options import Json, check_out


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Run directories.")],
    out: Annotated[Path | None, typer.Option(help="A PNG file with the runs' curves.")] = None,
    json_: Json = False,
) -> None:
    """Put runs side by side: metrics, claims, and where their recipes differ."""
    check_out(out)
    from fedveil.runs.compare import differences, not_comparable, opened, picture, rows_of
    from fedveil.runs.disk import write_new

    runs = opened(folders)
    rows, keys, remark = rows_of(runs), differences(runs), not_comparable(runs)
    if out is not None:
        write_new(out, picture(runs))
    if json_:
        print(json.dumps({"runs": rows, "differences": keys, "remark": remark}, indent=2))
        return
    from rich.console import Console

    from fedveil.console import print_rows

    console = Console(markup=False, emoji=False)
    print_rows(console, "runs", rows)
    if keys:
        print_rows(console, "where their recipes differ", keys)
    if remark is not None:
        console.print(remark, highlight=False, soft_wrap=True)
