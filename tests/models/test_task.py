"""`Task`: one flat vector that is the module, and modules that are refused by name."""

import pytest
import torch
from torch import nn

from fedveil.base.errors import BadInput
from fedveil.models.metrics import correct, cross_entropy, squared_error
from fedveil.models.task import Task
from fedveil.models.trial import check_fits

X, Y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])


def classifier(module=None, loss=cross_entropy, metrics=None):
    return Task(module or nn.Linear(3, 2), loss, metrics or {"accuracy": correct})


def two_layers():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def test_writing_to_the_vector_changes_the_module():
    task = classifier(two_layers())
    task.parameters.copy_(torch.arange(task.size))
    assert task.module[0].weight.flatten().tolist() == list(range(15))
    assert task.module[2].bias.tolist() == [30, 31]


def test_writing_to_the_module_changes_the_vector():
    task = classifier(two_layers())
    with torch.no_grad():
        task.module[2].bias.fill_(7)
    assert task.parameters[-2:].tolist() == [7, 7]


def test_the_initial_values_survive_flattening():
    module = two_layers()
    before = [p.detach().clone() for p in module.parameters()]
    task = classifier(module)
    assert torch.equal(task.parameters, torch.cat([p.reshape(-1) for p in before]))


def test_named_are_views():
    task = classifier(two_layers())
    flat = torch.zeros(task.size)
    named = task.named(flat)
    assert {k: tuple(v.shape) for k, v in named.items()} == {
        "0.weight": (5, 3),
        "0.bias": (5,),
        "2.weight": (2, 5),
        "2.bias": (2,),
    }
    named["2.bias"].fill_(3)
    assert flat[-2:].tolist() == [3, 3]
    assert flat.sum() == 6


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
def test_rows_have_their_names_and_back(lead):
    task = classifier(OwnModule())
    rows = torch.randn(*lead, task.size)
    named = task.named(rows)
    assert named["head.weight"].shape == (*lead, 2, 3)
    assert named["scale"].shape == lead
    back = task.flattened(named)
    assert torch.equal(back, rows)
    back.zero_()
    assert rows.all()


def test_outputs_use_the_given_vector_and_leave_the_module_alone():
    task = classifier(two_layers())
    before = task.parameters.clone()
    assert torch.equal(task.outputs(task.named(task.parameters), X), task.module(X))
    assert not task.outputs(task.named(torch.zeros(task.size)), X).any()
    assert torch.equal(task.parameters, before)


def test_an_optimiser_on_the_module_moves_the_vector():
    task = classifier()
    before = task.parameters.clone()
    task.losses(task.named(task.parameters), X, Y)
    cross_entropy(task.module(X), Y).mean().backward()
    torch.optim.SGD(task.module.parameters(), lr=1.0).step()
    assert not torch.equal(task.parameters, before)


def test_float64_modules_become_float32():
    task = classifier(nn.Linear(3, 2).double())
    assert task.parameters.dtype == torch.float32
    assert task.outputs(task.named(task.parameters), X).dtype == torch.float32


def test_losses_are_per_example():
    task = classifier()
    losses = task.losses(task.named(task.parameters), X, Y)
    expected = nn.functional.cross_entropy(task.module(X), Y, reduction="none")
    assert torch.allclose(losses, expected)


def test_squared_error_is_per_example():
    assert squared_error(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0])).tolist() == [0, 4]


def test_correct_compares_the_largest_logit():
    assert correct(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1, 1])).tolist() == [1, 0]


