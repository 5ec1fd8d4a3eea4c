"""Runs from Python: the same room as the command line, with a module and data of one's own."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.ledger.statement import statements

SET = {"rounds": 4, "sample.rate": 0.5, "client.epochs": 1, "engine.workers": 1}
SET["engine.mode"] = "looped"  # which is faster is measured, and differs from run to run
FAST = {**SET, "noise.multiplier": 2.0, "budget.epsilon": float("inf"), "budget.delta": 1e-4}


def make_data(seed=0, classes=2):
    random = np.random.default_rng(seed)
    x = random.normal(size=(220, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) if classes else x[:, 0] + 0.5
    clients = [(f"site-{k}", x[10 * k : 10 * k + 10], y[10 * k : 10 * k + 10]) for k in range(20)]
    return fv.FederatedData.from_clients(clients, test=(x[200:], y[200:]), classes=classes)


def make_net(seed=0, outputs=2, activation=nn.Tanh):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, outputs))


@pytest.fixture
def start(tmp_path):
    """A run of an own module on own data."""

    def started(out="run", settings=FAST, **changes):
        parts = {"model": make_net(), "data": make_data(), **changes}
        return fv.run("central", out=tmp_path / out, set=settings, quiet=True, **parts)

    return started


def same(a, b):
    """Two run directories that hold the same model, metrics (but for time) and claims."""
    lines = [[{**line, "seconds": 0} for line in run.history] for run in map(fv.open_run, (a, b))]
    models = [(Path(folder) / "model.safetensors").read_bytes() for folder in (a, b)]
    claims = [fv.open_run(folder).result["claims"] for folder in (a, b)]
    return lines[0] == lines[1] and models[0] == models[1] and claims[0] == claims[1]


# --- what comes back ---


def test_a_run_has_module_claims_history_and_result(start, tmp_path):
    run = start()
    assert run.folder == tmp_path / "run"
    assert [line["round"] for line in run.history] == [0, 1, 2, 3, 4]
    assert run.result == json.loads((run.folder / "result.json").read_text())
    assert [claim.to_dict() for claim in run.claims] == run.result["claims"]
    assert not run.module.training
    x, y = torch.tensor(make_data().test_x), torch.tensor(make_data().test_y)
    accuracy = float((run.module(x).argmax(-1) == y).double().mean())
    assert accuracy == pytest.approx(run.result["metrics"]["accuracy"])


def test_the_callers_module_and_threads_stay_as_they_were(start):
    before, threads = make_net(), torch.get_num_threads()
    run = start(model=before)
    for old, new in zip(make_net().parameters(), before.parameters(), strict=True):
        assert torch.equal(old, new)
    assert not torch.equal(run.module[0].weight, before[0].weight)
    assert torch.get_num_threads() == threads


def test_numbers_are_learnt_by_squared_error(start):
    run = start(model=make_net(outputs=1), data=make_data(classes=0))
    assert set(run.result["metrics"]) == {"loss"}


def test_a_task_brings_its_own_loss_and_metrics(start):
    def hinge(outputs, targets):
        return (1 - outputs[:, 0] * (2 * targets - 1)).clamp(min=0)

    def off(outputs, targets):
        return (outputs[:, 0].sign() != 2 * targets - 1).float()

    run = start(model=fv.Task(make_net(), hinge, {"off": off}))
    assert set(run.result["metrics"]) == {"loss", "off"}


def test_the_recipe_may_be_a_file_or_a_dict(tmp_path):
    file = str(Path(fv.__file__).parent / "recipes" / "central.toml")
    parts = {"model": make_net(), "data": make_data(), "quiet": True}
    assert fv.run(file, out=tmp_path / "file", set=FAST, **parts).result["rounds"] == 4
    given = {
        "name": "mine",
        "rounds": 2,
        "sample": {"kind": "all"},
        "client": {"kind": "gradient"},
        "data": {"name": "digits"},
        "model": {"name": "softmax"},
    }
    plain = fv.run(given, out=tmp_path / "dict", **parts)
    assert (plain.result["recipe"], plain.claims) == ("mine", ())
    assert given["data"] == {"name": "digits"}


@pytest.mark.slow
def test_the_same_run_as_the_command_line(tmp_path):
    settings = {**FAST, "data.clients": 20}
    fv.run("central", out=tmp_path / "python", set=settings, quiet=True)
    texts = [f"--set={key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "fedveil", "run", "central", *texts]
    subprocess.run([*command, "--out", tmp_path / "line", "--quiet"], check=True)
    assert same(tmp_path / "python", tmp_path / "line")


# --- settings that do not fit ---


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"settings": {"data.clients": 3}}, "data.clients has no effect on data of your own"),
        ({"settings": ["model.name=mlp"]}, "model.name has no effect on model of your own"),
        ({"settings": {"budget": {"epsilon": 1}}}, "budget.delta is missing"),
        ({"settings": {"nosection.key.deep": 1}}, "write it as section.key=value"),
        ({"settings": "rounds=3"}, "use a dict, or a list of texts"),
        ({"model": nn.Linear}, "give an instance of nn.Module, or a Task"),
        ({"model": make_net(outputs=1)}, "the model has 1 outputs and the data 2 labels"),
        ({"data": [1, 2]}, "make it with FederatedData.from_table"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(start, tmp_path, changes, told):
    with pytest.raises(BadInput, match=told.replace(".", r"\.")):
        start(**changes)
    assert list(tmp_path.iterdir()) == []


def test_parts_belong_to_runs_that_are_their_own(start, tmp_path):
    with pytest.raises(BadInput, match=r"fedveil\.run or fedveil\.resume in Python, with model="):
        fv.run({**_raw(), "model": {"name": "own"}}, out=tmp_path / "x")
    fv.run("central", out=tmp_path / "zoo", set={**FAST, "data.clients": 20}, quiet=True)
    with pytest.raises(BadInput, match=r"model.name = 'softmax': leave one out"):
        fv.resume(tmp_path / "zoo", model=make_net())


def _raw():
    return {
        "name": "mine",
        "rounds": 2,
        "sample": {"kind": "all"},
        "client": {"kind": "gradient"},
        "data": {"name": "digits"},
    }


# --- interrupted, killed, resumed ---


def test_leaving_the_loop_ends_the_run_and_resume_continues_it(start, tmp_path):
    start("whole")
    parts = {"model": make_net(), "data": make_data()}
    seen = []
    for line in fv.rounds("central", out=tmp_path / "left", set=FAST, **parts):
        seen.append(line)
        if line["round"] == 2:
            break
    run = fv.open_run(tmp_path / "left")
    assert (run.result["stopped"], run.result["rounds"]) == ("interrupted", 2)
    assert f"fedveil.resume('{tmp_path / 'left'}', model=..., data=...)" in run.result["why"]
    assert run.history[1:] == json.loads(json.dumps(seen))
    fv.resume(tmp_path / "left", quiet=True, **parts)
    assert same(tmp_path / "whole", tmp_path / "left")


def test_an_error_in_a_callback_ends_the_run_and_is_raised(start, tmp_path):
    def fail(line):
        if line["round"] == 3:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        start("failed", on_round=fail)
    run = fv.open_run(tmp_path / "failed")
    assert (run.result["stopped"], run.result["rounds"]) == ("interrupted", 3)


def test_ctrl_c_returns_what_there_is(start):
    def press(line):
        if line["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    # Tests that a shell starts in its background ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = start(on_round=press)
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.result["stopped"] == "interrupted"
    assert run.result["rounds"] in (2, 3)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import fedveil as fv
from tests.test_api import FAST, make_data, make_net

def die(line):
    if line["round"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)

fv.run("central", model=make_net(), data=make_data(), out={out!r}, set=FAST, on_round=die)
"""


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(start, tmp_path):
    out = str(tmp_path / "killed")
    code = KILLED.format(tests=str(Path(__file__).parents[1]), out=out)
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == -signal.SIGKILL
    assert repr(fv.open_run(out)).endswith("not ended)")
    with pytest.raises(BadInput, match="the run has not ended"):
        _ = fv.open_run(out).claims
    fv.resume(out, model=make_net(), data=make_data(), quiet=True)
    start("whole")
    assert same(out, tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": make_net(seed=1)}, "not the one that the run was started with"),
        ({"model": make_net(activation=nn.ReLU)}, "not the one that the run was started with"),
        ({"model": fv.Task(make_net(), fv.cross_entropy)}, "not the one that the run was started"),
        ({"data": make_data(seed=1)}, "data"),
        ({"model": None}, "with model="),
        ({"data": None}, "with data="),
    ],
)
def test_another_module_or_data_is_refused_on_resume(tmp_path, changes, told):
    parts = {"model": make_net(), "data": make_data()}
    next(fv.rounds("central", out=tmp_path / "run", set=FAST, **parts))
    with pytest.raises(BadInput, match=told):
        fv.resume(tmp_path / "run", quiet=True, **{**parts, **changes})


