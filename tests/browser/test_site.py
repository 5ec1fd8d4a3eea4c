"""The documentation as people see it: opened from disk, on a telephone, searched."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SIDEWAYS = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
PAGES = (
    *("index.html", "officers.html", "epsilon.html", "api.html", "recipes.html", "glossary.html"),
    *("tutorials/first-run.html", "proofs/central.html", "proofs/secure.html", "results/fu.html"),
)
SEARCH = """
const done = arguments[arguments.length - 1];
const query = document.querySelector("[data-md-component=search-query]");
query.focus();
query.value = "zero-out";
query.dispatchEvent(new Event("input"));
query.dispatchEvent(new Event("keyup"));
let tries = 0;
const timer = setInterval(() => {
  const links = [...document.querySelectorAll(".md-search-result__item a")];
  if (links.length || ++tries > 100) {
    clearInterval(timer);
    done(links.map((link) => link.href));
  }
}, 100);
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_a_telephone_and_says_nothing_to_the_console(browser, site, page):
    """A request that goes anywhere but to the site's own files would be told there."""
    browser.look(390, 800)
    browser.open(site / page)
    assert browser.run(SIDEWAYS) <= 0
    assert browser.log() == []


def test_search_works_from_disk(browser, site):
    browser.look(1300, 900)
    browser.open(site / "proofs" / "central.html")
    found = browser.wait(SEARCH)
    assert any("/glossary.html" in link and link.endswith("#zero-out") for link in found)


def test_formulas_are_drawn_without_script(browser, site):
    browser.look(1300, 900)
    browser.open(site / "proofs" / "central.html")
    heights = browser.run(
        "return [...document.querySelectorAll('math')].map(m => m.getBoundingClientRect().height)"
    )
    assert len(heights) > 3
    assert min(heights) > 5


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page", ["index.html", "officers.html", "proofs/central.html"])
def test_letters_can_be_told_from_what_is_behind_them(browser, site, page, dark):
    """The colours are ours; how the theme builds its dialogs is not."""
    browser.look(1300, 900, dark=dark)
    browser.open(site / page)
    browser.wait("localStorage.clear(); setTimeout(arguments[0], 100)")
    browser.open(site / page)
    browser.wait("setTimeout(arguments[0], 800)")  # tabs fade in
    assert [found for found in browser.axe() if found[0] == "color-contrast"] == []
