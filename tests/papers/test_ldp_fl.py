import dataclasses
from collections.abc import Callable

import pytest

from fedveil.papers import ldp_fl
from fedveil.papers.ldp_fl import READINGS
from fedveil.papers.ldp_fl_settings import PAPER, Study
from fedveil.papers.reproduction import Experiment, Page


def small() -> Study:
    """The MNIST study on the embedded digits, with few clients and rounds."""
    paper = dataclasses.replace(PAPER["mnist"], data="digits", title="Digits", clients=40, rounds=2)
    return Study(
        paper,
        "softmax",
        clients=40,
        records=400,
        rounds=2,
        client=(
            "client.epochs=none",
            "client.steps=2",
            "client.batch=0",
            "client.lr=1.0",
            "engine.mode=vectorised",
        ),
        fixed=0.15,
        first_radius=0.15,
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
    return [row[found.headers.index(header)] for row in found.text_rows]


def test_every_row_of_every_page_has_a_measured_accuracy(pages: dict[str, Page]) -> None:
    rows = {name: [len(table.text_rows) for table in page.tables] for name, page in pages.items()}

    assert rows == {
        "epsilon": [1, 2],
        "clients": [2],
        "fraction": [3],
        "rounds": [2],
        "table1": [2],
    }
    for page in pages.values():
        assert all(any("+-" in cell for cell in row) for t in page.tables for row in t.text_rows)


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
    assert column(pages["epsilon"], 1, READINGS[2]) == ["130", "1,300"]
    assert column(pages["rounds"], 0, READINGS[2]) == [f"{weights}", f"{2 * weights:,}"]
    for page in pages.values():
        table = page.tables[-1]
        for row in table.text_rows:
            shuffled, alone, added = (float(cell.replace(",", "")) for cell in row[-3:])
            assert 1 < shuffled <= alone <= added


def test_fewer_reports_hide_less(pages: dict[str, Page]) -> None:
    spent = [float(x) for x in column(pages["fraction"], 0, READINGS[0])]

    assert spent == sorted(spent, reverse=True)
    assert spent[0] > spent[-1]


def test_pages_have_figures_and_what_was_left_open(pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        assert list(page.figures) == ([] if name == "table1" else [f"ldp-fl-{name}.png"])
        assert page.left_open
        assert "Quick scale" in page.markdown()


def test_no_epsilon_of_a_page_is_bare(
    pages: dict[str, Page], check_epsilons: Callable[[Page], None]
) -> None:
    for page in pages.values():
        check_epsilons(page)
