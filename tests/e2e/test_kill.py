"""A hundred SIGKILLs, at every stage of a run: no charge is lost, and a resume is the same run.

Children are forked from this process, which has imported everything, and kill themselves at the
n-th call of a function, or are killed after a random time. Memory keeps what was written, as it
does when a process dies; what a power cut would leave is up to fsync.
"""

import functools
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest

from fedveil.base.errors import BadInput
from fedveil.data import load
from fedveil.privacy.ledger import ledger
from fedveil.privacy.ledger.file import read_charges, read_closing, read_runs
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.release import Release
from fedveil.privacy.releases.central import CentralNoise
from fedveil.privacy.sampling import FixedSize
from fedveil.runs import checkpoint, run
from fedveil.runs.evidence import verify_ledger
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.runs.run_directory import write_atomic
from fedveil.training.engines import serial
from fedveil.training.engines.serial import Serial
from fedveil.training.gate import Gate
from fedveil.training.server import SgdServer
from fedveil.training.work import ClientSgd

ROUNDS, KILLED = 4, 3  # rounds of a run, and those in which it is killed
SEED = 99
COHORT = 4

SHARED = (
    f"rounds={ROUNDS}",
    "data.name=diabetes",
    "data.statistics=held-out",
    "data.clients=6",
    "model.name=linear",
    "sample.kind=fixed",
    f"sample.size={COHORT}",
    "client.kind=sgd",
    "client.steps=2",
    "client.lr=0.1",
    "server.momentum=0.9",
    "budget.epsilon=inf",
    "budget.delta=1e-4",
    "noise.multiplier=2.0",
    "engine.workers=1",
)
MODES = {"seeded": "vectorised", "secure": "looped"}
RECIPES = {"server": (*SHARED, "noise.where=server"), "client": (*SHARED, "noise.where=client")}


def recipe_of(where, source):
    settings = (*RECIPES[where], f"noise.source={source}", f"engine.mode={MODES[source]}")
    return load_recipe("central", settings)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# ---- stages: each is installed in a child, and kills it


def before(target, name):
    """Die when `target.name` is called for the n-th time."""
    return functools.partial(_hook, target, name, False)


def after(target, name):
    """Die when the n-th call of `target.name` is done."""
    return functools.partial(_hook, target, name, True)


def either(*installs):
    """Install all of them, where a run calls one."""

    def install(number, folder):
        for each in installs:
            each(number, folder)

    return install


def _hook(target, name, done, number, folder):
    original, calls = getattr(target, name), itertools.count(1)

    def hooked(*arguments, **options):
        hit = next(calls) == number
        if hit and not done:
            die()
        out = original(*arguments, **options)
        if hit:
            die()
        return out

    setattr(target, name, hooked)


