"""The report of a run: the claim first, everything shown as text, nothing shown that may not be."""

import html
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib.metadata import version
from itertools import pairwise

import pytest

from fedveil.base.errors import BadInput
from fedveil.pages.run_report import RunContents, run_page
from fedveil.privacy.accounting.budget import NOT_DECIDED
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.runs.evidence import file_digests
from fedveil.runs.report import read_contents, report_html
from fedveil.runs.run import Run

from .conftest import BASE

SCRIPT = "<script>alert('x')</script><img src=x onerror=alert(1)>"


def words(page):
    text = page.decode() if isinstance(page, bytes) else page
    body = text.partition("</style>")[2].partition("<script>")[0]
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", body)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """central: a run that has ended; open: one that was stopped in the middle, and not ended."""
    from fedveil.runs.recipe import load_recipe

    root = tmp_path_factory.mktemp("made")

    def begin(name, *settings):
        recipe = load_recipe("central", (*BASE["central"], *settings))
        return Run.start(recipe, root / name, None)

    begin("central", "budget.epsilon=30").execute()
    running = begin("running")
    lines = running.metric_lines()
    for _ in range(2):
        next(lines)
    shutil.copytree(running.folder, root / "open")
    lines.close()
    return root


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made / "central", tmp_path / "central")


def test_a_run_leaves_a_page_that_opens_with_its_claim(made):
    text = words((made / "central" / "report.html").read_bytes())
    found = [text.index(part) for part in (
        "Whoever sees this model", "Learning and spending", "Epsilon over rounds",
        "What this means", "The claim in full", "Clip and noise", "Ledger",
        "Recipe, as it was resolved", "Time and machine",
    )]  # fmt: skip
    assert found == sorted(found)
    for part in (
        "none changed, removed",
        "Test accuracy over rounds",
        "signal = noise",
        "torch 2.",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("stopped", "said"),
    [
        ("rounds", "4 rounds, completed"),
        ("budget", "4 rounds, stopped by the budget"),
        ("interrupted", "4 rounds, interrupted"),
        ("moon", "4 rounds, stopped by: moon"),
    ],
)
def test_it_says_why_there_were_no_more_rounds(made, stopped, said):
    contents = read_contents(made / "central")
    assert said in words(
        run_page(replace(contents, result=contents.result | {"stopped": stopped}), {})
    )


def test_it_says_whom_one_trusts_and_what_numbers_are(made):
    text = words((made / "central" / "report.html").read_bytes())
    assert "trust, PLD, seeded noise) the server everyone updates" in text
    assert "What an attacker tries to find out Whether a given client" in text
    assert "accuracy on the test split, 0 to 1" in text
    assert "loss on the test split, 0 to 1" not in text


def test_it_has_the_epsilon_of_somebody_with_several_clients(made):
    contents = read_contents(made / "central")
    text = words(run_page(contents, {}))
    claim = contents.claims[0]
    table = text.partition("Epsilon at delta 0.0001 for several clients of one person (zero-out")[2]
    for units in (1, 2, 4, 8):
        assert f" {units} {claim.for_units(units).rounded_epsilon} " in table
    assert claim.for_units(2).epsilon > 2 * claim.epsilon
    assert "as many times as large" not in text


def test_a_result_of_an_earlier_version_says_that_several_clients_are_unknown(made):
    contents = read_contents(made / "central")
    told = [dict(claim) for claim in contents.result["claims"]]
    for claim in told:
        del claim["composed"], claim["units"]
    text = words(run_page(replace(contents, claims=tuple(map(PrivacyClaim.from_dict, told))), {}))
    assert "somebody with several clients is larger, and cannot be computed" in text
    assert "of one person (zero-out" not in text


def test_it_is_written_again_as_it_was(folder):
    """Byte for byte, so that the ledger covers it as before."""
    before = file_digests(folder)
    assert report_html(folder) == (folder / "report.html").read_bytes()
    (folder / "report.html").write_bytes(report_html(folder))
    assert file_digests(folder) == before


def test_it_begins_with_date_data_version_and_the_guarantee(made):
    text = words((made / "central" / "report.html").read_bytes())
    today = json.loads((made / "central" / "result.json").read_text())["date"]
    assert f"{today} · data set digits · fedveil {version('fedveil')} · run directory" in text
    tiles = re.search(r"(\S+) epsilon, at most (\S+) delta one client is protected "
                      r"\(neighbours: zero-out\) the server has to be trusted", text)  # fmt: skip
    assert tiles is not None
    assert f"epsilon {tiles[1]} at delta {tiles[2]} per client" in text


@pytest.mark.parametrize(
    ("recipe", "shown"),
    [
        ('[data]\nname = "digits"', "data set digits · run directory x"),
        ('[data]\nname = "table"\npath = "/a/b/wine.csv"', "data wine.csv · run directory x"),
        ('[data]\npath = ["n.csv", "s.csv"]', "data n.csv, s.csv · run directory x"),
        ('[data]\nname = "own"', "data from Python · run directory x"),
        ("data = 3", "run directory x"),
        ("<[", "run directory x"),
    ],
)
def test_the_origin_is_what_the_recipe_says(tmp_path, recipe, shown):
    assert RunContents(tmp_path / "x", recipe, [], {}).origin == shown


def test_a_run_that_claims_nothing_says_so(start):
    run = start("fedsgd")
    run.execute()
    text = words((run.folder / "report.html").read_bytes())
    assert "Nothing is promised" in text
    assert "Epsilon over rounds" not in text
    assert "no privacy is claimed" in text.lower()


def test_as_published_is_not_a_guarantee_and_the_strict_claim_counts(start):
    run = start(
        "dp-fedavg", "budget.as_published=true", "noise.multiplier=none", "budget.epsilon=20"
    )
    run.execute()
    text = words((run.folder / "report.html").read_bytes())
    assert "it is not a guarantee" in text
    assert "as published, not a guarantee" in text
    assert "no bound" in text


def test_ldp_fl_has_its_four_readings_side_by_side(start):
    run = start("ldp-fl")
    run.execute()
    text = words((run.folder / "report.html").read_bytes())
    assert "read in 4 ways" in text
    for part in ("shuffled trust, PLD", "local trust, BINOMIAL", "local trust, PURE", "per weight"):
        assert part in text


def test_secure_runs_hide_what_private_data_tell(start):
    run = start("central", "noise.source=secure")
    run.execute()
    page = (run.folder / "report.html").read_text()
    text = words(page)
    assert "they are not recorded" in text
    assert "first at" not in text
    assert "When rounds were charged is not shown" in text
    assert 'id="snr"' not in page
    assert 'id="clipped"' not in page
    ledger = json.loads((run.folder / "result.json").read_text())
    assert ledger["timing"]["client_updates_per_second"] is None
    assert "Client updates per second" not in text


def test_an_open_run_is_drawn_from_its_ledger(made):
    contents = read_contents(made / "open")
    assert not contents.result
    assert [claim.condition for claim in contents.claims] == ["", "", NOT_DECIDED]
    text = words(run_page(contents, {}))
    assert "has not ended" in text
    assert "the run is open" in text


def test_a_changed_result_is_refused_and_a_broken_ledger_is_said(folder):
    result = folder / "result.json"
    text = result.read_text()
    result.write_text(text.replace("accuracy", "Accuracy"))
    with pytest.raises(BadInput, match="was changed"):
        report_html(folder)
    result.write_text(text)
    (folder / "metrics.jsonl").write_text("")
    assert "metrics.jsonl is not the one" in words(report_html(folder))


@pytest.mark.parametrize("name", ["recipe.toml", "metrics.jsonl"])
def test_a_directory_without_a_run_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(BadInput, match="holds no run"):
        read_contents(folder)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '"x"', '{"claims": 1}', '{"claims": [{"epsilon": "x"}]}',
     '{"claims": [{}]}', "[" * 100_000],
)  # fmt: skip
def test_a_result_that_is_none_is_refused(folder, content):
    (folder / "ledger.db").unlink()
    (folder / "result.json").write_text(content)
    with pytest.raises(BadInput, match="result"):
        report_html(folder)


def hostile(value):
    """The same with markup in every text, and under every name."""
    if isinstance(value, dict):
        return {f"{key}": hostile(inner) for key, inner in value.items()} | {SCRIPT: SCRIPT}
    if isinstance(value, list):
        return [hostile(inner) for inner in value]
    return value + SCRIPT if isinstance(value, str) else value


WORDS = ("epsilon", "unit", "neighbours", "trust", "accountant", "noise")


def test_markup_in_every_field_is_shown_as_text(folder):
    """Names, notes, metrics, claims, recipe and ledger may be anybody's."""
    result = json.loads((folder / "result.json").read_text())
    claims = [
        {**claim, "assumptions": [SCRIPT], "holds_for": SCRIPT, "covers": SCRIPT}
        for claim in result["claims"]
    ]
    evil = {
        **hostile({key: value for key, value in result.items() if key != "claims"}),
        "claims": claims,
        "notes": [SCRIPT],
        "attack": {SCRIPT: SCRIPT, "nested": {SCRIPT: [SCRIPT]}},
        "over_clients": {SCRIPT: SCRIPT},
        "refused": {SCRIPT: 3},
    }
    evil["metrics"] = {SCRIPT: 0.5, "accuracy": SCRIPT, "loss": None}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, SCRIPT: line["round"] / 2, "claim": line["claim"] + SCRIPT} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.toml").write_text(
        f"# resolved by {SCRIPT} on {SCRIPT}\n{SCRIPT}\n</pre>{SCRIPT}"
    )
    (folder / "ledger.db").unlink()
    (folder / "result.json").write_text(json.dumps(evil))
    moved = folder.rename(folder.with_name(f"run {SCRIPT.replace('/', '-')}"))
    page = report_html(moved).decode()
    assert page.count("<script>") == 1
    assert "<img" not in page
    assert page.count("&lt;script&gt;") > 30
    assert "</pre>&lt;" not in page
    elements = Elements()
    elements.feed(page)
    assert elements.names["script"] == 1
    assert "img" not in elements.names
    assert not [name for name in elements.attributes if name.startswith("on")]


