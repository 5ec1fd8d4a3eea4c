"""Bugs that make a claim false, each planted and caught by the audit made for it.

What fedveil itself would refuse is let through first. Audits are quick ones of a few thousand
draws; `alarm` is 1e-4 for each, and seeds are fixed.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.audit import randomisers
from fedveil.audit.canary_clients import Canaries
from fedveil.audit.observations import strict_line
from fedveil.audit.randomisers import Randomiser, plans
from fedveil.audit.record_audits import OneRunAudit, sensitivity_findings, standardisation_findings
from fedveil.privacy.accounting.claims import Relation
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.mechanisms import GaussianMechanism, LaplaceMechanism, TwoPointMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training import exchange, session
from fedveil.training.gradients.per_example import ClippedExamples
from fedveil.training.work import ClientDpSgd

QUICK = Randomiser(draws=20_000)
SLOW = pytest.param("DP-SGD", marks=pytest.mark.slow)
SMALL = ("engine.workers=1", "data.clients=40", "client.epochs=1", "rounds=5")


@pytest.fixture(scope="module")
def every():
    return plans()


def verdicts(plan):
    return [finding.violated for finding in QUICK.findings(plan)]


@pytest.fixture
def less_noise(monkeypatch):
    for kind in (GaussianMechanism, LaplaceMechanism):
        whole = kind.add_
        monkeypatch.setattr(
            kind,
            "add_",
            lambda self, rows, scales, keys, whole=whole: whole(
                self, rows, np.asarray(scales) / 2, keys
            ),
        )
    report = TwoPointMechanism.report_
    monkeypatch.setattr(
        TwoPointMechanism,
        "report_",
        lambda self, *rest: report(TwoPointMechanism(2 * self.epsilon), *rest),
    )


NOISY = ("central", "central, Poisson", "client, Gaussian", "two-point", SLOW)


@pytest.mark.parametrize("name", NOISY)
def test_releases_as_they_are_pass(every, name):
    """The same audits, nothing planted: each false-alarm rate is 1e-4, on fixed seeds."""
    assert not any(verdicts(every[name]))


@pytest.mark.parametrize("name", NOISY)
def test_half_the_noise(every, less_noise, name):
    assert any(verdicts(every[name]))


def test_half_the_laplace_noise(less_noise):
    """Of an epsilon that this many draws can tell: one report at 1."""
    plan = fv.client_noise(
        *(fv.samplers.Everyone(), 100, fv.clips.Fixed(1.0, fv.clips.Norm.L1)),
        laplace=True,
        rounds=1,
        budgets=(fv.Budget(1.0, 1e-5),),
    )
    assert any(verdicts(plan))


@pytest.mark.parametrize("name", ["central", "client, Gaussian", "client, Laplace"])
def test_a_clip_that_is_not_enforced(every, monkeypatch, name):
    accept = exchange.accept
    monkeypatch.setattr(exchange, "accept", lambda reports, clip: accept(reports, None))
    assert any(verdicts(every[name]))


def test_the_sensitivity_of_one_row_where_two_differ(every, monkeypatch):
    monkeypatch.setattr(Clip, "sensitivity", lambda self, relation: self.value)
    assert any(verdicts(every["client, Gaussian"]))
    assert not any(verdicts(every["central"]))  # where one row is right


def drawn(purpose):
    """Whether it is the randomness of a release, and not of a batch or a cohort."""
    return "noise" in purpose or "choices" in purpose


REUSED = ("client, Gaussian", "client, Laplace", "two-point", "PrivUnitG", SLOW)


@pytest.mark.parametrize("name", ["central", *REUSED])
def test_noise_reused_between_rounds(every, monkeypatch, name):
    keys = Streams.keys

    def same(self, purpose, round, clients, *parts):
        return keys(self, purpose, 1 if drawn(purpose) else round, clients, *parts)

    monkeypatch.setattr(Streams, "keys", same)
    assert any(verdicts(every[name]))


@pytest.mark.parametrize("name", REUSED)
def test_noise_reused_between_clients(every, monkeypatch, name):
    keys = Streams.keys

    def same(self, purpose, round, clients, *parts):
        ids = np.asarray(clients) // 2 if drawn(purpose) else clients
        return keys(self, purpose, round, ids, *parts)

    monkeypatch.setattr(Streams, "keys", same)
    assert any(verdicts(every[name]))


def test_full_participation_accounted_as_one_percent(monkeypatch):
    monkeypatch.setattr(PrivacyPlan, "check_lines", lambda self: None)
    training = build(load_recipe("central", [*SMALL, "sample.rate=0.01", "budget.epsilon=1"]))
    honest = list(Canaries(100).findings(training))
    planted = replace(training, plan=replace(training.plan, sampler=fv.samplers.Everyone()))
    found = list(Canaries(100).findings(planted))
    assert not any(finding.violated for finding in honest)
    assert found[1].what == "all rounds"
    assert found[1].violated


@pytest.mark.slow
def test_more_steps_than_planned(every, monkeypatch):
    whole = ClientDpSgd.updates

    def more(self, turn):
        noisy = replace(self.noisy, steps=4 * self.noisy.steps)
        return whole(replace(self, noisy=noisy), turn)

    monkeypatch.setattr(ClientDpSgd, "updates", more)
    assert any(verdicts(every["DP-SGD"]))


class Mixing(nn.Module):
    """What a record is answered depends on the mean of its batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x - x.mean(0, keepdim=True))