def test_records_that_were_changed_in_place_are_refused_on_resume(tmp_path):
    x, given = make_data().x.copy(), make_data()
    data, net = replace(given, x=x), make_net()
    next(fv.rounds("central", out=tmp_path / "run", set=FAST, model=net, data=data))
    x[3] += 1
    with pytest.raises(BadInput, match="data is"):
        fv.resume(tmp_path / "run", quiet=True, model=net, data=data)
    x[3] = given.x[3]
    fv.resume(tmp_path / "run", quiet=True, model=net, data=data)


def test_records_that_were_changed_during_a_run_are_noted(start):
    data = make_data()

    def change(line):
        data.x[:] += 1

    (note,) = [n for n in start(data=data, on_round=change).result["notes"] if "records" in n]
    assert note.startswith("the records were changed in place during the run")


def test_a_callback_that_changes_the_module_changes_nothing(start, tmp_path):
    net = make_net()

    def forget(line):
        with torch.no_grad():
            net[0].weight.zero_()

    start("whole")
    start("forgetful", model=net, on_round=forget)
    assert same(tmp_path / "whole", tmp_path / "forgetful")


# --- what may be published ---


def test_secure_noise_shows_no_diagnostics(start):
    shown = []
    run = start(settings={**FAST, "noise.source": "secure"}, on_round=shown.append)
    assert [claim.noise for claim in run.claims] == ["secure"] * len(run.claims)
    for line in (*shown, *run.history[1:]):
        assert [line[key] for key in ("clients", "clipped", "snr", "seconds")] == [None] * 4


