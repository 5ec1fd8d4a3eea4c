"""Sites have a socket on which nothing else is answered; operators have another, and a token."""

import asyncio
import http.client
import socket
import threading
import time
from contextlib import closing, contextmanager, nullcontext, suppress

import pytest

from fedveil.base.errors import BadInput
from fedveil.flower.flwr_private import superlink
from fedveil.flower.flwr_private.superlink import SeparateSockets, SuperLinkGate

TOKEN = "0123456789abcdef" * 2
SHOWN = (b"fedveil-operator-token", TOKEN.encode())
OPERATORS, SITES_PORT, MOST = 9093, 9092, 1000

CONTROL = (
    "/v1/control/start-run",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
    "/docs",
    "/",
)
SITES = ("/v1/fleet/pull-messages", "/v1/fleet/activate-node", "/health")
TRICKS = ("/v1/fleet/../control/start-run", "/v1/fleet", "//v1/fleet/x", "/V1/FLEET/x", "/health/x")


async def inside(scope, receive, send):
    """What is behind the gate: reads the body, and answers with its length in the status text."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    answers = {"/v1/fleet/pull-messages": scope.get("answer", b"")}
    await send({"type": "http.response.start", "status": scope.get("status", 200)})
    await send({"type": "http.response.body", "body": answers.get(scope["path"], b"")})


def gate():
    return SuperLinkGate(inside, OPERATORS, TOKEN, MOST)


def status(path, port, headers=(), kind="http", body=b"", through=None, **more):
    """What somebody at a port gets; 200 stands for whatever is behind the gate."""
    sent, left = [], [body[k : k + 100] for k in range(0, len(body), 100)] or [b""]

    async def receive():
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    server = None if port is None else ("10.0.0.1", port)
    scope = {
        "type": kind,
        "path": path,
        "server": server,
        "client": ("127.0.0.1", 1),
        "headers": list(headers),
        **more,
    }
    asyncio.run((through or gate())(scope, receive, send))
    return sent[0].get("status", sent[0].get("code")) if sent else None


@pytest.mark.parametrize("path", [*CONTROL, *SITES])
def test_operators_reach_everything_with_their_token(path):
    assert status(path, OPERATORS, [SHOWN]) == 200


@pytest.mark.parametrize("path", [*CONTROL, *TRICKS, "/v1/fleet/pull-messages"])
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(SHOWN[0], b"")],
        [(SHOWN[0], TOKEN[:-1].encode())],
        [(SHOWN[0], b"f" * 32)],
        [SHOWN, (SHOWN[0], b"f" * 32)],
        [(b"authorization", TOKEN.encode())],
    ],
)
def test_and_nothing_without_it_wherever_they_are(path, headers):
    assert status(path, OPERATORS, headers) == 403


@pytest.mark.parametrize("path", SITES)
def test_sites_reach_what_is_for_sites(path):
    assert status(path, SITES_PORT) == 200


@pytest.mark.parametrize("path", [*CONTROL, *TRICKS])
@pytest.mark.parametrize("port", [SITES_PORT, None, 0])
def test_sites_reach_nothing_else_not_even_with_the_token(path, port):
    assert status(path, port) == 403
    assert status(path, port, [SHOWN]) == 403


def test_nor_by_other_means():
    assert status("/v1/control/x", SITES_PORT, kind="websocket") == 1008
    assert status("/v1/fleet/x", SITES_PORT, kind="websocket") == 1008
    assert status("/v1/control/x", OPERATORS, kind="websocket") == 1008


def test_anybody_learns_whether_it_is_up():
    assert status("/health", OPERATORS) == 200


def test_a_token_that_can_be_guessed_is_none():
    with pytest.raises(BadInput, match="31 characters"):
        SuperLinkGate(inside, OPERATORS, TOKEN[:-1], MOST)


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (b"x" * MOST, [], 200),
        (b"x" * (MOST + 1), [], None),  # broken off: nothing is answered
        (b"x", [(b"content-length", str(MOST + 1).encode())], 413),
        (b"x", [(b"content-length", b"1" * 5000)], 413),
        (b"x", [(b"content-length", b"-1")], 413),
    ],
)
def test_a_body_that_is_too_long_is_not_read(body, headers, expected):
    assert status("/v1/fleet/push-messages", SITES_PORT, headers, body=body) == expected


def test_a_key_sends_no_more_than_two_answers_for_each_ask():
    through = gate()

    def push(size, key=b"north", **more):
        headers = [(b"flwr-public-key", key)]
        body = b"x" * size
        return status(
            "/v1/fleet/push-object", SITES_PORT, headers, body=body, through=through, **more
        )

    def pull(answer, key=b"north"):
        headers = [(b"flwr-public-key", key)]
        path = "/v1/fleet/pull-messages"
        return status(path, SITES_PORT, headers, through=through, answer=answer)

    assert push(600) == 200
    assert push(600) is None
    assert push(400) == 200
    assert push(1) is None
    pull(b"")
    assert push(1) is None
    pull(b"an ask")
    assert [push(900), push(900), push(201)] == [200, 200, None]
    assert push(900, b"south") == 200


def test_who_is_not_let_in_uses_up_nobody_s_share():
    through = gate()
    headers = [(b"flwr-public-key", b"north")]
    for _ in range(5):
        assert (
            status(
                "/v1/fleet/push-object",
                SITES_PORT,
                headers,
                body=b"x" * 900,
                through=through,
                status=401,
            )
            == 401
        )
    assert (
        status("/v1/fleet/push-object", SITES_PORT, headers, body=b"x" * 900, through=through)
        == 200
    )


def request(port, path, headers=None):
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.request("GET", path, headers={"Connection": "close", **(headers or {})})
        with connection.getresponse() as response:
            return response.status


@contextmanager
def forwarder(port):
    """A TCP forwarder on this machine, to a port of it; yields its own port."""
    opened, threads = [socket.create_server(("127.0.0.1", 0))], []

    def pump(source, sink):
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def start(call, *arguments):
        threads.append(threading.Thread(target=call, args=arguments))
        threads[-1].start()

    def accept():
        with suppress(OSError):
            while True:
                one, other = opened[0].accept()[0], socket.create_connection(("127.0.0.1", port))
                opened.extend((one, other))
                start(pump, one, other)
                start(pump, other, one)

    start(accept)
    yield opened[0].getsockname()[1]
    for one in opened:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
    for thread in threads:
        thread.join()


@pytest.fixture
def served(monkeypatch):
    """An app on two sockets, as SuperLink serves its own; the ports of sites and operators."""
    uvicorn = pytest.importorskip("uvicorn")
    servers = []
    kept = uvicorn.Server

    def server(config):
        servers.append(kept(config))
        servers[-1].capture_signals = lambda: nullcontext()
        return servers[-1]

    monkeypatch.setattr(uvicorn, "Server", server)
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    sites, operators = ports
    sockets = SeparateSockets(("127.0.0.1", sites), TOKEN, MOST)
    options = {"app": answers, "host": "127.0.0.1", "port": operators, "workers": 1}
    options |= {"reload": False, "log_level": "critical", "lifespan": "off"}
    thread = threading.Thread(target=sockets.run, kwargs=options, daemon=True)
    thread.start()
    while not servers or not servers[0].started:
        time.sleep(0.01)
    yield sites, operators
    servers[0].should_exit = True
    thread.join(10)
    assert not thread.is_alive()


async def answers(scope, receive, send):
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": b"operators only"})


def test_through_a_forwarder_on_the_server_a_site_reads_no_page_of_operators(served):
    """To SuperLink such a connection comes from its own machine."""
    sites, operators = served
    for port in (sites, operators):
        with forwarder(port) as through:
            for path in ("/docs", "/v1/control/list-runs"):
                assert request(through, path) == 403
                assert request(through, path, {"X-Forwarded-For": "127.0.0.1"}) == 403
            assert request(through, "/health") == 200
    assert request(operators, "/docs", {"Fedveil-Operator-Token": TOKEN}) == 200
    assert request(sites, "/docs", {"Fedveil-Operator-Token": TOKEN}) == 403
    assert request(sites, "/v1/fleet/x") == 200


def token_file(tmp_path, text=TOKEN, mode=0o600):
    path = tmp_path / "operator.token"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (TOKEN, 0o644, "readable by others"),
        (TOKEN, 0o620, "readable by others"),
        ("", 0o600, "has no token"),
        (TOKEN[:-1], 0o600, "has no token"),
        (TOKEN + "\r\nX: 1", 0o600, "has no token"),
    ],
)
def test_a_token_is_a_secret(tmp_path, monkeypatch, text, mode, words):
    monkeypatch.setenv(superlink.TOKEN_FILE, token_file(tmp_path, text, mode))
    with pytest.raises(SystemExit, match=words):
        superlink.read_token()
    monkeypatch.setenv(superlink.TOKEN_FILE, str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="cannot be read"):
        superlink.read_token()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sites", "0.0.0.0:1", "--answer-bytes", "5"], "--operators is missing"),
        (["--sites", "x", "--operators", "127.0.0.1:1", "--answer-bytes", "5"], "HOST:PORT"),
        (["--sites", "[::]:1", "--operators", "0.0.0.0:2", "--answer-bytes", "5"], "on the server"),
        (["--sites", "[::]:1", "--operators", "127.0.0.1:2", "--answer-bytes", "-5"], "a number"),
    ],
)
def test_arguments_that_would_leave_it_open_are_refused(arguments, words):
    with pytest.raises(SystemExit, match=words):
        superlink.run_superlink(arguments)


def test_an_address_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit, match=f"cannot listen at 127.0.0.1:{port}"):
            superlink._listener("127.0.0.1", port)


def test_every_path_for_sites_is_flower_s_own():
    """What sites call is below the path that is open, and what operators call is not."""
    fleet = pytest.importorskip("flwr.superlink.routers.fleet.router")
    control = pytest.importorskip("flwr.superlink.routers.control.router")
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

    assert f"{fleet.router.prefix}/" == superlink.FOR_SITES
    assert not control.router.prefix.startswith(superlink.FOR_SITES)
    assert FLEET_HTTP_PUBLIC_KEY_HEADER.encode() == superlink._KEY_HEADER
    known = {path for _, path in PROTOBUF_REQUEST_TYPES}
    assert {superlink._PUSH, superlink._PULL} <= known
