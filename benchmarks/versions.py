"""`make bench-versions BASE=REV`: the same rounds on an earlier fedveil and on this one.

Both take turns, each turn in a process of its own, so that whatever else the machine does meets
both. A turn counts as its median round; the ratio is that of the medians over all turns. Above 1,
this one is faster. Peers are not needed: a ratio to a peer changes as this one does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROUNDS = {"a-1": 200, "a-10": 100, "b": 4, "c-1": 25, "c-5": 25, "d": 8, "e": 4}


def median_round(tree: Path, item: str) -> float:
    """Seconds of one turn: by the script of that tree, on the package of that tree."""
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree / 'benchmarks'}"}
    script = tree / "benchmarks" / "ours.py"
    command = [sys.executable, "-B", str(script), item, "--rounds", str(ROUNDS[item])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment, check=True
    )
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = answer["seconds"]
    if "examples" in answer:  # Poisson batches: rounds differ in how many they draw
        seconds = [s / n for s, n in zip(seconds, answer["examples"], strict=True)]
    return statistics.median(seconds)


def compared(before: Path, item: str, turns: int) -> str:
    """A row of the table."""
    found: dict[Path, list[float]] = {before: [], HERE.parent: []}
    for _ in range(turns):
        for tree, seconds in found.items():
            seconds.append(median_round(tree, item))
    earlier, now = (statistics.median(seconds) for seconds in found.values())
    spread = " | ".join(
        f"{1e3 * statistics.median(s):.4g} ms ({1e3 * min(s):.4g} to {1e3 * max(s):.4g})"
        for s in found.values()
    )
    return f"| ({item}) | {spread} | {earlier / now:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", help="a revision of this repository that has benchmarks/ours.py")
    parser.add_argument("--items", default=",".join(ROUNDS), help="of them, separated by commas")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    git = ("git", "-C", str(HERE))
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        add = [*git, "worktree", "add", "-q", "--detach", tree, arguments.base]
        subprocess.run(add, check=True)
        try:
            print(f"| work | {arguments.base} | this one | ratio |\n|---|---|---|---|", flush=True)
            for item in arguments.items.split(","):
                print(compared(tree, item, arguments.turns), flush=True)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", tree], check=True)


if __name__ == "__main__":
    main()
