"""`fedveil watch` and `fedveil run --watch` from the command line."""

import importlib.util
import json
import os
import re
import signal
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.flower.sites import write_site


def without(monkeypatch, *missing):
    """An installation that lacks these packages."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in missing else find(name)
    )


@pytest.mark.parametrize("command", [["watch"], ["run", "--watch"]])
@pytest.mark.parametrize(
    ("missing", "named"),
    [(["starlette"], "starlette"), (["starlette", "uvicorn"], "starlette and uvicorn")],
)
def test_without_the_extra_one_line_says_how_to_install_it(
    cli, monkeypatch, command, missing, named
):
    without(monkeypatch, *missing)
    told = cli(*command)
    assert told.error == f"error: the live page needs {named}: pip install 'fedveil[watch]'"
    assert list(Path().iterdir()) == []


def test_a_folder_that_is_not_there_is_one_line(cli):
    assert "other is no directory" in cli("watch", "other").error
    Path("file").write_text("")
    assert "file is no directory" in cli("watch", "file").error


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--host", "0.0.0.0"], "add --outside if that is meant"),
        (["--host", "example.org"], "an IP address is needed"),
        (["--port", "70000"], "--port is 70000: 0 (any) to 65535 is needed"),
    ],
)
def test_where_it_may_not_listen(cli, options, error):
    assert error in cli("watch", *options).error


@pytest.mark.slow
def test_a_run_with_its_page(spawn, settings, tmp_path):
    """The page is there while the run is, shows it, and goes with it."""
    more = ("rounds=100000", "noise.multiplier=60", "budget.epsilon=1000")
    process = spawn(
        *("run", "central", *settings("central", *more)),
        *("--watch", "--quiet", "--json", "--out", tmp_path / "run"),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    url = re.fullmatch(r"live page: (http://127\.0\.0\.1:\d+/\S+/)\n", process.stderr.readline())[1]
    with urlopen(f"{url}events") as events:
        told = json.loads(events.readline().removeprefix(b"data: "))
    ((card, _),) = told["cards"]
    assert "running" in told["parts"][f"{card}-head"]
    (tmp_path / "run" / "stop").write_text("")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ended on request after round" in err
    assert json.loads(out)["stopped"] == "request"
    with pytest.raises(URLError):
        urlopen(url)


def test_a_run_that_is_over_before_its_page_is_there_does_not_wait(tmp_path):
    """The server is still loading: it is ended at once, and nothing is said of it."""
    from fedveil.cli.train import live_page

    told = []
    with live_page(tmp_path, told.append):
        pass
    assert told == []


def test_a_page_that_cannot_be_started_is_said(tmp_path):
    from threading import Event

    from fedveil.cli.train import live_page

    told, said = [], Event()
    with live_page(tmp_path / "none", lambda text: (told.append(text), said.set())):
        assert said.wait(60)
    assert told == ["the live page could not be started: fedveil watch says why"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--prometheus", "--host", "0.0.0.0", "--outside"], "serves on 127.0.0.1 alone"),
        (["--prometheus", "--host", "127.0.0.2"], "serves on 127.0.0.1 alone"),
        (["--prometheus", "--port", "70000"], "port is 70000: 0 (any) to 65535 is needed"),
    ],
)
def test_numbers_are_for_this_machine_alone(cli, options, error):
    assert error in cli("watch", *options).error


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_numbers_for_prometheus_until_they_are_ended(spawn, tmp_path, end):
    process = spawn("watch", tmp_path, "--prometheus")
    url = process.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
    with urlopen(url) as page:
        assert page.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert page.read() == b""  # no run, no numbers
    process.send_signal(end)
    assert process.wait(20) == 0


@pytest.mark.slow
def test_the_numbers_of_a_site_until_they_are_ended(spawn, cli, tmp_path):
    path = write_site(tmp_path)
    assert (
        "--serve and --json are both given"
        in cli("site", "status", path, "--serve", 0, "--json").error
    )
    process = spawn("site", "status", path, "--serve", "0")
    with urlopen(process.stdout.readline().strip()) as page:
        text = page.read().decode()
    assert 'fedveil_site_up{site="north",recipe="local"} 1.0' in text
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
