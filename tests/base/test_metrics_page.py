"""The page of numbers for Prometheus: its format, and who is answered."""

import http.client
import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from fedveil.base.errors import BadInput
from fedveil.base.metrics_page import MetricFamily, MetricsPage


@contextmanager
def served(
    draw: Callable[[], Sequence[MetricFamily]], log: list[str] | None = None
) -> Iterator[MetricsPage]:
    """A page that is served from a thread."""
    said: list[str] = [] if log is None else log
    with MetricsPage(0, draw, said.append) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield page
        finally:
            page.shutdown()
            thread.join()


def asked(page: MetricsPage, path: str = "/metrics", method: str = "GET", **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", page.server_port, timeout=5)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.getheader("Content-Type")


def some(value: float = 2.0) -> list[MetricFamily]:
    family = MetricFamily("fedveil_some", "Some number.")
    family.add(value, unit="record")
    return [family, MetricFamily("fedveil_none", "Of which there is none.")]


def test_the_page_is_text_that_prometheus_reads() -> None:
    with served(some) as page:
        status, text, kind = asked(page)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert text == (
        "# HELP fedveil_some Some number.\n# TYPE fedveil_some gauge\n"
        'fedveil_some{unit="record"} 2.0\n'
    )


def test_numbers_and_labels_are_written_as_the_format_has_them() -> None:
    family = MetricFamily("fedveil_total", "Help.", counter=True)
    for value in (math.inf, -math.inf, math.nan, True, 7):
        family.add(value)
    family.add(1.5, name='a\\b"c\nd')
    lines = str(family).splitlines()
    assert lines[1] == "# TYPE fedveil_total counter"
    assert [line.rpartition(" ")[2] for line in lines[2:7]] == ["+Inf", "-Inf", "NaN", "1.0", "7.0"]
    assert lines[7] == 'fedveil_total{name="a\\\\b\\"c\\nd"} 1.5'
    assert len(lines) == 8
    bad = MetricFamily("not a name", "Help.")
    bad.add(1)
    with pytest.raises(AssertionError):
        str(bad)


def test_it_listens_on_loopback_alone_and_is_asked_by_its_own_address() -> None:
    with served(some) as page:
        assert page.socket.getsockname()[0] == "127.0.0.1"
        port = page.server_port
        assert asked(page, Host=f"localhost:{port}")[0] == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
            status, text, _ = asked(page, Host=host)
            assert (status, "fedveil_some" in text) == (403, False), host
        for path in ("/", "/metrics/..", "/metrics?x=1", "/etc/passwd"):
            assert asked(page, path)[0] == 404
        assert asked(page, method="POST")[0] == 501
        with pytest.raises(BadInput, match=f"port {port} of 127.0.0.1 cannot be listened on"):
            MetricsPage(port, some)
    with pytest.raises(BadInput, match="port is 65536"):
        MetricsPage(65536, some)


def test_a_page_that_cannot_be_drawn_says_nothing_of_the_reason() -> None:
    said: list[str] = []

    def fails() -> list[MetricFamily]:
        raise ValueError("a record with 13 in it")

    with served(fails, said) as page:
        status, text, _ = asked(page)
        assert (status, "13" in text) == (500, False)
        assert said == ["the page cannot be drawn: ValueError: a record with 13 in it"]
        assert asked(page)[0] == 500  # it goes on


def test_a_client_that_hangs_or_leaves_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.base.metrics_page._Handler.timeout", 0.2)
    with served(some) as page:
        hanging = socket.create_connection(("127.0.0.1", page.server_port))
        hanging.sendall(b"GET /metrics HTT")
        assert asked(page)[0] == 200
        hanging.close()
        assert asked(page)[0] == 200
