"""The inverse questions: safe, and close to the best answer."""

import math

import pytest

from fedveil.base.checks import MOST_ROUNDS
from fedveil.base.errors import BadInput, UnsupportedEvent
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.calibration import least_noise, rate_for, sampled_gaussian
from fedveil.privacy.accounting.claims import Accountant, Relation
from fedveil.privacy.accounting.composition import epsilon, rounds_within
from fedveil.privacy.accounting.events import (
    FixedSampled,
    Gaussian,
    GaussianWithCurator,
    PoissonSampled,
)

ADD_REMOVE, REPLACE = Relation.ADD_REMOVE, Relation.REPLACE
CASES = [
    pytest.param(Gaussian, 1, 1.0, ADD_REMOVE, Accountant.PLD, id="one"),
    pytest.param(Gaussian, 500, 0.3, Relation.ZERO_OUT, Accountant.PLD, id="many"),
    pytest.param(Gaussian, 20, 5.0, REPLACE, Accountant.RDP, id="rdp"),
    pytest.param(
        lambda m: GaussianWithCurator(Gaussian(m), Gaussian(8.0), 30),
        20,
        4.0,
        REPLACE,
        Accountant.PLD,
        id="curator",
    ),
    pytest.param(
        lambda m: GaussianWithCurator(Gaussian(m), Gaussian(2.0), 3),
        50,
        9.0,
        REPLACE,
        Accountant.RDP,
        id="curator-rdp",
    ),
    pytest.param(
        lambda m: PoissonSampled(0.05, Gaussian(m)),
        100,
        2.0,
        ADD_REMOVE,
        Accountant.PLD,
        id="pld",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda m: PoissonSampled(0.5, Gaussian(m)),
        10,
        4.0,
        ADD_REMOVE,
        Accountant.RDP,
        id="poi-rdp",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda m: PoissonSampled(0.3, Gaussian(m)), 5, 1.0, REPLACE, Accountant.PLD, id="replace"
    ),
    pytest.param(
        lambda m: FixedSampled(50, 100, Gaussian(m)),
        20,
        3.0,
        REPLACE,
        Accountant.RDP,
        id="fixed",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("make", "count", "target", "relation", "accountant"), CASES)
def test_noise_meets_its_target_and_one_percent_less_does_not(
    make, count, target, relation, accountant
):
    noise = least_noise(make, count, Budget(target, 1e-5), relation, accountant)
    assert epsilon(make(noise), count, 1e-5, relation, accountant) <= target
    assert epsilon(make(0.99 * noise), count, 1e-5, relation, accountant) > target


REFERENCE = [
    (30 / 2400, 300, 1e-5, 1, 1.147),
    pytest.param(30 / 2400, 300, 1e-5, 3, 0.749, marks=pytest.mark.slow),
    pytest.param(30 / 2400, 300, 1e-5, 8, 0.540, marks=pytest.mark.slow),
    pytest.param(30 / 3383, 1000, 1e-5, 1, 1.299, marks=pytest.mark.slow),
    pytest.param(30 / 3383, 1000, 1e-5, 3, 0.780, marks=pytest.mark.slow),
    pytest.param(30 / 3383, 1000, 1e-5, 8, 0.568, marks=pytest.mark.slow),
    (0.1, 100, 1e-4, 1, 3.380),
    (0.1, 100, 1e-4, 3, 1.495),
    pytest.param(0.1, 100, 1e-4, 8, 0.862, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("rate", "rounds", "delta", "target", "noise"), REFERENCE)
def test_reference_table_of_noises(rate, rounds, delta, target, noise):
    def make(m):
        return PoissonSampled(rate, Gaussian(m))

    found = least_noise(make, rounds, Budget(target, delta), ADD_REMOVE)
    assert found == pytest.approx(noise, rel=0.01)


@pytest.mark.parametrize(
    ("target", "row"),
    [
        (10, [0.455, 0.644, 0.789, 0.911, 1.115, 1.288, 1.577, 2.230]),
        (20, [0.269, 0.381, 0.467, 0.539, 0.660, 0.762, 0.933, 1.320]),
        (30, [0.202, 0.285, 0.349, 0.403, 0.494, 0.570, 0.698, 0.988]),
    ],
)
def test_reference_table_of_plain_gaussians(target, row):
    for count, noise in zip((1, 2, 3, 4, 6, 8, 12, 24), row, strict=True):
        found = least_noise(Gaussian, count, Budget(target, 1e-4), ADD_REMOVE)
        assert found == pytest.approx(noise, rel=3e-3)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_target_that_is_no_epsilon_is_refused(target):
    with pytest.raises(BadInput, match="epsilon"):
        least_noise(Gaussian, 1, Budget(target, 1e-5), ADD_REMOVE)
    with pytest.raises(BadInput, match="epsilon"):
        rate_for(1.0, 1, Budget(target, 1e-5), ADD_REMOVE)


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan])
def test_rounds_refuse_a_target_that_is_no_epsilon(target):
    with pytest.raises(BadInput, match="epsilon"):
        rounds_within(Gaussian(1.0), target, 1e-5, ADD_REMOVE)


def test_least_noise_is_two_hundredths():
    assert least_noise(Gaussian, 1, Budget(1e5, 1e-5), ADD_REMOVE) == 0.02
    assert epsilon(Gaussian(0.02), 1, 1e-5, ADD_REMOVE) <= 1e5


