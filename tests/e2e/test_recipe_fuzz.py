"""Generated recipes, half of them broken: each runs, or is refused with one line and no files.

Recipe number i of a seed depends on the two alone. They go through the command line's own `main`,
in forked children that may not allocate gigabytes; the picture of a run is left out for speed, and
whoever asks for many rounds is stopped after three by what Ctrl-C raises.
"""

import contextlib
import functools
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import get_args

import pytest

from fedveil import console
from fedveil.cli import main as cli
from fedveil.runs import records as data_module
from fedveil.runs import run
from fedveil.runs.recipe import Recipe, load_recipe

SEED = 20240611
ROOM = 2 << 30  # bytes a child may allocate beyond what it was forked with
PATIENCE = 20  # seconds for one recipe
MOST_ROUNDS = 3


# ---- what is generated


def digits_or_diabetes(r):
    """Data and a model that fits them."""
    if r.random() < 0.5:
        data = {"name": "digits", "clients": r.randint(4, 12)}
        data["partition"] = r.choice(["iid", "shards", "dirichlet"])
        if data["partition"] == "dirichlet":
            data["alpha"] = r.choice([0.01, 0.5, 100.0])
        models = [{"name": "softmax"}, {"name": "mlp", "hidden": [r.randint(1, 6)]}]
    else:
        data = {"name": "diabetes", "clients": r.randint(4, 12)}
        data["partition"] = r.choice(["iid", "shards"])
        models = [{"name": "linear"}, {"name": "mlp", "hidden": [2, r.randint(1, 4)]}]
    if data["partition"] == "shards" and r.random() < 0.5:
        data["shards_per_client"] = r.randint(1, 3)
    data["most_records"] = r.randint(1, 12)
    if r.random() < 0.2:
        data["resample"] = r.randint(40, 400)
    if r.random() < 0.2:
        data["seed"] = r.choice([0, 7, 2**40])
    return data, r.choice(models)


def sampling(r, clients):
    size = r.randint(1, clients)
    return r.choice(
        [
            {"kind": "poisson", "rate": r.choice([1e-9, 0.3, 0.5, 1.0])},
            {"kind": "fixed", "size": size},
            {"kind": "round-robin", "size": size},
            {"kind": "all"},
        ]
    )


def local_sgd(r):
    local = {"kind": "sgd", r.choice(["epochs", "steps"]): r.randint(1, 3)}
    local["batch"] = r.choice([0, 1, 5, 10**6])
    if "steps" in local and r.random() < 0.3:
        return {**local, "mu": 0.5, "gamma": 8.0}
    local["lr"] = r.choice([1e-3, 0.1, 1e6])
    local["momentum"] = r.choice([0.0, 0.0, 0.9])
    local["weight_decay"] = r.choice([0.0, 0.0, 0.1])
    return local


def local_work(r):
    return {"kind": "gradient"} if r.random() < 0.4 else local_sgd(r)


def clipping(r, kinds=("fixed", "poly")):
    value = r.choice([1e-3, 1.0, 50.0])
    kind = r.choice(kinds)
    if kind == "fixed":
        return {"kind": kind, "value": value}
    if kind == "poly":
        return {"kind": kind, "value": value, "power": r.choice([0.0, 1.0, 2.5])}
    return {"kind": kind, "value": value, "bit_noise": 20.0, "quantile": 0.7}


def budget(r):
    return {"delta": r.choice([1e-3, 1e-5, 1e-9])}


def protection(r, sample, local):
    """What is added for one of the papers' kinds of protection, as sections."""
    source = r.choice(["seeded", "seeded", "secure"])
    noise = {"multiplier": r.choice([2.0, 8.0]), "source": source}
    kind = r.choice(["none", "clip", "weak", "server", "client", "laplace", "two-point", "steps"])
    match kind:
        case "none":
            return {"noise": {"kind": "none"}}
        case "clip":
            return {"clip": clipping(r)}
        case "weak":
            return {
                "clip": clipping(r),
                "noise": {"kind": "gaussian", "multiplier": 0.1, "claim": False},
            }
        case "server":
            clip = clipping(r, ("fixed", "poly", "quantile"))
            return {
                "clip": clip,
                "noise": {"kind": "gaussian", **noise},
                "budget": budget(r),
            }
        case "client":
            sections = {
                "clip": clipping(r),
                "noise": {"kind": "gaussian", "where": "client", **noise},
                "budget": budget(r),
            }
            if sample["kind"] == "fixed" and r.random() < 0.5:
                sections["sample"] = {**sample, "max_participations": 3}
            return sections
        case "laplace":
            return {
                "clip": {**clipping(r), "norm": "l1"},
                "noise": {"kind": "laplace", **noise},
                "budget": budget(r),
            }
        case "two-point":
            return {
                "sample": {"kind": "all"},
                "clip": {"kind": "range", "radius": 0.2, "adaptive": r.random() < 0.5},
                "noise": {"kind": "two-point", "epsilon": r.choice([0.1, 1.0])},
                "budget": budget(r),
            }
        case _:
            return {
                "client": {"kind": "dp-sgd", "rate": 0.5, "steps": r.randint(1, 2), "lr": 0.1},
                "clip": {"kind": "fixed", "value": 1.0},
                "noise": {"kind": "gaussian", "where": "training", "multiplier": 2.0},
                "budget": {"delta": 1e-5},
            }


