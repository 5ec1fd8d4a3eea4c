"""What a schedule may learn from clients: cut, flipped and noised by us, whoever wrote it.

Statistical tests use fixed seeds and a false-alarm rate of 1e-6 each.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import Clip
from fedveil.privacy.clip_schedules import ClipSchedule, Lengths
from fedveil.privacy.clip_statistic import ClipStatistic
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.sampling import Everyone
from tests.asking import asked, next_state

ALARM = 1e-6
BITS = ClipStatistic(
    *(3, 0.7, "marks", "marks", "clip.marks", 1.0, "raise it"),
    nonnegative=False,
    noise=2.0,
    every=2,
)
COUNTS = replace(BITS, nonnegative=True, every=1)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"norm_bound": 0.0},
            {"norm_bound": 1.5},
            {"norm_bound": math.nan},
            {"width": 0},
            {"every": 0},
        ),
        *({"noise": -1.0}, {"noise": math.nan}, {"noise": math.inf}, {"flip": math.inf}),
        *({"flip": 1.0}, {"width": 1, "flip": 1.0}),
    ],
)
def test_what_cannot_be_watched_is_refused(changes):
    with pytest.raises(BadInput, match="marks"):
        replace(BITS, **changes)


@pytest.mark.parametrize("watched", [BITS, COUNTS], ids=["any", "counts"])
def test_no_two_rows_are_further_apart_than_accounted(watched):
    """Rows of all lengths and signs, as long as float64 allows, infinite and no numbers."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(60, 3, generator=draw, dtype=torch.float64)
    rows *= 10.0 ** torch.linspace(-9, 9, 60, dtype=torch.float64)[:, None]
    rows = torch.cat([rows, -rows, torch.eye(3) * 0.7, -0.7 * torch.eye(3)])
    rows[5], rows[6] = math.inf, math.nan
    cut = watched.cut(rows, len(rows))
    assert float(cut.norm(dim=1).max()) <= watched.sensitivity(Relation.ZERO_OUT) == 0.7
    apart = (cut[:, None] - cut[None]).norm(dim=2)
    reach = watched.sensitivity(Relation.REPLACE)
    assert float(apart.max()) <= reach * (1 + 1e-12)
    assert float(apart.max()) > 0.99 * reach
    assert cut[5].tolist() == cut[6].tolist() == [0.0] * 3
    assert bool((cut >= 0).all()) is watched.nonnegative


def test_rows_that_are_short_enough_stay_as_they_are():
    rows = torch.tensor([[0.5, 0.0, 0.0], [0.1, 0.2, 0.3], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(COUNTS.cut(rows, 3), rows)


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (2, 3, 1)])
def test_rows_of_another_shape_are_refused(shape):
    with pytest.raises(BadInput, match="of 2 clients are rows of"):
        BITS.cut(torch.zeros(shape), 2)


def test_noise_of_the_sum_has_the_promised_size_and_is_new_each_time():
    keys = [Streams(1).keys(BITS.purpose, r, [0]) for r in range(3000)]
    noise = torch.stack([BITS.noisy(torch.zeros(3, dtype=torch.float64), k) for k in keys])
    assert stats.kstest(noise.numpy().ravel(), stats.norm(0, 2.0).cdf).pvalue > ALARM
    total = torch.ones(3, dtype=torch.float64)
    assert not torch.equal(BITS.noisy(total, keys[0]), total)
    assert total.tolist() == [1.0] * 3


def test_rounds_that_watch():
    assert [BITS.due(r) for r in range(1, 6)] == [True, False, True, False, True]


@pytest.mark.parametrize("word", ["noise", "client-noise", "client-bits", "cohort", "marks"])
def test_words_are_no_names_of_other_streams(word):
    assert replace(BITS, word=word).purpose == f"watched {word}"


class Odd(ClipSchedule):
    """Watches numbers that are on no grid."""

    statistic = replace(COUNTS, every=2)

    def first_value(self):
        return 1.0

    def clip(self, value, round):
        return Clip(value)

    def client_statistic(self, lengths, round):
        return torch.stack([lengths.norms.sqrt(), lengths.norms.log1p(), lengths.norms], dim=1)

    def next_value(self, value, noisy, expected, round):
        return 1.0 + abs(float(noisy[0])) / expected


def lengths():
    norms = torch.linspace(0.01, 0.3, 8, dtype=torch.float64)
    return Lengths(norms, norms > 1)


def test_sums_of_odd_numbers_are_exact_under_secure_noise():
    """Noise on sums that were rounded is refused, so that rows must have been cut to its grid."""
    plan = PrivacyPlan(Everyone(), 8, 4, clip_schedule=Odd())
    secure = Streams(1, secure=True)
    rows = plan.client_statistic(
        lengths(), asked(plan, torch.zeros(1), np.arange(8), streams=secure)
    )
    model = torch.zeros(1)
    moved = next_state(plan, plan.first_state(model), rows.sum(dim=0), model, model, 1, secure)
    assert float(moved[0]) != 1.0
    raw = Odd().client_statistic(lengths(), 1)
    assert float((rows - raw).abs().max()) < 1e-5
    assert bool((rows.norm(dim=1) <= COUNTS.norm_bound).all())


def test_nothing_is_watched_and_nothing_moves_in_other_rounds():
    plan, model = PrivacyPlan(Everyone(), 8, 4, clip_schedule=Odd()), torch.zeros(1)
    rows = plan.client_statistic(lengths(), asked(plan, model, np.arange(8), round=2))
    assert not rows.any()
    full, before = torch.full((3,), 9.0, dtype=torch.float64), plan.first_state(model)
    assert torch.equal(next_state(plan, before, full, model, model, 2), before)
