"""A guarded site runs the ClientApp that is installed there, whatever it is sent."""

import os
import subprocess
import sys
import time

import pytest

from fedveil.flower import flwr_private
from fedveil.flower.flwr_private import __main__ as programs
from fedveil.flower.flwr_private import fork_server, guard

pytest.importorskip("flwr")

RUNTIME = "flwr.supernode.runtime.run_clientapp"
GUARDED = [name for module, name, _ in flwr_private.REPLACED if module == RUNTIME]


@pytest.fixture
def runtime(monkeypatch):
    """Flower's module that unpacks and loads apps, put right again after the test."""
    from flwr.supernode.runtime import run_clientapp

    for name in GUARDED:
        monkeypatch.setattr(run_clientapp, name, getattr(run_clientapp, name))
    return run_clientapp


def test_what_is_sent_is_neither_unpacked_nor_loaded(runtime, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    guard.guard()
    assert runtime.install_from_fab(b"no app at all", skip_prompt=True) is None
    assert not list(tmp_path.iterdir())
    load = runtime.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    from fedveil.flower.flower_apps import client_app

    assert load("evil/app", "1.0.0", "hash") is client_app


def test_what_answers_is_guarded(runtime, monkeypatch):
    """Whether it was started or forked: the places are taken before Flower is called."""
    from flwr.supernode import cli

    before, seen = runtime.install_from_fab, []
    called = lambda: seen.append((runtime.install_from_fab, list(sys.argv)))  # noqa: E731
    monkeypatch.setattr(cli, "flwr_clientapp", called)
    monkeypatch.setattr(sys, "argv", ["fork_server"])
    guard.answer_message(["--token", "x"])
    ((unpack, arguments),) = seen
    assert unpack is not before
    assert arguments == [guard.GUARDED, "--token", "x"]


@pytest.mark.parametrize("name", GUARDED)
def test_a_flower_that_cannot_be_guarded_is_not_started(runtime, monkeypatch, name):
    monkeypatch.delattr(runtime, name)
    with pytest.raises(SystemExit, match=f"no {name} in {RUNTIME}, which is replaced"):
        guard.guard()


BROKEN = """
import importlib, json, os, sys
from fedveil.flower.flwr_private import fork_server, guard, supernode
for name in fork_server.IMPORTED:
    importlib.import_module(name)
runtime = importlib.import_module({runtime!r})
true = guard.guard

def broken():
    kept = {{name: getattr(runtime, name) for name in names}}
    true()
    vars(runtime).update(kept)

guard.guard = broken
for folder, names in {cases!r}.items():
    if os.fork() == 0:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT), number)
        os.environ["FLWR_HOME"] = folder
        fork_server.serve_forks()
        print("served")
        sys.exit()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    with open(os.path.join(folder, "code"), "w") as file:
        file.write(str(code))
"""

UNPACKED = ["install_from_fab"]
LOADED = ["get_load_client_app_fn"]
BREAKS = {
    "none": ([], ""),
    "unpacked": (UNPACKED, "has been unpacked: fedveil.canary"),
    "loaded": (LOADED, "did not answer"),
    "run": (UNPACKED + LOADED, "an app that was sent has been run"),
}


@pytest.fixture(scope="module")
def broken_sites(tmp_path_factory):
    """A folder for each of `BREAKS`: what a site whose guard is broken so printed, and its code.

    Flower's own functions are put back, as a release does that no longer calls these names. One
    process imports Flower, and forks each site.
    """
    folders = {how: tmp_path_factory.mktemp(how) for how in BREAKS}
    cases = {str(folders[how]): names for how, (names, _) in BREAKS.items()}
    program = BROKEN.format(runtime=RUNTIME, cases=cases)
    environment = {key: value for key, value in os.environ.items() if key != "FEDVEIL_SITE"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    return folders


@pytest.mark.parametrize("how", BREAKS)
def test_a_site_whose_guard_is_broken_refuses_to_start(broken_sites, how):
    folder, (names, words) = broken_sites[how], BREAKS[how]
    code, out, err = ((folder / name).read_text() for name in ("code", "stdout", "stderr"))
    assert (code, out) == (("1", "") if names else ("0", "served\n"))
    assert words in err
    assert bool(names) == ("not guarded against code that a server sends" in err)
    assert not list(folder.glob("apps*"))


def test_a_canary_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(guard, "_be_canary", lambda folder, pipe: time.sleep(60))
    monkeypatch.setattr(guard, "_CANARY_SECONDS", 0.1)
    begun = time.monotonic()
    with pytest.raises(SystemExit, match="it ended without a result"):
        guard.run_canary()
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("output", "code"), [("", 1), ("", 0), ('{"ask_bytes": "x"}', 0), ('{"ask_bytes": 5}', 1)]
)
def test_a_supernode_starts_only_if_the_canary_passes(monkeypatch, output, code):
    from fedveil.flower.flwr_private import supernode

    started = []

    def run(command, **_):
        started.append(command[-1])
        return subprocess.CompletedProcess(command, code, output.encode())

    monkeypatch.setattr(supernode.subprocess, "run", run)
    with pytest.raises(SystemExit, match="the site does not start"):
        supernode.run_supernode(["--superlink", "127.0.0.1:1"])
    assert started == ["canary"]


@pytest.mark.parametrize("version", ["1.40.2", "1.42.0", "2.0.0", "1.4", "1.410.0"])
def test_a_flower_that_is_not_tested_is_not_started(version):
    flwr_private.check_flower_version("1.41.9")
    with pytest.raises(SystemExit, match=f"Flower {version} is installed"):
        flwr_private.check_flower_version(version)


def test_the_extra_allows_the_tested_versions_of_flower_and_no_others():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (allowed,) = project["project"]["optional-dependencies"]["flower"]
    first, last = (minor.split(".") for minor in (flwr_private.TESTED[0], flwr_private.TESTED[-1]))
    assert allowed == f"flwr>={first[0]}.{first[1]},<{last[0]}.{int(last[1]) + 1}"


def test_the_runtime_uses_what_is_guarded(runtime):
    """The names that are replaced are those that `run_clientapp` looks up when it runs."""
    used = runtime.run_clientapp.__code__.co_names
    inner = runtime.pull_task_input.__code__.co_names
    assert set(GUARDED) <= {*used, *inner}


@pytest.mark.parametrize("command", guard.REFUSED)
def test_a_site_runs_nothing_else(monkeypatch, command):
    monkeypatch.setattr(sys, "argv", ["guard", command, "--token", "x"])
    with pytest.raises(SystemExit, match=f"runs no {command}"):
        programs.main()


def test_every_command_that_flower_could_start_is_known():
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    assert set(TASK_TYPE_TO_COMMAND.values()) == {guard.GUARDED, *guard.REFUSED}


def test_programs_are_found_first(tmp_path):
    commands = (fork_server.SUPEREXEC, guard.GUARDED, *guard.REFUSED)
    fork_server.write_programs(tmp_path / "bin", {name: name for name in commands})
    path = os.pathsep.join(
        [str(tmp_path / "bin"), os.path.dirname(sys.executable), "/usr/bin:/bin"]
    )
    for command in (fork_server.SUPEREXEC, guard.GUARDED):
        assert (tmp_path / "bin" / command).stat().st_mode & 0o111
    assert "fedveil.flower.flwr_private" in (tmp_path / "bin" / fork_server.SUPEREXEC).read_text()
    done = subprocess.run(
        ["flwr-model", "--token", "x"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("it answers rounds, and nothing else")
