"""Attackers in a training: what they send, what is accepted of it, and what is charged."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.attacks.adversary import AttackerNoise, BackdoorAttack, When
from fedveil.attacks.backdoors import PixelTrigger
from fedveil.privacy.ranges import Perturb
from fedveil.training.participants import Group, Participants

CLIENTS, SIDE = 12, 4
TRIGGER = PixelTrigger(target=1, size=1, row=0, column=0, value=5.0)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)

    def some(count):
        y = rng.integers(0, 2, count)
        x = rng.standard_normal((count, 1, SIDE, SIDE)).astype(np.float32) * 0.3
        x[:, 0, 3, 3] += 2.0 * y - 1
        return x, y

    clients = [(str(k), *some(10 + k)) for k in range(CLIENTS)]
    return fv.FederatedData.from_clients(clients, test=some(200), classes=2)


def task():
    torch.manual_seed(0)
    return fv.Task(
        nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 2)),
        fv.cross_entropy,
        {"accuracy": fv.correct},
    )


WORK = fv.ClientSgd(fv.Batches(0, steps=5), lr=0.5)


def unprotected(rounds=4, clip=None):
    schedule = None if clip is None else fv.clips.Fixed(clip)
    return fv.unprotected(fv.samplers.FixedSize(6), CLIENTS, rounds=rounds, schedule=schedule)


def local(rounds=4, multiplier=1.0, clip=1.0, sampler=None, **more):
    return fv.client_noise(
        sampler or fv.samplers.FixedSize(6),
        CLIENTS,
        fv.clips.Fixed(clip),
        laplace=False,
        rounds=rounds,
        budgets=(fv.Budget(float("inf"), 1e-3),),
        multiplier=multiplier,
        **more,
    )


def central(rounds=4):
    return fv.central(
        fv.samplers.Poisson(0.5),
        CLIENTS,
        fv.clips.Fixed(1.0),
        rounds=rounds,
        budget=fv.Budget(float("inf"), 1e-3),
        multiplier=1e-6,
    )


def training(data, plan, **more):
    return fv.Training(task(), data, plan, WORK, workers=1, **more)


def attack(data, **more):
    return BackdoorAttack.of(data, TRIGGER, **more)


def test_a_boosted_attacker_puts_the_backdoor_in_and_leaves_the_task_alone(data):
    *_, honest = fv.train(training(data, unprotected()))
    made = training(data, unprotected(), participants=attack(data, boost=6.0))
    *_, attacked = fv.train(made)
    clean = made.participants.measure(task(), honest.state.params)["backdoor"]
    assert attacked.metrics["backdoor"] > 0.8 > clean + 0.2
    assert attacked.metrics["accuracy"] > honest.metrics["accuracy"] - 0.05
    assert attacked.notes["cheating"] == 1
    assert attacked.notes["cheating_length"] > 2 * attacked.notes["honest_length"]


def test_without_attackers_the_backdoor_is_only_measured(data):
    *_, honest = fv.train(training(data, unprotected()))
    made = training(data, unprotected(), participants=attack(data, attackers=0))
    *_, watched = fv.train(made)
    assert watched.notes["cheating"] == 0
    assert 0 <= watched.metrics["backdoor"] < 0.8
    assert watched.metrics["accuracy"] == pytest.approx(honest.metrics["accuracy"], abs=0.05)


@pytest.mark.slow
def test_model_replacement_replaces_the_model(data):
    """n attackers' reports over n: boost = n / server rate, and everybody else stands still."""
    rate = 0.5
    still = fv.ClientSgd(fv.Batches(0, steps=5), lr=1e-12)
    plan = fv.unprotected(fv.samplers.Everyone(), CLIENTS, rounds=1)
    adversary = attack(data, attackers=1, share=1.0, boost=CLIENTS / rate, work=WORK)
    made = fv.Training(
        task(),
        data,
        plan,
        still,
        server=fv.servers.SgdServer(lr=rate),
        workers=1,
        participants=adversary,
    )
    (result,) = fv.train(made)
    alone = task()
    module, own = alone.module, adversary.records
    optimiser = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(5):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(module(torch.tensor(own.x)), torch.tensor(own.y))
        loss.backward()
        optimiser.step()
    assert torch.allclose(result.state.params, alone.parameters, atol=1e-4)


