"""Why a model did not learn: one line per cause, with its numbers, and none when it did."""

import math

import pytest

from fedveil.runs.ending import diagnose


def history(*losses, clipped=0.0, snr=None, refused=0, clip=0.25):
    lines = [{"round": 0, "epsilon": None, "loss": losses[0]}]
    for round, loss in enumerate(losses[1:], 1):
        line = {"round": round, "clients": 10, "clipped": clipped, "snr": snr, "refused": refused}
        lines.append({**line, "clip": clip, "epsilon": None, "loss": loss})
    return lines


@pytest.mark.parametrize(
    ("losses", "circumstances"),
    [
        ((2.3, 1.5, 0.9), {}),
        ((2.3, 1.5, 0.9), {"clipped": 1.0, "snr": 0.01}),
        ((2.3, 0.9, 1.0), {}),
    ],
    ids=["learnt", "learnt-all-the-same", "learnt-and-wavered"],
)
def test_a_model_that_learnt_needs_no_note(losses, circumstances):
    assert diagnose(history(*losses, **circumstances)) == []


@pytest.mark.parametrize("lines", [[], history(2.3), history(2.3, 2.3)[:1]])
def test_nothing_to_say_about_nothing(lines):
    assert diagnose(lines) == []


@pytest.mark.parametrize("broken", [math.nan, math.inf, None])
def test_a_loss_that_is_not_finite(broken):
    """None is what a number becomes that JSON cannot hold."""
    (note,) = diagnose(history(2.3, 2.0, broken, broken))
    assert note == "the loss is not finite from round 2 on: lower client.lr or server.lr"


def test_everything_bounded():
    verdict, note = diagnose(history(2.3, 2.3, 2.299, clipped=0.98))
    assert verdict == "the model hardly learnt: loss 2.3 at the start, 2.299 at the end"
    assert note.startswith("98 % of the updates were clipped, at 0.25")


def test_noise_larger_than_signal():
    _, note = diagnose(history(2.3, 2.3, 2.3, 2.3, 2.3, snr=0.1))
    assert note.startswith("noise is larger than signal")
    assert "0.1 times" in note
    assert "0.2 times over all 4" in note


def test_both_causes_are_named():
    notes = diagnose(history(2.3, 2.3, 2.3, clipped=1.0, snr=0.1))
    assert len(notes) == 3


def test_steps_that_are_too_small():
    _, note = diagnose(history(2.3, 2.2999, 2.2998))
    assert note.startswith("the steps are too small")


def test_steps_that_overshoot():
    verdict, note = diagnose(history(2.3, 0.5, 4.0))
    assert verdict == "the model got worse again: loss 0.5 at best, 4 at the end"
    assert note.startswith("the steps overshoot")


def test_refused_reports_are_counted_even_when_the_model_learnt():
    (note,) = diagnose(history(2.3, 1.0, 0.9, refused=3))
    assert note.startswith("6 of 20 reports were not finite")


def test_the_verdict_comes_before_refusals():
    notes = diagnose(history(2.3, 2.3, 2.3, refused=3))
    assert notes[0].startswith("the model hardly learnt")


def test_rounds_that_were_not_measured_are_skipped():
    lines = history(2.3, 2.3, 1.0)
    del lines[1]["loss"]
    assert diagnose(lines) == []
