"""Recurrent layers written out under vmap are torch's own layers."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_sequence

from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.models.vmap_layers import Product, write_out_

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn-tanh": nn.RNN,
    "rnn-relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS = [
    {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first}
    for layers, both, bias, first in itertools.product((1, 3), *[(False, True)] * 3)
]
EXAMPLES, STEPS, INPUTS, HIDDEN = 3, 5, 4, 6


def make(kind, options):
    torch.manual_seed(1)
    layer = KINDS[kind](INPUTS, HIDDEN, **options)
    return layer, write_out_(copy.deepcopy(layer))


def records(options, batch=2):
    shape = (batch, STEPS) if options["batch_first"] else (STEPS, batch)
    return torch.randn(EXAMPLES, *shape, INPUTS)


def states(kind, options, batch=2):
    ends = options["num_layers"] * (1 + options["bidirectional"])
    given = torch.randn(2, EXAMPLES, ends, batch, HIDDEN)
    return tuple(given) if kind == "lstm" else given[0]


def parts(answer):
    """Outputs and last states, in one list."""
    out, last = answer
    return [out, *last] if isinstance(last, tuple) else [out, last]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_states_are_torch_s(kind, options):
    own, plain = make(kind, options)
    x = records(options)
    found = parts(vmap(plain)(x))
    for k in range(EXAMPLES):
        for mine, right in zip(found, parts(own(x[k])), strict=True):
            assert mine[k].shape == right.shape
            assert torch.allclose(mine[k], right, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS[:8], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_torch_s(kind, options):
    own, plain = make(kind, options)
    x = records(options)
    named = {name: p.detach() for name, p in own.named_parameters()}

    def loss(layer):
        def one(named, x):
            out, *last = parts(functional_call(layer, named, (x,)))
            return (out.cumsum(-1) ** 2).mean() + sum(part.sin().mean() for part in last)

        return one

    found = vmap(grad(loss(plain)), in_dims=(None, 0))(named, x)
    for k in range(EXAMPLES):
        leaves = {name: value.clone().requires_grad_() for name, value in named.items()}
        right = torch.autograd.grad(loss(own)(leaves, x[k]), list(leaves.values()))
        for name, value in zip(leaves, right, strict=True):
            assert torch.allclose(found[name][k], value, atol=1e-6), name


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_states_at_the_beginning_count(kind, options):
    own, plain = make(kind, options)
    x, given = records(options), states(kind, options)
    found = parts(vmap(plain)(x, given))
    for k in range(EXAMPLES):
        here = tuple(g[k] for g in given) if kind == "lstm" else given[k]
        for mine, right in zip(found, parts(own(x[k], here)), strict=True):
            assert torch.allclose(mine[k], right, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stated", [False, True])
def test_one_sequence_without_an_axis_of_its_own(kind, stated):
    options = {**OPTIONS[0], "bidirectional": True}
    own, plain = make(kind, options)
    x = torch.randn(EXAMPLES, STEPS, INPUTS)
    given = states(kind, options, batch=1) if stated else None
    if stated:
        given = tuple(g[:, :, 0] for g in given) if kind == "lstm" else given[:, :, 0]
    found = parts(vmap(plain)(x, *([given] if stated else [])))
    for k in range(EXAMPLES):
        here = None
        if stated:
            here = tuple(g[k] for g in given) if kind == "lstm" else given[k]
        for mine, right in zip(found, parts(own(x[k], here)), strict=True):
            assert mine[k].shape == right.shape
            assert torch.allclose(mine[k], right, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_outside_of_vmap_torch_s_own_operation_is_used(kind):
    own, plain = make(kind, OPTIONS[0])
    x = torch.randn(STEPS, 2, INPUTS)
    for layer in plain.children():
        layer.register_forward_pre_hook(lambda *_: pytest.fail("step by step"))
    for mine, right in zip(parts(plain(x)), parts(own(x)), strict=True):
        assert torch.equal(mine, right)
    packed = pack_sequence([torch.randn(n, INPUTS) for n in (4, 2)])
    assert torch.equal(plain(packed)[0].data, own(packed)[0].data)


def test_names_of_parameters_and_what_code_asks_of_a_layer_stay():
    layer = nn.LSTM(INPUTS, HIDDEN, num_layers=2, bidirectional=True)
    names = [name for name, _ in layer.named_parameters()]
    write_out_(layer)
    assert [name for name, _ in layer.named_parameters()] == names
    assert isinstance(layer, nn.LSTM)
    assert (layer.hidden_size, layer.num_layers) == (HIDDEN, 2)
    known = {given for part in layer.children() for given in part.names.values()}
    assert known == set(names)


class Own(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0] * 2


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(INPUTS, HIDDEN, proj_size=2),
        Own(INPUTS, HIDDEN),
        nn.LSTMCell(INPUTS, HIDDEN),
    ],
    ids=["projected", "subclass", "cell"],
)
def test_other_layers_stay_as_they_are(layer):
    kind = type(layer)
    write_out_(layer)
    assert type(layer) is kind
    assert not list(layer.children())


def test_a_task_leaves_the_module_itself_alone():
    module = nn.Sequential(nn.Flatten(0), nn.Linear(3, 3))
    module.memory = nn.GRU(3, 3)
    task = Task(module, cross_entropy)
    assert type(module.memory) is nn.GRU
    assert not any(isinstance(layer, Product) for layer in module.modules())
    assert sum(isinstance(layer, Product) for layer in task.named_layers.values()) == 2
