"""What an audit says about itself: its confidence, the claim beside it, and its power."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.audit import canary_clients as canary_module
from fedveil.audit.audit_command import AuditSettings, run_attacks
from fedveil.audit.canary_clients import Canaries
from fedveil.audit.findings import ALARM
from fedveil.audit.observations import line_claim, strict_line
from fedveil.audit.randomisers import Randomiser, plans, self_test
from fedveil.audit.record_audits import OneRunAudit, _nominal_plan
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.noise.mechanisms import GaussianMechanism

CLIENTS, RECORDS, WIDTH = 10, 6, 12
FREE = fv.Budget(float("inf"), 1e-5)


def some_data(clients=CLIENTS):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(clients + 1, RECORDS, WIDTH)).astype(np.float32)
    y = generator.integers(3, size=(clients + 1, RECORDS))
    named = [(str(k), x[k], y[k]) for k in range(clients)]
    return fv.FederatedData.from_clients(named, test=(x[-1], y[-1]), classes=3)


def training(plan, work=None, clients=CLIENTS):
    torch.manual_seed(0)
    task = fv.Task(nn.Linear(WIDTH, 3), fv.cross_entropy)
    chosen = work or fv.ClientSgd(fv.Batches(0, steps=1), lr=0.1)
    return fv.Training(task, some_data(clients), plan, chosen, workers=1)


def in_steps(multiplier=20.0, rounds=8):
    """DP-SGD in which every record joins every step, so that canaries are seen often."""
    plan = fv.dp_sgd(
        *(fv.samplers.Everyone(), CLIENTS, 1.0),
        rate=0.5,
        steps=1,
        rounds=rounds,
        budget=fv.Budget(float("inf"), 1e-7),
        multiplier=multiplier,
    )
    return training(plan, fv.ClientDpSgd(plan.noisy_steps, lr=0.1))


def central(sampler, rounds=2, multiplier=1.0):
    return fv.central(
        sampler, CLIENTS, fv.clips.Fixed(1.0), rounds=rounds, budget=FREE, multiplier=multiplier
    )


# --- confidence ---


@pytest.mark.parametrize("attacks", [("randomiser",), ("randomiser", "canaries")])
def test_all_findings_share_one_false_alarm_rate(attacks):
    settings = AuditSettings(attacks, draws=200, canaries=50)
    found = run_attacks(training(central(fv.samplers.Everyone())), settings).findings
    assert len(found) == 2 * len(attacks)
    assert [finding.alarm for finding in found] == [ALARM / len(found)] * len(found)


def test_the_self_test_has_one_false_alarm_rate(monkeypatch):
    few = {name: plan for name, plan in plans().items() if name in ("central", "two-point")}
    monkeypatch.setattr("fedveil.audit.randomisers.plans", lambda: few)
    found = list(self_test(Randomiser(draws=100)))
    assert len(found) == 4
    assert {finding.alarm for finding in found} == {ALARM / len(found)}


def test_a_verdict_is_at_the_false_alarm_rate_of_the_finding():
    """A bound that holds at the whole rate and not at a share of it violates nothing."""
    (finding, *_) = Randomiser(draws=2000).findings(central(fv.samplers.Everyone()))
    bounds = [finding.evidence.lower_bound(alarm) for alarm in (ALARM / 100, ALARM)]
    assert bounds[0] < bounds[1]
    between = replace(finding, claim=replace(finding.claim, epsilon=sum(bounds) / 2))
    assert between.violated
    assert not replace(between, alarm=ALARM / 100).violated


# --- the claim beside it ---


def test_one_run_stands_beside_the_claim_of_the_plan_that_was_audited():
    """Canaries change how many records a client has; the plan that is run hides that number."""
    made = in_steps()
    (finding,) = OneRunAudit(50).findings(made)
    own = strict_line(made.plan)
    assert own.relation is Relation.ZERO_OUT
    assert finding.claim.neighbours is Relation.ADD_REMOVE
    audited = _nominal_plan(made)
    line = strict_line(audited)
    assert finding.claim == line_claim(line, line.participations(made.plan.permitted))
    assert audited.noisy_steps == replace(
        made.plan.noisy_steps, nominal=audited.noisy_steps.nominal
    )
    assert audited.rounds == made.plan.permitted
    assert audited.clip_schedule == made.plan.clip_schedule
    assert audited.sampler == made.plan.sampler


def test_canaries_stand_beside_the_claim_of_all_rounds():
    made = training(central(fv.samplers.Everyone(), rounds=3))
    for finding in Canaries(50).findings(made):
        assert finding.claim == made.plan.claims(3)[0]


# --- power ---


@pytest.mark.parametrize(
    ("sampler", "relation", "out"),
    [
        (fv.samplers.Everyone(), Relation.ZERO_OUT, 0.0),
        (fv.samplers.FixedSize(5), Relation.REPLACE, -1.0),
    ],
)
def test_canaries_are_as_far_apart_as_the_relation_allows(monkeypatch, sampler, relation, out):
    seen, whole = [], canary_module.noisy_sums

    def watched(again, ids):
        seen.append(again.participants)
        return whole(again, ids)

    monkeypatch.setattr(canary_module, "noisy_sums", watched)
    made = training(central(sampler))
    assert strict_line(made.plan).relation is relation
    list(Canaries(50).findings(made))
    signs = np.concatenate([adversary.signs for adversary in seen])
    assert set(signs) == {1.0, out}
    norms = torch.cat([adversary.directions for adversary in seen]).norm(dim=1)
    assert torch.allclose(norms, torch.ones(len(norms)))


def test_canaries_are_as_long_as_the_clip_lets_through():
    """In the sum each counts for the clip; half of it would show half of the leak."""
    made = training(central(fv.samplers.Everyone(), multiplier=1e-3))
    ids = np.array([2, 5])
    directions = torch.eye(made.task.size)[:2]
    adversary = canary_module.CanaryClients(ids, directions, np.array([1.0, -1.0]))
    again = replace(made, participants=adversary)
    (first, clip, _), *_ = canary_module.noisy_sums(again, ids)
    assert first[:2] / clip == pytest.approx([1.0, -1.0], abs=0.02)


def test_one_run_has_power(monkeypatch):
    """Without noise, 250 canary records of one small run are told apart beyond the claim."""
    made = in_steps()
    (finding,) = OneRunAudit(250).findings(made)
    assert not finding.violated
    monkeypatch.setattr(GaussianMechanism, "add_", lambda *_: None)
    (finding,) = OneRunAudit(250).findings(made)
    assert finding.violated, (finding.lower, finding.claim.epsilon)


def test_a_shuffled_position_is_audited_among_the_honest_reports_only():
    """Reports of dishonest clients are known to the server and hide nobody."""
    ranges = fv.releases.Ranges(0.0, 0.5, (40,), adaptive=False, perturb=fv.releases.Perturb.UPDATE)
    plan = fv.two_point(
        *(fv.samplers.Everyone(), 30, ranges),
        epsilon=1.0,
        rounds=1,
        budget=FREE,
        shuffled=10,
        dishonest=15,
    )
    *_, finding = Randomiser(draws=400).findings(plan)
    assert finding.what == "one weight of 10 shuffled reports"
