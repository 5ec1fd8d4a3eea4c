"""Persons as units: who joins, what is clipped, which records count, and what is refused.

Statistical tests have a false-alarm rate of 1e-6 each.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.base.identity import identity
from fedveil.data.persons import numbered
from fedveil.privacy.accounting.claims import Relation, Trust, Unit
from fedveil.privacy.accounting.events import Gaussian, GroupSampled, PoissonSampled
from fedveil.privacy.clip import Clip
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.release import NoisySteps
from fedveil.privacy.releases.sites import PART, WHOLE, sites
from fedveil.privacy.secure import planned_for, with_secure_noise
from fedveil.training.cohort import Batch, CohortData
from fedveil.training.gradients import clipped_units
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.server import Weights
from fedveil.training.session import Training, train
from fedveil.training.work import ClientDpSgd, SiteSum, noisy_batch, poisson_batch
from tests.asking import batch_of

ALARM = 1e-6
SECURE = Streams(5, secure=True)
FREE = fv.Budget(math.inf, 1e-3)
CLIP = Clip(0.1)
WHOSE = ([0, 1, 0, 2, 1, 0, 3], [0], [1, 1, 0, 1], [0, 1, 1, 2, 2, 2, 3, 3, 3, 3], [0, 0, 0])
"""Persons of clients with 7, 1, 4, 10 and 3 records."""

PERSON, RECORD = Unit.PERSON, Unit.RECORD


@pytest.fixture
def people(make_family):
    """(task, data) of a model family; records have persons, of whom `cap` records count."""

    def make(name="softmax", cap=3):
        task, data = make_family(name)
        data = replace(data, persons=np.concatenate(WHOSE))
        return task, data if cap is None else data.capped(cap)

    return make


def dp_plan(clients=5, **more):
    settings = {"rate": 0.5, "steps": 2, "rounds": 2, "budget": FREE, "multiplier": 1.0, **more}
    return fv.dp_sgd(fv.samplers.Everyone(), clients, 0.1, **settings)


def site_plan(data, secure=None, **more):
    budget = FREE if secure is None else planned_for(FREE)
    units = int(data.people.sum()) if more.get("unit") is PERSON else data.records
    settings = {"records": units, "rate": 0.5, "share": WHOLE, "rounds": 2, "multiplier": 1.0}
    plan = sites(data.clients, 0.1, **{**settings, "budget": budget, **more})
    return plan if secure is None else with_secure_noise(plan, secure, diagnostics=False)


# --- which records count ---


def test_a_cap_keeps_so_many_records_of_each_person_and_no_more(people):
    _, data = people(cap=None)
    for cap in (1, 2, 3, 4, 9):
        capped = data.capped(cap)
        counts = capped.person_index.record_counts
        assert counts.tolist() == np.minimum(data.person_index.record_counts, cap).tolist()
        assert capped.people.tolist() == data.people.tolist() == [4, 1, 2, 4, 1]
        assert capped.cap == cap


def test_records_that_count_follow_from_their_person_alone(people):
    """Other people may come and go, and a client's order of people may change."""
    _, data = people(cap=None)
    x = np.arange(data.records, dtype=np.float32)[:, None]
    marked = replace(data, x=x, test_x=np.zeros((20, 1), dtype=np.float32))
    whole = marked.capped(2)
    for client in range(5):
        for person in range(int(data.people[client])):
            own = (data.persons == person) & (np.repeat(np.arange(5), data.sizes) == client)
            rows = np.flatnonzero(own)
            if not own.any() or len(rows) == data.sizes[client]:
                continue
            offsets = np.array([0, len(rows)])
            alone = replace(marked, names=None, test_owners=None).with_clients(
                marked.x[rows], marked.y[rows], offsets, np.zeros(len(rows), dtype=np.int64)
            )
            alone = alone.capped(2)
            kept = alone.x.ravel().tolist()
            among = [v for v in whole.x.ravel().tolist() if v in rows]
            assert kept == among
            assert len(kept) == min(2, len(rows))


def test_records_that_count_are_not_simply_the_first():
    x = np.arange(40, dtype=np.float32)[:, None]
    data = fv.FederatedData.from_clients([("a", x, x[:, 0])], classes=0, persons=[[7] * 40])
    kept = data.capped(10).x.ravel()
    assert len(kept) == 10
    assert kept.max() > 20
    assert sorted(kept) == kept.tolist()


# --- who joins ---


