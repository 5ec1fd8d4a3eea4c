"""A guarded site runs the ClientApp that is installed there, whatever it is sent."""

import os
import subprocess
import sys

import pytest

from fedveil.flower import flwr_private

pytest.importorskip("flwr")


@pytest.fixture
def runtime(monkeypatch):
    """Flower's module that unpacks and loads apps, put right again after the test."""
    from flwr.supernode.runtime import run_clientapp

    for name in ("install_from_fab", "get_load_client_app_fn"):
        monkeypatch.setattr(run_clientapp, name, getattr(run_clientapp, name))
    return run_clientapp


def test_what_is_sent_is_neither_unpacked_nor_loaded(runtime, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    flwr_private.guard()
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
    flwr_private.answer_message(["--token", "x"])
    ((unpack, arguments),) = seen
    assert unpack is not before
    assert arguments == [flwr_private.GUARDED, "--token", "x"]


@pytest.mark.parametrize("name", ["install_from_fab", "get_load_client_app_fn"])
def test_a_flower_that_cannot_be_guarded_is_not_started(runtime, monkeypatch, name):
    monkeypatch.delattr(runtime, name)
    with pytest.raises(SystemExit, match=f"no {name} where it is guarded"):
        flwr_private.guard()


def test_the_runtime_uses_what_is_guarded(runtime):
    """The names that are replaced are those that `run_clientapp` looks up when it runs."""
    used = runtime.run_clientapp.__code__.co_names
    assert {"install_from_fab", "get_load_client_app_fn"} <= set(used)


@pytest.mark.parametrize("command", flwr_private.REFUSED)
def test_a_site_runs_nothing_else(monkeypatch, command):
    monkeypatch.setattr(sys, "argv", ["guard", command, "--token", "x"])
    with pytest.raises(SystemExit, match=f"runs no {command}"):
        flwr_private.main()


def test_every_command_that_flower_could_start_is_known():
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    assert set(TASK_TYPE_TO_COMMAND.values()) == {flwr_private.GUARDED, *flwr_private.REFUSED}


def test_programs_are_found_first(tmp_path):
    flwr_private.write_programs(tmp_path / "bin")
    path = os.pathsep.join(
        [str(tmp_path / "bin"), os.path.dirname(sys.executable), "/usr/bin:/bin"]
    )
    for command in (flwr_private.SUPEREXEC, flwr_private.GUARDED):
        assert (tmp_path / "bin" / command).stat().st_mode & 0o111
    assert "fedveil.flower.flwr_private" in (tmp_path / "bin" / flwr_private.SUPEREXEC).read_text()
    done = subprocess.run(
        ["flwr-model", "--token", "x"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("it answers rounds, and nothing else")
