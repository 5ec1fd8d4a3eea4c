"""The wheel by itself: what is in it, and that it works without the repository."""

import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from email import message_from_string
from pathlib import Path
from venv import EnvBuilder

import pytest

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The repository's wheel, built with what is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, ROOT)
    subprocess.run([*PIP, *build], check=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory):
    """An environment with the wheel, whose dependencies are those of the running one.

    A folder named in a .pth file is searched for modules and not for further .pth files, so that
    a fedveil that is installed there in editable mode is not seen.
    """
    folder = tmp_path_factory.mktemp("environment")
    EnvBuilder(symlinks=True, with_pip=False).create(folder)
    python = folder / "bin" / "python"
    subprocess.run(
        [*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    there = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "there.pth").write_text("\n".join(there))
    return folder


@pytest.fixture
def run(place, tmp_path):
    """Run a program of that environment in an empty folder; returns what it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FEDVEIL"))}

    def called(program, *arguments):
        done = subprocess.run(
            [place / "bin" / program, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return called


@pytest.mark.slow
def test_it_has_the_package_and_nothing_else(wheel):
    source = ROOT / "src" / "fedveil"
    wanted = {
        f"fedveil/{path.relative_to(source)}"
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"fedveil/py.typed", "fedveil/__init__.pyi", "fedveil/recipes/central.toml"} < wanted
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == wanted


@pytest.mark.slow
def test_no_dependency_is_named_twice(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_string(archive.read(name).decode())
    assert Counter(metadata.get_all("Requires-Dist")).most_common(1)[0][1] == 1
    assert metadata["Requires-Python"] == ">=3.11"


@pytest.mark.slow
def test_names_are_found(run, place):
    """From the wheel, not from the repository."""
    code = "import fedveil as fv; fv.Task; print(fv.__file__)"
    assert Path(run("python", "-c", code).strip()).is_relative_to(place)


@pytest.mark.slow
def test_help_and_recipes(run):
    assert "Usage" in run("python", "-m", "fedveil", "--help")
    assert "central" in run("fedveil", "recipes").split()


@pytest.mark.slow
def test_the_demo(run, tmp_path):
    settings = ("rounds=3", "noise.multiplier=20.0", "engine.workers=1")
    chosen = [part for setting in settings for part in ("--set", setting)]
    result = json.loads(run("fedveil", "run", "--quiet", "--json", *chosen))
    assert (result["recipe"], result["rounds"], result["stopped"]) == ("people", 3, "rounds")
    assert (tmp_path / result["run_dir"] / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_csv_example(run):
    """A table, an own module, a run that is killed and resumed, predictions."""
    first, *_, last = run("python", ROOT / "examples" / "hospitals.py").splitlines()
    assert (first, last) == ("ended by signal 9, resumed to round 12", "['yes' 'no']")
