"""What people see: no epsilon without delta, unit, neighbours and trust beside it, anywhere."""

import ast
import csv
import html
import json
import re
import sys
from pathlib import Path

import pytest

import fedveil
from fedveil.cli import main as commands

SOURCES = Path(fedveil.__file__).parent
TERMS = (
    r"at delta \S+ per (client|record|weight)[^()]*"
    r"\((add-remove|zero-out|replace), (local|curator|shuffled|central) trust"
)
NUMBER = r"(not vouched for, about )?([\d.,]+(e[+-]?\d+)?|infinity)"
MEANT = re.compile(rf"epsilon {NUMBER} {TERMS}")
SHOWN = re.compile(r"(?<![.\w-])epsilon(?: \([A-Z]+\))?[^\w.]{1,4}(not vouched|\d|inf)")
HEADER = re.compile(rf"^epsilon is {TERMS}", re.MULTILINE)
ROUND = re.compile(rf"^(round +\d+/\d+ .*)epsilon {NUMBER}( of [\d.e+-]+)?(?=  |$)", re.MULTILINE)
SAME_TERMS = re.compile(rf"epsilon \([A-Z]+\) {NUMBER} on the same terms")
FRAME = re.compile(r"[│┃┏┡└━┳╇┴┓┩┘─]")

FEW = ("data.clients=20", "engine.workers=1", "engine.mode=looped")
NOISY = ("budget.epsilon=inf", "budget.delta=1e-4", "noise.multiplier=2.0")
TURNS = ("sample.size=10", "sample.max_participations=2")
QUANTILE = ("clip.kind=quantile", "clip.value=0.05", "clip.bit_noise=1.0")
RUNS = {
    "central": ("central", (*FEW, *NOISY, "client.epochs=1", "rounds=2")),
    "stopped by its budget": (
        "central",
        (*FEW, *NOISY, "client.epochs=1", "rounds=2", "sample.kind=all", "budget.epsilon=2.2"),
    ),
    "curator": ("ldp-sgd", (*FEW, *NOISY, *TURNS, *QUANTILE, "rounds=2")),
    "record": ("dp-sgd", (*FEW, *NOISY, *TURNS, "rounds=2")),
    "as published": (
        "dp-fedavg",
        ("data.clients=20", "sample.size=10", "rounds=2", "budget.as_published=true"),
    ),
    "shuffled": ("ldp-fl", (*FEW, "client.epochs=1", "rounds=1", "shuffle.minimum=18")),
    "shuffled, secure": (
        "ldp-fl",
        (
            *FEW,
            "client.epochs=1",
            "rounds=1",
            "shuffle.minimum=18",
            "noise.source=secure",
            "noise.epsilon=0.1",
        ),
    ),
}


def flattened(text):
    """One line, without the frames of tables."""
    return re.sub(r"\s+", " ", FRAME.sub(" ", text))


def bare(text):
    """The epsilons in `text` that stand there without what they mean.

    Lines of rounds may have the number alone below the header with its terms, and a claim "on the
    same terms" may follow one in full.
    """
    header = HEADER.search(text)
    if header is not None:
        text = text[: header.end()] + ROUND.sub(r"\1", text[header.end() :])
    flat = flattened(text)
    starts = {match.start() for match in MEANT.finditer(flat)}
    same = {match.start() for match in SAME_TERMS.finditer(flat) if starts}
    starts |= {start for start in same if start > min(starts)}
    return [
        flat[match.start() : match.start() + 60]
        for match in SHOWN.finditer(flat)
        if match.start() not in starts
    ]


def bare_in_json(value):
    """Numbers called epsilon without their claim beside them, and bare ones in texts."""
    if isinstance(value, str):
        return bare(value)
    if isinstance(value, list):
        return [found for part in value for found in bare_in_json(part)]
    if not isinstance(value, dict):
        return []
    found = [one for part in value.values() for one in bare_in_json(part)]
    if value.get("epsilon") is None or "kind" in value:  # the parameter of a single event
        return found
    told = {"delta", "unit", "neighbours", "trust"} <= value.keys()
    words = re.search(TERMS, str(value.get("claim")))
    return found if told or words else [*found, str(value)]


