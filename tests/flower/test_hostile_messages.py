"""What is damaged, too long or made to fill memory is refused, both ways."""

import hashlib
import json
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower import flower_apps
from fedveil.flower.ledger_tail import most_tail_bytes
from fedveil.flower.messages import (
    VectorForm,
    answer_forms,
    ask_forms,
    metrics_forms,
    new_run_id,
)
from fedveil.privacy.ledger.file import read_charges

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.task_identity import TaskIdentity

from fedveil.flower.flower_apps import GridTransport, from_records, to_records
from fedveil.flower.flwr_private.arrays import bound_arrays
from fedveil.flower.messages import Answer, MetricsAnswer, MetricsAsk, RoundAsk
from tests.flower.sites import LOCAL, POLICY, hashes_of, open_site, tail_of, write_policy
from tests.flower.test_metrics_at_sites import EVALUATE, measured, site_at
from tests.flower.test_metrics_at_sites import SITES as MEASURED
from tests.flower.test_wire import ANSWERED, ASK, RUN, answer_of, asked, pair, replied  # noqa: F401

MESSAGES = 200
FORM = VectorForm("float32", 4)

BOMB = """
import hashlib, json, sys
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from fedveil.base.errors import BadInput
from fedveil.flower.flower_apps import from_records
from fedveil.flower.flwr_private.arrays import bound_arrays
from fedveil.flower.messages import answer_forms

def peak():
    # in MB; that of getrusage begins at the size of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    (high,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(high.split()[1]) // 1024

chunk = ArrayChunk(memoryview(bytes(CHUNK)))
Array.slice_array = lambda self: [(chunk.object_id, chunk)] * COUNT
bomb = Array("float32", SHAPE, "numpy.ndarray", b"x")
arrays = ArrayRecord({"report": bomb})
record = RecordDict({"fedveil": ConfigRecord({"kind": "answer"}), "arrays": arrays})
contents = {name: one.deflate() for name, one in get_all_nested_objects(record).items()}
wire = sum(map(len, contents.values()))
forms = answer_forms(650, 0)
if BOUND:
    bound_arrays(sum(form.encoded_length for form in forms.values()))
before = peak()
back = inflate_object_from_contents(record.object_id, contents)
try:
    from_records(back, forms)
    words = "accepted"
except BadInput as e:
    words = str(e)
print(json.dumps([wire, peak() - before, words]))
"""


def exploded(shape: str, *, bound: bool, chunk: int = 5 << 20, count: int = 320) -> list[Any]:
    """What zeros, sent as one chunk that is listed often, do to a process: bytes, MB, words."""
    program = BOMB.replace("SHAPE", shape).replace("BOUND", str(bound))
    program = program.replace("CHUNK", str(chunk)).replace("COUNT", str(count))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_flower_alone_makes_gigabytes_of_a_message_of_megabytes():
    """What the bound is for: if this fails, Flower has one of its own."""
    wire, growth, _ = exploded("(400_000_000,)", bound=False)
    assert wire < 12e6
    assert growth > 1500


@pytest.mark.parametrize(
    ("shape", "chunk", "count"),
    [("(400_000_000,)", 5 << 20, 320), ("(650,)", 5 << 20, 320), ("(650,)", 2000, 200_000)],
)
def test_memory_stays_small_whatever_length_is_sent(shape, chunk, count):
    wire, growth, words = exploded(shape, bound=True, chunk=chunk, count=count)
    assert wire < 12e6
    assert growth < 16
    stated = {"(650,)": "that are not the plan's 650 numbers"}
    assert stated.get(shape, "of shape (400000000,), and the plan has") in words


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("float64", (4,), None),
        ("float32", (5,), None),
        ("float32", (4, 1), None),
        ("float32", [4], None),
        ("float32", (4.0,), b""),
        ("float32", (4,), b""),
        ("float32", (4,), b"\x93NUMPY"),
    ],
)
def test_a_vector_that_is_not_the_plan_s_is_not_decoded(dtype, shape, data):
    good = encoded(np.arange(4, dtype=np.float32))
    assert FORM.unpack("report", "float32", (4,), good).tolist() == [0, 1, 2, 3]
    with pytest.raises(BadInput, match="report"):
        FORM.unpack("report", dtype, shape, good if data is None else data)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(5, np.float32),
        np.zeros(3, np.float32),
        np.zeros(2, np.float64),
        np.zeros((2, 2), np.float32, order="F"),
        np.zeros(4, np.int32),
        np.zeros(4, ">f4"),
        np.array(["abcd"] * 1),
    ],
)
def test_what_is_encoded_is_what_is_stated_beside_it(array):
    with pytest.raises(BadInput, match="that are not the plan's 4 numbers"):
        FORM.unpack("report", "float32", (4,), encoded(array))