class Elements(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self):
        super().__init__()
        self.names, self.attributes = Counter(), set()

    def handle_starttag(self, tag, attrs):
        self.names[tag] += 1
        self.attributes |= {name for name, _ in attrs}


def test_a_ledger_s_own_texts_are_text(folder, monkeypatch):
    contents = read_contents(folder)
    named = contents.statement.__class__(SCRIPT, contents.statement.charges, contents.claims, 8.0)
    evil = replace(contents, statement=named, verified=SCRIPT, trouble=[SCRIPT])
    page = run_page(evil, {SCRIPT: SCRIPT}).decode()
    assert page.count("<script>") == 1
    assert page.count("&lt;script&gt;") >= 3


def many(folder, rounds):
    """The same run with so many rounds in its metrics, one of them far off."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]
    long = lines[:1] + [
        {**last, "round": r, "loss": 2 / r, "epsilon": r**0.5, "snr": 1 + (r % 7)}
        for r in range(1, rounds + 1)
    ]
    long[rounds // 3]["loss"] = 77.7
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in long))
    return report_html(folder).decode()


@pytest.mark.parametrize("rounds", [1_000, 10_000])
def test_long_runs_make_small_pages_that_keep_their_extremes(folder, rounds):
    page = many(folder, rounds)
    assert len(page.encode()) < 1_000_000
    assert "<td>77.7</td>" in page


def test_epsilon_is_a_point_per_round_joined_by_a_line(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    page = (folder / "report.html").read_text()
    spent = page.partition('id="spent"')[2].partition("</figure>")[0]
    path = re.search(r'class="line s0" d="([^"]+)"', spent)[1]
    places = [tuple(map(float, p.split())) for p in re.findall(r"[ML]([^ML]+)", path)]
    assert len(places) == len(lines)
    assert all(x0 < x1 and y1 < y0 for (x0, y0), (x1, y1) in pairwise(places))
    assert "budget: 30" in spent
