"""Whole runs, sweeps and audits on a Ray cluster: what they leave is what they leave without it."""

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.audit.membership import ShadowModels, ShadowRunner
from fedveil.base.errors import BadInput
from fedveil.cli.options import cluster_of, engine_settings
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.tuning.recipe_grid import axis, cells
from fedveil.tuning.trials import Laboratory

pytestmark = pytest.mark.filterwarnings(  # Ray leaves files and sockets open
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
SETTINGS = ["rounds=3", "data.clients=40", "engine.chunk=4", "engine.mode=looped"]
NET = """\
from torch import nn


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x):
        return self.layer(x.flatten(1)).tanh()


def make(classes):
    return Net(classes)
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("dask", None), "--engine is 'dask': use processes or ray"),
        ((None, "auto"), "--address 'auto' needs --engine ray"),
        (("processes", "auto"), "--address 'auto' needs --engine ray"),
        (("ray", "ray://head:1"), "--address is 'ray://head:1'"),
    ],
)
def test_bad_options(given, said):
    with pytest.raises(BadInput, match=said):
        engine_settings(*given)


def test_options_become_settings_or_a_cluster():
    assert engine_settings(None, None) == []
    assert engine_settings("ray", "a:1") == ["engine.kind=ray", "engine.address=a:1"]
    assert cluster_of(None, None) is cluster_of("processes", None) is None
    assert cluster_of("ray", None) == fv.engines.RayCluster()


@pytest.mark.slow
def test_runs_sweeps_and_reference_models(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    cluster = fv.engines.RayCluster()
    with cluster.joined(2):
        check_runs(tmp_path)
        check_trials(cluster)
        check_halves(cluster)


def check_runs(folder):
    own = ["model.path=net.py:make", "noise.source=secure"]
    seeded = (("central", []), ("ldp-fl", ["shuffle=none"]), ("dp-sgd", []))
    for name, settings in (*seeded, ("central", own)):
        states, claims = [], []
        for kind in ("processes", "ray"):
            recipe = load_recipe(name, [*SETTINGS, *settings, f"engine.kind={kind}"])
            run = Run.start(
                recipe, folder / f"{name}-{kind}-{len(settings)}", None, allow_code=True
            )
            result = run.execute()
            assert result["stopped"] == "rounds"
            states.append(fv.open_run(run.folder, allow_code=True).task.parameters)
            claims.append([claim["epsilon"] for claim in result["claims"]])
        assert claims[0] == claims[1]
        assert torch.equal(*states) == (settings is not own), name


def check_trials(cluster):
    outcomes = []
    for place in (None, cluster):
        laboratory = Laboratory(workers=1 if place is None else 0, cluster=place)
        grid = cells("central", [*SETTINGS, "engine.kind=ray"], [axis("clip.value=0.1,0.5")])
        prepared = [laboratory.prepare(cell) for cell in grid]
        outcomes.append(dict(laboratory.trials([(p, [r]) for p in prepared for r in (0, 1)])))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == 4


def check_halves(cluster):
    training = build(load_recipe("central", SETTINGS))
    shadow_models = ShadowModels(training, 2)
    alone = shadow_models.model_losses(ShadowRunner(4))
    assert np.array_equal(shadow_models.model_losses(ShadowRunner(4, cluster=cluster)), alone)


@pytest.mark.slow
def test_a_run_is_resumed_elsewhere(tmp_path):
    recipe = load_recipe("central", SETTINGS)
    whole = Run.start(recipe, tmp_path / "whole", None)
    whole.execute()
    begun = Run.start(recipe, tmp_path / "begun", None)
    lines = begun.metric_lines()
    next(lines)
    lines.close()
    moved = Run.resume(tmp_path / "begun", None, where=["engine.kind=ray"])
    assert moved.training.cluster == fv.engines.RayCluster()
    assert moved.recipe.engine.kind is None
    assert moved.execute()["rounds"] == 3
    there = [fv.open_run(tmp_path / name).task.parameters for name in ("whole", "begun")]
    assert torch.equal(*there)