def test_an_encoding_that_names_more_numbers_than_it_has_is_not_allocated():
    """numpy allocates what a header names before it reads."""
    huge = VectorForm("float32", 2**31).header
    data = huge + bytes(FORM.encoded_length - len(huge))
    tracemalloc.start()
    with pytest.raises(BadInput):
        FORM.unpack("report", "float32", (4,), data)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@pytest.mark.parametrize("length", [0, 1, 650, 30_000_000])
def test_a_header_is_numpy_s_own(length):
    form = VectorForm("float64", length)
    assert encoded(np.zeros(min(length, 1000))).startswith(
        VectorForm("float64", min(length, 1000)).header
    )
    assert form.encoded_length == len(form.header) + 8 * length


def encoded(array: Any) -> bytes:
    return Array(np.asarray(array)).data


def damaged(content: RecordDict, rng: np.random.Generator) -> RecordDict:
    """A message with one part spoilt: an array's form or bytes, a value, a record."""
    values = dict(content["fedveil"])
    arrays = dict(content["arrays"])
    name = str(rng.choice([*arrays]))
    array = arrays[name]
    data = bytearray(array.data)
    kind = int(rng.integers(9))
    if kind == 0:
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        data = data[: int(rng.integers(len(data)))]
    elif kind == 2:
        data += bytes(int(rng.integers(1, 5000)))
    elif kind == 3:
        data = bytearray(VectorForm("float32", int(rng.integers(2**40))).header)
    if kind <= 3:
        arrays[name] = Array(array.dtype, tuple(array.shape), array.stype, bytes(data))
    elif kind == 4:
        shape = tuple(int(n) for n in rng.integers(0, 2**62, int(rng.integers(4))))
        arrays[name] = Array(array.dtype, shape, array.stype, bytes(data))
    elif kind == 5:
        dtype = str(rng.choice(["float16", "object", "float64", "", "U999999999"]))
        arrays[name] = Array(dtype, tuple(array.shape), array.stype, bytes(data))
    elif kind == 6:
        arrays[str(rng.choice(["report", "params", "x", "moving"]))] = arrays.pop(name)
        arrays["more"] = array
    elif kind == 7:
        key = str(rng.choice([*values]))
        values[key] = rng.choice([-1, 2**62, 0]).item()
    else:
        values[str(rng.choice(["kind", "run", "site", "format", "plan"]))] = "x" * int(
            rng.integers(100_000)
        )
    return RecordDict({"fedveil": ConfigRecord(values), "arrays": ArrayRecord(arrays)})


def test_damaged_answers_keep_neither_the_server_nor_other_sites(pair, monkeypatch):  # noqa: F811
    """200 of them; those whose numbers alone are damaged are answers, which `server_sum` judges."""
    rng = np.random.default_rng(35)
    unreadable = 0
    assert list(pair().ask(["north"], ASK, 30, ANSWERED))  # what this imports is no message's
    tracemalloc.start()
    for _ in range(MESSAGES):

        def reply(message: Message) -> Message:
            good = answer_of(message)
            if message.metadata.dst_node_id == 1:
                return Message(damaged(good.content, rng), reply_to=message)
            return good

        found = {a.site: a.message for a in pair(reply).ask(["north", "south"], ASK, 30, ANSWERED)}
        assert isinstance(found["south"], Answer)
        assert isinstance(found["north"], str | Answer)
        if isinstance(found["north"], Answer):
            assert found["north"].report.shape == (4,)
        else:
            assert 0 < len(found["north"]) <= 300
            assert found["north"].isprintable()
            unreadable += 1
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()
    assert unreadable > MESSAGES / 2


