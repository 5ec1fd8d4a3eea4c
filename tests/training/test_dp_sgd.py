"""DP-SGD in a client: example by example, Poisson batches, and nothing over the realised batch."""

import math

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import unprotected
from fedveil.privacy.release import NoisySteps
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.privacy.sampling import Everyone
from fedveil.training.cohort import Batch, CohortData
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.server import Weights
from fedveil.training.session import Training, train
from fedveil.training.work import Adam, ClientDpSgd, OneGradient, poisson_batch
from tests.asking import batch_of

STREAMS, ROUND = Streams(5), 2
FEW = {"fu-cnn": (2, 1), "small-cnn": (3, 1), "vgg": (2, 1)}
SMALL = (7, 1, 4)


def example_gradient(task, params, x, y):
    flat = params.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(task.losses(task.named(flat), x[None], y[None]).sum(), flat)
    return gradient.double()


def bounded_by_hand(task, params, x, y, mask, clip):
    """One example after the other, each scaled to the clip if it is longer."""
    total = torch.zeros(task.size, dtype=torch.float64)
    for xi, yi, real in zip(x, y, mask, strict=True):
        if real:
            gradient = example_gradient(task, params, xi, yi)
            total += gradient * min(1.0, clip.value / float(gradient.norm()))
    return total


def clipped_sum(task, data, cohort, mode, params, mask, clip):
    walk = gradients_of(task, mode, data).trajectory(task.parameters, cohort, spanned=False)
    return walk.clipped_sum(params - task.parameters, Batch(None, mask), clip)


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", ["softmax", "linear", "mlp", "fu-cnn", "small-cnn", "vgg"])
def test_examples_are_bounded_one_by_one(make_family, name):
    """The clip is the median norm, so that some gradients are cut and some are not."""
    task, data = make_family(name, FEW.get(name, SMALL))
    cohort = CohortData(data, np.arange(data.clients))
    torch.manual_seed(1)
    params = task.parameters + 0.05 * torch.randn(data.clients, task.size)
    mask = torch.from_numpy(np.arange(cohort.x.shape[1]) < cohort.sizes[:, None]).float()
    norms = [
        float(example_gradient(task, params[0], cohort.x[0, k], cohort.y[0, k]).norm())
        for k in range(cohort.sizes[0])
    ]
    clip = Clip(float(np.mean(norms)))
    assert min(norms) < clip.value < max(norms)
    sums = [clipped_sum(task, data, cohort, mode, params, mask, clip) for mode in Mode]
    for k in range(data.clients):
        expected = bounded_by_hand(task, params[k], cohort.x[k], cohort.y[k], mask[k], clip)
        for found in sums:
            assert relative(found[k], expected) < 1e-5


@pytest.mark.parametrize("mode", Mode)
def test_a_sum_over_nobody_is_zero(task, data, mode):
    cohort = CohortData(data, np.arange(data.clients))
    params = task.parameters.expand(len(cohort), -1)
    mask = torch.zeros(cohort.y.shape)
    assert not clipped_sum(task, data, cohort, mode, params, mask, Clip(1.0)).any()


@pytest.mark.parametrize("mode", Mode)
def test_one_record_moves_a_sum_by_at_most_the_bound(make_data, task, mode):
    data = make_data(sizes=(6,))
    cohort, clip = CohortData(data, np.array([0])), Clip(0.01)
    params = task.parameters[None]
    whole, without = torch.ones(1, 6), torch.tensor([[1.0, 1, 1, 0, 1, 1]])
    moved = [clipped_sum(task, data, cohort, mode, params, m, clip) for m in (whole, without)]
    assert 0.99 * clip.value < float((moved[0] - moved[1]).norm()) <= clip.value * (1 + 1e-6)


@pytest.mark.parametrize("mode", Mode)
def test_a_record_whose_gradient_is_not_finite_counts_as_zero(make_family, mode):
    task, data = make_family("linear", (3, 2))
    cohort = CohortData(data, np.arange(2))
    cohort.x[0, 1] = 3e38
    params = task.parameters + torch.ones(2, task.size)
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    found = clipped_sum(task, data, cohort, mode, params, mask, Clip(0.1))
    mask[0, 1] = 0
    cohort.x[0, 1] = 0.0
    assert torch.equal(found, clipped_sum(task, data, cohort, mode, params, mask, Clip(0.1)))


