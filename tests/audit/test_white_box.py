"""White-box membership: what each attacker sees, and that it stays out of what it must not know."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedveil.attacks.traces import ascended, gradients_at, losses_of, traces
from fedveil.audit import white_box
from fedveil.audit.halves import Halves
from fedveil.audit.kept import Kept
from fedveil.audit.white_box import ACTIVE, ATTACK, CLIENT, SERVER, WhiteBox, guessed, watched
from fedveil.errors import BadInput
from fedveil.privacy.accounting.claims import Trust
from fedveil.training.adversary import ReportAttack
from tests.audit.test_halves import federation, plain, private
from tests.audit.test_membership import noise_labels, overfitted


@pytest.fixture(scope="module")
def found():
    return WhiteBox(workers=1).curves(Halves(overfitted(), 1))


def test_all_attackers_find_what_an_overfitted_model_remembers(found):
    assert list(found) == [SERVER, CLIENT, ACTIVE]
    assert found[SERVER].auc.low > 0.7
    assert found[CLIENT].auc.value > 0.65
    assert found[ACTIVE].auc.low > 0.7


def test_the_server_sees_more_than_a_client(found):
    assert found[SERVER].auc.value > found[CLIENT].auc.value


def test_record_level_privacy_leaves_nothing_to_tell():
    """Epsilon 1, 4,000 members and as many others: 0.03 is four standard errors."""
    halves = Halves(private(noise_labels(4000, 8), 1.0, rounds=2), 1)
    for roc in WhiteBox(workers=1).curves(halves).values():
        assert roc.auc.value == pytest.approx(0.5, abs=0.03)


def test_traces_are_losses_and_products_by_layer():
    training = plain()
    data, task = training.data, training.task
    before = training.start().params
    after = before + 0.1 * torch.randn(task.size, generator=torch.Generator().manual_seed(1))
    rows = traces(task, before, (after, before), data.x[:4], data.y[:4])
    first, last = (losses_of(task, p, data.x[:4], data.y[:4]) for p in (before, after))
    assert rows.shape == (2, 4, 3 + 3 * 2)
    assert rows[0, :, 0] == pytest.approx(last)
    assert rows[0, :, 1] == pytest.approx(first - last)
    for k in range(4):
        leaf = before.clone().requires_grad_()
        x, y = torch.from_numpy(data.x[k : k + 1]), torch.from_numpy(data.y[k : k + 1])
        task.loss(x @ leaf[:15].view(3, 5).T + leaf[15:], y).sum().backward()
        for layer, part in enumerate((slice(0, 15), slice(15, 18))):
            gradient, step = leaf.grad[part], (after - before)[part]
            along = -float(gradient @ step)
            assert rows[0, k, 3 + layer] == pytest.approx(float(gradient.norm().log()), abs=1e-4)
            assert rows[0, k, 5 + layer] == pytest.approx(along, abs=1e-5)
            cosine = along / float(gradient.norm() * step.norm())
            assert rows[0, k, 7 + layer] == pytest.approx(cosine, abs=1e-4)
    assert (rows[1][:, [1, 5, 6, 7, 8]] == 0).all()


def test_an_ascended_model_has_a_higher_loss_on_its_records():
    training = plain()
    data, task = training.data, training.task
    start = training.start().params
    few = data.x[:5], data.y[:5]
    higher = ascended(task, start, *few)
    rise = losses_of(task, higher, *few).mean() - losses_of(task, start, *few).mean()
    assert 1.0 <= rise < 4.0
    along = gradients_at(task, start, *few).sum(dim=0)
    assert torch.allclose((higher - start) / (higher - start).norm(), along / along.norm(), atol=1e-5)


def test_the_active_server_sends_clients_other_models(monkeypatch):
    """In rounds that are watched; passive ones leave the training as it was."""
    sent = []
    whole = white_box._reported

    def noted(engine, ask, starts):
        sent.append((ask.round, dict(starts), ask.state.params.clone()))
        return whole(engine, ask, starts)

    monkeypatch.setattr(white_box, "_reported", noted)
    monkeypatch.setattr(white_box, "WATCHED", 2)
    halves = Halves(plain(), 1)
    watched(halves, [0])
    assert all(not starts for _, starts, _ in sent)
    sent.clear()
    watched(halves, [2])
    assert [round for round, starts, _ in sent if starts] == [1, 4]
    for _, starts, params in sent:
        assert all(not torch.equal(start, params) for start in starts.values())


def test_a_passive_attacker_changes_nothing():
    """The global models it sees are those of the training alone."""
    halves = Halves(plain(), 1)
    alone = halves.at(0)
    *_, last = alone.rounds(alone.start(), white_box.new_ledger(alone.plan))
    final = losses_of(alone.task, last.state.params, halves.training.data.x, halves.training.data.y)
    rows = watched(halves, [0])[0][1]
    features = rows.shape[1] // 2
    assert rows[:, features] == pytest.approx(final, rel=1e-4)


def test_nothing_about_a_record_is_used_to_score_it():
    """Turning over the membership of records that are guessed about changes no score of theirs."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(200, 3))
    inside = rows[:, 0] + random.normal(size=200) > 0
    scores = guessed(rows, inside, 5)
    assert roc_auc_score(inside, scores) > 0.7
    known = np.random.default_rng([5, 0xF01D]).random(200) < 0.5
    other = np.where(known, inside, ~inside)
    assert guessed(rows, other, 5)[~known] == pytest.approx(scores[~known])
    assert guessed(rows, other, 5)[known] != pytest.approx(scores[known])


def test_nothing_is_claimed_against_a_server_that_is_trusted(monkeypatch, found):
    monkeypatch.setattr(WhiteBox, "curves", lambda self, halves, on_training: found)
    training = private(federation((20,) * 6), 8.0)
    claim = training.plan.claims(1)[0]
    assert claim.trust is Trust.LOCAL
    leaks = {leak.what.split(":")[0]: leak.claim for leak in WhiteBox().leaks(training, claim)}
    assert leaks == {SERVER: claim, CLIENT: claim, ACTIVE: claim}
    central = replace(claim, trust=Trust.CENTRAL)
    leaks = {leak.what.split(":")[0]: leak.claim for leak in WhiteBox().leaks(training, central)}
    assert leaks == {SERVER: None, CLIENT: central, ACTIVE: None}


def test_what_is_kept_is_not_watched_again(tmp_path, monkeypatch):
    halves = Halves(plain(rounds=2), 1)
    with Kept.at(tmp_path, {}) as kept:
        first = WhiteBox(workers=1, kept=kept).curves(halves)
        monkeypatch.setattr(white_box, "watched", None)
        again = WhiteBox(workers=1, kept=kept).curves(halves)
    assert [roc.auc for roc in first.values()] == [roc.auc for roc in again.values()]


def test_a_run_with_an_attack_of_its_own_is_refused():
    training = replace(plain(), adversary=ReportAttack(lambda round, ids, reports: reports))
    with pytest.raises(BadInput, match=f"leave out --attacks {ATTACK}"):
        next(WhiteBox().leaks(training, None))
