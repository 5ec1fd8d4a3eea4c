"""What an owner sees: a log with charges, a doctor that names the cause, and a status."""

import http.server
import json
import ssl
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedveil.flower import certificates, site_doctor
from fedveil.flower.certificates import Authority
from fedveil.flower.connection import Connection
from fedveil.flower.flwr_private import supernode
from fedveil.flower.flwr_private.supernode import cause_of, clock_ahead, clock_problem
from fedveil.flower.site import Site
from fedveil.flower.site_doctor import SiteFinding, examine, site_status, status_lines
from fedveil.flower.site_log import SiteLog
from fedveil.flower.site_numbers import site_families
from tests.flower.sites import LOCAL, Server, open_site, write_site

NOW = datetime(2026, 3, 1, 12, 0, 0, 900_000, tzinfo=UTC)


def log_of(site):
    return [json.loads(line) for line in site.log.file_path.read_text().splitlines()]


def test_a_log_says_what_was_asked_and_what_it_cost(tmp_path, capsys):
    site = open_site(tmp_path)
    server = Server(site)
    server.answer(1)
    server.answer(1)
    server.answer(1, 0, params=server.ask().params + 1)
    server.answer(2)
    first, again, declined, second = entries = log_of(site)
    assert [entry["event"] for entry in entries] == [
        "answered",
        "answered again",
        "declined",
        "answered",
    ]
    assert (first["run"], first["round"], first["attempt"]) == (server.run, 1, 0)
    assert (first["turns"], second["turns"]) == (1, 2)
    assert first["permitted"] == LOCAL["rounds"]
    line = site.terms.charged_lines[0]
    assert first["spent"] == [line.claims(1)[0].short]
    assert second["spent"] == [line.claims(2)[0].short]
    assert first["at_most"] == [line.claims(4)[0].short]
    assert "asked before" in declined["reason"]
    assert "spent" not in again
    for entry in entries:
        assert abs(datetime.now(UTC) - datetime.fromisoformat(entry["time"])) < timedelta(hours=1)
    assert site.log.file_path.stat().st_mode & 0o777 == 0o600
    shown = [text for text in capsys.readouterr().err.splitlines() if text.startswith("{")]
    assert [json.loads(text) for text in shown] == entries


def test_what_went_wrong_is_in_the_log_and_not_in_the_answer(tmp_path, monkeypatch):
    site = open_site(tmp_path)

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(type(site.ledger), "charge", full)
    answer = Server(site).answer()
    assert "No space" not in answer.reason
    (entry,) = log_of(site)
    assert entry["event"] == "error"
    assert entry["error"] == "OSError: No space left on device"


def test_a_log_that_cannot_be_written_keeps_nobody_from_answering(tmp_path):
    site = open_site(tmp_path)
    site.log.file_path.mkdir(parents=True)
    assert Server(site).answer().report.numel()


def test_a_long_log_is_begun_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("fedveil.flower.site_log._LONGEST", 100)
    log = SiteLog(tmp_path / "log.jsonl")
    for number in range(5):
        log.write("answered", round=number)
    assert log.file_path.stat().st_size < 250
    assert log.file_path.with_suffix(".old").exists()


@pytest.mark.parametrize(
    ("date", "ahead", "words"),
    [
        ("Sun, 01 Mar 2026 12:00:00 GMT", 0, ""),
        ("Sun, 01 Mar 2026 11:59:40 GMT", 20, "20 s ahead of the server's"),
        ("Sun, 01 Mar 2026 12:02:00 GMT", -119, "119 s behind the server's"),
        ("no date", 0, ""),
        (None, 0, ""),
    ],
)
def test_a_clock_is_compared_with_the_server_s(date, ahead, words):
    assert clock_ahead(date, NOW) == pytest.approx(ahead, abs=0.2)
    assert words in clock_problem(clock_ahead(date, NOW))
    assert bool(words) == bool(clock_problem(clock_ahead(date, NOW)))
    cause = cause_of(401, date, "/v1/fleet/pull-messages", NOW)
    assert (words or "does not take this site's signature") in cause