class OwnModule(nn.Module):
    """A module of a user's own, with a parameter used twice and one outside any layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.layer(self.layer(x)) * self.scale)


def test_an_own_module_works():
    task = classifier(OwnModule())
    check_fits(task, X, Y, classes=2)
    assert task.size == 12 + 1 + 8
    flat = task.parameters.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(task.losses(task.named(flat), X, Y).mean(), flat)
    cross_entropy(task.module(X), Y).mean().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in task.module.parameters()])
    assert torch.allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "layer '1' is a BatchNorm1d.*Group"),
        (nn.BatchNorm1d(3), "layer 'model' is a BatchNorm1d"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.SyncBatchNorm(1)), "layer '1' is a SyncBatchNorm"),
        (nn.Flatten(), "no parameters that learn, it has none"),
        (nn.Linear(3, 2).requires_grad_(False), "no parameters that learn, they are all frozen"),
    ],
)
def test_modules_that_are_refused(module, message):
    with pytest.raises(BadInput, match=message):
        Task(module, cross_entropy)


def test_layers_that_do_no_harm_are_accepted():
    normed = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.LayerNorm(4))
    assert Task(normed, cross_entropy).size == 16 + 8
    grouped = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4))
    assert Task(grouped, cross_entropy).size == 40 + 8


def mean_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("task", "x", "y", "classes", "message"),
    [
        (classifier(loss=mean_loss), X, Y, 2, r"returned shape \(\) .*reduction='none'"),
        (classifier(metrics={"m": mean_loss}), X, Y, 2, "loss or metric returned shape"),
        (classifier(), torch.randn(4, 5), Y, 2, r"does not fit records of shape \(5,\)"),
        (classifier(), X, Y, 3, "2 outputs and the data 3 labels"),
        (classifier(), X, Y.float(), 0, "does not fit"),
        (Task(nn.Linear(3, 2), squared_error), X, Y.float(), 0, "one number for each"),
        (Task(nn.Embedding(3, 2), cross_entropy), X, Y, 2, "does not fit"),
    ],
)
def test_records_that_do_not_fit_are_refused(task, x, y, classes, message):
    with pytest.raises(BadInput, match=message) as refusal:
        check_fits(task, x, y, classes)
    assert "\n" not in str(refusal.value)


def test_records_that_fit():
    """They are tried, and the model stays as it was."""
    for task, y, classes in (
        (classifier(), Y, 2),
        (Task(nn.Linear(3, 1), squared_error), Y.float(), 0),
    ):
        before = task.parameters.clone()
        check_fits(task, X, y, classes)
        assert torch.equal(task.parameters, before)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind):
    with pytest.raises(BadInput, match=rf"layer '0' is a {kind.__name__} with sparse gradients"):
        Task(nn.Sequential(kind(5, 2, sparse=True), nn.Flatten()), cross_entropy)


def test_a_lazy_module_is_refused():
    with pytest.raises(BadInput, match="parameter 'weight' has no shape yet"):
        Task(nn.LazyLinear(2), cross_entropy)


def test_a_module_that_cannot_be_copied_is_refused():
    module = nn.Linear(3, 2)
    module.norm = module.weight * 2  # part of a graph: torch copies leaves only
    with pytest.raises(BadInput, match="cannot be copied"):
        Task(module, cross_entropy)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x), x


def test_outputs_that_are_no_tensor_are_refused():
    with pytest.raises(BadInput, match=r"returned a tuple, with 2 tensors .*: return one tensor"):
        check_fits(classifier(Pair()), X, Y, classes=2)


class Spoils(nn.Module):
    """Writes to its own weight in every pass, as max_norm does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(2.0)
        return x @ self.weight.T


def test_no_check_or_measurement_reaches_the_parameters():
    task = classifier(Spoils()).by_own_code()
    check_fits(task, X, Y, classes=2)
    task.measure_batch(task.parameters, X, Y)
    assert task.parameters.tolist() == [1.0] * 6
    assert task.module.weight.tolist() == [[1.0] * 3] * 2


def test_measured_in_eval_mode_and_learnt_in_the_module_s_own():
    task = classifier(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)))
    params = torch.randn(task.size)
    first, second = (task.measure_batch(params, X, Y).per_example["loss"] for _ in range(2))
    assert torch.equal(first, second)
    task.look(X, Y)
    keyed = [task.losses(task.named(params), X, Y, torch.arange(len(X)) + k) for k in range(2)]
    assert not torch.equal(*keyed)
    assert torch.equal(task.losses(task.named(params), X, Y), first)
    assert task.module.training
    still = classifier(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).eval())
    assert torch.equal(still.outputs(still.named(params), X), still.outputs(still.named(params), X))


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.mean = torch.zeros(2)

    def forward(self, x):
        h = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * h.mean(0).detach()
        return h - self.mean


def test_the_own_code_of_a_module_that_remembers_does_not_run():
    task = classifier(Remembers())
    with pytest.raises(BadInput, match="cannot be captured"):
        task.outputs(task.named(task.parameters.clone()), X)


@pytest.mark.parametrize("name", ["module", "loss", "parameters"])
def test_what_was_checked_cannot_be_replaced(name):
    task = Task(nn.Linear(2, 1), squared_error)
    with pytest.raises(AttributeError, match="make another Task"):
        setattr(task, name, None)
