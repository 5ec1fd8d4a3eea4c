"""Reproducing a paper: its items, the sweeps they run on, and the page that they make.

An item is a table or figure of a paper. It runs sweeps in a directory, which are resumed after an
interruption, and returns a `Page` with the published numbers beside the measured ones.
"""

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path

from matplotlib.figure import Figure

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import budgeted
from fedveil.runs.run_directory import locked, write_atomic
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.tuning.figures import png
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import Mean, mean_of
from fedveil.tuning.sweep import Sweep
from fedveil.tuning.trials import Laboratory

PAPERS = {
    "fu": ("fu", "fu_cnn"),
    "clip-decay": ("clip_decay",),
    "ldp-fl": ("ldp_fl",),
    "naseri": ("naseri", "naseri_backdoors"),
}
"""The modules with a paper's items."""

TITLES = {
    "fu": "Fu et al. 2021: tuning the numbers of iterations",
    "clip-decay": "Clip decay: schedules of the clip for LDP-SGD",
    "ldp-fl": "Sun et al. 2021: LDP-FL",
    "naseri": "Naseri et al. 2022: local and central DP",
}


@dataclass(frozen=True)
class TextTable:
    """Cells as text, under their headers."""

    headers: tuple[str, ...]
    text_rows: Sequence[tuple[str, ...]]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.text_rows:
            if len(row) != len(self.headers):
                raise AssertionError(f"{row} does not fit under {self.headers}")

    def markdown(self) -> str:
        """As a Markdown table."""
        text = f"{self.title}\n\n" if self.title else ""
        for line in (self.headers, ["---"] * len(self.headers), *self.text_rows):
            cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in line]
            text += f"| {' | '.join(cells)} |\n"
        return text.removesuffix("\n")


@dataclass(frozen=True)
class PaperStatement:
    """A statement of the paper, whether it is confirmed here, and by what."""

    statement: str
    confirmed: bool
    evidence: str

    def markdown(self) -> str:
        """As a list item."""
        verdict = "confirmed" if self.confirmed else "not confirmed"
        return f"- **{verdict}**: {self.statement} {self.evidence}"


@dataclass
class Page:
    """One item of a paper.

    Attributes:
        title: Its heading.
        settings: What was done, in paragraphs.
        left_open: The settings that the paper does not give, with our choice.
        tables: Published and measured numbers.
        statements: What the paper says, and whether it is confirmed.
        page_notes: What deviates, and why.
        figures: By the names of their files.
    """

    title: str
    settings: list[str] = field(default_factory=list)
    left_open: list[tuple[str, str]] = field(default_factory=list)
    tables: list[TextTable] = field(default_factory=list)
    statements: list[PaperStatement] = field(default_factory=list)
    page_notes: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)

    def add_table(
        self, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]], title: str = ""
    ) -> None:
        """Add a table."""
        self.tables.append(TextTable(headers, rows, title))

    def add_statement(self, statement: str, confirmed: bool, evidence: str) -> None:
        """Add a statement of the paper, and whether it is confirmed."""
        self.statements.append(PaperStatement(statement, confirmed, evidence))

    def markdown(self) -> str:
        """The whole item."""
        parts = [f"## {self.title}", *self.settings]
        if self.left_open:
            chosen = [f"- {setting}: {choice}" for setting, choice in self.left_open]
            parts.append("Left open by the paper, chosen here:\n\n" + "\n".join(chosen))
        parts += [table.markdown() for table in self.tables]
        parts += [f"![{self.title}]({name})" for name in self.figures]
        if self.statements:
            parts.append("\n".join(statement.markdown() for statement in self.statements))
        return "\n\n".join([*parts, *self.page_notes]) + "\n"


class ExperimentScale(StrEnum):
    """Minutes on two cores, or the paper's sizes as far as the data at hand allow."""

    QUICK = "quick"
    PAPER = "paper"


