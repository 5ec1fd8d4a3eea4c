"""Reproducing a paper: its items, the sweeps they run on, and the page that they make.

An item is a table or figure of a paper. It runs sweeps in a directory, which are resumed after an
interruption, and returns a `Page` with the published numbers beside the measured ones.
"""

import importlib.metadata
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedveil.base.errors import BadInput
from fedveil.runs.run_directory import locked, write_atomic
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.tuning.figures import png
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.sweep import Sweep, make_folder
from fedveil.tuning.trials import Laboratory

PAPERS = {
    "fu": ("Fu et al. 2021: tuning the numbers of iterations", "fu", "fu_cnn"),
    "clip-decay": ("Clip decay: schedules of the clip for LDP-SGD", "clip_decay"),
    "ldp-fl": ("Sun et al. 2021: LDP-FL", "ldp_fl"),
    "naseri": ("Naseri et al. 2022: local and central DP", "naseri", "naseri_backdoors"),
}
"""The title of each paper, and the modules that list its experiments in `ITEMS`."""


def read_tables(name: str) -> dict[str, Any]:
    """Return the content of NAME.toml beside this file: settings of a paper, texts of its pages."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class TextTable:
    """A table of texts. AssertionError if a row has another number of cells than the headers."""

    headers: tuple[str, ...]
    text_rows: Sequence[tuple[str, ...]]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.text_rows:
            assert len(row) == len(self.headers), f"{row} does not fit under {self.headers}"

    def markdown(self) -> str:
        """Return a Markdown table below its title.

        Pipes are escaped, line breaks in cells are spaces.
        """
        text = f"{self.title}\n\n" if self.title else ""
        for line in (self.headers, ["---"] * len(self.headers), *self.text_rows):
            cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in line]
            text += f"| {' | '.join(cells)} |\n"
        return text.removesuffix("\n")


@dataclass(frozen=True)
class PaperStatement:
    """A statement of the paper, whether our numbers confirm it, and the evidence in words."""

    statement: str
    confirmed: bool
    evidence: str

    def markdown(self) -> str:
        """Return a Markdown list item with the verdict in bold, the statement and the evidence."""
        verdict = "confirmed" if self.confirmed else "not confirmed"
        return f"- **{verdict}**: {self.statement} {self.evidence}"


@dataclass
class Page:
    """The page of one item of a paper, which an item fills and `reproduce` writes.

    Attributes:
        title: The heading.
        setting_names: What was done, in paragraphs.
        left_open: Pairs (setting that the paper does not give, our choice).
        tables: Published and measured numbers.
        statements: Statements of the paper, and whether they are confirmed.
        page_notes: Deviations from the paper, and reasons for them.
        figures: Figures by file name.
    """

    title: str
    setting_names: list[str] = field(default_factory=list)
    left_open: list[tuple[str, str]] = field(default_factory=list)
    tables: list[TextTable] = field(default_factory=list)
    statements: list[PaperStatement] = field(default_factory=list)
    page_notes: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)

    def add_table(
        self, headers: tuple[str, ...], rows: Sequence[tuple[str, ...]], title: str = ""
    ) -> None:
        """Append a table to `tables`. AssertionError if a row does not fit the headers."""
        self.tables.append(TextTable(headers, rows, title))

    def add_statement(self, statement: str, confirmed: bool, evidence: str) -> None:
        """Append a statement of the paper to `statements`.

        Args:
            statement: The statement, a sentence.
            confirmed: Whether our numbers confirm it.
            evidence: The rule and our numbers, in sentences.
        """
        self.statements.append(PaperStatement(statement, confirmed, evidence))

    def add_left_open(self, choices: Sequence[Sequence[str]], **values: object) -> None:
        """Append pairs (setting, our choice) to `left_open`, with `values` for names in braces."""
        self.left_open += [(name, choice.format(**values)) for name, choice in choices]

    def markdown(self) -> str:
        """Return the page as Markdown that links its figures by file name. No figure is written."""
        parts = [f"## {self.title}", *self.setting_names]
        if self.left_open:
            chosen = [f"- {setting}: {choice}" for setting, choice in self.left_open]
            parts.append("Left open by the paper, chosen here:\n\n" + "\n".join(chosen))
        parts += [table.markdown() for table in self.tables]
        parts += [f"![{self.title}]({name})" for name in self.figures]
        if self.statements:
            parts.append("\n".join(statement.markdown() for statement in self.statements))
        return "\n\n".join([*parts, *self.page_notes]) + "\n"


class ExperimentScale(StrEnum):
    """The size of experiments.

    Quick takes minutes on two cores. Paper has the paper's sizes as far as the data allow.
    """

    QUICK = "quick"
    PAPER = "paper"


@dataclass
class Experiment:
    """The settings under which items run: directory, scale, repetitions, data and processes.

    Attributes:
        out: The directory of the sweeps.
        scale: The size of the sweeps.
        repeat: Repetitions. None leaves the number to each item.
        root: The folder with published data sets.
        workers: Processes, 0 for one per core.
        on_trial: Called with (sweep, trials done, trials in all, name of the finished cell).
        cluster: The Ray cluster to compute on. None computes on this machine.
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
        """Return whether the scale is quick."""
        return self.scale is ExperimentScale.QUICK

    def choose(self, quick: int, paper: int) -> int:
        """Return the first number at quick scale, and the second at paper scale."""
        return quick if self.is_quick else paper

    def repetitions(self, quick: int, paper: int) -> int:
        """Return the number of repetitions: `repeat` if it is set, otherwise that of the scale."""
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
        """Run a grid in the directory NAME-SCALE-REPEAT of `out`, or resume it, and return it.

        Trials that are saved there are not trained again. BadInput if the directory holds another
        sweep.

        Args:
            name: The first part of the directory's name.
            recipe: The shipped recipe of all cells.
            settings: Overrides `key=value` of the recipe.
            axes: The axes of the grid. Without axes there is one cell.
            repeat: Repetitions of each cell.
            curves: Whether test metrics are kept during training, for `learning_curve`.
        """
        if curves not in self._laboratories:  # records are read and modes are measured once
            self._laboratories[curves] = Laboratory(
                self.root, with_curves=curves, workers=self.workers, cluster=self.cluster
            )
        folder = self.out / f"{name}-{self.scale}-{repeat}"
        sweep = Sweep.in_folder(folder, recipe, settings, axes, repeat, self._laboratories[curves])
        sweep.run(lambda done, total, cell: self.on_trial(name, done, total, cell))
        return sweep

    def try_choices(
        self, name: str, recipe: str, settings: Sequence[str], axis: Axis, metric: str
    ) -> tuple[list[float], str]:
        """Run each choice of `axis` once, and return (their test metrics, all of them as text).

        The metrics are in the order of the choices, and infinite for a diverged training. The other
        arguments are those of `sweep`.
        """
        sweep = self.sweep(name, recipe, settings, [axis], 1)
        means = [sweep.cell_mean(cell, metric) for cell in range(len(sweep.cells))]
        texts = [f"{choice}: {mean}" for choice, mean in zip(axis.choices, means, strict=True)]
        return [mean.value for mean in means], ", ".join(texts)


