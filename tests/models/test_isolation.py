"""Which code runs: torch's own, a graph of pure operators, or a user's in forks alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.models.capture import Uncapturable, capture_graph, prepare
from fedveil.models.graph import PURE, function_of, hollow_copy
from fedveil.models.memory import check_process, is_plain, is_plain_function
from fedveil.models.trial import mixes_records
from tests.contracts.zoo import CLASSES, FEATURES, SIZES, Changed, records, task

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(4, FEATURES)


class Own(nn.Linear):
    """A subclass that does what its base does."""


class Kept(torch.Tensor):
    """A tensor of a class of its own."""


def hooked():
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    return layer


def hiding():
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x
    return layer


def with_function():
    return nn.TransformerEncoderLayer(4, 2, 8, activation=lambda x: x.relu())


def with_tensor():
    layer = nn.Linear(2, 2)
    layer.register_buffer("kept", torch.zeros(2).as_subclass(Kept))
    return layer


def parametrised():
    return nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))


def replaced():
    class Linear(nn.Module):
        __module__ = "torch.nn.modules.linear"

    return Linear()


NOT_PLAIN = [
    lambda: Own(2, 2),
    *(hooked, hiding, with_function, with_tensor, parametrised, replaced),
    lambda: nn.Embedding(3, 2, max_norm=1.0),
    lambda: nn.InstanceNorm1d(2, track_running_stats=True),
    lambda: nn.Sequential(nn.ReLU(), Own(2, 2)),
]


@pytest.mark.parametrize("make", NOT_PLAIN)
def test_what_may_run_other_code_is_not_plain(make):
    assert not is_plain(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(2, 2, 2),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, activation="gelu"), 2),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Dropout()),
        lambda: fv.models.Lstm(2, 3),
    ],
)
def test_trees_of_torch_s_layers_are_plain(make):
    assert is_plain(make())


def test_nothing_is_plain_beside_a_hook_on_all_modules():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_plain(nn.Linear(2, 2))
    finally:
        handle.remove()


def test_losses_of_torch_are_plain_and_others_are_not():
    assert is_plain_function(fv.cross_entropy)
    assert is_plain_function(nn.MSELoss(reduction="none"))
    assert not is_plain_function(lambda outputs, y: outputs[:, 0])


class Seeing(TorchDispatchMode):
    """A mode that sees every operator."""


def test_a_mode_that_is_entered_is_refused():
    check_process()
    with Seeing(), pytest.raises(BadInput, match="the mode Seeing is entered"):
        check_process()


def test_no_operator_of_the_list_writes():
    for name in PURE:
        for overload in getattr(torch.ops.aten, name).overloads():
            operator = f"aten.{name}.{overload}"
            if getattr(getattr(torch.ops.aten, name), overload)._schema.is_mutable:
                with pytest.raises(KeyError):
                    function_of(operator)
            else:
                assert callable(function_of(operator))


@pytest.mark.parametrize(
    "op",
    ["aten.as_strided.default", "aten.from_file.default", "aten.rand.default", "mine.op.default"],
)
def test_operators_that_are_not_listed_are_refused(op):
    with pytest.raises(KeyError):
        function_of(op)


def test_memory_that_is_not_initialised_is_zeros():
    assert not function_of("aten.empty.memory_format")([1000]).any()
    assert not function_of("aten.new_empty.default")(torch.ones(2), [1000]).any()


def written(module, h):
    module.layer.bias.data.add_(1)
    return h


def written_buffer(module, h):
    module.kept.add_(h.detach().mean())
    return h


class Buffered(Changed):
    def __init__(self, function):
        super().__init__(function)
        self.register_buffer("kept", torch.zeros(()))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (written_buffer, "writes to 'kept'"),
        (lambda m, h: h * torch.rand(CLASSES), r"draws random numbers \(rand\)"),
        (lambda m, h: h * torch.bernoulli(h.sigmoid()), r"draws random numbers \(bernoulli\)"),
        (lambda m, h: torch.as_strided(h, (len(h), CLASSES), (CLASSES, 1)), "calls as_strided"),
        (lambda m, h: h if h.sum() > 0 else -h, "decides by the values"),
        (lambda m, h: h + torch.from_numpy(h.detach().numpy()), "numpy"),
    ],
)
def test_what_cannot_be_captured_says_why(function, reason):
    prepare()
    with pytest.raises(Uncapturable, match=reason):
        capture_graph(Buffered(function), X)


def centrally(made):
    plan = fv.central(
        *(fv.samplers.Everyone(), len(SIZES), fv.clips.Fixed(1.0)),
        rounds=1,
        budget=fv.Budget(math.inf, 1e-3),
        multiplier=1.0,
    )
    return fv.Training(made, records(False), plan, fv.work.OneGradient(), workers=1)


@pytest.mark.slow
def test_constants_of_a_graph_are_part_of_a_seed():
    def seed(constant):
        training = centrally(task(lambda: Changed(Shifted([constant]))))
        assert training.task.constants
        return training.streams.seed

    assert seed(1.0) != seed(2.0)


class Shifted:
    """Adds a tensor that is no buffer."""

    def __init__(self, hidden):
        self.hidden = {"a": {"b": {"c": {"d": {"e": {"f": {"g": torch.tensor(hidden)}}}}}}}

    def __call__(self, module, h):
        return h + self.hidden["a"]["b"]["c"]["d"]["e"]["f"]["g"]


class Gate(nn.Module):
    """Records see each other through a gate that begins with zero, and so does its gradient."""

    def __init__(self):
        super().__init__()
        self.layer, self.gate = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        h = self.layer(x)
        return h + self.gate**2 * h.flip(0)


def test_the_trial_looks_away_from_the_start():
    assert mixes_records(task(Gate).by_own_code(), X, torch.arange(4) % CLASSES)


def test_the_trial_puts_labels_in():
    made = task(lambda: Changed(lambda m, h: h - h.mean(0))).by_own_code()
    assert mixes_records(made, X[:, None].expand(4, 2, FEATURES), torch.full((4, 2), -100))


def drawn(generator):
    return generator.normal(size=2)


GENERATOR = np.random.default_rng(0)


class Begun(nn.Module):
    """Reads a global generator as it is made, and no more."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(FEATURES, CLASSES), float(drawn(GENERATOR)[0])

    def forward(self, x):
        return self.layer(x) * self.scale


