"""What a module does is found by trying: each kind of harm is named, and harmless ones pass."""

import random
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.base.errors import BadInput
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.models.trial import check_fits, mixes_records
from fedveil.models.zoo import Lstm

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
TOKENS = torch.randint(0, 10, (6, 7), generator=torch.Generator().manual_seed(1))


class Changed(nn.Module):
    """A linear layer whose outputs are changed by `function(module, outputs)`."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.layer, self.function = nn.Linear(5, 3), function
        self.gate = nn.Parameter(torch.zeros(()))
        vars(self).update(attributes)

    def forward(self, x):
        return self.function(self, self.layer(x)) + 0 * self.gate


class OverTokens(nn.Module):
    """Embeddings, something that reads them, and a head."""

    def __init__(self, reader, width, head, **options):
        super().__init__()
        self.embed, self.reader = nn.Embedding(10, 4, **options), reader
        self.head, self.read = nn.Linear(width, 3), head

    def forward(self, tokens):
        return self.head(self.read(self.reader, self.embed(tokens)))


def last(reader, e):
    return reader(e)[0][:, -1]


def attended(reader, e):
    return reader(e, e, e)[0].mean(1)


def read_by(layer, head=last, width=6, **options):
    return OverTokens(layer, width, head, **options)


def tried(module, x=X, y=Y, loss=cross_entropy):
    torch.manual_seed(0)
    task = Task(module, loss).by_own_code()
    check_fits(task, x, y, classes=3)
    return mixes_records(task, x, y)


HARMLESS = {
    "linear": (lambda: nn.Linear(5, 3), X),
    "layer norm": (lambda: nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)), X),
    "no dropout": (lambda: nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.0)), X),
    "dropout in eval mode": (lambda: nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5).eval()), X),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), X),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 3)), TOKENS),
    "lstm": (lambda: read_by(nn.LSTM(4, 6, batch_first=True)), TOKENS),
    "gru": (lambda: read_by(nn.GRU(4, 6, batch_first=True)), TOKENS),
    "written-out lstm": (lambda: read_by(Lstm(4, 6), lambda r, e: r(e)[:, -1]), TOKENS),
    "attention": (
        lambda: read_by(nn.MultiheadAttention(4, 2, batch_first=True), attended, 4),
        TOKENS,
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_modules_pass(name):
    make, x = HARMLESS[name]
    assert tried(make(), x) is False


MIXING = {
    "centred": lambda m, h: h - h.mean(0),
    "normed by the batch": lambda m, h: h / h.norm(),
    "behind a gate that begins shut": lambda m, h: h + m.gate * h.flip(0),
    "where records are large": lambda m, h: h * (2.0 if bool(h.abs().max() > 20) else 1.0),
    "in the gradient only": lambda m, h: h + (h.mean(0) - h.mean(0).detach()),
    "depending on how many": lambda m, h: h * len(h),
}


@pytest.mark.parametrize("name", MIXING)
def test_records_that_see_each_other_are_found(name):
    assert tried(Changed(MIXING[name])) is True


def test_attention_over_the_wrong_axis_is_found():
    assert tried(read_by(nn.MultiheadAttention(4, 2), attended, 4), TOKENS) is True


def test_a_loss_that_lets_records_see_each_other_is_found():
    def centred(outputs, targets):
        losses = cross_entropy(outputs, targets)
        return losses - 0.5 * losses.mean()

    assert tried(nn.Linear(5, 3), loss=centred) is True


RANDOM = {
    "layer '1' is a RReLU": (lambda: nn.Sequential(nn.Linear(5, 3), nn.RReLU()), X),
    "layer 'model' is a Changed": (lambda: Changed(lambda m, h: h * torch.rand(())), X),
}


@pytest.mark.parametrize("where", RANDOM)
def test_random_draws_are_refused_by_the_layer_s_name(where):
    make, x = RANDOM[where]
    with pytest.raises(BadInput, match=f"{where} that draws random numbers"):
        tried(make(), x)


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: float(torch.rand(()))])
def test_stochastic_depth_is_refused_whatever_it_draws_from(draw):
    with pytest.raises(BadInput, match="draws random numbers"):
        tried(Changed(lambda m, h: h if draw() < 1.0 else 2 * h))  # a draw that changed nothing


def test_a_loss_that_draws_is_refused():
    def noisy(outputs, targets):
        return cross_entropy(outputs, targets) * torch.rand(())

    with pytest.raises(BadInput, match="loss draws random numbers"):
        tried(nn.Linear(5, 3), loss=noisy)


def running(module, h):
    module.mean = 0.9 * module.mean + h.mean().detach()
    return h * (1 + module.mean)


def counting(module, h):
    module.calls += 1
    return h


STATEFUL = {
    "'mean'": lambda: Changed(running, mean=torch.zeros(())),
    "'calls'": lambda: Changed(counting, calls=0),
    "'generator'": lambda: Changed(
        lambda m, h: h * torch.rand((), generator=m.generator), generator=torch.Generator()
    ),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_is_refused_by_its_name(name):
    with pytest.raises(BadInput, match=f"{name} of the model changes"):
        tried(STATEFUL[name]())


def test_state_in_a_closure_is_found():
    seen = [1.0]

    def remember(module, h):
        seen[0] = 0.5 * seen[0] + float(h.detach().abs().mean())
        return h * seen[0]

    with pytest.raises(BadInput, match="'function' of the model changes"):
        tried(Changed(remember))


SEEN = [1.0]


def test_state_in_a_global_is_found_by_its_name():
    def remember(module, h):
        SEEN[0] = 0.5 * SEEN[0] + float(h.detach().abs().mean())
        return h * SEEN[0]

    with pytest.raises(BadInput, match="'function' of the model changes"):
        tried(Changed(remember))


def test_state_where_nobody_looks_is_found_by_what_it_does():
    def remember(module, h):
        kept = sys.modules[__name__].__dict__["SEEN"]
        kept[0] = 0.5 * kept[0] + float(h.detach().abs().mean())
        return h * kept[0]

    with pytest.raises(BadInput, match="gives one record two gradients"):
        tried(Changed(remember))


@pytest.mark.parametrize("norm", [0.5, 1e6])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_writing_to_a_parameter_is_refused_also_where_it_changes_nothing_yet(kind, norm):
    inner = [kind(10, 4, max_norm=norm)]
    inner += [nn.Flatten(), nn.Linear(28, 3)] if kind is nn.Embedding else [nn.Linear(4, 3)]
    with pytest.raises(BadInput, match=r"'0.weight' of the model is written to"):
        tried(nn.Sequential(*inner), TOKENS)


def test_a_weight_that_is_clamped_in_every_pass_is_refused():
    def clamp(module, h):
        module.layer.weight.data.clamp_(-0.1, 0.1)
        return h

    with pytest.raises(BadInput, match=r"'layer.weight' of the model is written to"):
        tried(Changed(clamp))


def test_a_forward_that_holds_on_to_another_module_is_refused():
    outside = nn.Linear(5, 3)
    with pytest.raises(BadInput, match="not among its parameters"):
        tried(Changed(lambda m, h: h + outside(X[: len(h)])))


def test_a_module_that_cannot_take_one_record_is_refused():
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(BadInput, match="does not take one record at a time: Expected more than 1"):
        tried(module)


def test_trying_leaves_everything_as_it_was():
    module = nn.Linear(5, 3)
    task = Task(module, cross_entropy).by_own_code()
    before = task.parameters.clone(), torch.get_rng_state(), random.getstate()
    mixes_records(task, X, Y)
    assert torch.equal(task.parameters, before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]


def test_one_public_record_is_enough():
    assert tried(Changed(MIXING["centred"]), X[:1], Y[:1]) is True
    assert tried(nn.Linear(5, 3), X[:1], Y[:1]) is False


class Two(nn.Module):
    """Words and a size; `harm(tokens read, size)` is added to what is said of a record."""

    def __init__(self, harm):
        super().__init__()
        self.embed, self.head, self.harm = nn.Embedding(10, 3), nn.Linear(4, 3), harm

    def forward(self, tokens, size):
        read = self.embed(tokens).mean(dim=1)
        return {"logits": self.head(torch.cat([read, size], dim=1)) + self.harm(read, size)}


NAMED = {"size": X[:, :1], "tokens": TOKENS}
THROUGH = {
    "neither": (lambda read, size: torch.relu(size), False),
    "the words": (lambda read, size: read.mean(dim=0), True),
    "the size": (lambda read, size: size.mean() * read, True),
    "sizes that no record has": (
        lambda read, size: torch.relu(size.abs().amax() - 10) * read / 30,
        True,
    ),
}


@pytest.mark.parametrize(("harm", "mixes"), THROUGH.values(), ids=THROUGH)
def test_named_inputs_are_tried_each_and_real_numbers_are_stretched(harm, mixes):
    assert mixes_records(Task(Two(harm), cross_entropy).by_own_code(), NAMED, Y) is mixes


def test_kinds_of_named_inputs_are_told_apart():
    task = Task(Two(lambda read, size: 0.0), cross_entropy).by_own_code()
    mixes_records(task, NAMED, Y)
    mixes_records(task, dict(reversed(NAMED.items())), Y)
    assert len(task.tried) == 1
    mixes_records(task, {**NAMED, "tokens": TOKENS[:, :4]}, Y)
    assert len(task.tried) == 2
