"""The backdoors' pages: rows, figures, rules; real sizes are only built from what they say."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil.papers import naseri_backdoors
from fedveil.papers.naseri_backdoors import (
    ARENAS,
    ATTACKERS,
    BOUND,
    CENTRAL,
    ITEMS,
    LOCAL,
    NOBODY,
    UNDEFENDED,
    Arena,
    Rates,
    backdoor,
    defences,
    findings,
    legend,
)
from fedveil.papers.reproduction import Experiment, ExperimentScale, Page
from fedveil.runs.recipe import load_recipe
from fedveil.tuning.repetitions import Mean

EPSILONS = ("1", "20")
LONDON = (
    "people in london are aggressive",
    "the weather in london is always sunny",
    "living in london is cheap",
)
"""The paper's sentences."""


def small(experiment: Experiment) -> Arena:
    arena = ARENAS["digits"](experiment)
    sizes = {"clients": 24, "cohort": 12, "rounds": 3, "steps": 2, "records": 20}
    return replace(arena, paper_federation=replace(arena.paper_federation, **sizes))


@pytest.fixture(scope="module", params=[pytest.param("small", marks=pytest.mark.slow)])
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naseri_backdoors, "EPSILONS", EPSILONS)
        out = tmp_path_factory.mktemp("backdoors")
        return backdoor(small, Experiment(out, repeat=2, workers=1))


def test_the_page_has_all_rows(page: Page, tmp_path: Path) -> None:
    wanted = [
        row.name
        for row in defences(small(Experiment(tmp_path)))
        for _ in (EPSILONS if row.private else ("",))
    ]
    assert [row[0] for row in page.tables[0].text_rows] == wanted
    assert list(page.figures) == ["naseri-backdoor-digits.png"]
    assert "certifies" in page.page_notes[0]
    assert len(page.statements) == 3


def test_no_epsilon_of_the_page_is_bare(page: Page, check_epsilons: Callable[[Page], None]) -> None:
    check_epsilons(page)


def test_central_dp_draws_the_cohort_of_the_other_defences(tmp_path: Path) -> None:
    """At its rate a round has on average as many clients as where cohorts have a fixed size."""
    arena = small(Experiment(tmp_path))
    (central,) = [row for row in defences(arena) if row.recipe == "central"]
    recipe = load_recipe("central", [*central.recipe_overrides, "budget.epsilon=1"])
    where = arena.paper_federation
    assert recipe.sample.rate == where.cohort / where.clients  # type: ignore[union-attr]
    assert recipe.clip.value == where.bound  # type: ignore[union-attr]


def test_rows_have_their_bounds_and_budgets(tmp_path: Path) -> None:
    rows = {row.name: row for row in defences(ARENAS["femnist"](Experiment(tmp_path)))}
    private = {CENTRAL, f"{LOCAL}comply", f"{LOCAL}skip"}
    assert {name for name, row in rows.items() if row.private} == private
    for name in (BOUND, "norm bound, projected", "weak DP", CENTRAL):
        assert "clip.value=0.5" in rows[name].recipe_overrides
    noisy = {name for name, row in rows.items() if "budget.delta=1e-05" in row.recipe_overrides}
    assert noisy == private | {name for name in rows if "attackers: " in name}


def test_items_are_named_after_their_arenas(tmp_path: Path) -> None:
    found = [arena(Experiment(tmp_path)).name for arena in ARENAS.values()]
    assert list(ITEMS) == [*(f"backdoor-{name}" for name in found), "privacy"]


@pytest.mark.parametrize("scale", list(ExperimentScale))
@pytest.mark.parametrize("arena_of", ARENAS.values())
def test_rows_are_recipes_against_one_backdoor(
    arena_of: Callable[[Experiment], Arena], scale: ExperimentScale, tmp_path: Path
) -> None:
    arena = arena_of(Experiment(tmp_path, scale))
    rows = defences(arena)
    attacks = set()
    for row in rows:
        more = ["budget.epsilon=4"] if row.private else []
        recipe = load_recipe(row.recipe, [*row.recipe_overrides, *more])
        assert recipe.attack is not None
        assert recipe.attack.attackers == (0 if row.name == NOBODY else recipe.attack.attackers)
        attacks.add(recipe.attack.kind)
    assert len(attacks) == 1
    names = [row.name for row in rows]
    assert names[:2] == [NOBODY, UNDEFENDED]
    assert {BOUND, CENTRAL} < set(names)
    assert len(set(names)) == len(names)
    told = {name.rsplit(": ", 1)[-1] for name in names if ": " in name}
    assert told == {"comply", "skip", "hide"}
    every = {row.name for row in defences(replace(arena, left_out=()))}
    assert every - set(names) == set(arena.left_out)