def work(rate=0.5, steps=1, lr=1.0, multiplier=0.0, nominal=None):
    return ClientDpSgd(NoisySteps(rate, steps, multiplier, nominal), lr)


def updates(task, data, made, ids=None, mode=Mode.VECTORISED, clip=1.0, start=None, round=ROUND):
    ids = np.arange(data.clients) if ids is None else np.asarray(ids)
    start = task.parameters if start is None else start
    cohort = CohortData(data, ids)
    gradients = gradients_of(task, mode, data)
    return made.updates(batch_of(round, start, cohort, Clip(clip), gradients, STREAMS))


def joined(made, data, ids, round=ROUND, step=0):
    """The records of each client's batch."""
    batch = poisson_batch(made.noisy, CohortData(data, np.asarray(ids)), round, step, STREAMS)
    return [
        index[mask.bool()].tolist() for index, mask in zip(batch.index, batch.mask, strict=True)
    ]


def test_records_join_with_the_rate(make_data):
    """200 clients x 100 steps x 3 records: 6 standard deviations, 2e-9, around the rate."""
    data, made = make_data(sizes=[3] * 200), work(rate=0.3)
    counts = np.zeros(3)
    for step in range(100):
        for records in joined(made, data, np.arange(200), step=step):
            counts[records] += 1
    spread = math.sqrt(0.3 * 0.7 / 20_000)
    assert (abs(counts / 20_000 - 0.3) < 6 * spread).all()


def test_records_join_independently_of_each_other(make_data):
    """Pairs join with rate^2, and batch sizes vary as a binomial does; 6 standard deviations."""
    data, made = make_data(sizes=[2] * 500), work(rate=0.5)
    both = sum(
        len(records) == 2 for s in range(20) for records in joined(made, data, range(500), step=s)
    )
    assert abs(both / 10_000 - 0.25) < 6 * math.sqrt(0.25 * 0.75 / 10_000)


def test_batches_do_not_depend_on_the_chunk(data):
    made = work()
    together = joined(made, data, range(data.clients))
    assert [joined(made, data, [k])[0] for k in range(data.clients)] == together
    assert joined(made, data, range(data.clients), step=1) != together
    assert joined(made, data, range(data.clients), round=ROUND + 1) != together


def test_rate_one_is_everyone_and_padding_never_joins(data):
    whole = joined(work(rate=1.0), data, range(data.clients))
    assert [sorted(records) for records in whole] == [list(range(n)) for n in data.sizes]
    for step in range(20):
        for records, n in zip(joined(work(), data, range(5), step=step), data.sizes, strict=True):
            assert all(record < n for record in records)


def by_hand(task, data, made, client, clip=1.0):
    """The whole of a client's work, in float64 but for its noise."""
    start = task.parameters.double()
    params, n = start.clone(), int(data.sizes[client])
    rows = slice(data.offsets[client], data.offsets[client + 1])
    x, y = torch.from_numpy(data.x[rows]), torch.from_numpy(data.y[rows])
    for step in range(made.noisy.steps):
        (records,) = joined(made, data, [client], step=step)
        mask = torch.zeros(n)
        mask[records] = 1
        total = bounded_by_hand(task, params.float(), x, y, mask, Clip(clip))
        noise = torch.zeros(1, task.size)
        keys = STREAMS.keys("step-noise", ROUND, [client], step)
        GaussianMechanism(1.0).add_(noise, np.array([made.noisy.multiplier * clip]), keys)
        params = params - made.lr * (total + noise[0].double()) / (
            made.noisy.rate * (made.noisy.nominal or n)
        )
    return params - start


