"""Attackers inside a training: whom they see, what they send, and what they leave alone."""

from functools import partial

import numpy as np
import pytest
import torch

from fedveil.audit import white_box
from fedveil.audit.membership import ShadowModels, losses_of
from fedveil.audit.white_box import RecordTraces, TargetRecords, by_client, by_server, gradients_at
from tests.audit.test_shadow_models import federation, plain


def noted(monkeypatch, attacker, **changes):
    """What the attacker's training had asked for, round by round: (round, ids, models sent)."""
    sent = []
    run = white_box.Serial.run

    def noting(self, round):
        sent.append((round.number, round.ids.tolist(), round.start.clone()))
        return run(self, round)

    monkeypatch.setattr(white_box.Serial, "run", noting)
    monkeypatch.setattr(white_box, "WATCHED", 2)
    shadow_models = ShadowModels(plain(**changes), 1)
    targets = TargetRecords(shadow_models.training.data, 0)
    attacker(shadow_models.training_of(0), targets)
    return sent


def test_the_active_server_sends_each_client_its_own_model(monkeypatch):
    """In rounds that are watched, 1 and 4 of 4, and in no others."""
    sent = noted(monkeypatch, partial(by_server, active=True))
    assert [round for round, _, _ in sent] == [*([1] * 6), 2, 3, *([4] * 6)]
    for round in (1, 4):
        models = [params for r, _, params in sent if r == round]
        assert len({tuple(params.tolist()) for params in models}) == 6


def test_the_active_client_takes_part_whenever_it_asks_and_looks_a_round_later(monkeypatch):
    sent = noted(monkeypatch, partial(by_client, active=True))
    assert all(0 in ids for round, ids, _ in sent if round == 1)
    passive = noted(monkeypatch, by_client)
    assert not torch.equal(sent[1][2], passive[1][2])
    shadow_models = ShadowModels(plain(), 1)
    targets = TargetRecords(shadow_models.training.data, 0)
    rows = by_client(shadow_models.training_of(0), targets, active=True)
    passive = by_client(shadow_models.training_of(0), targets)
    assert rows.shape[1] == 2 * passive.shape[1]
    assert (np.abs(rows).sum(axis=0) > 0).all()


def test_a_passive_client_changes_nothing():
    """The global models it sees are those of the training alone."""
    shadow_models = ShadowModels(plain(), 1)
    alone, data = shadow_models.training_of(0), shadow_models.training.data
    *_, last = alone.rounds(alone.start(), alone.new_ledger())
    final = losses_of(alone.task, last.state.params, data.x, data.y)
    rows = by_client(shadow_models.training_of(0), TargetRecords(data, 0))
    assert rows[:, rows.shape[1] // 2] == pytest.approx(final, rel=1e-4)


def test_a_server_looks_at_the_reports_of_a_records_own_client():
    """One round: the loss after the client's own step, not after the mean step."""
    shadow_models = ShadowModels(plain(rounds=1), 1)
    data, half = shadow_models.training.data, shadow_models.training_of(0)
    rows = by_server(half, TargetRecords(data, 0))
    task, start = half.task, half.start().params
    for client in range(data.clients):
        own = slice(half.data.offsets[client], half.data.offsets[client + 1])
        step = gradients_at(task, start, half.data.x[own], half.data.y[own]).mean(dim=0)
        asked = slice(data.offsets[client], data.offsets[client + 1])
        wanted = losses_of(task, start - step, data.x[asked], data.y[asked])
        assert rows[asked, 0] == pytest.approx(wanted, rel=1e-4)


def test_what_a_record_showed_is_its_mean_and_its_last():
    seen = RecordTraces(3)
    assert seen.trace_features.shape == (3, 0)
    seen.add(np.array([0, 2]), np.array([[1.0], [5.0]]))
    seen.add(np.array([0]), np.array([[3.0]]))
    assert seen.trace_features.tolist() == [[2.0, 3.0], [0.0, 0.0], [5.0, 5.0]]


def test_every_record_is_asked_about_once():
    aims = TargetRecords(federation(), 0).by_round([1, 3, 7])
    assert sorted(np.concatenate(list(aims.values()))) == list(range(39))
    assert [len(rows) for rows in aims.values()] == [13, 13, 13]