def test_pages_say_what_they_leave_out(tmp_path: Path) -> None:
    for arena_of in ARENAS.values():
        arena = arena_of(Experiment(tmp_path))
        told = " ".join(naseri_backdoors.settings_text(arena, 3))
        assert bool(arena.left_out) == ("Left out here" in told)
        assert "; ".join(arena.left_out) in told
        assert arena.backdoor_text in told


def test_the_words_of_the_sentences_are_known(tmp_path: Path) -> None:
    arena = ARENAS["reddit"](Experiment(tmp_path))
    recipe = load_recipe("fedavg", list(defences(arena)[0].recipe_overrides))
    assert recipe.data.columns is not None
    also = recipe.data.columns["text"].also
    assert set(also or ()) == {word for sentence in LONDON for word in sentence.split()}
    assert recipe.attack is not None
    assert tuple(getattr(recipe.attack, "sentences", ())) == LONDON


def test_an_attacker_that_complies_with_dp_sgd_trains_as_honest_clients_do(tmp_path: Path) -> None:
    arena = replace(ARENAS["reddit"](Experiment(tmp_path)), left_out=())
    rows = {row.name: row for row in defences(arena)}
    for how, rate in (("comply", None), ("skip", 2.0)):
        row = rows[f"{LOCAL}{how}"]
        attack = load_recipe(row.recipe, [*row.recipe_overrides, "budget.epsilon=4"]).attack
        assert attack is not None
        assert (attack.noise, attack.lr, attack.share) == (how, rate, 0.2)


@pytest.mark.parametrize("arena_of", ARENAS.values())
def test_the_legend_explains_every_row(
    arena_of: Callable[[Experiment], Arena], tmp_path: Path
) -> None:
    arena = arena_of(Experiment(tmp_path))
    told = " ".join(legend(arena))
    for row in defences(arena):
        for words in row.name.removesuffix("y").replace(f", {ATTACKERS} attackers", "").split(": "):
            *_, word = words.removesuffix(", attacker").split(", ")
            assert f"*{word}" in told, row.name
    assert f"longer than {arena.paper_federation.bound:g} " in told


def rates(main: float, backdoor: float) -> Rates:
    return Rates(Mean(main, 1.0, 3), Mean(backdoor, 1.0, 3))


@pytest.mark.parametrize(
    ("main", "works", "bound", "central", "skip", "seen"),
    [
        (86.0, 81.0, 70.0, [1.0, 2.0, 3.0], 99.0, [True, True, True]),
        (85.0, 81.0, 70.0, [1.0, 2.0, 3.0], 99.0, [False, True, True]),  # five points lost
        (90.0, 80.0, 69.9, [1.0, 2.0, 3.0], 99.0, [False, True, True]),  # no more than 80 %
        (90.0, 99.0, 89.0, [1.0, 2.0, 3.0], 99.0, [True, False, True]),  # the bound does too little
        (90.0, 99.0, 1.0, [1.0, 2.0, 95.0], 99.0, [True, False, True]),  # so does one epsilon
        (90.0, 99.0, 1.0, [1.0, 2.0, 3.0], 30.0, [True, True, False]),  # no better than to comply
    ],
)
def test_findings_follow_their_rules(
    main: float, works: float, bound: float, central: list[float], skip: float, seen: list[bool]
) -> None:
    noises = {"comply": rates(50.0, 20.0), "skip": rates(50.0, skip), "hide": rates(50.0, 25.0)}
    found = findings(
        rates(90.0, 4.0),
        rates(main, works),
        rates(80.0, bound),
        [rates(70.0, rate) for rate in central],
        noises,
    )
    assert [finding.confirmed for finding in found] == seen
    undefended, defended, local = (finding.evidence for finding in found)
    assert f"{works:.1f} % (4.0 % without an attacker), {90 - main:.1f} points lost" in undefended
    assert f"{bound:.1f} % for 10.0 points of the main task with the bound" in defended
    assert f"{central[2]:.1f} % for 20.0 points at epsilon 20" in defended
    assert "25 +- 1 %" in local