@pytest.mark.parametrize("nominal", [None, 20])
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", ["softmax", "mlp", "small-cnn"])
def test_a_clients_work_is_dp_sgd_by_hand(make_family, name, mode, nominal):
    """The divisor is rate x n, n public or nominal, whatever batch was drawn."""
    task, data = make_family(name, FEW.get(name, SMALL))
    made = work(steps=2, lr=0.3, multiplier=0.1, nominal=nominal)
    rows = updates(task, data, made, mode=mode, clip=0.5).rows
    for client in range(data.clients):
        assert relative(rows[client], by_hand(task, data, made, client, clip=0.5)) < 1e-5


def by_torch(task, noisy, made):
    """Where torch.optim goes on the noisy gradients of `made` in the order they were met."""
    flat = task.parameters.clone().requires_grad_()
    if made.adam is None:
        optimiser = torch.optim.SGD(
            [flat], lr=made.lr, momentum=made.momentum, weight_decay=made.weight_decay
        )
    else:
        betas, floor = (made.adam.beta1, made.adam.beta2), made.adam.floor
        optimiser = torch.optim.AdamW(
            [flat], lr=made.lr, betas=betas, eps=floor, weight_decay=made.weight_decay
        )
    for gradient in noisy:
        flat.grad = gradient + made.proximal * (flat.detach() - task.parameters)
        optimiser.step()
    return flat.detach() - task.parameters


@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.9},
        {"momentum": 0.5, "weight_decay": 0.1, "proximal": 2.0},
        {"adam": Adam(0.8, 0.95, 1e-2)},
        {"weight_decay": 0.1, "proximal": 2.0, "adam": Adam(floor=1e-2)},
    ],
    ids=["momentum", "all-of-sgd", "adam", "all-of-adam"],
)
def test_steps_are_made_of_noisy_gradients_and_of_nothing_else(task, data, changes):
    """Records that never join leave noise alone, which is the same wherever a client is."""
    steps = [work(1e-9, n, 1.0, 1e-9).noisy for n in range(5)[1:]]
    before, noisy = torch.zeros(data.clients, task.size), []
    for each in steps:
        here = updates(task, data, ClientDpSgd(each, 1.0)).rows
        noisy.append(before - here)
        before = here
    made = ClientDpSgd(steps[-1], 0.3, **changes)
    rows = updates(task, data, made).rows
    for client in range(data.clients):
        expected = by_torch(task, [gradient[client] for gradient in noisy], made)
        assert relative(rows[client], expected) < 1e-4


def test_the_divisor_is_not_the_realised_batch(make_data, task):
    """Without noise, with gradients much longer than the clip: the length is batch C / (p n)."""
    data = make_data(sizes=[8] * 30)
    data.x[:] = data.x[0]
    data.y[:] = data.y[0]
    made = work(lr=1.0)
    lengths = updates(task, data, made, clip=1e-3).rows.double().norm(dim=1)
    batches = torch.tensor([len(r) for r in joined(made, data, range(30))], dtype=torch.float64)
    assert len(set(batches.tolist())) > 3
    assert torch.allclose(lengths, batches * 1e-3 / (0.5 * 8), rtol=1e-4)


def test_an_empty_batch_is_a_step_of_noise(make_data, task):
    """2000 x 21 draws: the sample deviation is within 3 % except with probability 1e-15."""
    data, made = make_data(sizes=[4] * 2000), work(rate=1e-9, lr=1e-9, multiplier=3.0)
    assert not any(joined(made, data, range(2000)))
    rows = updates(task, data, made, clip=0.5).rows
    noise = rows.double() / made.lr * (1e-9 * 4)
    assert abs(float(noise.std()) / (3.0 * 0.5) - 1) < 0.03
    assert abs(float(noise.mean())) < 6 * 1.5 / math.sqrt(noise.numel())


def test_noise_is_added_in_every_step(make_data, task):
    """Four steps of pure noise have twice the deviation of one."""
    data = make_data(sizes=[1] * 1000)
    one, four = (
        float(updates(task, data, work(1e-9, steps, 1e-9, 1.0)).rows.double().std())
        for steps in (1, 4)
    )
    assert four / one == pytest.approx(2.0, rel=0.05)


