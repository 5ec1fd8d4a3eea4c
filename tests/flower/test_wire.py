"""Messages on Flower, with a grid in this process."""

import contextlib
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower.federation_files import Federation, RegisteredSite, fingerprint
from fedveil.flower.federation_server import TooFewSites
from fedveil.flower.messages import (
    VERSION,
    Answer,
    Arrival,
    BytesForm,
    MaskedAsk,
    MetricsAnswer,
    MetricsAsk,
    Refusal,
    RehearsalAsk,
    RoundAsk,
    SumStep,
    answer_forms,
    ask_forms,
    bytes_tensor,
    from_parts,
    metrics_forms,
    new_run_id,
    to_parts,
)

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity

from fedveil.flower import flower_apps, prepared_site
from fedveil.flower.flower_apps import GridTransport, from_records, key_of, to_records
from tests.flower.sites import FEDAVG, hashes_of, open_site, tail_of, write_site

RUN, PLAN = new_run_id(), "a" * 64
ASK = RoundAsk(RUN, 3, 1, PLAN, torch.arange(4.0), torch.ones(1, dtype=torch.float64))

ASKED, ANSWERED = ask_forms(4, 1, 3), answer_forms(4, 1)


def keys(count: int) -> list[Any]:
    return [ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(count)]


def pem(key: Any) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def ssh(key: Any) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@dataclass
class FakeGrid:
    """As much of Flower's grid as a server uses; `reply` makes a node's reply to a message."""

    nodes: list[NodeInfo]
    reply: Any
    pushed: list[Message] = field(default_factory=list)
    confirmed: set[str] = field(default_factory=set)
    lock: Any = field(default_factory=threading.Lock)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo.FromString(node.SerializeToString()) for node in self.nodes]

    def push_messages(self, messages: list[Message]) -> list[str]:
        begin = len(self.pushed)
        for number, message in enumerate(messages, begin):
            values, arrays = (dict(message.content[name]) for name in ("fedveil", "arrays"))
            own = {"fedveil": ConfigRecord(values), "arrays": ArrayRecord(arrays)}
            message.content = RecordDict(own)  # as over a wire: no two have it together
            message.metadata.__dict__["_message_id"] = f"m{number}"
        self.pushed += messages
        return [f"m{number}" for number in range(begin, len(self.pushed))]

    def pull_messages(self, ids: list[str]) -> list[Message]:
        with self.lock:  # the stand-ins answer one after the other
            new = [m for m in self.pushed if m.metadata.message_id in set(ids) - self.confirmed]
            self.confirmed |= {m.metadata.message_id for m in new}
            return [reply for m in new if (reply := self.reply(m)) is not None]


