import pytest

from fedveil.papers import ldp_fl
from fedveil.papers.ldp_fl_settings import PAPER
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.tuning.recipe_grid import cells
from fedveil.tuning.trials import Laboratory

MNIST = PAPER["mnist"]


def test_readings_are_those_of_the_plan() -> None:
    cell = cells("ldp-fl", ["data.clients=100", "shuffle.minimum=100", "rounds=1"], [])[0]
    shuffled, alone, added = ldp_fl.readings(Laboratory().prepare(cell).plan, 1)

    assert shuffled.epsilon < alone.epsilon < added.epsilon == 650


def test_readings_are_those_after_all_rounds() -> None:
    settings = ["data.clients=100", "shuffle.minimum=100", "rounds=3", "noise.epsilon=0.01"]
    plan = Laboratory().prepare(cells("ldp-fl", settings, [])[0]).plan
    one, three = (ldp_fl.readings(plan, rounds) for rounds in (1, 3))
    assert three[2].epsilon == pytest.approx(3 * one[2].epsilon)
    for after, before in zip(three, one, strict=True):
        assert after.epsilon > before.epsilon
        assert after in plan.claims(3)


def test_headings_say_what_belongs_to_the_readings() -> None:
    settings = ["data.clients=100", "shuffle.minimum=100", "rounds=1", "budget.delta=1e-5"]
    plan = Laboratory().prepare(cells("ldp-fl", settings, [])[0]).plan
    told = ldp_fl.readings(plan, 1)

    for heading, claim in zip(ldp_fl.READINGS, told, strict=True):
        assert heading.startswith(f"epsilon {claim.terms},")
    (published,) = [claim for claim in plan.claims(1) if claim.as_published]
    assert published.terms == ldp_fl.PUBLISHED


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
    assert ldp_fl.stays_high(MNIST, 91.0, accuracies).confirmed is expected


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ({"0.1": 79.9, "1": 90.0}, True),
        ({"0.1": 80.1, "1": 90.0}, False),
        ({"0.5": 20.0, "1": 90.0}, False),  # nothing below the threshold was tried
    ],
)
def test_accuracy_collapses(accuracies: dict[str, float], expected: bool) -> None:
    assert ldp_fl.collapses(MNIST, accuracies).confirmed is expected


@pytest.mark.parametrize(("composed", "expected"), [(0.9, True), (1.0, True), (1.1, False)])
def test_one_budget(composed: float, expected: bool) -> None:
    claim = PrivacyClaim(
        epsilon=composed,
        delta=1e-5,
        unit=Unit.CLIENT,
        neighbours=Relation.REPLACE,
        trust=Trust.SHUFFLED,
        accountant=Accountant.PLD,
        noise=NoiseSource.SEEDED,
    )
    finding = ldp_fl.one_budget("MNIST", "1", claim)
    assert finding.confirmed is expected
    assert claim.short in finding.evidence


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

    assert found.confirmed is expected


@pytest.mark.parametrize(("published", "expected"), [((90.0, 80.0), True), ((80.0, 90.0), False)])
def test_the_order_of_the_ranges(published: tuple[float, float], expected: bool) -> None:
    found = ldp_fl.same_order("MNIST", "5", published, [70.0, 70.5, 70.2], [60.0, 60.1, 60.3])

    assert found.confirmed is expected


def test_one_repetition_shows_no_order() -> None:
    assert not ldp_fl.same_order("MNIST", "5", (90.0, 80.0), [70.0], [60.0]).confirmed