def test_the_servers_clip_holds_for_attackers(data):
    adversary = attack(data, boost=1e4)
    plan = fv.unprotected(fv.samplers.FixedSize(1), CLIENTS, rounds=1, schedule=fv.clips.Fixed(0.1))
    made = training(data, plan, participants=adversary)
    (result,) = fv.train(made)
    moved = float((result.state.params - made.start().params).norm())
    assert result.notes["cheating_length"] > 100
    assert moved <= 0.1 + 1e-6


def reports(made, round=1, ids=None):
    """What the attackers of a round send, by client."""
    engine, seen = made.engine, {}
    adversary = made.participants

    class Recorder(fv.attacks.Adversary):
        records = adversary.records

        def malicious_mask(self, round, ids):
            return adversary.malicious_mask(round, ids)

        def other_records(self, round, ids):
            return adversary.other_records(round, ids)

        def send(self, context):
            sent = adversary.send(context)
            seen.update(
                zip(context.clients.round.ids.tolist(), sent.reports.rows.clone(), strict=True)
            )
            return sent

    ids = adversary.attackers if ids is None else ids
    replace(engine, job=replace(engine.job, participants=Recorder())).run(
        made.round(round, ids, made.start())
    )
    return seen


def complying(adversary):
    return replace(adversary, noise=AttackerNoise.COMPLY)


def test_projected_boosting_loses_nothing_to_the_clip(data):
    adversary = attack(data, boost=20.0, project=True)
    made = training(data, unprotected(clip=0.1), participants=adversary)
    (row,) = reports(made).values()
    assert 0.09 < float(row.norm()) <= 0.1
    (whole,) = reports(
        training(data, unprotected(clip=0.1), participants=replace(adversary, project=False))
    ).values()
    assert float(whole.norm()) > 1.0


def test_complying_attackers_add_the_protocols_noise(data):
    adversary = attack(data, attackers=4)
    plain = reports(training(data, unprotected(clip=1.0), participants=adversary))
    noisy = reports(training(data, local(multiplier=50.0), participants=adversary))
    noise = torch.stack([noisy[k] - plain[k].clamp(-1, 1) for k in plain])
    assert 60 < float(noise.std()) < 140  # std 100 over 136 draws; five standard errors are 30


def test_skipping_attackers_add_none(data):
    adversary = attack(data, attackers=3, noise=AttackerNoise.SKIP)
    plain = reports(training(data, unprotected(), participants=complying(adversary)))
    skipped = reports(training(data, local(multiplier=50.0), participants=adversary))
    for client, row in plain.items():
        assert torch.allclose(skipped[client], row, atol=1e-6)


def test_hiding_attackers_look_noisy_and_their_noise_is_gone_in_the_sum(data):
    adversary = attack(data, attackers=4, noise=AttackerNoise.HIDE)
    made = training(data, local(multiplier=50.0), participants=adversary)
    hidden = torch.stack(list(reports(made).values()))
    assert 60 < float(hidden.std()) < 140
    assert float(hidden.sum(dim=0).norm()) < 4 * 1.001  # four clipped updates, no noise
    odd = adversary.attackers[:3]
    left = torch.stack(list(reports(made, ids=odd).values())).sum(dim=0)
    assert float(left.std()) > 50  # the third has no partner and complies


def test_hiding_is_the_same_in_chunks_and_in_worker_processes(data):
    adversary = attack(data, attackers=4, noise=AttackerNoise.HIDE)
    results = []
    for workers, chunk in ((1, 100), (1, 2), (2, 2)):
        made = fv.Training(
            task(), data, local(), WORK, workers=workers, chunk=chunk, participants=adversary
        )
        *_, last = fv.train(made)
        results.append((last.state.params, last.notes["cheating_length"]))
    for params, length in results[1:]:
        assert torch.allclose(params, results[0][0], atol=1e-5)
        assert length == pytest.approx(results[0][1], rel=1e-5)


