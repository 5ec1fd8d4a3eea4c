"""Dishonest members of a mixer: what they and the server learn together about an honest one."""

import asyncio

import numpy as np
import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.mixing.protocol import Refused, Status
from fedveil.privacy.accounting.events import Shuffled
from tests.contracts.enemies import FREE
from tests.mixing.loopback import POSITIONS, with_mixer
from tests.mixing.members import Federation

MEMBERS = 20
SECRET = np.array([1, 0, 0, 1, 1, 0], dtype=bool)
KNOWN = np.zeros(POSITIONS, dtype=bool)


def members(tmp_path):
    return Federation(tmp_path, tuple(f"site-{n}" for n in range(MEMBERS)))


def shuffled_plan(honest, dishonest):
    ranges = fv.releases.Ranges(
        0.0, 0.5, (POSITIONS,), adaptive=False, perturb=fv.releases.Perturb.UPDATE
    )
    counts = {"shuffled": honest, "dishonest": dishonest}
    return fv.two_point(
        fv.samplers.Everyone(), MEMBERS, ranges, epsilon=1.0, rounds=1, budget=FREE, **counts
    )


async def tried(conversation):
    """What came of it: the result, or why it was refused."""
    try:
        return await conversation
    except Refused as refused:
        return refused.status


def test_one_certificate_does_not_fill_a_round(tmp_path):
    """The server knows 19 of 20 reports, and would read the honest one from what is handed on."""
    sites = members(tmp_path)

    async def scenario(port, task):
        answers = [await tried(sites.send(port, "site-1", KNOWN)) for _ in range(MEMBERS - 1)]
        assert answers == [None] + [Status.REPEATED] * (MEMBERS - 2)
        await sites.send(port, "site-0", SECRET)
        await asyncio.sleep(1.0)
        assert await tried(sites.collect(port)) is Status.TOO_FEW

    with_mixer(sites.config(minimum=MEMBERS, deadline=0.5), scenario)


def test_a_restart_does_not_let_one_certificate_fill_a_round(tmp_path):
    """Each life of the mixer counts the dishonest one once, and the honest one in the last."""
    sites = members(tmp_path)

    async def again(port, task):
        await tried(sites.send(port, "site-1", KNOWN))

    async def last(port, task):
        await tried(sites.send(port, "site-0", SECRET))
        await asyncio.sleep(1.0)
        assert await tried(sites.collect(port)) in (Status.TOO_FEW, Status.FORGOTTEN)

    config = sites.config(minimum=3, deadline=0.5)
    for _ in range(3):
        with_mixer(config, again)
    with_mixer(config, last)


@pytest.mark.parametrize("dishonest", [0, 1, 3])
def test_beside_the_dishonest_a_round_has_the_honest_reports_that_the_claim_counts_on(
    tmp_path, dishonest
):
    """The smallest round that is handed on has `minimum` reports that the server does not know."""
    honest = 4
    plan = shuffled_plan(honest, dishonest)
    event = plan.lines[0].event
    assert isinstance(event, Shuffled)
    assert event.reports == honest
    needed = plan.release.channel.minimum
    assert needed == honest + dishonest
    sites = members(tmp_path)

    async def scenario(port, task):
        for number in range(dishonest):
            await sites.send(port, f"site-{number}", KNOWN, minimum=needed)
            await tried(sites.send(port, f"site-{number}", KNOWN, minimum=needed))
        for number in range(honest - 1):
            await sites.send(port, f"site-{MEMBERS - 1 - number}", SECRET, minimum=needed)
        assert await tried(sites.collect(port, minimum=needed)) is Status.OPEN
        await sites.send(port, f"site-{MEMBERS - honest}", SECRET, minimum=needed)
        found = await sites.collect(port, minimum=needed)
        assert found.report_counts[0] - dishonest == event.reports

    with_mixer(sites.config(minimum=needed, expected=needed), scenario)


def test_a_claim_says_how_many_clients_have_to_be_honest():
    def assumptions(*counts):
        claim = shuffled_plan(*counts).claims(1)[0]
        return claim, " ".join(claim.assumptions)

    alone, words = assumptions(10, 0)
    assert "at least 10 honest reports" in words
    assert "handed on with 10 reports or more" in words
    assert "none of the 20 clients sides with the server" in words
    tolerant, words = assumptions(10, 3)
    assert "at least 10 honest reports" in words
    assert "handed on with 13 reports or more" in words
    assert "at most 3 of the 20 clients side with the server" in words
    assert tolerant.epsilon == alone.epsilon  # for as many honest reports
    fewer, _ = assumptions(7, 3)
    assert fewer.epsilon > alone.epsilon


@pytest.mark.parametrize(("shuffled", "dishonest"), [(10, 11), (20, 1), (10, -1), (0, 1)])
def test_more_dishonest_clients_than_a_round_can_bear_are_refused(shuffled, dishonest):
    with pytest.raises(BadInput, match=r"dishonest is"):
        shuffled_plan(shuffled, dishonest)
