"""SuperLink with separate sockets for sites and operators, and programs that show the token.

SuperLink serves sites, operators and its own programs at one port, and does not authenticate
operators: anybody who reaches the port could register keys, or start a run with code of their own
on the server and read every site's reports there. Here sites have a socket on which nothing else is
answered, and everything else needs a token, on a socket of its own. Addresses of senders count for
nothing: a connection through a forwarder on the server comes from the server.
"""

import hmac
import importlib
import os
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from fedveil.base.errors import BadInput
from fedveil.flower.flwr_private import check_flower_version, flower_name, replace_flower_name
from fedveil.flower.flwr_private.app_process import return_freed_memory

SUPERLINK = "flower-superlink"

OPERATOR = "operator-"
"""What the names of programs that show the token begin with: `operator-flwr`."""

OPERATOR_PROGRAMS = {
    "flwr": ("flwr.cli.app", "app"),
    "flower-superexec": ("flwr.supercore.cli", "flower_superexec"),
    "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
}
"""The programs that show the token: by name, the module and function that run them."""

FOR_SITES = "/v1/fleet/"
FOR_ANYBODY = ("/health",)

TOKEN_FILE = "FEDVEIL_OPERATOR_TOKEN"
"""The environment variable with the path of the file that has the operators' token."""

_TOKEN_HEADER = "fedveil-operator-token"
_TOKEN_LENGTH = 32
_KEY_HEADER = b"flwr-public-key"
_PUSH, _PULL = f"{FOR_SITES}push-object", f"{FOR_SITES}pull-messages"
_OVERHEAD = 1 << 20  # of a message, beside its arrays
_OWN_OPTIONS = ("--sites", "--operators", "--answer-bytes")

Scope = MutableMapping[str, Any]
Asgi = Callable[[Scope, Any, Any], Awaitable[None]]


class SuperLinkGate:
    """Middleware that answers sites on one socket, and operators with their token on another.

    | where, and for what | what happens |
    |---|---|
    | the sites' socket, a path below `FOR_SITES` | passed on: Flower checks the key |
    | the sites' socket, a body above `largest` bytes | 413, and the rest is not read |
    | objects of one key, above `largest` bytes for each ask that it had, and one more | 413 |
    | either socket, for whether it is up | passed on |
    | the operators' socket, with the token | passed on |
    | without it, with another, with several | 403 |
    | the sites' socket, anything else, with the token too | 403 |
    | a path with dots in it | 403, unless on the operators' socket with the token |
    | a connection whose own port is unknown | as on the sites' socket |

    Args:
        app: What is behind the gate.
        operators: The port of the operators' socket.
        token: The operators' token.
        largest: The most bytes of an answer. SuperLink keeps objects until the server reads them.
    """

    def __init__(self, app: Asgi, operators: int, token: str, largest: int) -> None:
        if len(token) < _TOKEN_LENGTH:
            raise BadInput(f"the operators' token has {len(token)} characters: 32 or more")
        self.app, self.operators, self.largest = app, operators, largest
        self._token = token.encode()
        self._allowed = dict[bytes, int]()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a request on, or answer it with 403 or 413 (a websocket: close it)."""
        path, (_, port) = scope.get("path", ""), (scope.get("server") or ("", None))
        for_sites = path.startswith(FOR_SITES) and ".." not in path
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif port == self.operators:
            allowed = path in FOR_ANYBODY or self._shows_token(scope)
            await (self.app(scope, receive, send) if allowed else _refuse(scope, send, 403))
        elif scope["type"] == "http" and path in FOR_ANYBODY:
            await self.app(scope, receive, send)
        elif scope["type"] == "http" and for_sites:
            await self._pass_bounded(scope, receive, send)
        else:
            await _refuse(scope, send, 403)

    def _shows_token(self, scope: Scope) -> bool:
        """Return whether a request has the token, once."""
        name = _TOKEN_HEADER.encode()
        shown = [value for key, value in scope.get("headers", ()) if key == name]
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._token)

    async def _pass_bounded(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass a site's request on unless its body is too long, or its key has sent enough.

        A length that the request states is believed only if it is too long. What arrives is
        counted, and the request is broken off at the first byte too many. Only what Flower has
        accepted, and so authenticated, counts for a key.
        """
        headers, path = dict(scope.get("headers", ())), scope["path"]
        key, stated = headers.get(_KEY_HEADER, b""), headers.get(b"content-length", b"0")
        pushes = path == _PUSH
        most = self._allowed.get(key, self.largest) if pushes else self.largest
        if not stated.isdigit() or int(stated[:20]) > most:
            await _refuse(scope, send, 413)
            return
        arrived, sent, status = 0, 0, 0

        async def bounded() -> Any:
            """Receive the next part of the body, or report that the site hung up."""
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            return message if arrived <= most else {"type": "http.disconnect"}

        async def counted(message: Any) -> None:
            """Send a part of the response, and remember its status and length."""
            nonlocal sent, status
            status = message.get("status", status)
            sent += len(message.get("body", b""))
            await send(message)

        await self.app(scope, bounded, counted)
        if status == 200 and pushes:
            self._allowed[key] = most - arrived
        elif status == 200 and path == _PULL and sent:  # empty if there is no ask
            self._allowed[key] = 2 * self.largest  # one for the answer, one to send it again