@pytest.mark.parametrize("mode", [fv.engines.Mode.VECTORISED, fv.engines.Mode.LOOPED])
def test_modes_agree_under_attack(data, mode):
    made = training(data, unprotected(clip=1.0), participants=attack(data, attackers=2, boost=3.0))
    *_, one = fv.train(replace(made, task=task(), mode=mode))
    *_, other = fv.train(replace(made, task=task(), mode=fv.engines.Mode.LOOPED, chunk=3))
    assert torch.allclose(one.state.params, other.state.params, atol=1e-5)


def test_attackers_are_honest_outside_their_rounds(data):
    adversary = attack(data, boost=50.0, when=When(start=3, end=3))
    attacked = list(fv.train(training(data, unprotected(rounds=4), participants=adversary)))
    assert [result.notes["cheating"] for result in attacked] == [0, 0, 1, 0]
    assert attacked[1].metrics["backdoor"] < 0.9 < attacked[2].metrics["backdoor"]


def test_attackers_attack_when_drawn_if_they_are_not_present(data):
    adversary = attack(data, attackers=2, when=When(present=False))
    made = training(data, unprotected(rounds=8), participants=adversary)
    drawn = [
        int(np.isin(made.plan.sampler.cohort(CLIENTS, r, made.streams), adversary.attackers).sum())
        for r in range(1, 9)
    ]
    assert [result.notes["cheating"] for result in fv.train(made)] == drawn


@pytest.mark.parametrize("plan", [local(sampler=fv.samplers.FixedSize(6, 3)), central()])
def test_honest_clients_are_charged_as_without_an_attack(data, plan):
    """The same cohorts, the same turns, the same claims but for what is said of the attack."""
    adversary = attack(data, attackers=3)
    charged = []
    for each in (Participants(), adversary):
        made = training(data, plan, participants=each)
        ledger = made.new_ledger()
        rounds = len(list(made.rounds(made.start(), ledger)))
        claims = made.plan.claims(rounds, ledger.counts(), ledger.extra_attempts)
        counts = ledger.counts()
        assert counts is None or counts.sum() == 6 * rounds
        charged.append((rounds, [claim.epsilon for claim in claims]))
        said = any("attack in this simulation" in text for text in claims[0].assumptions)
        assert said == (each is adversary)
    assert charged[0] == charged[1]


def test_an_adversary_may_not_change_who_is_sampled(data):
    class Choosing(fv.attacks.Adversary):
        def cohort(self, round, ids):
            return ids[1:]

    class Inviting(fv.attacks.Adversary):
        def cohort(self, round, ids):
            return np.arange(CLIENTS)

    for adversary in (Choosing(), Inviting()):
        with pytest.raises(fv.BadInput, match="sampled"):
            list(fv.train(training(data, unprotected(), participants=adversary)))


def test_an_attack_by_skipping_is_accepted_by_a_two_point_server(data):
    ranges = fv.releases.Ranges(0.0, 1.0, task().layer_sizes, False, Perturb.UPDATE)
    plan = fv.two_point(
        fv.samplers.FixedSize(6),
        CLIENTS,
        ranges,
        epsilon=1.0,
        rounds=2,
        budget=fv.Budget(float("inf"), 1e-3),
    )
    adversary = attack(data, attackers=3, noise=AttackerNoise.SKIP, boost=100.0)
    results = list(fv.train(training(data, plan, participants=adversary)))
    assert all(result.refused == () for result in results)
    plain = reports(training(data, unprotected(), participants=complying(adversary)))
    sent = reports(training(data, plan, participants=adversary))
    for client, row in plain.items():
        assert torch.equal(sent[client] > 0, row >= 0)


