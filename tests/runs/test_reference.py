"""docs/recipes.md is what the code says."""

import os
import subprocess
import sys
from pathlib import Path

from fedveil.runs.explain import parts, split_kind
from fedveil.runs.reference import page

ROOT = Path(__file__).parents[2]
WRITE = "python -m fedveil.runs.reference > docs/recipes.md"


def test_the_page_in_docs_is_the_one_that_is_written():
    written = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert written == page(), f"docs/recipes.md is out of date: run {WRITE}"
    assert WRITE in written


def test_the_command_prints_the_page_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fedveil.runs.reference"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert (done.stdout, done.stderr) == (page(), "")


def test_every_key_has_a_row_of_five_cells():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert all(line.count("|") == 6 for line in rows)
    keys = [
        key.key for part in parts() for keys in part.kinds.values() for key in split_kind(keys)[1]
    ]
    assert [line.split("`")[1] for line in rows] == keys


def test_every_kind_has_a_heading():
    headings = [line for line in page().splitlines() if line.startswith("### ")]
    named = [split_kind(keys)[0] for part in parts() for keys in part.kinds.values()]
    kinds = [key for key in named if key is not None]
    assert len(kinds) > 10
    assert headings == [f"### {key.key} = {key.type}" for key in kinds]


def test_the_page_is_linked():
    assert "(recipes.md)" in (ROOT / "docs" / "README.md").read_text()
    assert "(docs/recipes.md)" in (ROOT / "README.md").read_text()