def test_flower_allows_as_much_as_the_tolerance():
    constant = pytest.importorskip("flwr.common.constant")
    assert constant.SYSTEM_TIME_TOLERANCE == supernode.CLOCK_TOLERANCE


def test_a_key_that_is_not_registered_is_named(tmp_path, monkeypatch):
    certificates.write_node_key(tmp_path, "north")
    monkeypatch.chdir(tmp_path)
    cause = cause_of(412, None, "/v1/fleet/activate-node", NOW)
    assert "SHA256:" in cause
    assert "not registered" in cause
    assert "still counts a SuperNode with it as online" in cause
    for status, path in ((200, "/v1/fleet/activate-node"), (412, "/v1/fleet/push-messages")):
        assert cause_of(status, None, path, NOW) == ""


class Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def superlink(folder, monkeypatch, days=365, host="127.0.0.1", status=200):
    """Something that answers as SuperLink does, with a certificate that holds so many days."""
    folder.mkdir()
    monkeypatch.setattr(Health, "status", status)
    authority = Authority.new("authority")
    authority.save(folder)
    monkeypatch.setattr(certificates, "DAYS", days)
    if host != "127.0.0.1":
        monkeypatch.setattr(certificates, "_OWN_MACHINE", ())
    authority.write_server(host, folder, "superlink")
    monkeypatch.undo()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "superlink.crt", folder / "superlink.key")
    Health.status = status
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", folder / "ca.crt"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        Health.status = 200


def test_a_superlink_that_is_well_is_seen(tmp_path, monkeypatch):
    with superlink(tmp_path / "a", monkeypatch) as (address, authority):
        seen = Connection.probe(address, authority)
    assert seen.problem == ""
    assert abs(clock_ahead(seen.date)) < 5
    assert 363 < (seen.ends - datetime.now(UTC)).days < 366


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"days": 0}, "has expired"),
        ({"host": "example.org"}, "for another host"),
        ({"status": 403}, "answers with status 403"),
    ],
)
def test_what_is_wrong_with_a_superlink_is_named(tmp_path, monkeypatch, options, words):
    with superlink(tmp_path / "a", monkeypatch, **options) as (address, authority):
        assert words in Connection.probe(address, authority).problem


def test_another_authority_s_certificate_is_named(tmp_path, monkeypatch):
    Authority.new("other").save(tmp_path)
    with superlink(tmp_path / "a", monkeypatch) as (address, _):
        assert "is not signed by ca.crt" in Connection.probe(address, tmp_path / "ca.crt").problem


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "nowhere.invalid:9"])
def test_a_superlink_that_is_not_there_is_named(tmp_path, address):
    Authority.new("other").save(tmp_path)
    seen = Connection.probe(address, tmp_path / "ca.crt", seconds=2)
    assert f"no SuperLink at {address}" in seen.problem


@pytest.fixture
def examined(tmp_path, monkeypatch):
    """Makes a site's folder, changes something, and examines it; the guard is tested elsewhere."""
    monkeypatch.setattr(site_doctor, "_guard", lambda: "as ever")
    monkeypatch.setattr(site_doctor, "is_registered", lambda *_: "known")

    def make(change=lambda folder: None, address="127.0.0.1:1", policy=None):
        folder = tmp_path / "north"
        path = write_site(folder, LOCAL, policy)
        certificates.write_node_key(folder, "north")
        Authority.new("authority").save(folder)
        (folder / "supernode.sh").write_text(f"port=5\nflower-supernode --superlink {address} x\n")
        change(folder)
        return {finding.check: finding for finding in examine(path)}

    return make


