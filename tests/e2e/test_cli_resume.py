"""Runs that are killed or interrupted and resumed end at the model of one that was not."""

import json
import signal
import time
from pathlib import Path

import pytest

ROUNDS = "rounds=150"


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

    def model(recipe):
        assert cli("run", recipe, *settings(recipe, ROUNDS), "--out", "whole", "--quiet").code == 0
        return Path("whole/model.safetensors").read_bytes()

    return model


def test_kill_and_resume(cli, spawn, settings, whole, tmp_path):
    folder = tmp_path / "killed"
    process = spawn("run", "central", *settings("central", ROUNDS), "--out", folder, "--quiet")
    wait_for_lines(process, folder, 12)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "result.json").exists()
    assert 12 <= lines_of(folder) < 150
    told = cli("run", "--resume", folder, "--quiet", "--json")
    result = json.loads(told.out)
    assert (told.code, result["rounds"], result["stopped"]) == (0, 150, "rounds")
    assert (folder / "model.safetensors").read_bytes() == whole("central")
    charges = json.loads(cli("ledger", folder, "--json").out)["charges"]
    assert [charge["round"] for charge in charges] == list(range(1, 151))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rounds = [json.loads(line)["round"] for line in lines]
    assert rounds == list(range(151))


def test_ctrl_c_and_resume(cli, spawn, settings, whole, tmp_path):
    folder = tmp_path / "interrupted"
    process = spawn("run", "fedavg", *settings("fedavg", ROUNDS), "--out", folder, "--json")
    wait_for_lines(process, folder, 12)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert f"fedveil run --resume {folder}" in err.splitlines()[-1]
    result = json.loads((folder / "result.json").read_text())
    assert result == json.loads(out)
    assert result["stopped"] == "interrupted"
    assert 10 <= result["rounds"] < 150
    told = cli("run", "--resume", folder, "--quiet", "--json")
    assert (told.code, json.loads(told.out)["rounds"]) == (0, 150)
    assert (folder / "model.safetensors").read_bytes() == whole("fedavg")
