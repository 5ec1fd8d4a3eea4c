"""Generated recipes, half of them broken: each runs, or is refused with one line and no files.

Recipe number i of a seed depends on the two alone. They go through the command line's own `main`,
in forked children that may not allocate gigabytes; the picture of a run is left out for speed, and
whoever asks for many rounds is stopped after three by what Ctrl-C raises.
"""

import contextlib
import functools
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from fedveil import console
from fedveil.cli import main as cli
from fedveil.data import load as data_module
from fedveil.runs import run
from fedveil.runs.recipe import load_recipe
from tests.e2e.generated_recipes import OVERSIZED, generated

SEED = 20240611
ROOM = 2 << 30  # bytes a child may allocate beyond what it was forked with
PATIENCE = 20  # seconds for one recipe
MOST_ROUNDS = 3


class Slow(BaseException):
    """A recipe that takes too long."""


def too_slow(number, frame):
    raise Slow


@functools.cache
def loaded(name, root, **options):
    return ORIGINAL(name, root, **options)


ORIGINAL = data_module.load_records


def stopped(run, line, round_text=console.round_text):
    if line["round"] >= MOST_ROUNDS:
        raise KeyboardInterrupt
    return round_text(run, line)


def prepare():
    """In a child: limits, and what a thousand short runs need not do each time."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, too_slow)
    data_module.load_records = loaded
    console.round_text = stopped
    os.environ.pop("FEDVEIL_DATA", None)


def called(arguments):
    """`fedveil` with these arguments in this process: exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["fedveil", *arguments]
    code = None
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as e:
            code = e.code
        except BaseException:
            traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return code, out.getvalue(), err.getvalue()


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def judged(code, out, err, found):
    """What became of a recipe, or what is wrong with that."""
    lines = err.splitlines()
    if code == 2:
        fine = len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) > 12
        return "refused" if fine and not out and found == ["w", "w/d"] else "bad refusal"
    done = [path for path in found if path.endswith("result.json")]
    inside = all(path.startswith("w/d/runs") for path in found[2:])
    if code == 0 and len(done) == 1 and inside:
        return "ran"
    if code == 1 and len(done) == 1 and inside and "interrupted after round" in err:
        return "ran"
    return "neither"


def attempt(seed, number, base):
    """Try one recipe in a folder of its own and report on it."""
    meant, content, settings = generated(seed, number)
    recipe = base / "recipe.toml"
    recipe.write_bytes(content)
    place = base / "place"
    (place / "w" / "d").mkdir(parents=True)
    os.chdir(place / "w" / "d")
    began = time.monotonic()
    code, out, err = called(["run", str(recipe), "--quiet", *settings])
    found = files(place)
    os.chdir(base)
    shutil.rmtree(place)
    return {
        "number": number,
        "meant": meant,
        "verdict": judged(code, out, err, found),
        "code": code,
        "err": err[-2000:],
        "files": found[:20],
        "seconds": time.monotonic() - began,
    }


@functools.cache
def warm():
    """Import and load, before the first fork, what every recipe needs."""
    for name in ("digits", "diabetes"):
        loaded(name, None)
    with tempfile.TemporaryDirectory() as folder:
        short = ["rounds=1", "data.most_records=4", "engine.workers=1", "engine.mode=vectorised"]
        noisy = [*short, "noise.multiplier=2.0", "budget.epsilon=inf"]
        for name, settings in (("fedavg", short), ("central", noisy), ("dp-sgd", noisy)):
            started = run.Run.start(load_recipe(name, settings), Path(folder) / name, None)
            started.execute()


def batch(seed, numbers, base):
    """The life of a child: a line with its number before, and a report after, every recipe."""
    prepare()
    base.mkdir()
    with (base / "reports").open("w") as stream:
        for number in numbers:
            print(number, file=stream, flush=True)
            print(json.dumps(attempt(seed, number, base)), file=stream, flush=True)


def reports(seed, numbers, children=1):
    """Try recipes in forked children; one that dies is a report on what it was doing."""
    warm()
    memory = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="recipes", dir=memory if memory.is_dir() else None))
    size = -(-len(numbers) // children)
    started = []
    for i in range(children):
        child = os.fork()
        if not child:
            try:
                batch(seed, numbers[i * size : (i + 1) * size], base / str(i))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        started.append(child)
    for child in started:
        os.waitpid(child, 0)
    told = [
        json.loads(line)
        for i in range(children)
        for line in (base / str(i) / "reports").read_text().splitlines()
    ]
    shutil.rmtree(base)
    found = [line for line in told if isinstance(line, dict)]
    lost = {line for line in told if isinstance(line, int)} - {line["number"] for line in found}
    return found + [{"number": number, "verdict": "died"} for number in sorted(lost)]


def assert_all_end_well(found, count):
    bad = [line for line in found if line["verdict"] not in ("ran", "refused")]
    assert not bad, json.dumps(bad[:5], indent=2)
    assert len(found) == count
    verdicts = {
        meant: [line["verdict"] for line in found if line["meant"] is meant]
        for meant in (True, False)
    }
    assert verdicts[True].count("ran") > 0.9 * len(verdicts[True])
    assert verdicts[False].count("refused") > 0.7 * len(verdicts[False])


def test_what_would_fill_the_memory_or_leave_the_directory_is_refused():
    found = reports("oversized", range(len(OVERSIZED)))
    assert [line["verdict"] for line in found] == ["refused"] * len(OVERSIZED), found


def test_a_sample_of_recipes():
    assert_all_end_well(reports(SEED, range(32, 50)), 18)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_recipes():
    """More of them by hand: FEDVEIL_FUZZ=10000."""
    count = int(os.environ.get("FEDVEIL_FUZZ", "1500"))
    assert_all_end_well(reports(SEED, range(count)), count)
