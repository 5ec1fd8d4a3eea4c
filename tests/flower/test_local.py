"""A deployment's processes on this machine: whoever is interrupted leaves none of them behind."""

import signal
from pathlib import Path

import pytest

from fedveil.flower import local_federation
from fedveil.flower.local_federation import LocalFederation, Process

ENDLESS = "exec sleep 60\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for script in ("server/superlink.sh", "server/run.sh", "sites/north/supernode.sh"):
        path = tmp_path / script
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ENDLESS)
    return tmp_path


@pytest.fixture
def listening():
    """Whoever starts tests in the background has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_what_was_being_started_is_stopped_too(folder: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[Process] = []

    class Interrupted(Process):
        @classmethod
        def launch(cls, *args, **keys):
            started.append(Process.launch(*args, **keys))
            signal.raise_signal(signal.SIGINT)
            return started[-1]

    monkeypatch.setattr(local_federation, "Process", Interrupted)
    with pytest.raises(KeyboardInterrupt), LocalFederation(folder) as federation:
        federation.start_site("north")
    assert [process.running for process in started] == [False]


def test_a_second_interrupt_stops_superlink_as_well(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_federation, "is_healthy", lambda url, authority: True)
    monkeypatch.setattr(local_federation, "_GRACE", 0.0)
    with LocalFederation(folder) as federation:
        federation.start_superlink("https://127.0.0.1:1")
        started = [federation.superlink, federation.start_site("north"), federation.start_run()]
        with monkeypatch.context() as patch:
            patch.setattr(local_federation, "_GRACE", 60.0)
            patch.setattr(local_federation.time, "sleep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                federation.stop()
        assert [process.running for process in started if process] == [False] * 3
