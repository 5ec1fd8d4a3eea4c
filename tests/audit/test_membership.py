"""Membership by reference models: found where a model remembers, lost under record-level DP."""

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.attacks.adversary import ReportAttack
from fedveil.audit.findings import Attack
from fedveil.audit.membership import Membership, ShadowModels, ShadowRunner, curves_of
from fedveil.base.errors import BadInput
from fedveil.data.federated import FederatedData
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.privacy.plan import unprotected
from fedveil.privacy.sampling import Everyone
from fedveil.training.cohort import Batches
from fedveil.training.gradients.modes import Mode
from fedveil.training.session import Training
from fedveil.training.work import ClientSgd
from tests.audit.test_shadow_models import federation, plain, private

RECORDS = 8000


def noise_labels(records, features, clients=20, seed=0):
    """Labels at random: whatever a model knows of them it remembers."""
    return federation((records // clients,) * clients, features, seed)


def overfitted(records=400, clients=10, rounds=5):
    data = noise_labels(records, 60, clients)
    torch.manual_seed(0)
    task = Task(nn.Linear(60, 3), cross_entropy)
    plan = unprotected(Everyone(), clients, rounds=rounds)
    work = ClientSgd(Batches(0, epochs=5), 0.5)
    return Training(task, data, plan, work, mode=Mode.VECTORISED, workers=1)


def test_an_overfitted_model_tells_its_members():
    leaks = list(Membership(6, runner=ShadowRunner(1)).leaks(overfitted(), None))
    assert [leak.what.split(":")[0] for leak in leaks] == [
        *("LiRA", "LiRA, offline", "RMIA", "RMIA, offline")
    ]
    for leak in leaks:
        auc = leak.measures[0]
        assert leak.attack == Attack.MEMBERSHIP
        assert leak.claim is None
        assert auc.name == "AUC"
        assert auc.value > 0.65
        assert auc.low > 0.6


def test_record_level_privacy_leaves_nothing_to_tell():
    """Epsilon 1, 8,000 members and as many others: 0.03 is five standard errors."""
    training = private(noise_labels(RECORDS, 8), 1.0)
    shadow_models = ShadowModels(training, 3)
    found = curves_of(shadow_models.model_losses(ShadowRunner(1)), shadow_models.inside)
    for way, roc in found.items():
        assert len(roc.member_scores) == len(roc.others) == RECORDS
        assert roc.auc.value == pytest.approx(0.5, abs=0.03), way


def test_the_number_of_references_with_a_record_says_nothing():
    """Losses at random: nothing is found, however few references there are (five sigmas)."""
    shadow_models = ShadowModels(plain(noise_labels(RECORDS, 1)), 3)
    losses = np.random.default_rng(5).gamma(1.0, size=(6, RECORDS + 20))
    for roc in curves_of(losses, shadow_models.inside).values():
        sigma = (roc.auc.high - roc.auc.low) / 3.92
        assert abs(roc.auc.value - 0.5) < 5 * sigma


def test_members_are_scored_by_the_model_that_trained_on_them():
    """A loss that is lower in the model with the record, by a margin: everything is found."""
    shadow_models = ShadowModels(plain(), 3)
    records = shadow_models.training.data.records
    losses = np.ones((6, records + 20))
    losses[:, :records] -= 0.5 * shadow_models.inside
    losses += 0.01 * np.random.default_rng(0).random(losses.shape)
    for roc in curves_of(losses, shadow_models.inside).values():
        assert roc.auc.value == 1.0


@pytest.mark.parametrize("references", [3, 2, 0, -4, 7])
def test_too_few_or_odd_references_are_refused(references):
    with pytest.raises(BadInput, match=f"--references is {references}: an even number from 4"):
        Membership(references)


def test_a_run_with_an_attack_of_its_own_is_refused():
    attacked_run = Training(
        *(plain().task, federation(), plain().plan, plain().work),
        participants=ReportAttack(lambda round, ids, reports: reports),
    )
    with pytest.raises(BadInput, match="leave out --attacks membership"):
        next(Membership(4).leaks(attacked_run, None))


def test_a_model_that_diverged_is_refused():
    data = FederatedData.from_clients(
        [(f"{k}", np.full((4, 2), 1e30), [0, 1, 2, 0]) for k in range(3)],
        test=([[1e30, 1e30]] * 4, [0, 1, 2, 0]),
        classes=3,
    )
    with pytest.raises(BadInput, match="diverged"):
        list(Membership(4, runner=ShadowRunner(1)).leaks(plain(data), None))
