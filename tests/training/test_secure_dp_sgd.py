"""DP-SGD with noise that may be published: exact sums, and rows that depend on one record alone.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.grid import delta_of_sampler
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import MOST_RECORDS, NoisySteps
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.privacy.sampling import Everyone
from fedveil.privacy.secure import KERNELS, planned_for, with_secure_noise
from fedveil.training import work as works
from fedveil.training.cohort import Batch, CohortData
from fedveil.training.gradients import per_example
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.session import Training, train
from fedveil.training.work import ClientDpSgd, poisson_batch
from tests.asking import batch_of

ALARM = 1e-6
SECURE = Streams(5, secure=True)
MODELS = ("softmax", "linear", "mlp", "fu-cnn", "small-cnn", "vgg")
CLIP = Clip(0.1)


def slots_of(index, mask):
    """A batch of one client with a record in each place that is used."""
    return Batch(torch.tensor(index)[None, :], torch.tensor(mask, dtype=torch.float32)[None, :])


def exact_sum(task, data, client, index, mask, grid, clip=CLIP):
    cohort = CohortData(data, np.array([client]))
    looped = gradients_of(task, Mode.LOOPED, data)
    trajectory = looped.trajectory(task.parameters, cohort, spanned=False)
    return trajectory.clipped_sum_on_grid(None, slots_of(index, mask), clip, grid)


def grid_of(task, multiplier=1.0, clip=CLIP):
    return GaussianMechanism(multiplier).grid(multiplier * clip.value, task.size)


# --- sums ---


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in ("vgg", "fu-cnn") else []) for n in MODELS],
)
def test_a_record_moves_the_sum_by_its_own_row_exactly(make_family, name):
    """Emptying a slot takes one row on the grid away, and no bit of any other."""
    task, data = make_family(name, (5, 2, 3))
    grid = grid_of(task)
    index, mask = [3, 0, 1, 4, 2, 0, 0], [1, 1, 1, 1, 1, 0, 0]
    whole = exact_sum(task, data, 0, index, mask, grid)
    assert whole.dtype is torch.float64
    assert grid.holds(whole)
    for slot in range(5):
        without = [0 if k == slot else used for k, used in enumerate(mask)]
        alone = [1 if k == slot else 0 for k in range(len(mask))]
        rest = exact_sum(task, data, 0, index, without, grid)
        own = exact_sum(task, data, 0, index, alone, grid)
        assert torch.equal(whole - rest, own)
        assert 0 < float(own.norm()) <= CLIP.value


@pytest.mark.parametrize("name", ["softmax", "mlp", "small-cnn"])
@pytest.mark.parametrize("clip", [CLIP, Clip(100.0)])
def test_the_exact_sum_is_the_clipped_sum_up_to_the_grid(make_family, name, clip):
    """Gradients that are shorter than the clip stay as they are."""
    task, data = make_family(name, (5, 2, 3))
    cohort, grid = CohortData(data, np.array([0])), grid_of(task, clip=clip)
    trajectory = gradients_of(task, Mode.LOOPED, data).trajectory(
        task.parameters, cohort, spanned=False
    )
    batch = slots_of([3, 0, 1, 4, 2], [1, 0, 1, 1, 1])
    exact = trajectory.clipped_sum_on_grid(None, batch, clip, grid)
    about = trajectory.clipped_sum(None, batch, clip)[0].double()
    room = 4 * grid.spacing * math.sqrt(task.size) + 1e-5 * float(about.norm())
    assert float((exact - about).norm()) <= room


def test_without_a_record_the_sum_is_zero(make_family):
    task, data = make_family("softmax", (5, 2, 3))
    assert not exact_sum(task, data, 0, [1, 2, 3], [0, 0, 0], grid_of(task)).any()


def test_a_record_that_is_not_finite_counts_as_nothing(make_family):
    task, data = make_family("softmax", (5, 2, 3))
    x = data.x.copy()
    x[2] = 3e38
    bad = replace(data, x=x)
    index = [0, 1, 2, 3]
    grid = grid_of(task)
    found = exact_sum(task, bad, 0, index, [1, 1, 1, 1], grid)
    others = exact_sum(task, bad, 0, index, [1, 1, 0, 1], grid)
    assert float((found - others).norm()) <= CLIP.value
    assert bool(torch.isfinite(found).all())


# --- rows that depend on more than their record ---


@pytest.mark.parametrize("leak", ["other slots", "the slot", "the count"])
def test_rows_that_depend_on_more_than_their_record_are_computed_one_by_one(
    make_family, monkeypatch, leak
):
    """A change in the last two bits is enough: the trial sees it."""
    task, data = make_family("softmax", (5, 2, 3))
    sizes, whole = [], per_example.ClippedExamples._slot_gradients

    def leaking(self, flat, x, y, *keys):
        sizes.append(len(y))
        found, change = whole(self, flat, x, y, *keys), torch.zeros(len(y))
        if leak == "other slots":
            change += x.mean().sign()
        elif leak == "the slot":
            change[3:] = 1.0
        elif len(y) > 1:
            change += 1.0 if len(y) < 256 else 0.0
        scale = 1 + 2**-22 * change
        return {
            name: replace(g, errors=g.errors * scale.view(-1, *[1] * (g.errors.ndim - 1)))
            for name, g in found.items()
        }

    monkeypatch.setattr(per_example.ClippedExamples, "_slot_gradients", leaking)
    examples = gradients_of(task, Mode.LOOPED, data).examples
    assert examples._sizes == ((256,) if leak == "the count" else (1,))
    index, mask, grid = [0, 1, 2, 3], [1, 1, 1, 1], grid_of(task)
    total = exact_sum(task, data, 0, index, mask, grid)
    if leak != "the count":
        assert sizes[-4:] == [1, 1, 1, 1]
    parts = [
        exact_sum(task, data, 0, index, [1 if k == slot else 0 for k in range(4)], grid)
        for slot in range(4)
    ]
    assert torch.equal(total, sum(parts))


def test_pieces_have_the_sizes_that_were_tried(make_family, monkeypatch):
    """They fill a piece, or leave less than a quarter of it empty."""
    task, data = make_family("softmax", (310, 2, 3))
    examples = gradients_of(task, Mode.LOOPED, data).examples
    assert set(examples._sizes) <= {256, 128, 64, 32, 16, 8}
    examples.__dict__["_sizes"] = (256, 128, 64, 32)
    sizes, whole = [], per_example.ClippedExamples._slot_gradients

    def counting(self, flat, x, y, *keys):
        sizes.append(len(y))
        return whole(self, flat, x, y, *keys)

    monkeypatch.setattr(per_example.ClippedExamples, "_slot_gradients", counting)
    x, y = torch.from_numpy(data.x[:310].copy()), torch.from_numpy(data.y[:310].copy())
    for count, expected in (
        (300, [256, 32, 32]),
        (310, [256, 64]),
        (200, [256]),
        (190, [128, 64]),
        (20, [32]),
        (1, [32]),
        (0, []),
    ):
        sizes.clear()
        examples.sum_on_grid(task.parameters, x[:count], y[:count], CLIP, grid_of(task))
        assert sizes == expected


@pytest.mark.parametrize("name", ["softmax", "mlp", "small-cnn"])
def test_a_record_s_row_is_the_same_whatever_its_place_and_its_batch(make_family, name):
    """Not in the first or the last of the slots, and not beside any other number of records."""
    task, data = make_family(name, (150, 2, 3))
    grid = grid_of(task)
    alone = exact_sum(task, data, 0, [7], [1], grid)
    for count, place in ((20, 0), (20, 19), (70, 33), (65, 64), (150, 149)):
        others = [k for k in range(150) if k != 7][: count - 1]
        index = [*others[:place], 7, *others[place:]]
        rest = exact_sum(task, data, 0, others, [1] * len(others), grid)
        assert torch.equal(exact_sum(task, data, 0, index, [1] * count, grid) - rest, alone)


class Words(torch.nn.Module):
    """Sums of words that occur several times, and a linear layer used on each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(40, 6, padding_idx=3)
        self.each, self.out = torch.nn.Linear(6, 5), torch.nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.each(self.words(x))).sum(dim=1))


