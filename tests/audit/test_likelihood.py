"""LiRA and RMIA beside small references of their own, written from the papers."""

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from fedveil.audit.membership import (
    References,
    ShadowModels,
    ShadowRunner,
    curves_of,
    lira,
    lira_offline,
    loss_logit,
    losses_of,
    outside_mean,
    rmia,
    slope,
)
from fedveil.base.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe

ROUNDS, RATE = 40, 3.0


@pytest.fixture(scope="module")
def shadow_models():
    settings = (
        *("data.clients=10", "data.most_records=24", "sample.kind=all", f"rounds={ROUNDS}"),
        *(f"server.lr={RATE}", "engine.workers=1", "engine.mode=vectorised"),
    )
    return ShadowModels(build(load_recipe("fedsgd", settings)), 5, seed=3)


def probabilities(weights, x):
    logits = x @ weights[0].T + weights[1]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def descended(shadow_models, inside):
    """Softmax regression in NumPy: the mean over clients of their mean gradients, each round."""
    data = shadow_models.training.data
    start = shadow_models.training.start().params.double().numpy()
    width = data.x.shape[1] if data.x.ndim == 2 else int(np.prod(data.x.shape[1:]))
    x = data.x.reshape(len(data.x), width).astype(np.float64)
    weights = [start[: 10 * width].reshape(10, width).copy(), start[10 * width :].copy()]
    owners = np.repeat(np.arange(data.clients), data.sizes)
    own = [np.flatnonzero(inside & (owners == k)) for k in range(data.clients)]
    share = [len(rows) / inside.sum() for rows in own]
    if str(shadow_models.training.weights) == "uniform":
        share = [1 / data.clients] * data.clients
    for _ in range(ROUNDS):
        down = [np.zeros_like(w) for w in weights]
        for rows, part in zip(own, share, strict=True):
            errors = probabilities(weights, x[rows]) - np.eye(10)[data.y[rows]]
            down[0] += part * errors.T @ x[rows] / len(rows)
            down[1] += part * errors.mean(axis=0)
        weights = [w - RATE * d for w, d in zip(weights, down, strict=True)]
    test = data.test_x.reshape(len(data.test_x), width).astype(np.float64)
    own_chances = probabilities(weights, x)
    others = probabilities(weights, test)
    return (
        own_chances[np.arange(len(x)), data.y],
        others[np.arange(len(test)), data.test_y],
        own_chances,
    )


def plain_lira(chances, inside, target, references):
    """Record by record, as Carlini et al. say it, one variance for all records."""
    phi = np.log(chances) - np.log1p(-chances)
    ins = [[phi[m, r] for m in references if inside[m, r]] for r in range(phi.shape[1])]
    outs = [[phi[m, r] for m in references if not inside[m, r]] for r in range(phi.shape[1])]
    in_std = np.sqrt(np.mean([np.var(v, ddof=1) for v in ins]))
    out_std = np.sqrt(np.mean([np.var(v, ddof=1) for v in outs]))
    online, offline = [], []
    for r in range(phi.shape[1]):
        with_ = norm.logpdf(phi[target, r], np.mean(ins[r]), in_std)
        without = norm(np.mean(outs[r]), out_std)
        online.append(with_ - without.logpdf(phi[target, r]))
        offline.append(without.cdf(phi[target, r]))
    return online, offline


def plain_rmia(chances, population, inside, target, references):
    """Pair by pair, as Zarifzadeh et al. say it."""
    records = chances.shape[1]
    ins = np.array(
        [np.mean([chances[m, r] for m in references if inside[m, r]]) for r in range(records)]
    )
    outs = np.array(
        [np.mean([chances[m, r] for m in references if not inside[m, r]]) for r in range(records)]
    )
    (a,), *_ = np.linalg.lstsq((1 - outs)[:, None], 1 - ins, rcond=None)
    at_z = np.mean([population[m] for m in references], axis=0)
    at_z = 0.5 * ((1 + a) * at_z + (1 - a))
    found = []
    for mean in ((ins + outs) / 2, 0.5 * ((1 + a) * outs + (1 - a))):
        scores = []
        for r in range(records):
            ratios = (chances[target, r] / mean[r]) / (population[target] / at_z)
            scores.append(np.mean(ratios >= 1))
        found.append(scores)
    return found


@pytest.mark.slow
def test_both_attacks_match_references_trained_and_scored_apart(shadow_models):
    """On embedded data: other trainings, other code, the same AUC to 0.02."""
    ours = curves_of(shadow_models.model_losses(ShadowRunner(1)), shadow_models.inside)
    inside = shadow_models.inside
    trained = [descended(shadow_models, each) for each in inside]
    chances = np.array([own for own, _, _ in trained])
    population = np.array([others for _, others, _ in trained])
    references = range(2, len(inside))
    pooled = {way: ([], []) for way in ours}
    for target in (0, 1):
        online, offline = plain_lira(chances, inside, target, references)
        pairs, pairs_offline = plain_rmia(chances, population, inside, target, references)
        every = (online, offline, pairs, pairs_offline)
        for (scores, labels), found in zip(pooled.values(), every, strict=True):
            scores.extend(found)
            labels.extend(inside[target])
    for way, (scores, labels) in pooled.items():
        assert ours[way].auc.value == pytest.approx(roc_auc_score(labels, scores), abs=0.02), way
    assert min(ours[way].auc.value for way in ours) > 0.65


