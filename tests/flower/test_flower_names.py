"""Each private name of Flower's that is replaced is there, and what replaces it is called."""

import importlib
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from fedveil.flower import flwr_private
from fedveil.flower.flwr_private import REPLACED, flower_name, replace_flower_name

pytest.importorskip("flwr")

PLACES = [(module, name) for module, name, _ in REPLACED]
RUNTIME = "flwr.supernode.runtime.run_clientapp"
SUPERNODE = "flwr.supernode.start_client_internal"
EXECUTOR = "flwr.supercore.superexec.executor.subprocess_executor"


class Called(Exception):
    """What replaces a name has been called."""


def raises(*_, **__):
    raise Called


class Silent:
    """In place of what tells SuperLink that a SuperNode is there."""

    is_running = False

    def __init__(self, _):
        pass

    def start(self):
        pass


@pytest.fixture
def replaced(monkeypatch):
    """Replaces a name for one test, as the programs do for a process."""

    def replace(module, name, own):
        monkeypatch.setattr(importlib.import_module(module), name, flower_name(module, name))
        replace_flower_name(module, name, own)

    return replace


@pytest.mark.parametrize(("module", "name"), PLACES)
def test_a_flower_without_it_is_not_run(monkeypatch, module, name):
    assert flower_name(module, name) is not None
    monkeypatch.delattr(importlib.import_module(module), name)
    for look in (flower_name, lambda *place: replace_flower_name(*place, raises)):
        with pytest.raises(SystemExit, match=f"no {name} in {module}, which is replaced"):
            look(module, name)


def test_no_other_name_is_replaced():
    with pytest.raises(AssertionError, match="not among the names"):
        replace_flower_name("flwr.supercore.utils", "anything", raises)


def test_nothing_else_in_the_package_touches_a_module_of_flower_s():
    """Every name that is set on a module or class of Flower's goes through `REPLACED`."""
    folder = importlib.import_module("fedveil.flower.flwr_private").__path__[0]
    done = subprocess.run(
        ["grep", "-rnE", r"setattr\(|vars\(.*\)\[", folder, "--include=*.py"],
        capture_output=True,
        text=True,
    )
    assert [line.split(":")[0].rsplit("/")[-1] for line in done.stdout.splitlines()] == [
        "__init__.py"
    ]


ANSWER = """
import importlib, sys
from fedveil.flower.flwr_private import guard
runtime = importlib.import_module({runtime!r})
called = []
guard.guard()

def counted(name, inner):
    def call(*args, **keys):
        called.append(name)
        return inner(*args, **keys)
    return call

for name in {names!r}:
    vars(runtime)[name] = counted(name, getattr(runtime, name))
exchange = guard._CanaryExchange("app = None")
runtime.RuntimeHttpClient = exchange
try:
    runtime.run_clientapp("127.0.0.1:9", "canary", insecure=True)
finally:
    print("called", *sorted(called), exchange.answer)
"""


@pytest.mark.slow
def test_a_message_is_answered_through_every_name_of_the_guard(tmp_path):
    names = sorted(name for module, name in PLACES if module == RUNTIME)
    program = ANSWER.format(runtime=RUNTIME, names=names)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("called")]
    assert line.startswith(f"called {' '.join(names)} the site cannot read the ask"), done


def test_arrays_are_made_by_the_class_that_is_bounded(monkeypatch):
    from flwr.app import Array, ArrayRecord
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    from fedveil.flower.flwr_private.arrays import bound_arrays

    monkeypatch.setattr(Array, "inflate", Array.inflate)
    import numpy as np

    record = ArrayRecord({"a": Array(np.zeros(100))})

    def sent(most):
        contents = {name: one.deflate() for name, one in get_all_nested_objects(record).items()}
        bound_arrays(most)
        return len(inflate_object_from_contents(record.object_id, contents)["a"].data)

    assert (sent(928), sent(927), sent(928)) == (928, 0, 928)


def test_superlink_serves_by_what_replaces_uvicorn(replaced, monkeypatch, tmp_path):
    served = []
    own = SimpleNamespace(run=lambda **options: served.append(options))
    replaced("flwr.superlink.cli.flower_superlink", "uvicorn", own)
    from flwr.superlink.cli import flower_superlink

    arguments = ["--insecure", "--host", "127.0.0.1", "--port", "9", "--isolation", "process"]
    monkeypatch.setattr(sys, "argv", ["flower-superlink", *arguments])
    flower_superlink()
    (options,) = served
    assert (options["host"], options["port"]) == ("127.0.0.1", 9)
    assert callable(options["app"])


