"""Shadow models: which records each trains on, whose noise is whose, and what is cached."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.audit.audit_folder import AuditCache
from fedveil.audit.membership import ShadowModels, ShadowRunner, select_records
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.plan import unprotected
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.privacy.sampling import Everyone, FixedSize
from fedveil.training.gradients.modes import Mode
from fedveil.training.server import SgdServer
from fedveil.training.session import Training, train
from fedveil.training.work import ClientDpSgd, OneGradient

CLIENTS, FEATURES = 6, 5


def federation(sizes=(4, 5, 6, 7, 8, 9), features=FEATURES, seed=0):
    random = np.random.default_rng(seed)
    clients = [
        (f"{k}", random.normal(size=(size, features)), random.integers(3, size=size))
        for k, size in enumerate(sizes)
    ]
    test = random.normal(size=(20, features)), random.integers(3, size=20)
    return FederatedData.from_clients(clients, test=test, classes=3)


def plain(data=None, rounds=4, mode=Mode.VECTORISED):
    data = federation() if data is None else data
    torch.manual_seed(0)
    task = Task(nn.Linear(data.x.shape[1], 3), cross_entropy)
    plan = unprotected(Everyone(), data.clients, rounds=rounds)
    work = OneGradient()
    return Training(task, data, plan, work, server=SgdServer(0.5), mode=mode, workers=1)


def private(data, epsilon=None, rounds=4):
    """DP-SGD at an epsilon, or with a noise multiplier of 2, which is found sooner."""
    plan = dp_sgd(
        *(FixedSize(data.clients // 2), data.clients, 1.0),
        rate=0.5,
        steps=2,
        rounds=rounds,
        budget=Budget(float("inf") if epsilon is None else epsilon, 1e-5),
        multiplier=2.0 if epsilon is None else None,
    )
    torch.manual_seed(0)
    task = Task(nn.Linear(data.x.shape[1], 3), cross_entropy)
    work = ClientDpSgd(plan.noisy_steps, lr=1.0)
    return Training(task, data, plan, work, mode=Mode.VECTORISED, workers=1)


def test_every_record_is_in_one_of_each_pair_and_every_client_in_both():
    shadow_models = ShadowModels(plain(), 20, seed=1)
    inside, data = shadow_models.inside, shadow_models.training.data
    assert inside.shape == (40, data.records)
    assert (inside[::2] != inside[1::2]).all()
    owners = np.repeat(np.arange(CLIENTS), data.sizes)
    sizes = np.array([np.bincount(owners[each], minlength=CLIENTS) for each in inside])
    assert (np.abs(2 * sizes - data.sizes) <= 1).all()
    odd = data.sizes % 2 == 1
    assert (sizes[:, odd].min(axis=0) < sizes[:, odd].max(axis=0)).all()


def test_coins_are_fair_and_each_pairs_own():
    """400 pairs: a record is in the first as often as not (false alarm 1e-6 over all), no twins."""
    inside = ShadowModels(plain(), 400).inside[::2]
    assert np.abs(inside.mean(axis=0) - 0.5).max() < 5.7 / 40
    assert len(np.unique(inside, axis=0)) == 400
    other = ShadowModels(plain(), 400, seed=1).inside[::2]
    assert (inside != other).mean() == pytest.approx(0.5, abs=0.05)


def test_a_training_has_its_own_records_and_nobody_elses():
    shadow_models = ShadowModels(plain(), 2)
    data = shadow_models.training.data
    for number in range(4):
        half, mask = shadow_models.training_of(number).data, shadow_models.inside[number]
        assert half.clients == CLIENTS
        for k in range(CLIENTS):
            own = slice(data.offsets[k], data.offsets[k + 1])
            mine = slice(half.offsets[k], half.offsets[k + 1])
            np.testing.assert_array_equal(half.x[mine], data.x[own][mask[own]])
            np.testing.assert_array_equal(half.y[mine], data.y[own][mask[own]])
        np.testing.assert_array_equal(half.test_x, data.test_x)


def test_no_two_trainings_share_their_noise_nor_the_runs():
    training = private(federation((20,) * 6))
    shadow_models = ShadowModels(training, 8)
    seeds = {shadow_models.training_of(number).streams.seed for number in range(16)}
    assert len(seeds) == 16
    assert training.streams.seed not in seeds
    whole = replace(shadow_models.training_of(0), data=training.data)
    assert whole.streams.seed != training.streams.seed
    assert not seeds & {
        ShadowModels(training, 8, seed=1).training_of(n).streams.seed for n in range(16)
    }


@pytest.mark.parametrize("mode", [Mode.VECTORISED, Mode.LOOPED])
def test_losses_are_those_of_trainings_one_by_one(mode):
    """Together or alone, in one process or two: the models are those of the trainings."""
    shadow_models = ShadowModels(plain(mode=mode), 3)
    losses = shadow_models.model_losses(ShadowRunner(1))
    data = shadow_models.training.data
    assert losses.shape == (6, data.records + 20)
    for number in range(6):
        alone = shadow_models.training_of(number)
        start = alone.start().params.clone()
        *_, last = train(alone)
        alone.task.parameters.copy_(start)
        outputs = alone.task.answers(last.state.params, torch.from_numpy(data.x)).double()
        wanted = nn.functional.cross_entropy(outputs, torch.from_numpy(data.y), reduction="none")
        assert losses[number, : data.records] == pytest.approx(wanted.numpy(), rel=1e-4)
    assert ShadowModels(plain(mode=mode), 3).model_losses(ShadowRunner(2)) == pytest.approx(
        losses, rel=1e-4
    )


def test_what_is_kept_is_not_trained_again(tmp_path, monkeypatch):
    told = []
    with AuditCache.locked_in(tmp_path / "out", {"seed": 0}) as cache:
        first = ShadowModels(plain(), 2).model_losses(
            ShadowRunner(1, cache), lambda done, of: told.append((done, of))
        )
    assert told[-1] == (4, 4)
    (tmp_path / "out" / "losses-0002.npy").write_bytes(b"torn")
    train = ShadowModels.train_models
    numbers = []
    monkeypatch.setattr(
        ShadowModels,
        "train_models",
        lambda self, which: numbers.extend(which) or train(self, which),
    )
    with AuditCache.locked_in(tmp_path / "out", {"seed": 0}) as cache:
        again = ShadowModels(plain(), 3).model_losses(ShadowRunner(1, cache))
    assert numbers == [2, 4, 5]
    assert again[:4] == pytest.approx(first, rel=1e-6)


def test_clients_with_one_record_are_refused():
    with pytest.raises(BadInput, match=r"client '2' has one record.*halves"):
        ShadowModels(plain(federation((4, 5, 1, 4, 4, 4))), 2)


def test_select_records_are_those_marked():
    data = federation((2, 2, 2, 2, 2, 2))
    inside = np.tile([True, False], 6)
    half = select_records(data, inside)
    assert half.sizes.tolist() == [1] * 6
    np.testing.assert_array_equal(half.x, data.x[::2])
