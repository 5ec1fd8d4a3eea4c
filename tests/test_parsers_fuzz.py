"""Every parser on damaged input: it is read, or refused by a `BadInput` of one line.

Small real files are made, damaged at random (seeded), and read in a forked child that may not
allocate much or take long. Whatever else is raised fails the test, and so does a child that dies.
"""

import ast
import asyncio
import contextlib
import gzip
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import struct
import tempfile
import traceback
from pathlib import Path

import numpy as np
import pytest

import fedveil
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.data.load import load_records
from fedveil.mixing.mixer import MixerConfig, serve
from fedveil.mixing.protocol import HELLO, REPORT, Refused, collect, send_report
from fedveil.privacy.ledger.file import read_charges, read_participations
from fedveil.runs import checkpoint
from fedveil.runs.evidence import export_ledger, ledger_path, statements_of, verify_ledger
from fedveil.runs.ledgers import SharedLedger
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.tuning.recipe_grid import axis, cells

SEED = 4711
ROOM = 3 << 29  # bytes a child may allocate beyond what it was forked with
PATIENCE = 20  # seconds for one input
FAST, SLOW = 60, 3000  # inputs for each parser
COSTLY = {"metrics of a run": 10, "webp": 4}  # one input takes as long as so many others

SETTINGS = (
    *("rounds=2", "data.name=diabetes", "data.clients=6", "model.name=linear"),
    *("sample.kind=fixed", "sample.size=3", "client.kind=gradient"),
    *("clip.kind=fixed", "clip.value=1.0", "budget=none", "budget.delta=1e-4"),
    *("noise.kind=gaussian", "noise.where=client", "noise.multiplier=2.0"),
    *("engine.workers=1", "engine.mode=vectorised"),
)


# ---- damage


def damaged(r, content):
    """Bytes with one to three things wrong with them."""
    for _ in range(r.choice([1, 1, 2, 3])):
        at, size = r.randrange(len(content) + 1), r.choice([1, 1, 2, 4, 8, 64])
        match r.randrange(8):
            case 0:
                content = content[:at]
            case 1:
                content = content[:at] + content[at + size :]
            case 2:
                content = content[:at] + r.randbytes(size) + content[at:]
            case 3:
                content = content[:at] + r.randbytes(size) + content[at + size :]
            case 4:
                content = content[:at] + r.choice(WORDS) + content[at:]
            case 5:
                word = r.choice(WORDS)
                content = content[:at] + word + content[at + len(word) :]
            case 6:
                content = content[:at] + content[at // 2 : at] + content[at:]
            case _:  # near the beginning, where headers are
                at = r.randrange(min(len(content), 160) + 1)
                content = content[:at] + r.choice(WORDS) + content[at + 4 :]
    return content


WORDS = (
    *(b"\xff" * n for n in (1, 2, 4, 8)),
    *(b"\0" * n for n in (1, 2, 4, 8)),
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"9" * 30,
    b"-1",
    b"1e400",
    b"NaN",
    b"null",
    b"[" * 50,
    b'{"a":' * 50,
    b'"',
    b"'",
    b"\n",
    b",",
    b"=",
    b"<f8",
    b"|O",
    b"True",
)
VALUES = (
    *(None, True, -1, 0, 5, 10**12, 10**30, 1.5, 1e300, "", "x", "1e400", "9" * 30, "\0"),
    *([], {}, [[]], {"a": 1}, "[]", "{}", "[1]", '{"run": 5}', b"", b"\xff" * 7, b"\0" * 8),
)


def in_json(r, value):
    """A JSON value with something in it replaced."""
    if isinstance(value, dict) and value and r.random() < 0.8:
        key = r.choice(list(value))
        if r.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: in_json(r, value[key])}
    if isinstance(value, list) and value and r.random() < 0.8:
        at = r.randrange(len(value))
        return [*value[:at], in_json(r, value[at]), *value[at + 1 :]]
    return r.choice([v for v in VALUES if not isinstance(v, bytes)])


