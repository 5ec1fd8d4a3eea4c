"""Losses and accuracy of labels, sequences of labels, several labels at once, and numbers."""

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional

from fedveil import binary_cross_entropy, correct, cross_entropy
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Target
from fedveil.models import squared_error
from fedveil.models.metrics import WeightedCrossEntropy, default_loss

LOGITS = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[0, 1, 2, 0, 1], [2, -100, 1, -100, -100], [-100] * 5, [1, 1, 1, 1, -100]])
SEVERAL = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.25]])


def test_a_sequence_counts_as_the_mean_over_its_own_real_labels():
    losses = cross_entropy(LOGITS, LABELS)
    for k, real in enumerate((LABELS != -100).sum(1).tolist()):
        alone = functional.cross_entropy(LOGITS[k], LABELS[k]) if real else torch.tensor(0.0)
        torch.testing.assert_close(losses[k], alone)


def test_a_record_without_labels_has_loss_and_gradient_zero():
    assert float(cross_entropy(LOGITS, LABELS)[2]) == 0
    gradient = grad(lambda outputs: cross_entropy(outputs, LABELS)[2])(LOGITS)
    assert not gradient.any()


def test_outputs_where_there_is_no_label_change_nothing_even_if_they_overflow():
    spoilt = torch.where((LABELS == -100)[..., None], torch.inf, LOGITS)
    assert torch.equal(cross_entropy(spoilt, LABELS), cross_entropy(LOGITS, LABELS))


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (cross_entropy, LOGITS, LABELS),
        (cross_entropy, LOGITS[:, 0], LABELS[:, 0].clamp_min(0)),
        (WeightedCrossEntropy((1.0, 2.0, 0.5)), LOGITS, LABELS),
        (WeightedCrossEntropy((1.0, 2.0, 0.5)), LOGITS[:, 0], LABELS[:, 0].clamp_min(0)),
        (binary_cross_entropy, LOGITS[:2, 0], SEVERAL),
        (squared_error, LOGITS[:2, 0], SEVERAL),
        (squared_error, LOGITS[:2, 0, :1], SEVERAL[:, 0]),
        (correct, LOGITS, LABELS),
        (correct, LOGITS[:2, 0], SEVERAL),
    ],
)
def test_an_example_alone_is_what_it_is_beside_others(loss, outputs, targets):
    together = loss(outputs, targets)
    assert together.shape == (len(outputs),)
    alone = vmap(lambda o, t: loss(o[None], t[None])[0])(outputs, targets)
    torch.testing.assert_close(together, alone)
    one = torch.cat([loss(outputs[k : k + 1], targets[k : k + 1]) for k in range(len(outputs))])
    torch.testing.assert_close(together, one)


def test_several_labels_are_the_mean_over_them():
    expected = functional.binary_cross_entropy(LOGITS[1, :1].sigmoid(), SEVERAL[:1])
    torch.testing.assert_close(binary_cross_entropy(LOGITS[1, :1], SEVERAL[:1])[0], expected)


def test_several_numbers_are_the_mean_over_them():
    expected = functional.mse_loss(LOGITS[0, :1], SEVERAL[:1])
    torch.testing.assert_close(squared_error(LOGITS[0, :1], SEVERAL[:1])[0], expected)


def test_accuracy_is_the_share_that_is_right():
    right = torch.full((4, 5, 3), -1.0).scatter_(2, LABELS.clamp_min(0)[..., None], 1.0)
    assert correct(right, LABELS).tolist() == [1, 1, 0, 1]
    right[0, 0] = -right[0, 0]
    assert correct(right, LABELS).tolist()[0] == pytest.approx(0.8)
    logits = torch.tensor([[2.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    assert correct(logits, SEVERAL).tolist() == pytest.approx([2 / 3, 1])


@pytest.mark.parametrize("loss", [squared_error, binary_cross_entropy])
@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (2, 3, 3), (2,)])
def test_outputs_that_are_not_one_for_each_target_are_refused(loss, shape):
    with pytest.raises(BadInput, match="give one number for each"):
        loss(torch.zeros(shape), SEVERAL)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 4, 3)])
def test_labels_without_outputs_of_their_own_are_refused(shape):
    with pytest.raises(BadInput, match="one number per label, on the last axis"):
        cross_entropy(torch.zeros(shape), LABELS)


def test_the_usual_loss():
    assert default_loss(Target(3)) == (cross_entropy, {"accuracy": correct})
    assert default_loss(Target(3, (7,))) == (cross_entropy, {"accuracy": correct})
    several = Target(3, (3,), several=True)
    assert default_loss(several) == (binary_cross_entropy, {"accuracy": correct})
    assert default_loss(Target(0, (3,))) == default_loss(Target(0)) == (squared_error, {})


def test_weights_multiply_the_loss_of_their_label():
    weights = torch.tensor([1.0, 5.0, 0.25])
    labels = LABELS[0]
    found = WeightedCrossEntropy(tuple(weights.tolist()))(LOGITS[0], labels)
    torch.testing.assert_close(found, cross_entropy(LOGITS[0], labels) * weights[labels])
    losses = WeightedCrossEntropy((2.0, 2.0, 2.0))(LOGITS, LABELS)
    torch.testing.assert_close(losses, 2 * cross_entropy(LOGITS, LABELS))
    spoilt = torch.where((LABELS == -100)[..., None], torch.inf, LOGITS)
    assert torch.equal(WeightedCrossEntropy((2.0, 2.0, 2.0))(spoilt, LABELS), losses)


@pytest.mark.parametrize("weights", [(), (1.0, 0.0), (1.0, -1.0), (1.0, float("nan")), (1.0, 1e9)])
def test_weights_are_positive_numbers(weights):
    with pytest.raises(BadInput, match="class_weights is"):
        WeightedCrossEntropy(weights)


@pytest.mark.parametrize(
    "target", [Target(2), Target(4), Target(0), Target(3, (3,), several=True)], ids=str
)
def test_weights_that_are_not_one_for_each_label_are_refused(target):
    with pytest.raises(BadInput, match="class_weights has 3 numbers and the data have"):
        default_loss(target, (1.0, 2.0, 3.0))
    with pytest.raises(BadInput, match="class_weights has 3 numbers and the model 2 outputs"):
        WeightedCrossEntropy((1.0, 2.0, 3.0))(torch.zeros(4, 2), torch.zeros(4).long())


def test_the_usual_loss_with_weights():
    loss, metrics = default_loss(Target(3), [1.0, 2.0, 3.0])
    assert loss == WeightedCrossEntropy((1.0, 2.0, 3.0))
    assert metrics == {"accuracy": correct}
