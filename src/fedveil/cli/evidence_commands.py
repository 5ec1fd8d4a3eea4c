"""`fedveil evidence` and `verify`: what the sites of a federation have signed of its run."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedveil.cli import options


def evidence(
    run: Annotated[
        Path, Argument(metavar="RUN", help="The directory of a federation's run, at the server.")
    ],
    bundle: Annotated[Path, Argument(metavar="BUNDLE.zip", help="A new file.")],
) -> None:
    """Pack recipe, claims, ledger and the sites' signatures of it into one file for auditors."""
    options.check_path("RUN", run)
    options.check_path("BUNDLE.zip", bundle, writable=True)
    from fedveil.flower.evidence_pack import pack_evidence

    print(pack_evidence(run, bundle))


def verify(
    bundle: Annotated[
        Path, Argument(metavar="BUNDLE.zip", help="What fedveil evidence has written.")
    ],
    site: Annotated[
        Path | None,
        Option(metavar="LEDGER", help="A site's ledger folder, or its owner's folder."),
    ] = None,
    absent: Annotated[
        list[str] | None,
        Option(metavar="SITE", help="A site that need not have signed the end; repeatable."),
    ] = None,
) -> None:
    """Check what fedveil evidence has written: exit 0 if everything holds, 2 if anything does not.

    Needs neither the run nor its ledger. Entries that are missing at the end are found only with a
    site's own ledger (--site).
    """
    options.check_path("BUNDLE.zip", bundle)
    options.check_path("--site", site)
    from fedveil.flower.evidence_check import verify_evidence

    print(verify_evidence(bundle, site, tuple(absent or ())))