def damage_file(path):
    """A damage: to the bytes of one file, or of one of several."""

    def damage(r, folder):
        chosen = r.choice(sorted(folder.glob(path)))
        content = chosen.read_bytes()
        if chosen.suffix in (".json", ".jsonl") and r.random() < 0.5:
            lines = content.decode().split("\n") if chosen.suffix == ".jsonl" else [content]
            at = r.randrange(len(lines))
            if lines[at]:
                lines[at] = json.dumps(in_json(r, json.loads(lines[at])))
                chosen.write_text("\n".join(map(str, lines)))
                return
        packed = chosen.suffix == ".gz" and r.random() < 0.5
        new = damaged(r, gzip.decompress(content) if packed else content)
        chosen.write_bytes(gzip.compress(new) if packed else new)

    return damage


def damage_ledger(r, folder):
    """Bytes of the ledger, or a cell of one of its tables, or JSON inside a cell."""
    if r.random() < 0.4:
        return damage_file("run/ledger.db")(r, folder)
    with contextlib.closing(sqlite3.connect(folder / "run/ledger.db")) as db, db:
        db.execute("PRAGMA ignore_check_constraints = 1")
        table = r.choice(["about", "runs", "charges", "cohorts", "closings"])
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        column = r.choice(columns)
        (row, old) = r.choice(db.execute(f"SELECT rowid, {column} FROM {table}").fetchall())
        new = r.choice([v for v in VALUES if not isinstance(v, list | dict) and v != 10**30])
        if isinstance(old, str) and old.startswith(("{", "[")) and r.random() < 0.7:
            new = json.dumps(in_json(r, json.loads(old)))
        with contextlib.suppress(sqlite3.IntegrityError):
            db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, row))
    return None


def nothing(r, folder):
    """No file is damaged: the input is a text."""


# ---- what is read


def make_run(folder):
    Run.start(load_recipe("central", SETTINGS), folder / "run", None).execute()


def make_shared(folder):
    shared = SharedLedger(folder / "run/ledger.db", 50.0)
    (folder / "run").mkdir()
    for name in ("a", "b"):
        settings = [*SETTINGS, "data.seed=1", f"seed={ord(name)}"]
        recipe = load_recipe("central", settings)
        Run.start(recipe, folder / name, None, shared).execute()


def read_recipe(r, folder):
    load_recipe(str(folder / "run/recipe.toml"))


def read_setting(r, folder):
    text = damaged(r, r.choice(SETTINGS).encode()).decode(errors="surrogateescape")
    load_recipe("central", [text])


def read_grid(r, folder):
    text = r.choice(["client.lr=0.1,0.2", "rounds:seed=1:2,3:4", "model.hidden=[1,2],[3]"])
    text = damaged(r, text.encode()).decode(errors="surrogateescape")
    cells("central", (), [axis(text), axis("sample.rate=0.5,0.6")])


def read_checkpoint(r, folder):
    found, remarks = checkpoint.load_latest(folder / "run/checkpoint", START.start())
    assert found is not None or remarks
    assert all(len(remark.splitlines()) == 1 for remark in remarks)
    checkpoint.recorded_head(folder / "run/checkpoint")
    if remarks:
        raise BadInput(remarks[0])


def read_ledger(r, folder):
    def all_of_it():
        read_participations(folder / "run/ledger.db")
        read_charges(folder / "run/ledger.db")
        json.dumps(statements_of(folder / "run").to_dict())
        export_ledger(folder / "run", folder / "export.json")

    refusals = []
    for part in (all_of_it, lambda: verify_ledger(folder / "run", None)):
        try:
            part()
        except BadInput as e:
            refusals.append(e)
    if refusals:
        raise refusals[0]


def read_evidence(r, folder):
    verify_ledger(folder / "run", None)


def read_pointer(r, folder):
    ledger_path(folder)


def read_metrics(r, folder):
    Run.resume(folder / "run", None).execute()


def make_saved(folder):
    random = np.random.default_rng(1)
    data = FederatedData.from_clients(
        [(f"client {i}", random.normal(size=(3, 2)), [0, 1, 2]) for i in range(4)],
        test=(random.normal(size=(2, 2)), [0, 1]),
        classes=3,
    )
    data.save(folder / "saved")


def read_saved(r, folder):
    data = FederatedData.open(folder / "saved")
    data.check()
    assert len(data.fingerprint) == 64