def test_words_that_occur_twice_count_once_with_their_sum():
    task = fv.Task(Words(), fv.cross_entropy)
    random = np.random.default_rng(2)
    x = random.integers(5, size=(40, 6))
    data = fv.FederatedData(
        x, random.integers(2, size=40), np.array([0, 40]), x[:1] + 20, np.array([0]), 2
    )
    clip = Clip(100.0)
    grid = grid_of(task, clip=clip)
    whole = exact_sum(task, data, 0, list(range(40)), [1] * 40, grid, clip)
    gradients = gradients_of(task, Mode.LOOPED, data)
    kinds = gradients.examples._slot_gradients(
        task.parameters, torch.from_numpy(x[:4]), torch.from_numpy(data.y[:4])
    )
    assert {type(g).__name__ for g in kinds.values()} == {
        "EmbeddingGradients",
        "FullGradients",
        "OuterProducts",
    }
    trajectory = gradients.trajectory(
        task.parameters, CohortData(data, np.array([0])), spanned=False
    )
    about = trajectory.clipped_sum(None, slots_of(list(range(40)), [1] * 40), clip)[0].double()
    assert float((whole - about).norm()) <= 1e-4 * float(about.norm())
    fine = grid_of(task, clip=Clip(0.01))
    rows = [exact_sum(task, data, 0, [k], [1], fine, Clip(0.01)) for k in range(40)]
    assert all(0.0099 <= float(row.norm()) <= 0.01 for row in rows)


