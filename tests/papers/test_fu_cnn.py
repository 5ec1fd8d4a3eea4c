"""Fu et al. 2021, its CNN: the items from end to end, on few digits and a small model."""

import math
from dataclasses import dataclass

import pytest

from fedveil.papers import fu_cnn
from fedveil.papers.reproduction import Experiment, ExperimentScale


@dataclass(frozen=True)
class Digits(fu_cnn.CnnSetting):
    """The paper's recipe on scikit-learn's digits and a softmax regression."""

    @property
    def overrides(self):
        kept = [s for s in super().overrides if not s.startswith(("data.", "model."))]
        data = ["data.name=digits", "data.clients=20", "data.partition=iid", "data.seed=1"]
        return [*kept, *data, "model.name=softmax"]


@pytest.fixture
def small(monkeypatch):
    here = Digits(20, 4, None, 1e-5, "20 clients")
    monkeypatch.setattr(fu_cnn, "setting", lambda experiment: here)
    monkeypatch.setattr(fu_cnn, "EPSILONS", ("10", "inf"))
    monkeypatch.setattr(fu_cnn, "RATES", ("0.1", "1"))
    monkeypatch.setattr(fu_cnn, "CONSTANTS", ("1", "0.001"))
    monkeypatch.setattr(fu_cnn, "FEW_STEPS", (12, 24))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) for n in fu_cnn.ITEMS],
)
def test_an_item_from_end_to_end(small, tmp_path, check_epsilons, name):
    page = fu_cnn.ITEMS[name](Experiment(tmp_path, repeat=1, workers=1))
    check_epsilons(page)
    text = page.markdown()
    assert "- c_2 of the noise formula: " in text
    assert "nothing claimed" in text or name == "fig4"
    assert [row[0] for row in page.tables[0].text_rows] == ["10", "inf"]


@pytest.mark.parametrize("scale", list(ExperimentScale))
def test_noise_on_a_coordinate_stays_at_the_papers_level(tmp_path, scale):
    """sqrt(log(1/delta)) / epsilon over sqrt(b), the same with 350 clients and with fewer."""
    here = fu_cnn.setting(Experiment(tmp_path, scale))
    assert here.cohort < fu_cnn.COHORT
    for epsilon in ("10", "30"):
        paper = math.sqrt(math.log(1 / fu_cnn.DELTA) / fu_cnn.COHORT) / float(epsilon)
        ours = math.sqrt(math.log(1 / here.delta) / here.cohort) / float(here.epsilon(epsilon))
        assert ours == pytest.approx(paper, rel=1e-5)
    assert here.epsilon("inf") == "inf"