@pytest.mark.parametrize("secure", [False, True])
def test_people_join_with_the_rate_and_all_their_records_with_them(people, secure):
    _, data = people()
    noisy, rate = NoisySteps(0.3, 1, 1.0, unit=PERSON, cap=3), 0.3
    cohort, draws = CohortData(data, np.array([3])), 3000
    joined, together = np.zeros(4), np.zeros((4, 4))
    for step in range(draws):
        batch = poisson_batch(noisy, cohort, 1, step, SECURE if secure else Streams(5))
        who = batch.index[0][batch.mask[0] > 0].numpy()
        assert len(set(who.tolist())) == len(who)
        joined[who] += 1
        together[np.ix_(who, who)] += 1
        records = cohort.records_of(batch, 3)
        used = records.index[0][records.mask[0] > 0].numpy()
        own = np.flatnonzero(np.isin(data.persons[data.offsets[3] : data.offsets[4]], who))
        assert sorted(used.tolist()) == own.tolist()
    for k in range(4):
        assert stats.binomtest(int(joined[k]), draws, rate).pvalue > ALARM / 20
        for j in range(k):
            assert stats.binomtest(int(together[k, j]), draws, rate**2).pvalue > ALARM / 20


def test_with_secure_noise_everybody_has_as_many_places(people):
    """As many as the cap says, whoever else joined and whatever they have."""
    task, data = people()
    plan = with_secure_noise(
        fv.dp_sgd(
            fv.samplers.Everyone(),
            5,
            0.1,
            rate=0.5,
            steps=1,
            rounds=1,
            budget=planned_for(FREE),
            multiplier=1.0,
            unit=PERSON,
            cap=5,
        ),
        task.size,
        diagnostics=False,
    )
    data = replace(data, cap=5)
    looped = gradients_of(task, Mode.LOOPED, data)
    for client in range(5):
        cohort = CohortData(data, np.array([client]))
        clients = batch_of(1, task.parameters, cohort, CLIP, looped, SECURE)
        for step in range(20):
            batch = noisy_batch(plan.noisy_steps, clients, step)
            assert batch.group == 5
            assert batch.mask.shape[1] % 5 == 0
            assert batch.mask.shape[1] <= 5 * int(data.people[client])


def test_places_beyond_a_person_s_records_repeat_one_of_its_own(people):
    _, data = people()
    cohort = CohortData(data, np.array([0, 3]))
    batch = Batch(torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2))
    records = cohort.records_of(batch, 3)
    assert records.index.tolist() == [[0, 2, 5, 6, 6, 6], [1, 2, 2, 3, 4, 5]]
    assert records.mask.tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1]]
    with pytest.raises(AssertionError, match="more than 2 records"):
        cohort.records_of(batch, 2)


# --- what is clipped ---


def by_hand(task, data, client, who, clip):
    """The sum of clipped means of single-record gradients, by plain autograd."""
    total = torch.zeros(task.size, dtype=torch.float64)
    begin = int(data.offsets[client])
    persons = data.persons[begin : int(data.offsets[client + 1])]
    for person in who:
        rows = []
        for row in begin + np.flatnonzero(persons == person):
            named = {n: v.clone().requires_grad_() for n, v in task.named(task.parameters).items()}
            x, y = torch.tensor(data.x[row : row + 1]), torch.tensor(data.y[row : row + 1])
            loss = task.losses(named, x, y).sum()
            found = torch.autograd.grad(loss, list(named.values()))
            rows.append(task.flattened(dict(zip(named, found, strict=True))).double())
        mean = torch.stack(rows).mean(dim=0)
        total += mean * min(1.0, clip / float(mean.norm()))
    return total


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("name", ["softmax", "linear", "mlp", "small-cnn"])
def test_a_person_s_mean_gradient_is_clipped_once(people, name, mode):
    task, data = people(name)
    cohort = CohortData(data, np.array([0, 3]))
    chosen = Batch(torch.tensor([[0, 2, 3], [3, 1, 0]]), torch.tensor([[1.0, 1, 1], [1, 1, 0]]))
    trajectory = gradients_of(task, mode, data).trajectory(task.parameters, cohort, spanned=False)
    found = trajectory.clipped_sum(None, cohort.records_of(chosen, 3), CLIP)
    for k, (client, who) in enumerate([(0, [0, 2, 3]), (3, [3, 1])]):
        expected = by_hand(task, data, client, who, CLIP.value)
        assert torch.allclose(found[k].double(), expected, atol=2e-5)