def made(models=6, records=5, others=4, seed=0):
    random = np.random.default_rng(seed)
    inside = np.array([[(m + r) % 2 == 0 for r in range(records)] for m in range(models)])
    losses = random.gamma(1.0, size=(models, records))
    return References(losses, inside, random.gamma(1.0, size=(models, others)))


def test_scaled_is_the_logit_at_both_ends():
    chances = np.array([1e-30, 0.25, 0.5, 1 - 1e-9])
    assert loss_logit(-np.log(chances)) == pytest.approx(np.log(chances / (1 - chances)), rel=1e-6)
    assert np.isfinite(loss_logit(np.array([0.0, 800.0]))).all()


def test_each_record_has_its_own_variance_with_many_models():
    """Two records whose losses vary differently: with 64 models the steadier one tells more."""
    random = np.random.default_rng(1)
    inside = np.repeat([[True, True], [False, False]], 32, axis=0)
    spread = np.array([0.01, 1.0])
    losses = np.log1p(np.exp(-(np.where(inside, 1.0, 0.0) + spread * random.normal(size=(64, 2)))))
    population = random.gamma(1.0, size=(64, 3))
    one = np.log1p(np.exp(-np.array([1.0, 1.0])))
    many = lira(one, References(losses, inside, population))
    few = np.r_[0:16, 32:48]
    pooled = lira(one, References(losses[few], inside[few], population[few]))
    assert many[0] > 1000 > 10 > many[1]
    assert pooled[0] == pytest.approx(pooled[1], abs=1.0)


def test_a_lower_loss_is_a_higher_score():
    references = made()
    population = np.full(4, 0.7)
    for score in (
        lambda losses: lira_offline(losses, references),
        lambda losses: rmia(losses, population, references),
        lambda losses: rmia(losses, population, references, offline=True),
    ):
        low, high = score(np.full(5, 0.1)), score(np.full(5, 2.0))
        assert (low > high).all()


def test_offline_needs_no_model_that_trained_on_the_record():
    """What models with a record say of it changes no offline LiRA score, and every online one."""
    references = made()
    raised = references.reference_losses + 3.0 * references.inside
    other = References(raised, references.inside, references.population)
    losses = np.full(5, 0.5)
    assert lira_offline(losses, other) == pytest.approx(lira_offline(losses, references))
    assert (lira(losses, other) != lira(losses, references)).all()


def test_a_record_must_have_become_likelier_than_the_population():
    """One loss beats the whole population, or just fails to."""
    references = made(others=1)
    chances, inside = np.exp(-references.reference_losses), references.inside
    with_ = (chances * inside).sum(0) / inside.sum(0)
    without = (chances * ~inside).sum(0) / (~inside).sum(0)
    expected = outside_mean(np.exp(-references.population).mean(0), slope(with_, without))
    level = 0.3 / expected[0]
    for factor, beaten in ((1.01, True), (0.99, False)):
        losses = -np.log(factor * level * (with_ + without) / 2)
        found = rmia(losses, -np.log([0.3]), references)
        assert ((found >= 1) == beaten).all()


def test_records_that_beat_everybody_are_not_all_alike():
    references = made()
    found = rmia(np.array([1e-3, 1e-4, 1e-5, 0.5, 9.0]), np.full(4, 50.0), references)
    assert (found >= 1).sum() > 2
    assert len(np.unique(found)) == 5


def test_offline_scale_is_one_where_nothing_is_learnt():
    random = np.random.default_rng(0)
    chances = random.random(50)
    assert slope(chances, chances) == pytest.approx(1.0)
    assert slope(np.ones(3), np.array([0.2, 0.5, 0.9])) == 0.0
    assert slope(np.ones(3), np.ones(3)) == 1.0
    assert outside_mean(np.array([0.5]), 1.0) == 0.5
    assert outside_mean(np.array([0.5]), 0.0) == 0.75


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inside": np.ones((6, 5), dtype=bool)}, "in or out of 0 reference models"),
        ({"inside": np.ones((5, 5), dtype=bool)}, "not of the same models"),
        ({"population": np.zeros((6, 0))}, "no population"),
        ({"reference_losses": np.full((6, 5), np.inf)}, "its training diverged"),
    ],
)
def test_references_that_tell_nothing_are_refused(changes, words):
    parts = made()
    given = {name: getattr(parts, name) for name in ("reference_losses", "inside", "population")}
    with pytest.raises(BadInput, match=words):
        References(**{**given, **changes})


def test_losses_are_those_of_the_model(shadow_models):
    """Cross-entropy from float64 outputs: exp(-loss) is the probability of the label."""
    training = shadow_models.training
    data, task = training.data, training.task
    params = training.start().params
    with torch.no_grad():
        outputs = task.answers(params, torch.from_numpy(data.x[:30])).double().softmax(dim=1)
    wanted = outputs.numpy()[np.arange(30), data.y[:30]]
    assert np.exp(-losses_of(task, params, data.x[:30], data.y[:30])) == pytest.approx(wanted)