Item = Callable[[Experiment], Page]
"""Runs the sweeps of one table or figure, and returns its page."""


def items_of(paper: str, wanted: Sequence[str] = ()) -> dict[str, Item]:
    """Return the items of a paper by name, in the paper's order.

    An unknown paper or item is BadInput. The modules of the paper are imported.

    Args:
        paper: A key of `PAPERS`.
        wanted: Names of items, in any order. () means all.
    """
    if paper not in PAPERS:
        raise BadInput(f"paper {paper!r} is unknown: use one of {', '.join(PAPERS)}")
    every: dict[str, Item] = {}
    for module in PAPERS[paper][1:]:
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
    """Run the items of a paper, and write PAPER.md and the figures into `experiment.out`.

    Figures are written after each item, and PAPER.md after the last.

    Args:
        paper: The name of the paper.
        items: Items by name.
        experiment: Where and how large.
        command: The command line that the page names as its origin.
        on_page: Called with (name, page) after each item.

    Returns:
        The path of PAPER.md.

    Raises:
        BadInput: The directory cannot be made or is in use, or an item refuses. Directories that
            were made here are removed again if nothing was written into them.
    """
    out = experiment.out
    made = [path for path in (out, *out.parents) if not path.exists()]
    make_folder(out)
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("fedveil", "torch"))
    text = f"# {PAPERS[paper][0]}\n\nMade by `{command}` ({versions}).\n\n"
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