@pytest.mark.parametrize("mode", list(Mode))
def test_it_is_the_mean_that_is_clipped(people, mode):
    """Under a clip that nothing reaches a sum would be longer."""
    task, data = people("mlp")
    cohort, wide = CohortData(data, np.array([3])), Clip(1e3)
    trajectory = gradients_of(task, mode, data).trajectory(task.parameters, cohort, spanned=False)
    chosen = cohort.records_of(Batch(torch.tensor([[2, 1]]), torch.ones(1, 2)), 3)
    found = trajectory.clipped_sum(None, chosen, wide)[0].double()
    assert torch.allclose(found, by_hand(task, data, 3, [2, 1], wide.value), atol=1e-5)


def test_layers_without_a_rule_for_vmap_are_computed_record_by_record(people, monkeypatch):
    task, data = people("mlp")
    cohort = CohortData(data, np.array([3]))
    chosen = cohort.records_of(Batch(torch.tensor([[0, 2, 3]]), torch.ones(1, 3)), 3)

    def found():
        looped = gradients_of(task, Mode.LOOPED, data)
        trajectory = looped.trajectory(task.parameters, cohort, spanned=False)
        return trajectory.clipped_sum(None, chosen, CLIP)[0].double()

    def refused(*given):
        raise RuntimeError("no rule for vmap")

    vmapped = found()
    monkeypatch.setattr(clipped_units, "unit_gradients", refused)
    assert torch.allclose(found(), vmapped, atol=1e-6)
    assert torch.allclose(found(), by_hand(task, data, 3, [0, 2, 3], 0.1), atol=2e-5)


@pytest.mark.parametrize("mode", list(Mode))
def test_people_with_one_record_are_records(people, mode):
    task, data = people("mlp", cap=1)
    seen = []
    for unit in (PERSON, RECORD):
        plan = dp_plan(rate=1.0, multiplier=1e-9, unit=unit, cap=1)
        training = Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=1.0), mode=mode)
        vars(training)["streams"] = Streams(3)
        asked = training.round(1, np.arange(5), training.start())
        seen.append(training.engine.run(asked).total)
    assert torch.allclose(seen[0], seen[1], atol=1e-6)


# --- secure noise ---


def exact_sum(task, data, client, who, mask, grid):
    cohort = CohortData(data, np.array([client]))
    looped = gradients_of(task, Mode.LOOPED, data)
    trajectory = looped.trajectory(task.parameters, cohort, spanned=False)
    chosen = Batch(torch.tensor([who]), torch.tensor([mask], dtype=torch.float32))
    return trajectory.clipped_sum_on_grid(None, cohort.records_of(chosen, 3), CLIP, grid)


@pytest.mark.parametrize("name", ["softmax", "linear", "mlp", "small-cnn"])
def test_with_secure_noise_a_person_moves_the_sum_by_its_own_row_and_no_bit_more(people, name):
    task, data = people(name)
    grid = GaussianMechanism(1.0).grid(CLIP.value, task.size)
    who, mask = [2, 0, 3, 1, 0, 0], [1, 1, 1, 1, 0, 0]
    whole = exact_sum(task, data, 3, who, mask, grid)
    assert grid.holds(whole)
    expected = by_hand(task, data, 3, range(4), CLIP.value)
    assert torch.allclose(whole, expected, atol=2e-5)
    for slot in range(4):
        rest = exact_sum(
            task, data, 3, who, [0 if k == slot else u for k, u in enumerate(mask)], grid
        )
        own = exact_sum(task, data, 3, who, [int(k == slot) for k in range(6)], grid)
        assert torch.equal(whole - rest, own)
        assert 0 < float(own.norm()) <= CLIP.value


def test_slots_of_people_that_see_each_other_are_computed_one_by_one(people, monkeypatch):
    task, data = people()
    sizes, whole = [], clipped_units.unit_gradients

    def leaking(task, flat, x, *rest):
        sizes.append(len(x))
        return whole(task, flat, x, *rest) * (1 + 2**-22 * x.mean().sign())

    monkeypatch.setattr(clipped_units, "unit_gradients", leaking)
    grid = GaussianMechanism(1.0).grid(CLIP.value, task.size)
    exact_sum(task, data, 3, [0, 1, 2, 3], [1, 1, 1, 1], grid)
    assert sizes[-4:] == [1, 1, 1, 1]
    assert max(sizes) == 64  # what was tried


