from pathlib import Path

import pytest

from fedveil.papers.ldp_fl_settings import studies
from fedveil.papers.reproduction import Experiment, ExperimentScale


@pytest.mark.parametrize("scale", list(ExperimentScale))
def test_headline_runs_are_among_those_compared(scale: ExperimentScale, tmp_path: Path) -> None:
    for study in studies(Experiment(tmp_path, scale)):
        assert study.paper.epsilon in study.epsilons
        assert study.rounds <= study.paper.rounds


def test_paper_scale_has_the_papers_clients(tmp_path: Path) -> None:
    found = studies(Experiment(tmp_path, ExperimentScale.PAPER))

    assert [s.clients for s in found] == [100, 200, 500]
    assert [s.model_name for s in found] == ["small-cnn", "small-cnn", "vgg"]
    assert [s.rounds for s in found] == [10, 15, 15]
