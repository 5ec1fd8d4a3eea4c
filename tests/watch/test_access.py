"""Who is answered: whoever has the whole address, from a page of this server or from none."""

import pytest
from starlette.testclient import TestClient

from fedveil.runs.run_directory import STOP_FILE
from fedveil.watch.followed_runs import RunsFolder
from fedveil.watch.watch_server import PageAddress, Watcher, make_app

from .conftest import ADDRESS, OWN, id_of

HERE = f"/{ADDRESS.token}/"
PATHS = ("", "run?id=x", "events", "report?id=x", "what-if", "answer", "recipe")


@pytest.fixture
def bare(root):
    """A client that sends nothing of its own accord."""
    return TestClient(make_app(Watcher(RunsFolder(root)), ADDRESS), base_url=OWN)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "start", ["/", "/the-token-of-this-tes/", "/the-token-of-this-testx/", "/x/", "//", "/%2e%2e/"]
)
def test_without_the_token_there_is_no_answer(bare, start, path):
    found = bare.get(start + path)
    assert found.status_code == 403
    assert "token" in found.text
    assert ADDRESS.token not in found.text


def test_the_token_alone_is_no_path(bare):
    assert bare.get(f"/{ADDRESS.token}").status_code == 403
    assert bare.get(HERE).status_code == 200
    assert bare.get(f"{HERE}nothing").status_code == 404


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:5000", "evil.example", "127.0.0.1", "127.0.0.1:80",
        "127.0.0.1:5000.evil:5000", "127.0.0.2:5000", "localhost.evil:5000", "[::1]:5000",
        "0.0.0.0:5000", "", ":5000",
        "10.0.0.1:5000",
    ],
)  # fmt: skip
def test_another_host_is_refused_token_or_not(bare, host):
    found = bare.get(HERE, headers={"host": host})
    assert found.status_code == 403
    assert "its own address" in found.text


def test_loopback_is_also_called_localhost(bare):
    assert bare.get(HERE, headers={"host": "localhost:5000"}).status_code == 200


def test_on_all_addresses_any_address_is_its_own_and_no_name_is():
    everywhere = PageAddress("0.0.0.0", 80, "t")
    assert everywhere.is_own_host("10.1.2.3:80")
    assert not everywhere.is_own_host("localhost:80")
    assert not everywhere.is_own_host("evil.example:80")
    assert PageAddress("::1", 80, "t").is_own_host("[::1]:80")
    assert PageAddress("::1", 80, "t").url == "http://[::1]:80/t/"


CROSS = (
    {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:5001"},
    {"origin": "https://127.0.0.1:5000"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": OWN, "sec-fetch-site": "cross-site"},
)


@pytest.mark.parametrize("headers", CROSS)
def test_other_sites_pages_are_refused(bare, copied, holding, headers):
    folder = copied("open")
    holding(folder)
    found = bare.post(f"{HERE}stop?id={id_of('open')}", headers=headers)
    assert found.status_code == 403
    assert not (folder / STOP_FILE).is_file()
    assert bare.get(HERE, headers=headers).status_code == 403


def test_a_post_without_an_origin_is_not_the_button_s(bare, copied, holding):
    folder = copied("open")
    holding(folder)
    id = id_of("open")
    assert bare.post(f"{HERE}stop?id={id}").status_code == 403
    assert not (folder / STOP_FILE).is_file()
    assert bare.get(f"{HERE}stop?id={id}").status_code == 405
    found = bare.post(f"{HERE}stop?id={id}", headers={"origin": OWN})
    assert (found.status_code, (folder / STOP_FILE).is_file()) == (204, True)


def test_answers_are_not_kept_framed_or_passed_on(bare):
    for path in (HERE, "/", f"{HERE}nothing"):
        headers = bare.get(path).headers
        assert headers["cache-control"] == "no-store"
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert not {"set-cookie", "access-control-allow-origin", "server"} & headers.keys()


def test_web_sockets_are_not_spoken(bare):
    with pytest.raises(RuntimeError, match="not spoken"), bare.websocket_connect(HERE):
        pass
