"""Fu et al. 2021, its linear regression: the items from end to end, on few and made-up loans."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedveil.data import load
from fedveil.data.partition import Records
from fedveil.papers import fu
from fedveil.papers.reproduction import Experiment, ExperimentScale
from fedveil.tuning.trials import Laboratory

REAL = os.environ.get("FEDVEIL_DATA")


def loans():
    """1,000 records on which a linear model does well."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1200, 10)).astype(np.float32)
    y = x @ random.normal(size=10) + 13 + random.normal(size=1200)
    y = y.astype(np.float32)
    return Records("lending-club", x[:1000], y[:1000], x[1000:], y[1000:], classes=0)


@pytest.fixture
def small(monkeypatch):
    """Few clients, epsilons and learning rates."""

    def setting(experiment, *, everyone=False):
        return fu.FuSetting(25, 25 if everyone else 5, "25 clients")

    monkeypatch.setattr(fu, "setting", setting)
    monkeypatch.setattr(fu, "EPSILONS", ("1", "inf"))
    monkeypatch.setattr(fu, "RATES", ("0.05", "0.1"))
    monkeypatch.setattr(fu, "STEPS", (1, 12))


@pytest.fixture
def made_up(small, monkeypatch):
    monkeypatch.setattr(load, "load_records", lambda name, root, **options: loans())


def check(page, experiment, monkeypatch):
    """Every item has a table and a figure, and is the same when it is read from disk."""
    text = page.markdown()
    assert text.startswith(f"## {page.title}\n\nLinear regression of the interest rate")
    assert "1 repetitions; mean" in text
    assert "- learning rate: 0." in text
    assert page.figures
    monkeypatch.setattr(Laboratory, "trial", pytest.fail)


def test_the_bound_has_the_noise_that_was_published(made_up, tmp_path, monkeypatch):
    """Laplace noise of one clip over epsilon; strictly, two inputs are two clips apart."""
    seen = []

    def bound(constants, sizes, noise, *, steps, rounds):
        seen.append((noise.epsilon, noise.clip_norm))
        return float(steps)

    monkeypatch.setattr(fu, "decayed_bound", bound)
    experiment = Experiment(tmp_path, repeat=1, workers=1)
    fu._minimisers(experiment, (2,))
    assert set(seen) == {(3.0, fu.CLIP / 2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig1", "table2", "fig5", "fig7"])
def test_an_item_from_end_to_end(made_up, tmp_path, monkeypatch, check_epsilons, name):
    experiment = Experiment(tmp_path, repeat=1, workers=1)
    page = fu.ITEMS[name](experiment)
    check(page, experiment, monkeypatch)
    check_epsilons(page)
    assert fu.ITEMS[name](experiment).markdown() == page.markdown()
    first = page.tables[0]
    if name == "fig7":
        assert [row[0] for row in first.text_rows] == [*fu.RULES, "minimiser of the bound"]
        assert len(page.statements) == 2
    else:
        assert [row[0] for row in first.text_rows] == ["1", "inf"]
        assert first.headers[0] == (
            "epsilon at delta 0 per record (add-remove, local trust, as published, not a guarantee)"
        )
    if name in ("table2", "fig5"):
        assert [row[1] for row in first.text_rows] == [
            "epsilon 2 at delta 0 per client (replace, local trust)",
            "nothing claimed",
        ]
        assert all(finding.evidence for finding in page.statements)


@pytest.mark.slow
def test_noise_hurts_and_the_worst_is_worse(made_up, tmp_path):
    rows = fu.table2(Experiment(tmp_path, repeat=1, workers=1)).tables[0].text_rows
    noisy, plain = (float(row[5]) for row in rows)
    assert plain < noisy <= float(rows[0][8])


def test_the_papers_scale_draws_its_clients(tmp_path):
    quick, paper = (
        fu.setting(Experiment(tmp_path)),
        fu.setting(Experiment(tmp_path, ExperimentScale.PAPER)),
    )
    assert (quick.clients, quick.cohort) == (1349, 135)
    assert (paper.clients, paper.cohort) == (5000, 500)
    assert "data.resample=400000" in paper.overrides
    assert not any("resample" in key for key in quick.overrides)
    assert fu.setting(Experiment(tmp_path), everyone=True).cohort == 1349


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="FEDVEIL_DATA is not set")
@pytest.mark.parametrize(
    "name",
    ["fig1", "table2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fig5", "fig7"))],
)
def test_an_item_on_real_loans(small, tmp_path, monkeypatch, name):
    experiment = Experiment(tmp_path, repeat=1, workers=1, root=Path(REAL))
    check(fu.ITEMS[name](experiment), experiment, monkeypatch)
