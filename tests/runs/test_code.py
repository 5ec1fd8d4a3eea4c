"""`model.path`: a module from a function in a file, run only where its user allows it."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.base.errors import BadInput

NET = """
import math

from torch import nn

WIDTH = 4


class Net(nn.Module):
    def __init__(self, features, width, classes):
        super().__init__()
        self.first, self.last = nn.Linear(features, width), nn.Linear(width, classes)

    def forward(self, x):
        return self.last(self.first(x.flatten(1)).tanh())


def make(shape, classes, width=WIDTH):
    return Net(math.prod(shape), width, classes)
"""
PLAIN = """
import math

from torch import nn


def make(shape, classes, width=4):
    layers = nn.Linear(math.prod(shape), width), nn.Tanh(), nn.Linear(width, classes)
    return nn.Sequential(nn.Flatten(), *layers)
"""
"""The same of torch's own classes alone, which need no capture."""

FAST = {
    "rounds": 2,
    "sample.rate": 0.5,
    "noise.multiplier": 0.5,
    "budget.epsilon": math.inf,
    "data.clients": 20,
    "engine.workers": 1,
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)


def run(path="net.py:make", out="run", **options):
    settings = {**FAST, "model.path": path, **options}
    return fv.run("central", out=out, set=settings, allow_code=True, quiet=True)


def test_a_recipe_trains_what_its_function_makes_and_a_run_is_opened_with_it():
    ran = run(**{"model.options.width": 7})
    assert ran.task.size == 64 * 7 + 7 + 7 * 10 + 10
    assert "first weights are public" in str(ran.claims[0].assumptions)
    opened = fv.open_run("run", allow_code=True)
    assert opened.recipe.model.name == "code"
    rows = np.zeros((3, *opened.stored.record_shape), np.float32)
    assert np.array_equal(opened.predict(rows)["prediction"], ran.predict(rows)["prediction"])


def test_the_first_weights_are_those_of_the_seed(tmp_path):
    (tmp_path / "net.py").write_text(PLAIN)
    torch.manual_seed(5)
    one = run(out="a").task.parameters
    torch.manual_seed(6)
    assert torch.equal(run(out="b").task.parameters, one)
    assert not torch.equal(run(out="c", seed=2).task.parameters, one)


SETTINGS = {**FAST, "model.path": "net.py:make"}
ASKED = {
    "run": lambda: fv.run("central", set=SETTINGS, out="other", quiet=True),
    "rounds": lambda: list(fv.rounds("central", set=SETTINGS, out="other")),
    "resume": lambda: fv.resume("run", quiet=True),
    "open_run": lambda: fv.open_run("run").module,
}


def test_code_is_run_only_where_it_is_allowed(tmp_path):
    (tmp_path / "net.py").write_text(PLAIN)
    run()
    (tmp_path / "net.py").write_text("open('trace', 'w').close()\n" + PLAIN)
    for ask in ASKED.values():
        with pytest.raises(BadInput, match=r"^model.path is 'net.py:make': a recipe may come from"):
            ask()
    assert not (tmp_path / "trace").exists()
    assert not (tmp_path / "other").exists()
    fv.open_run("run", allow_code=True).module.eval()
    assert (tmp_path / "trace").exists()


@pytest.mark.slow
def test_a_run_is_resumed_with_the_same_code_and_not_with_other(tmp_path):
    def stop(line):
        if line["round"] == 1:
            raise KeyboardInterrupt

    arguments = {"set": SETTINGS, "allow_code": True, "quiet": True}
    stopped = fv.run("central", out="run", on_round=stop, **arguments)
    assert stopped.result["rounds"] == 1
    for old, new in ((".tanh()", ".relu()"), ("WIDTH = 4", "WIDTH = 5")):
        (tmp_path / "net.py").write_text(NET.replace(old, new))
        with pytest.raises(BadInput, match="is not the one that the run was started with"):
            fv.resume("run", allow_code=True, quiet=True)
    (tmp_path / "net.py").write_text(NET + "# a remark\n")
    resumed = fv.resume("run", allow_code=True, quiet=True)
    whole = fv.run("central", out="whole", **arguments)
    assert torch.equal(resumed.task.parameters, whole.task.parameters)


BAD = {
    "net.py": r"write it as 'net.py:make'",
    "net.txt:make": r"write it as 'net.py:make'",
    "net.py:two words": r"write it as 'net.py:make'",
    "missing.py:make": r"'missing.py' cannot be read: No such file",
    "net.py:other": r"net.py has no function 'other'",
    "net.py:WIDTH": r"net.py has no function 'WIDTH'",
}


@pytest.mark.parametrize("path", BAD)
def test_a_bad_path_is_told_on_one_line(tmp_path, path):
    with pytest.raises(BadInput, match=BAD[path]) as told:
        run(path)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


WRONG = {
    "def make(: pass": r"bad.py, line 1, is not Python",
    "import no_such_package": r"bad.py, line 1, raised ModuleNotFoundError: No module named",
    "def make():\n    return 1 / 0": r"bad.py, line 2, raised ZeroDivisionError: division by zero",
    "raise SystemExit(3)": r"bad.py, line 1, raised SystemExit: 3",
    "def make():\n    return 3": r"make in bad.py returned a int: return an instance of torch.nn",
    "def make(depth): pass": r"model.options does not fit make\(depth\): missing .* 'depth'",
}


@pytest.mark.parametrize("source", WRONG)
def test_bad_code_is_told_on_one_line(tmp_path, source):
    (tmp_path / "bad.py").write_text(source + "\n")
    with pytest.raises(BadInput, match=WRONG[source]) as told:
        run("bad.py:make")
    assert "\n" not in str(told.value)


KEYS = {
    "model.options.depth": (3, r"model.options does not fit make\(shape, classes, width=4\)"),
    "model.hidden": ([3], "model.hidden has no effect on 'code'"),
    "model.name": ("mlp", "model.path is given beside model.name = 'mlp'"),
}


@pytest.mark.parametrize("key", KEYS)
def test_keys_that_do_not_go_with_code_are_refused(key):
    value, told = KEYS[key]
    with pytest.raises(BadInput, match=told):
        run(**{key: value})
    with pytest.raises(BadInput, match=r"code.: give model"):
        fv.run("central", set={"model.name": "code"}, allow_code=True, out="no", quiet=True)
    with pytest.raises(BadInput, match=r"model.options is for the function in model.path"):
        fv.run("central", set={"model.options.width": 3}, out="no", quiet=True)


@pytest.mark.slow
def test_a_file_that_is_called_like_a_package_is_known_by_its_code(tmp_path):
    (tmp_path / "torch.py").write_text(NET)
    first = run("torch.py:make", out="a").recipe.model.digest
    (tmp_path / "torch.py").write_text(NET.replace("tanh", "relu"))
    assert run("torch.py:make", out="b").recipe.model.digest != first


@pytest.mark.slow
def test_the_command_line_asks_as_well(tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros((2, 1, 8, 8), np.float32))

    def command(*words):
        words = [sys.executable, "-m", "fedveil", *map(str, words)]
        return subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)

    settings = [f"--set={key}={value}" for key, value in FAST.items()]
    start = ("run", "--set=model.path=net.py:make", *settings, "--out=run", "--quiet")
    refused = command(*start)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: model.path is 'net.py:make'")
    assert refused.stderr.count("\n") == 1
    assert command(*start, "--allow-code").returncode == 0
    for words in (["evaluate", "run"], ["predict", "run", "rows.npy"], ["run", "--resume=run"]):
        assert "--allow-code" in command(*words).stderr
        assert command(*words, "--allow-code").returncode == 0
