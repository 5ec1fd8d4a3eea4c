"""`Page`: a table or figure of a paper, the published numbers beside the measured ones."""

from dataclasses import dataclass, field

from matplotlib.figure import Figure


@dataclass(frozen=True)
class TextTable:
    """Cells as text, under their headers."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headers):
                raise AssertionError(f"{row} does not fit under {self.headers}")

    def markdown(self) -> str:
        """As a Markdown table."""
        lines = [self.headers, tuple("---" for _ in self.headers), *self.rows]
        text = "\n".join(
            "| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines
        )
        return f"{self.title}\n\n{text}" if self.title else text


@dataclass(frozen=True)
class PaperStatement:
    """A statement of the paper, and whether it is confirmed here."""

    statement: str
    seen: bool
    evidence: str

    def markdown(self) -> str:
        """As a list item."""
        verdict = "confirmed" if self.seen else "not confirmed"
        return f"- **{verdict}**: {self.statement} {self.evidence}"


@dataclass
class Page:
    """One item of a paper.

    `left_open` are the settings that the paper does not give, with our choice; `figures` are by the
    names of their files; `notes` say what deviates and why.
    """

    title: str
    settings: list[str] = field(default_factory=list)
    left_open: list[tuple[str, str]] = field(default_factory=list)
    tables: list[TextTable] = field(default_factory=list)
    findings: list[PaperStatement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)

    def markdown(self) -> str:
        """The whole item."""
        parts = [f"## {self.title}", *self.settings]
        if self.left_open:
            chosen = [f"- {what}: {choice}" for what, choice in self.left_open]
            parts.append("Left open by the paper, chosen here:\n\n" + "\n".join(chosen))
        parts += [table.markdown() for table in self.tables]
        parts += [f"![{self.title}]({name})" for name in self.figures]
        if self.findings:
            parts.append("\n".join(finding.markdown() for finding in self.findings))
        return "\n\n".join([*parts, *self.notes]) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
