"""Every console block in docs works, in its page's order, and prints what the page shows.

A page is one empty folder. A block with a title is a file of that name; `console` is a list of
commands; `text` is what they print, where `...` stands for lines, and numbers may differ elsewhere
in their last digits. `python -m tests.e2e.test_docs PAGE ...` writes the numbers of pages anew.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if "```console" in path.read_text(encoding="utf-8")
)
SLOW = {
    "how-to.md",
    "tutorials/first-run.md",
    "tutorials/attack.md",
    "tutorials/deploy.md",
    "tutorials/local-privacy.md",
    "tutorials/own-data.md",
    "tutorials/own-model.md",
    "tutorials/plan.md",
    "tutorials/verdict.md",
}
LEFT = {
    "tutorials/hospitals.md": ("model/report.html", "model/model.safetensors"),
    "tutorials/first-run.md": ("first/report.html", "release/model.safetensors"),
    "tutorials/own-model.md": ("mine/report.html",),
    "tutorials/plan.md": (
        *("plan.toml", "plan.html", "run/model.safetensors", "epsilons/results.csv"),
        *("epsilons/summary.csv", "epsilons/report.html", "shorter/summary.csv"),
    ),
    "tutorials/verdict.md": ("verdict.html", "charges.json"),
    "officers.md": ("charges.json", "release/head.json"),
}
"""Files that a page speaks of."""


def test_the_pages_that_have_to_be_there():
    assert SLOW | LEFT.keys() <= set(PAGES)
    assert len([page for page in PAGES if page.startswith("tutorials/")]) == 9


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else []) for p in PAGES]
)
def test_the_commands_and_what_they_print(cli, page):
    printed, shown = "", 0
    for kind, title, block in FENCE.findall((DOCS / page).read_text(encoding="utf-8")):
        if title:
            Path(title).write_text(block)
        elif kind == "console":
            printed = "".join(ran(cli, line) for line in commands(block))
        elif kind == "text":
            for line in block.splitlines():
                if line not in ("", "..."):
                    assert without_numbers(line.removesuffix(" ...")) in without_numbers(printed)
                    shown += 1
    assert shown or "```text" not in (DOCS / page).read_text(encoding="utf-8")
    assert all(Path(name).exists() for name in LEFT.get(page, ()))


def test_a_verdict_needs_ten_commands_at_most():
    blocks = FENCE.findall((DOCS / "tutorials/verdict.md").read_text(encoding="utf-8"))
    lines = [line for kind, _, block in blocks if kind == "console" for line in commands(block)]
    assert 5 < len(lines) <= 10


def commands(block):
    return [line for line in block.replace("\\\n", " ").splitlines() if line]


def ran(cli, line):
    program, *arguments = shlex.split(line, comments=True)
    if program == "python":
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr
    assert program == "fedveil", line
    told = cli(*arguments)
    assert told.code == 0, told.err
    return told.out + told.err


def without_numbers(text):
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.e+-]*", "0", text))


def _write(page):
    """Put what a page's commands print now in the place of what the page shows."""
    text, printed, now = (DOCS / page).read_text(encoding="utf-8"), [], set()

    def rewritten(fence):
        kind, title, block = fence.groups()
        if title:
            Path(title).write_text(block)
        elif kind == "console":
            printed[:] = [out for line in commands(block) for out in _out(line).splitlines()]
            now.clear()
        elif kind == "text":
            lines = block.splitlines()
            return "\n".join(["```text", *map(fresh, lines), "```"])
        return fence[0]

    def fresh(line):
        """The printed line that differs from it in numbers only, and in the fewest of them."""
        form, numbers = without_numbers(line), line.split()
        alike = [
            (sum(map(str.__eq__, out.split(), numbers)), -place)
            for place, out in enumerate(printed)
            if place not in now and without_numbers(out) == form
        ]
        if not alike:
            return line
        place = -max(alike)[1]
        now.add(place)
        return printed[place].rstrip()

    found = FENCE.sub(rewritten, text)
    (DOCS / page).write_text(found, encoding="utf-8")


def _out(line):
    program, *arguments = shlex.split(line, comments=True)
    module = ["-m", "fedveil"] if program == "fedveil" else []
    done = subprocess.run(
        [sys.executable, *module, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


if __name__ == "__main__":
    for _page in sys.argv[1:] or PAGES:
        with tempfile.TemporaryDirectory() as _folder, contextlib.chdir(_folder):
            _write(_page)
