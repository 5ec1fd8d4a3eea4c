"""Every kind of layer: record-level clipping is a loop over single records, whatever the way."""

import pytest
import torch
from torch import nn

from fedveil.base.errors import BadInput
from fedveil.models.metrics import cross_entropy
from fedveil.models.task import Task
from fedveil.privacy.clip import Clip, Norm
from fedveil.training.gradients.per_example import ClippedExamples
from tests.training.gradients.kinds import KINDS, WORDS, Branching

RECORDS = 4


class Made:
    """A module with its records, and the gradient of each one, by a loop that knows no task."""

    def __init__(self, name, frozen=lambda name: False):
        torch.manual_seed(1)
        kind = KINDS[name]
        self.module = kind.make()
        for given, parameter in self.module.named_parameters():
            parameter.requires_grad_(not frozen(given))
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        if kind.words:
            self.x = torch.randint(WORDS, (RECORDS, *kind.shape))
        else:
            self.x = torch.randn(RECORDS, *kind.shape)
        self.y = torch.arange(RECORDS) % 3
        self.rows = torch.stack([self._row(k) for k in range(RECORDS)])
        self.task = Task(self.module, cross_entropy)
        self.clips = ClippedExamples(self.task, self.x[:2], self.y[:2])

    def _row(self, k):
        learning = [p for p in self.module.parameters() if p.requires_grad]
        loss = nn.functional.cross_entropy(self.module(self.x[k : k + 1]), self.y[k : k + 1])
        found = torch.autograd.grad(loss, learning, materialize_grads=True)
        return torch.cat([g.flatten() for g in found]).double()

    def expected(self, clip):
        lengths = self.rows.norm(p=1 if clip.norm is Norm.L1 else 2, dim=1)
        return (self.rows * (clip.value / lengths).clamp_max(1)[:, None]).sum(dim=0)

    def clip(self, norm):
        """One that half of the records exceed."""
        return Clip(float(self.rows.norm(p=1 if norm is Norm.L1 else 2, dim=1).median()), norm)

    def found(self, clip, records=slice(None)):
        row = torch.zeros(self.task.size)
        flat = self.task.parameters.clone()
        self.clips.add_clipped_(row, flat, self.x[records], self.y[records], clip)
        return row.double()

    @property
    def way(self):
        if not self.clips._by_layers:
            return (
                "looped" if self.clips._example_gradients.func.__name__ == "_one_by_one" else "vmap"
            )
        if not self.clips._output_shapes:
            return "copies"
        return "mixed" if self.clips._without_formula else "formula"


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("name", KINDS)
def test_clipping_is_a_loop_over_single_records(name):
    made = Made(name)
    assert made.way == KINDS[name].way
    for norm in Norm:
        clip = made.clip(norm)
        expected = made.expected(clip)
        assert float((made.found(clip) - expected).norm()) <= 1e-4 * float(expected.norm())
        for k in range(RECORDS):
            alone = made.found(clip, [k])
            length = float(alone.norm(p=1 if norm is Norm.L1 else 2))
            assert length <= clip.value


FROZEN = {
    "biases": lambda name: "bias" in name,
    "weights": lambda name: "weight" in name and not name.startswith(("out", "1.", "4.")),
}


@pytest.mark.parametrize("what", FROZEN)
@pytest.mark.parametrize(
    "name",
    ["conv 2d", "conv 2d, few positions", "layer norm", "attention", "LSTM", "linear on sequences"],
)
def test_frozen_parameters_are_no_part_of_it(name, what):
    made = Made(name, FROZEN[what])
    assert made.task.size < sum(p.numel() for p in made.module.parameters())
    assert made.clips._by_layers
    clip = made.clip(Norm.L2)
    expected = made.expected(clip)
    assert float((made.found(clip) - expected).norm()) <= 1e-4 * float(expected.norm())


def test_there_are_kinds_of_every_way():
    assert {kind.way for kind in KINDS.values()} == {"formula", "mixed", "copies", "looped"}
    assert len(KINDS) >= 25


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_weight_that_a_hook_computes_is_refused():
    with pytest.raises(BadInput, match=r"by torch\.nn\.utils\.parametrizations"):
        Task(nn.utils.weight_norm(nn.Linear(6, 3)), cross_entropy)


def test_a_branch_on_the_record_is_refused():
    """Its own code could let a record reach another's gradient, and no graph has the branch."""
    x, y = torch.randn(2, 6), torch.arange(2)
    with pytest.raises(BadInput, match="it decides by the values of its inputs"):
        ClippedExamples(Task(Branching(), cross_entropy), x, y)
