"""Central DP in shares: what each line claims, clients' coins, and plans that claim too much."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.accounting.composition import epsilon
from fedveil.privacy.accounting.events import Gaussian, PoissonSampled
from fedveil.privacy.clip_schedules import Fixed, Median, Poly, Quantile
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.releases.central import central
from fedveil.privacy.releases.central_sum import central_sum
from fedveil.privacy.releases.secure_sum import SecureSum, least_threshold
from fedveil.privacy.sampling import Everyone, FixedSize, OwnCoins, Poisson, RoundRobin
from fedveil.privacy.secure import planned_for, with_secure_noise

ALARM = 1e-6
BUDGET, FREE = Budget(2.0, 1e-5), Budget(math.inf, 1e-5)


def plan_of(sampler=None, clients=9, clip=None, **more):
    honest = more.pop("honest", clients)
    given = {
        "threshold": least_threshold(clients, honest),
        "rounds": 20,
        "budget": BUDGET,
        **more,
    }
    return central_sum(
        sampler or Poisson(0.25), clients, clip or Fixed(1.0), honest=honest, **given
    )


@pytest.mark.parametrize(("honest", "threshold", "divisor"), [(9, 5, 5), (9, 9, 9), (7, 7, 5)])
def test_each_line_is_the_event_that_its_observer_sees(honest, threshold, divisor):
    plan = plan_of(honest=honest, threshold=threshold)
    first, second = plan.lines
    z = plan.release.multiplier
    assert first.event == PoissonSampled(0.25, Gaussian(z))
    assert (first.trust, second.trust) == (Trust.SECURE_SUM, Trust.SITE)
    assert isinstance(second.event, PoissonSampled)
    assert second.event.event.multiplier == pytest.approx(z / math.sqrt(divisor))
    assert plan.release.report_noise == pytest.approx(z / math.sqrt(divisor))
    assert (first.reading, second.reading) == (False, True)
    for line in plan.lines:
        assert (line.unit, line.relation) == (Unit.CLIENT, Relation.ZERO_OUT)
        assert (line.per, line.share, line.cap, line.every) == (1, 1, None, 1)
        assert any("coin of its own" in text for text in line.assumptions)
    assert all("trusted" not in text for text in first.assumptions)
    plan.check_lines()
    assert plan.claims(20)[0].epsilon == pytest.approx(
        epsilon(first.event, 20, 1e-5, Relation.ZERO_OUT), rel=1e-6
    )
    assert plan.permitted == 20
    assert plan.release.channel == SecureSum(9, threshold, honest)
    assert plan.release.channel.minimum == threshold


def test_the_sum_costs_what_a_trusted_server_costs():
    trusted = central(Poisson(0.25), 9, Fixed(1.0), rounds=20, budget=BUDGET)
    plan = plan_of()
    assert plan.release.multiplier == trusted.release.multiplier
    assert plan.lines[0].claims(20)[0].epsilon == trusted.claims(20)[0].epsilon


def test_the_divisor_is_public_and_everybody_is_asked():
    plan = plan_of()
    assert plan.release.divisor(3.0, plan.expected_cohort) == 0.25 * 9
    assert plan.asked == 9
    assert list(plan.sampler.cohort(9, 4, Streams(0))) == list(range(9))
    assert not plan.secret_cohort


@pytest.mark.parametrize(
    ("sampler", "share", "cap", "asked"),
    [
        (FixedSize(6), 1, None, 6),
        (FixedSize(6, 15), 1, 15, 6),
        (RoundRobin(6), Fraction(2, 3), None, 6),
        (Everyone(), 1, None, 9),
        (Poisson(1.0), 1, None, 9),
    ],
)
def test_a_cohort_that_the_server_draws_is_not_amplified(sampler, share, cap, asked):
    plan = plan_of(sampler)
    plan.check_lines()
    assert plan.asked == plan.expected_cohort == asked
    for line in plan.lines:
        assert isinstance(line.event, Gaussian)
        assert (line.relation, line.share, line.cap) == (Relation.ZERO_OUT, share, cap)
        assert not any("secret" in text and "coin" in text for text in line.assumptions[3:])


def test_a_clip_s_bits_and_the_updates_are_one_joint_release():
    clip = Quantile(1.0, 0.5, noise=4.0)
    plan = plan_of(clip=clip, multiplier=3.0, budget=FREE)
    plan.check_lines()
    own = plan.release.multiplier
    assert own**-2 + (4.0 / 0.5) ** -2 == pytest.approx(3.0**-2)
    assert plan.lines[0].event == PoissonSampled(0.25, Gaussian(3.0))
    share = clip.statistic.share(plan.release.channel.divisor)
    alone = plan.release.report_noise**-2 + (share / 0.5) ** -2
    assert plan.lines[1].event.event.multiplier == pytest.approx(alone**-0.5)
    assert plan.release.settings(clip) == {}


def changed(plan, number=0, **changes):
    lines = list(plan.lines)
    lines[number] = replace(lines[number], **changes)
    return replace(plan, lines=tuple(lines))


def released(plan, **changes):
    return replace(plan, release=replace(plan.release, **changes))


WATCHED = Quantile(1.0, 0.5, noise=4.0)
CHANGED = {
    "half the noise": lambda: released(plan_of(), multiplier=plan_of().release.multiplier / 2),
    "shares for more honest clients": lambda: released(plan_of(), threshold=9),
    "shares for fewer dishonest clients": lambda: replace(
        plan_of(honest=7, threshold=9), lines=plan_of(honest=7).lines
    ),
    "another rate": lambda: replace(plan_of(), sampler=OwnCoins(0.5)),
    "a cohort of the server": lambda: replace(plan_of(Poisson(0.75)), sampler=Poisson(0.75)),
    "everybody contributes": lambda: replace(plan_of(), sampler=Everyone()),
    "amplified fixed cohorts": lambda: changed(
        plan_of(FixedSize(6)), event=PoissonSampled(0.1, plan_of(FixedSize(6)).lines[0].event)
    ),
    "a record": lambda: changed(plan_of(), unit=Unit.RECORD),
    "replacement": lambda: changed(plan_of(), relation=Relation.REPLACE),
    "local": lambda: changed(plan_of(), trust=Trust.LOCAL),
    "the weaker noise on the second line": lambda: changed(
        plan_of(), 1, event=plan_of().lines[0].event
    ),
    "no second line": lambda: replace(plan_of(), lines=plan_of().lines[:1]),
    "another number of clients": lambda: replace(plan_of(), population=10),
    "a clip that watches": lambda: replace(plan_of(), clip_schedule=WATCHED),
    "bits with less noise": lambda: replace(
        plan_of(clip=WATCHED), clip_schedule=replace(WATCHED, noise=2.0)
    ),
    "bits by randomised response": lambda: replace(
        plan_of(clip=WATCHED), clip_schedule=Quantile(1.0, 0.5, flip=1.0)
    ),
}


@pytest.mark.parametrize("what", CHANGED)
def test_plans_that_claim_more_than_they_do_are_refused(what):
    plan_of().check_lines()
    with pytest.raises(BadInput, match="accounts for"):
        CHANGED[what]().check_lines()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clients": 2, "threshold": 2}, "at least 3 are needed"),
        ({"threshold": 4}, "2 x 4 is not above 9"),
        ({"honest": 5, "threshold": 4}, "hold no honest site's noise"),
        ({"honest": 6, "threshold": 6}, "use at least 7"),
        ({"sampler": FixedSize(4)}, "a round asks 4 clients and threshold is 5"),
        ({"sampler": RoundRobin(3)}, "a round asks 3 clients"),
        ({"multiplier": 0.0}, "multiplier is 0"),
        ({"multiplier": 1e-3}, "contradict each other"),
        ({"clip": Quantile(1.0, 0.5, noise=0.1)}, "too small for the noise multiplier"),
        ({"clip": Quantile(1.0, 0.5, flip=1.0)}, "flip is for local DP"),
        ({"clip": Median(1.0, -3, 3, 5, Budget(1.0, 1e-6))}, "fixed, decaying or quantile"),
    ],
)
def test_what_protects_nobody_is_refused(wrong, message):
    with pytest.raises(BadInput, match=message):
        plan_of(**wrong)


def test_a_decaying_clip_goes_through_the_sum():
    plan_of(clip=Poly(1.0, 1.0, 20, 0.01)).check_lines()


def test_secure_claims_count_the_draws_of_all_clients():
    plan = plan_of(budget=planned_for(BUDGET), clip=WATCHED)
    secure = with_secure_noise(plan, 1000, diagnostics=False)
    secure.check_lines()
    first, second = secure.lines
    assert first.vouched < second.vouched
    # nine clients' shares, nine coins and nine bits, against one client's
    worth = math.exp(second.vouched - first.vouched)
    assert worth == pytest.approx((9 * 1001 + 9) / (1001 + 9), rel=1e-6)


def test_sums_that_would_not_be_exact_are_refused():
    many = plan_of(clients=2 * 10**6, multiplier=3.0, budget=planned_for(Budget(math.inf, 1e-9)))
    with pytest.raises(BadInput, match="at most 1,000,000 sites"):
        with_secure_noise(many, 1000, diagnostics=False)
    bits = plan_of(clip=WATCHED, multiplier=3.0, budget=planned_for(FREE))
    small = replace(bits, clip_schedule=replace(WATCHED, noise=1e-9))
    with pytest.raises(BadInput, match=r"bits: secure shares of it need 2\^16 steps"):
        with_secure_noise(small, 1000, diagnostics=False)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_coins_fall_with_the_rate(rate, secure):
    streams, ids = Streams(7, secure), np.arange(400)
    coins = np.stack([OwnCoins(rate).coins(ids, round, streams) for round in range(1, 251)])
    assert coins.shape == (250, 400)
    test = stats.binomtest(int(coins.sum()), coins.size, rate)
    assert test.pvalue > ALARM
    # rounds and clients differ: the counts spread as those of independent coins
    for counts, tries in ((coins.sum(axis=0), 250), (coins.sum(axis=1), 400)):
        spread = float(((counts - tries * rate) ** 2).sum() / (tries * rate * (1 - rate)))
        assert ALARM < stats.chi2.sf(spread, len(counts)) < 1 - ALARM


def test_a_seeded_coin_is_the_client_s_own():
    """It follows from seed, round and client, whoever is computed with it."""
    coins = OwnCoins(0.5)
    together = coins.coins(np.arange(50), 3, Streams(1))
    alone = [coins.coins(np.array([k]), 3, Streams(1))[0] for k in range(50)]
    assert list(together) == alone
    assert list(together) != list(coins.coins(np.arange(50), 4, Streams(1)))
    assert list(together) != list(coins.coins(np.arange(50), 3, Streams(2)))


def test_a_secure_coin_falls_again_at_each_call():
    coins, ids, streams = OwnCoins(0.5), np.arange(200), Streams(1, secure=True)
    assert list(coins.coins(ids, 3, streams)) != list(coins.coins(ids, 3, streams))


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan, 1e-13])
def test_rates_that_are_none_are_refused(rate):
    with pytest.raises(BadInput, match="rate"):
        OwnCoins(rate)


def test_a_rate_of_one_has_no_coin():
    assert OwnCoins(1.0).coins(np.arange(5), 1, Streams(0)) is None
    assert OwnCoins(1.0).event(Gaussian(2.0), 5) == Gaussian(2.0)


def test_no_other_release_may_count_on_the_clients_coins():
    """The server's noise alone does not hide that a report is zero."""
    plan = central(Poisson(0.25), 9, Fixed(1.0), rounds=20, budget=BUDGET)
    with pytest.raises(BadInput, match="whose law nobody knows"):
        replace(plan, sampler=OwnCoins(0.25)).check_lines()
