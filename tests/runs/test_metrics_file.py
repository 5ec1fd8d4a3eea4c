"""The metrics file: read as far as it is what a run writes."""

from fedveil.runs.run_directory import json_text, read_metrics


def line(round, **changes):
    private = dict.fromkeys(("clients", "clipped", "snr", "refused", "clip"), 1)
    told = {"epsilon": 0.5, "claim": "epsilon 0.5"}
    return json_text({"round": round, **private, **told, **changes})


def test_whole_files_are_read_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(4))
    history, remarks = read_metrics(path)
    assert [each["round"] for each in history] == [1, 2, 4]
    assert not remarks


def test_rounds_that_are_written_twice_end_the_reading(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(2) + line(3))
    history, remarks = read_metrics(path)
    assert [each["round"] for each in history] == [1, 2]
    assert remarks == ["metrics.jsonl was damaged after 2 lines: the rest was left out"]


def test_epsilons_without_their_claim_end_the_reading(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2, claim=None))
    assert len(read_metrics(path)[0]) == 1
