"""Runs as they are drawn: every epsilon with its words, everything as text, nothing secret."""

import html
import json
import re

import pytest

from fedveil.watch.followed_runs import RunsFolder
from fedveil.watch.live_pages import MAX_CARDS, all_page, all_view, card, row, run_page, run_view

from ..contracts.test_no_bare_epsilon import MEANT, bare
from ..runs.test_report import many
from .conftest import words

EVIL = "<script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"


def drawn(root, *, full=True):
    statuses = RunsFolder(root).statuses()
    return "".join(
        part.text for status in statuses for part in card(status, full=full).values()
    ), statuses


def test_a_run_that_is_going_on(root, copied, holding):
    holding(copied("open"))
    markup, (status,) = drawn(root)
    text = html.unescape(words(markup))
    for part in (
        "open running", "round 2 of 4", "to go", "spent of epsilon 30 at delta 0.0001 per client",
        "spent: epsilon 1.5", "test accuracy", "Test accuracy over rounds", "Epsilon over rounds",
        "End after this round", "The last of 2 charges", "charged at", "outside every claim",
        "Share of updates that were clipped", "Poisson",
    ):  # fmt: skip
        assert part.lower() in text.lower(), part
    assert f'data-stop="{status.id}"' in markup
    assert '<progress value="2" max="4"' in markup


def test_one_that_was_asked_to_end_has_no_button(root, copied, holding):
    from fedveil.runs.run_directory import request_stop

    holding(copied("open"))
    request_stop(root / "open")
    text = words(drawn(root)[0])
    assert "does so after this round" in text
    assert "End after this round" not in text


def test_one_that_was_killed_says_how_to_go_on(root, copied):
    text = words(drawn(root)[0]) if copied("open") else ""
    assert "not running any more" in text
    assert f"fedveil run --resume {root / 'open'}" in text
    assert "to go" not in text
    assert "End after" not in text


def test_a_budget_that_ended_it_is_shown_as_used_up(root, copied):
    copied("budget")
    markup, (status,) = drawn(root)
    text = words(markup)
    assert "stopped by the budget" in text
    assert "by its own budget" in text
    assert status.claim.remainder(5.0) in text
    assert row(status)["ending"] == "stopped by the budget"


@pytest.mark.parametrize("name", ["ended", "open", "budget", "secure"])
@pytest.mark.parametrize("full", [True, False])
def test_no_epsilon_stands_alone(root, copied, name, full):
    copied(name)
    markup, (status,) = drawn(root, full=full)
    text = html.unescape(words(markup))
    assert MEANT.search(text)
    assert bare(text) == []
    assert bare(str(row(status)["claim"])) == []
    for figure in re.findall(r"<figure.*?</figure>", markup, re.DOTALL):
        said = words(figure)
        assert "psilon" not in said or re.search(r"at delta \S+ per client \(zero-out, centr", said)


def test_a_run_that_claims_nothing_has_no_gauge(root):
    from fedveil.runs.recipe import load_recipe
    from fedveil.runs.run import Run

    from ..runs.conftest import BASE

    Run.start(load_recipe("fedsgd", BASE["fedsgd"]), root / "plain", None).execute()
    markup, (status,) = drawn(root)
    assert "Nothing is claimed" in words(markup)
    assert 'class="gauge"' not in markup
    assert row(status)["claim"] == "nothing is claimed"


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("ledger", [None, b"x" * 5000])
def test_without_a_ledger_nobody_says_that_nothing_is_spent(root, copied, holding, held, ledger):
    folder = copied("open")
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        (folder / name).unlink(missing_ok=True)
    if ledger is not None:
        (folder / "ledger.db").write_bytes(ledger)
    if held:
        holding(folder)
    markup, (status,) = drawn(root)
    assert not status.spending_known
    for text in (words(markup), str(row(status)["claim"])):
        assert "What it has spent is not known" in text
        assert "Nothing is claimed" not in text
        assert "nothing is claimed" not in text


