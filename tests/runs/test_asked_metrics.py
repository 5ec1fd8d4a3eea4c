"""Metrics that a recipe asks for are wherever a run tells its numbers, and survive a resume."""

import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.console import print_result, round_text
from fedveil.models.metrics import correct
from fedveil.runs.compare import across_clients, open_runs
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run

NAMES = ["accuracy", "top-3", "f1", "auroc", "perplexity"]
ASKED = f"evaluate.metrics={json.dumps(NAMES)}"
ACROSS = ("evaluate.clients=true", "evaluate.clients_every=3")


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_time(line):
    return {name: value for name, value in line.items() if name != "seconds"}


@pytest.fixture
def ended(start):
    def executed(*settings, name="central", out="run"):
        run = start(name, *settings, out=out)
        return run, run.execute()

    return executed


@pytest.mark.slow
def test_they_are_told_everywhere(ended, capsys, cli):
    run, result = ended(ASKED)
    lines = lines_of(run.folder)
    for told in (*lines, result["metrics"]):
        assert [name for name in told if name in NAMES] == NAMES
    assert {name: lines[-1][name] for name in NAMES} == {
        name: value for name, value in result["metrics"].items() if name != "loss"
    }
    text = round_text(run, lines[-1])
    assert all(f"{name} {lines[-1][name]:.3f}" in text for name in NAMES)
    print_result(Console(width=200), result)
    shown = capsys.readouterr().out
    assert all(f"test {name}" in shown for name in NAMES)
    code, out, _ = cli("evaluate", run.folder, "--json")
    assert (code, json.loads(out)) == (0, result["metrics"])


def test_left_out_it_is_the_accuracy_and_training_is_the_same(ended):
    (plain, told), (asked, more) = ended(out="one"), ended(ASKED, out="two")
    assert list(told["metrics"]) == ["loss", "accuracy"]
    assert "over_clients" not in told
    assert told["metrics"].items() <= more["metrics"].items()
    models = [(run.folder / "model.safetensors").read_bytes() for run in (plain, asked)]
    assert models[0] == models[1]
    _, alone = ended("evaluate.metrics=[]", out="three")
    assert list(alone["metrics"]) == ["loss"]


@pytest.mark.slow
def test_a_resume_tells_the_same_numbers(start):
    whole, cut = start("central", ASKED, *ACROSS), start("central", ASKED, *ACROSS, out="cut")
    expected = whole.execute()

    def stop(line):
        if line["round"] == 2:
            raise KeyboardInterrupt

    early = cut.execute(stop)
    assert early["rounds"] == 2
    assert early["over_clients"]
    result = Run.resume(cut.folder, None).execute()
    assert result["metrics"] == expected["metrics"]
    assert result["over_clients"] == expected["over_clients"]
    one, other = (list(map(without_time, lines_of(run.folder))) for run in (whole, cut))
    assert one == other
    told = [line["round"] for line in one if "clients/accuracy/mean" in line]
    assert told == [3, 4]


def test_across_clients_is_told_at_the_end_and_compared(ended, capsys):
    plain, _ = ended(out="plain")
    run, result = ended("evaluate.clients=true")
    told = [line["round"] for line in lines_of(run.folder) if "clients/loss/mean" in line]
    assert told == [4]
    assert set(result["over_clients"]) == {
        f"clients/{name}/{what}"
        for name in ("loss", "accuracy")
        for what in ("mean", "lowest_decile", "highest_decile")
    }
    found = result["over_clients"]
    low, high = found["clients/accuracy/lowest_decile"], found["clients/accuracy/highest_decile"]
    assert low < found["clients/accuracy/mean"] < high
    print_result(Console(width=200), result)
    assert f"mean {found['clients/accuracy/mean']:.4f}, lowest decile" in capsys.readouterr().out
    both = open_runs([plain.folder, run.folder])
    rows = {row["number"]: row for row in across_clients(both)}
    assert list(rows) == list(found)
    for name, row in rows.items():
        assert (row[str(plain.folder)], row[str(run.folder)]) == ("-", found[name])
    assert not across_clients(both[:1])


def test_secure_noise_refuses_to_look_at_clients_and_leaves_nothing(start, tmp_path):
    settings = ("noise.source=secure", "evaluate.clients=true")
    for more in ((), ("evaluate.diagnostics=true",)):
        with pytest.raises(BadInput, match="in the clear: omit it"):
            start("central", *settings, *more)
    assert not list(tmp_path.iterdir())


