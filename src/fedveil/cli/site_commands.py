"""`fedveil site`: commands for the owner of a site in a federation."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from fedveil.base.errors import BadInput
from fedveil.cli import options

site = typer.Typer(
    name="site", help="For the owner of a site in a federation.", no_args_is_help=True
)

File = Annotated[Path, Argument(metavar="SITE.toml", help="A site in a federation.")]


@site.command()
def init(
    folder: Annotated[Path, Argument(metavar="OWNER", help="A new folder, for all federations.")],
    records: Annotated[list[str], Option(help="Records: a table, or a saved folder; repeatable.")],
    name: Annotated[str | None, Option(help="The site's name; default: the folder's.")] = None,
    witness: Annotated[
        Path | None,
        Option(help="A file elsewhere that remembers the ledger's end; default: beside OWNER."),
    ] = None,
) -> None:
    """Make the owner's folder: key, ledger, and a policy that refuses everything."""
    from fedveil.flower.owner import Owner

    owner = Owner.make(folder, name or folder.resolve().name, records, witness)
    print(f"written: {folder}; {folder}/policy.toml refuses every federation until you accept one")
    print(f"keep {owner.file.witness} out of backups of {folder}: it remembers the ledger's end")
    print(f"for the operator: {folder}/node.pub, {owner.fingerprint}")


@site.command()
def join(
    bundle: Annotated[Path, Argument(metavar="BUNDLE", help="The folder that the operator sent.")],
    owner: Annotated[Path, Option(metavar="OWNER", help="The folder that site init made.")],
    folder: Annotated[
        Path | None, Option(help="A new folder; default: OWNER/federations/RECIPE.")
    ] = None,
    operator: Annotated[
        str | None, Option(metavar="SHA256:...", help="The fingerprint of the operator's key.")
    ] = None,
    accept: Annotated[bool, Option("--accept", help="Accept what is shown, for scripts.")] = False,
    repeats: Annotated[
        int | None, Option(help="Turns beyond the plan's, for rounds that have to be done again.")
    ] = None,
    allow_code: options.AllowCode = False,
) -> int:
    """Print what a federation costs and whom it trusts, and join it if the owner accepts.

    Exits with 1, and writes nothing, if the owner does not accept.
    """
    with options.loading(quiet=False):
        from fedveil.flower.bundle import Bundle
        from fedveil.flower.joining import joining
        from fedveil.flower.owner import Owner

        opened = Owner.open(owner)
        read = Bundle.read(bundle)
    choices = {"operator": operator, "allow_code": allow_code, "repeats": repeats}
    with joining(opened, read, folder, **choices) as joined:  # type: ignore[arg-type]
        print("\n".join(joined.status_lines()))
        if not accept and not (sys.stdin.isatty() and typer.confirm("Accept?")):
            print("not accepted: nothing was written (--accept accepts)")
            return 1
        path = joined.accept()
    print(f"joined: {path.parent}/supernode.sh starts the site")
    return 0


@site.command()
def check(path: File, json_: options.Json = False) -> int:
    """Print what taking part would cost, whom the site trusts, and what leaves it.

    Exits with 1 if the policy refuses to take part.
    """
    with options.loading(quiet=json_):
        from fedveil.flower.site import Site
        from fedveil.flower.site_check import report_lines, site_report

        opened = Site.open(path)
        report = site_report(opened)
    print(json.dumps(report, indent=2) if json_ else "\n".join(report_lines(opened, report)))
    return 0 if report["takes_part"] else 1


@site.command()
def accept(path: File) -> None:
    """Accept the site's ledger as complete after its witness file was lost."""
    from fedveil.flower.federation_files import read_site_file
    from fedveil.flower.site_ledger import SiteLedger

    head = SiteLedger.from_site_file(read_site_file(path)).accept()
    print(f"accepted: {head.length} entries, head {head.hash}:{head.length}")


@site.command()
def doctor(path: File, json_: options.Json = False) -> int:
    """Check versions, files, ledger, policy, guard, key, certificates, clock and SuperLink.

    Exits with 1 if a check fails.
    """
    with options.loading(quiet=json_):
        from fedveil.flower.site_doctor import examine

        findings = list(examine(path))
    if json_:
        print(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        print("\n".join(map(str, findings)))
    return 1 if any(finding.passed is False for finding in findings) else 0


@site.command()
def status(
    path: File,
    json_: options.Json = False,
    serve: Annotated[
        int | None,
        Option(metavar="PORT", help="Serve numbers for Prometheus on loopback; 0: any port."),
    ] = None,
) -> None:
    """Print which runs the site took part in, what they cost, and the last lines of its log."""
    if serve is not None:
        if json_:
            raise BadInput("--serve and --json are both given: leave one out")
        with options.loading(quiet=False):
            from fedveil.flower.federation_files import read_site_file
            from fedveil.flower.site_numbers import site_families

            read_site_file(path)
        options.serve_numbers(serve, partial(site_families, path))
        return
    with options.loading(quiet=json_):
        from fedveil.flower.site_doctor import site_status, status_lines

        found = site_status(path)
    print(json.dumps(found, indent=2) if json_ else "\n".join(status_lines(found)))