def test_slots_are_tried_in_the_shape_in_which_they_are_used(people):
    task, data = people()
    units = gradients_of(task, Mode.LOOPED, data).clip_examples(3)
    assert units._sizes[0] == 64  # 64 x 3 records, at most 256
    (x, y, weights) = units._sample
    assert x.shape[:2] == y.shape[:2] == weights.shape[:2] == (2, 3)


@pytest.mark.parametrize("unit", [PERSON, RECORD])
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("share", [WHOLE, PART])
def test_sites_train_per_person(people, unit, secure, share):
    task, data = people()
    plan = site_plan(data, task.size if secure else None, unit=unit, cap=3, share=share)
    training = Training(task, data, plan, SiteSum(plan.noisy_steps))
    *_, last = train(training)
    assert last.state.round == 2
    claim = training.plan.claims(2)[0]
    assert claim.unit is PERSON
    assert claim.trust is (Trust.SITE if share == WHOLE else Trust.SECURE_SUM)
    assert claim.for_units(2).epsilon > 2 * claim.epsilon
    assert "for one person at 2 clients" in claim.for_units(2).short
    for text in ("at most 3 records of a person count", "a person at two sites counts as two"):
        assert any(text in each for each in claim.assumptions)


@pytest.mark.parametrize("unit", [PERSON, RECORD])
@pytest.mark.parametrize("nominal", [None, 12])
def test_dp_sgd_with_secure_noise_trains_per_person(people, unit, nominal):
    task, data = people()
    plan = with_secure_noise(
        dp_plan(unit=unit, cap=3, nominal=nominal, budget=planned_for(FREE)),
        task.size,
        diagnostics=False,
    )
    training = Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=0.1))
    *_, last = train(training)
    assert last.state.round == 2
    claim = training.plan.claims(2)[0]
    assert (claim.unit, claim.noise) == (PERSON, "secure")
    assert claim.neighbours is (Relation.ZERO_OUT if nominal is None else Relation.ADD_REMOVE)
    assert not any("no client has more" in each for each in claim.assumptions)


def test_the_noise_is_one_clip_s_whatever_a_person_has(people):
    """Of a step without gradients, over many rounds: its deviation is the plan's."""
    task, data = people("linear")
    plan = dp_plan(unit=PERSON, cap=3, rate=1.0, steps=1, multiplier=2.0)
    work, looped = ClientDpSgd(plan.noisy_steps, lr=1.0), gradients_of(task, Mode.LOOPED, data)
    still = replace(plan.noisy_steps, multiplier=0.0)
    quiet, noise = ClientDpSgd(still, lr=1.0), []
    for number in range(1, 400):
        cohort = CohortData(data, np.array([3]))
        clients = batch_of(number, task.parameters, cohort, CLIP, looped, Streams(9))
        difference = work.updates(clients).rows - quiet.updates(clients).rows
        noise.append(difference[0].double() * 4 / (2.0 * CLIP.value))  # 4 people, rate 1
    drawn = torch.cat(noise).numpy()
    statistic = float((drawn**2).sum())
    assert stats.chi2.sf(statistic, len(drawn)) > ALARM
    assert stats.chi2.cdf(statistic, len(drawn)) > ALARM


def test_sums_are_divided_by_people_and_weighed_by_them(people):
    task, data = people()
    plan = dp_plan(unit=PERSON, cap=3, rate=1.0, steps=1, multiplier=1e-9)
    training = Training(
        task, data, plan, ClientDpSgd(plan.noisy_steps, lr=1.0), weights=Weights.EXAMPLES
    )
    asked = training.round(1, np.arange(5), training.start())
    done = training.engine.run(asked)
    assert done.weight == 12  # people
    expected = sum(
        by_hand(task, data, client, range(int(data.people[client])), CLIP.value)
        for client in range(5)
    )
    assert torch.allclose(done.total, -expected, atol=1e-5)
    summed = site_plan(data, unit=PERSON, cap=3, rate=0.25)
    assert summed.release.divisor(1.0, 5.0) == 0.25 * 12


# --- what is accounted ---


