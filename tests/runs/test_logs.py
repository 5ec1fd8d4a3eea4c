"""Logs in the trackers' own formats, read back by the trackers' own readers.

Weights & Biases leaves a process and its settings behind, so it logs from a process of its own.
"""

import json
import math
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.runs.logs import KINDS, open_logs
from fedveil.runs.run_directory import json_text, read_metrics

from .test_secure_runs import PRIVATE, SECURE_NOISE

CLAIM = "at delta 1e-05 per client (zero-out, central trust)"
ABOUT = {"recipe": "central"}


def line(round, loss, **more):
    """A line of a run with diagnostics."""
    return {
        "round": round,
        "clients": 50 + round,
        "clipped": 1 / 3,
        "snr": None,
        "refused": 0,
        "clip": 0.1,
        "epsilon": 0.1 + 0.2 * round,
        "claim": CLAIM,
        "loss": loss,
        "seconds": 0.01,
        **more,
    }


FIRST = {"round": 0, "epsilon": 8.0, "claim": CLAIM, "loss": 2.3, "accuracy": 0.1}
LINES = [FIRST, line(1, 0.1), line(2, math.nan), line(3, 1e-30), line(4, 3e10, early=True)]
HISTORY, AGAIN = LINES[:3], [line(3, 0.25), line(4, 0.125), line(5, 1 / 3)]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No network, no settings of whoever runs the tests, stores in this folder."""

    def refused(self, address):
        raise AssertionError(f"a test reached for {address}")

    monkeypatch.setattr(socket.socket, "connect", refused)
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    settings = {
        "HOME": tmp_path / "home",
        "WANDB_MODE": "offline",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file://{tmp_path / 'mlflow'}",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "logs"
    made.mkdir()
    return made


def log(kinds, folder, lines, history=(), live=True):
    """Log `lines` as a run does, with metrics.jsonl beside; returns the remarks."""
    with closing(open_logs(kinds, folder, "a run", ABOUT, history, live=live)) as logs:
        for line in lines:
            logs.write(line)
    write_metrics(folder, [*history, *lines])
    return logs.remarks


def write_metrics(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(map(json_text, lines)))


def elsewhere(code, folder, *given):
    """Run `code` in a process of its own, with the arguments of `open_logs` and with `given`."""
    begin = (
        "import json, os, sys, time\nfrom contextlib import closing\nfrom pathlib import Path\n"
        "from fedveil.base.errors import BadInput\nfrom fedveil.runs.logs import open_logs\n"
        "folder, about, *given = json.load(sys.stdin)\n"
        "run = (Path(folder), 'a run', about)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        input=json.dumps([str(folder), ABOUT, *given]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def expected(folder, kind=""):
    """The numbers of metrics.jsonl: {name: [(round, value), ...]}."""
    lines, remarks = read_metrics(folder / "metrics.jsonl")
    assert lines
    assert not remarks
    kept = np.float32 if kind == "tensorboard" else float
    return by_name(((line.pop("round"), line) for line in lines), kept)


def by_name(rows, kept=float):
    found = {}
    for round, row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, []).append((round, kept(value)))
    return found


# --- the trackers' own readers ---


def tensorboard_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def tensorboard_numbers(folder):
    events = tensorboard_events(folder)
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def tensorboard_texts(folder):
    events = tensorboard_events(folder)
    return {
        tag.removesuffix("/text_summary"): [
            event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }


def mlflow_runs():
    from mlflow import MlflowClient

    return MlflowClient().search_runs(["0"], order_by=["attributes.start_time ASC"])


def mlflow_points():
    from mlflow import MlflowClient

    run = mlflow_runs()[-1]
    return {
        name: MlflowClient().get_metric_history(run.info.run_id, name) for name in run.data.metrics
    }


def mlflow_numbers(folder):
    return {
        name: sorted((point.step, point.value) for point in points)
        for name, points in mlflow_points().items()
    }


def wandb_records(folder, number=-1):
    """The records of an offline run: protocol buffers in a log of 32 KiB blocks, as LevelDB's."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ino)
    content, place, whole, records = files[number].read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            records.append(Record.FromString(whole))
            whole = b""
    return records


def wandb_rows(folder, number=-1):
    for record in wandb_records(folder, number):
        if record.HasField("history"):
            items = record.history.item
            row = {item.key or ".".join(item.nested_key): item.value_json for item in items}
            yield record.history.step.num, {n: json.loads(value) for n, value in row.items()}


def wandb_numbers(folder, number=-1):
    found = by_name(wandb_rows(folder, number))
    return {name: values for name, values in found.items() if not name.startswith("_")}


def wandb_run(folder, number):
    (run,) = [record.run for record in wandb_records(folder, number) if record.HasField("run")]
    return run


def wandb_texts(folder, number):
    configs = [record.config for record in wandb_records(folder, number)]
    updates = [u for c in (wandb_run(folder, number).config, *configs) for u in c.update]
    told = {u.key or ".".join(u.nested_key): json.loads(u.value_json) for u in updates}
    return {name: value for name, value in told.items() if name != "_wandb"}


