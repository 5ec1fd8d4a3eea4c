"""White-box membership: what each attacker sees, and that it stays out of what it must not know."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedveil.attacks.traces import ascended, gradients_at, losses_of, traces
from fedveil.audit import watching, white_box
from fedveil.audit.halves import Halves
from fedveil.audit.kept import Kept
from fedveil.audit.watching import Asked, Seen, by_active_client, by_active_server, by_client
from fedveil.audit.white_box import (
    ACTIVE_CLIENT,
    ACTIVE_SERVER,
    ATTACK,
    CLIENT,
    SERVER,
    WhiteBox,
    guessed,
)
from fedveil.errors import BadInput
from fedveil.privacy.accounting.claims import Trust
from fedveil.training.adversary import ReportAttack
from tests.audit.test_halves import federation, plain, private
from tests.audit.test_membership import noise_labels, overfitted


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "WATCHED", 3)
        return WhiteBox(workers=1).curves(Halves(overfitted(), 1))


def test_all_attackers_find_what_an_overfitted_model_remembers(found):
    assert list(found) == [SERVER, ACTIVE_SERVER, CLIENT, ACTIVE_CLIENT]
    for who in (SERVER, ACTIVE_SERVER):
        assert found[who].auc.low > 0.75, who
    for who in (CLIENT, ACTIVE_CLIENT):
        assert found[who].auc.value > 0.65, who


def test_the_server_sees_more_than_a_client(found):
    assert found[SERVER].auc.value > found[CLIENT].auc.value


def test_record_level_privacy_leaves_nothing_to_tell(monkeypatch):
    """Epsilon 1, 4,000 members and as many others: 0.03 is four standard errors."""
    monkeypatch.setattr(watching, "WATCHED", 2)
    halves = Halves(private(noise_labels(4000, 8), 1.0, rounds=2), 1)
    for roc in WhiteBox(workers=1).curves(halves).values():
        assert roc.auc.value == pytest.approx(0.5, abs=0.03)


def test_traces_are_losses_and_products_by_layer():
    training = plain()
    data, task = training.data, training.task
    before = training.start().params
    after = before + 0.1 * torch.randn(task.size, generator=torch.Generator().manual_seed(1))
    rows = traces(task, before, after, data.x[:4], data.y[:4])
    first, last = (losses_of(task, p, data.x[:4], data.y[:4]) for p in (before, after))
    assert rows.shape == (4, 3 + 3 * 2)
    assert rows[:, 0] == pytest.approx(last)
    assert rows[:, 1] == pytest.approx(first - last)
    for k in range(4):
        leaf = before.clone().requires_grad_()
        x, y = torch.from_numpy(data.x[k : k + 1]), torch.from_numpy(data.y[k : k + 1])
        task.loss(x @ leaf[:15].view(3, 5).T + leaf[15:], y).sum().backward()
        for layer, part in enumerate((slice(0, 15), slice(15, 18))):
            gradient, step = leaf.grad[part], (after - before)[part]
            along = -float(gradient @ step)
            assert rows[k, 3 + layer] == pytest.approx(float(gradient.norm().log()), abs=1e-4)
            assert rows[k, 5 + layer] == pytest.approx(along, abs=1e-5)
            cosine = along / float(gradient.norm() * step.norm())
            assert rows[k, 7 + layer] == pytest.approx(cosine, abs=1e-4)
    still = traces(task, before, before, data.x[:4], data.y[:4])
    assert (still[:, [1, 5, 6, 7, 8]] == 0).all()


def test_traces_of_many_records_are_taken_in_pieces(monkeypatch):
    training = plain()
    data, task, start = training.data, training.task, training.start().params
    whole = traces(task, start, start + 1, data.x, data.y)
    monkeypatch.setattr("fedveil.attacks.traces._AT_ONCE", 5 * task.size)
    pieces = traces(task, start, start + 1, data.x, data.y)
    assert pieces == pytest.approx(whole, rel=1e-4, abs=1e-5)


def test_an_ascended_model_has_a_higher_loss_on_its_records():
    training = plain()
    data, task = training.data, training.task
    start = training.start().params
    few = data.x[:5], data.y[:5]
    higher = ascended(task, start, *few)
    rise = losses_of(task, higher, *few).mean() - losses_of(task, start, *few).mean()
    assert 1.0 <= rise < 4.0
    along, step = gradients_at(task, start, *few).sum(dim=0), higher - start
    assert torch.allclose(step / step.norm(), along / along.norm(), atol=1e-5)


def noted(monkeypatch, attacker, **changes):
    """What the attacker's training had asked for, round by round: (round, ids, models sent)."""
    sent = []
    run = watching.Serial.run

    def noting(self, round, ids, state):
        sent.append((round, ids.tolist(), state.params.clone()))
        return run(self, round, ids, state)

    monkeypatch.setattr(watching.Serial, "run", noting)
    monkeypatch.setattr(watching, "WATCHED", 2)
    halves = Halves(plain(**changes), 1)
    attacker(halves.at(0), Asked(halves.training.data, 0))
    return sent


