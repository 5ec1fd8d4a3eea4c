"""Reproducing a paper: its items by name, and the page that they make."""

import importlib.metadata
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from fedveil.base.errors import BadInput
from fedveil.papers.experiment import Experiment, Item
from fedveil.papers.paper_page import Page
from fedveil.runs.run_directory import locked, write_atomic
from fedveil.tuning.figures import png

PAPERS = {
    "fu": ("fu", "fu_cnn"),
    "clip-decay": ("clip_decay",),
    "ldp-fl": ("ldp_fl",),
    "naseri": ("naseri", "naseri_backdoors", "naseri_privacy"),
}
"""The modules with a paper's items."""

TITLES = {
    "fu": "Fu et al. 2021: tuning the numbers of iterations",
    "clip-decay": "Clip decay: schedules of the clip for LDP-SGD",
    "ldp-fl": "Sun et al. 2021: LDP-FL",
    "naseri": "Naseri et al. 2022: local and central DP",
}


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
    made = [p for p in (experiment.out, *experiment.out.parents) if not p.exists()]
    try:
        experiment.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"--out {experiment.out} cannot be made: {e.strerror}") from e
    try:
        return _reproduce(paper, items, experiment, command, on_page)
    except BadInput:
        if made and {path.name for path in experiment.out.iterdir()} <= {"lock"}:
            (experiment.out / "lock").unlink(missing_ok=True)
            for path in made:
                path.rmdir()
        raise


def _reproduce(
    paper: str,
    items: dict[str, Item],
    experiment: Experiment,
    command: str,
    on_page: Callable[[str, Page], None],
) -> Path:
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("fedveil", "torch"))
    text = f"# {TITLES[paper]}\n\nMade by `{command}` ({versions}).\n\n"
    with locked(experiment.out):
        for name, item in items.items():
            page = item(experiment)
            for file, figure in page.figures.items():
                write_atomic(experiment.out / file, png(figure))
            text += page.markdown() + "\n"
            on_page(name, page)
        path = experiment.out / f"{paper}.md"
        write_atomic(path, (text.rstrip() + "\n").encode())
    return path
