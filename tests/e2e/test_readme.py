"""What the README shows is what the example does."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_model.py"


def test_the_code_in_the_readme_is_the_example():
    text = EXAMPLE.read_text()
    docstring = ast.parse(text).body[0]
    code = "\n".join(text.splitlines()[docstring.end_lineno :]).strip()
    _, _, rest = (ROOT / "README.md").read_text().partition("```python\n")
    block, _, rest = rest.partition("```")
    assert block.strip() == code
    assert "```python" not in rest


@pytest.mark.slow
def test_the_example_prints_claims(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    metrics, *claims, last = done.stdout.splitlines()
    assert ast.literal_eval(metrics)["accuracy"] > 0.7
    for line, accountant in zip(claims, ("PLD", "RDP"), strict=True):
        assert line.startswith("epsilon ")
        assert f"at delta 1e-05 per client (zero-out, central trust, {accountant}" in line
    assert float(claims[0].split()[1]) <= 8.0
    assert last.endswith("torch.Size([3, 2])")
    assert (tmp_path / "runs" / "mine" / "result.json").is_file()
