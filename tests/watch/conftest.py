"""Run directories to look at: ended, stopped by their budget, cut off, secure, going on."""

import contextlib
import hashlib
import re
import shutil

import pytest
from starlette.testclient import TestClient

from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.runs.run_directory import locked
from fedveil.watch.followed_runs import RunsFolder
from fedveil.watch.watch_server import PageAddress, Watcher, make_app

from ..runs.conftest import BASE

ADDRESS = PageAddress("127.0.0.1", 5000, "the-token-of-this-test")
OWN = "http://127.0.0.1:5000"
SECURE = ("noise.source=secure", "budget.epsilon=60")


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """ended, budget, secure: as they are called; open: cut off after its second of four rounds."""
    root = tmp_path_factory.mktemp("made")

    def begin(name, *settings):
        return Run.start(load_recipe("central", (*BASE["central"], *settings)), root / name, None)

    begin("ended", "budget.epsilon=30").execute()
    begin("budget", "budget.epsilon=5", "sample.kind=all", "rounds=40").execute()
    begin("secure", *SECURE).execute()
    running = begin("running", "budget.epsilon=30")
    lines = running.metric_lines()
    next(lines), next(lines)
    shutil.copytree(running.folder, root / "open")
    lines.close()
    shutil.rmtree(root / "running")
    return root


@pytest.fixture
def root(tmp_path):
    """An empty folder that runs are copied to."""
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def copied(made, root):
    """A run of `made`, in the folder that is watched."""

    def copy(name, to=None):
        return shutil.copytree(made / name, root / (to or name))

    return copy


@pytest.fixture
def holding():
    """Be the process that a run runs in, as far as others can tell."""
    with contextlib.ExitStack() as stack:
        yield lambda folder: stack.enter_context(locked(folder))


@pytest.fixture
def client(root):
    """A client of the server, which asks as its own page does."""
    headers = {"origin": OWN, "sec-fetch-site": "same-origin"}
    app = make_app(Watcher(RunsFolder(root)), ADDRESS)
    return TestClient(app, base_url=f"{OWN}/{ADDRESS.token}", headers=headers)


def id_of(name):
    """What a run is asked for by."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def words(markup):
    """What a page says, without its tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", markup))
