"""The server as a process: where it listens, and that it ends when it should."""

import contextlib
import http.client
import json
import signal
import socket
import time
from urllib.parse import urlsplit

import pytest

from fedveil.base.errors import BadInput
from fedveil.watch.watch_server import WatchOptions

from .server import served


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.5", "8.8.8.8"])
def test_beyond_loopback_only_when_that_is_asked_for(root, host):
    with pytest.raises(BadInput, match="add --outside"):
        WatchOptions(root, host)
    assert WatchOptions(root, host, outside=True).host == host


@pytest.mark.parametrize("host", ["localhost", "example.org", "", "127.0.0.1:80", "127.1"])
def test_a_host_is_an_ip_address(root, host):
    with pytest.raises(BadInput, match="an IP address is needed"):
        WatchOptions(root, host)


def test_loopback_is_where_it_listens(root):
    with WatchOptions(root).bind_socket() as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
    with WatchOptions(root, "127.0.0.5").bind_socket() as sock:
        assert sock.getsockname()[0] == "127.0.0.5"


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_that_are_none(root, port):
    with pytest.raises(BadInput, match="0 \\(any\\) to 65535"):
        WatchOptions(root, port=port)


def test_a_port_that_is_taken_is_one_line(root):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"--port {port} of 127.0.0.1 cannot be listened on"):
            WatchOptions(root, port=port).bind_socket()


def stream(url):
    """An event stream that is open, and what it says first."""
    where = urlsplit(url)
    host = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
    host.request("GET", f"{where.path}events")
    return host, host.getresponse()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "term", "stdin"])
def test_it_ends_at_once_however_many_watch(root, copied, how):
    copied("ended")
    with served(root) as (process, url), contextlib.ExitStack() as stack:
        streams = [stream(url) for _ in range(40)]
        for host, answer in streams:
            stack.callback(host.close)
            stack.callback(answer.close)
        first = json.loads(streams[0][1].readline().removeprefix(b"data: "))
        assert len(first["cards"]) == 1
        began = time.monotonic()
        if how == "stdin":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
        assert process.wait(60) == 0
        took = time.monotonic() - began
        assert b"event: ended" in streams[-1][1].read()
        assert process.stderr.read() == "Whoever has this address can open it; Ctrl-C ends it.\n"
    assert took < 10, took


@pytest.mark.slow
def test_every_start_has_a_token_of_its_own(root):
    with served(root) as (_, one), served(root) as (_, two):
        tokens = {urlsplit(url).path.strip("/") for url in (one, two)}
    assert len(tokens) == 2
    assert all(len(token) >= 32 for token in tokens)