PUBLIC = "the model's first weights are public: they were not learnt from these clients"


def test_every_claim_assumes_that_first_weights_are_public(start, tmp_path):
    assert all(PUBLIC in claim.assumptions for claim in start().claims)
    settings = {**FAST, "data.clients": 20}
    zoo = fv.run("central", out=tmp_path / "zoo", set=settings, quiet=True)
    assert all(PUBLIC in claim.assumptions for claim in zoo.claims)


def test_a_run_that_begins_with_another_run_s_weights_names_its_claim(start, tmp_path):
    first = start()
    again = fv.run("central", model=first.module, data=make_data(), out=tmp_path / "again",
                   set=FAST, quiet=True)  # fmt: skip
    for claim in again.claims:
        assert any(f"an earlier training, {first.claims[0]}" in text for text in claim.assumptions)
        assert PUBLIC not in claim.assumptions


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ledger_epsilon": 3}, "ledger_epsilon is the budget of a shared ledger"),
        ({"ledger": "all.db", "ledger_epsilon": -1}, "ledger_epsilon is -1: a positive number"),
        ({"ledger": "all.db", "ledger_epsilon": "8"}, "ledger_epsilon is '8': a number is needed"),
    ],
)
def test_a_common_budget_that_is_none_is_refused(start, tmp_path, changes, told):
    with pytest.raises(BadInput, match=told):
        start(**changes)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_of_a_run_pays_for_itself_on_a_shared_ledger(tmp_path):
    """The copy does rounds again with other noise: what both released is charged."""
    settings = {**SET, "noise.source": "secure", "noise.multiplier": 2.0}
    settings |= {"budget.epsilon": 8, "budget.delta": 1e-4}
    shared = {"ledger": tmp_path / "all.db", "ledger_epsilon": 20}
    parts = {"model": make_net(), "data": make_data()}
    for line in fv.rounds("central", out=tmp_path / "run", set=settings, **shared, **parts):
        if line["round"] == 2:
            break
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    first = fv.resume(tmp_path / "run", quiet=True, **parts).claims[0].epsilon
    second = fv.resume(tmp_path / "copy", quiet=True, **parts)
    (told,) = statements(tmp_path / "all.db")
    assert len(told.charges) == 4 + 2
    assert second.claims[0].epsilon > first


def test_runs_share_a_ledger(start, tmp_path):
    shared = {"ledger": tmp_path / "all.db", "ledger_epsilon": 3}
    settings = {**SET, "noise.multiplier": 2.0, "budget.epsilon": 3.0, "budget.delta": 1e-4}
    start("one", settings, **shared)
    second = start("two", {**settings, "seed": 2, "rounds": 400}, **shared)
    assert second.result["stopped"] == "budget"
    assert len(statements(tmp_path / "all.db")) == 2


