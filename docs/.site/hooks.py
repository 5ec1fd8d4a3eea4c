"""What the site makes of the pages in docs, which are written to be read on a code host as well.

docs/README.md is the navigation: its headings are the sections, the first link of every item is a
page. Formulas become MathML, which browsers draw without any script. A link to a file outside docs
leads to a page made of that file, or is told as the file's name.
"""

import ast
import logging
import posixpath
import re
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = "examples.md"
PAGES = {
    "benchmarks/RESULTS.md": "benchmarks.md",
    "benchmarks/GROWTH.md": "growth.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples": EXAMPLES,
}
"""What else of the repository is a page of the site, and under which name."""

MORE = "More"
"""Where a page goes that no list has and whose folder is in none."""

log = logging.getLogger("mkdocs.hooks.fedveil")

_HEADING = re.compile(r"^## (.+)$")
_ITEM = re.compile(r"^- \[([^]]+)\]\(([^)#]+)\)")
_LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_ALIGNED = re.compile(r"\{aligned\}")  # latex2mathml's name for it is another
_BAR = re.compile(r"<mo([^>]*)>(?:&#x0007C;|\|)</mo>")  # a norm's, without space around it
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Read the navigation."""
    config.nav = navigation((DOCS / "README.md").read_text(encoding="utf-8"), pages())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files outside docs."""
    for source, name in PAGES.items():
        text = examples() if name == EXAMPLES else (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=relinked(text, source, name)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links that leave docs to where they lead on the site."""
    name = page.file.src_uri
    if page.file.generated_by:
        return markdown
    return relinked(markdown, f"docs/{name}", name)


def on_page_content(html: str, **_: Any) -> str:
    """Write formulas as MathML."""
    return _FORMULA.sub(_mathml, html)


def pages() -> list[str]:
    """Every page of docs, and those made of other files."""
    written = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    return [*written, *PAGES.values()]


def navigation(index: str, known: list[str]) -> list[dict[str, Any]]:
    """The sections of an index with their pages; pages that it does not list go by their folder."""
    sections: dict[str, list[Any]] = {}
    homes: dict[str, str] = {}
    listed, section = {"README.md"}, ""
    for line in index.splitlines():
        if heading := _HEADING.match(line):
            section = heading[1]
        elif item := _ITEM.match(line):
            title, name = item.groups()
            name = PAGES.get(name.removeprefix("../"), name)
            sections.setdefault(section, []).append({title: name})
            homes.setdefault(posixpath.dirname(name), section)
            listed.add(name)
    for name in known:
        if name not in listed:
            folder = posixpath.dirname(name)
            home = next((homes[f] for f in _above(folder) if f in homes), MORE) if folder else MORE
            sections.setdefault(home, []).append(name)
    return [{"Home": "README.md"}, *({name: found} for name, found in sections.items())]


def relinked(markdown: str, source: str, name: str) -> str:
    """The text of the repository's file `source` as the page `name` of the site, links included."""

    def link(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if (ROOT / there).is_dir() and (ROOT / there / "README.md").is_file():
            there = posixpath.join(there, "README.md")
        if there.startswith("docs/") and not (ROOT / there).is_dir():
            uri = there.removeprefix("docs/")
        elif there in PAGES:
            uri = PAGES[there]
        elif re.fullmatch(r"examples/\w+\.py", there) and (ROOT / there).is_file():
            uri, anchor = EXAMPLES, Path(there).stem
        elif (ROOT / there).exists():
            return f"`{there}`" if text.strip("`") in (path, there) else f"{text} (`{there}`)"
        else:
            log.warning("%s links to %s, which does not exist", source, target)
            return found[0]
        if text in (path, posixpath.basename(path)):
            text = titles().get(uri, text)
        to = posixpath.relpath(uri, posixpath.dirname(name) or ".")
        return f"{mark}[{text}]({to}{f'#{anchor}' if anchor else ''})"

    parts = _CODE.split(markdown)
    return "".join(part if n % 2 else _LINK.sub(link, part) for n, part in enumerate(parts))


@cache
def titles() -> dict[str, str]:
    """What the index calls each page; a link named after its file is called so on the site."""
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    items = filter(None, map(_ITEM.match, index.splitlines()))
    return {item[2]: item[1] for item in items}


def examples() -> str:
    """One page of all examples, each under its file's name."""
    lines = ["# Examples", "", "Complete programs: `python examples/NAME.py` runs one.", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        said = ast.get_docstring(ast.parse(text)) or ""
        code = text.partition('"""\n')[2] if text.startswith('"""') else text
        heading = f"## {path.stem} {{ #{path.stem} }}"
        lines += [heading, "", said, "", "```python", code.strip(), "```", ""]
    return "\n".join(lines)


def _above(folder: str) -> list[str]:
    """A folder and those that it is in."""
    parts = folder.split("/")
    return ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _mathml(found: re.Match[str]) -> str:
    tex, block = unescape(found[2]).strip(), found[1] == "div"
    try:
        drawn = convert(_ALIGNED.sub("{align*}", tex), display="block" if block else "inline")
    except Exception as e:
        log.warning("the formula %r cannot be drawn: %s", tex, e)
        return found[0]
    drawn = _BAR.sub(r'<mo\1 lspace="0em" rspace="0em">|</mo>', drawn)
    return f'<div class="formula">{drawn}</div>' if block else drawn
