"""The ledger on a page: what was charged, in stretches of rounds, and whether it is whole."""

from collections.abc import Sequence

from fedveil.privacy.accounting.events import event_text, from_dict
from fedveil.privacy.ledger.file import Charge
from fedveil.runs.report.run_contents import RunContents
from fedveil.web.html import Content, Markup, tag
from fedveil.web.layout import section, table

_HIDDEN = (
    "When rounds were charged is not shown: how long a round takes grows with its cohort, which is "
    "secret with secure noise."
)


def ledger_section(contents: RunContents) -> Markup:
    """The ledger's problems, its verification, the charges, and what is left."""
    said: list[Content] = [tag("p", trouble, class_="warn") for trouble in contents.trouble]
    if contents.verified:
        said.append(tag("p", f"Verified when this page was written: {contents.verified}."))
    statement = contents.statement
    if statement is not None:
        rows = charge_rows(statement.charges, times=not contents.secure)
        said.append(table(rows, f"Charges of {statement.run}", wide=True) if rows else None)
        said.append(tag("p", f"{_capital(statement.remainder())}."))
        said.append(tag("p", _HIDDEN, class_="note") if contents.secure and rows else None)
    said.append(
        tag(
            "p",
            "This page is drawn from the run's files. They are covered by the ledger, the page is "
            "not: check them with ",
            tag("code", f"fedveil ledger {contents.folder} --verify"),
            " and draw it again with ",
            tag("code", f"fedveil report {contents.folder}"),
            ".",
            class_="note",
        )
    )
    return section("Ledger", *said, id="ledger")


def charge_rows(charges: Sequence[Charge], *, times: bool) -> list[dict[str, Content]]:
    """Charges of the same event in a stretch of rounds as one row."""
    stretches: list[list[Charge]] = []
    for charge in sorted(charges, key=lambda c: (c.covers, c.round, c.attempt)):
        last = stretches[-1][-1] if stretches else None
        if last is not None and (last.covers, last.event) == (charge.covers, charge.event):
            stretches[-1].append(charge)
        else:
            stretches.append([charge])
    return [_row(stretch, times=times) for stretch in stretches]


def _row(stretch: Sequence[Charge], *, times: bool) -> dict[str, Content]:
    first, last = stretch[0], stretch[-1]
    again = sum(charge.attempt > 0 for charge in stretch)
    row: dict[str, Content] = {
        "rounds": str(first.round) if first is last else f"{first.round} to {last.round}",
        "charges": len(stretch),
        "for": first.covers,
        "each charge": event_text(from_dict(first.event)),
        "repeated": again,
    }
    if times:
        row |= {"first at": first.charged_at, "last at": last.charged_at}
    return row


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
