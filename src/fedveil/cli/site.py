"""`fedveil site check` and `fedveil site accept`: for the owner of a site."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.loading import loading
from fedveil.cli.options import Json

app = typer.Typer(
    name="site", help="For the owner of a site in a federation.", no_args_is_help=True
)

File = Annotated[Path, typer.Argument(metavar="SITE.toml", help="What the owner says of the site.")]


@app.command()
def check(path: File, json_: Json = False) -> int:
    """Tell what taking part would cost, whom one trusts, and what leaves the site.

    Exits with 1 if the policy refuses to take part.
    """
    with loading(quiet=json_):
        from fedveil.flower.site import Site
        from fedveil.flower.site_check import checked

        report = checked(Site.open(path))
    print(json.dumps(report.to_dict(), indent=2) if json_ else "\n".join(report.lines()))
    return 1 if report.objections else 0


@app.command()
def accept(path: File) -> None:
    """Take the site's ledger as it is for whole, after its witness was lost."""
    from fedveil.flower.site_file import read_site_file
    from fedveil.flower.site_ledger import ledger_of

    head = ledger_of(read_site_file(path)).accept()
    print(f"accepted: {head.length} entries, head {head.hash}:{head.length}")
