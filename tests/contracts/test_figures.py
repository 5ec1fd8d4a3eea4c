"""Every figure that is drawn: titled, axes named with units, intervals within them, no overlaps.

Trainings are replaced by numbers that are hard to draw: wide spreads, and some that diverged.
"""

import re
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection, LineCollection

from fedveil.audit.findings import Roc, roc_figure
from fedveil.data import load
from fedveil.papers import clip_decay, fu, fu_cnn, ldp_fl, naseri
from fedveil.papers.clip_decay import DecaySetting
from fedveil.papers.naseri_backdoors import ARENAS, backdoor
from fedveil.papers.reproduction import PAPERS, Experiment, items_of
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.tuning.sweep import Sweep
from fedveil.tuning.trials import Laboratory, TrialOutcome
from tests.papers.test_fu import loans
from tests.papers.test_fu_cnn import Digits
from tests.papers.test_ldp_fl import small as small_study
from tests.papers.test_naseri import SMALL

TERMS = r"at delta \S+ per (client|record|weight)[^()]*\([a-z-]+, [a-z]+ trust"
PLACES = (
    r"local steps (done \(t\)|in all \(T\)|per round \(E\))",
    r"rounds done",
    r"clients, all of them in every round",
    r"share of clients that take part in a round",
    r"epsilon (per weight|\(for whom: see the legend\))",
    r"false positives \(share of others\)",
)
INTERVALS = (FillBetweenPolyCollection, LineCollection)
UNITS = r"\((%|share of (records|members)|cross-entropy, nats|percentage points squared)\)"


def made_up(sweep, on_trial=None):
    """Accuracies all over the place, losses over decades, one in ten diverged."""
    for c, cell in enumerate(sweep.cells):
        for repetition in range(sweep.repeat):
            random = np.random.default_rng([len(cell.name), repetition])
            sweep._done[repetition, c] = outcome(cell.recipe, random)


def outcome(recipe, random):
    rounds = recipe.rounds or recipe.iterations // recipe.client.steps
    every = recipe.evaluate.every or 1

    def metrics():
        loss = float(np.exp(random.normal(3, 2))) if random.uniform() < 0.9 else np.nan
        return {"accuracy": random.uniform(), "backdoor": random.uniform(), "loss": loss}

    curve = tuple((done, metrics()) for done in range(every, rounds + 1, every))
    return TrialOutcome(rounds, metrics(), curve)


def prepared_once(prepare, made):
    """Cells of one kind share the first one's plan: calibrating each would take a minute."""

    def again(laboratory, cell, mode=None):
        recipe = cell.recipe
        budget = recipe.budget is not None and recipe.budget.epsilon != np.inf
        kind = (recipe.data.name, recipe.client.kind, str(recipe.noise), recipe.clip, budget)
        if kind not in made:
            made[kind] = prepare(laboratory, cell, mode)
        return replace(made[kind], cell=cell, together=1)

    return again


def small_arena(experiment):
    arena = ARENAS["digits"](experiment)
    sizes = {"clients": 24, "cohort": 12, "rounds": 10, "steps": 2, "records": 20}
    return replace(arena, paper_federation=replace(arena.paper_federation, **sizes))


def two_studies(experiment):
    study = small_study()
    return [study, replace(study, paper=replace(study.paper, title="Fashion-MNIST"))]


DRAWN = {
    **fu.ITEMS,
    **fu_cnn.ITEMS,
    **{name: item for name, item in ldp_fl.ITEMS.items() if name != "table1"},
    "mnist": clip_decay.ITEMS["mnist"],
    "utility": naseri.utility,
    "backdoor": partial(backdoor, small_arena),
}
NAMES = (
    *(f"fu-fig{number}.png" for number in range(1, 8)),
    *(f"ldp-fl-{name}.png" for name in ("epsilon", "clients", "fraction", "rounds")),
    *("clip-decay-mnist.png", "naseri-utility.png", "naseri-backdoor-digits.png"),
    "membership.png",
)


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """By name: all that items of papers draw, on few clients, and the curves of an audit."""
    read, prepare = load.load_records, Laboratory.prepare
    experiment = Experiment(tmp_path_factory.mktemp("figures"), repeat=3, workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sweep, "run", made_up)
        patch.setattr(Laboratory, "prepare", prepared_once(prepare, {}))
        patch.setattr(
            load,
            "load_records",
            lambda name, *more, **options: (
                loans() if name == "lending-club" else read(name, *more, **options)
            ),
        )
        patch.setattr(
            fu, "setting", lambda experiment, everyone=False: fu.FuSetting(25, 5, "25 clients")
        )
        patch.setattr(fu_cnn, "setting", lambda experiment: Digits(20, 4, None, 1e-5, "20 clients"))
        patch.setattr(ldp_fl, "studies", two_studies)
        few = DecaySetting("digits", clients=100, cohort=20, rounds=60, refresh=20, tried=4)
        patch.setattr(clip_decay, "setting", lambda experiment, data: few)
        patch.setattr(naseri, "federations", lambda experiment: [SMALL, replace(SMALL, title="B")])
        pages = [item(experiment) for item in DRAWN.values()]
    drawn = {name: figure for page in pages for name, figure in page.figures.items()}
    return drawn | {"membership.png": membership()}


