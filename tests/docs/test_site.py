"""What the site makes of docs: its navigation, its links, its formulas, its API page."""

import logging
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import fedveil

ROOT = Path(__file__).parents[2]


def load(name):
    spec = spec_from_file_location(f"site_{name}", ROOT / "docs" / ".site" / f"{name}.py")
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks, docstrings = load("hooks"), load("docstrings")

INDEX = """# Home
## One
- [First](one.md): the first, see [second](two.md).
- [Changes](../CHANGELOG.md): what is new.
## Two
- [A](results/a.md): a.
- [Programs](../examples): all.
"""


def test_the_index_is_the_navigation_and_other_pages_go_by_their_folder():
    known = ["README.md", "one.md", "results/a.md", "results/b.md", "results/c/d.md", "watch.md"]
    assert hooks.navigation(INDEX, known) == [
        {"Home": "README.md"},
        {"One": [{"First": "one.md"}, {"Changes": "changelog.md"}]},
        {
            "Two": [
                *({"A": "results/a.md"}, {"Programs": "examples.md"}),
                *("results/b.md", "results/c/d.md"),
            ]
        },
        {"More": ["watch.md"]},
    ]


def test_the_index_lists_every_page_that_is_there():
    """But for what others add; then it is found under its folder, or under More."""
    index = hooks.navigation((ROOT / "docs" / "README.md").read_text(), hooks.pages())
    for section in index[1:]:
        for entries in section.values():
            names = [next(iter(e.values())) if isinstance(e, dict) else e for e in entries]
            assert all(name in hooks.pages() for name in names)


@pytest.mark.parametrize(
    ("link", "source", "name", "there"),
    [
        ("[a](data.md#texts)", "docs/models.md", "models.md", "[a](data.md#texts)"),
        ("[a](../data.md)", "docs/proofs/x.md", "proofs/x.md", "[a](../data.md)"),
        ("[a](docs/data.md)", "CHANGELOG.md", "changelog.md", "[a](data.md)"),
        ("[a](../CHANGELOG.md)", "docs/x.md", "x.md", "[a](changelog.md)"),
        ("[a](../examples/lora.py)", "docs/x.md", "x.md", "[a](examples.md#lora)"),
        ("[a](../../Makefile)", "docs/proofs/x.md", "proofs/x.md", "a (`Makefile`)"),
        ("[a](https://example.org/x)", "docs/x.md", "x.md", "[a](https://example.org/x)"),
        ("[a](#here)", "docs/x.md", "x.md", "[a](#here)"),
        ("[clips.md](clips.md)", "docs/proofs/x.md", "proofs/x.md", "[Clips](clips.md)"),
        ("`[a](../Makefile)`", "docs/x.md", "x.md", "`[a](../Makefile)`"),
    ],
)
def test_links_lead_to_the_same_file_on_the_site(link, source, name, there):
    assert hooks.relinked(link, source, name) == there


def test_the_build_is_strict():
    """With --quiet mkdocs hears no warning, so that a strict build passes whatever it finds."""
    (line,) = re.findall(r"^\t.*mkdocs build.*$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "--strict" in line
    assert "-q" not in line


def test_a_link_to_nothing_is_a_warning(caplog):
    """Which a strict build does not pass."""
    with caplog.at_level(logging.WARNING):
        hooks.relinked("[a](../no-such-file.py)", "docs/x.md", "x.md")
    assert "docs/x.md links to ../no-such-file.py, which does not exist" in caplog.text


def test_the_readme_links_to_files_that_are_there(caplog):
    with caplog.at_level(logging.WARNING):
        hooks.relinked((ROOT / "README.md").read_text(), "README.md", "x.md")
    assert caplog.text == ""


def test_a_formula_is_mathml():
    html = hooks.on_page_content(
        r'<p><span class="arithmatex">\(a &lt; b\)</span></p><div class="arithmatex">\[x^2\]</div>'
    )
    assert html.count("<math") == 2
    assert "<mo>&#x0003C;</mo>" in html
    assert "<msup>" in html
    assert "arithmatex" not in html


def test_doctests_are_fenced():
    said = "Text.\n\n>>> f(1)\n2\n>>> f(2)\n3\n\nMore.\n\n>>> f(3)"
    assert docstrings.fenced(said) == (
        "Text.\n\n```pycon\n>>> f(1)\n2\n>>> f(2)\n3\n```\n\nMore.\n\n```pycon\n>>> f(3)\n```"
    )


def test_docstrings_link_to_pages_that_are_there():
    said = docstrings.linked("Guarantee: docs/proofs/central.md. Then `x`.")
    assert said == "Guarantee: [docs/proofs/central.md](proofs/central.md). Then `x`."
    for path in (ROOT / "src").rglob("*.py"):
        for name in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{path} names {name}"


def test_the_api_page_has_every_public_name_once():
    names = []
    for name in fedveil.__all__:
        part = getattr(fedveil, name)
        inner = part.__all__ if isinstance(part, ModuleType) else ()
        names += [f"{name}.{each}" for each in inner] or [name]
    page = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^::: fedveil\.([\w.]+)$", page, re.MULTILINE)) == sorted(names)
