"""Reports as people see them: in a browser, by keyboard, on a telephone, on paper."""

import base64
import json
import re
import shutil
import time

import pytest

from fedveil.runs.recipe import load_recipe, shipped_recipes
from fedveil.runs.report import report_html
from fedveil.runs.run import Run

from ..runs.conftest import BASE
from ..runs.test_report import many

pytestmark = pytest.mark.slow

NAMES = [recipe["name"] for recipe in shipped_recipes()]
OWN = {
    "priv-unit": ("rounds=4", "data.clients=20", "engine.workers=1", "sample.size=10",
                  "sample.max_participations=4", "budget.delta=1e-4"),
    "people": ("rounds=4", "engine.workers=1"),
    "sites": ("rounds=4", "engine.workers=1"),
    "fedavg": ("rounds=4", "data.clients=20", "engine.workers=1", "sample.size=10"),
    "norm-bound": ("rounds=4", "data.clients=20", "engine.workers=1", "sample.size=10"),
    "weak-dp": ("rounds=4", "data.clients=20", "engine.workers=1", "sample.size=10"),
}  # fmt: skip
CLAIMED = """
const box = document.querySelector(".claim");
return [box.getBoundingClientRect().top < innerHeight, box.innerText,
        document.querySelectorAll("figure svg[role=img]").length,
        document.querySelector("#ledger").innerText];
"""
SIDEWAYS = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A short run of a shipped recipe, made when it is asked for first."""
    root, made = tmp_path_factory.mktemp("runs"), {}

    def run(name):
        if name not in made:
            made[name] = root / name
            Run.start(load_recipe(name, (BASE | OWN)[name]), made[name], None).execute()
        return made[name]

    return run


@pytest.mark.parametrize("name", NAMES)
def test_the_report_of_a_shipped_recipe(browser, runs, name):
    folder = runs(name)
    claims = json.loads((folder / "result.json").read_text())["claims"]
    for width, dark in ((1100, False), (400, True)):
        browser.look(width, dark=dark)
        browser.open(folder / "report.html")
        contents, claim, charts, ledger = browser.run(CLAIMED)
        assert contents, "the claim is not on the first screen"
        assert claim.startswith("Whoever sees") == bool(claims)
        assert ("Nothing is promised" in claim) == (not claims)
        assert charts >= (3 if claims else 2)
        assert "none changed, removed, inserted or moved" in ledger
        assert browser.run(SIDEWAYS) == 0, "the page scrolls sideways"
        assert browser.axe() == []
        assert browser.log() == []


def test_pointer_and_keys_read_a_chart(browser, runs):
    browser.look()
    browser.open(runs("central") / "report.html")
    first = "const f = document.querySelector('figure'); "
    browser.run(first + "f.querySelector('svg[role=img]').focus()")
    browser.press("End")
    text = browser.run(first + "return f.querySelector('.readout').textContent")
    assert text.startswith("round 4, accuracy 0.")
    browser.press("ArrowLeft")
    assert "round 3," in browser.run(first + "return f.querySelector('.readout').textContent")
    box = browser.run(first + "const b = f.querySelector('svg[role=img]').getBoundingClientRect();"
                      "return [b.left + b.width * 0.12, b.top + b.height / 2]")  # fmt: skip
    browser.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    assert "round 0," in browser.run(first + "return f.querySelector('.readout').textContent")
    assert browser.log() == []


def test_everything_is_reached_by_keyboard_in_the_order_of_the_page(browser, runs):
    browser.look()
    browser.open(runs("central") / "report.html")
    for _ in range(3):
        browser.press("Tab")
    tops = "return Array.from(document.querySelectorAll('[tabindex], summary')," \
           "e => e.tabIndex)"  # fmt: skip
    assert set(browser.run(tops)) == {0}
    assert browser.run("return document.activeElement !== document.body")


def test_it_prints_on_a4(browser, runs):
    browser.look(dark=True)
    browser.open(runs("ldp-fl") / "report.html")
    told = browser.devtools("Page.printToPDF", preferCSSPageSize=True)
    pdf = base64.b64decode(told["data"])
    assert pdf.startswith(b"%PDF")
    assert re.search(rb"/MediaBox \[0 0 59[45][\d.]* 84[12]", pdf)
    browser.look(dark=True, media="print")
    assert (
        browser.run("return getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
    )


def test_ten_thousand_rounds_open_in_two_seconds(browser, runs, tmp_path):
    folder = shutil.copytree(runs("central"), tmp_path / "run")
    path = tmp_path / "long.html"
    path.write_text(many(folder, 10_000))
    browser.look()
    times = []
    for _ in range(3):
        began = time.monotonic()
        browser.open(path)
        assert browser.run("return document.readyState") == "complete"
        times.append(time.monotonic() - began)
    assert min(times) < 2, times
    assert browser.log() == []


def test_hostile_text_runs_nothing(browser, runs, tmp_path):
    folder = shutil.copytree(runs("fedsgd"), tmp_path / "run")
    (folder / "ledger.db").unlink()
    evil = "<script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"
    result = json.loads((folder / "result.json").read_text())
    metrics = {evil: 1.0, **result["metrics"]}
    told = {**result, "notes": [evil], "recipe": evil, "metrics": metrics, "why": evil}
    (folder / "result.json").write_text(json.dumps(told))
    (folder / "recipe.toml").write_text(f"# resolved by x on y\n</pre>{evil}")
    page = tmp_path / "evil.html"
    page.write_bytes(report_html(folder))
    browser.open(page)
    assert browser.run("return document.title").startswith("<script>")
    assert browser.run("return document.images.length + document.scripts.length") == 1
    assert browser.log() == []


def test_the_policy_stops_a_script_that_got_in(browser, runs, tmp_path):
    text = (runs("central") / "report.html").read_text()
    page = tmp_path / "broken.html"
    page.write_text(text.replace("<main>", "<main><script>document.title='evil'</script>"))
    browser.open(page)
    assert browser.run("return document.title") == "central: privacy report"
    assert any("Content Security Policy" in line for line in browser.log())