async def _refuse(scope: Scope, send: Any, status: int) -> None:
    """Answer a request with an error, or close a websocket."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    text = {403: b"not at this address, or not without the token\n", 413: b"too long\n"}[status]
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


class SeparateSockets:
    """A replacement for the module `uvicorn` in Flower, which serves two sockets behind the gate.

    It has `run` and nothing else: a Flower that serves in another way fails. The address that
    Flower is given is the operators', on loopback, so that without this class sites would reach
    nothing.

    Args:
        sites: Host and port of the sites' socket.
        token: The operators' token.
        largest: The most bytes of an answer.
    """

    def __init__(self, sites: tuple[str, int], token: str, largest: int) -> None:
        self._sites, self._token, self._largest = sites, token, largest

    def run(self, *, app: Asgi, host: str, port: int, **options: Any) -> None:
        """Serve until the process is asked to end. Flower's arguments, for operators' address."""
        import uvicorn

        options = {key: options[key] for key in options if key not in ("reload", "workers")}
        gate = SuperLinkGate(app, port, self._token, self._largest)
        # who connects through a proxy is not looked at, and no header changes that
        config = uvicorn.Config(gate, host=host, port=port, proxy_headers=False, **options)
        with _listener(host, port) as operators, _listener(*self._sites) as sites:
            uvicorn.Server(config).run(sockets=[operators, sites])


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Exits with one line if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as e:
        sys.exit(f"error: SuperLink cannot listen at {host}:{port}: {e.strerror or e}")


def run_superlink(arguments: Sequence[str]) -> None:
    """Run `flower-superlink` in this process, with sockets apart and messages in memory.

    Beside Flower's own, the arguments have `--sites HOST:PORT`, where sites connect,
    `--operators HOST:PORT`, which must be on loopback, and `--answer-bytes N`, of an answer's
    arrays at most. The token is that of `TOKEN_FILE`. What Flower writes is readable by its owner
    alone, and messages are never written: after a restart SuperLink knows sites and runs, and no
    model or report.
    """
    import flwr

    check_flower_version(flwr.__version__)
    own, rest = _own_options(arguments)
    sites, (host, port) = _address("--sites", own), _address("--operators", own)
    if host not in ("127.0.0.1", "::1"):
        sys.exit(f"error: --operators is {host}:{port}: operators are on the server itself")
    if not own["--answer-bytes"].isdecimal():
        sys.exit(f"error: --answer-bytes is {own['--answer-bytes']!r}: a number is needed")
    os.umask(0o077)
    return_freed_memory()
    sys.argv = [SUPERLINK, "--host", host, "--port", str(port), *rest]
    sockets = SeparateSockets(sites, read_token(), int(own["--answer-bytes"]) + _OVERHEAD)
    replace_flower_name("flwr.superlink.cli.flower_superlink", "uvicorn", sockets)
    keep_messages_in_memory()
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


def keep_messages_in_memory() -> None:
    """Let a SuperLink of this process keep models and reports in memory, whatever its database."""
    place = ("flwr.superlink.config_loader", "ObjectStoreFactory")
    factory = flower_name(*place)
    replace_flower_name(*place, lambda _database: factory())


def read_token() -> str:
    """Return the operators' token, of the file that `TOKEN_FILE` names.

    Exits if there is none, or others than its owner may read it.
    """
    path = Path(os.environ.get(TOKEN_FILE, ""))
    try:
        if path.stat().st_mode & 0o077:
            sys.exit(f"error: {path} is readable by others: chmod 600 it")
        token = path.read_text().strip()
    except OSError as e:
        sys.exit(f"error: the operators' token cannot be read: {path}: {e.strerror or e}")
    if len(token) < _TOKEN_LENGTH or not token.isalnum():
        sys.exit(f"error: {path} has no token: 32 or more letters and digits are needed")
    return token


def run_for_operator(program: str, arguments: Sequence[str]) -> None:
    """Run one of `OPERATOR_PROGRAMS`, whose requests show the operators' token."""
    token = read_token()
    client = flower_name("flwr.supercore.protobuf.client", "ProtobufClient")
    make = client.__init__

    def make_with_token(self: Any, *args: Any, **keys: Any) -> None:
        """Make Flower's client, with the token as a header of every request."""
        make(self, *args, **keys)
        self._client.headers[_TOKEN_HEADER] = token
        self._client.follow_redirects = False  # the token is for this server alone

    client.__init__ = make_with_token
    sys.argv = [program, *arguments]
    module, name = OPERATOR_PROGRAMS[program]
    getattr(importlib.import_module(module), name)()


def _own_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (values of `_OWN_OPTIONS` by name, Flower's arguments). Exits if one is missing."""
    own, rest, words = dict[str, str](), list[str](), iter(arguments)
    for word in words:
        if word in _OWN_OPTIONS:
            own[word] = next(words, "")
        else:
            rest.append(word)
    for name in _OWN_OPTIONS:
        if name not in own:
            sys.exit(f"error: {name} is missing: deploy the federation again")
    return own, rest


def _address(name: str, options: dict[str, str]) -> tuple[str, int]:
    """Return the host and port under a name. Exits if they are none."""
    host, _, port = options[name].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        sys.exit(f"error: {name} is {options[name]!r}: HOST:PORT is needed")
    return host.strip("[]"), int(port)
