"""The tutorial's commands work, in its order, and print what it shows."""

import re
import shlex
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
FILES = (
    "plan.toml", "plan.html", "run/model.safetensors", "epsilons/results.csv",
    "epsilons/summary.csv", "epsilons/report.html", "shorter/summary.csv",
)  # fmt: skip


@pytest.mark.slow
def test_the_commands_and_what_they_print(cli):
    """Numbers may differ elsewhere in their last digits: rows are compared without them."""
    printed, shown = "", 0
    for kind, block in BLOCKS:
        if kind == "console":
            printed = ""
            for line in block.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "fedveil"
                told = cli(*arguments)
                assert told.code == 0, told.err
                printed += told.out + told.err
        else:
            for line in block.splitlines():
                if line not in ("", "..."):
                    assert without_numbers(line.removesuffix(" ...")) in without_numbers(printed)
                    shown += 1
    assert shown > 20
    assert all(Path(name).exists() for name in FILES)


def without_numbers(text):
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.e+-]*", "0", text))