def bare_in_csv(path):
    """Columns called epsilon without the columns that they need."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [one for row in rows for text in row.values() for one in bare(text)]
    for row in rows:
        if "epsilon" in row and not {"delta", "unit", "neighbours", "trust"} <= row.keys():
            found.append(str(row))
        if "epsilon" in str(row.keys()) and "claims" not in row:
            found.append(str(row))
    return found


def bare_on_page(path):
    """The epsilons on a page, and the figures with epsilons that do not say what they mean."""
    text = path.read_text().partition("</style>")[2].partition("<script>")[0]
    text = re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)  # the recipe, as it was written
    text = re.sub(r'<section id="words">.*?</section>', "", text, flags=re.DOTALL)  # definitions
    found = bare(words_of(text))
    for figure in re.findall(r"<figure.*?</figure>", text, re.DOTALL):
        said = words_of(figure)
        if "epsilon" in said and not re.search(rf"epsilon [^(]*{TERMS}", said):
            found.append(said[:80])
    return found


def words_of(markup):
    """What a page says, without its tags."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", markup)))


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")  # cells of several lines would be read across

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedveil", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            commands.main()
        said = capsys.readouterr()
        assert ended.value.code == 0, said.err
        return said.out, said.err

    return called


def sets(settings):
    return [part for setting in settings for part in ("--set", setting)]


def test_a_bare_epsilon_would_be_noticed():
    whole = "epsilon 7.998 at delta 1e-05 per client (zero-out, central trust)"
    assert not bare(f"{whole} spent, 0.002 left; the best epsilon; budget.epsilon is 8")
    assert not bare(whole.replace("7.998", "not vouched for, about 1,301"))
    for text in (
        "epsilon 7.998 spent per client",
        "epsilon (PLD): 3",
        "epsilon = 3",
        "epsilon 3 at delta 1e-05",
        whole.replace(", central trust", ""),
        whole.replace("zero-out, ", ""),
    ):
        assert bare(text), text
    line, header = (
        "round  1/10  accuracy 0.8  epsilon 2 of 8  clipped 5 %",
        f"epsilon is {whole[14:]}",
    )
    assert not bare(f"{header}\n{line}")
    for text in (line, f"{line}\n{header}", f"epsilon is 2\n{line}", f"{header}\nepsilon 3"):
        assert bare(text), text
    same = "epsilon (RDP)  8.72 on the same terms"
    assert not bare(f"{whole}\n{same}")
    for text in (same, f"{same}\n{whole}", f"{whole}\nepsilon (RDP)  8.72"):
        assert bare(text), text
    assert bare_in_json({"left": {"epsilon": 2.0}})
    assert bare_in_json({"round": 1, "epsilon": 2.0, "claim": None})
    assert not bare_in_json({"round": 1, "epsilon": 2.0, "claim": whole.replace(" 7.998", "")})
    assert not bare_in_json({"epsilon": None})
    assert bare(words_of("<th>epsilon</th><td>3</td>"))


@pytest.mark.parametrize("name", RUNS)
def test_runs_and_their_ledgers(cli, name):
    recipe, settings = RUNS[name]
    out, err = cli("run", recipe, *sets(settings), "--out", "run")
    assert MEANT.search(flattened(out))
    assert bare(out) + bare(err) == []
    assert bare_in_json(json.loads(Path("run/result.json").read_text())) == []
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert bare_in_json(lines) == []
    assert all(re.search(TERMS, line["claim"]) for line in lines)
    assert bare(cli("ledger", "run")[0]) == []
    assert bare_in_json(json.loads(cli("ledger", "run", "--json")[0])) == []
    assert MEANT.search(words_of(Path("run/report.html").read_text()))
    assert bare_on_page(Path("run/report.html")) == []