def half_a_line(number, folder):
    """Die with half of a round's metrics on disk; the first call is for the line of round 0."""
    original, calls = run.json_text, itertools.count(0)

    def hooked(value, indent=None):
        text = original(value, indent)
        if next(calls) == number:
            with (folder / "metrics.jsonl").open("a") as stream:
                stream.write(text[: len(text) // 2])
            die()
        return text

    run.json_text = hooked


def half(prefix):
    """Die with half of the n-th such file written, under its temporary name."""

    def install(number, folder):
        original, calls = write_atomic, itertools.count(1)

        def hooked(path, content):
            if path.name.startswith(prefix) and next(calls) == number:
                path.with_name(f".{path.name}.tmp").write_bytes(content[: len(content) // 2])
                die()
            original(path, content)

        run.write_atomic = checkpoint.write_atomic = hooked

    return install


def unnamed(prefix):
    """Die with the n-th such file written and synced, but not renamed."""

    def install(number, folder):
        original, calls = Path.replace, itertools.count(1)

        def hooked(path, target):
            if Path(target).name.startswith(prefix) and next(calls) == number:
                die()
            return original(path, target)

        Path.replace = hooked

    return install


def renamed(prefix):
    """Die with the n-th such file under its name, its folder not synced."""

    def install(number, folder):
        original, calls = Path.replace, itertools.count(1)

        def hooked(path, target):
            original(path, target)
            if Path(target).name.startswith(prefix) and next(calls) == number:
                die()

        Path.replace = hooked

    return install


IN_ROUNDS = {  # what kills a run in each of its rounds, and whether the round's charge is lost
    "after the sample": (after(FixedSize, "cohort"), False),
    "during the charge": (after(Ledger, "_append_charge"), False),
    "after the charge": (after(Ledger, "charge"), True),
    "in training": (after(ClientSgd, "updates"), True),
    "after noise at the clients": (after(serial, "client_report"), True),
    "after training": (after(Serial, "run"), True),
    "in noise at the server": (
        either(after(CentralNoise, "noise_"), after(Release, "noise_")),
        True,
    ),
    "in the step": (after(SgdServer, "step"), True),
    "in measuring": (before(Gate, "evaluate_round"), True),
    "after measuring": (after(Gate, "evaluate_round"), True),
    "writing metrics": (half_a_line, True),
    "after metrics": (before(checkpoint, "save"), True),
    "writing the checkpoint": (half("round-"), True),
    "before the checkpoint's rename": (unnamed("round-"), True),
    "after the checkpoint's rename": (renamed("round-"), False),
    "after the checkpoint": (after(checkpoint, "save"), False),
}
BY_CLIENT = ("in training", "after noise at the clients")  # once per client where noise is secure
ONCE = {  # and what kills it before the first round or after the last; no charge is lost
    "writing the recipe": half("recipe.toml"),
    "after the recipe": renamed("recipe.toml"),
    "making the ledger": after(ledger, "_register"),
    "after the ledger": before(Ledger, "__init__"),
    "writing the first metrics": half("metrics.jsonl"),
    "dropping a checkpoint": before(Path, "unlink"),
    "writing the model": half("model.safetensors"),
    "before the model's rename": unnamed("model.safetensors"),
    "after the model": renamed("model.safetensors"),
    "writing the result": half("result.json"),
    "after the result": renamed("result.json"),
    "before the end is noted": before(Ledger, "note_end"),
    "after the end is noted": after(Ledger, "note_end"),
    "after the head is kept": renamed("head.json"),
}
AFTER_THE_END = ("after the end is noted", "after the head is kept")
SOURCES, PLACES = ("seeded", "secure"), ("server", "client")


def _kills():
    """(stage, call, where noise is added, its source): 100 of them, the last at random times."""
    made = [
        (stage, number, PLACES[(i + number // 2) % 2], SOURCES[(i + number) % 2])
        for i, stage in enumerate(IN_ROUNDS)
        for number in range(1, KILLED + 1)
    ]
    made += [
        (stage, 1, PLACES[(i + j) % 2], source)
        for i, stage in enumerate(ONCE)
        for j, source in enumerate(SOURCES)
    ]
    at_random = range(100 - len(made))
    return made + [("at random", n, PLACES[n % 2], SOURCES[n // 2 % 2]) for n in at_random]


def _quick(kills):
    """A third of them: every stage once, each round, place and source as often as another."""
    in_rounds = [n for n in range(len(IN_ROUNDS) * KILLED) if n % KILLED == n // KILLED % KILLED]
    rest = range(len(IN_ROUNDS) * KILLED, len(kills))
    once = [n for n in rest if kills[n][0] in ONCE and n % 2 == n // 4 % 2]
    at_random = [n for n in rest if kills[n][0] == "at random"][::5]
    return {kills[n] for n in (*in_rounds, *once, *at_random)}


KILLS = _kills()
QUICK = _quick(KILLS)


# ---- running them


def forked(work):
    """Do `work` in a child; returns its id."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def ended(child):
    """How a child ended: its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def place():
    """A folder in memory, where fsync takes no time."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="kill", dir=memory if memory.is_dir() else None))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Data in memory: a run takes a tenth of a second."""
    patched = pytest.MonkeyPatch()
    patched.setattr(load, "load_records", functools.cache(load.load_records))
    with tempfile.TemporaryDirectory() as folder:
        for where, source in itertools.product(RECIPES, SOURCES):
            started(where, source, Path(folder) / f"{where}-{source}")
    yield
    patched.undo()


@pytest.fixture(scope="module")
def undisturbed(place, warm):
    """Model, metrics and seconds of the runs that nobody kills."""
    found = {}
    for where in RECIPES:
        folder = place / f"whole-{where}"
        for _ in range(2):  # the first one may have to load something
            shutil.rmtree(folder, ignore_errors=True)
            began = time.monotonic()
            assert ended(forked(lambda f=folder, w=where: started(w, "seeded", f))) == 0
            seconds = time.monotonic() - began
        found[where] = (model_of(folder), metrics_of(folder), seconds)
    return found


def started(where, source, folder):
    return Run.start(recipe_of(where, source), folder, None).execute()


def model_of(folder):
    return (folder / "model.safetensors").read_bytes()


def metrics_of(folder):
    """The whole lines of the metrics, without times."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text.split("\n")[:-1]]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def charges_of(folder):
    """How often each round was charged, read from a copy: the ledger stays as it was left."""
    if not (folder / "ledger.db").exists():
        return Counter()
    copy = folder.with_name("copy")
    copy.mkdir()
    try:
        for path in folder.glob("ledger.db*"):
            shutil.copy(path, copy)
        return Counter(charge.round for charge in read_charges(copy / "ledger.db"))
    except BadInput as e:
        if "no such table" in str(e):  # it was not yet made
            return Counter()
        raise
    finally:
        shutil.rmtree(copy)


def checkpoint_of(folder):
    """The round of the last checkpoint."""
    names = [path.stem for path in (folder / "checkpoint").glob("round-*")]
    return max((int(name.removeprefix("round-")) for name in names), default=0)


def ended_in_ledger(folder):
    """Whether the ledger has noted what the run left."""
    path = folder / "ledger.db"
    return bool(read_closing(path, next(iter(read_runs(path)))))


def released(folder):
    """The rounds of which anything has reached the disk."""
    found = {line["round"] for line in metrics_of(folder)} - {0}
    if (folder / "result.json").exists():
        found.add(json.loads((folder / "result.json").read_text())["rounds"])
    elif (folder / "model.safetensors").exists():
        found |= set(range(1, ROUNDS + 1))
    return found | set(range(1, checkpoint_of(folder) + 1))


def killed(stage, number, where, source, folder, usual):
    """Start a run and have it killed; returns how it ended."""
    if stage == "at random":
        child = forked(lambda: started(where, source, folder))
        time.sleep(random.Random(f"{SEED}/{number}").uniform(0.1, 1.0) * usual)
        os.kill(child, signal.SIGKILL)
        return ended(child)

    def work():
        install = ONCE[stage] if stage in ONCE else IN_ROUNDS[stage][0]
        one_by_one = source == "secure" and stage in BY_CLIENT
        install(COHORT * (number - 1) + 2 if one_by_one else number, folder)
        started(where, source, folder)

    return ended(forked(work))


@pytest.mark.parametrize(
    "kill",
    [pytest.param(k, marks=[] if k in QUICK else pytest.mark.slow) for k in KILLS],
    ids=lambda kill: "-".join(map(str, kill)),
)
def test_kill(kill, place, undisturbed, capfd):
    stage, number, where, source = kill
    folder = place / "run"
    shutil.rmtree(folder, ignore_errors=True)
    model, metrics, usual = undisturbed[where]
    code = killed(*kill, folder, usual)
    assert code == -signal.SIGKILL or (stage == "at random" and code == 0), capfd.readouterr()

    charges, last = charges_of(folder), checkpoint_of(folder)
    assert released(folder) <= set(charges)
    assert set(charges) <= set(range(1, last + 2))
    assert set(charges.values()) <= {1}
    lost = set(charges) - set(range(1, last + 1))
    if stage in IN_ROUNDS:
        assert lost == ({number} if IN_ROUNDS[stage][1] else set())
    elif stage in ONCE:
        assert not lost
    if charges:
        told = verify_ledger(folder, None)
        assert ("the run is open" in told) is not ended_in_ledger(folder)
        if stage != "at random":
            assert ended_in_ledger(folder) is (stage in AFTER_THE_END)

    if not (folder / "recipe.toml").exists():
        assert not charges
        shutil.rmtree(folder, ignore_errors=True)
        again = forked(lambda: started(where, source, folder))
    else:
        again = forked(lambda: Run.resume(folder, None).execute())
    assert ended(again) == 0, capfd.readouterr()

    result = json.loads((folder / "result.json").read_text())
    charges = charges_of(folder)
    assert "those that the run left" in verify_ledger(folder, None)
    assert released(folder) <= set(charges)
    assert [line["round"] for line in metrics_of(folder)] == list(range(result["rounds"] + 1))
    assert (result["rounds"], result["stopped"]) == (ROUNDS, "rounds")
    attempts = dict.fromkeys(range(1, ROUNDS + 1), 1)
    if source == "seeded":
        assert charges == attempts
        assert model_of(folder) == model
        assert metrics_of(folder) == metrics
    else:
        assert charges == attempts | dict.fromkeys(lost, 2)
