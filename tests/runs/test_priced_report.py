"""Metrics with a price on the page: every number with its interval."""

import numpy as np
import pytest

import fedveil as fv
from fedveil.pages.run_report import metric_charts
from fedveil.runs.report import read_contents


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    random = np.random.default_rng(0)
    x = random.normal(size=(240, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    clients = [(f"c{k}", x[4 * k : 4 * k + 4], y[4 * k : 4 * k + 4]) for k in range(40)]
    data = fv.FederatedData.from_clients(
        clients,
        test=(x[160:], y[160:]),
        test_owners=[f"held out {k // 4}" for k in range(80)],
        classes=2,
    )
    sets = {
        "rounds": 4,
        "model.name": "softmax",
        "budget.epsilon": 6.0,
        "budget.delta": 1e-3,
        "evaluate.epsilon": 5.0,
        "evaluate.every": 2,
        "engine.workers": 1,
    }
    out = tmp_path_factory.mktemp("priced") / "run"
    return fv.run("central", data=data, out=out, set=sets, quiet=True)


def test_the_report_draws_every_number_with_its_interval(run):
    contents = read_contents(run.folder)
    charts = metric_charts(contents)
    assert [(chart.title, chart.y_label) for chart in charts] == [
        ("Noisy accuracy over rounds", "accuracy on held-out owners, 0 to 1"),
        ("Noisy loss over rounds", "loss on held-out owners"),
    ]
    for chart, name in zip(charts, ("accuracy", "loss"), strict=True):
        (line,) = chart.lines
        assert [round for round, _ in line.points] == [2, 4]
        assert list(line.halves) == [run.result["intervals"][name]] * 2
        assert "95 %" in chart.note


def test_tiles_have_it_beside_the_number(run):
    page = (run.folder / "report.html").read_text()
    shown, label = read_contents(run.folder).metric_texts()["accuracy"]
    assert " ± " in shown
    assert shown in page
    assert label in page
    assert "accuracy on held-out owners" in page
    assert "accuracy/interval" not in page


def test_metrics_in_the_clear_are_drawn_as_before(run):
    contents = read_contents(run.folder)
    for line in contents.history:
        for name in [n for n in line if n.endswith("/interval")]:
            del line[name]
    assert [(chart.lines[0].style, chart.note) for chart in metric_charts(contents)] == [
        ("line", "")
    ] * 2
