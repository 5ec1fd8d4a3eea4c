"""The examples beside the README's: each runs by itself, and ends where it says."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
README = "own_model.py"


def run(name, folder):
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == []
    return done.stdout.splitlines()


def accuracies(lines):
    return [float(line.split(" epsilon ")[0].split()[-1]) for line in lines]


def test_every_example_is_short_and_has_a_docstring():
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    others = ["own_clip.py", "own_csv.py", README, "text_lstm.py"]
    assert names == ["audit.py", "compare_mechanisms.py", *others]
    for name in names:
        text = (EXAMPLES / name).read_text()
        assert ast.get_docstring(ast.parse(text)), name
        assert len(text.splitlines()) < 80, name


@pytest.mark.slow
def test_own_clip(tmp_path):
    first, *lines = run("own_clip.py", tmp_path)
    assert first.startswith("noise on updates ")
    assert len(lines) == 15
    clips = [float(line.split()[2]) for line in lines]
    assert clips[0] == 1.0
    assert len(set(clips)) > 5
    assert accuracies(lines)[-1] > 0.8
    assert all("(zero-out, central trust)" in line for line in lines)


@pytest.mark.slow
def test_own_csv(tmp_path):
    lines = run("own_csv.py", tmp_path)
    assert len(lines) == 20
    assert accuracies(lines)[-1] > 0.7


@pytest.mark.slow
def test_text_lstm(tmp_path):
    lines = run("text_lstm.py", tmp_path)
    assert len(lines) == 8
    assert accuracies(lines)[-1] > 0.7
    assert all("per record (zero-out, local trust)" in line for line in lines)


@pytest.mark.slow
def test_audit(tmp_path):
    lines = run("audit.py", tmp_path)
    assert lines[0] == "10 charges, the first of round 1"
    assert sum(line.startswith("epsilon ") for line in lines) == 2
    assert "none changed, removed, inserted or moved" in lines[-2]
    assert lines[-1].startswith("refused: /run/result.json is not the one that the run left")