def test_shared_ledgers(cli):
    recipe, settings = RUNS["central"]
    shared = ("--ledger", "common.db", "--ledger-epsilon", "20", "--out", "run")
    out, err = cli("run", recipe, *sets((*settings, "budget.epsilon=9")), *shared)
    assert "all runs together" in flattened(out)
    assert bare(out) + bare(err) + bare(cli("ledger", "common.db")[0]) == []
    assert bare_in_json(json.loads(cli("ledger", "common.db", "--json")[0])) == []


def test_sweeps(cli):
    settings = sets(("data.clients=20", "sample.size=10", "rounds=1"))
    for number, grid in enumerate(("budget.epsilon=5,inf", "budget.as_published=true,false")):
        sweep = ("sweep", "dp-fedavg", *settings, "--grid", grid, "--out", f"sweep-{number}")
        out, _ = cli(*sweep)
        assert re.search(TERMS, flattened(out))
        assert bare(out) == []
        again = cli(*sweep, "--json")
        assert bare_in_json(json.loads(again[0])) == []
        for table in ("results.csv", "summary.csv"):
            assert bare_in_csv(Path(f"sweep-{number}", table)) == []
        assert bare_on_page(Path(f"sweep-{number}", "report.html")) == []


def test_plans(cli):
    sizes = sets(("clients=350", "per_round=70", "parameters=11", "epsilon=10"))
    small = ("--grid", "steps=1,2", "--grid", "iterations=4")
    out, _ = cli("plan", *sizes, *small)
    assert MEANT.search(out)
    assert bare(out) == []
    assert bare_in_json(json.loads(cli("plan", *sizes, *small, "--json")[0])) == []
    recipe = ("plan", "dp-fedavg", "--simulate", *small, "--workers", 1, "--quiet")
    out, _ = cli(*recipe, "--out", "plan.toml")
    assert "add up to epsilon" in out
    assert bare(out) == []
    assert bare_on_page(Path("plan.html")) == []
    assert bare_in_json(json.loads(cli(*recipe, "--json")[0])) == []


def test_pages_of_several_runs(cli):
    for name in ("central", "stopped by its budget", "record"):
        recipe, settings = RUNS[name]
        cli("run", recipe, *sets(settings), "--out", name)
    cli("report", "central", "stopped by its budget", "record")
    page = Path("report.html")
    assert "cannot be compared" in words_of(page.read_text())
    assert bare_on_page(page) == []


def test_accounts(cli):
    asked = ("account", "--noise", 1, "--rate", 0.5, "--rounds", 3, "--delta", "1e-5")
    out, _ = cli(*asked)
    assert len(MEANT.findall(out)) == 2
    assert bare(out) == []
    assert bare_in_json(json.loads(cli(*asked, "--json")[0])) == []


REFUSED = {
    "noise that a round exceeds": (
        "central",
        ("noise.multiplier=0.1", "budget.epsilon=1", "sample.kind=all"),
    ),
    "reports that a round exceeds": ("ldp-fl", ("budget.epsilon=1",)),
    "a curator that uses up everything": (
        "ldp-sgd",
        (*QUANTILE, "clip.bit_noise=0.1", "budget.epsilon=4"),
    ),
    "what cannot be vouched for": ("ldp-fl", ("noise.source=secure", "shuffle=none")),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refusals(monkeypatch, capsys, tmp_path, why):
    recipe, settings = REFUSED[why]
    arguments = ["fedveil", "run", recipe, *sets(settings), "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        commands.main()
    err = capsys.readouterr().err
    assert MEANT.search(err), err
    assert bare(err) == []


def test_nothing_but_the_claim_formats_an_epsilon():
    """A user's own input may be repeated in an error; what was computed is a claim's to show."""
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        if path.name != "claims.py":
            found += [f"{path.relative_to(SOURCES)}: {text}" for text in formatted(path)]
    assert found == []


def formatted(path):
    tree = ast.parse(path.read_text())
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    errors = {id(part) for node in raised for part in ast.walk(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.FormattedValue) or node.format_spec is None:
            continue
        text = ast.unparse(node.value)
        computed = "(" in text or id(node) not in errors
        if "epsilon" in text.lower() and computed:
            yield text