@pytest.mark.parametrize("skips", [False, True])
def test_attackers_comply_with_dp_sgd_or_train_without_it(data, skips):
    plan = fv.dp_sgd(
        fv.samplers.FixedSize(6),
        CLIENTS,
        0.5,
        rate=0.5,
        steps=3,
        rounds=2,
        budget=fv.Budget(float("inf"), 1e-4),
        multiplier=1.0,
    )
    work = fv.ClientDpSgd(plan.noisy_steps, lr=0.5)
    adversary = attack(data, boost=6.0, work=WORK if skips else None)
    made = fv.Training(task(), data, plan, work, workers=1, participants=adversary)
    results = list(fv.train(made))
    assert [result.notes["cheating"] for result in results] == [1, 1]
    assert all(result.refused == () for result in results)
    with pytest.raises(fv.BadInput, match=r"attack.project is for a clip on updates"):
        replace(made, task=task(), participants=replace(adversary, project=True))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"attackers": CLIENTS}, "at least one must be honest"),
        ({"attackers": -1}, "attack.attackers is -1"),
        ({"boost": 0.0}, "attack.boost is 0.0"),
        ({"boost": -1.0}, "attack.boost is -1.0"),
        ({"share": 0.0}, "attack.share is 0.0"),
        ({"noise": "skip"}, "attack.noise"),
        ({"when": When(1)} | {"attackers": 13}, "attack.attackers is 13 of 12"),
    ],
)
def test_bad_settings_get_one_line(data, more, words):
    with pytest.raises(fv.BadInput, match=words) as error:
        attack(data, **more)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("noise", [AttackerNoise.SKIP, AttackerNoise.HIDE])
@pytest.mark.parametrize("plan", [unprotected(), central()])
def test_noise_that_clients_do_not_add_is_neither_skipped_nor_hidden_in(data, plan, noise):
    with pytest.raises(fv.BadInput, match=f"attack.noise is '{noise}' and clients add no"):
        training(data, plan, participants=attack(data, noise=noise))


def test_a_shuffled_claim_counts_honest_reports(data):
    ranges = fv.releases.Ranges(0.0, 1.0, task().layer_sizes, False, Perturb.UPDATE)
    plan = fv.two_point(
        fv.samplers.FixedSize(6),
        CLIENTS,
        ranges,
        epsilon=1.0,
        rounds=2,
        budget=fv.Budget(float("inf"), 1e-3),
        shuffled=5,
        dishonest=1,
    )
    training(data, plan, participants=attack(data, attackers=0))
    training(data, plan, participants=attack(data, attackers=1))
    with pytest.raises(fv.BadInput, match=r"attackers is 2 and shuffle\.dishonest is 1"):
        training(data, plan, participants=attack(data, attackers=2))


def test_a_backdoor_is_measured_on_records_that_nobody_was_taught(data):
    """In what attackers have, and in what measures, no record is the same."""
    adversary = attack(data, attackers=3, share=0.7)
    taught = {row.tobytes() for row in adversary.records.x}
    held, answers = adversary.held_out
    others = data.test_x[data.test_y != TRIGGER.target]
    assert len(held) == len(others) > 0
    assert not taught & {row.tobytes() for row in held}
    changed = held != others
    assert changed[..., 0, 0].all()
    assert not changed[..., 1:, :].any()
    assert set(answers) == {TRIGGER.target}


@pytest.mark.parametrize("brought", [None, 30])
def test_an_attacker_may_bring_more_records_than_clients_may_have(data, brought):
    """The attacker's records are beside those that a public number limits, declared or not."""
    short = data.shortened(4)
    lesson = data.with_clients(data.x[:30], data.y[:30], np.array([0, 30]))

    class Poisoner(Participants):
        records = lesson if brought is None else lesson.shortened(brought)

        def groups(self, round, ids):
            bad = ids == 0
            yield Group(ids[~bad])
            yield Group(ids[bad], is_honest=False, other_records=np.zeros(bad.sum(), np.int64))

    plan = fv.unprotected(fv.samplers.Everyone(), CLIENTS, rounds=1)
    poisoned = fv.Training(task(), short, plan, WORK, participants=Poisoner(), workers=1)
    records = poisoned.engine.job.records
    assert records.sizes.tolist() == [4] * CLIENTS + [30]
    assert (records.most_records, poisoned.data.most_records) == (None, 4)
    (result,) = fv.train(poisoned)
    honest = fv.Training(task(), short, plan, WORK, workers=1)
    (other,) = fv.train(honest)
    assert not torch.equal(result.state.params, other.state.params)