def test_with_secure_noise_nothing_that_data_tell_is_shown(root, copied, holding):
    folder = copied("secure")
    holding(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["seconds"] = 1.25  # as a run would not write it
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = words(drawn(root)[0])
    assert "secure noise" in text
    assert "With secure noise nothing that clients' data tell is shown" in html.unescape(text)
    for part in (
        "were clipped",
        "Signal to noise of",
        "charged at",
        "to go",
        "1.2 s",
        "20 clients",
    ):
        assert part not in text, part
    assert not re.search(r"\d\d:\d\d", text)


def test_diagnostics_that_were_asked_for_are_called_outside_the_claim(root):
    from fedveil.runs.recipe import load_recipe
    from fedveil.runs.run import Run

    from ..runs.conftest import BASE
    from .conftest import SECURE

    asked = (*BASE["central"], *SECURE, "rounds=2", "evaluate.diagnostics=true")
    Run.start(load_recipe("central", asked), root / "asked", None).execute()
    text = words(drawn(root)[0])
    assert "Share of updates that were clipped" in text
    assert "outside every claim" in text
    assert "charged at" not in text


def test_hostile_text_is_text_in_every_field(root, copied):
    folder = copied("ended").rename(root / "<script>x<b>")
    (folder / "ledger.db").unlink()
    result = json.loads((folder / "result.json").read_text())
    evil = {key: EVIL for key, value in result.items() if isinstance(value, str)}
    more = {"notes": [EVIL], "metrics": {EVIL: 1.0, "a": EVIL, "loss": {EVIL: EVIL}}}
    claims = [{**claim, "covers": EVIL, "holds_for": EVIL} for claim in result["claims"]]
    told = {**result, **evil, **more, "claims": claims}
    (folder / "result.json").write_text(json.dumps(told))
    (folder / "recipe.toml").write_text(f"rounds = 4\nname = '''{EVIL}'''\n# {EVIL}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line[EVIL] = 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    statuses = RunsFolder(root).statuses()
    pages = [all_page(root / EVIL), run_page(statuses[0].id, statuses[0].name)]
    markup = "".join(part.text for part in run_view(statuses[0].id, statuses).pieces.values())
    markup += "".join(part.text for part in all_view(statuses).pieces.values())
    markup += str(row(statuses[0])["run"])
    bodies = [page.decode().partition("</head>")[2].partition("<script>(")[0] for page in pages]
    for text in (markup, *bodies):
        assert "<script" not in text
        assert "<img" not in text
    assert html.escape(EVIL) in markup


@pytest.mark.parametrize("rounds", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_long_runs_are_small_and_keep_their_extremes(root, copied, rounds):
    many(copied("ended"), rounds)
    statuses = RunsFolder(root).statuses()
    for drawn_as, most in (
        (run_view(statuses[0].id, statuses), 1_000_000),
        (all_view(statuses), 200_000),
    ):
        sizes = [len(part.text.encode()) for part in drawn_as.pieces.values()]
        assert 10_000 < sum(sizes) < most
    full = "".join(part.text for part in run_view(statuses[0].id, statuses).pieces.values())
    assert "<td>77.7</td>" in full


def test_the_page_of_all_has_charts_for_some_and_rows_for_the_rest(root, copied):
    copied("ended")
    for k in range(MAX_CARDS + 1):
        copied("open", f"open-{k}")
    found = all_view(RunsFolder(root).statuses())
    assert len(found.cards) == MAX_CARDS + 1
    assert found.cards[-1] == ("others", ["others-table"])
    text = words(found.pieces["others-table"].text)
    assert "ended" in text
    assert {"completed", "killed"} <= set(text.split())
    assert all_view([]).cards == [("none", ["none-yet"])]
    assert "not there any more" in run_view("x", []).pieces["none-any-more"].text
