"""The mixer with TLS: who is talked to, and who is heard."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from fedveil.errors import BadInput
from fedveil.mixing.client import collect, send_report
from fedveil.mixing.mixer import MixerConfig
from fedveil.mixing.protocol import Refused, Status, number_of
from fedveil.mixing.tls import COLLECTOR, connecting, listening
from tests.mixing.certificates import Authority
from tests.mixing.loopback import CONFIG, HOST, POSITIONS, with_mixer

HIGH = np.arange(POSITIONS) % 2 == 0


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="module")
def config(authority):
    certificate, key = authority.sign("mixer")
    return replace(CONFIG, certificate=certificate, key=key)


async def lost(conversation):
    with pytest.raises(Refused) as refused:
        await conversation
    assert refused.value.status is Status.LOST


def test_reports_are_counted_and_collected_over_tls(config, authority):
    tls = connecting(authority.file)

    async def scenario(port, task):
        for high in (HIGH, ~HIGH):
            await send_report(HOST, port, 1, high, tls=tls)
        found = await collect(HOST, port, 1, POSITIONS, tls=tls)
        assert found.high.tolist() == [1] * POSITIONS
        assert found.reports.tolist() == [2] * POSITIONS

    with_mixer(config, scenario)


def test_nobody_is_talked_to_whose_certificate_is_not_the_mixers(config, authority, other):
    named = authority.sign("elsewhere", host="10.0.0.1")
    expired = authority.sign("expired", days=-1.0)

    def scenario_of(context):
        async def scenario(port, task):
            await lost(send_report(HOST, port, 1, HIGH, tls=context))
            await lost(collect(HOST, port, 1, POSITIONS, tls=context))

        return scenario

    with_mixer(config, scenario_of(connecting(other.file)))
    with_mixer(config, scenario_of(connecting()))
    for certificate, key in (named, expired):
        wrong = replace(config, certificate=certificate, key=key)
        with_mixer(wrong, scenario_of(connecting(authority.file)))


def test_a_mixer_with_tls_hears_nothing_in_the_clear_and_the_reverse(config, authority):
    async def clear(port, task):
        await lost(send_report(HOST, port, 1, HIGH))

    async def ciphered(port, task):
        await lost(send_report(HOST, port, 1, HIGH, tls=connecting(authority.file)))

    with_mixer(replace(config, idle=1.0), clear)
    with_mixer(replace(CONFIG, idle=1.0), ciphered)


def test_a_mixer_may_hear_only_those_whom_an_authority_has_signed(config, authority, other):
    known = replace(config, clients_ca=str(authority.file))

    async def scenario(port, task):
        mine = connecting(authority.file, *authority.sign("north"))
        for high in (HIGH, HIGH):
            await send_report(HOST, port, 1, high, tls=mine)
        for context in (
            connecting(authority.file),
            connecting(authority.file, *other.sign("intruder")),
        ):
            await lost(send_report(HOST, port, 2, HIGH, tls=context))
            await lost(collect(HOST, port, 1, POSITIONS, tls=context))
        collector = connecting(authority.file, *authority.sign(COLLECTOR))
        assert (await collect(HOST, port, 1, POSITIONS, tls=collector)).reports[0] == 2

    with_mixer(known, scenario)


def test_whoever_collects_cannot_report_and_whoever_reports_cannot_collect(config, authority):
    """A server that filled a round up with reports of its own would know the one that is left."""
    known = replace(config, clients_ca=str(authority.file))

    async def forbidden(conversation):
        with pytest.raises(Refused) as refused:
            await conversation
        assert refused.value.status is Status.FORBIDDEN

    async def scenario(port, task):
        site = connecting(authority.file, *authority.sign("member"))
        server = connecting(authority.file, *authority.sign(COLLECTOR))
        await send_report(HOST, port, 1, HIGH, tls=site)
        await forbidden(send_report(HOST, port, 1, HIGH, tls=server))
        await forbidden(collect(HOST, port, 1, POSITIONS, tls=site))
        with pytest.raises(Refused) as refused:
            await collect(HOST, port, 1, POSITIONS, tls=server)
        assert refused.value.status is Status.OPEN  # the server's own report did not fill it up

    with_mixer(known, scenario)


def test_attempts_at_a_round_are_mixed_apart():
    async def scenario(port, task):
        again = number_of(3, 1, CONFIG.rounds)
        assert again == 6
        for number in (3, again):
            for high in (HIGH, HIGH):
                await send_report(HOST, port, number, high)
        assert (await collect(HOST, port, again, POSITIONS)).reports[0] == 2
        with pytest.raises(Refused, match="number of positions"):
            await send_report(HOST, port, number_of(1, 2, CONFIG.rounds), HIGH)
        for number in (number_of(1, 1, CONFIG.rounds), 2):
            for high in (HIGH, HIGH):
                await send_report(HOST, port, number, high)
            await collect(HOST, port, number, POSITIONS)
        await asyncio.wait_for(task, 10)  # each round was told of in some attempt

    with_mixer(replace(CONFIG, attempts=2), scenario)


def test_files_that_are_no_certificates_are_refused(authority, tmp_path):
    certificate, key = authority.sign("some")
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for make in (
        lambda: listening(wrong, key),
        lambda: listening(certificate, wrong),
        lambda: listening(certificate, key, wrong),
        lambda: listening(tmp_path / "missing", key),
        lambda: connecting(wrong),
        lambda: connecting(authority.file, certificate),
        lambda: connecting(authority.file, certificate, wrong),
    ):
        with pytest.raises(BadInput, match=r"certificate|authority"):
            make()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"certificate": "a"}, "go together"),
        ({"key": "a"}, "go together"),
        ({"clients_ca": "a"}, "needs TLS"),
        ({"host": "10.0.0.1"}, "without encryption"),
        ({"attempts": 0}, "attempts"),
    ],
)
def test_a_mixer_that_would_be_open_is_refused(changes, words):
    with pytest.raises(BadInput, match=words):
        replace(CONFIG, **changes)


def test_with_tls_a_mixer_may_be_reached_from_elsewhere():
    made = MixerConfig(
        positions=1, minimum=1, expected=1, host="10.0.0.1", certificate="a", key="b"
    )
    assert not made.exposed