# --- what is logged ---


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_a_log_equals_metrics_jsonl(folder, kind, live):
    read = {"tensorboard": tensorboard_numbers, "mlflow": mlflow_numbers}[kind]
    assert log([kind], folder, LINES, live=live) == []
    assert read(folder) == expected(folder, kind)


@pytest.mark.slow
def test_mlflow_in_its_default_kind_of_store(folder, tmp_path, monkeypatch):
    pytest.importorskip("sqlalchemy", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert log(["mlflow"], folder, LINES) == []
    assert mlflow_numbers(folder) == expected(folder)


@pytest.mark.slow
def test_texts_are_logged_once(folder):
    log(["tensorboard", "mlflow"], folder, LINES)
    texts = {"claim": CLAIM, "early": "True", "recipe": "central"}
    assert tensorboard_texts(folder) == {name: [text] for name, text in texts.items()}
    (run,) = mlflow_runs()
    assert run.data.tags == {**texts, "mlflow.runName": "a run"}
    assert run.data.params == {}


def test_a_round_is_logged_once(folder):
    with closing(open_logs(["tensorboard"], folder, "a run", ABOUT, HISTORY, live=True)) as logs:
        for line in [*HISTORY, *AGAIN, *HISTORY, *AGAIN]:
            logs.write(line)
    assert [round for round, _ in tensorboard_numbers(folder)["epsilon"]] == [0, 1, 2, 3, 4, 5]


def test_an_experiment_of_a_name(folder, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "hospital")
    for _ in range(2):
        log(["mlflow"], folder, LINES[:2])
    found = MlflowClient().get_experiment_by_name("hospital")
    assert len(MlflowClient().search_runs([found.experiment_id])) == 2


# --- resuming ---


def test_a_resumed_run_has_the_whole_history_and_nothing_else(folder):
    kinds = ["tensorboard", "mlflow"]
    log(kinds, folder, LINES)
    log(kinds, folder, AGAIN, HISTORY)
    assert tensorboard_numbers(folder) == expected(folder, "tensorboard")
    assert mlflow_numbers(folder) == expected(folder)
    first, second = mlflow_runs()
    assert "resumed_after_round" not in first.data.tags
    assert second.data.tags["resumed_after_round"] == "2"


@pytest.mark.slow
def test_wandb_first_and_resumed(folder):
    """What its two runs hold, and that neither holds anything of the machine."""
    elsewhere(
        "for history, lines in given:\n"
        "    with closing(open_logs(['wandb'], *run, history, live=True)) as logs:\n"
        "        for line in lines: logs.write(line)\n"
        "    assert logs.remarks == []\n",
        folder,
        ([], LINES),
        (HISTORY, AGAIN),
    )
    for number, lines in enumerate([LINES, HISTORY + AGAIN]):
        write_metrics(folder, lines)
        assert wandb_numbers(folder, number) == expected(folder)
    assert wandb_texts(folder, 0) == {"claim": CLAIM, "early": "True", "recipe": "central"}
    assert wandb_texts(folder, 1) == {
        "claim": CLAIM,
        "recipe": "central",
        "resumed_after_round": 2,
    }
    assert [list(wandb_run(folder, n).tags) for n in (0, 1)] == [[], ["resumed"]]
    assert [wandb_run(folder, n).display_name for n in (0, 1)] == ["a run", "a run"]
    kinds = {r.WhichOneof("record_type") for n in (0, 1) for r in wandb_records(folder, n)}
    assert kinds <= {"header", "run", "config", "telemetry", "history", "summary", "exit"}
    left = [path for path in folder.glob("wandb/offline-run-*/**/*") if path.is_file()]
    assert {path.suffix for path in left} == {".wandb", ".log"}
    assert {path.stem for path in left if path.suffix == ".log"} <= {
        "debug",
        "debug-core",
        "debug-internal",
    }


# --- secure runs ---


def test_logs_of_a_secure_run_tell_no_diagnostics_and_no_time_of_a_round(start, folder, tmp_path):
    """Everything is written, with its time, when all rounds are done."""
    run = start("central", SECURE_NOISE)
    run.execute()
    shutil.copy(run.folder / "metrics.jsonl", tmp_path)
    lines, _ = read_metrics(tmp_path / "metrics.jsonl")
    done = elsewhere(
        "logs = open_logs(['wandb'], *run)\nfor line in given: logs.write(line)\n"
        "assert not any(run[0].iterdir())\n"
        "print(time.time())\nlogs.close()\nassert logs.remarks == []\n",
        folder,
        *lines,
    )
    others = open_logs(["tensorboard", "mlflow"], folder, "a run", ABOUT)
    for line in lines:
        others.write(line)
    assert not (folder / "tensorboard").exists()
    assert mlflow_runs() == []
    done_here = time.time()
    others.close()
    (run,) = mlflow_runs()
    times = [run.info.start_time / 1000, run.info.end_time / 1000]
    times += [p.timestamp / 1000 for points in mlflow_points().values() for p in points]
    events = tensorboard_events(folder)
    times += [e.wall_time for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    assert min(times) >= done_here - 0.001  # MLflow's are whole milliseconds
    begun = wandb_run(folder, 0).start_time
    times = [begun.seconds + begun.nanos / 1e9]
    times += [row["_timestamp"] for _, row in wandb_rows(folder)]
    assert min(times) >= float(done) - 0.001
    for found in (tensorboard_numbers(folder), mlflow_numbers(folder), wandb_numbers(folder)):
        assert set(found) == {"clip", "epsilon", "loss", "accuracy"}
        assert not set(found) & set(PRIVATE)
        assert [round for round, _ in found["loss"]] == [0, 1, 2, 3, 4]
    assert wandb_numbers(folder) == expected(tmp_path)


# --- what goes wrong ---


def test_an_unknown_kind(folder):
    with pytest.raises(BadInput, match="'comet' is unknown: use one of tensorboard, mlflow, wandb"):
        open_logs(["tensorboard", "comet"], folder, "a run", ABOUT, live=True)
    assert not any(folder.iterdir())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("like_a_folder", [True, False])
def test_a_missing_package(folder, tmp_path, monkeypatch, kind, like_a_folder):
    """A folder `wandb`, as runs leave it behind, is not the package."""
    if like_a_folder:
        (tmp_path / kind).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, kind, raising=False)
    with pytest.raises(BadInput, match=rf"log {kind} needs .*: pip install 'fedveil\[{kind}\]'"):
        open_logs([kind], folder, "a run", ABOUT)


def test_a_store_that_cannot_be_opened(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://at.all")
    with pytest.raises(BadInput, match="log mlflow cannot be opened: ") as refused:
        open_logs(["tensorboard", "mlflow"], folder, "a run", ABOUT, live=True)
    assert "\n" not in str(refused.value)


def test_a_store_that_is_gone_ends_its_log_only(folder, tmp_path):
    kinds = ["mlflow", "tensorboard"]
    with closing(open_logs(kinds, folder, "a run", ABOUT, LINES[:2], live=True)) as logs:
        shutil.rmtree(tmp_path / "mlflow")
        for line in LINES[2:]:
            logs.write(line)
    (remark,) = logs.remarks
    assert remark.startswith("log mlflow was left out from round 2 on, metrics.jsonl has every")
    assert "\n" not in remark
    assert len(tensorboard_numbers(folder)["epsilon"]) == len(LINES)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_its_log_only(folder):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(
        open_logs(["tensorboard", "mlflow"], folder, "a run", ABOUT, LINES[:2], live=True)
    ) as logs:
        (file,) = folder.glob("tensorboard/*")
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, before[1]))
        try:
            for line in LINES[2:]:
                logs.write(line)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for thread in threading.enumerate():  # or it dies in the next test, which is then blamed
        if type(thread).__module__.startswith("tensorboard"):
            thread.join(60)
    (remark,) = logs.remarks
    assert remark.startswith("log tensorboard was left out from round 2 on")
    assert "File too large" in remark
    assert len(mlflow_numbers(folder)["epsilon"]) == len(LINES)