def membership():
    random = np.random.default_rng(0)
    scores = [random.normal(shift, size=400) for shift in (1.0, 0.5, 0.0)]
    curves = {"LiRA": Roc(scores[0], scores[2]), "RMIA": Roc(scores[1], scores[2])}
    claim = PrivacyClaim(
        epsilon=8.0,
        delta=1e-5,
        unit=Unit.CLIENT,
        neighbours=Relation.ZERO_OUT,
        trust=Trust.CENTRAL,
        accountant=Accountant.PLD,
        noise=NoiseSource.SEEDED,
    )
    return roc_figure(curves, "400 records", claim)


def words(figure):
    """All that stands beside the panels."""
    legends = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return " ".join([*(text.get_text() for text in figure.texts), *legends]).replace("\n", " ")


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_shows_and_what_its_epsilons_and_intervals_are(figures, name):
    title, said = (text.get_text() for text in figures[name].texts)
    assert len(title.split()) > 3
    assert re.search(r"(whiskers|band|Whiskers, .*): 95 % interval", said.replace("\n", " "))
    assert re.search(rf"[Ee]psilon( of [a-z ]+)?( [\d.]+)? {TERMS}", words(figures[name]))


@pytest.mark.parametrize("name", NAMES)
def test_axes_are_named_in_words_with_units(figures, name):
    for at in figures[name].axes:
        assert any(re.fullmatch(place, at.get_xlabel()) for place in PLACES), at.get_xlabel()
        assert re.search(UNITS, at.get_ylabel()), at.get_ylabel()


@pytest.mark.parametrize("name", NAMES)
def test_points_and_intervals_are_within_the_axes(figures, name):
    for at in figures[name].axes:
        (left, right), (bottom, top) = at.get_xlim(), at.get_ylim()
        spots = [path.vertices for each in at.collections for path in each.get_paths()]
        spots += [line.get_xydata() for line in at.lines if line.get_marker() not in ("", "None")]
        assert any(isinstance(each, INTERVALS) for each in at.collections)
        for x, y in np.concatenate([each[np.isfinite(each).all(axis=1)] for each in spots]):
            assert left <= x <= right
            assert bottom <= y <= top
        if "%" in at.get_ylabel():
            assert bottom > -10
            assert top < 110


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_a_panel_differ_without_colour(figures, name):
    for at in figures[name].axes:
        named = [line for line in at.lines if not line.get_label().startswith("_")]
        looks = [(line.get_marker(), line.get_linestyle()) for line in named]
        assert len(set(looks)) == len(looks) > 0


@pytest.mark.parametrize("name", ["ldp-fl-epsilon.png", "naseri-utility.png"])
def test_levels_are_named_at_their_lines(figures, name):
    for at in figures[name].axes:
        flat = [line for line in at.lines if tuple(line.get_xdata()) == (0, 1)]
        heights = sorted(at.transLimits.transform((1, line.get_ydata()[0]))[1] for line in flat)
        named = [text.xy[1] for text in at.texts for _ in text.get_text().split(",\n")]
        assert len(flat) > 0
        assert named == pytest.approx(heights, abs=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_overlaps_or_leaves_the_page(figures, name):
    figure = figures[name]
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.texts]
    boxes += [at.get_tightbbox() for at in figure.axes]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    width, height = figure.get_size_inches() * figure.dpi
    for box in boxes:
        assert -1 <= box.x0 <= box.x1 <= width + 1
        assert -1 <= box.y0 <= box.y1 <= height + 1
    for one, other in combinations(boxes, 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        up = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert across <= 1 or up <= 1


def test_every_item_that_draws_is_drawn_here():
    known = {*DRAWN, "table1", "privacy", "fashion-mnist"}
    items = [name for paper in PAPERS for name in items_of(paper)]
    assert {re.sub("^backdoor-.*", "backdoor", name) for name in items} == known