def test_rows_do_not_depend_on_the_chunk(data, task):
    made = work(steps=3, multiplier=1.0)
    together = updates(task, data, made).rows
    for client in range(data.clients):
        assert relative(updates(task, data, made, [client]).rows[0], together[client]) < 1e-6


def test_work_starts_from_the_model_received(data, task):
    made, before = work(steps=2, multiplier=0.1), task.parameters.clone()
    here = updates(task, data, made).rows
    there = updates(task, data, made, start=torch.randn(task.size)).rows
    assert not torch.allclose(here, there)
    assert torch.equal(task.parameters, before)
    far = updates(task, data, work(steps=1, lr=1e-3), start=torch.full((task.size,), 50.0)).rows
    assert float(far.norm(dim=1).max()) < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"nominal": 0}, "nominal is 0"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(BadInput, match=message):
        work(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"proximal": math.nan}, "proximal is nan"),
        ({"adam": True}, "adam is True: use Adam"),
        ({"momentum": 0.5, "adam": Adam()}, "momentum has no effect on adam"),
    ],
)
def test_steps_that_are_refused(arguments, message):
    with pytest.raises(BadInput, match=message):
        ClientDpSgd(NoisySteps(0.5, 1, 1.0), 0.1, **arguments)


def plan_for(data, nominal=None, rounds=2):
    return dp_sgd(
        Everyone(),
        data.clients,
        0.5,
        rate=0.5,
        steps=2,
        nominal=nominal,
        rounds=rounds,
        budget=Budget(math.inf, 1e-3),
        multiplier=1.0,
    )


def test_the_mean_is_weighted_by_examples(task, data):
    made = work(steps=2, multiplier=1.0)
    training = Training(task, data, plan_for(data), made, weights=Weights.EXAMPLES)
    start = task.parameters.clone()
    first = next(iter(train(training)))
    cohort = CohortData(data, np.arange(data.clients))
    gradients, streams = gradients_of(task, Mode.VECTORISED, data), training.streams
    rows = made.updates(batch_of(1, start, cohort, Clip(0.5), gradients, streams)).rows
    sizes = torch.from_numpy(data.sizes).double()
    mean = (rows.double() * sizes[:, None]).sum(0) / sizes.sum()
    assert torch.allclose(first.state.params.double(), start + mean, rtol=1e-5, atol=1e-6)


def test_a_nominal_size_and_weights_by_examples_contradict_each_other(task, data):
    """Neighbours differ in a record, and the weights would tell how many there are."""
    made = work(steps=2, multiplier=1.0, nominal=5)
    with pytest.raises(BadInput, match=r"weights is 'examples'"):
        Training(task, data, plan_for(data, nominal=5), made, weights=Weights.EXAMPLES)
    Training(task, data, plan_for(data, nominal=5), made)


def test_dp_sgd_and_its_plan_go_together(task, data):
    with pytest.raises(BadInput, match="go together"):
        Training(task, data, plan_for(data), OneGradient())
    with pytest.raises(BadInput, match="go together"):
        Training(task, data, unprotected(Everyone(), data.clients, rounds=1), work())


def test_a_model_that_died_does_not_stop_the_run(task, data):
    """Every gradient is NaN: the clients report noise, as they do for records that are gone."""
    training = Training(task, data, plan_for(data), work(steps=2, multiplier=1.0))
    task.parameters.fill_(math.nan)
    dead = training.start()
    dead.params.fill_(math.nan)
    done = training.engine.run(training.round(1, np.arange(data.clients), dead))
    assert bool(torch.isfinite(done.total).all())
    assert bool(done.total.all())


def test_delta_is_measured_against_the_number_of_records(task, data):
    plan = dp_sgd(
        Everyone(),
        data.clients,
        1.0,
        rate=0.5,
        steps=1,
        rounds=1,
        budget=Budget(math.inf, 1 / (data.clients + 0.5)),
        multiplier=1.0,
    )
    with pytest.raises(BadInput, match="records"):
        Training(task, data, plan, ClientDpSgd(plan.noisy_steps, 0.1))
