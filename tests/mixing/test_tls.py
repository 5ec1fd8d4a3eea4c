"""The mixer with TLS: who is talked to, and who is heard."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from fedveil.base.errors import BadInput
from fedveil.mixing.protocol import (
    Refused,
    Status,
    client_tls,
    collect,
    round_number,
    send_report,
    server_tls,
)
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
    tls = client_tls(authority.file)

    async def scenario(port, task):
        for high in (HIGH, ~HIGH):
            await send_report(HOST, port, 1, high, minimum=2, tls=tls)
        found = await collect(HOST, port, 1, POSITIONS, minimum=1, tls=tls)
        assert found.high_counts.tolist() == [1] * POSITIONS
        assert found.report_counts.tolist() == [2] * POSITIONS

    with_mixer(config, scenario)


def test_nobody_is_talked_to_whose_certificate_is_not_the_mixers(config, authority, other):
    named = authority.sign("elsewhere", host="10.0.0.1")
    expired = authority.sign("expired", days=-1.0)

    def scenario_of(context):
        async def scenario(port, task):
            await lost(send_report(HOST, port, 1, HIGH, minimum=1, tls=context))
            await lost(collect(HOST, port, 1, POSITIONS, minimum=1, tls=context))

        return scenario

    with_mixer(config, scenario_of(client_tls(other.file)))
    with_mixer(config, scenario_of(client_tls()))
    for certificate, key in (named, expired):
        wrong = replace(config, certificate=certificate, key=key)
        with_mixer(wrong, scenario_of(client_tls(authority.file)))


def test_a_mixer_with_tls_hears_nothing_in_the_clear_and_the_reverse(config, authority):
    async def clear(port, task):
        await lost(send_report(HOST, port, 1, HIGH, minimum=1))

    async def ciphered(port, task):
        await lost(send_report(HOST, port, 1, HIGH, minimum=1, tls=client_tls(authority.file)))

    with_mixer(replace(config, idle=1.0), clear)
    with_mixer(replace(CONFIG, idle=1.0), ciphered)


def test_attempts_at_a_round_are_mixed_apart():
    async def scenario(port, task):
        again = round_number(3, 1, CONFIG.rounds)
        assert again == 6
        for number in (3, again):
            for high in (HIGH, HIGH):
                await send_report(HOST, port, number, high, minimum=1)
        assert (await collect(HOST, port, again, POSITIONS, minimum=2)).report_counts[0] == 2
        with pytest.raises(Refused, match="not one of this mixer"):
            await send_report(HOST, port, round_number(1, 2, CONFIG.rounds), HIGH, minimum=1)
        for number in (round_number(1, 1, CONFIG.rounds), 2):
            for high in (HIGH, HIGH):
                await send_report(HOST, port, number, high, minimum=1)
            await collect(HOST, port, number, POSITIONS, minimum=2)
        await asyncio.wait_for(task, 60)  # each round was told of in some attempt

    with_mixer(replace(CONFIG, attempts=2), scenario)


def test_files_that_are_no_certificates_are_refused(authority, tmp_path):
    certificate, key = authority.sign("some")
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for make in (
        lambda: server_tls(wrong, key),
        lambda: server_tls(certificate, wrong),
        lambda: server_tls(certificate, key, wrong),
        lambda: server_tls(tmp_path / "missing", key),
        lambda: client_tls(wrong),
        lambda: client_tls(authority.file, certificate),
        lambda: client_tls(authority.file, certificate, wrong),
    ):
        with pytest.raises(BadInput, match=r"certificate|authority"):
            make()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"certificate": "a"}, "go together"),
        ({"key": "a"}, "go together"),
        ({"clients_ca": "a"}, "beside clients_ca"),
        ({"members": ("a",)}, "beside clients_ca"),
        ({"opened": "a"}, "beside clients_ca"),
        ({"host": "10.0.0.1"}, "on this machine only"),
        ({"attempts": 0}, "attempts"),
    ],
)
def test_a_mixer_that_would_be_open_is_refused(changes, words):
    with pytest.raises(BadInput, match=words):
        replace(CONFIG, **changes)
