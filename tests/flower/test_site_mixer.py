"""Sites that report to a mixer by themselves: what the server sees, and whom sites talk to."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.flower.federation_files import MixerSection
from fedveil.flower.messages import Answer, Refusal
from fedveil.mixing.mixer import MixerConfig, serve
from fedveil.mixing.protocol import COLLECTOR
from tests.flower.conftest import NAMES, POLICY, alone, records_of_all
from tests.flower.sites import TWO_POINT, Server, charges, open_site
from tests.flower.transports import InProcess
from tests.mixing.certificates import Authority

SHUFFLED = {**TWO_POINT, "name": "shuffled", "shuffle": {"minimum": 3}, "rounds": 2}
TRUSTING = {**POLICY, "trust": ["shuffled"]}


@contextmanager
def mixing(**changes: Any) -> Iterator[int]:
    """A mixer for the small model, in a thread; its port."""
    sizes = {"positions": 15, "minimum": 3, "expected": 3, "rounds": 2, "attempts": 4}
    config = MixerConfig(**{**sizes, "simulated": "members" not in changes, **changes})
    ports: list[int] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    def announce(port: int) -> None:
        ports.append(port)
        ready.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(config, announce, stop)))
    thread.start()
    try:
        assert ready.wait(60)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: Any) -> Callable[[], dict[str, Any]]:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    certificate, key = authority.sign("mixer")
    return lambda: {"certificate": certificate, "key": key, "ca": authority}


def section(port: int, **keys: Any) -> dict[str, Any]:
    return {"host": "127.0.0.1", "port": port, **keys}


def signed(port: int, authority: Authority, name: str) -> dict[str, Any]:
    """The section of a site, or of the server, that has a certificate in its name."""
    certificate, key = authority.sign(name)
    return section(port, ca=str(authority.file), certificate=certificate, key=key)


def test_a_federation_learns_from_what_the_mixer_hands_on(
    tmp_path: Path, trio: Any, tls: Any
) -> None:
    files = tls()
    ca = files.pop("ca")
    data = records_of_all()
    data.save(tmp_path / "all")
    counting = {"clients_ca": str(ca.file), "members": tuple(NAMES)}
    with mixing(**files, **counting, opened=str(tmp_path / "opened.txt")) as port:
        recipe = {**SHUFFLED, "data": {"name": "saved", "path": str(tmp_path / "all")}}
        sites = {
            name: open_site(
                *(tmp_path / name, recipe, TRUSTING, alone(data, k)),
                name=name,
                mixer=signed(port, ca, name),
            )
            for k, name in enumerate(NAMES)
        }
        federation = trio(TWO_POINT)
        federation.transport, federation.recipe = InProcess(sites), recipe
        server = federation.server("mixed", mixer=MixerSection(**signed(port, ca, COLLECTOR)))
        before = server.run.training.start().params
        result = server.serve()
        for replies in federation.transport.sent.values():
            assert all(isinstance(r, Answer) and r.report.shape == (0,) for r in replies)
    assert result["rounds"] == 2
    assert result["claims"][0]["trust"] == "shuffled"
    assert all(outcome.enough for outcome in federation.outcomes)
    moved = federation.model("mixed") - before
    plan = server.run.training.plan
    reach = 0.15 * plan.release.mechanism.kappa
    assert torch.allclose((moved * 3 / reach).round(), moved * 3 / reach, atol=1e-3)
    assert (moved != 0).any()
    for site in sites.values():
        assert [c.trust for c in site.terms.costs] == ["shuffled"]
        assert charges(site) == 2


def test_a_round_of_which_the_mixer_hands_nothing_on_leaves_the_model(
    tmp_path: Path, trio: Any
) -> None:
    data = records_of_all()
    data.save(tmp_path / "all")
    with mixing(deadline=0.2) as port:
        recipe = {**SHUFFLED, "data": {"name": "saved", "path": str(tmp_path / "all")}}
        mixer = section(port, insecure=True)
        sites = {
            name: open_site(
                *(tmp_path / name, recipe, TRUSTING, alone(data, k)), name=name, mixer=mixer
            )
            for k, name in enumerate(NAMES)
        }
        federation = trio(TWO_POINT)
        federation.transport, federation.recipe = InProcess(sites, away={"west"}), recipe
        server = federation.server("mixed", mixer=MixerSection(**mixer))
        before = server.run.training.start().params
        server.serve()
    assert not any(outcome.enough for outcome in federation.outcomes)
    assert torch.equal(federation.model("mixed"), before)
    assert charges(sites["north"]) == 2


def test_a_site_talks_to_nobody_but_its_mixer(tmp_path: Path, tls: Any) -> None:
    files = tls()
    ca = files.pop("ca")
    other = Authority(tmp_path / "other")
    with mixing(**files) as port:
        cases = {
            "another": section(port, ca=str(other.file)),
            "clear": section(port, insecure=True),
            "nobody": section(1, ca=str(ca.file)),
        }
        for name, mixer in cases.items():
            site = open_site(tmp_path / name, SHUFFLED, TRUSTING, mixer=mixer)
            answer = Server(site).answer()
            assert isinstance(answer, Refusal)
            assert "no answer from the mixer" in answer.reason
            assert charges(site) == 1  # it may have been counted


def test_a_site_sends_bits_and_nothing_else(tmp_path: Path, monkeypatch: Any) -> None:
    sent: list[tuple[int, Any]] = []
    monkeypatch.setattr(MixerSection, "send_report", lambda self, *what: sent.append(what))
    site = open_site(tmp_path, SHUFFLED, TRUSTING, mixer=section(1))
    server = Server(site)
    assert server.answer(1).report.shape == (0,)
    server.answer(1, 1)
    server.answer(2)
    assert [number for number, _, _ in sent] == [1, 3, 2]
    assert all(high.dtype == np.bool_ and high.shape == (15,) for _, high, _ in sent)
    assert len({high.tobytes() for _, high, _ in sent}) > 1
    assert {minimum for _, _, minimum in sent} == {3}


def test_a_site_relies_on_the_honest_reports_and_on_those_that_are_not(
    tmp_path: Path, monkeypatch: Any
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(MixerSection, "send_report", lambda self, *what: sent.append(what))
    recipe = {**SHUFFLED, "shuffle": {"minimum": 2, "dishonest": 1}}
    site = open_site(tmp_path, recipe, TRUSTING, mixer=section(1))
    Server(site).answer(1)
    assert sent[0][2] == 3


def test_a_mixer_with_a_smaller_minimum_gets_no_report_and_hands_on_none(
    tmp_path: Path, tls: Any
) -> None:
    """The claim counts on three reports, and such a mixer would hand two on."""
    with mixing(minimum=2) as port:
        site = open_site(tmp_path, SHUFFLED, TRUSTING, mixer=section(port, insecure=True))
        answer = Server(site).answer()
        assert isinstance(answer, Refusal)
        assert "a smaller minimum" in answer.reason
        mixer = MixerSection(**section(port, insecure=True))
        assert mixer.collect(1, 15, 3, 0.0, lambda: 1.0, lambda _: None) is None


@pytest.mark.parametrize(
    ("recipe", "mixer", "words"),
    [
        (SHUFFLED, None, "add one, or use a recipe"),
        (TWO_POINT, section(1), "is for recipes with .shuffle."),
        (SHUFFLED, section(0), "mixer.port"),
        (SHUFFLED, section(1, spread=-1.0), "mixer.spread"),
        (SHUFFLED, section(1, insecure=True, ca="x"), "leave one out"),
        (SHUFFLED, section(1, insecure=True, host="10.0.0.1"), "tests on one machine"),
    ],
)
def test_a_mixer_goes_with_a_shuffled_recipe(
    tmp_path: Path, recipe: dict[str, Any], mixer: dict[str, Any] | None, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        open_site(tmp_path, recipe, TRUSTING, **({} if mixer is None else {"mixer": mixer}))


def test_a_server_needs_a_mixer_for_a_shuffled_recipe_and_for_no_other(
    tmp_path: Path, trio: Any
) -> None:
    federation = trio(TWO_POINT)
    with pytest.raises(BadInput, match="so that trust is local"):
        federation.server("one", {**federation.recipe, "shuffle": {"minimum": 3}})
    with pytest.raises(BadInput, match="omit it"):
        federation.server("two", mixer=MixerSection(**section(1)))


def test_without_a_mixer_trust_is_local_and_the_policy_sees_it(tmp_path: Path) -> None:
    site = open_site(tmp_path, TWO_POINT, TRUSTING)
    answer = Server(site).answer()
    assert isinstance(answer, Refusal)
    assert "local trust" in answer.reason
