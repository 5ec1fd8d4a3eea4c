"""The examples beside the README's: each runs by itself, and ends where it says."""

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
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
    own = ["own_clip.py", "own_csv.py", README]
    others = ["lora.py", *own, "record_level.py", "resnet18.py", "site_noise.py", "text_lstm.py"]
    first = ["audit.py", "compare_mechanisms.py", "hospitals.py", "language_model.py"]
    assert names == [*first, *others]
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
def test_language_model(tmp_path):
    first, claim, words = run("language_model.py", tmp_path)
    before, after = (float(part.split()[-1]) for part in first.split(", then"))
    # all that can be known of a sentence is a perplexity of (3 x 3 x 1 x 3) ** 0.25 = 2.28
    assert before > 10
    assert 2.2 < after < 2.7
    assert "per client (zero-out, central trust)" in claim
    assert words.split("'")[1] in ("see", "like", "want")
    assert words.split("'")[3] in ("tea", "films", "books")
    assert words.split("'")[5] == "and"


@pytest.mark.slow
def test_lora(tmp_path):
    lines = run("lora.py", tmp_path)
    assert any(line.startswith("826 of 13,834 parameters are trained") for line in lines)
    assert "per client (zero-out, central trust" in lines[-2]
    assert lines[-1] == "826 numbers per update"


@pytest.mark.slow
def test_resnet18(tmp_path):
    claim, size = run("resnet18.py", tmp_path)
    assert "per client (zero-out, central trust" in claim
    assert size == "176258 numbers per update"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "resnet18"])
def test_a_recipe_names_the_code_of_an_example(tmp_path, name):
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning"]  # typer has some of click's
    start = [sys.executable, *warnings, "-m", "fedveil", "run", f"examples/{name}.toml"]
    start += ["--out", str(tmp_path / "run"), "--quiet", "--json"]
    settings = {"capture_output": True, "text": True, "cwd": EXAMPLES.parent}
    refused = subprocess.run(start, **settings)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: model.path is 'examples/{name}.py:make'")
    done = subprocess.run([*start, "--allow-code"], **settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["rounds"] == 3


@pytest.mark.slow
def test_audit(tmp_path):
    lines = run("audit.py", tmp_path)
    assert lines[0] == "10 charges, the first of round 1"
    assert sum(line.startswith("epsilon ") for line in lines) == 2
    assert "none changed, removed, inserted or moved" in lines[-2]
    assert lines[-1].startswith("refused: /run/result.json is not the one that the run left")


@pytest.mark.slow
def test_hospitals(tmp_path):
    lines = run("hospitals.py", tmp_path)
    assert lines[0] == "ended by signal 9, resumed to round 12"
    assert "per client (zero-out, central trust, PLD, seeded noise)" in lines[1]
    assert lines[2] == "['yes' 'no']"


@pytest.mark.slow
def test_hospitals_from_a_recipe(tmp_path):
    """On the command line: killed, resumed to the same bits, and predictions on new rows."""
    rows = [(f"h{k % 150}", 7 * k % 100, k * k % 101 / 10) for k in range(6_000)]
    table = [f"{h},{a},{d},{'yes' if 9 * d > a else 'no'}" for h, a, d in rows]
    (tmp_path / "patients.csv").write_text("\n".join(["hospital,age,dose,recovered", *table]))
    (tmp_path / "new.csv").write_text("age,dose\n20,8.0\n80,2.0\n")
    settings = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    fedveil = [sys.executable, "-m", "fedveil"]
    recipe = [*fedveil, "run", EXAMPLES / "hospitals.toml", "--quiet"]
    recipe += ["--set", "rounds=300", "--set", "engine.mode=vectorised"]
    subprocess.run([*recipe, "--out", "whole"], **settings, check=True)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    with subprocess.Popen([*recipe, "--out", "killed"], **settings) as process:
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.005)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert len(metrics.read_text().splitlines()) < 300
    subprocess.run([*fedveil, "run", "--resume", "killed", "--quiet"], **settings, check=True)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert models[0] == models[1]
    told = subprocess.run([*fedveil, "predict", "killed", "new.csv"], **settings, check=True).stdout
    assert [line.split(",")[0] for line in told.splitlines()[1:]] == ["yes", "no"]


@pytest.mark.slow
def test_record_level(tmp_path):
    lines = run("record_level.py", tmp_path)
    assert lines[0].startswith("FederatedData(8 clients, 455 records")
    assert "per record (zero-out, local trust, PLD, seeded noise)" in lines[1]
    assert float(lines[2].split()[1]) > 0.9


@pytest.mark.slow
def test_the_notebook_runs_with_a_bar_and_shows_its_claims():
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    with tempfile.TemporaryDirectory() as folder:  # the kernel's sockets want a short path
        done = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": folder}})
        cells = [cell for cell in done.execute().cells if cell.cell_type == "code"]
    assert cells[0].outputs[0].data["text/plain"].startswith("FederatedData(")
    bar, shown = cells[1].outputs
    assert '<progress value="20" max="20">' in bar.data["text/html"]
    assert "round 20/20" in bar.data["text/html"]
    assert "20 rounds, completed" in shown.data["text/html"]
    assert "zero-out" in cells[2].outputs[0].data["text/html"]
    assert "prediction" in cells[3].outputs[0].data["text/plain"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_site_noise(tmp_path):
    """Every cell of the grid, by two rounds on digits."""
    settings = ("data.name=digits", "rounds=2", "engine.workers=1")
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "site_noise.py", *settings],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    heading, _, *rows = done.stdout.splitlines()
    assert heading.startswith("| epsilon | pooled | part, 3 sites | part, 30 sites |")
    cells = [[float(cell) for cell in row.strip("| ").split(" | ")] for row in rows]
    assert [row[0] for row in cells] == [0.5, 1, 3]
    assert all(len(row) == 8 and all(0 <= cell <= 1 for cell in row[1:]) for row in cells)
    assert [path.name for path in tmp_path.iterdir()] == ["site-noise.png"]