def answer_of(message: Message) -> Message:
    ask = from_records(message.content, ASKED)
    assert isinstance(ask, RoundAsk)
    name = {1: "north", 2: "south"}[message.metadata.dst_node_id]
    said = Answer(ask.run, ask.round, ask.attempt, name, ask.params, ask.moving)
    return Message(to_records(said), reply_to=message)


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch):
    """Flower's messages say which run they are of, which its processes are told."""
    for name, value in {"_run_id": 1, "_node_id": 1, "_task_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value)


@pytest.fixture
def pair(monkeypatch):
    """Two sites known by their keys, and a third node that nobody knows."""
    monkeypatch.setattr(flower_apps, "_POLL_SECONDS", 0.01)
    north, south, stranger = keys(3)
    federation = Federation(
        sites=[
            RegisteredSite(name="north", key=ssh(north)),
            RegisteredSite(name="south", key=fingerprint(ssh(south))),
        ]
    )
    nodes = [
        NodeInfo(node_id=k, public_key=pem(key), name="north")
        for k, key in enumerate((north, south, stranger), 1)
    ]

    def make(reply: Any = answer_of) -> GridTransport:
        return GridTransport(FakeGrid(list(nodes), reply), federation)  # type: ignore[arg-type]

    return make


def test_a_message_comes_back_as_it_was():
    for message, forms in (
        (ASK, ASKED),
        (
            Answer(RUN, 3, 1, "north", torch.tensor([1.5]), torch.zeros(0, dtype=torch.float64)),
            answer_forms(1, 0),
        ),
        (Refusal(RUN, 3, 1, "north", "no budget is left"), ANSWERED),
    ):
        back = from_records(to_records(message), forms)
        assert type(back) is type(message)
        for name, theirs in vars(message).items():
            ours = getattr(back, name)
            if isinstance(theirs, torch.Tensor):
                assert ours.dtype is theirs.dtype
                assert torch.equal(ours, theirs)
            else:
                assert ours == theirs


def damaged(**changes: Any) -> RecordDict:
    records = to_records(ASK)
    words, arrays = dict(records["fedveil"]), dict(records["arrays"])
    for key, value in changes.items():
        (arrays if isinstance(value, Array) else words)[key] = value
    return RecordDict({"fedveil": ConfigRecord(words), "arrays": ArrayRecord(arrays)})


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"fedveil": ConfigRecord({"kind": "ask"})}),
        RecordDict({**to_records(ASK), "metrics": MetricRecord({"loss": 1.0})}),
        damaged(format=2),
        damaged(kind="order"),
        damaged(more=1),
        damaged(round=0),
        damaged(round=True),
        damaged(attempt=-1),
        damaged(run="../x"),
        damaged(plan="a"),
        damaged(params=Array(np.zeros(3))),
        damaged(params=Array(np.full(3, np.nan, dtype=np.float32))),
        damaged(params=Array(np.zeros((2, 2), dtype=np.float32))),
        damaged(extra=Array(np.zeros(3))),
        damaged(params=Array("float32", (3,), "numpy.ndarray", b"no array")),
        damaged(params=Array("float32", (3,), "pickle", b"no array")),
        damaged(params=Array(np.array(["a", "b"]))),
    ],
)
def test_what_is_no_message_is_refused(records):
    with pytest.raises(BadInput):
        from_records(records, ASKED)


def test_a_site_is_the_node_with_its_key_and_nobody_else(pair):
    transport = pair()
    assert transport.online() == {"north", "south"}
    found = list(transport.ask(["south", "north"], ASK, 5.0, ANSWERED))
    assert {(a.site, a.message.site) for a in found} == {("north", "north"), ("south", "south")}
    assert [m.metadata.dst_node_id for m in transport.grid.pushed] == [2, 1]
    assert all(m.metadata.ttl == 5.0 for m in transport.grid.pushed)
    assert all(m.metadata.group_id == "3.1" for m in transport.grid.pushed)


def test_who_is_not_online_is_not_asked(pair):
    transport = pair()
    del transport.grid.nodes[0]
    assert [a.site for a in transport.ask(["north", "south"], ASK, 5.0, ANSWERED)] == ["south"]


def step(name: str, content: bytes) -> SumStep:
    return SumStep(RUN, 3, 1, ASK.plan, name, bytes_tensor(content))


def test_each_site_gets_a_message_of_its_own(pair):
    """And each answers in the name of the node that has its key."""

    def echoed(message: Message) -> Message:
        got = from_records(message.content, forms)
        assert isinstance(got, SumStep)
        return Message(to_records(replace(got, content=got.content.flip(0))), reply_to=message)

    forms = {"content": BytesForm(5)}
    messages = {"south": step("south", b"two"), "north": step("north", b""), "west": step("w", b"")}
    found = {a.site: a.message for a in pair(echoed).send(messages, 5.0, forms)}
    assert {name: (m.site, m.encoded) for name, m in found.items()} == {
        "south": ("south", b"owt"),
        "north": ("north", b""),
    }


@pytest.mark.parametrize("content", [b"123456", b"1" * 4096])
def test_more_bytes_than_a_step_has_are_not_decoded(content):
    with pytest.raises(BadInput, match="at most 5 bytes"):
        from_records(to_records(step("north", content)), {"content": BytesForm(5)})