def test_damaged_asks_keep_no_site_and_are_charged_at_most_once_each(tmp_path):
    rng = np.random.default_rng(36)
    free = {"epsilon": {"client": 1e6, "record": 1e6}, "trust": ["local"], "repeats": 10}
    noise = {**LOCAL["noise"], "multiplier": 20.0}
    recipe = {**LOCAL, "rounds": 300, "noise": noise, "budget": {"epsilon": 15.0, "delta": 1e-5}}
    site = open_site(tmp_path, recipe, free)
    start, path = site.training.start(), str(tmp_path / "site.toml")
    answers = 0
    for number in range(1, MESSAGES + 1):
        parts = (RUN, number, 0, site.digest, start.params, start.adaptive_state)
        ask = RoundAsk(*parts, ledger_tail=tail_of(hashes_of(number)))
        reply = replied(asked(damaged(to_records(ask), rng)), path)
        if not reply.has_error():
            forms = answer_forms(site.training.task.size, site.plan.width)
            answers += isinstance(from_records(reply.content, forms), Answer)
    charges = read_charges(site.ledger.file) if site.ledger.file.exists() else []
    assert len(charges) == answers  # numbers that are damaged are another model
    assert answers < MESSAGES / 4
    parts = (new_run_id(), 1, 0, site.digest, start.params, start.adaptive_state)
    ask = RoundAsk(*parts, ledger_tail=tail_of(hashes_of(1)))
    assert not replied(asked(to_records(ask)), path).has_error()


class Stuck:
    """A grid on which one site has announced an answer that never comes, and one breaks Flower."""

    def __init__(self, grid: Any, ended: threading.Event) -> None:
        self.grid, self.ended = grid, ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def pull_messages(self, ids: Any) -> Any:
        (one,) = ids
        if one == "m0":
            self.ended.wait(30)
            return []
        if one == "m1":
            raise ValueError("Unexpected format\nfor object content")
        raise AssertionError(one)


def test_an_answer_that_is_announced_and_not_sent_makes_no_other_late(pair):  # noqa: F811
    transport = pair()
    ended = threading.Event()
    stuck = GridTransport(Stuck(transport.grid, ended), transport.federation)  # type: ignore[arg-type]
    found = list(stuck.ask(["north", "south"], ASK, 1.0, ANSWERED))
    ended.set()
    assert [(a.site, a.message) for a in found] == [
        ("south", "its answer cannot be read: Unexpected format for object content")
    ]


class Shaky:
    """A grid that cannot be reached twice."""

    def __init__(self, grid: Any) -> None:
        self.grid, self.left = grid, 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def pull_messages(self, ids: Any) -> Any:
        import httpx

        self.left -= 1
        if self.left >= 0:
            raise httpx.ConnectError("no way")
        return self.grid.pull_messages(ids)


def test_a_connection_that_breaks_is_no_answer(pair):  # noqa: F811
    transport = pair()
    shaky = GridTransport(Shaky(transport.grid), transport.federation)  # type: ignore[arg-type]
    (found,) = shaky.ask(["north"], ASK, 10.0, ANSWERED)
    assert isinstance(found.message, Answer)


def test_a_site_that_is_sent_another_model_says_whose_plan_differs(tmp_path):
    site = open_site(tmp_path, LOCAL, POLICY)
    path = str(tmp_path / "site.toml")
    start = site.training.start()
    other = RoundAsk(RUN, 1, 0, "b" * 64, torch.zeros(3), start.adaptive_state)
    assert (
        "not that of this site's own copy" in replied(asked(to_records(other)), path).error.reason
    )
    longer = RoundAsk(RUN, 1, 0, site.digest, torch.zeros(3), start.adaptive_state)
    assert "the plan has" in replied(asked(to_records(longer)), path).error.reason


def test_forms_are_those_of_the_plan():
    assert {name: form.length for name, form in ask_forms(5, 2, 3).items()} == {
        "params": 5,
        "moving": 2,
        "ledger_tail": most_tail_bytes(3),
    }
    assert {name: form.dtype for name, form in answer_forms(5, 2).items()} == {
        "report": "float32",
        "watched": "float64",
        "signature": "uint8",
    }


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(flower_apps, "_POLL_SECONDS", 0.01)