def test_the_active_server_sends_each_client_its_own_model(monkeypatch):
    """In rounds that are watched, 1 and 4 of 4, and in no others."""
    sent = noted(monkeypatch, by_active_server)
    assert [round for round, _, _ in sent] == [*([1] * 6), 2, 3, *([4] * 6)]
    for round in (1, 4):
        models = [params for r, _, params in sent if r == round]
        assert len({tuple(params.tolist()) for params in models}) == 6


def test_the_active_client_takes_part_whenever_it_asks_and_looks_a_round_later(monkeypatch):
    sent = noted(monkeypatch, by_active_client)
    assert all(0 in ids for round, ids, _ in sent if round == 1)
    passive = noted(monkeypatch, by_client)
    assert not torch.equal(sent[1][2], passive[1][2])
    halves = Halves(plain(), 1)
    rows = by_active_client(halves.at(0), Asked(halves.training.data, 0))
    assert rows.shape[1] == 2 * by_client(halves.at(0), Asked(halves.training.data, 0)).shape[1]
    assert (np.abs(rows).sum(axis=0) > 0).all()


def test_a_passive_client_changes_nothing():
    """The global models it sees are those of the training alone."""
    halves = Halves(plain(), 1)
    alone, data = halves.at(0), halves.training.data
    *_, last = alone.rounds(alone.start(), watching.new_ledger(alone.plan))
    final = losses_of(alone.task, last.state.params, data.x, data.y)
    rows = by_client(halves.at(0), Asked(data, 0))
    assert rows[:, rows.shape[1] // 2] == pytest.approx(final, rel=1e-4)


def test_a_server_looks_at_the_reports_of_a_records_own_client():
    """One round: the loss after the client's own step, not after the mean step."""
    halves = Halves(plain(rounds=1), 1)
    data, half = halves.training.data, halves.at(0)
    rows = watching.by_server(half, Asked(data, 0))
    task, start = half.task, half.start().params
    for client in range(data.clients):
        own = slice(half.data.offsets[client], half.data.offsets[client + 1])
        step = gradients_at(task, start, half.data.x[own], half.data.y[own]).mean(dim=0)
        asked = slice(data.offsets[client], data.offsets[client + 1])
        wanted = losses_of(task, start - step, data.x[asked], data.y[asked])
        assert rows[asked, 0] == pytest.approx(wanted, rel=1e-4)


def test_what_a_record_showed_is_its_mean_and_its_last():
    seen = Seen(3)
    assert seen.features.shape == (3, 0)
    seen.add(np.array([0, 2]), np.array([[1.0], [5.0]]))
    seen.add(np.array([0]), np.array([[3.0]]))
    assert seen.features.tolist() == [[2.0, 3.0], [0.0, 0.0], [5.0, 5.0]]


def test_every_record_is_asked_about_once():
    aims = Asked(federation(), 0).dealt([1, 3, 7])
    assert sorted(np.concatenate(list(aims.values()))) == list(range(39))
    assert [len(rows) for rows in aims.values()] == [13, 13, 13]


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
    assert (guessed(np.zeros((200, 0)), inside, 5) == 0).all()


def test_nothing_is_claimed_against_a_server_that_is_trusted(monkeypatch, found):
    monkeypatch.setattr(WhiteBox, "curves", lambda self, halves, on_training: found)
    training = private(federation((20,) * 6))
    claim = training.plan.claims(1)[0]
    assert claim.trust is Trust.LOCAL
    leaks = {leak.what.split(":")[0]: leak.claim for leak in WhiteBox().leaks(training, claim)}
    assert set(leaks.values()) == {claim}
    central = replace(claim, trust=Trust.CENTRAL)
    leaks = {leak.what.split(":")[0]: leak.claim for leak in WhiteBox().leaks(training, central)}
    assert (leaks[SERVER], leaks[ACTIVE_SERVER]) == (None, None)
    assert (leaks[CLIENT], leaks[ACTIVE_CLIENT]) == (central, central)


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
