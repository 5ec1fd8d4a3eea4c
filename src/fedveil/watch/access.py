"""Access to the live page: only requests with the token, from the server's own pages.

Every request is checked before anything else happens:

| request | answer |
|---|---|
| the Host is not the address that the server listens on (DNS rebinding) | 403 |
| the path does not begin with the token | 403 |
| it comes from another site's page (Sec-Fetch-Site, Origin), or says so in part | 403 |
| anything but GET and HEAD without the Origin of this server | 403 |
| no request but a connection of another kind (a web socket) | closed |

A page of another site can neither read an answer nor end a run: it does not know the token, and
would be refused if it did. The token is in the path, not in a cookie, which browsers would send
to every server on this machine.
"""

import hmac
import ipaddress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OWN = ("same-origin", "none")
_HEADERS = {
    b"cache-control": b"no-store",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
}


@dataclass(frozen=True)
class PageAddress:
    """Where the server listens, and the token that its paths begin with."""

    host: str
    port: int
    token: str

    @property
    def url(self) -> str:
        """The whole address, for a browser."""
        return f"http://{_bracketed(self.host)}:{self.port}/{self.token}/"

    def is_own(self, host: str) -> bool:
        """Whether a Host header names this server.

        A name that somebody else's name server answers for is not among them: only this IP
        address and, on loopback, "localhost"; where all addresses are listened on, any IP address.
        """
        name, _, port = host.rpartition(":")
        if port != str(self.port):
            return False
        own = ipaddress.ip_address(self.host)
        if name == "localhost":
            return own.is_loopback
        try:
            asked = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return asked == own or own.is_unspecified


class Guard:
    """Middleware that refuses requests without the right host, token and origin."""

    def __init__(self, app: ASGIApp, address: PageAddress) -> None:
        self._app, self._address = app, address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not spoken here")

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS.items()]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await PlainTextResponse(f"{refusal}\n", 403)(scope, receive, with_headers)
            return
        path = scope["path"].removeprefix(f"/{self._address.token}")
        await self._app({**scope, "path": path, "raw_path": None}, receive, with_headers)

    def _refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._address.is_own(hosts[0]):
            return "this server is asked by its own address only"
        _, token, *rest = scope["path"].split("/", 2) if "/" in scope["path"] else ("", "")
        if not rest or not hmac.compare_digest(token.encode(), self._address.token.encode()):
            return "the address lacks its token: use the one that fedveil watch printed"
        if headers.get("sec-fetch-site", "none") not in _OWN:
            return "other sites' pages are not answered"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            return "other sites' pages are not answered"
        if scope["method"] not in ("GET", "HEAD") and origin is None:
            return "this is for the page's own button"
        return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