def records(module):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(9, 12, 6)).astype(np.float32)
    y = generator.integers(3, size=(9, 12))
    data = fv.FederatedData.from_clients(
        [(str(k), x[k], y[k]) for k in range(8)], test=(x[8], y[8]), classes=3
    )
    plan = fv.dp_sgd(
        fv.samplers.Everyone(), 8, 0.5, rate=0.5, steps=2, rounds=2, budget=fv.Budget(4, 1e-3)
    )
    torch.manual_seed(0)
    work = fv.ClientDpSgd(plan.noisy_steps, lr=0.1)
    return fv.Training(
        fv.Task(module, fv.cross_entropy), data, plan, work, workers=1, mode=fv.engines.Mode.LOOPED
    )


@pytest.mark.parametrize("module", [nn.Linear(6, 3), Mixing()])
def test_a_record_moves_a_step_by_the_clip_at_most(module):
    """Also where records see each other, which fedveil notices and computes one by one."""
    (finding,) = sensitivity_findings(records(module))
    assert not finding.violated


def test_a_module_that_mixes_examples_unnoticed(monkeypatch):
    """Each record's own loss, differentiated in the batch: what a naive clip per example does."""

    def naively(self, row, flat, x, y, clip, keys=None):
        task = self._task
        for k in range(len(y)):
            leaves = {n: v.clone().requires_grad_() for n, v in task.named(flat).items()}
            with torch.enable_grad():
                loss = task.losses(leaves, x, y)[k]
            found = torch.autograd.grad(loss, list(leaves.values()))
            gradient = task.flattened(dict(zip(leaves, found, strict=True)))
            row += clip.apply_(gradient[None, :]).rows[0]

    monkeypatch.setattr(ClippedExamples, "add_clipped_", naively)
    monkeypatch.setattr(session, "mixes_records", lambda *_: False)
    (finding,) = sensitivity_findings(records(nn.Linear(6, 3)))
    assert not finding.violated
    (finding,) = sensitivity_findings(records(Mixing()))
    assert finding.violated, finding.what


def patients(*settings):
    return build(load_recipe("dp-fedavg", ["engine.workers=1", *settings]))


def test_statistics_fitted_in_the_clear():
    """By clients' records, and by theirs and the test records: both show, and nobody said it."""
    honest = patients("data.statistics=held-out")
    (finding,) = standardisation_findings(honest)
    assert finding.verdict == "not violated"
    data = honest.data
    every = np.concatenate([data.x, data.test_x])
    for on in (data.x, every):
        x, test_x = ((each - on.mean(axis=0)) / on.std(axis=0) for each in (data.x, data.test_x))
        planted = replace(data, x=x.astype(np.float32), test_x=test_x.astype(np.float32))
        (finding,) = standardisation_findings(replace(honest, data=planted))
        assert finding.violated


def test_statistics_fitted_in_the_clear_that_the_claim_tells():
    """They are outside of what is claimed; secure noise refuses them."""
    training = patients("data.statistics=clients")
    assert list(standardisation_findings(training)) == []
    (finding, *_) = Randomiser(draws=100).findings(training.plan)
    assert any("fitted on clients' records" in text for text in finding.claim.assumptions)
    with pytest.raises(fv.BadInput, match="fitted"):
        training.data.check_secure()


def test_the_noise_of_another_group():
    """Clients with a small epsilon of their own that have the noise of the others."""
    budgets = fv.Budget(1.0, 1e-5), fv.Budget(6.0, 1e-5)
    plan = fv.client_noise(
        *(fv.samplers.Everyone(), 100, fv.clips.Fixed(1.0)),
        laplace=False,
        rounds=1,
        budgets=budgets,
        group_of=np.arange(100) % 2,
    )
    assert not any(verdicts(plan))
    least = np.full(100, plan.release.multipliers.min())
    swapped = replace(plan, release=replace(plan.release, multipliers=least))
    found = list(QUICK.findings(swapped))
    assert [f.violated for f in found] == [f.claim.epsilon < 2 for f in found]
    assert any(f.violated for f in found)


def test_a_curator_left_out_of_the_line():
    plan = fv.client_noise(
        *(fv.samplers.Everyone(), 100, fv.clips.Fixed(1.0)),
        laplace=False,
        rounds=1,
        budgets=(fv.Budget(1.0, 1e-5),),
    )
    watched = replace(plan, clip_schedule=fv.clips.Quantile(1.0, 0.5, noise=0.5))
    found = list(Randomiser(draws=400).findings(watched))
    assert [f.violated for f in found] == [False, True]
    assert found[1].what.endswith("what the clip watches")


@pytest.mark.slow
def test_seeds_shared_by_trials(monkeypatch):
    """Two trainings with the same noise: their difference has none."""
    training = build(load_recipe("central", [*SMALL, "sample.kind=all", "budget.epsilon=2"]))
    assert not any(finding.violated for finding in Canaries(200).findings(training))
    monkeypatch.setattr(session, "seed_of", lambda *parts: 1)
    assert any(finding.violated for finding in Canaries(200).findings(training))


@pytest.mark.slow
def test_noise_left_out_of_the_steps_shows_in_one_run(monkeypatch):
    """Without noise 300 canary records of one run are told apart beyond the claim."""
    few = ("data.clients=10", "data.most_records=5", "rounds=10")
    more = ("sample.max_participations=none", "budget.epsilon=1", "budget.delta=1e-7")
    training = build(load_recipe("dp-sgd", ["engine.workers=1", *few, "sample.size=10", *more]))
    assert not any(finding.violated for finding in OneRunAudit(300).findings(training))
    monkeypatch.setattr(GaussianMechanism, "add_", lambda *_: None)
    assert any(finding.violated for finding in OneRunAudit(300).findings(training))


def test_a_claim_under_another_relation_has_other_inputs(every):
    """Replacement is audited with opposite rows, zeroing with a row and nothing."""
    fixed = strict_line(every["central, fixed size"])
    assert fixed.relation is Relation.REPLACE
    assert randomisers._other(fixed) == -1
    assert randomisers._other(strict_line(every["central"])) == 0