def test_a_module_whose_init_reads_a_global_generator_is_trained():
    made = task(Begun)
    drawn(GENERATOR)
    training = centrally(made)
    drawn(GENERATOR)
    total = training.engine.run(training.round(1, np.arange(len(SIZES)), training.start()))
    assert total.clients == len(SIZES)
    assert not total.refused


class Dependent(nn.Module):
    """Uses a layer only where a weight is positive."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        if bool(self.second.bias[0] > 100):
            x = self.first(x)
        return self.second(x)


def test_a_layer_whose_use_depends_on_weights_is_refused_under_dp_sgd_in_one_line():
    plan = fv.dp_sgd(
        *(fv.samplers.Everyone(), len(SIZES), 1.0),
        rate=0.5,
        steps=1,
        rounds=1,
        budget=fv.Budget(math.inf, 1e-3),
        multiplier=1.0,
    )
    work = fv.ClientDpSgd(plan.noisy_steps, lr=0.1)
    with pytest.raises(BadInput, match="decides by the values of its inputs or weights"):
        fv.Training(task(Dependent), records(False), plan, work)
    made = centrally(task(Dependent))
    assert made.remark.startswith("each client is computed in a fork")
    made.engine.run(made.round(1, np.arange(2), replace(made.start())))


def test_an_operator_of_one_s_own_is_refused_even_if_it_is_called_like_one_of_torch_s():
    library = torch.library.Library("relu_of_mine", "DEF")
    library.define("relu(Tensor x) -> Tensor")
    library.impl("relu", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("relu_of_mine::relu", torch.empty_like, lib=library)
    prepare()
    with pytest.raises(Uncapturable, match=r"calls relu_of_mine\.relu\.default"):
        capture_graph(Changed(lambda m, h: torch.ops.relu_of_mine.relu(h)), X)


def test_a_tensor_that_is_another_when_it_is_copied_is_not_plain():
    module = nn.Sequential(nn.Linear(3, 2))
    module[0].register_buffer("extra", torch.ones(2))
    assert is_plain(module)
    module[0].extra.__deepcopy__ = lambda memo: torch.zeros(2)
    assert not is_plain(module)


def test_a_layer_that_works_in_place_writes_to_nothing_of_a_graph():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.count = nn.Linear(3, 2), nn.LeakyReLU(0.5, inplace=True)
            self.register_buffer("kept", -torch.ones(1))

        def forward(self, x):
            if torch.compiler.is_exporting():
                return self.layer(x) + self.count(self.kept)
            return self.layer(x) - 0.5

    prepare()
    module = Counting()
    root = hollow_copy(module, same_parameters=True)
    graph = capture_graph(module, torch.zeros(4, 3))
    with torch.no_grad():
        found = [graph.compute(root, torch.ones(4, 3)) for _ in range(3)]
    assert torch.equal(found[0], found[2])
    assert root.kept.tolist() == [-1.0]


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.layer(x))


@pytest.mark.parametrize("learning", [True, False])
def test_a_part_that_was_put_into_eval_mode_stays_in_it(learning):
    module = Dropping()
    module.drop.train(learning)
    made = fv.Task(module, fv.cross_entropy)
    flat = made.parameters.clone()
    dropped = made.outputs(made.named(flat), X[:1], torch.tensor(3))
    assert torch.equal(dropped, made.answers(flat, X[:1])) != learning


def test_a_layer_whose_parameters_have_attributes_runs_in_a_graph():
    module = Dropping()
    module.layer.weight.initialised = True
    made = fv.Task(module, fv.cross_entropy)
    assert torch.allclose(made.answers(made.parameters.clone(), X[:2]), module.eval()(X[:2]))
