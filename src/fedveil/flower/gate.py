"""`flower-superlink` behind a gate: sites reach only the paths for sites.

SuperLink serves sites, operators and its own programs at one port, and does not authenticate
operators: anybody who reaches the port could register keys, or start a run with code of their own
on the server and read every site's reports there. Behind the gate, everything that is not for sites
is answered to the server's own machine only.
"""

import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

FOR_SITES = "/v1/fleet/"
FOR_ANYBODY = ("/health",)

Scope = MutableMapping[str, Any]
Asgi = Callable[[Scope, Any, Any], Awaitable[None]]


class SuperLinkGate:
    """Middleware that passes this machine's requests, and others' to the paths for sites.

    | who asks, and for what | what happens |
    |---|---|
    | this machine, for anything | passed on |
    | anybody, for a path below `FOR_SITES` | passed on: Flower checks the key |
    | anybody, for whether it is up | passed on |
    | others, for anything else, a path with dots in it included | 403 |
    | somebody without an address | as others |
    """

    def __init__(self, app: Asgi) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or _local(scope) or _open(scope.get("path", "")):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": b"for the server's own machine\n"})


def _open(path: str) -> bool:
    return path in FOR_ANYBODY or (path.startswith(FOR_SITES) and ".." not in path)


def _local(scope: Scope) -> bool:
    host = (scope.get("client") or ("",))[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def close() -> None:
    """Put the gate in front of SuperLink.

    Exits if this version of Flower takes its middleware from elsewhere, rather than run without.
    """
    from flwr.superlink import main as superlink
    from starlette.middleware import Middleware

    inside = getattr(superlink, "_get_middleware", None)
    if not callable(inside):
        sys.exit("error: this version of Flower has no _get_middleware where it is gated")
    superlink._get_middleware = lambda: [Middleware(SuperLinkGate), *inside()]


def main() -> None:
    """Run `flower-superlink`, behind the gate."""
    sys.argv[0] = "flower-superlink"
    close()
    from flwr.superlink.cli import flower_superlink

    flower_superlink()


if __name__ == "__main__":
    main()