def test_a_long_input_and_a_short_error_do_not_overflow(make_family):
    """A product of theirs is clipped, though neither could be scaled by itself in float32."""
    task, data = make_family("softmax", (5, 2, 3))
    x = data.x.copy()
    x[0], x[1] = x[0] * 1e-37, x[1] * 1e30
    small = replace(data, x=x)
    grid = grid_of(task)
    for record in (0, 1):
        own = exact_sum(task, small, 0, [record], [1], grid)
        assert bool(torch.isfinite(own).all())
        assert 0 < float(own.norm()) <= CLIP.value


# --- batches ---


def batches(data, rate, count, client=0, nominal=None):
    noisy = NoisySteps(rate, 1, 1.0, nominal=nominal)
    cohort = CohortData(data, np.array([client]))
    return [poisson_batch(noisy, cohort, 1, step, SECURE) for step in range(count)]


def test_records_join_with_the_rate(make_family):
    _, data = make_family("softmax", (8, 2))
    joined = np.zeros(8)
    for batch in batches(data, 0.25, 4000, nominal=8):
        records = batch.index[0].numpy()[batch.mask[0].numpy() > 0]
        assert len(set(records.tolist())) == len(records)
        joined[records] += 1
    for count in joined:
        assert stats.binomtest(int(count), 4000, 0.25).pvalue > ALARM / 8


def test_batches_and_noise_repeat_nothing(make_family):
    _, data = make_family("softmax", (40, 2))
    noisy = NoisySteps(0.5, 1, 1.0)
    cohort = CohortData(data, np.array([0]))
    first, second = (poisson_batch(noisy, cohort, 1, 0, SECURE) for _ in range(2))
    assert first.index.tolist() != second.index.tolist()


# --- noise ---


def secure_plan(data, parameters, *, steps=2, rate=0.5, multiplier=3.0, nominal=None):
    plan = dp_sgd(
        Everyone(),
        data.clients,
        CLIP.value,
        rate=rate,
        steps=steps,
        nominal=nominal,
        rounds=2,
        budget=planned_for(Budget(math.inf, 1e-5)),
        multiplier=multiplier,
    )
    return with_secure_noise(plan, parameters, diagnostics=False)


def one_client(task, data):
    """What a round asks of the first client."""
    cohort, gradients = CohortData(data, np.array([0])), gradients_of(task, Mode.LOOPED, data)
    return batch_of(1, task.parameters, cohort, CLIP, gradients, SECURE)


def test_each_step_adds_noise_of_its_own_on_the_grid(make_family, monkeypatch):
    """Two steps without a gradient: their sum has twice the variance of one."""
    task, data = make_family("softmax", (6, 2))
    monkeypatch.setattr(
        per_example.ClippedExamples,
        "sum_on_grid",
        lambda self, flat, *rest: torch.zeros(len(flat), dtype=torch.float64),
    )
    updates = {}
    for steps in (1, 2):
        plan = secure_plan(data, task.size, steps=steps, multiplier=3.0)
        work = ClientDpSgd(plan.noisy_steps, lr=1.0)
        rows = []
        for _ in range(60):
            rows.append(work.updates(one_client(task, data)).rows[0].double().numpy() * 0.5 * 6)
        updates[steps] = np.concatenate(rows)
        expected = steps * (3.0 * CLIP.value) ** 2
        statistic = float((updates[steps] ** 2).sum() / expected)
        degrees = len(updates[steps])
        assert stats.chi2.sf(statistic, degrees) > ALARM
        assert stats.chi2.cdf(statistic, degrees) > ALARM


def test_released_sums_are_multiples_of_the_grid(make_family, monkeypatch):
    task, data = make_family("softmax", (6, 2))
    plan = secure_plan(data, task.size)
    from fedveil.training import work as works

    totals, whole = [], works.add_to_sum_

    def spying(mechanism, total, scale, keys):
        whole(mechanism, total, scale, keys)
        totals.append((mechanism.grid(scale, len(total)), total.clone()))

    monkeypatch.setattr(works, "add_to_sum_", spying)
    ClientDpSgd(plan.noisy_steps, lr=1.0).updates(one_client(task, data))
    assert len(totals) == 2
    for grid, total in totals:
        assert grid.holds(total)
        assert total.any()
    assert not torch.equal(totals[0][1], totals[1][1])