def test_superlink_keeps_messages_in_memory_whatever_its_database(monkeypatch, tmp_path):
    from flwr.superlink import config_loader
    from flwr.superlink.federation import NoOpFederationManager

    from fedveil.flower.flwr_private.superlink import keep_messages_in_memory

    monkeypatch.setattr(config_loader, "ObjectStoreFactory", config_loader.ObjectStoreFactory)
    keep_messages_in_memory()
    store, state = config_loader.get_objectstore_linkstate_factories(
        str(tmp_path / "state.db"), NoOpFederationManager()
    )
    assert type(store.store()).__name__ == "InMemoryObjectStore"
    assert state.state().object_store is store.store()
    assert type(state.state()).__name__ == "SqlLinkState"
    assert (tmp_path / "state.db").exists()


@contextmanager
def clients(monkeypatch, refusals=()):
    """Flower's clients, put right again, and their responses, which no server makes.

    The first have the status codes `refusals`.
    """
    import httpx
    from flwr.supercore.protobuf.client import ProtobufClient

    monkeypatch.setattr(ProtobufClient, "__init__", ProtobufClient.__init__)
    seen, refusals = [], list(refusals)

    def answer(transport, request):
        seen.append(request)
        refused = refusals.pop(0) if refusals else None
        return httpx.Response(refused or 200, headers=responses[0], content=b"")

    responses = [{"content-length": "0"}]
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    yield seen, responses


def test_every_client_of_operators_shows_the_token(monkeypatch, tmp_path):
    import flwr.cli.app
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.runtime import RuntimeHttpClient

    from fedveil.flower.flwr_private import superlink

    token = tmp_path / "token"
    token.write_text("a" * 32)
    token.chmod(0o600)
    monkeypatch.setenv(superlink.TOKEN_FILE, str(token))
    monkeypatch.setattr(flwr.cli.app, "app", lambda: None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    with clients(monkeypatch) as (seen, _):
        superlink.run_for_operator("flwr", ["run", "x"])
        assert sys.argv == ["flwr", "run", "x"]
        for kind in (ControlHttpClient, RuntimeHttpClient):
            client = kind.from_server_address("127.0.0.1:9", True, None, ())
            assert not client._client.follow_redirects
            from flwr.proto.runtime_pb2 import GetNodesRequest, GetNodesResponse

            client._unary_unary(
                path="/x", rpc_method="x", request=GetNodesRequest(), response_type=GetNodesResponse
            )
            assert seen.pop().headers["fedveil-operator-token"] == "a" * 32
            client.close()


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({"content-length": "1000"}, True),
        ({"content-length": "1001"}, False),
        ({}, False),
        ({"content-length": "x"}, False),
        ({"content-length": "10", "content-encoding": "gzip"}, False),
    ],
)
def test_a_site_reads_no_response_that_is_too_long(monkeypatch, headers, passes):
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient

    from fedveil.flower.flwr_private.supernode import watch_responses

    with clients(monkeypatch) as (_, responses):
        watch_responses(1000)
        responses[0] = headers
        import httpx

        monkeypatch.setattr(httpx.Response, "read", lambda response: b"")
        client = FleetHttpClient.from_server_address("127.0.0.1:9", True, None, ())
        try:
            client.PullMessages(PullMessagesRequest())
            done = "passed"
        except ValueError as e:
            done = str(e)
        except httpx.ResponseNotRead:
            done = "passed"
        finally:
            client.close()
        assert (done == "passed") == passes, done


@pytest.mark.parametrize(
    ("refusals", "requests", "ends"),
    [
        ([], 1, True),
        ([412] * 14, 15, True),
        ([412] * 15, 16, True),
        ([412] * 16, 16, False),
        ([412, 409], 2, False),
        ([500], 1, False),
    ],
)
def test_a_site_that_was_killed_is_let_in_again(monkeypatch, capsys, refusals, requests, ends):
    """It waits until SuperLink has missed the SuperNode before, and says once what that may be."""
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE
    from flwr.supercore.exit import exit as flower_exit
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.fleet_http_client import FleetHttpClient

    from fedveil.flower.flwr_private import supernode

    monkeypatch.setattr(FleetHttpClient, "ActivateNode", FleetHttpClient.ActivateNode)
    monkeypatch.setattr(fleet_http_connection, "HeartbeatSender", Silent)
    # Flower's exit leaves a thread that ends this process by force after a while.
    monkeypatch.setattr(flower_exit, "FORCE_EXIT_TIMEOUT_SECONDS", 1e6)
    pauses = []
    with clients(monkeypatch, refusals) as (seen, _):
        supernode.watch_responses(1000)
        supernode.try_activation_again(pauses.append)
        keys = fleet_http_connection.generate_key_pairs()
        connection = fleet_http_connection.http_request_response(
            "127.0.0.1:9", True, authentication_keys=keys
        )
        if ends:
            with connection:
                pass
        else:
            with pytest.raises(SystemExit), connection:
                pass
    assert [request.url.path for request in seen][:requests] == [
        "/v1/fleet/activate-node"
    ] * requests
    assert len(seen) == requests + ends  # and it signs off
    assert pauses == [5.0] * refusals[:15].count(412)
    assert sum([5.0] * 15) > HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL
    assert capsys.readouterr().err.count("up to a minute after it was killed") == (412 in refusals)