def whole(r):
    """A recipe whose sections go together."""
    data, model = digits_or_diabetes(r)
    sample, local = sampling(r, data["clients"]), local_work(r)
    recipe = {
        "name": r.choice(["generated", "Größe", "a b", "x" * 60]),
        "seed": r.choice([0, 1, 2**31, 2**63 - 1]),
        "rounds": r.randint(1, 2),
        "data": data,
        "model": model,
        "sample": sample,
        "client": local,
        "engine": {"workers": 1, "mode": r.choice(["vectorised", "looped"])},
    }
    if r.random() < 0.3:
        recipe["evaluate"] = {"every": r.randint(1, 3), "diagnostics": r.random() < 0.5}
    if r.random() < 0.3:
        recipe["server"] = {"optimizer": "adam", "lr": 0.01}
    elif r.random() < 0.3:
        recipe["server"] = {"momentum": r.choice([0.0, 0.9]), "lr": r.choice([0.1, 1.0])}
    recipe |= protection(r, sample, local)
    if recipe.get("noise", {}).get("source") == "secure":
        recipe["engine"]["mode"] = "looped"
        if data["name"] == "diabetes":
            recipe["data"] = {**data, "statistics": "public"}
    if recipe["client"]["kind"] == "dp-sgd":
        recipe["data"] = {key: value for key, value in data.items() if key != "resample"}
    return recipe


HOSTILE = (
    0,
    -1,
    1,
    3,
    10**9,
    10**12,
    10**15,
    10**18,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
    10**400,
    0.0,
    -0.0,
    0.5,
    -0.5,
    1.0,
    1e308,
    1e-308,
    5e-324,
    1e-17,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    "",
    "none",
    "inf",
    "../../etc",
    "/etc",
    "a/b",
    "..",
    ".",
    "~",
    "\0",
    "\x1b[31mred",
    "two\nlines",
    "\u202egnp",
    "\U0001f4a9",
    "%s{0}[bold]",
    "x" * 5000,
    [],
    [10**9],
    [10**9, 10**9],
    [1] * 3000,
    [-1],
    [0],
    [math.nan],
    [1.0, 2.0],
    ["a"],
    [[]],
    {},
    {"kind": "none"},
    {"a": {"b": {"c": 1}}},
)


def keys(annotation):
    """The keys of a section, of whatever kind."""
    found = {}
    for kind in get_args(annotation) or (annotation,):
        found |= getattr(kind, "model_fields", None) or dict.fromkeys(
            () if kind is annotation or isinstance(kind, type) else keys(kind)
        )
    return tuple(found)


KEYS = {
    name: keys(field.annotation)
    for name, field in Recipe.model_fields.items()
    if keys(field.annotation) and name != "engine"
}
KEYS["engine"] = ("mode", "timings", "chunk", "memory", "checkpoint")  # no thousand workers
TOP = tuple(name for name in Recipe.model_fields if name not in KEYS)


def damage(r, recipe):
    """One thing about a recipe that is out of order, in place."""
    section = r.choice([name for name in recipe if isinstance(recipe[name], dict)])
    match r.randrange(8):
        case 0 | 1 | 2:  # any value for a key that is there
            recipe[section] = {**recipe[section]}
            if recipe[section]:
                recipe[section][r.choice(list(recipe[section]))] = r.choice(HOSTILE)
        case 3:  # any value for a key that there may be
            section = r.choice(list(KEYS))
            there = recipe.get(section)
            there = there if isinstance(there, dict) else {}
            recipe[section] = {**there, r.choice(KEYS[section]): r.choice(HOSTILE)}
        case 4:
            recipe[r.choice(TOP)] = r.choice(HOSTILE)
        case 5:
            recipe[r.choice([*recipe, "colour", "größe"])] = r.choice(HOSTILE)
        case 6:
            del recipe[r.choice(list(recipe))]
        case _:  # a section of another recipe
            other = whole(r)
            name = r.choice(["data", "sample", "client", "clip", "noise", "budget", "server"])
            if name in other:
                recipe[name] = other[name]


