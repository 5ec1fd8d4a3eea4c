"""A page of numbers in Prometheus' text format, on loopback, by the standard library alone."""

import http.server
import math
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from fedveil.base.errors import BadInput

_SECONDS = 5.0  # that a client may take to ask
_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class MetricFamily:
    """Numbers of one name, each with labels of its own.

    Attributes:
        name: Lower-case letters, digits and underscores.
        help: What the numbers are, one line.
        counter: Whether they only grow while the process that counts lives.
        samples: Pairs of labels and number.
    """

    name: str
    help: str
    counter: bool = False
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float, **labels: str) -> None:
        """Add a number with its labels."""
        self.samples.append((labels, value))

    def __str__(self) -> str:
        """Return the lines of the page, "" without numbers.

        >>> family = MetricFamily("fedveil_up", "Whether it runs.")
        >>> family.add(1.0, run='a "b"')
        >>> print(family, end="")
        # HELP fedveil_up Whether it runs.
        # TYPE fedveil_up gauge
        fedveil_up{run="a \\"b\\""} 1.0
        """
        if not self.samples:
            return ""
        if not _NAME.fullmatch(self.name):
            raise AssertionError(f"{self.name} is no name of a metric")
        kind = "counter" if self.counter else "gauge"
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {kind}"]
        for labels, value in self.samples:
            inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            lines.append(f"{self.name}{f'{{{inner}}}' if inner else ''} {_number(value)}")
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Return a label's value with backslashes, quotes and ends of lines escaped."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Return a number as the format has it: "+Inf" for infinity."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


class MetricsPage(http.server.HTTPServer):
    """A server on 127.0.0.1 that answers GET /metrics, one request at a time.

    | request | answer |
    |---|---|
    | GET /metrics | the page, drawn now |
    | the Host is not this address (DNS rebinding) | 403 |
    | another path, or another method | 404, 501 |
    | the page cannot be drawn | 500, without the reason, which goes to the log |
    """

    def __init__(
        self,
        port: int,
        draw: Callable[[], Sequence[MetricFamily]],
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Listen on a port of loopback, 0 for any.

        `draw` returns the numbers. Raises BadInput for a port that is out of range or taken.
        """
        if not 0 <= port < 2**16:
            raise BadInput(f"port is {port}: 0 (any) to 65535 is needed")
        self.draw, self.log = draw, log
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as e:
            raise BadInput(
                f"port {port} of 127.0.0.1 cannot be listened on: {e.strerror}; choose another, or "
                "0 for any"
            ) from e

    @property
    def url(self) -> str:
        """Return the address of the page."""
        return f"http://127.0.0.1:{self.server_port}/metrics"

    def server_bind(self) -> None:
        """Bind the socket, without asking a name server who we are."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Pass over a client that went away."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of a `MetricsPage`."""

    timeout = _SECONDS
    server_version, sys_version = "fedveil", ""

    @property
    def _page(self) -> MetricsPage:
        """Return the server of the page."""
        if not isinstance(self.server, MetricsPage):
            raise AssertionError("this handler answers for a MetricsPage")
        return self.server

    def do_GET(self) -> None:
        """Answer with the page."""
        own = {f"127.0.0.1:{self._page.server_port}", f"localhost:{self._page.server_port}"}
        if self.headers.get_all("Host") is None or {*self.headers.get_all("Host", [])} - own:
            self.send_error(HTTPStatus.FORBIDDEN, "this page is asked by its own address only")
            return
        if self.path != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "the page is /metrics")
            return
        try:
            content = "".join(map(str, self._page.draw())).encode()
        except Exception as e:
            self._page.log(f"the page cannot be drawn: {type(e).__name__}: {e}")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "the page cannot be drawn")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", _TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: who asks is of no interest."""
