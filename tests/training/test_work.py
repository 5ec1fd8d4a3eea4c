"""Local work: against torch.optim client by client, and inside the ball."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedveil.base.errors import BadInput
from fedveil.models.zoo import build_task
from fedveil.privacy.clip import Clip, Clipped, Norm
from fedveil.privacy.noise.streams import Streams
from fedveil.training.cohort import Batch, Batches, CohortData
from fedveil.training.gradients.modes import Mode, Vectorised, gradients_of
from fedveil.training.reports import DualUpdates
from fedveil.training.work import Adam, ClientSgd, OneGradient
from tests.asking import batch_of

FAMILIES = ["softmax", "linear", "mlp", "small-cnn"]
STREAMS = Streams(5)
ROUND = 2


def updates(task, data, work, mode=Mode.VECTORISED, clip=None, ids=None, start=None):
    ids = np.arange(data.clients) if ids is None else np.asarray(ids)
    start = task.parameters if start is None else start
    cohort = CohortData(data, ids)
    gradients = gradients_of(task, mode, data)
    return work.updates(batch_of(ROUND, start, cohort, clip, gradients, STREAMS))


def records_of(data, client):
    rows = slice(data.offsets[client], data.offsets[client + 1])
    return torch.from_numpy(data.x[rows]), torch.from_numpy(data.y[rows])


def full_gradient(task, start, x, y):
    flat = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(task.losses(task.named(flat), x, y).mean(), flat)
    return gradient


def optimiser_of(work, flat):
    if work.adam is None:
        return torch.optim.SGD(
            [flat], lr=work.lr, momentum=work.momentum, weight_decay=work.weight_decay
        )
    betas = (work.adam.beta1, work.adam.beta2)
    return torch.optim.AdamW(
        [flat], lr=work.lr, betas=betas, eps=work.adam.floor, weight_decay=work.weight_decay
    )


def trained_by_torch(task, data, work, client):
    """One client's update by torch.optim, with the batches the client should see.

    The proximal term is part of the loss, as FedProx has it.
    """
    size = int(data.sizes[client])
    plan = work.batches.for_round(np.array([client]), np.array([size]), ROUND, STREAMS)
    x, y = records_of(data, client)
    flat = task.parameters.clone().requires_grad_()
    optimiser = optimiser_of(work, flat)
    for step in range(plan.steps):
        batch = plan.batch(step)
        index = torch.arange(batch.mask.shape[1]) if batch.index is None else batch.index[0]
        index = index[batch.mask[0].bool()]
        optimiser.zero_grad()
        loss = task.losses(task.named(flat), x[index], y[index]).mean()
        (loss + work.proximal / 2 * (flat - task.parameters).square().sum()).backward()
        optimiser.step()
    return flat.detach() - task.parameters


def assert_close(actual, expected, tolerance=2e-5):
    scale = float(expected.norm())
    assert float((actual - expected).norm()) <= tolerance * scale
    assert scale > 0


@pytest.fixture(params=FAMILIES)
def family(request, make_family):
    task, data = make_family(request.param)
    torch.manual_seed(3)
    task.parameters.add_(0.05 * torch.randn(task.size))
    return task, data


@pytest.mark.parametrize("mode", Mode)
def test_fedsgd_is_minus_the_gradient(family, mode):
    task, data = family
    rows = updates(task, data, OneGradient(), mode).rows
    for client in range(data.clients):
        expected = -full_gradient(task, task.parameters, *records_of(data, client))
        assert_close(rows[client], expected)


@pytest.mark.parametrize(
    "work",
    [
        ClientSgd(Batches(0, epochs=2), lr=0.1),
        ClientSgd(Batches(3, epochs=2), lr=0.05, momentum=0.9),
        ClientSgd(Batches(2, steps=4), lr=0.05, momentum=0.5, weight_decay=0.1),
        ClientSgd(Batches(3, epochs=2), lr=0.1, proximal=2.0),
        ClientSgd(Batches(2, epochs=2), lr=0.1, momentum=0.5, weight_decay=0.1, proximal=0.5),
        ClientSgd(Batches(3, epochs=2), lr=0.02, adam=Adam(0.8, 0.95, 1e-3)),
        ClientSgd(
            Batches(2, steps=4), lr=0.1, weight_decay=0.1, proximal=3.0, adam=Adam(floor=1e-2)
        ),
    ],
    ids=["full-batch", "momentum", "steps-decay", "proximal", "all-of-sgd", "adam", "all-of-adam"],
)
@pytest.mark.parametrize("mode", Mode)
def test_local_steps_are_torchs_for_each_ragged_client(family, mode, work):
    task, data = family
    rows = updates(task, data, work, mode).rows
    for client in range(data.clients):
        assert_close(rows[client], trained_by_torch(task, data, work, client))


def test_adam_begins_anew_in_every_round(task, data):
    """The first step is lr in every coordinate, whatever was computed with the same work before."""
    work = ClientSgd(Batches(0, steps=1), lr=0.1, adam=Adam(floor=1e-12))
    for _ in range(2):
        rows = updates(task, data, work).rows
        assert torch.allclose(rows.abs(), torch.full_like(rows, 0.1), rtol=1e-4)


class Ordinary(Vectorised):
    """Rows of parameters where coordinates would do."""

    def trajectory(self, start, cohort, *, spanned):
        return super().trajectory(start, cohort, spanned=False)


@pytest.mark.parametrize("clip", [None, Clip(0.3)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_proximal_term_is_the_same_in_the_span_of_the_records(make_data, momentum, clip):
    data = make_data(shape=(30,))
    task = build_task("softmax", (30,), data.classes, seed=1, hidden=())
    work = ClientSgd(Batches(3, epochs=3), lr=0.2, momentum=momentum, proximal=1.5)
    cohort, start = CohortData(data, np.arange(data.clients)), torch.randn(task.size)
    spanned, written_out = (
        work.updates(batch_of(ROUND, start, cohort, clip, way(task, data), STREAMS, only_sum=True))
        for way in (Vectorised, Ordinary)
    )
    assert isinstance(spanned, DualUpdates)
    rows = spanned.trajectory.update_rows(spanned.moved)
    assert_close(rows, written_out.rows)
    without = replace(work, proximal=0.0)
    other = without.updates(batch_of(ROUND, start, cohort, clip, Ordinary(task, data), STREAMS))
    assert not torch.allclose(rows, other.rows, rtol=1e-2)


@pytest.mark.parametrize("changes", [{"adam": Adam()}, {"weight_decay": 0.1}])
def test_steps_that_leave_the_span_are_written_out(make_data, changes):
    data = make_data(shape=(30,))
    task = build_task("softmax", (30,), data.classes, seed=1, hidden=())
    work = ClientSgd(Batches(0, epochs=1), lr=0.1, **changes)
    cohort, ways = CohortData(data, np.arange(data.clients)), Vectorised(task, data)
    done = work.updates(
        batch_of(ROUND, task.parameters, cohort, None, ways, STREAMS, only_sum=True)
    )
    assert isinstance(done, Clipped)


def test_one_full_batch_step_is_one_step_by_hand(task, data):
    rows = updates(task, data, ClientSgd(Batches(0, epochs=1), lr=0.3), ids=[3]).rows
    expected = -0.3 * full_gradient(task, task.parameters, *records_of(data, 3))
    assert_close(rows[0], expected, 1e-6)


def test_modes_agree_on_gradients_with_idle_clients(family):
    task, data = family
    cohort = CohortData(data, np.arange(data.clients))
    mask = torch.zeros(cohort.y.shape[:2])
    for k, size in enumerate(cohort.sizes[:-1]):
        mask[k, :size] = 1
    moved = 0.01 * torch.randn(len(cohort), task.size, generator=torch.Generator().manual_seed(2))
    for way in (None, moved):
        vectorised, looped = (
            gradients_of(task, mode, data)
            .trajectory(task.parameters, cohort, spanned=False)
            .mean_update(way, Batch(None, mask))
            for mode in Mode
        )
        assert_close(vectorised, looped)
        assert not vectorised[-1].any()
        assert not looped[-1].any()


def test_padding_is_never_learnt_from(make_data, task):
    """A short client beside a long one learns what it learns alone."""
    data = make_data(sizes=(2, 40))
    work = ClientSgd(Batches(0, epochs=3), lr=0.5)
    together, alone = updates(task, data, work), updates(task, data, work, ids=[0])
    assert_close(together.rows[0], alone.rows[0], 1e-6)


def test_local_work_leaves_the_rounds_model_alone(task, data):
    before = task.parameters.clone()
    updates(task, data, ClientSgd(Batches(0, epochs=2), lr=1.0), clip=Clip(0.1))
    assert torch.equal(task.parameters, before)


FAST = ClientSgd(Batches(2, epochs=3), lr=5.0)
WORKS = {
    "gradient": OneGradient(),
    "plain": FAST,
    "momentum": replace(FAST, momentum=0.9),
    "weight decay": replace(FAST, weight_decay=0.1),
    "proximal": replace(FAST, proximal=0.1),
    "adam": replace(FAST, adam=Adam()),
    "all of sgd": replace(FAST, momentum=0.9, weight_decay=0.1, proximal=0.1),
    "all of adam": replace(FAST, weight_decay=0.1, proximal=0.1, adam=Adam()),
}


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("kind", WORKS)
def test_updates_stay_inside_the_bound(task, data, kind, mode):
    clip = Clip(0.01)
    done = updates(task, data, WORKS[kind], mode, clip=clip)
    assert bool(done.clipped.all())
    assert float(done.rows.double().norm(dim=1).max()) <= clip.value


@pytest.mark.parametrize("kind", [kind for kind in WORKS if kind != "gradient"])
def test_every_step_is_projected_around_the_rounds_model(task, data, kind):
    """Far from the origin, so that a ball around the origin would show; step by step."""
    torch.manual_seed(1)
    start = 10 * torch.randn(task.size)
    clip, seen = Clip(0.2), []

    class Spying(Vectorised):
        def trajectory(self, start, cohort, *, spanned):
            walk = super().trajectory(start, cohort, spanned=spanned)
            mean = walk.mean_update

            def watched(moved, batch):
                nowhere = torch.zeros(len(cohort), walk.width)
                seen.append(
                    walk.update_rows(nowhere if moved is None else moved).double().norm(dim=1)
                )
                return mean(moved, batch)

            walk.mean_update = watched
            return walk

    cohort = CohortData(data, np.arange(data.clients))
    work = replace(WORKS[kind], lr=1.0)
    done = work.updates(batch_of(ROUND, start, cohort, clip, Spying(task, data), STREAMS))
    rounding = 1e-5 * float(start.norm())
    assert len(seen) > 10
    assert max(float(norms.max()) for norms in seen) <= clip.value + rounding
    assert max(float(norms.max()) for norms in seen[1:]) > 0.99 * clip.value
    assert float(done.rows.double().norm(dim=1).max()) <= clip.value


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("norm", Norm)
def test_every_gradient_is_clipped_in_the_clips_own_norm(task, data, norm, mode):
    """Step by step, by hand, for clients whose gradients are all too long."""
    work, clip = ClientSgd(Batches(0, steps=4), lr=0.5), 0.05
    whole = Clip(clip * work.reach(ROUND), norm, gradient=clip)
    done = updates(task, data, work, mode, whole)
    assert bool(done.clipped.all())
    for client in range(data.clients):
        x, y = records_of(data, client)
        here = task.parameters.clone()
        for _ in range(4):
            gradient = full_gradient(task, here, x, y)
            length = float(gradient.norm(p=1 if norm is Norm.L1 else 2))
            assert length > clip
            here -= 0.5 * clip / length * gradient
        assert_close(done.rows[client], here - task.parameters, 1e-4)


def test_projection_in_the_loop_is_not_projection_at_the_end(task, data):
    work, clip = ClientSgd(Batches(2, epochs=5), lr=1.0), Clip(0.2)
    inside = updates(task, data, work, clip=clip).rows
    after = clip.apply_(updates(task, data, work).rows).rows
    assert not torch.allclose(inside, after, rtol=1e-2)


def test_a_bound_that_is_never_reached_changes_nothing(task, data):
    work = ClientSgd(Batches(2, epochs=2), lr=0.1)
    clipped = updates(task, data, work, clip=Clip(1e3))
    assert torch.equal(clipped.rows, updates(task, data, work).rows)
    assert not clipped.clipped.any()


def test_clipped_names_the_clients_that_met_the_bound(task, data):
    norms = updates(task, data, OneGradient()).rows.norm(dim=1)
    clip = Clip(float(norms.median()))
    done = updates(task, data, OneGradient(), clip=clip)
    assert done.clipped.tolist() == (norms.double() > clip.value * (1 - 1e-6)).tolist()


@pytest.mark.parametrize("clip", [None, Clip(1.0)])
def test_a_client_that_diverges_keeps_its_row_for_the_server_to_refuse(make_family, clip):
    task, data = make_family("linear")
    start = task.parameters.clone().fill_(3e38)
    rows = updates(task, data, OneGradient(), clip=clip, start=start).rows
    assert not bool(torch.isfinite(rows).any(dim=1).all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"lr": 1.0, "momentum": 1.0}, "momentum is 1.0"),
        ({"lr": 1.0, "momentum": -0.1}, "momentum is -0.1"),
        ({"lr": 1.0, "weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"lr": 1.0, "weight_decay": float("nan")}, "weight_decay is nan"),
        ({"lr": 1.0, "proximal": -0.1}, "proximal is -0.1"),
        ({"lr": 1.0, "proximal": float("inf")}, "proximal is inf"),
        ({"lr": 1.0, "adam": 0.9}, "adam is 0.9: use Adam"),
        ({"lr": 1.0, "momentum": 0.9, "adam": Adam()}, "momentum has no effect on adam"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(BadInput, match=message):
        ClientSgd(Batches(0, epochs=1), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"beta2": -0.1}, "beta2 is -0.1"),
        ({"floor": 0.0}, "floor is 0.0"),
    ],
)
def test_what_adam_cannot_be(arguments, message):
    with pytest.raises(BadInput, match=message):
        Adam(**arguments)
