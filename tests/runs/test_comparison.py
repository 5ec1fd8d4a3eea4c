"""Several runs on one page; epsilons side by side only where they promise the same."""

import html
import re

import pytest

from .test_report import words


@pytest.fixture
def three(start):
    runs = [
        start("central", out="one"),
        start("central", "noise.multiplier=3.0", out="two"),
        start("dp-sgd", out="<b>three"),
    ]
    for run in runs:
        run.execute()
    return [run.folder for run in runs]


def test_promises_of_one_kind_share_a_chart_and_others_do_not(three, cli, tmp_path):
    out = tmp_path / "all.html"
    code, said, err = cli("report", *three, "--out", out)
    assert (code, said, err) == (0, f"written: {out}\n", "")
    page = out.read_text()
    assert "cannot be compared" in words(page)
    charts = re.findall(r'<figure id="(utility-\d-\d)".*?</figure>', page, re.DOTALL)
    assert charts == ["utility-0-0", "utility-0-1", "utility-1-0", "utility-1-1"]
    first = page.partition('id="utility-0-0"')[2].partition("</figure>")[0]
    assert "one" in first
    assert "two" in first
    assert "three" not in first
    assert "noise.multiplier" in words(page)
    assert "<b>three" not in page
    assert html.escape("<b>three") in page


def test_runs_of_one_promise_are_not_called_incomparable(three, cli, tmp_path):
    out = tmp_path / "all.html"
    cli("report", *three[:2], "--out", out)
    text = words(out.read_text())
    assert "cannot be compared" not in text
    assert "two makes the stronger promise: epsilon " in text


def test_what_cannot_be_done_is_refused_with_one_line(three, cli, tmp_path):
    out = tmp_path / "all.html"
    out.write_text("mine")
    for arguments, said in (
        ((*three, "--out", out), "exists: name another file"),
        ((three[0], three[0]), "named twice"),
        ((tmp_path,), "holds no run"),
        ((tmp_path / "nowhere",), "holds no run"),
        ((*three, "--audit", tmp_path), "is about one run"),
        ((three[0], "--audit", tmp_path), "audit.json is missing"),
        (("x" * 5000,), "File name too long"),
    ):
        code, _, err = cli("report", *arguments)
        assert code == 2
        assert said in err
        assert err.count("\n") == 1
    assert out.read_text() == "mine"


def test_one_run_is_drawn_again_in_place_or_elsewhere(three, cli, tmp_path):
    page = three[0] / "report.html"
    page.unlink()
    assert cli("report", three[0])[1] == f"written: {page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert cli("report", three[0], "--out", tmp_path / "other.html")[0] == 0
    assert (tmp_path / "other.html").read_bytes() == page.read_bytes()
