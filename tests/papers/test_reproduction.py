"""Items of a paper: chosen, run, resumed, and put on one page."""

import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedveil.base.errors import BadInput
from fedveil.cli import main as commands
from fedveil.papers import reproduction as papers
from fedveil.papers.reproduction import (
    PAPERS,
    Experiment,
    ExperimentScale,
    Page,
    TextTable,
    items_of,
    reproduce,
)
from fedveil.tuning.recipe_grid import axis
from fedveil.tuning.trials import Laboratory

SMALL = ("data.clients=20", "sample.size=5", "rounds=2", "engine.mode=vectorised")


def tiny(experiment):
    """A table of two cells."""
    repeat = experiment.repetitions(2, 3)
    sweep = experiment.sweep("tiny", "dp-fedavg", SMALL, [axis("client.steps=1,2")], repeat)
    rows = tuple((str(c), str(sweep.cell_mean(c, "loss"))) for c in range(2))
    return Page("Tiny", tables=[TextTable(("cell", "loss"), rows)], figures={"tiny.png": Figure()})


def other(experiment):
    """A page without a sweep."""
    return Page("Other", setting_names=[f"{experiment.choose(1, 2)}"])


ITEMS = {"tiny": tiny, "other": other}


@pytest.fixture
def miniature(monkeypatch):
    """The items of "fu" are small ones."""
    module = type("Module", (), {"ITEMS": ITEMS})
    monkeypatch.setattr(papers, "import_module", lambda name: module)


@pytest.fixture
def called(miniature, monkeypatch, capsys, tmp_path):
    """Run the command in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedveil", "reproduce", *arguments])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return ended.value.code, *capsys.readouterr()

    return call


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_every_paper_has_a_title_and_items():
    for paper in PAPERS:
        assert items_of(paper)


def test_items_come_in_the_papers_order(miniature):
    assert list(items_of("fu")) == ["tiny", "other"]
    assert list(items_of("fu", ["other", "tiny"])) == ["tiny", "other"]
    assert list(items_of("fu", ["other"])) == ["other"]


def test_the_page_and_its_figures_are_written(tmp_path):
    seen = []
    experiment = Experiment(tmp_path / "out", workers=1)
    path = reproduce("fu", ITEMS, experiment, "the command", lambda *page: seen.append(page))
    text = path.read_text()
    assert text.startswith(f"# {PAPERS['fu'][0]}\n\nMade by `the command` (fedveil ")
    assert text.index("## Tiny") < text.index("## Other")
    assert [name for name, _ in seen] == ["tiny", "other"]
    assert all(page.markdown().strip() in text for _, page in seen)
    assert (tmp_path / "out" / "tiny.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "tiny-quick-2" / "summary.csv").exists()


def test_what_is_finished_is_not_trained_again(tmp_path, monkeypatch):
    told = []
    experiment = Experiment(tmp_path, workers=1, on_trial=lambda *trial: told.append(trial))
    first = reproduce("fu", ITEMS, experiment, "c", lambda *page: None).read_bytes()
    assert [(name, done, total) for name, done, total, _ in told] == [
        ("tiny", number, 4) for number in range(1, 5)
    ]
    monkeypatch.setattr(Laboratory, "trial", pytest.fail)
    assert reproduce("fu", ITEMS, experiment, "c", lambda *page: None).read_bytes() == first


def test_an_item_that_fails_keeps_what_was_trained(tmp_path):
    def failing(experiment):
        raise BadInput("no data")

    items = {"tiny": tiny, "failing": failing}
    with pytest.raises(BadInput, match="no data"):
        reproduce("fu", items, Experiment(tmp_path / "out", workers=1), "c", lambda *page: None)
    assert (tmp_path / "out" / "tiny-quick-2" / "trials.jsonl").read_text().count("\n") == 4
    assert not (tmp_path / "out" / "fu.md").exists()


def test_an_item_that_fails_at_once_leaves_nothing(tmp_path):
    def failing(experiment):
        raise BadInput("no data")

    for folder in (tmp_path / "new" / "out", tmp_path / "there"):
        if folder.name == "there":
            folder.mkdir()
        with pytest.raises(BadInput, match="no data"):
            reproduce("fu", {"f": failing}, Experiment(folder), "c", lambda *page: None)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "there").exists()


def test_scale_and_repetitions(tmp_path):
    quick, paper = Experiment(tmp_path), Experiment(tmp_path, ExperimentScale.PAPER)
    assert (quick.choose(1, 2), paper.choose(1, 2)) == (1, 2)
    assert (quick.repetitions(3, 4), paper.repetitions(3, 4)) == (3, 4)
    assert Experiment(tmp_path, ExperimentScale.PAPER, repeat=9).repetitions(3, 4) == 9


def test_the_command(called, tmp_path):
    code, out, err = called("fu", "--repeat", "1", "--workers", "1")
    assert code == 0
    assert "## Tiny" in out
    assert err.splitlines()[-1] == "written: runs/reproduce-fu-quick/fu.md"
    page = Path("runs/reproduce-fu-quick/fu.md").read_text()
    assert "Made by `fedveil reproduce fu --scale quick --repeat 1`" in page
    code, _, err = called("fu", "--repeat", "1", "--item", "other", "--out", "x", "--quiet")
    assert (code, err) == (0, "written: x/fu.md\n")
    assert files(tmp_path / "x") == ["fu.md", "lock"]


BAD = {
    "an unknown paper": (["nothing"], "paper 'nothing' is unknown: use one of fu,"),
    "an unknown item": (["fu", "--item", "x"], "fu has no item 'x': use one of tiny, other"),
    "an unknown scale": (["fu", "--scale", "x"], "--scale is 'x': use quick or paper"),
    "no repetition": (["fu", "--repeat", "0"], "--repeat is 0"),
    "fewer than none": (["fu", "--repeat", "-2"], "--repeat is -2"),
    "negative workers": (["fu", "--workers", "-1"], "--workers is -1"),
}


@pytest.mark.parametrize(("arguments", "mentions"), BAD.values(), ids=BAD)
def test_nonsense_is_one_line_and_leaves_nothing(called, tmp_path, arguments, mentions):
    code, out, err = called(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert mentions in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