@pytest.mark.slow
def test_damaged_asks_for_metrics_are_charged_once_for_each_answer(tmp_path):
    rng = np.random.default_rng(37)
    evaluate = {**EVALUATE, "epsilon": 20.0, "every": 1}
    site = site_at(tmp_path, {**MEASURED, "rounds": 200, "evaluate": evaluate}, 0)
    params, path = site.training.start().params, str(tmp_path / "north" / "site.toml")
    policy = {"epsilon": {"record": 1e6}, "delta": 0.1}
    write_policy(tmp_path / "north", policy)
    answers = 0
    for number in range(1, MESSAGES + 1):
        ask = MetricsAsk(RUN, number, 0, site.digest, params)
        reply = replied(asked(damaged(to_records(ask), rng)), path)
        if not reply.has_error():
            answers += isinstance(from_records(reply.content, metrics_forms(3)), MetricsAnswer)
    assert 0 < answers < MESSAGES / 4
    assert measured(site) == answers  # numbers that are damaged are another model
    ask = MetricsAsk(new_run_id(), 1, 0, site.digest, params)
    assert not replied(asked(to_records(ask)), path).has_error()


def listed(places: Any, chunks: dict[str, bytes]) -> bytes:
    """What Flower makes of an array with a list of places among chunks, all in one process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Array, "inflate", Array.inflate)
        bound_arrays(10)
        stated = {"dtype": "float32", "shape": [1], "stype": "x", "arraychunk_ids": places}
        body = json.dumps(stated).encode()
        content = f"Array {','.join(chunks)} {len(body)}".encode() + b"\x00" + body
        children = {name: ArrayChunk(memoryview(data)) for name, data in chunks.items()}
        return Array.inflate(content, children).data


def test_chunks_are_joined_in_the_order_of_their_list():
    two = {"a": b"12345", "b": b"678"}
    assert listed([0, 1], two) == b"12345678"
    assert listed([1, 0], two) == b"67812345"
    assert listed([1, 0, 1], two) == b""  # eleven bytes
    assert listed([0, 0], two) == b"1234512345"
    assert listed([0, 0, 0], two) == b""


def test_arrays_of_one_message_are_bounded_together():
    """And those of another message, which another thread reads, have the bound for themselves."""
    body = json.dumps({"dtype": "x", "shape": [1], "stype": "x", "arraychunk_ids": [0]}).encode()
    content = f"Array a {len(body)}".encode() + b"\x00" + body

    def lengths() -> list[int]:
        return [
            len(Array.inflate(content, {"a": ArrayChunk(memoryview(b"1234"))}).data)
            for _ in range(4)
        ]

    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(1) as other:
        patched.setattr(Array, "inflate", Array.inflate)
        bound_arrays(11)
        assert lengths() == other.submit(lengths).result() == [4, 4, 0, 0]


@pytest.mark.parametrize(
    "places", [[-1], [2], [0.0], [True], ["a"], "0", None, {}, [[0]], [10**30], 0]
)
def test_a_list_of_chunks_that_is_none_makes_no_array(places):
    assert listed(places, {"a": b"12345", "b": b"678"}) == b""


def test_a_vector_is_checked_and_hashed_as_it_lies():
    """Numbers that are not finite are found wherever they are, and no copy is made."""
    vector = torch.zeros(200_001)
    none = torch.zeros(0, dtype=torch.float64)
    place = json.dumps([1, RUN, 1, 0, ASK.plan])
    expected = hashlib.sha256(
        place.encode() + b"\n200001\n" + vector.numpy().tobytes() + b"\n0\n"
    ).hexdigest()
    ask = RoundAsk(RUN, 1, 0, ASK.plan, vector, none)
    tracemalloc.start()
    assert ask.digest == expected
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    for k in (0, 65_535, 65_536, 200_000):
        spoilt = vector.clone()
        spoilt[k] = torch.inf
        with pytest.raises(BadInput, match="not finite"):
            RoundAsk(RUN, 1, 0, ASK.plan, spoilt, none)