def test_rows_are_cut_to_the_grid_of_the_noise_and_of_no_coarser_one(make_family, monkeypatch):
    task, data = make_family("softmax", (6, 2))
    plan, used = secure_plan(data, task.size, multiplier=3.0), []
    whole = per_example.ClippedExamples.sum_on_grid

    def spying(self, flat, x, y, clip, grid, *keys):
        used.append((clip, grid))
        return whole(self, flat, x, y, clip, grid, *keys)

    monkeypatch.setattr(per_example.ClippedExamples, "sum_on_grid", spying)
    ClientDpSgd(plan.noisy_steps, lr=1.0).updates(one_client(task, data))
    assert used == [(CLIP, grid_of(task, 3.0))] * 2


# --- plans ---


def test_a_secure_plan_counts_every_step_and_names_what_it_assumes(make_family):
    task, data = make_family("softmax", (6, 2))
    few, many = (secure_plan(data, task.size, steps=steps).lines[0] for steps in (1, 64))
    assert KERNELS in few.assumptions
    assert few.vouched - many.vouched == pytest.approx(math.log(64), abs=0.01)
    counted = delta_of_sampler(64 * (task.size + 2**21), 2 * 2, 0.0)
    assert many.vouched <= math.log(many.slip / counted)


def test_clients_with_more_records_than_words_are_counted_for_are_refused(make_family, monkeypatch):
    """Nominal is no limit: a row depends on its record alone, however many there are."""
    task, data = make_family("softmax", (6, 2))
    plan = secure_plan(data, task.size, nominal=5)
    Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=0.1))
    assert MOST_RECORDS == 2**24
    monkeypatch.setattr("fedveil.training.agreement.MOST_RECORDS", 5)
    with pytest.raises(BadInput, match="has 6 records: with secure noise at most 5 are possible"):
        Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=0.1))


def test_secure_dp_sgd_trains(make_family):
    task, data = make_family("softmax", (60, 40, 50))
    plan = secure_plan(data, task.size, steps=5, multiplier=1.0)
    training = Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=0.5))
    rounds = list(train(training))
    assert [r.round for r in rounds] == [1, 2]
    assert rounds[-1].claim.noise == "secure"
    assert rounds[-1].claim.unit == "record"


# --- low bits ---


def released_bits(task, data, clients, rounds=400):
    """The lowest digits of what a secure round of DP-SGD makes of the model, and of its sums."""
    plan = secure_plan(data, task.size, steps=1, rate=1.0, multiplier=3.0, nominal=8)
    training = Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=1.0))
    begun, models, sums = training.start(), [], []
    whole = works.add_to_sum_

    def spying(mechanism, total, scale, keys):
        whole(mechanism, total, scale, keys)
        spacing = mechanism.grid(scale, len(total)).spacing
        sums.append((total / spacing).numpy().astype(np.int64))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(works, "add_to_sum_", spying)
        for _ in range(rounds):
            done = training.engine.run(training.round(1, np.array(clients), begun))
            models.append((begun.params + done.total.float()).numpy().view(np.int32))
    return np.array(models), np.array(sums)


@pytest.mark.slow
def test_low_bits_of_a_released_model_are_those_without_the_record(make_family):
    """A client of 6 records, and one of 5 of them. The digits of the sums are uniform as well."""
    task, data = make_family("softmax", (6, 5))
    x, y = data.x.copy(), data.y.copy()
    x[6:], y[6:] = x[:5], y[:5]
    data = replace(data, x=x, y=y)
    (models, sums), (fewer_models, fewer_sums) = (released_bits(task, data, [k]) for k in (0, 1))
    for modulus in (2, 16, 256):
        for one, other in ((models, fewer_models), (sums, fewer_sums)):
            counts = np.array(
                [np.bincount((a % modulus).ravel(), minlength=modulus) for a in (one, other)]
            )
            both = counts[:, counts.any(axis=0)]  # float32 has room for more digits than there are
            assert both.shape[1] == 1 or stats.chi2_contingency(both).pvalue > ALARM
        for each in (sums, fewer_sums):
            counts = np.bincount((each % modulus).ravel(), minlength=modulus)
            assert stats.chisquare(counts).pvalue > ALARM
    assert len(np.unique(models % 256)) > 60  # and they are digits that vary
