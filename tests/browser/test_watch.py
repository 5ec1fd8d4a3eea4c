"""The live page and what-if, driven as people do: in a browser, while runs train, end and die."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest

from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run

from ..runs.conftest import BASE
from ..runs.test_report import many
from ..watch.server import served
from .test_reports import SIDEWAYS

pytestmark = pytest.mark.slow

SHORT = ("data.clients=20", "client.epochs=1", "engine.workers=1", "budget.delta=1e-4")
TEXT = "return document.querySelector('#cards').innerText"
LOOKS = ((1200, False), (400, True))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def url(root):
    with served(root) as (_, address):
        yield address


@pytest.fixture
def train(root):
    """Start a run as somebody else would; what is still running is killed."""
    begun = []

    def started(name, *settings):
        sets = [part for one in (*SHORT, *settings) for part in ("--set", one)]
        command = [sys.executable, "-m", "fedveil", "run", "central", "--quiet"]
        process = subprocess.Popen(
            [*command, *sets, "--out", str(root / name)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        begun.append(process)
        return process

    yield started
    for process in begun:
        process.kill()
        process.wait()
        process.stderr.close()
    for folder in root.iterdir():
        shutil.rmtree(folder)


CURVE = "document.querySelector('.metric-0 path.line').getAttribute('d')"
CLAIM = "document.querySelector('.claim .sub').textContent"
DONE = "return !document.querySelector('#answer').classList.contains('waiting')"


def seen(words):
    return f"return /{words}/.test(document.querySelector('#cards').innerText)"


def link(name):
    return f"Array.from(document.querySelectorAll('a')).find(a => a.textContent == '{name}')"


def said(words, where="#connection"):
    return f"return /{words}/.test(document.querySelector('{where}').textContent)"


def round_of(browser):
    found = re.search(r"round ([\d,]+) of", browser.run(TEXT))
    return int(found[1].replace(",", ""))


def test_it_moves_while_a_run_trains_and_the_button_ends_it(browser, url, root, train):
    browser.look()
    browser.visit(url)
    browser.until(seen("There is no run here yet"))
    long = ("rounds=100000", "noise.multiplier=60", "budget.epsilon=1000")
    process = train("long", *long)
    browser.until(seen("round [1-9]"), 180)
    before, curve = round_of(browser), browser.run(f"return {CURVE}")
    browser.until(f"return +document.querySelector('progress').value > {before}")
    browser.until(f"return {CURVE} != {json.dumps(curve)}")
    text = browser.run(TEXT)
    assert "running" in text
    spent = "spent of epsilon 1,000 at delta 0.0001 per client (zero-out, central trust)"
    assert spent in text
    assert browser.log() == []
    browser.run("document.querySelector('[data-stop]').focus()")
    enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    browser.devtools("Input.dispatchKeyEvent", type="keyDown", **enter)
    browser.until("return document.querySelector('#stop').open")
    assert browser.axe() == []
    browser.run("document.querySelector('#stop-no').click()")
    assert not (root / "long" / "stop").exists()
    browser.run("document.querySelector('[data-stop]').click()")
    browser.run("document.querySelector('#stop-yes').click()")
    browser.until(seen("ended on request"))
    assert process.wait(120) == 1
    told = process.stderr.read()
    assert "ended on request after round" in told
    assert f"--resume {root / 'long'}" in told
    result = json.loads((root / "long" / "result.json").read_text())
    assert result["stopped"] == "request"
    assert before < result["rounds"] < 100000
    assert not (root / "long" / "stop").exists()
    assert browser.log() == []


def test_a_budget_that_stops_a_run_and_one_that_is_killed(browser, url, root, train):
    browser.look()
    browser.visit(url)
    train("poor", "rounds=40", "noise.multiplier=2", "budget.epsilon=5", "sample.kind=all")
    browser.until(seen("stopped by the budget"), 180)
    assert "by its own budget" in browser.run(TEXT)
    killed = train("killed", "rounds=100000", "noise.multiplier=60", "budget.epsilon=1000")
    browser.until(seen("running[^]*round [1-9]"), 180)
    killed.send_signal(signal.SIGKILL)
    browser.until(seen("not running any more"))
    text = browser.run(TEXT)
    assert f"fedveil run --resume {root / 'killed'}" in text
    assert "End after this round" not in text
    train("next", "rounds=3", "noise.multiplier=2", "budget.epsilon=inf")
    browser.until("return Array.from(document.querySelectorAll('#others-table tr'),"
                  " r => r.innerText).some(t => /next[^]*completed/.test(t))", 180)  # fmt: skip
    assert browser.log() == []


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_pages_pass_axe_and_do_not_scroll_sideways(browser, url, root, width, dark):
    for name, more in (("ended", ()), ("other", ("seed=2",))):
        if not (root / name).exists():
            settings = (*BASE["central"], "budget.epsilon=30", *more)
            Run.start(load_recipe("central", settings), root / name, None).execute()
    browser.look(width, dark=dark)
    browser.visit(url)
    browser.until(seen("completed"))
    assert browser.run(SIDEWAYS) == 0
    assert browser.axe() == []
    links = "Array.from(document.querySelectorAll('#others-table a'))"  # of other tests' runs too
    link = f"{links}.find(a => /ended|other/.test(a.innerText))"
    browser.until(f"return {link} !== undefined")
    browser.follow(link)
    browser.until(seen("Signal to noise of the sum"))
    assert browser.run(SIDEWAYS) == 0
    assert browser.axe() == []
    browser.follow("document.querySelector('a[href^=\"./report\"]')")
    browser.until("return document.querySelector('#ledger') !== null")
    browser.visit(f"{url}what-if")
    browser.until("return document.querySelector('#answer-splits table') !== null")
    browser.until(DONE)
    assert browser.run(SIDEWAYS) == 0
    assert browser.axe() == []
    assert browser.log() == []


def test_what_if_answers_by_keyboard(browser, url):
    browser.look()
    browser.visit(f"{url}what-if")
    browser.until(DONE)
    before = browser.run(f"return {CLAIM}")
    assert re.search(r"per client \(zero-out, central trust, PLD, secure noise\)", before)
    browser.run("document.querySelector('#noise').focus()")
    right = {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39}
    for _ in range(3):
        browser.devtools("Input.dispatchKeyEvent", type="keyDown", **right)
    value = "return document.querySelector('#noise').getAttribute('aria-valuetext')"
    assert browser.run(value) == "2.75"
    browser.until(f"return {CLAIM} != {json.dumps(before)}")
    browser.until(DONE)
    told = (before, browser.run(f"return {CLAIM}"))
    numbers = [float(re.search(r"epsilon ([\d.]+)", text)[1]) for text in told]
    assert numbers[1] < numbers[0]
    recipe = browser.run("return document.querySelector('#recipe').href")
    assert "noise=2.75" in recipe
    with urlopen(recipe) as answer:
        assert "multiplier = 2.75" in answer.read().decode()
    browser.run("document.querySelector('#fit').click()")
    browser.until(said("rounds fit", "#answer-budget"))
    assert browser.log() == []


def test_hostile_text_runs_nothing(browser, url, root):
    evil = "<script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"
    folder = root / "hostile<b>"
    Run.start(load_recipe("fedsgd", BASE["fedsgd"]), folder, None).execute()
    (folder / "ledger.db").unlink()
    result = json.loads((folder / "result.json").read_text())
    texts = {key: evil for key, value in result.items() if isinstance(value, str)}
    metrics = {evil: 1.0, "accuracy": evil, **result["metrics"]}
    told = {**result, **texts, "notes": [evil], "metrics": metrics}
    (folder / "result.json").write_text(json.dumps(told))
    (folder / "recipe.toml").write_text(f"rounds = 4\n# </pre>{evil}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = "".join(json.dumps({**line, evil: 0.5}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(kept)
    browser.look()
    browser.visit(url)
    browser.until("return document.body.innerText.includes('hostile<b>')")
    browser.follow(link("hostile<b>"))
    browser.until(seen("over rounds"))
    assert "evil" not in browser.run("return document.title")
    assert browser.run("return document.images.length + document.scripts.length") == 1
    assert "<script>" in browser.run(TEXT)
    assert browser.log() == []
    shutil.rmtree(folder)


def test_ten_thousand_rounds_open_in_two_seconds(browser, url, root):
    folder = root / "many"
    Run.start(load_recipe("central", BASE["central"]), folder, None).execute()
    many(folder, 10_000)
    browser.look()
    browser.visit(url)
    browser.until("return document.body.innerText.includes('many')")
    for address in (url, browser.run(f"return {link('many')}.href")):
        times = []
        for _ in range(3):
            began = time.monotonic()
            browser.visit(address)
            browser.until("return document.querySelectorAll('.metric-0 path.line').length > 0")
            times.append(time.monotonic() - began)
        assert min(times) < 2, times
    assert browser.log() == []
    shutil.rmtree(folder)


def test_a_server_that_ends_is_said_to_have_ended(browser, root):
    browser.look()
    with served(root) as (process, address):
        browser.visit(address)
        browser.until(said("Live"))
        process.stdin.close()
        browser.until(said("has ended"))
        assert process.wait(60) == 0
    assert browser.log() == []
