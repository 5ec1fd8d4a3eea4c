"""Robust aggregates against plain NumPy, and what they resist."""

import math

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.training import aggregates
from fedveil.training.aggregates import CoordinateMedian, Flame, Krum, TrimmedMean


def rows(count=11, size=37, seed=0):
    return torch.from_numpy(
        np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)
    )


def krum_scores(updates, malicious):
    """Blanchard et al., written as in the paper."""
    x = updates.numpy().astype(np.float64)
    scores = []
    for i in range(len(x)):
        others = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(len(x)) if j != i)
        scores.append(sum(others[: len(x) - malicious - 2]))
    return np.array(scores)


@pytest.mark.parametrize("count", [1, 2, 7, 10])
def test_the_median_is_numpys(count):
    x = rows(count)
    assert np.allclose(CoordinateMedian().combine(x), np.median(x.double().numpy(), axis=0))


@pytest.mark.parametrize(("trim", "out"), [(0.0, 0), (0.1, 1), (0.3, 3), (0.49, 5)])
def test_the_trimmed_mean_is_that_of_what_is_left(trim, out):
    x = rows()
    left = np.sort(x.double().numpy(), axis=0)[out : len(x) - out]
    assert np.allclose(TrimmedMean(trim).combine(x), left.mean(axis=0))


@pytest.mark.parametrize("malicious", [0, 1, 4])
def test_krum_takes_the_least_score(malicious):
    for seed in range(20):  # one neighbour more or less seldom changes who is best
        x = rows(seed=seed)
        best = int(np.argmin(krum_scores(x, malicious)))
        assert np.allclose(Krum(malicious).combine(x), x[best].double())


@pytest.mark.parametrize("chosen", [3, None])
def test_multi_krum_takes_the_mean_of_several(chosen):
    x = rows()
    count = len(x) - 2 if chosen is None else chosen
    best = np.argsort(krum_scores(x, 2), kind="stable")[:count]
    assert np.allclose(Krum(2, chosen).combine(x), x.double().numpy()[best].mean(axis=0))


