"""Metrics are scikit-learn's on the whole arrays, in pieces as at once, and honest at the edges."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from fedveil.base.errors import BadInput
from fedveil.models.metrics import (
    PADDING,
    R2,
    Auroc,
    Metric,
    Rmse,
    TopK,
    correct,
    cross_entropy,
    metric_of,
    squared_error,
    why_unmeasurable,
)


def labels(classes, count=300, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (count,), generator=generator)
    outputs = torch.randn(count, classes, generator=generator)
    outputs[torch.arange(count), targets] += 1
    return (outputs.round() if ties else outputs), targets


def numbers(count=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(count, generator=generator)
    return (targets + torch.randn(count, generator=generator)).unsqueeze(-1), targets


def of(name, outputs, targets, piece=None):
    """A metric as `evaluate` finds it, of everything at once or in pieces."""
    metric, piece = metric_of(name), piece or len(targets)
    starts = range(0, len(targets), piece)
    if not isinstance(metric, Metric):
        each = [metric(outputs[a : a + piece], targets[a : a + piece]) for a in starts]
        return float(torch.cat(each).double().mean())
    kept = [metric.statistics(outputs[a : a + piece], targets[a : a + piece]) for a in starts]
    return metric.value(*(np.concatenate(arrays) for arrays in zip(*kept, strict=True)))


def probabilities(outputs):
    return torch.softmax(outputs.double(), -1).numpy()


OF_LABELS = {
    "accuracy": lambda o, y: sk.accuracy_score(y, o.argmax(-1)),
    "balanced-accuracy": lambda o, y: sk.balanced_accuracy_score(y, o.argmax(-1)),
    "top-3": lambda o, y: sk.top_k_accuracy_score(y, o.numpy(), k=3, labels=range(o.shape[-1])),
    "f1": lambda o, y: sk.f1_score(y, o.argmax(-1), average="macro"),
    "f1-macro": lambda o, y: sk.f1_score(y, o.argmax(-1), average="macro"),
    "auroc": lambda o, y: sk.roc_auc_score(y, probabilities(o), multi_class="ovr"),
    "perplexity": lambda o, y: math.exp(sk.log_loss(y, probabilities(o))),
}
OF_TWO = {
    "balanced-accuracy": lambda o, y: sk.balanced_accuracy_score(y, o.argmax(-1)),
    "f1": lambda o, y: sk.f1_score(y, o.argmax(-1)),
    "f1-macro": lambda o, y: sk.f1_score(y, o.argmax(-1), average="macro"),
    "auroc": lambda o, y: sk.roc_auc_score(y, probabilities(o)[:, 1]),
}
OF_NUMBERS = {
    "mae": lambda o, y: sk.mean_absolute_error(y, o),
    "rmse": lambda o, y: sk.root_mean_squared_error(y, o),
    "r2": lambda o, y: sk.r2_score(y, o),
}
CASES = [
    *((name, f, labels(7, seed=seed)) for name, f in OF_LABELS.items() for seed in range(3)),
    *((name, f, labels(2, seed=seed)) for name, f in OF_TWO.items() for seed in range(3)),
    *((name, f, numbers(seed=seed)) for name, f in OF_NUMBERS.items() for seed in range(3)),
]


@pytest.mark.parametrize("piece", [None, 300, 299, 64, 1])
@pytest.mark.parametrize(("name", "expected", "records"), CASES)
def test_every_metric_is_that_of_scikit_learn_however_it_is_cut(name, expected, records, piece):
    assert of(name, *records, piece) == pytest.approx(float(expected(*records)), rel=1e-6)


def test_a_perfect_prediction_and_none():
    outputs, targets = torch.eye(4).repeat(5, 1) * 30, torch.arange(4).repeat(5)
    for name in ("accuracy", "balanced-accuracy", "top-2", "f1", "auroc", "perplexity"):
        assert of(name, outputs, targets) == pytest.approx(1.0)
    wrong = outputs.roll(1, -1)
    assert of("accuracy", wrong, targets) == of("f1", wrong, targets) == 0.0
    numbers = torch.tensor([1.0, 2.0, 4.0])
    assert of("r2", numbers.unsqueeze(-1), numbers) == 1.0
    assert of("mae", numbers.unsqueeze(-1), numbers) == of("rmse", numbers, numbers) == 0.0


def test_balanced_accuracy_of_a_constant_is_one_over_the_labels_however_common_one_is():
    targets = torch.tensor([0] * 94 + [1] * 6)
    always = torch.tensor([[1.0, 0.0]]).repeat(100, 1)
    for piece in (None, 7, 1):
        assert of("accuracy", always, targets, piece) == pytest.approx(0.94)
        assert of("balanced-accuracy", always, targets, piece) == 0.5


def test_balanced_accuracy_counts_places_and_refuses_several_labels_at_once():
    outputs, targets = labels(3, count=12)
    sequences = targets.view(4, 3).clone()
    sequences[0, 1:] = PADDING
    real = sequences.flatten() != PADDING
    expected = sk.balanced_accuracy_score(targets[real], outputs[real].argmax(-1))
    assert of("balanced-accuracy", outputs.view(4, 3, 3), sequences) == pytest.approx(expected)
    with pytest.raises(BadInput, match="needs one label per place"):
        of("balanced-accuracy", torch.zeros(2, 3), torch.zeros(2, 3))


def test_of_ties_the_first_count_and_the_first_alone_is_the_accuracy():
    outputs, targets = labels(5, ties=True)
    assert torch.equal(TopK(1)(outputs, targets), correct(outputs, targets))
    nothing, every = torch.zeros(4, 4), torch.arange(4)
    assert TopK(2)(nothing, every).tolist() == [1, 1, 0, 0]
    assert TopK(4)(nothing, every).tolist() == [1, 1, 1, 1]


def test_scores_that_are_large_keep_their_order():
    """Probabilities would be 0 and 1 here, and all of them ties."""
    scores = torch.tensor([400.0, 300.0, 200.0, 100.0])
    outputs = torch.stack([torch.zeros(4), scores], -1)
    assert of("auroc", outputs, torch.tensor([1, 1, 0, 0])) == 1.0
    wide = torch.cat([outputs, torch.full((4, 1), -torch.inf)], -1)
    assert of("auroc", wide, torch.tensor([1, 1, 0, 0])) == 1.0


def test_labels_that_are_not_there_are_not_in_the_mean():
    outputs, targets = labels(3)
    wide = torch.cat([outputs, torch.full((len(targets), 2), -20.0)], -1)
    for name in ("f1", "auroc"):
        assert of(name, wide, targets) == pytest.approx(of(name, outputs, targets), rel=1e-6)


@pytest.mark.parametrize("name", [*OF_LABELS, *OF_NUMBERS])
def test_a_model_that_diverged_has_no_value(name):
    outputs, targets = labels(7) if name in OF_LABELS else numbers()
    outputs[17] = math.nan
    assert math.isnan(of(name, outputs, targets, 100))


def test_what_has_no_value_is_no_number():
    outputs, targets = labels(3)
    assert math.isnan(of("auroc", outputs, torch.zeros_like(targets)))
    two = torch.tensor([[1.0, 0.0]]).repeat(3, 1)
    assert math.isnan(of("f1", two, torch.zeros(3, dtype=torch.int64)))  # of label 1: there is none
    assert of("f1", two, torch.tensor([0, 0, 1])) == 0.0
    predictions, targets = numbers()
    assert math.isnan(of("r2", predictions, torch.ones_like(targets)))
    assert math.isnan(of("r2", torch.ones(5, 1), torch.ones(5)))
    assert math.isnan(of("r2", predictions[:1], targets[:1]))
    assert of("perplexity", torch.tensor([[5000.0, 0.0]]), torch.tensor([1])) == math.inf


@pytest.mark.parametrize(
    ("metric", "classes", "targets", "reason"),
    [
        (TopK(3), 3, [0, 1], "is 1 for every model of 3 labels"),
        (TopK(2), 3, [0, 1], ""),
        (Auroc(), 3, [1, 1], "one only"),
        (Auroc(), 3, [1, PADDING], "one only"),
        (Auroc(), 3, [0, 1], ""),
        (R2(), 0, [2.0, 2.0], "all the same"),
        (R2(), 0, [2.0, 2.5], ""),
        (Rmse(), 0, [2.0, 2.0], ""),
        (squared_error, 0, [2.0], ""),
    ],
)
def test_a_metric_that_tells_no_models_apart_is_known_beforehand(metric, classes, targets, reason):
    found = why_unmeasurable(metric, classes, np.array(targets))
    assert reason in found
    assert bool(found) == bool(reason)


def test_perplexity_counts_labels_and_not_sequences():
    outputs, targets = torch.randn(3, 5, 4), torch.randint(4, (3, 5))
    targets[0, 1:] = targets[1, 4:] = PADDING
    real = targets != PADDING
    losses = cross_entropy(outputs[real], targets[real]).double()
    assert len(losses) == 10
    for piece in (3, 2, 1):
        expected = math.exp(float(losses.mean()))
        assert of("perplexity", outputs, targets, piece) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("k", [0, -1, 2.5, None])
def test_a_k_is_a_number_of_labels(k):
    with pytest.raises(BadInput, match=f"k is {k}: .* is needed"):
        TopK(k)


def test_labels_in_several_places_and_several_labels_at_once():
    torch.manual_seed(0)
    outputs, targets = torch.randn(30, 5, 4), torch.randint(4, (30, 5))
    targets[:7, 2:] = PADDING
    real = targets != PADDING
    for name in ("f1", "auroc"):
        expected = of(name, outputs[real], targets[real])
        assert of(name, outputs, targets, 8) == pytest.approx(expected, rel=1e-6)
    shares = [
        float(TopK(2)(o[r], y[r]).mean()) for o, y, r in zip(outputs, targets, real, strict=True)
    ]
    assert TopK(2)(outputs, targets).tolist() == pytest.approx(shares)
    logits, several = torch.randn(40, 3), (torch.rand(40, 3) > 0.5).float()
    truth, said = several.numpy(), (logits > 0).numpy()
    assert of("f1", logits, several, 7) == pytest.approx(sk.f1_score(truth, said, average="macro"))
    assert of("auroc", logits, several, 7) == pytest.approx(sk.roc_auc_score(truth, logits))
    assert why_unmeasurable(Auroc(), 3, truth) == ""
    assert why_unmeasurable(Auroc(), 3, np.ones((4, 3), np.float32))
    for name in ("top-2", "perplexity"):
        with pytest.raises(BadInput, match="needs one label per place"):
            of(name, logits, several)


def test_several_numbers_count_as_their_mean():
    torch.manual_seed(0)
    targets = torch.randn(50, 3)
    outputs = targets + torch.randn(50, 3)
    y, o = targets.double(), outputs.double()
    wanted = {
        "mae": sk.mean_absolute_error(y, o),
        "rmse": math.sqrt(float(((o - y) ** 2).mean())),
        "r2": sk.r2_score(y, o),
    }
    for name, expected in wanted.items():
        assert of(name, outputs, targets, 8) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    targets[:, 1] = 2.0  # has no variance to predict
    expected = sk.r2_score(y[:, ::2], o[:, ::2])
    assert of("r2", outputs, targets) == pytest.approx(expected, rel=1e-5, abs=1e-6)
