"""Ways for a run to be cut off, what it leaves behind, and what is said about it."""

import json


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def model_of(folder):
    return (folder / "model.safetensors").read_bytes()


def stop_after(rounds):
    """Ctrl-C at the end of a round."""

    def on_round(line):
        if line["round"] == rounds:
            raise KeyboardInterrupt

    return on_round


def at(round, what):
    def on_round(line):
        if line["round"] == round:
            what()

    return on_round


class Crash(Exception):
    """The process dies: nothing of the run's own is executed after it."""


def crash_after(run, rounds):
    def on_round(line):
        if line["round"] == rounds:
            run._finish = lambda *_: {}
            raise Crash

    return on_round


def one_line(outcome):
    code, out, err = outcome
    assert code == 2, (out, err)
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line