def test_steps_say_what_is_accounted():
    assert NoisySteps(0.5, 1, 2.0).event(3.0) == PoissonSampled(0.5, Gaussian(3.0))
    assert NoisySteps(1.0, 1, 2.0).event(3.0) == Gaussian(3.0)
    person = NoisySteps(0.5, 1, 2.0, unit=PERSON, cap=4)
    assert person.event(3.0) == PoissonSampled(0.5, Gaussian(3.0))
    assert (person.protected, person.group) == (PERSON, 4)
    records = NoisySteps(0.5, 1, 2.0, cap=4)
    assert records.event(3.0) == GroupSampled(0.5, 4, Gaussian(3.0))
    assert (records.protected, records.group) == (PERSON, 1)
    assert NoisySteps(0.5, 1, 2.0, cap=1).event(3.0) == PoissonSampled(0.5, Gaussian(3.0))
    assert NoisySteps(1.0, 1, 2.0, cap=4).event(3.0) == GroupSampled(1.0, 4, Gaussian(3.0))


def test_a_capped_account_is_that_of_as_many_records(people):
    """The claim per person is what `for_units` says of a claim per record, exactly."""
    plain = dp_plan(rate=0.2, multiplier=3.0)
    per_person = dp_plan(rate=0.2, multiplier=3.0, cap=4)
    record, person = plain.claims(2)[0], per_person.claims(2)[0]
    assert person.epsilon == record.for_units(4).epsilon
    assert person.for_units(2).epsilon == pytest.approx(record.for_units(8).epsilon, rel=1e-9)
    assert person.unit is PERSON


def test_noise_for_records_of_a_person_is_found_from_the_budget():
    budget = fv.Budget(2.0, 1e-5)
    plan = dp_plan(budget=budget, multiplier=None, cap=3)
    assert 1.98 < plan.claims(2)[0].epsilon <= 2.0
    assert plan.permitted == 2
    clipped = dp_plan(budget=budget, multiplier=None, cap=3, unit=PERSON)
    assert clipped.claims(2)[0].epsilon <= 2.0
    assert plan.release.multiplier > 2.5 * clipped.release.multiplier


# --- identities ---


def test_nothing_of_a_recipe_per_record_changes(people):
    task, data = people(cap=None)
    bare = replace(data, persons=None)
    assert data.fingerprint == bare.fingerprint
    plan = dp_plan()
    trainings = [
        Training(task, each, plan, ClientDpSgd(plan.noisy_steps, lr=0.1)) for each in (data, bare)
    ]
    assert trainings[0].digest == trainings[1].digest
    assert (
        identity(plan.noisy_steps) == "[steps='noisy',rate=0.5,count=2,multiplier=1.0,nominal=None]"
    )
    assert "unit" not in identity(site_plan(data).release)


