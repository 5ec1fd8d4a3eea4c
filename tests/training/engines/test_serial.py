"""The local engine: mode and chunk change rounding, adversaries change at most one clip."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedveil.attacks.adversary import ReportAttack
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.models.zoo import build_task
from fedveil.privacy.clip_schedules import Fixed
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import unprotected
from fedveil.privacy.release import NoisySteps
from fedveil.privacy.sampling import Everyone
from fedveil.training.cohort import Batches
from fedveil.training.engines import mode_choice
from fedveil.training.engines.engine import Job
from fedveil.training.engines.mode_choice import fitting_chunk, multiplications
from fedveil.training.engines.serial import Serial, cut
from fedveil.training.gradients.modes import Mode
from fedveil.training.server import Weights
from fedveil.training.work import Adam, ClientDpSgd, ClientSgd, OneGradient
from tests.asking import asked

FAMILIES = ["softmax", "linear", "mlp", "small-cnn"]
CLIP = Fixed(0.05)


def engine_for(task, data, clip=None, **changes):
    parts = {
        "work": OneGradient(),
        "streams": Streams(1),
        "plan": unprotected(Everyone(), data.clients, rounds=9, schedule=clip),
        "weights": Weights.UNIFORM,
    }
    how = {name: changes.pop(name) for name in ("mode", "chunk") if name in changes}
    job = Job(task=task, data=data, **{**parts, **changes})
    return Serial(job, **{"mode": Mode.VECTORISED, "chunk": 100, **how})


def attacked_by(engine, adversary):
    return replace(engine, job=replace(engine.job, participants=ReportAttack(adversary)))


def run(engine, ids=None, round=1):
    ids = np.arange(engine.job.data.clients) if ids is None else np.array(ids)
    job = engine.job
    return engine.run(asked(job.plan, job.task.parameters, ids, round=round, streams=job.streams))


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("clip", [None, CLIP])
def test_modes_agree_on_whole_rounds(make_family, name, clip):
    task, data = make_family(name)
    work = ClientSgd(Batches(3, epochs=2), lr=0.05, momentum=0.9, weight_decay=0.01)
    vectorised, looped = (
        run(engine_for(task, data, work=work, clip=clip, mode=mode)) for mode in Mode
    )
    assert relative(vectorised.total, looped.total) < 1e-5
    assert vectorised.clipped_clients == looped.clipped_clients


def many_clients(make_data, count=30):
    return make_data(sizes=[1 + k % 7 for k in range(count)])


@pytest.mark.parametrize("weights", Weights)
def test_chunks_do_not_change_the_sum(make_data, task, weights):
    data = many_clients(make_data)
    engine = engine_for(task, data, mode=Mode.LOOPED, weights=weights)
    whole = run(engine)
    for chunk in (1, 7, 30):
        cut = run(replace(engine, chunk=chunk))
        assert relative(cut.total, whole.total) < 1e-12
        assert (cut.weight, cut.clients) == (whole.weight, whole.clients)


def test_chunks_do_not_change_vectorised_training_beyond_rounding(make_data, task):
    data = many_clients(make_data)
    work = ClientSgd(Batches(2, epochs=3), lr=0.3)
    engine = engine_for(task, data, work=work, clip=Fixed(0.5))
    whole, cut = run(engine), run(replace(engine, chunk=7))
    assert relative(cut.total, whole.total) < 1e-6
    assert cut.clipped_clients == whole.clipped_clients


def test_a_round_repeats_bit_for_bit(make_data, task):
    data = many_clients(make_data)
    engine = engine_for(task, data, work=ClientSgd(Batches(2, epochs=3), lr=0.3), chunk=7)
    assert torch.equal(run(engine).total, run(engine).total)


def test_uniform_weights_count_clients_and_examples_count_records(task, data):
    uniform, examples = (run(engine_for(task, data, weights=weights)) for weights in Weights)
    assert (uniform.weight, examples.weight) == (data.clients, data.sizes.sum())
    rows = torch.stack([run(engine_for(task, data), [k]).total for k in range(data.clients)])
    by_records = (rows * torch.from_numpy(data.sizes)[:, None]).sum(0)
    assert relative(uniform.total, rows.sum(0)) < 1e-6
    assert relative(examples.total, by_records) < 1e-6


def test_the_mean_by_examples_is_the_gradient_of_all_records(task, data):
    done = run(engine_for(task, data, weights=Weights.EXAMPLES))
    flat = task.parameters.clone().requires_grad_()
    loss = task.losses(task.named(flat), torch.from_numpy(data.x), torch.from_numpy(data.y)).mean()
    (gradient,) = torch.autograd.grad(loss, flat)
    assert relative(done.total / done.weight, -gradient.double()) < 1e-5


def test_an_empty_cohort_is_a_sum_of_zeros(task, data):
    done = run(engine_for(task, data, clip=CLIP), np.array([], dtype=np.int64))
    assert done.total.tolist() == [0] * task.size
    assert (done.clients, done.clipped_clients, done.refused, done.weight) == (0, 0, (), 0)


def replacing(client, report):
    """An adversary that is `client` and sends `report`."""

    def adversary(round, ids, reports):
        sent = list(reports)
        for k in np.flatnonzero(ids == client):
            sent[k] = report
        return sent

    return adversary


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_a_thousandfold_report_moves_the_sum_by_at_most_the_bound(task, data, chunk):
    torch.manual_seed(0)
    shout = torch.randn(task.size)
    shout *= 1000 * CLIP.value / shout.norm()
    engine = engine_for(task, data, clip=CLIP, chunk=chunk)
    without = run(attacked_by(engine, replacing(2, torch.zeros(task.size))))
    attacked = run(attacked_by(engine, replacing(2, shout)))
    moved = float((attacked.total - without.total).norm())
    assert 0.99 * CLIP.value < moved <= CLIP.value
    assert attacked.refused == ()


@pytest.mark.parametrize(
    "report",
    [torch.full((21,), torch.nan), torch.full((21,), torch.inf), torch.ones(20), torch.ones(22)],
    ids=["nan", "inf", "short", "long"],
)
@pytest.mark.parametrize("clip", [None, CLIP])
def test_bad_reports_count_as_zero_and_are_named(task, data, report, clip):
    assert task.size == 21
    engine = engine_for(task, data, clip=clip, chunk=2)
    attacked = run(attacked_by(engine, replacing(3, report)))
    without = run(engine, [0, 1, 2, 4])
    assert attacked.refused == (3,)
    assert attacked.clients == data.clients
    assert attacked.weight == data.clients - 1
    assert relative(attacked.total, without.total) < 1e-6


def test_a_refused_client_has_no_weight_by_examples(task, data):
    adversary = replacing(3, torch.full((21,), torch.nan))
    done = run(
        engine_for(task, data, weights=Weights.EXAMPLES, participants=ReportAttack(adversary))
    )
    assert done.weight == data.sizes.sum() - data.sizes[3]


def test_a_matrix_of_the_wrong_width_refuses_the_chunk(task, data):
    engine = engine_for(
        task, data, participants=ReportAttack(lambda round, ids, reports: reports[:, 1:])
    )
    done = run(engine)
    assert done.refused == tuple(range(data.clients))
    assert not done.total.any()


def test_the_adversary_sees_round_and_clients(task, data):
    seen = []

    def watching(round, ids, reports):
        seen.append((round, ids.tolist(), tuple(reports.shape)))
        return reports

    run(engine_for(task, data, participants=ReportAttack(watching), chunk=2), [0, 2, 4], round=9)
    assert seen == [(9, [0, 2], (2, 21)), (9, [4], (1, 21))]


class Remembers(Batches):
    """Batches that keep the sizes of clients they have seen: the next ones could depend on them."""

    def for_round(self, ids, sizes, round, streams, longest):
        self.__dict__.setdefault("seen", []).extend(sizes.tolist())
        return super().for_round(ids, sizes, round, streams, longest)


def test_a_part_of_the_work_that_keeps_something_of_a_client_is_refused(task, data):
    engine = engine_for(task, data, work=ClientSgd(Remembers(0, steps=1), lr=0.1))
    with pytest.raises(BadInput, match="changes when clients are computed"):
        run(engine)


def test_clipped_counts_clients(task, data):
    everyone = run(engine_for(task, data, clip=Fixed(1e-6)))
    nobody = run(engine_for(task, data, clip=Fixed(1e6)))
    assert (everyone.clipped_clients, nobody.clipped_clients) == (data.clients, 0)


def test_the_chunk_fits_memory_and_is_at_least_one(make_family, data, task):
    work = OneGradient()
    assert fitting_chunk(task, data, work, Mode.VECTORISED) == 4096
    large, images = make_family("small-cnn")
    assert 1 <= fitting_chunk(large, images, work, Mode.VECTORISED) < 4096
    assert fitting_chunk(large, images, work, Mode.VECTORISED, memory=1) == 1
    assert fitting_chunk(large, images, ClientSgd(Batches(1, epochs=99), 0.1), Mode.LOOPED) == 1


def test_looped_chunks_of_a_wide_model_leave_work_for_every_core(task, data, monkeypatch):
    monkeypatch.setattr(mode_choice, "_WIDE", 2)
    monkeypatch.setattr(mode_choice, "_WORK", 0)
    work = OneGradient()
    found = [fitting_chunk(task, data, work, Mode.LOOPED, cohort=n) for n in (1, 4, 9, 16.5, 1e6)]
    assert found == [1, 1, 2, 4, 8]


def test_looped_clients_with_little_to_do_are_handed_out_together(task, data):
    found = [fitting_chunk(task, data, OneGradient(), Mode.LOOPED, cohort=n) for n in (3, 100, 1e9)]
    assert found == [1, 25, 4096]


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(6, 3), (6,)),
        (nn.Linear(6, 3), (4, 6)),  # at four places
        (nn.Sequential(nn.Flatten(), nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 3)), (4, 6)),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(16, 3)), (1, 4, 6)),
    ],
)
def test_multiplications_are_those_that_pytorch_counts(module, shape):
    x = np.zeros((2, *shape), dtype=np.float32)
    y = np.zeros(2, np.int64)
    data = FederatedData.from_clients([("a", x, y)], test=(x, y), classes=3)
    task = Task(module, loss=cross_entropy)
    with FlopCounterMode(display=False) as counter:
        task.outputs(task.named(task.parameters.clone()), torch.tensor(x[:1]))
    assert multiplications(task, data) == max(task.size, counter.get_total_flops() // 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: ClientSgd(Batches(0, steps=1), 0.1, **more),
        lambda **more: ClientDpSgd(NoisySteps(0.5, 1, 1.0), 0.1, **more),
    ],
)
def test_adam_needs_memory_for_two_more_rows(make_family, make):
    """Where rows are nearly all there is, three quarters as many clients fit."""
    _, data = make_family("mlp")
    task = build_task("mlp", data.record_shape, data.classes, seed=1, hidden=(9000,))
    plain, adam = (
        fitting_chunk(task, data, make(**more), Mode.VECTORISED, memory=64)
        for more in ({}, {"adam": Adam()})
    )
    assert plain > 20
    assert adam == pytest.approx(plain * 6 / 8, abs=1)


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize("clients", [0, 1, 2, 7, 40])
def test_chunks_are_equally_long_and_the_largest_clients_come_first(chunk, clients):
    ids = np.arange(100, 100 + clients)
    sizes = np.random.default_rng(clients).integers(1, 9, clients)
    chunks = cut(ids, sizes, chunk)
    lengths = [len(c) for c in chunks]
    assert max(lengths, default=0) <= chunk
    assert max(lengths, default=0) - min(lengths, default=0) <= 1
    assert sorted(np.concatenate([*chunks, ids[:0]])) == ids.tolist()
    ordered = [int(sizes[c - 100]) for part in chunks for c in part]
    assert ordered == sorted(ordered, reverse=True)