def test_columns_in_blocks_are_the_same(monkeypatch):
    x = rows()
    whole = [each.combine(x) for each in (CoordinateMedian(), TrimmedMean(0.2), Krum(2), Flame())]
    monkeypatch.setattr(aggregates, "_COLUMNS", 40)
    again = [each.combine(x) for each in (CoordinateMedian(), TrimmedMean(0.2), Krum(2), Flame())]
    for one, other in zip(whole, again, strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize(
    "aggregate", [CoordinateMedian(), TrimmedMean(0.1), Krum(1), Krum(1, None), Flame()]
)
def test_a_boosted_row_is_resisted(aggregate):
    """The mean moves by a tenth of the boosted row, which is a thousand times too long."""
    x = 0.1 * rows() + 1.0
    boosted = x.clone()
    boosted[4] *= -1000
    honest = x.double().mean(dim=0)
    far = float((boosted.double().mean(dim=0) - honest).norm())
    assert far > 100
    assert float((aggregate.combine(boosted) - honest).norm()) < 0.02 * far


def test_flame_clips_to_the_median_length():
    x = 0.01 * rows() + 1.0
    x[3] *= 50
    lengths = x.double().norm(dim=1)
    assert float(Flame().combine(x).norm()) <= float(lengths.median()) * 1.001


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rounds_too_small_for_krum_do_not_move_the_model(count):
    assert not Krum(1).combine(rows(count)).any()


CLIENTS = 8


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(1)

    def some(count):
        x = rng.standard_normal((count, 3)).astype(np.float32)
        return x, (x @ np.array([1.0, -2.0, 0.5])).astype(np.float32)

    clients = [(str(k), *some(6)) for k in range(CLIENTS)]
    return fv.FederatedData.from_clients(clients, test=some(20), classes=0)


def training(data, plan, aggregate, **more):
    torch.manual_seed(0)
    task = fv.Task(torch.nn.Linear(3, 1), fv.models.squared_error)
    work = fv.ClientSgd(fv.Batches(0, steps=2), lr=0.1)
    return fv.Training(task, data, plan, work, aggregate=aggregate, **more)


def updates(data):
    """What every client's work comes to in the first round."""
    seen = []
    made = training(
        data, fv.unprotected(fv.samplers.Everyone(), CLIENTS, rounds=1), None, workers=1
    )
    watching = fv.attacks.ReportAttack(
        lambda round, ids, reports: seen.append(reports.clone()) or reports
    )
    made = training(data, made.plan, None, workers=1, participants=watching)
    (_,) = fv.train(made)
    return torch.cat(seen)


@pytest.mark.parametrize("mode", [fv.engines.Mode.VECTORISED, fv.engines.Mode.LOOPED])
@pytest.mark.parametrize(("workers", "chunk"), [(1, 100), (1, 3), (2, 2)])
def test_a_training_steps_along_the_aggregate(data, mode, workers, chunk):
    plan = fv.unprotected(fv.samplers.Everyone(), CLIENTS, rounds=1)
    how = {"mode": mode, "workers": workers, "chunk": chunk}
    made = training(data, plan, CoordinateMedian(), **how)
    (result,) = fv.train(made)
    moved = result.state.params - made.start().params
    wanted = np.median(updates(data).numpy(), axis=0)
    assert np.allclose(moved, wanted, atol=1e-6)


def test_refused_reports_are_no_rows(data):
    plan = fv.unprotected(fv.samplers.Everyone(), CLIENTS, rounds=1)

    def broken(round, ids, reports):
        reports[0] = math.nan
        return reports

    made = training(
        data, plan, CoordinateMedian(), workers=1, participants=fv.attacks.ReportAttack(broken)
    )
    (result,) = fv.train(made)
    wanted = np.median(updates(data).numpy()[1:], axis=0)
    assert len(result.refused) == 1
    assert np.allclose(result.state.params - made.start().params, wanted, atol=1e-6)


def test_with_noise_at_the_clients_an_aggregate_is_post_processing(data):
    plan = fv.client_noise(
        fv.samplers.Everyone(),
        CLIENTS,
        fv.clips.Fixed(1.0),
        laplace=False,
        rounds=2,
        budgets=(fv.Budget(math.inf, 1e-3),),
        multiplier=1.0,
    )
    plain, robust = (training(data, plan, each) for each in (None, CoordinateMedian()))
    results = [list(fv.train(each)) for each in (plain, robust)]
    assert results[0][-1].epsilon == results[1][-1].epsilon
    assert plain.streams.seed != robust.streams.seed  # two trainings never share noise


def test_an_aggregate_of_rows_is_refused_where_noise_is_for_the_sum(data):
    plan = fv.central(
        fv.samplers.Poisson(0.5),
        CLIENTS,
        fv.clips.Fixed(1.0),
        rounds=2,
        budget=fv.Budget(math.inf, 1e-3),
        multiplier=1.0,
    )
    with pytest.raises(fv.BadInput, match="noise is for the sum"):
        training(data, plan, CoordinateMedian())


def test_a_release_from_outside_has_to_allow_it(data):
    """It may protect the sum: nobody has said that it protects more."""

    class Own(fv.releases.Release):
        def noise_(self, total, round):
            total += 1.0

    plan = fv.PrivacyPlan(fv.samplers.Everyone(), CLIENTS, 1, release=Own())
    with pytest.raises(fv.BadInput, match="noise is for the sum"):
        training(data, plan, TrimmedMean())


def test_weights_by_examples_and_small_memory_are_refused(data):
    plan = fv.unprotected(fv.samplers.Everyone(), CLIENTS, rounds=1)
    with pytest.raises(fv.BadInput, match="counts all alike"):
        training(data, plan, CoordinateMedian(), weights=fv.servers.Weights.EXAMPLES)
    wide = fv.Task(torch.nn.Linear(3, 1), fv.models.squared_error)
    task = fv.Task(
        torch.nn.Sequential(torch.nn.Linear(3, 40_000), torch.nn.Linear(40_000, 1)), wide.loss
    )
    with pytest.raises(fv.BadInput, match=r"engine.memory is 1"):
        fv.Training(
            task,
            data,
            plan,
            fv.work.OneGradient(),
            aggregate=CoordinateMedian(),
            memory=1,
        )


@pytest.mark.parametrize(
    ("aggregate", "words"),
    [(Krum(3), "Krum needs at least 9"), (Krum, "an instance of Krum"), (3, "aggregate is 3")],
)
def test_bad_aggregates_get_one_line(data, aggregate, words):
    plan = fv.unprotected(fv.samplers.Everyone(), CLIENTS, rounds=1)
    with pytest.raises(fv.BadInput, match=words):
        training(data, plan, aggregate)


@pytest.mark.parametrize("bad", [-0.1, 0.5, math.nan])
def test_bad_shares_are_refused(bad):
    with pytest.raises(fv.BadInput, match=r"trim is"):
        TrimmedMean(bad)