def test_a_doctor_finds_a_healthy_site_healthy(examined, tmp_path, monkeypatch):
    with superlink(tmp_path / "a", monkeypatch) as (address, authority):
        monkeypatch.setattr(site_doctor, "_guard", lambda: "as ever")
        monkeypatch.setattr(site_doctor, "is_registered", lambda *_: "known")

        def trust(folder):
            (folder / "ca.crt").write_bytes(authority.read_bytes())

        found = examined(trust, address)
    assert all(finding.passed for finding in found.values()), found
    assert {"versions", "files", "records", "ledger", "policy", "guard", "key"} < set(found)
    assert {"authority", "superlink", "certificate", "clock", "registered"} < set(found)
    assert "24 records" in found["records"].text
    assert "nothing was charged yet" in found["ledger"].text


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        (lambda f: (f / "recipe.toml").unlink(), "files", "recipe.toml"),
        (lambda f: (f / "records" / "x.npy").unlink(missing_ok=True), "superlink", "no SuperLink"),
        (lambda f: (f / "node").chmod(0o644), "key", "readable by others"),
        (lambda f: (f / "node").unlink(), "key", "No such file"),
        (lambda f: (f / "ca.crt").write_text("none"), "authority", "PEM"),
    ],
)
def test_a_doctor_names_what_is_wrong(examined, change, check, words):
    found = examined(change)
    assert found[check].passed is False
    assert words in found[check].text
    assert str(found[check]).startswith("FAILED")


def test_a_doctor_names_a_policy_that_refuses_and_the_last_charge(examined, tmp_path):
    site = open_site(tmp_path / "north")
    Server(site).answer()
    strict = {"epsilon": {"client": 0.1}, "trust": ["local"]}
    found = examined(policy=strict)
    assert "policy.epsilon.client" in found["policy"].text
    assert "1 charges, the last of 20" in found["ledger"].text


def test_a_doctor_looks_where_it_can(examined):
    found = examined(lambda folder: (folder / "supernode.sh").unlink())
    assert found["superlink"].passed is None
    assert str(found["superlink"]).startswith("?")
    assert str(SiteFinding("clock", True, "x")) == "ok     clock       x"


def test_a_status_lists_runs_costs_and_the_last_events(tmp_path):
    site = open_site(tmp_path)
    server = Server(site)
    assert "no run was charged yet" in status_lines(site_status(tmp_path / "site.toml"))
    server.answer(1)
    server.answer(2)
    found = site_status(tmp_path / "site.toml", lines=1)
    assert [run["run"] for run in found["runs"]] == [server.run]
    assert found["runs"][0]["costs"] == [claim.short for claim in site.terms.costs]
    assert [entry["round"] for entry in found["log"]] == [2]
    lines = status_lines(found)
    assert any(f"at most {site.terms.costs[0].short}" in line for line in lines)
    assert lines[-1].endswith(found["log"][0]["spent"][0])


def numbers_of(path: Path) -> dict[str, float]:
    """The site's numbers for Prometheus, by name and labels."""
    text = "".join(map(str, site_families(path)))
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_the_numbers_of_a_site(tmp_path: Path) -> None:
    """Asks by what became of them, charges, and what the policy leaves."""
    path = write_site(tmp_path)
    before = numbers_of(path)
    assert before["fedveil_site_takes_part"] == 1
    assert before['fedveil_site_epsilon_left{unit="client"}'] == 10.0
    assert "fedveil_site_last_charge_timestamp_seconds" not in before
    site = Site.open(path)
    server = Server(site)
    server.answer(1)
    server.answer(1)
    server.answer(2)
    server.answer(9)
    found = numbers_of(path)
    assert found['fedveil_site_up{site="north",recipe="local"}'] == 1
    assert found['fedveil_site_asks_total{outcome="answered"}'] == 2
    assert found['fedveil_site_asks_total{outcome="answered again"}'] == 1
    assert found['fedveil_site_asks_total{outcome="declined"}'] == 1
    assert found['fedveil_site_charges_total{of="turns"}'] == 2
    assert found['fedveil_site_charges_total{of="measurements"}'] == 0
    (cost,) = site.terms.costs
    assert found['fedveil_site_epsilon_spent{unit="client"}'] == pytest.approx(cost.epsilon)
    assert found['fedveil_site_epsilon_left{unit="client"}'] == pytest.approx(10 - cost.epsilon)
    assert found["fedveil_site_delta_spent"] == pytest.approx(cost.delta)
    assert abs(found["fedveil_site_last_charge_timestamp_seconds"] - time.time()) < 86400
    assert found["fedveil_site_takes_part"] == 0  # another run would be too much
    (tmp_path / "ledger" / "ledger.db").unlink()
    assert numbers_of(path) == {"fedveil_site_up": 0}
