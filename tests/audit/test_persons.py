"""Audits of claims per person: whole persons are inserted and removed, and bugs are found."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.audit import record_audits
from fedveil.audit.membership import ShadowModels
from fedveil.audit.randomisers import Randomiser
from fedveil.audit.record_audits import OneRunAudit, _insert_canaries, sensitivity_findings
from fedveil.privacy.accounting.claims import Unit
from fedveil.training.cohort import CohortData
from fedveil.training.session import Training
from fedveil.training.work import ClientDpSgd

CAP = 3


def patients(clients=6, people=20, seed=0, features=8):
    random = np.random.default_rng(seed)

    def records(count):
        x = random.normal(size=(count, features)).astype(np.float32)
        return x, (x[:, 0] > 0).astype(np.int64)

    whose = [np.sort(random.integers(people, size=2 * people)) for _ in range(clients)]
    given = [(f"c{k}", *records(len(w))) for k, w in enumerate(whose)]
    data = fv.FederatedData.from_clients(given, test=records(30), classes=2, persons=whose)
    return data.capped(CAP)


def training(unit=Unit.PERSON, multiplier=4.0, rounds=3, rate=0.5, data=None):
    data = patients() if data is None else data
    plan = fv.dp_sgd(
        fv.samplers.Everyone(),
        data.clients,
        1.0,
        rate=rate,
        steps=2,
        rounds=rounds,
        budget=fv.Budget(math.inf, 1e-5),
        multiplier=multiplier,
        unit=unit,
        cap=CAP,
    )
    torch.manual_seed(0)
    task = fv.Task(torch.nn.Linear(data.x.shape[1], 2), fv.cross_entropy)
    return Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=0.5), workers=1)


@pytest.mark.parametrize("unit", [Unit.PERSON, Unit.RECORD])
def test_canaries_are_whole_people(unit, monkeypatch):
    audited, inserted = training(unit), []
    whole = record_audits._insert_canaries

    def noted(data, canaries, owners, inside):
        inserted.append((canaries, whole(data, canaries, owners, inside), inside))
        return inserted[-1][1]

    monkeypatch.setattr(record_audits, "_insert_canaries", noted)
    (finding,) = OneRunAudit(60, seed=1).findings(audited)
    canaries, both, inside = inserted[0]
    assert canaries.sizes.tolist() == [CAP] * 60
    assert np.array_equal(canaries.x[0], canaries.x[CAP - 1])
    assert both.people.sum() - audited.data.people.sum() == inside.sum()
    assert both.records - audited.data.records == CAP * inside.sum()
    assert finding.what == "60 people of all clients"
    assert finding.claim.unit is Unit.PERSON
    assert not finding.violated


def test_a_canary_is_inserted_with_as_many_records_as_count():
    data = patients()
    canaries = fv.FederatedData(
        np.zeros((2 * CAP, 8), dtype=np.float32),
        np.zeros(2 * CAP, dtype=np.int64),
        np.array([0, CAP, 2 * CAP]),
        data.test_x,
        data.test_y,
        2,
    )
    both = _insert_canaries(data, canaries, np.array([1, 1]), np.array([True, True]))
    assert (both.people - data.people).tolist() == [0, 2, 0, 0, 0, 0]
    assert (both.sizes - data.sizes).tolist() == [0, 2 * CAP, 0, 0, 0, 0]
    assert both.person_index.record_counts.max() == CAP


def test_canaries_are_beside_the_records_that_a_public_number_leaves():
    """Every record that was left stays, and a nominal number of records is no contradiction."""
    plan = fv.dp_sgd(
        fv.samplers.Everyone(),
        6,
        1.0,
        rate=1.0,
        steps=1,
        rounds=1,
        budget=fv.Budget(float("inf"), 1e-5),
        multiplier=0.01,
    )
    data = replace(patients(features=300), persons=None, cap=None).shortened(4)
    work = fv.ClientDpSgd(plan.noisy_steps, lr=0.1)
    task = fv.Task(torch.nn.Linear(300, 2), fv.cross_entropy)
    inside, scores = OneRunAudit(50).scores(fv.Training(task, data, plan, work, workers=1))
    assert ((scores > np.median(scores)) == inside).mean() > 0.8
    canaries = data.with_clients(data.x[:3], data.y[:3], np.arange(4))
    both = _insert_canaries(data, canaries, np.zeros(3, dtype=int), np.array([True, False, True]))
    assert (both.sizes - data.sizes).tolist() == [2, 0, 0, 0, 0, 0]
    assert (both.most_records, data.most_records) == (None, 4)
    assert both.x[:6].tolist() == [*data.x[:4].tolist(), *data.x[[0, 2]].tolist()]


def test_little_noise_is_found_by_canaries():
    """The claim is of another plan than what runs."""
    weak = training(multiplier=0.01, rounds=2, rate=1.0, data=patients(features=300))
    audit = OneRunAudit(100, seed=2)
    inside, scores = audit.scores(weak)
    right = (scores > np.median(scores)) == inside
    assert right.mean() > 0.9


@pytest.mark.parametrize("unit", [Unit.PERSON, Unit.RECORD])
def test_extreme_people_move_a_step_by_one_clip(unit):
    (finding,) = sensitivity_findings(training(unit))
    assert finding.evidence.lower_bound(0.01) == 0.0
    assert f"a {unit} moves a step by 1 clips at most" in finding.what


def test_a_step_that_clips_records_where_people_are_claimed_is_found(monkeypatch):
    """As if the work sampled people and clipped each of their records by itself."""
    audited = training()
    whole = CohortData.records_of

    def apart(self, people, cap):
        batch = whole(self, people, cap)
        batch.group = 1
        return batch

    monkeypatch.setattr(CohortData, "records_of", apart)
    (finding,) = sensitivity_findings(audited)
    assert finding.evidence.lower_bound(0.01) > finding.claim.epsilon


@pytest.mark.parametrize("unit", [Unit.PERSON, Unit.RECORD])
def test_reports_of_a_client_with_and_without_a_person_keep_to_the_claim(unit):
    for finding in Randomiser(2000, seed=3).findings(training(unit, multiplier=2.0).plan):
        assert finding.claim.unit is Unit.PERSON
        assert not finding.violated


def test_reports_tell_of_more_records_than_were_accounted():
    """The plan accounts for one record of a person, and three join."""
    plan = training(Unit.RECORD, multiplier=2.0, rate=1.0, rounds=1).plan
    single = fv.dp_sgd(
        plan.sampler,
        plan.population,
        1.0,
        rate=1.0,
        steps=2,
        rounds=1,
        budget=fv.Budget(math.inf, 1e-5),
        multiplier=2.0,
        cap=1,
    )
    wrong = replace(plan, lines=single.lines)
    findings = list(Randomiser(20_000, seed=4).findings(wrong))
    assert any(finding.violated for finding in findings)


def test_halves_are_of_people():
    """Where a claim is about persons, all records of one are in the same half."""
    audited = training()
    data, shadows = audited.data, ShadowModels(audited, pairs=3)
    of_record = data.person_index.of_records(np.arange(int(data.people.sum())))
    for mask in shadows.inside:
        for person in range(int(data.people.sum())):
            assert len(set(mask[of_record == person].tolist())) == 1
    assert (shadows.inside[0] ^ shadows.inside[1]).all()
    halved = shadows.training_of(0).data
    assert 0.4 * data.people.sum() <= halved.people.sum() <= 0.6 * data.people.sum()
