import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedveil.papers import clip_decay
from fedveil.papers.clip_decay import Curve, DecaySetting
from fedveil.papers.reproduction import Experiment, Page, PaperStatement
from fedveil.tuning.trials import TrialOutcome

ROUNDS = (100, 200, 1000, 2000)


def curve(accuracy: tuple[float, ...], loss: tuple[float, ...] = (2.0, 1.5, 1.2, 1.0)) -> Curve:
    """Two repetitions that differ a little."""
    both = [[value + shift for value in accuracy] for shift in (0.0, 0.001)]
    return Curve(ROUNDS, np.array(both), np.array([loss, loss]))


def as_published() -> dict[str, Curve]:
    """Curves on which everything that the paper says is seen."""
    curves = {"clip0.01": curve((0.2, 0.3, 0.5, 0.6)), "clip0.05": curve((0.3, 0.4, 0.6, 0.7))}
    for power in clip_decay.POWERS:
        curves[f"poly(0.01){power}"] = curve((0.2, 0.3, 0.45, 0.5))
        curves[f"poly(0.05){power}"] = curve((0.3, 0.4, 0.6, 0.8))
    for quantile in ("10%", "50%"):
        curves[f"quantile(0.01){quantile}"] = curve((0.1, 0.1, 0.1, 0.1))
    curves["adaptive0.01"] = curve((0.5, 0.5, 0.5, 0.4))
    curves["adaptive0.05"] = curve((0.5, 0.5, 0.5, 0.4), (1.5, 1.2, 2.0, 3.0))
    return curves


def with_one_odd(curves: dict[str, Curve], name: str, end: float) -> dict[str, Curve]:
    """The same, but for the end of one repetition of one schedule."""
    accuracy = curves[name].accuracy.copy()
    accuracy[1, -1] = end
    return {**curves, name: dataclasses.replace(curves[name], accuracy=accuracy)}


def seen(curves: dict[str, Curve]) -> list[bool]:
    return [finding(curves).confirmed for finding in clip_decay.FINDINGS]


def test_everything_the_paper_says_can_be_seen() -> None:
    assert seen(as_published()) == [True] * 5


@pytest.mark.parametrize(
    ("name", "end", "expected"),
    [
        ("poly(0.05)2", 0.69, [False, True, True, True, True]),
        ("poly(0.01)0.5", 0.61, [True, False, True, True, True]),
        ("adaptive0.01", 0.65, [True, True, False, True, True]),
        ("quantile(0.01)50%", 0.31, [True, True, True, True, False]),
    ],
)
def test_one_repetition_that_ends_otherwise_refutes(
    name: str, end: float, expected: list[bool]
) -> None:
    assert seen(with_one_odd(as_published(), name, end)) == expected


def test_adaptive_must_lead_in_the_first_tenth_of_the_rounds() -> None:
    late = curve((0.1, 0.2, 0.9, 0.4))
    finding = clip_decay.adaptive_fades({**as_published(), "adaptive0.01": late})

    assert not finding.confirmed
    assert "(not met). At the end" in finding.evidence


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ((1.5, 1.2, 2.0, 0.9), False),  # below clip0.05
        ((9.0, 8.0, 7.0, 6.0), False),  # above it, and falling all the time
        ((1.5, 1.2, 2.0, float("inf")), True),
    ],
)
def test_loss_must_rise_and_end_above_the_constant(loss: tuple[float, ...], expected: bool) -> None:
    curves = {**as_published(), "adaptive0.05": curve((0.5, 0.5, 0.5, 0.4), loss)}

    assert clip_decay.adaptive_loss_rises(curves).confirmed is expected


def test_half_is_of_the_lower_constant() -> None:
    curves = as_published()
    curves["clip0.01"] = curve((0.1, 0.1, 0.1, 0.15))

    assert not clip_decay.quantile_fails(curves).confirmed


def test_a_loss_that_diverged_is_infinite() -> None:
    points = ((1, {"accuracy": 0.5, "loss": 1.0}), (2, {"accuracy": 0.1, "loss": float("nan")}))
    found = clip_decay.curve_of([TrialOutcome(2, points[-1][1], points)])

    assert found.rounds == (1, 2)
    assert found.loss.tolist() == [[1.0, float("inf")]]
    assert found.ends.tolist() == [0.1]


def test_a_client_takes_part_a_fifth_more_often_than_the_mean_at_most() -> None:
    assert DecaySetting("mnist", 60_000, 100, 3000, 1000, 1000).max_turns == 6
    assert DecaySetting("mnist", 60_000, 100, 3001, 1000, 1000).max_turns == 7


@pytest.fixture(scope="module", params=[pytest.param("small", marks=pytest.mark.slow)])
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Both items' page in small: the embedded digits and a few rounds."""
    small = DecaySetting("digits", clients=100, cohort=20, rounds=12, refresh=4, tried=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip_decay, "setting", lambda experiment, data: small)
        out: Path = tmp_path_factory.mktemp("clip-decay")
        return clip_decay.ITEMS["mnist"](Experiment(out, repeat=2, workers=1))


def test_the_page_has_every_schedule(page: Page) -> None:
    schedules = [row[0] for row in page.tables[0].text_rows]

    assert schedules == list(clip_decay.PUBLISHED)
    assert len(schedules) == 15
    assert all("+-" in row[2] for row in page.tables[0].text_rows)


def test_the_page_has_every_finding_and_its_rule(page: Page) -> None:
    assert len(page.statements) == 5
    assert all(
        isinstance(f, PaperStatement) and f.evidence.startswith("Rule: ") for f in page.statements
    )


def test_the_page_tells_what_is_claimed_of_reports_and_of_what_is_watched(page: Page) -> None:
    claims = dict(page.tables[1].text_rows)

    assert claims["baseline"] == "nothing"
    assert claims["poly"].startswith("epsilon 30 at delta 1e-05 per client (replace, local trust")
    told = "epsilon 30 at delta 1e-05 per client (replace, curator trust"
    assert claims["quantile"].startswith(f"updates and bits: {told}")
    assert claims["adaptive"].startswith(f"updates and norms: {told}")


def test_the_page_has_one_figure_and_what_was_left_open(page: Page) -> None:
    assert list(page.figures) == ["clip-decay-mnist.png"]
    assert {"learning rate", "epsilon", "clients"} <= {what for what, _ in page.left_open}
    assert "![" in page.markdown()


def test_no_epsilon_of_the_page_is_bare(page: Page, check_epsilons: Callable[[Page], None]) -> None:
    check_epsilons(page)