def test_an_ask_with_a_roster_comes_back_as_it_was():
    *place, ledger = vars(ASK).values()
    masked = MaskedAsk(*place, bytes_tensor(b"roster"), ledger_tail=ledger)
    back = from_records(to_records(masked), {**ASKED, "roster_message": BytesForm(6)})
    assert type(back) is MaskedAsk
    assert torch.equal(back.roster_message, masked.roster_message)
    assert torch.equal(back.params, ASK.params)
    with pytest.raises(BadInput, match="roster"):
        from_records(to_records(masked), ASKED)
    values, arrays = to_parts(masked)
    del arrays["roster_message"]
    with pytest.raises(BadInput, match="other parts"):
        from_parts(values, arrays)


def test_nobody_to_ask(pair):
    transport = pair()
    transport.grid.nodes.clear()
    assert list(transport.ask(["north"], ASK, 5.0, ANSWERED)) == []
    assert transport.grid.pushed == []


def test_whoever_does_not_answer_is_waited_for_until_the_deadline_only(pair):
    transport = pair(lambda message: None)
    assert list(transport.ask(["north", "south"], ASK, 0.05, ANSWERED)) == []


def away(message: Message) -> Message:
    """What SuperLink says of a node that it has not heard of for a minute."""
    return Message(Error(ErrorCode.NODE_UNAVAILABLE, "the node is away"), reply_to=message)


def cut_short(message: Message) -> Message:
    return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, "objects are missing"), reply_to=message)


@pytest.mark.parametrize("first", [lambda message: None, away, cut_short])
def test_a_node_that_came_back_is_asked_the_very_same_again(pair, monkeypatch, first):
    """Its ask was in the memory of a SuperNode that is gone, or its answer did not all arrive."""
    monkeypatch.setattr(flower_apps, "_LOOK_SECONDS", 0.01)
    transport = pair(lambda message: restarted(message))
    north = transport.grid.nodes[0]

    def restarted(message: Message) -> Message | None:
        north.last_activated_at = "later"
        new = message.metadata.message_id != "m0"
        return answer_of(message) if new else first(message)

    found = list(transport.ask(["north"], ASK, 20.0, ANSWERED))
    assert [(a.site, a.message.site) for a in found] == [("north", "north")]
    old, new = transport.grid.pushed
    assert old.content.object_id == new.content.object_id
    assert old.metadata.group_id == new.metadata.group_id
    assert 0 < new.metadata.ttl < old.metadata.ttl == 20.0


def test_a_node_that_stays_away_is_absent_and_asked_once(pair, monkeypatch):
    monkeypatch.setattr(flower_apps, "_LOOK_SECONDS", 0.01)
    transport = pair(lambda message: gone(message))

    def gone(message: Message) -> Message:
        transport.grid.nodes[:] = transport.grid.nodes[1:]
        return away(message)

    assert list(transport.ask(["north"], ASK, 1.0, ANSWERED)) == []
    assert len(transport.grid.pushed) == 1


def test_a_node_that_comes_back_again_and_again_is_asked_ten_times_more(pair, monkeypatch):
    monkeypatch.setattr(flower_apps, "_LOOK_SECONDS", 0.001)
    transport = pair(lambda message: restless(message))

    def restless(message: Message) -> Message:
        transport.grid.nodes[0].last_activated_at += "x"
        return away(message)

    (found,) = transport.ask(["north"], ASK, 20.0, ANSWERED)
    assert "the node is away" in found.message
    assert len(transport.grid.pushed) == 11