def patients():
    random = np.random.default_rng(3)
    return {
        "site": [f"s{k // 4}" for k in range(48)],
        "age": random.integers(20, 80, size=48).tolist(),
        "dose": random.normal(size=48).round(3).tolist(),
        "city": [("bonn", "rome")[k % 2] for k in range(48)],
        "well": [("no", "yes")[k // 5 % 2] for k in range(48)],
    }


def make_own_csv(folder):
    columns = patients()
    rows = [columns, *zip(*columns.values(), strict=True)]
    text = "\n".join(",".join(map(str, row)) for row in rows)
    (folder / "own.csv").write_text(text + "\n")


def make_own_parquet(folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(patients()), folder / "own.parquet")


def make_saved_table(folder):
    whose = {"client": "site", "target": "well", "test": "by-client"}
    FederatedData.from_table(patients(), **whose).save(folder / "saved")


def read_own(r, folder):
    path = next(folder.glob("own.*"))
    statistics = r.choice([None, "held-out", "clients", "public"])
    whose = {"client": "site", "target": "well", "test": "by-client"}
    data = FederatedData.from_table(path, **whose, statistics=statistics)
    data.check()
    assert data.schema.encode(path).shape[1:] == data.record_shape


def reading(name):
    def read(r, folder):
        records = load_records(name, folder)
        assert len(records.x) == len(records.y)

    return read


def make_femnist(folder):
    (folder / "femnist").mkdir()
    np.savez(
        folder / "femnist/femnist_673writers.npz",
        x=np.zeros((8, 28, 28), np.uint8),
        y=np.arange(8, dtype=np.uint8),
        writer=np.array([0, 0, 0, 1, 1, 1, 0, 1], np.int16),
        split=np.array([0, 0, 0, 0, 0, 0, 1, 1], np.uint8),
        writer_id=np.array(["ada", "bob"]),
    )


def make_leaf(folder):
    for part, size in (("train", 3), ("test", 1)):
        (folder / "femnist" / part).mkdir(parents=True)
        one = {"x": [[0.5] * 784] * size, "y": [1] * size}
        content = {"users": ["ada"], "num_samples": [size], "user_data": {"ada": one}}
        (folder / "femnist" / part / "a.json").write_text(json.dumps(content))


def read_femnist(r, folder):
    load_records("femnist", folder, min_records=1)


def make_location(folder):
    (folder / "location30").mkdir()
    np.savez_compressed(
        folder / "location30/location30.npz",
        x_packed=np.ones((9, 56), np.uint8),
        n_features=np.int64(446),
        y=np.arange(9),
    )


def make_bangkok(folder):
    (folder / "location30").mkdir()
    line = ",".join(['"7"', *["0", "1"] * 223])
    (folder / "location30/bangkok").write_text(f"{line}\n" * 6)


def make_mnist(folder):
    (folder / "mnist").mkdir()
    for part, size in (("train", 5), ("t10k", 2)):
        images = struct.pack(">IIII", 0x803, size, 28, 28) + bytes(size * 784)
        labels = struct.pack(">II", 0x801, size) + bytes(range(size))
        (folder / f"mnist/{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"mnist/{part}-labels-idx1-ubyte").write_bytes(labels)


def loans():
    random = np.random.default_rng(7)
    columns = {f"number_{i}": random.normal(size=40).round(3).tolist() for i in range(11)}
    return {"int_rate": random.normal(size=40).tolist(), "grade": list("ABCD") * 10, **columns}


def make_parquet(folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "lending_club").mkdir()
    pq.write_table(pa.table(loans()), folder / "lending_club/lending_club_loans.parquet")


def make_csv(folder):
    pytest.importorskip("pyarrow")
    (folder / "lending_club").mkdir()
    rows = [
        ",".join(loans()),
        *(",".join(map(str, row)) for row in zip(*loans().values(), strict=True)),
    ]
    (folder / "lending_club/loan.csv").write_text("\n".join(rows) + "\n")


def make_webp(folder):
    image = pytest.importorskip("PIL.Image")
    (folder / "cifar10").mkdir()
    for part in ("train", "test"):
        tiles = np.zeros((800, 1280, 3), np.uint8)
        image.fromarray(tiles).save(folder / f"cifar10/{part}_00.webp", lossless=True)
        np.save(folder / f"cifar10/{part}_labels.npy", np.zeros(1000, np.uint8))


def make_pointer(folder):
    (folder / "ledger.json").write_text(json.dumps({"path": "/a/ledger.db", "run": "x-1"}))


def make_nothing(folder):
    """The input is a text."""


PARSERS = {  # what is made, how it is damaged, how it is read
    "recipe": (make_run, damage_file("run/recipe.toml"), read_recipe),
    "--set": (make_nothing, nothing, read_setting),
    "--grid": (make_nothing, nothing, read_grid),
    "checkpoint": (make_run, damage_file("run/checkpoint/*"), read_checkpoint),
    "ledger": (make_run, damage_ledger, read_ledger),
    "shared ledger": (make_shared, damage_ledger, read_ledger),
    "result": (make_run, damage_file("run/result.json"), read_evidence),
    "head": (make_run, damage_file("run/head.json"), read_evidence),
    "ledger pointer": (make_pointer, damage_file("ledger.json"), read_pointer),
    "metrics of a run": (make_run, damage_file("run/metrics.jsonl"), read_metrics),
    "saved data": (make_saved, damage_file("saved/*"), read_saved),
    "own csv": (make_own_csv, damage_file("own.csv"), read_own),
    "own parquet": (make_own_parquet, damage_file("own.parquet"), read_own),
    "saved schema": (make_saved_table, damage_file("saved/meta.json"), read_saved),
    "npz": (make_femnist, damage_file("femnist/*"), read_femnist),
    "compressed npz": (make_location, damage_file("location30/*"), reading("location30")),
    "leaf json": (make_leaf, damage_file("femnist/*/*"), read_femnist),
    "text": (make_bangkok, damage_file("location30/*"), reading("location30")),
    "idx": (make_mnist, damage_file("mnist/*"), reading("mnist")),
    "parquet": (make_parquet, damage_file("lending_club/*"), reading("lending-club")),
    "csv": (make_csv, damage_file("lending_club/*"), reading("lending-club")),
    "webp": (make_webp, damage_file("cifar10/*"), reading("cifar10")),
}
TEXTS = ("--set", "--grid")
TOLERANT = ("metrics of a run",)  # what is broken is left out, nothing need be refused


# ---- how it is tried


class Slow(BaseException):
    """An input that takes too long."""


def too_slow(number, frame):
    raise Slow


def outcome(name, number, original, folder):
    """ "read", "refused" or what went wrong with input `number`."""
    _, damage, read = PARSERS[name]
    r = random.Random(f"{SEED}/{name}/{number}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        damage(r, folder)
        read(r, folder)
    except BadInput as e:
        lines = 1 if name in TEXTS else len(str(e).splitlines())  # texts are joined when told
        return "refused" if lines == 1 else f"lines: {e}"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "read"


def tried(name, count, place):
    """The outcomes of `count` damaged inputs of one parser, found in a child."""
    original = place / "original"
    original.mkdir()
    PARSERS[name][0](original)
    if name not in TEXTS:
        PARSERS[name][2](random.Random(0), original)  # what is not damaged can be read
    child = os.fork()
    if not child:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + ROOM
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            signal.signal(signal.SIGALRM, too_slow)
            with (place / "outcomes").open("w") as stream:
                for number in range(count):
                    found = outcome(name, number, original, place / "copy")
                    print(json.dumps([number, found]), file=stream, flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = [json.loads(line) for line in (place / "outcomes").read_text().splitlines()]
    if len(told) < count:
        told.append([len(told), f"the child ended with {code}"])
    return told


@pytest.fixture
def place():
    """A folder in memory."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(prefix="parsers", dir=memory if memory.is_dir() else None))
    yield made
    shutil.rmtree(made)


def check(name, count, place):
    global START
    if name == "checkpoint":
        START = fedveil.runs.build.build(load_recipe("central", SETTINGS))
    told = tried(name, max(5, count // COSTLY.get(name, 1)), place)
    fine = ("read", "refused")
    bad = [(number, found) for number, found in told if found not in fine]
    assert not bad, f"{len(bad)} of {len(told)}, number {bad[0][0]}: {bad[0][1]}"
    assert name in TOLERANT or any(found == "refused" for _, found in told)


@pytest.mark.parametrize("name", PARSERS)
def test_a_damaged_input_is_read_or_refused(name, place):
    check(name, FAST, place)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PARSERS)
def test_many_damaged_inputs(name, place):
    check(name, SLOW, place)


# ---- the mixer: anything may come from the network


HOST, POSITIONS = "127.0.0.1", 6
HIGH = np.array([1, 0, 1, 1, 0, 0], dtype=bool)


def conversation(round):
    """What an honest client sends."""
    words = np.array([2 * i + int(h) for i, h in enumerate(HIGH)], dtype=">u4")
    return HELLO.pack(REPORT, POSITIONS, 2, round) + struct.pack(">H", POSITIONS) + words.tobytes()


async def say(port, content):
    """Send something and hang up, whatever the answer."""
    reader, writer = await asyncio.open_connection(HOST, port)
    with contextlib.suppress(OSError):
        writer.write(content)
        writer.write_eof()
        await reader.read(64)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def mixed(count, seed):
    """Damaged conversations about round 1, then two honest reports about round 2.

    Returns how often each bit of round 2 was counted, and what went wrong in the server.
    """
    unexpected, counted = [], []

    async def main():
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(lambda _, what: unexpected.append(what))
        port = loop.create_future()
        sizes = {"positions": POSITIONS, "minimum": 2, "expected": 2, "rounds": 2}
        config = MixerConfig(**sizes, idle=0.5, simulated=True)
        served = asyncio.create_task(serve(config, port.set_result, stop))
        at = await port
        r = random.Random(seed)
        for _ in range(count):
            content = damaged(r, conversation(1))
            if content[13:21] != conversation(2)[13:21]:
                await asyncio.wait_for(say(at, content), PATIENCE)
        await send_report(HOST, at, 2, HIGH, minimum=2)
        await send_report(HOST, at, 2, HIGH, minimum=2)
        found = await collect(HOST, at, 2, POSITIONS, minimum=2)
        counted.extend(found.high_counts.tolist())
        stop.set()
        await served

    asyncio.run(main())
    return counted, unexpected


def answered(count, seed):
    """How the client ends with each answer of a mixer that is none: "taken" if well formed."""
    ends = []

    async def main():
        r = random.Random(seed)
        whole = b"\0" + np.array([3, 1, 2, 3, 0, 1, 2], dtype=">u4").tobytes()

        async def answer(reader, writer):
            await reader.read(HELLO.size)
            writer.write(damaged(r, whole))
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, HOST, 0)
        at = server.sockets[0].getsockname()[1]
        for i in range(count):
            ask = (
                collect(HOST, at, 1, POSITIONS, minimum=1)
                if i % 2
                else send_report(HOST, at, 1, HIGH, minimum=1)
            )
            try:
                await asyncio.wait_for(ask, PATIENCE)
                ends.append("taken")
            except (Refused, BadInput):
                ends.append("refused")
        server.close()
        await server.wait_closed()

    asyncio.run(main())
    return ends


MESSAGES = [(200, SEED), pytest.param(3000, SEED + 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("count", "seed"), MESSAGES)
def test_a_mixer_counts_right_after_damaged_messages(count, seed):
    assert mixed(count, seed) == ((2 * HIGH).tolist(), [])


@pytest.mark.parametrize(("count", "seed"), MESSAGES)
def test_a_client_survives_damaged_answers(count, seed):
    ends = answered(count, seed)
    assert len(ends) == count
    assert "refused" in ends


# ---- no file is ever unpickled


def calls(tree):
    """(called name, keywords) of every call in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            keywords = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            yield ast.unparse(node.func), keywords


def test_no_file_is_unpickled():
    sources = sorted(Path(fedveil.__file__).parent.rglob("*.py"))
    assert len(sources) > 50
    unpickling = []
    for path in sources:
        for name, keywords in calls(ast.parse(path.read_text())):
            if name in ("np.load", "np.save", "np.lib.format.read_array"):
                assert keywords.get("allow_pickle") is False, (path, name)
            assert name not in ("torch.load", "joblib.load", "pickle.load", "shelve.open"), path
            if name.startswith("pickle."):
                unpickling.append((path.name, name))
    # between a training and the workers it started itself, and from forks that saw no records
    workers = {"processes.py", "spawning.py", "trials.py"}
    assert {file for file, _ in unpickling} <= {"forks.py", *workers}