def test_a_store_that_is_gone_when_lines_have_waited(folder, monkeypatch):
    with closing(open_logs(["mlflow", "tensorboard"], folder, "a run", ABOUT)) as logs:
        for line in LINES:
            logs.write(line)
        monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "12345")
    (remark,) = logs.remarks
    assert remark.startswith("log mlflow was left out from round 0 on")
    assert len(tensorboard_numbers(folder)["epsilon"]) == len(LINES)


@pytest.mark.slow
def test_wandb_that_dies(folder):
    """Its process is killed: the training gets one remark, and goes on."""
    remarks = elsewhere(
        "logs = open_logs(['wandb'], *run, given[0], live=True)\n"
        "for status in Path('/proc').glob('[0-9]*/status'):\n"
        "    told = dict(part.split(':\\t', 1) for part in status.read_text().splitlines())\n"
        "    if (told['Name'], int(told['PPid'])) == ('wandb-core', os.getpid()):\n"
        "        os.kill(int(status.parent.name), 9)\n"
        "for line in given[1]: logs.write(line)\n"
        "logs.close()\nprint(json.dumps(logs.remarks))\n",
        folder,
        HISTORY,
        AGAIN,
    )
    (remark,) = json.loads(remarks)
    assert remark.startswith("log wandb was left out from round ")


@pytest.mark.slow
def test_wandb_without_an_account(folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    told = elsewhere(
        "try: open_logs(['wandb'], *run)\nexcept BadInput as e: print(e)\n",
        folder,
    )
    assert told == "log wandb has no account: use `wandb login`, or set WANDB_MODE=offline\n"
    assert not any(folder.iterdir())