@pytest.mark.parametrize("kind", ["step", "masked"])
def test_what_is_of_a_secure_sum_is_sent_once(pair, monkeypatch, kind):
    """A site masks once, and its keys are gone with its SuperNode."""
    monkeypatch.setattr(flower_apps, "_LOOK_SECONDS", 0.01)
    transport = pair(lambda message: back(message))

    def back(message: Message) -> Message:
        transport.grid.nodes[0].last_activated_at = "later"
        return away(message)

    masked = MaskedAsk(**vars(ASK), roster_message=bytes_tensor(b"roster"))
    message = step("north", b"x") if kind == "step" else masked
    (found,) = transport.send({"north": message}, 5.0, {"content": BytesForm(5)})
    assert "its app failed" in found.message
    assert len(transport.grid.pushed) == 1


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (lambda m: Message(Error(2, "it\nbroke"), reply_to=m), "its app failed: it broke"),
        (lambda m: Message(RecordDict(), reply_to=m), "other records"),
        (lambda m: Message(m.content, reply_to=m), "was to answer"),
        (lambda m: from_another_node(m), "another node"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(pair, reply, words):
    (found,) = pair(reply).ask(["north"], ASK, 5.0, ANSWERED)
    assert isinstance(found, Arrival)
    assert words in found.message


def from_another_node(message: Message) -> Message:
    reply = answer_of(message)
    reply.metadata.__dict__["_src_node_id"] = 2
    return reply


def test_a_key_that_is_none_is_nobodys():
    assert key_of(b"") == ""
    assert key_of(b"no key") == ""


def replied(message: Message, site: str = "") -> Message:
    """What the ClientApp says where the owner's file is `site`; not named if that is empty."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv(prepared_site.SITE, raising=False)
        if site:
            patched.setenv(prepared_site.SITE, site)
        return flower_apps.client_app(
            message, Context(1, 1, {"site": "evil.toml"}, RecordDict(), {})
        )


def asked(content: RecordDict) -> Message:
    message = Message(content, 1, "train")
    message.metadata.__dict__["_message_id"] = "m0"
    return message


def site_forms(site):
    return answer_forms(site.training.task.size, site.plan.width)


def test_the_client_app_answers_for_the_site_of_its_node(tmp_path):
    policy = {"unprotected": True, "epsilon": {"client": 10.0, "record": 10.0}}
    path = write_site(tmp_path, FEDAVG, policy)
    site = open_site(tmp_path, FEDAVG, policy)
    start = site.training.start()
    parts, ledger = (RUN, 1, 0, site.digest), tail_of(hashes_of(1))
    ask = RoundAsk(*parts, start.params, start.adaptive_state, ledger_tail=ledger)
    message = asked(to_records(ask))
    reply = replied(message, str(path))
    assert not message.content["arrays"]  # what was received is not kept beside the ask
    found = from_records(reply.content, site_forms(site))
    assert isinstance(found, Answer)
    assert (found.site, found.run, found.round) == ("north", RUN, 1)
    assert found.report.shape == start.params.shape
    other = replace(ask, params=start.params + 1)
    again = from_records(replied(asked(to_records(other)), str(path)).content, site_forms(site))
    assert isinstance(again, Refusal)


@pytest.mark.parametrize(
    ("content", "site", "words"),
    [
        (RecordDict(), "site.toml", "cannot read the ask"),
        (to_records(Refusal(RUN, 1, 0, "north", "no")), "site.toml", "nothing else"),
        (to_records(ASK), "", "not ready"),
        (to_records(ASK), "/nowhere/site.toml", "not ready"),
    ],
)
def test_the_client_app_tells_the_server_no_more_than_that_it_cannot(content, site, words):
    reply = replied(asked(content), site)
    assert reply.has_error()
    assert words in reply.error.reason
    assert "nowhere" not in reply.error.reason


def test_whatever_goes_wrong_at_a_site_the_server_hears_one_sentence(tmp_path, monkeypatch):
    """Flower sends the words of an exception to the server."""
    site = open_site(tmp_path)
    path, start = tmp_path / "site.toml", site.training.start()
    parts, ledger = (RUN, 1, 0, site.digest), tail_of(hashes_of(1))
    ask = RoundAsk(*parts, start.params, start.adaptive_state, ledger_tail=ledger)
    (tmp_path / "ledger").write_text("no folder")
    told = [replied(asked(to_records(ask)), str(path))]
    (tmp_path / "ledger").unlink()

    def broken(site, ask):
        raise RuntimeError("diagnosis of record 17")

    monkeypatch.setattr("fedveil.flower.site.Site.answer", broken)
    told.append(replied(asked(to_records(ask)), str(path)))
    assert {reply.error.reason for reply in told} == {"the site is not ready: its owner was told"}


def outcome(folder):
    """What run.sh reads: an exit code, and a line."""
    code, line = (folder / flower_apps.OUTCOME).read_text().splitlines()
    return int(code), line


def test_what_the_server_refuses_is_one_line_and_an_exit_code(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    flower_apps.server_app(FakeGrid([], None), Context(1, 0, {}, RecordDict(), {}))
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage().startswith("error: the app's configuration has no 'federation'")
    assert record.exc_info is None
    assert outcome(tmp_path)[0] == 2
    assert "'federation'" in outcome(tmp_path)[1]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (TooFewSites("of 3 sites 1 is online"), 1, "of 3 sites 1 is online"),
        (BadInput("two\nlines"), 2, "two lines"),
        (RuntimeError("a bug"), 1, "RuntimeError: a bug"),
        (KeyboardInterrupt(), 1, "was ended before the run was"),
    ],
)
def test_whatever_ends_the_server_has_a_code(tmp_path, monkeypatch, error, code, words):
    def fails(grid, context):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flower_apps, "_train", fails)
    with contextlib.suppress(RuntimeError, KeyboardInterrupt):
        flower_apps.server_app(FakeGrid([], None), Context(1, 0, {}, RecordDict(), {}))
    assert outcome(tmp_path)[0] == code
    assert words in outcome(tmp_path)[1]


def test_the_server_app_runs_a_recipe_over_flower(trio, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flower_apps, "_POLL_SECONDS", 0.01)
    three = trio({**FEDAVG, "rounds": 2})
    own = keys(3)
    files = [tmp_path / name / "site.toml" for name in three.transport.sites]
    text = "deadline = 30\nminimum = 3\n" + "".join(
        f'[[sites]]\nname = "{path.parent.name}"\nkey = "{ssh(key)}"\n'
        for path, key in zip(files, own, strict=True)
    )
    (tmp_path / "federation.toml").write_text(text)

    def reply(message: Message) -> Message:
        path = files[message.metadata.dst_node_id - 1]
        return replied(message, str(path))

    nodes = [NodeInfo(node_id=k, public_key=pem(key)) for k, key in enumerate(own, 1)]
    config = {
        "recipe": str(files[0].parent / "recipe.toml"),
        "federation": str(tmp_path / "federation.toml"),
        "run-directory": str(tmp_path / "flower"),
    }
    with caplog.at_level("INFO", "flwr"):
        flower_apps.server_app(FakeGrid(nodes, reply), Context(1, 0, {}, RecordDict(), config))
    three.simulated()
    assert torch.allclose(three.model("flower"), three.model("simulated"), atol=1e-5)
    assert Path(tmp_path / "flower" / "result.json").is_file()
    assert outcome(tmp_path)[0] == 0


def test_metrics_and_rehearsals_come_back_as_they_were():
    asked = MetricsAsk(RUN, 3, 1, PLAN, ASK.params)
    back = from_records(to_records(asked), ASKED)
    assert type(back) is MetricsAsk
    assert torch.equal(back.params, ASK.params)
    rehearsal = RehearsalAsk(**vars(ASK))
    assert type(from_records(to_records(rehearsal), ASKED)) is RehearsalAsk
    sums = MetricsAnswer(RUN, 3, 1, "north", torch.arange(3.0, dtype=torch.float64))
    back = from_records(to_records(sums), metrics_forms(3))
    assert torch.equal(back.noisy_sums, sums.noisy_sums)
    with pytest.raises(BadInput, match="noisy_sums is 'float64' of shape"):
        from_records(to_records(sums), metrics_forms(4))


def test_a_site_that_sends_an_ask_has_not_answered(pair):
    for asked in (ASK, MetricsAsk(RUN, 3, 1, PLAN, ASK.params)):
        transport = pair(lambda message, asked=asked: Message(to_records(asked), reply_to=message))
        (first, *_) = transport.ask(["north"], ASK, 5.0, ANSWERED)
        assert first.message == "it asked, and was to answer"


def test_a_site_names_a_server_of_another_version(tmp_path):
    """Before it compares plans, whose digests another version may take otherwise."""
    content = to_records(ASK)
    content["fedveil"]["version"] = "9.9"
    reply = replied(asked(content), str(write_site(tmp_path)))
    assert reply.error.reason == (
        "the site cannot read the ask: a message of version '9.9' and not "
        f"{VERSION}: use the same version of fedveil on both sides"
    )