def text_of(value):
    """TOML for anything, also for what `fedveil.runs.toml` never has to write."""
    match value:
        case bool():
            return str(value).lower()
        case float():
            return repr(value)
        case int():
            return hex(value) if value > 10**300 else str(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list():
            return "[" + ", ".join(text_of(v) for v in value) + "]"
    return "{" + ", ".join(f"{quoted(k)} = {text_of(v)}" for k, v in value.items()) + "}"


def quoted(key):
    return json.dumps(key, ensure_ascii=False)


def written(recipe):
    tables = {k: v for k, v in recipe.items() if isinstance(v, dict)}
    lines = [f"{quoted(k)} = {text_of(v)}" for k, v in recipe.items() if k not in tables]
    for name, table in tables.items():
        lines += [f"[{quoted(name)}]", *(f"{quoted(k)} = {text_of(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def mangled(r, text):
    """Bytes that are a recipe no longer, or one with something strange about it."""
    content = text.encode()
    match r.randrange(15):
        case 0:
            return b""
        case 1:
            return content[: r.randrange(len(content))]
        case 2:
            at = r.randrange(len(content))
            return content[:at] + bytes([r.randrange(256)]) + content[at + 1 :]
        case 3:
            lines = text.splitlines()
            return "\n".join([*lines, r.choice(lines)]).encode()  # a key or table twice
        case 4:
            return content + b"[data]\nname = 'digits'\n"
        case 5:
            return b"x = " + b"[" * 20_000 + b"]" * 20_000 + b"\n" + content
        case 6:
            return b"x = " + b"{a=" * 5_000 + b"1" + b"}" * 5_000 + b"\n" + content
        case 7:
            return b".".join([b"a"] * 20_000) + b" = 1\n" + content
        case 8:
            return b"#" * 1_000_000 + b"\n" + content
        case 9:
            return b"".join(b"k%d = 1\n" % i for i in range(100_000))[:1_000_000] + content
        case 10:
            return b"seed = " + b"9" * 5_000 + b"\n" + content.replace(b'"seed"', b'"sead"')
        case 11:
            return content.replace(b'"rounds" =', b'"rounds" = 0x' + b"f" * 9_000 + b" #")
        case 12:
            stamp = r.choice([b"1979-05-27", b"07:32:00", b"1979-05-27T07:32:00Z"])
            return content.replace(b'"seed" =', b'"seed" = ' + stamp + b" #")
        case 13:
            return text.encode("utf-16")
        case _:
            return b"\xef\xbb\xbf" + content.replace(b"\n", r.choice([b"\r\n", b"\r", b"\0\n"]))


SETTINGS = (
    "rounds=",
    "=",
    "name=a=b",
    "data.clients.x=1",
    "name=../../x",
    "name=\udcff",
    "data.name=\udcff",
    "colour\udcff=1",
    "rounds=1\nseed=5",
    "seed=" + "9" * 5000,
    "seed=0x" + "f" * 9000,
    "model.hidden=" + "[" * 20_000,
    "seed=1979-05-27",
    "sample=none",
    "noise={kind='none'}",
    "rounds=2 # more",
)


OVERSIZED = (
    ("model.name=mlp", "model.hidden=[1000000000]"),
    ("model.name=mlp", "model.hidden=[100000, 100000]"),
    ("model.name=mlp", "model.hidden=[" + "1, " * 3000 + "1]"),
    ("data.clients=1000000000000",),
    ("data.resample=1000000000000",),
    ("rounds=1000000000000000",),
    ("rounds=none", "iterations=1000000000000000000", "client.kind=sgd", "client.steps=1"),
    ("client.kind=sgd", "client.lr=0.1", "client.steps=1000000000000"),
    ("client.kind=sgd", "client.lr=0.1", "client.epochs=1000000000000"),
    ("sample.kind=fixed", "sample.size=1000000000000000000"),
    ("sample.kind=round-robin", "sample.size=1000000000000000000"),
    ("data.partition=shards", "data.shards_per_client=1000000000000"),
    ("engine.workers=1000000000",),
    ("seed=9223372036854775808",),
    ("data.seed=-1",),
    ("name=../../x",),
    ("name=/etc/x",),
    ("name=.",),
    ("data=none", "data.name=saved", "data.path=../../etc"),
)


def generated(seed, number):
    """Recipe `number`: whether it is meant to be whole, its bytes and its --set arguments."""
    if seed == "oversized":
        recipe = Path(data_module.__file__).parent.parent / "recipes/central.toml"
        settings = ("budget.epsilon=inf", "noise.multiplier=2.0", *OVERSIZED[number])
        return False, recipe.read_bytes(), [part for s in settings for part in ("--set", s)]
    r = random.Random(f"{seed}/{number}")
    recipe = whole(r)
    if number % 2:
        return True, written(recipe).encode(), []
    how = r.random()
    if how < 0.15:
        return False, mangled(r, written(recipe)), []
    if how < 0.25:
        return False, written(recipe).encode(), ["--set", r.choice(SETTINGS)]
    for _ in range(r.choice([1, 1, 1, 2, 3])):
        damage(r, recipe)
    return False, written(recipe).encode(), []


# ---- how they are tried


class Slow(BaseException):
    """A recipe that takes too long."""


def too_slow(number, frame):
    raise Slow


@functools.cache
def loaded(name, root, **options):
    return ORIGINAL(name, root, **options)


ORIGINAL = data_module.load_records


def stopped(self, line, show=console.Progress.show):
    show(self, line)
    if line["round"] >= MOST_ROUNDS:
        raise KeyboardInterrupt


def prepare():
    """In a child: limits, and what a thousand short runs need not do each time."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, too_slow)
    data_module.load_records = loaded
    console.Progress.show = stopped
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