@dataclass
class Experiment:
    """Where the sweeps of items are stored, how large they are and how often they are repeated.

    Attributes:
        out: The directory of the sweeps.
        scale: Their size.
        repeat: Repetitions, None for what an item chooses for its scale.
        root: The folder with published data sets.
        workers: Processes, 0 for one per core.
        on_trial: Called with sweep, trials done, trials in all, and the cell just finished.
        cluster: The Ray cluster to compute on, if any.
    """

    out: Path
    scale: ExperimentScale = ExperimentScale.QUICK
    repeat: int | None = None
    root: Path | None = None
    workers: int = 0
    on_trial: Callable[[str, int, int, str], None] = lambda sweep, done, total, name: None
    cluster: RayCluster | None = None
    _laboratories: dict[bool, Laboratory] = field(default_factory=dict, repr=False)

    @property
    def is_quick(self) -> bool:
        """Whether the scale is that of minutes."""
        return self.scale is ExperimentScale.QUICK

    def choose(self, quick: int, paper: int) -> int:
        """A number that depends on the scale."""
        return quick if self.is_quick else paper

    def repetitions(self, quick: int, paper: int) -> int:
        """How often to repeat: as the user wants, or what the scale allows."""
        return self.repeat or self.choose(quick, paper)

    def sweep(
        self,
        name: str,
        recipe: str,
        settings: Sequence[str],
        axes: Sequence[Axis],
        repeat: int,
        *,
        curves: bool = False,
    ) -> Sweep:
        """Run a grid of `recipe` with `settings`, in a directory of its own, and return it."""
        if curves not in self._laboratories:  # records are read and modes are measured once
            self._laboratories[curves] = Laboratory(
                self.root, curves=curves, workers=self.workers, cluster=self.cluster
            )
        folder = self.out / f"{name}-{self.scale}-{repeat}"
        sweep = Sweep.in_folder(folder, recipe, settings, axes, repeat, self._laboratories[curves])
        sweep.run(lambda done, total, cell: self.on_trial(name, done, total, cell))
        return sweep


Item = Callable[[Experiment], Page]


def items_of(paper: str, wanted: Sequence[str] = ()) -> dict[str, Item]:
    """The items of a paper, all of them or those that are `wanted`, in the paper's order."""
    if paper not in PAPERS:
        raise BadInput(f"paper {paper!r} is unknown: use one of {', '.join(PAPERS)}")
    every: dict[str, Item] = {}
    for module in PAPERS[paper]:
        every |= import_module(f"fedveil.papers.{module}").ITEMS
    for name in wanted:
        if name not in every:
            raise BadInput(f"{paper} has no item {name!r}: use one of {', '.join(every)}")
    return {name: item for name, item in every.items() if not wanted or name in wanted}


def reproduce(
    paper: str,
    items: dict[str, Item],
    experiment: Experiment,
    command: str,
    on_page: Callable[[str, Page], None],
) -> Path:
    """Run the items, write one page with their figures, and return its path.

    What the items refuse at once, for want of data, leaves nothing behind.
    """
    out = experiment.out
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"--out {out} cannot be made: {e.strerror}") from e
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("fedveil", "torch"))
    text = f"# {TITLES[paper]}\n\nMade by `{command}` ({versions}).\n\n"
    try:
        with locked(out):
            for name, item in items.items():
                page = item(experiment)
                for file, figure in page.figures.items():
                    write_atomic(out / file, png(figure))
                text += page.markdown() + "\n"
                on_page(name, page)
            write_atomic(out / f"{paper}.md", (text.rstrip() + "\n").encode())
    except BadInput:
        if made and {path.name for path in out.iterdir()} <= {"lock"}:
            (out / "lock").unlink(missing_ok=True)
            for path in made:
                path.rmdir()
        raise
    return out / f"{paper}.md"


def percents(sweep: Sweep, cell: int, metric: str = "accuracy") -> list[float]:
    """A metric of each repetition of a cell, in percent."""
    return [100 * outcome.test_metrics[metric] for outcome in sweep.outcomes(cell)]


def percent(sweep: Sweep, cell: int, metric: str = "accuracy") -> Mean:
    """The mean of a metric of a cell, in percent."""
    return mean_of(percents(sweep, cell, metric))


def mean_lines(sweep: Sweep, length: int, metric: str) -> list[list[Mean]]:
    """The cells' means, `length` of them to a line."""
    means = [sweep.cell_mean(c, metric) for c in range(len(sweep.cells))]
    return [means[i : i + length] for i in range(0, len(means), length)]


def learning_curve(
    sweep: Sweep, cell: int, metric: str, times: float = 1
) -> tuple[list[int], list[Mean]]:
    """The rounds in which a cell was measured, and the means then, each number `times` so much."""
    curves = [outcome.test_curve for outcome in sweep.outcomes(cell)]
    rounds = [round for round, _ in curves[0]]
    return rounds, [mean_of([times * c[i][1][metric] for c in curves]) for i in range(len(rounds))]


def strict_claim(sweep: Sweep, cell: int) -> str:
    """What a cell's reports are worth strictly."""
    plan = sweep.prepared[cell].plan
    strict = [claim for claim in plan.claims(plan.permitted) if not claim.as_published]
    return strict[0].short if strict else "nothing claimed"


def claim_of(sweep: Sweep) -> PrivacyClaim:
    """The claim of the first cell that makes one, with the terms of its budgets' epsilons."""
    claims = (budgeted(prepared.shown_claims) for prepared in sweep.prepared)
    return next(claim for claim in claims if claim is not None)


def meaning(*claims: PrivacyClaim) -> str:
    """What a page's epsilons mean where no other words stand beside them."""
    return "Every epsilon here, unless it says otherwise: " + "; ".join(
        f"epsilon {words}" for words in dict.fromkeys(claim.full_terms for claim in claims)
    )
