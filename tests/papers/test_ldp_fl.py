import dataclasses
from pathlib import Path

import pytest

from fedveil.papers import ldp_fl
from fedveil.papers.experiment import Experiment, Scale
from fedveil.papers.ldp_fl import PAPER, Study
from fedveil.papers.page import Page
from fedveil.planning.grid import cells
from fedveil.planning.trials import Laboratory

MNIST = PAPER["mnist"]


def small() -> Study:
    """The MNIST study on the embedded digits, with few clients and rounds."""
    paper = dataclasses.replace(MNIST, data="digits", title="Digits", clients=40, rounds=2)
    return Study(
        paper,
        "softmax",
        clients=40,
        records=400,
        rounds=2,
        local=(
            "local.epochs=none",
            "local.steps=2",
            "local.batch=0",
            "local.lr=1.0",
            "engine.mode=vectorised",
        ),
        fixed=0.15,
        start=0.15,
        epsilons=("0.1", "1"),
        populations=(20, 40),
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ldp_fl, "studies", lambda experiment: [small()])
        experiment = Experiment(tmp_path_factory.mktemp("ldp-fl"), repeat=2, workers=1)
        return {name: item(experiment) for name, item in ldp_fl.ITEMS.items()}


def column(page: Page, table: int, header: str) -> list[str]:
    """The first column of that name."""
    found = page.tables[table]
    return [row[found.headers.index(header)] for row in found.rows]


def test_every_row_of_every_page_has_a_measured_accuracy(pages: dict[str, Page]) -> None:
    rows = {name: [len(table.rows) for table in page.tables] for name, page in pages.items()}

    assert rows == {
        "epsilon": [1, 2],
        "clients": [2],
        "fraction": [3],
        "rounds": [2],
        "table1": [2],
    }
    for page in pages.values():
        assert all(any("+-" in cell for cell in row) for t in page.tables for row in t.rows)


def test_published_numbers_stand_beside_the_runs_they_belong_to(pages: dict[str, Page]) -> None:
    assert column(pages["epsilon"], 0, "accuracy, paper") == ["96.24"]
    assert column(pages["epsilon"], 0, "below noise-free, paper") == ["0.97"]
    assert column(pages["epsilon"], 1, "accuracy, paper") == ["-", "96.24"]
    assert column(pages["clients"], 0, "accuracy, paper") == ["-", "96.24"]
    assert column(pages["rounds"], 0, "accuracy, paper") == ["-", "96.24"]
    assert column(pages["fraction"], 0, "accuracy, paper") == ["-"] * 3
    assert column(pages["table1"], 0, "fixed, paper") == ["96.34", "96.39"]
    assert column(pages["table1"], 0, "adaptive, paper") == ["96.06", "96.11"]


def test_the_difference_is_ours_less_theirs(pages: dict[str, Page]) -> None:
    here = float(column(pages["epsilon"], 1, "weights, here")[1].split()[0])
    difference = float(column(pages["epsilon"], 1, "difference")[1])

    assert difference == pytest.approx(here - 96.24, abs=0.02)


def test_what_a_client_spends_is_composed_over_weights_and_rounds(pages: dict[str, Page]) -> None:
    weights = 650
    assert column(pages["epsilon"], 1, "epsilons added up") == ["130", "1,300"]
    assert column(pages["rounds"], 0, "epsilons added up") == [f"{weights}", f"{2 * weights:,}"]
    for page in pages.values():
        table = page.tables[-1]
        for row in table.rows:
            shuffled, alone, added = (float(cell.replace(",", "")) for cell in row[-3:])
            assert 1 < shuffled <= alone <= added


def test_fewer_reports_hide_less(pages: dict[str, Page]) -> None:
    spent = [float(x) for x in column(pages["fraction"], 0, ldp_fl._READINGS[0])]

    assert spent == sorted(spent, reverse=True)
    assert spent[0] > spent[-1]


def test_pages_have_figures_and_what_was_left_open(pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        assert list(page.figures) == ([] if name == "table1" else [f"ldp-fl-{name}.png"])
        assert all(png.startswith(b"\x89PNG") for png in page.figures.values())
        assert page.left_open
        assert "Quick scale" in page.markdown()


def test_readings_are_those_of_the_plan() -> None:
    cell = cells("ldp-fl", ["data.clients=100", "shuffle.minimum=100", "rounds=1"], [])[0]
    shuffled, alone, added = ldp_fl.readings(Laboratory().prepare(cell).plan, 1)

    assert shuffled < alone < added == 650


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ({"0.1": 20.0, "0.5": 86.1, "1": 90.0}, True),
        ({"0.1": 20.0, "0.5": 85.9, "1": 90.0}, False),
        ({"0.5": 80.0, "1": 80.0}, False),  # flat, and low
        ({"0.3": 20.0, "1": 90.0}, True),  # at the threshold nothing is said
    ],
)
def test_accuracy_stays_high(accuracies: dict[str, float], expected: bool) -> None:
    assert ldp_fl.stays_high(MNIST, 91.0, accuracies).seen is expected


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ({"0.1": 79.9, "1": 90.0}, True),
        ({"0.1": 80.1, "1": 90.0}, False),
        ({"0.5": 20.0, "1": 90.0}, False),  # nothing below the threshold was tried
    ],
)
def test_accuracy_collapses(accuracies: dict[str, float], expected: bool) -> None:
    assert ldp_fl.collapses(MNIST, accuracies).seen is expected


@pytest.mark.parametrize(("composed", "expected"), [(0.9, True), (1.0, True), (1.1, False)])
def test_one_budget(composed: float, expected: bool) -> None:
    assert ldp_fl.one_budget("MNIST", 1.0, composed).seen is expected


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        ([90.0, 91.0, 90.5], True),
        ([70.0, 71.0, 70.5], False),
        ([80.0, 82.0, 80.5], False),  # higher, and not significantly
    ],
)
def test_more_reports_help(most: list[float], expected: bool) -> None:
    found = ldp_fl.reports_help("MNIST", ("10 clients", "100"), [80.0, 81.1, 80.6], most)

    assert found.seen is expected


@pytest.mark.parametrize(("published", "expected"), [((90.0, 80.0), True), ((80.0, 90.0), False)])
def test_the_order_of_the_ranges(published: tuple[float, float], expected: bool) -> None:
    found = ldp_fl.same_order("MNIST", "5", published, [70.0, 70.5, 70.2], [60.0, 60.1, 60.3])

    assert found.seen is expected


def test_one_repetition_shows_no_order() -> None:
    assert not ldp_fl.same_order("MNIST", "5", (90.0, 80.0), [70.0], [60.0]).seen


@pytest.mark.parametrize("scale", list(Scale))
def test_headline_runs_are_among_those_compared(scale: Scale, tmp_path: Path) -> None:
    for study in ldp_fl.studies(Experiment(tmp_path, scale)):
        assert study.paper.epsilon in study.epsilons
        assert study.rounds <= study.paper.rounds


def test_paper_scale_has_the_papers_clients(tmp_path: Path) -> None:
    found = ldp_fl.studies(Experiment(tmp_path, Scale.PAPER))

    assert [s.clients for s in found] == [100, 200, 500]
    assert [s.model for s in found] == ["small-cnn", "small-cnn", "vgg"]
    assert [s.rounds for s in found] == [10, 15, 15]


@pytest.mark.parametrize(
    ("epsilon", "shown"), [(7850.0000001, "7,850"), (580.2, "581"), (15.351, "15.36"), (1, "1.00")]
)
def test_epsilons_are_rounded_up(epsilon: float, shown: str) -> None:
    assert ldp_fl._rounded_up(epsilon) == shown
