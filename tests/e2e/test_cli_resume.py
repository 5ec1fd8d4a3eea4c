"""Runs that are killed or interrupted and resumed end at the model of one that was not."""

import json
import signal
import time
from pathlib import Path

import pytest

LAST = 50
ROUNDS = f"rounds={LAST}"


def lines_of(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_lines(process, folder, count):
    while lines_of(folder) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.fixture
def whole(cli, settings):
    """The model of a run that nobody disturbed."""

    def model(recipe, *more):
        wanted = settings(recipe, ROUNDS, *more)
        assert cli("run", recipe, *wanted, "--out", "whole", "--quiet").code == 0
        return Path("whole/model.safetensors").read_bytes()

    return model


QUANTILE = (
    "sample.max_participations=60",
    "clip.kind=quantile",
    "clip.value=0.05",
    "clip.bit_noise=2.0",
)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [("central", ()), ("ldp-sgd", QUANTILE)],
)
@pytest.mark.slow
def test_kill_and_resume(cli, spawn, settings, whole, tmp_path, recipe, more):
    folder = tmp_path / "killed"
    wanted = settings(recipe, ROUNDS, *more)
    process = spawn("run", recipe, *wanted, "--out", folder, "--quiet")
    wait_for_lines(process, folder, 6)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "result.json").exists()
    assert 6 <= lines_of(folder) < LAST
    told = cli("run", "--resume", folder, "--quiet", "--json")
    result = json.loads(told.out)
    assert (told.code, result["rounds"], result["stopped"]) == (0, LAST, "rounds")
    assert (folder / "model.safetensors").read_bytes() == whole(recipe, *more)
    charges = json.loads(cli("ledger", folder, "--json").out)["charges"]
    for covers in {charge["covers"] for charge in charges}:
        rounds = [charge["round"] for charge in charges if charge["covers"] == covers]
        assert rounds == list(range(1, LAST + 1))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rounds = [json.loads(line)["round"] for line in lines]
    assert rounds == list(range(LAST + 1))


def test_ctrl_c_and_resume(cli, spawn, settings, whole, tmp_path):
    folder = tmp_path / "interrupted"
    process = spawn("run", "fedavg", *settings("fedavg", ROUNDS), "--out", folder, "--json")
    wait_for_lines(process, folder, 6)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert f"fedveil run --resume {folder}" in err.splitlines()[-1]
    result = json.loads((folder / "result.json").read_text())
    assert result == json.loads(out)
    assert result["stopped"] == "interrupted"
    assert 4 <= result["rounds"] < LAST
    told = cli("run", "--resume", folder, "--quiet", "--json")
    assert told.code == 0, told.err
    assert json.loads(told.out)["rounds"] == LAST
    assert (folder / "model.safetensors").read_bytes() == whole("fedavg")