# --- opening ---


def test_an_own_module_is_opened_with_its_code(start):
    run = start()
    with pytest.raises(BadInput, match=r"fedveil\.open_run\(folder, model=\.\.\.\)"):
        _ = fv.open_run(run.folder).module
    opened = fv.open_run(run.folder, model=make_net(seed=5)).module
    assert torch.equal(opened[0].weight, run.module[0].weight)
    for other in (make_net(activation=nn.ReLU), nn.Linear(4, 2)):
        with pytest.raises(BadInput, match="give the module that was trained"):
            _ = fv.open_run(run.folder, model=other).module


def test_a_model_of_the_zoo_is_opened_by_its_name(tmp_path):
    settings = {**FAST, "data.clients": 20, "model.name": "mlp", "model.hidden": [5]}
    fv.run("central", out=tmp_path / "zoo", set=settings, quiet=True)
    module = fv.open_run(tmp_path / "zoo").module
    assert sum(p.numel() for p in module.parameters()) == 64 * 5 + 5 + 5 * 10 + 10


@pytest.mark.parametrize(
    ("name", "use"),
    [("model.safetensors", lambda run: run.module), ("result.json", lambda run: run.claims)],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_was_changed_since_is_refused(start, tmp_path, name, use, shared):
    common = {"ledger": tmp_path / "all.db", "ledger_epsilon": 3} if shared else {}
    settings = {**FAST, "budget.epsilon": 3.0}
    run = start(settings=settings, **common)
    path = run.folder / name
    path.write_bytes(path.read_bytes().replace(b'"epsilon', b'"Epsilon', 1))
    changed = fv.open_run(run.folder, model=make_net())
    with pytest.raises(BadInput, match=f"{name} is not the one that the run left: it was changed"):
        use(changed)
    if name == "result.json":
        assert "it was changed" in repr(changed)
        assert "it was changed" in changed._repr_html_()


def test_a_run_that_was_given_away_without_its_ledger_is_opened(start):
    run = start()
    (run.folder / "ledger.db").unlink()
    opened = fv.open_run(run.folder, model=make_net())
    assert torch.equal(opened.module[0].weight, run.module[0].weight)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"holds no run: it has no recipe\.toml"):
        fv.open_run(tmp_path)


def test_a_run_is_displayed_with_its_claims_escaped(start, tmp_path):
    run = start("<b>")
    assert len(repr(run)) < 300
    shown = run._repr_html_()
    assert "&lt;b&gt;" in shown
    assert str(run.claims[0].delta) in shown
    assert f"{run.result['metrics']['accuracy']:.4g}" in shown


# --- logs ---


def scalars(folder):
    """What TensorBoard reads back: name -> {round: value}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in tags}


def numbers_of(run):
    """The same of metrics.jsonl."""
    found = {}
    for line in run.history:
        for name, value in line.items():
            if name not in ("round", "claim") and value is not None:
                found.setdefault(name, {})[line["round"]] = pytest.approx(value, rel=1e-6)
    return found


def test_a_log_holds_what_metrics_hold(start):
    run = start(log="tensorboard")
    assert scalars(run.folder) == numbers_of(run)


def test_the_log_of_a_resumed_run_has_every_round(tmp_path):
    parts = {"model": make_net(), "data": make_data()}
    for line in fv.rounds("central", out=tmp_path / "run", set=FAST, log=["tensorboard"], **parts):
        if line["round"] == 2:
            break
    run = fv.resume(tmp_path / "run", quiet=True, log="tensorboard", **parts)
    assert scalars(run.folder) == numbers_of(run)


def test_a_log_of_a_secure_run_has_no_diagnostics(start):
    run = start(settings={**FAST, "noise.source": "secure"}, log="tensorboard")
    assert scalars(run.folder) == numbers_of(run)
    assert scalars(run.folder).keys().isdisjoint({"clients", "clipped", "snr", "seconds"})


def test_an_unknown_log_is_refused_and_leaves_nothing(start, tmp_path):
    with pytest.raises(BadInput, match="log 'board' is unknown: use one of tensorboard"):
        start(log="board")
    assert list(tmp_path.iterdir()) == []