def test_noise_above_a_hundred_thousand_is_refused():
    with pytest.raises(BadInput, match="fewer rounds or a larger epsilon"):
        least_noise(Gaussian, 10**6, Budget(1e-3, 1e-9), ADD_REMOVE)


@pytest.mark.parametrize(
    ("make", "target", "delta"),
    [
        (Gaussian, 1e9, 1e-5),
        (Gaussian, 1e-12, 1e-12),
        pytest.param(
            lambda m: PoissonSampled(0.1, Gaussian(m)), 1.0, 1e-17, marks=pytest.mark.slow
        ),
    ],
    ids=["huge", "tiny", "delta"],
)
def test_extreme_question_is_answered_or_refused(make, target, delta):
    try:
        noise = least_noise(make, 2, Budget(target, delta), ADD_REMOVE)
    except BadInput:
        return
    assert epsilon(make(noise), 2, delta, ADD_REMOVE) <= target


# --- rate ---


@pytest.mark.parametrize(
    ("noise", "count", "target", "accountant"),
    [
        pytest.param(1.1, 200, 2.0, Accountant.PLD, marks=pytest.mark.slow),
        (2.0, 10, 1.0, Accountant.PLD),
        (1.5, 50, 3.0, Accountant.RDP),
    ],
)
def test_rate_meets_its_target_and_one_percent_more_does_not(noise, count, target, accountant):
    rate = rate_for(noise, count, Budget(target, 1e-5), ADD_REMOVE, accountant)
    assert 0 < rate < 1

    def at(q):
        event = PoissonSampled(q, Gaussian(noise))
        return epsilon(event, count, 1e-5, ADD_REMOVE, accountant)

    assert at(rate) <= target
    assert at(1.01 * rate) > target


def test_rate_is_one_when_everyone_may_join():
    assert rate_for(100.0, 1, Budget(1.0, 1e-5), ADD_REMOVE) == 1
    assert epsilon(Gaussian(100.0), 1, 1e-5, ADD_REMOVE) <= 1


def test_a_rate_above_one_is_refused():
    with pytest.raises(BadInput, match="a probability in"):
        sampled_gaussian(1.5, 1.0)


def test_noise_that_no_rate_can_save_is_refused():
    with pytest.raises(BadInput, match="raise the noise or ask for fewer rounds"):
        rate_for(0.02, 1000, Budget(1.0, 1e-9), ADD_REMOVE)


# --- rounds ---


@pytest.mark.parametrize(
    ("event", "target", "relation", "accountant"),
    [
        (Gaussian(5.0), 2.0, ADD_REMOVE, Accountant.PLD),
        (Gaussian(5.0), 2.0, REPLACE, Accountant.RDP),
        (PoissonSampled(0.05, Gaussian(1.2)), 2.0, ADD_REMOVE, Accountant.PLD),
        (PoissonSampled(0.5, Gaussian(3.0)), 0.15, ADD_REMOVE, Accountant.PLD),
        pytest.param(
            PoissonSampled(0.2, Gaussian(2.0)),
            3.0,
            ADD_REMOVE,
            Accountant.RDP,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            FixedSampled(10, 100, Gaussian(2.0)),
            4.0,
            REPLACE,
            Accountant.RDP,
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_rounds_fit_and_one_more_does_not(event, target, relation, accountant):
    rounds = rounds_within(event, target, 1e-5, relation, accountant)
    if rounds:
        assert epsilon(event, rounds, 1e-5, relation, accountant) <= target
    assert epsilon(event, rounds + 1, 1e-5, relation, accountant) > target


def test_rounds_are_zero_when_not_even_one_fits():
    assert rounds_within(Gaussian(0.1), 1.0, 1e-5, ADD_REMOVE) == 0
    assert rounds_within(Gaussian(0.0), 1.0, 1e-5, ADD_REMOVE) == 0


def test_rounds_end_at_a_million():
    assert rounds_within(Gaussian(1e9), 1.0, 1e-5, ADD_REMOVE) == MOST_ROUNDS
    assert rounds_within(Gaussian(1.0), math.inf, 1e-5, ADD_REMOVE) == MOST_ROUNDS


def test_epsilon_met_exactly_is_within():
    event = Gaussian(5.0)
    target = epsilon(event, 7, 1e-5, ADD_REMOVE)
    assert rounds_within(event, target, 1e-5, ADD_REMOVE) == 7


@pytest.mark.parametrize("count", range(1, 40))
def test_a_closed_form_that_the_guess_meets_exactly_is_calibrated(count):
    """The guess is then the root itself, and rounding puts it on either side."""
    found = least_noise(Gaussian, count, Budget(2.0, 1e-4), Relation.REPLACE)
    spent = epsilon(Gaussian(found), count, 1e-4, Relation.REPLACE, Accountant.PLD)
    assert 0.999 * 2.0 < spent <= 2.0


def test_an_accountant_that_does_not_know_the_event_is_refused():
    with pytest.raises(UnsupportedEvent, match="PURE has no entry for"):
        least_noise(Gaussian, 10, Budget(1.0, 1e-6), Relation.REPLACE, Accountant.PURE)