def test_who_has_which_records_is_part_of_a_training_per_person(people):
    _, data = people(cap=None)
    other = replace(data, persons=numbered(np.arange(data.records) // 2, data.offsets))
    prints = {data.fingerprint, data.capped(9).fingerprint, other.capped(9).fingerprint}
    prints |= {data.capped(10).fingerprint}
    assert len(prints) == 4
    steps = {
        identity(NoisySteps(0.5, 1, 1.0, None, unit, cap))
        for unit in Unit
        if unit in (PERSON, RECORD)
        for cap in (2, 3)
    }
    assert len(steps) == 4


def test_repetitions_train_on_one_object(people):
    _, data = people(cap=None)
    assert data.capped(2) is data.capped(2)


# --- what is refused ---


def test_a_plan_about_persons_and_other_data_are_refused(people):
    task, data = people(cap=None)
    plan = dp_plan(unit=PERSON, cap=3)
    work = ClientDpSgd(plan.noisy_steps, lr=0.1)
    for wrong in (data, data.capped(4), data.capped(2), replace(data, persons=None)):
        with pytest.raises(BadInput, match=r"use data.capped\(3\)"):
            Training(task, wrong, plan, work)
    with pytest.raises(BadInput, match="nobody says which records are whose"):
        replace(data, persons=None).capped(3)
    assert Training(task, data.capped(3), plan, work).plan.private


def test_work_with_another_unit_or_cap_than_the_plan_s_is_refused(people):
    task, data = people()
    plan = dp_plan(unit=PERSON, cap=3)
    for changes in ({"unit": RECORD}, {"cap": 4}, {"unit": RECORD, "cap": None}):
        work = ClientDpSgd(replace(plan.noisy_steps, **changes), lr=0.1)
        with pytest.raises(BadInput, match="the plan accounts for NoisySteps"):
            Training(task, data, plan, work)
    summed = site_plan(data, unit=PERSON, cap=3)
    with pytest.raises(BadInput, match="the plan accounts for NoisySteps"):
        Training(task, data, summed, SiteSum(NoisySteps(0.5, 1, summed.noisy_steps.multiplier)))


def test_a_claim_about_persons_with_steps_about_records_is_refused(people):
    """Plans put together by hand: the line says person, the steps do not."""
    task, data = people()
    for plan in (dp_plan(), site_plan(data)):
        lines = tuple(replace(line, unit=PERSON) for line in plan.lines)
        wrong = replace(plan, lines=lines)
        work = (
            SiteSum(plan.noisy_steps)
            if plan.release.requires.sends_sum
            else ClientDpSgd(plan.noisy_steps, 0.1)
        )
        with pytest.raises(BadInput, match="a record is protected, not a person"):
            Training(task, data, wrong, work)


@pytest.mark.parametrize(
    "event", [PoissonSampled(0.5, Gaussian(1.0)), GroupSampled(0.5, 2, Gaussian(1.0))]
)
def test_lines_that_count_fewer_records_than_join_are_refused(people, event):
    _, data = people()
    for plan in (dp_plan(cap=3), site_plan(data, cap=3)):
        lines = tuple(replace(line, event=event) for line in plan.lines)
        wrong = replace(plan, lines=lines)
        with pytest.raises(BadInput, match="take NoisySteps"):
            wrong.check_lines()


def test_a_person_with_more_records_than_the_cap_cannot_be_made(people):
    _, data = people(cap=None)
    with pytest.raises(BadInput, match="a person has 4 records and cap is 3"):
        replace(data, cap=3)
    with pytest.raises(BadInput, match="persons is None"):
        replace(data, persons=None, cap=3)
    for wrong in (data.persons + 1, -data.persons, data.persons[:-1], data.persons.astype(float)):
        with pytest.raises(BadInput, match="persons"):
            replace(data, persons=wrong)
    gap = data.persons.copy()
    gap[data.offsets[3] : data.offsets[4]] *= 2
    with pytest.raises(BadInput, match="without gaps"):
        replace(data, persons=gap)


def test_steps_that_make_no_sense_are_refused_in_one_line():
    for wrong, words in (
        ({"unit": PERSON}, "cap is missing"),
        ({"unit": Unit.CLIENT}, "use Unit.RECORD or Unit.PERSON"),
        ({"unit": "people"}, "use Unit.RECORD or Unit.PERSON"),
        ({"unit": "person", "cap": 3}, "use Unit.RECORD or Unit.PERSON"),
        ({"cap": 0}, "cap is 0"),
    ):
        with pytest.raises(BadInput, match=words) as refusal:
            NoisySteps(0.5, 1, 1.0, **wrong)
        assert "\n" not in str(refusal.value)


def test_a_delta_that_allows_publishing_somebody_is_refused(people):
    task, data = people()
    plan = dp_plan(unit=PERSON, cap=3, budget=fv.Budget(math.inf, 0.1))
    with pytest.raises(BadInput, match="not below 1 / 12 people"):
        Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=0.1))


def test_people_at_sites_are_claimed_by_declared_numbers_and_the_same_cap(people):
    task, data = people()
    plan = dp_plan(unit=PERSON, cap=3)
    away = data.at_sites([str(k) for k in range(5)], [3] * 5)
    assert (away.persons, away.cap) == (None, None)

    def training(data):
        return Training(
            task, data, plan, ClientDpSgd(plan.noisy_steps, lr=0.1), make_engine=lambda job: None
        )

    for wrong in (away, away.capped(2)):
        with pytest.raises(BadInput, match="at most 3 records of a person"):
            training(wrong)
    unknown = data.at_sites([str(k) for k in range(5)], [3, 3, 0, 3, 3])
    with pytest.raises(BadInput, match="how many people client '2' has"):
        training(unknown.capped(3))
    assert training(away.capped(3)).data.people.tolist() == [3] * 5


def test_clients_with_more_people_than_words_are_counted_for_are_refused(people, monkeypatch):
    task, data = people()
    plan = dp_plan(unit=PERSON, cap=3, nominal=3, budget=planned_for(FREE))
    plan = with_secure_noise(plan, task.size, diagnostics=False)
    Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=0.1))
    monkeypatch.setattr("fedveil.training.agreement.MOST_RECORDS", 3)
    with pytest.raises(BadInput, match="has 4 people: with secure noise at most 3 are possible"):
        Training(task, data, plan, ClientDpSgd(plan.noisy_steps, lr=0.1))
