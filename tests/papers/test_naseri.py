from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.papers import naseri
from fedveil.papers.naseri import BOUND, CENTRAL, LOCAL, NONE, WEAK_DP, PaperFederation
from fedveil.papers.reproduction import Experiment, ExperimentScale, Page

EPSILONS = ("1", "4")
SMALL = PaperFederation(
    "digits",
    "Digits",
    "iid",
    clients=20,
    cohort=10,
    records=20,
    model_name="softmax",
    rounds=3,
    steps=2,
    lr=1.0,
    bound=1.0,
    rate=1.0,
    private_lr=1.0,
    clip=1.0,
)


@pytest.fixture(scope="module", params=[pytest.param("small", marks=pytest.mark.slow)])
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naseri, "federations", lambda experiment: [SMALL])
        patch.setattr(naseri, "EPSILONS", EPSILONS)
        out = tmp_path_factory.mktemp("naseri")
        return naseri.ITEMS["utility"](Experiment(out, repeat=2, workers=1))


def column(page: Page, header: str) -> list[str]:
    table = page.tables[0]
    return [row[table.headers.index(header)] for row in table.text_rows]


def test_the_page_has_the_whole_grid(page: Page) -> None:
    private = [LOCAL] * len(EPSILONS) + [CENTRAL] * len(EPSILONS)

    assert column(page, "defence") == [NONE, BOUND, WEAK_DP, *private]
    assert all("+-" in cell for cell in column(page, "accuracy, here"))
    assert list(page.figures) == ["naseri-utility.png"]
    assert len(page.statements) == 2


def test_no_number_is_called_published(page: Page) -> None:
    assert set(column(page, "accuracy, paper")) == {"not readable / not available"}
    assert "Utility only" in page.markdown()


def test_every_epsilon_has_its_unit_and_trust(page: Page) -> None:
    count = len(EPSILONS)
    silent = [("nothing claimed", "-", "-", "-", "-")] * 3
    told = [row[1:6] for row in page.tables[0].text_rows]

    assert told[:3] == silent
    assert {row[1:] for row in told[3 : 3 + count]} == {("1e-05", "record", "local", "zero-out")}
    assert {row[1:] for row in told[3 + count :]} == {("1e-05", "client", "central", "zero-out")}
    assert "not comparable" in page.markdown()


def test_epsilons_stay_within_what_was_asked_for(page: Page) -> None:
    asked = [float(e) for e in EPSILONS] * 2
    told = [float(e) for e in column(page, "epsilon")[3:]]

    assert all(0.9 * a < t <= a for a, t in zip(asked, told, strict=True))


@pytest.mark.parametrize(
    ("weak", "expected"), [(88.5, True), (88.0, True), (87.9, False), (95.0, True)]
)
def test_weak_defences_are_harmless_within_two_points(weak: float, expected: bool) -> None:
    found = naseri.harmless("Digits", {NONE: 90.0, BOUND: 89.0, WEAK_DP: weak})

    assert found.confirmed is expected


@pytest.mark.parametrize(
    ("local", "central", "expected"),
    [
        ([50.0, 60.0, 80.0, 89.0], [70.0, 75.0, 80.0, 89.0], True),
        ([89.0, 89.0, 89.0, 89.0], [70.0, 75.0, 80.0, 89.0], False),  # local costs nothing
        ([80.0, 80.0, 80.0, 80.0], [80.0, 80.0, 80.0, 80.0], False),  # always the same
    ],
)
def test_both_cost_and_not_the_same(
    local: list[float], central: list[float], expected: bool
) -> None:
    assert naseri.varying_cost("Digits", 90.0, local, central).confirmed is expected


def test_a_client_takes_part_half_as_often_again_as_the_mean_at_most() -> None:
    assert SMALL.max_turns == 3
    assert SMALL.max_turns * SMALL.clients >= SMALL.cohort * SMALL.rounds


@pytest.mark.parametrize("scale", list(ExperimentScale))
def test_real_scales_fit_their_caps(scale: ExperimentScale, tmp_path: Path) -> None:
    for found in naseri.federations(Experiment(tmp_path, scale)):
        assert found.max_turns * found.clients >= found.cohort * found.rounds
        assert found.cohort < found.clients


def test_no_epsilon_of_the_page_is_bare(page: Page, check_epsilons: Callable[[Page], None]) -> None:
    check_epsilons(page)


def test_rows_have_their_bounds_and_budgets(tmp_path: Path) -> None:
    (femnist, _) = naseri.federations(Experiment(tmp_path))
    rows = {row.name: row for row in naseri.defences(femnist)}
    assert list(rows) == [NONE, BOUND, WEAK_DP, LOCAL, CENTRAL]
    assert {name for name, row in rows.items() if row.private} == {LOCAL, CENTRAL}
    for name, row in rows.items():
        assert ("clip.value=2.0" in row.recipe_overrides) == (name in (BOUND, WEAK_DP, CENTRAL))
        assert ("budget.delta=1e-05" in row.recipe_overrides) == row.private
    assert f"sample.rate={femnist.cohort / femnist.clients}" in rows[CENTRAL].recipe_overrides