def test_superexec_starts_programs_by_what_replaces_subprocess(replaced):
    from flwr.supercore.superexec.executor import factory
    from flwr.supercore.superexec.executor.types import ExecutionSpec

    replaced(EXECUTOR, "subprocess", SimpleNamespace(Popen=raises, DEVNULL=None))
    known = {"task_type": "flwr-clientapp", "runtime_api_address": "a", "token": "t"}
    names = ExecutionSpec.__dataclass_fields__
    from flwr.supercore.constant import TaskType

    spec = SimpleNamespace(
        **{**dict.fromkeys(names, None), **known, "task_type": TaskType.CLIENT_APP}
    )
    with pytest.raises(Called):
        factory.SubprocessExecutor().launch(spec)


def supernode(monkeypatch, received):
    """Flower's SuperNode with a connection that receives these, one after the other."""
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode import start_client_internal as internal
    from flwr.supernode.nodestate import NodeStateFactory

    @contextmanager
    def connection(**_):
        left = list(received)
        parts = [raises] * 7
        yield (1, lambda: left.pop(0) if left else None, *parts[:6])

    monkeypatch.setattr(internal, "_init_connection", connection)
    monkeypatch.setattr(internal, "register_signal_handlers", lambda **_: None)
    factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
    return lambda: internal.start_client_internal(
        state_factory=factory,
        server_address="x",
        node_config={},
        isolation="process",
        insecure=True,
    )


def test_a_supernode_pauses_by_what_replaces_time(replaced, monkeypatch):
    seen = []

    def sleep(seconds):
        seen.append(seconds)
        raise Called

    start = supernode(monkeypatch, [])
    replaced(SUPERNODE, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(Called):
        start()
    from fedveil.flower.flwr_private import supernode as ours

    assert seen == [ours._IDLE]


def test_a_supernode_pulls_by_what_is_bounded():
    """It has two loops: one pulls a message's objects, the other waits for the reply."""
    internal = importlib.import_module(SUPERNODE)
    assert "pull_objects" in internal._pull_and_store_message.__code__.co_names
    names = internal._push_messages.__code__
    from fedveil.flower.flwr_private import supernode as ours

    assert ours._STEP in names.co_consts
    assert "time" in names.co_names


def test_a_bounded_pull_ends_at_the_bound(replaced):
    from fedveil.flower.flwr_private.supernode import bound_pulls

    replaced(SUPERNODE, "pull_objects", flower_name(SUPERNODE, "pull_objects"))
    bound_pulls(1000)
    pull = flower_name(SUPERNODE, "pull_objects")
    assert pull(["a", "b"], lambda name: bytes(500)) == {"a": bytes(500), "b": bytes(500)}
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        pull(["a", "b"], lambda name: bytes(501))


def test_a_grid_pulls_by_what_looks_soon(replaced, monkeypatch):
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.superlink.grid import http_grid

    from fedveil.flower.flwr_private.arrays import pull_soon

    place = ("flwr.superlink.grid.http_grid", "pull_objects")
    seen = []
    replaced(*place, lambda **keys: seen.append(keys) or raises())
    pull_soon(7.0)
    pull_soon(9.0)
    message = SimpleNamespace(metadata=SimpleNamespace(message_id="m"))
    pulled = SimpleNamespace(messages_list=[message], message_object_trees=[ObjectTree()])
    client = SimpleNamespace(PullMessages=lambda _: pulled, PullObject=None)
    grid = http_grid.HttpGrid(token="x")
    grid._run, grid._client = SimpleNamespace(run_id=1), client
    with pytest.raises(Called):
        grid.pull_messages(["m"])
    assert seen[0]["max_time"] == 9.0
    assert seen[0]["initial_backoff"] == flwr_private.SOON


def test_pauses_are_short_in_a_run_and_flower_s_own_otherwise():
    from fedveil.flower.flwr_private.supernode import Pauses

    now, slept = [1000.0], []
    pauses = Pauses(lambda: now[0])
    pauses._sleep = slept.append
    pauses.sleep(3)
    pauses.sleep(0.5)
    pauses.sleep(3)
    now[0] += 119
    pauses.sleep(3)
    now[0] += 2
    pauses.sleep(3)
    pauses.sleep(7)
    assert slept == [3, 0.05, 0.2, 0.2, 3, 7]
