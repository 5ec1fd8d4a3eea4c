"""Files that somebody else writes: half-written, cut, linked, huge, or no files at all."""

import json
import os

import pytest

from fedveil.base.errors import BadInput
from fedveil.watch import followed_runs as module
from fedveil.watch.followed_runs import MetricsTail, check_run_files, read_run_file


def line(round, **more):
    rest = dict.fromkeys(("clients", "clipped", "snr", "refused", "clip", "epsilon", "claim"))
    return json.dumps({"round": round, **rest, **more}) + "\n"


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


def rounds(tail):
    tail.read_new()
    return [one["round"] for one in tail.history]


def test_what_is_new_is_read_and_half_a_line_waits(metrics):
    tail = MetricsTail(metrics)
    assert rounds(tail) == []
    metrics.write_text(line(0) + line(1)[:20])
    assert rounds(tail) == [0]
    first = tail.history[0]
    metrics.write_text(line(0) + line(1) + line(2))
    assert rounds(tail) == [0, 1, 2]
    assert tail.history[0] is first
    assert tail.trouble == []


def test_a_file_that_was_replaced_or_cut_is_read_from_its_start(metrics, tmp_path):
    tail = MetricsTail(metrics)
    metrics.write_text("".join(map(line, range(5))))
    assert rounds(tail) == [0, 1, 2, 3, 4]
    new = tmp_path / "new"
    new.write_text("".join(line(round, loss=1.0) for round in range(6)))
    new.replace(metrics)
    tail.read_new()
    assert [one["loss"] for one in tail.history] == [1.0] * 6
    metrics.write_text(line(0))
    assert rounds(tail) == [0]
    metrics.unlink()
    assert rounds(tail) == []


@pytest.mark.parametrize(
    "bad",
    ["{", "[]", '{"round": 3}', line(1).strip(), "\xff", "[" * 10**5,
     line(3, loss=10**400).strip()],
)  # fmt: skip
def test_after_a_damaged_line_nothing_more_is_believed(metrics, bad):
    metrics.write_bytes((line(0) + line(1) + bad + "\n" + line(4)).encode("latin-1"))
    tail = MetricsTail(metrics)
    assert rounds(tail) == [0, 1]
    assert tail.trouble == ["metrics.jsonl was damaged after 2 lines: the rest is left out"]


def test_links_pipes_folders_and_huge_files_are_refused_without_waiting(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text("secret")
    path = tmp_path / "recipe.toml"
    path.symlink_to(target)
    with pytest.raises(BadInput, match="is a link"):
        read_run_file(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadInput, match="is not a file"):
        read_run_file(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(BadInput, match=r"is not a file|cannot be read"):
        read_run_file(path)
    path.rmdir()
    monkeypatch.setitem(module._MAX_BYTES, "recipe.toml", 10)
    path.write_text("x" * 11)
    with pytest.raises(BadInput, match="more than a run leaves"):
        read_run_file(path)
    with pytest.raises(BadInput, match="more than a run leaves"):
        check_run_files(tmp_path)


def test_no_file_is_nothing(tmp_path):
    assert read_run_file(tmp_path / "result.json") is None
    check_run_files(tmp_path)