def test_secure_runs_measure_the_test_split_as_others(ended):
    run, result = ended("noise.source=secure", ASKED)
    assert list(result["metrics"]) == ["loss", *NAMES]
    assert all(line["clients"] is None for line in lines_of(run.folder)[1:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["evaluate.clients_every=2"], "no effect without evaluate.clients = true"),
        (["evaluate.clients=true", "evaluate.diagnostics=false"], "is a diagnostic"),
        (['evaluate.metrics=["rmse"]'], "'rmse' is of numbers and the data have 10 labels"),
        (['evaluate.metrics=["top-10"]'], "is 1 for every model of 10 labels"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_first_charge(
    start, tmp_path, settings, message
):
    with pytest.raises(BadInput, match=message):
        start("central", *settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["f1", "f1"], "evaluate.metrics has 'f1' twice"),
        (["top-K"], "did you mean top-5"),
        (["acuracy"], "did you mean accuracy?"),
        (["rsme"], "did you mean rmse?"),
        (["top-0"], "choose from accuracy, balanced-accuracy"),
        ([""], "evaluate.metrics has ''"),
        ([3], "a text is needed"),
        ("f1", "a list is needed"),
    ],
)
def test_names_are_checked_where_a_recipe_is_read(names, message):
    with pytest.raises(BadInput) as refusal:
        load_recipe("central", {"evaluate.metrics": names})
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_numbers_have_metrics_of_their_own(tmp_path):
    settings = {
        "data.name": "diabetes",
        "data.clients": 20,
        "model.name": "linear",
        "rounds": 2,
        "sample.size": 10,
        "evaluate.metrics": ["rmse", "mae", "r2"],
        "server.lr": 0.01,
        "engine.workers": 1,
    }
    run = fv.run("fedsgd", set=settings, out=tmp_path / "run", quiet=True)
    found = run.result["metrics"]
    assert list(found) == ["loss", "rmse", "mae", "r2"]
    assert found["rmse"] == pytest.approx(math.sqrt(found["loss"]), rel=1e-6)
    assert found["mae"] < found["rmse"]
    assert found["r2"] < 1


def own_data():
    random = np.random.default_rng(0)
    x = random.normal(size=(220, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    clients = [(f"site-{k}", x[10 * k : 10 * k + 10], y[10 * k : 10 * k + 10]) for k in range(20)]
    return fv.FederatedData.from_clients(clients, test=(x[200:], y[200:]), classes=2)


OWN = {"rounds": 2, "sample.size": 10, "engine.workers": 1}


def test_a_task_s_own_metrics_come_first(tmp_path):
    torch.manual_seed(0)
    task = fv.Task(nn.Linear(4, 2), fv.cross_entropy, {"hits": correct, "auroc": "auroc"})
    given = {**OWN, "evaluate.metrics": ["auroc", "f1"]}
    done = fv.run(
        "fedsgd", model=task, data=own_data(), set=given, out=tmp_path / "run", quiet=True
    )
    assert list(done.result["metrics"]) == ["loss", "hits", "auroc", "f1"]
    assert list(task.measures) == ["hits", "auroc"]  # the caller's stays as it is
    x = np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32)
    again = fv.open_run(tmp_path / "run", model=task).evaluate({"x": x, "y": np.zeros(9, int)})
    assert math.isnan(again["auroc"])  # one label only
    other = fv.Task(nn.Linear(4, 2), fv.cross_entropy, {"f1": correct})
    with pytest.raises(BadInput, match="'f1', and the Task has another metric of that name"):
        fv.run("fedsgd", model=other, data=own_data(), set=given, out=tmp_path / "no", quiet=True)


class Waves(nn.Module):
    """A sine of infinity is not a number, in whichever order a processor adds up."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return torch.sin(self.out(self.hidden(x).square()))


def test_a_model_that_diverged_is_told_as_one(tmp_path, cli, capsys):
    settings = {**OWN, "rounds": 3, "server.lr": 1e30, "evaluate.metrics": ["accuracy", "f1"]}
    settings |= {"evaluate.clients": True}
    torch.manual_seed(0)
    net = Waves()
    runs = [
        fv.run("fedavg", model=net, data=own_data(), set=settings, out=tmp_path / name, quiet=True)
        for name in ("one", "two")
    ]
    for run in runs:
        assert run.result["metrics"] == {"loss": None, "accuracy": None, "f1": None}
        assert run.result["over_clients"]["clients/accuracy/mean"] is None
        assert "accuracy nan" in repr(run)
    code, out, _ = cli("compare", *(run.folder for run in runs), "--json")
    assert code == 0
    assert json.loads(out)["runs"][0]["accuracy"] is None
    assert "nan" in cli("compare", *(run.folder for run in runs))[1]
    print_result(Console(width=200), runs[0].result)
    assert "test accuracy" in capsys.readouterr().out
