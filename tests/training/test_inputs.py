"""Records of several named inputs, through every way of computing: all of them learn the same."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.attacks.adversary import BackdoorAttack
from fedveil.attacks.backdoors import PixelTrigger
from fedveil.base.errors import BadInput
from fedveil.privacy.clip import Clip
from fedveil.training.cohort import Batch, CohortData
from fedveil.training.engines.mode_choice import timings
from fedveil.training.evaluate import evaluate
from fedveil.training.gradients.modes import Mode, gradients_of
from fedveil.training.gradients.trajectories import VmappedTrajectory
from fedveil.training.session import _differing_rows

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

WORDS, LENGTH, CLASSES, SIZES = 9, 6, 3, (4, 1, 6, 2)
FREE = fv.Budget(math.inf, 1e-3)
SGD = fv.ClientSgd(fv.Batches(2, epochs=1), lr=0.3)


class Reader(nn.Module):
    """A recurrent layer over the words that a mask lets through, and an age."""

    def __init__(self):
        super().__init__()
        self.words, self.read = nn.Embedding(WORDS, 4), nn.LSTM(4, 5, batch_first=True)
        self.answer = nn.Linear(6, CLASSES)

    def forward(self, age, *, ids, mask):
        read, (last, _) = self.read(self.words(ids) * mask[..., None])
        kept = (read * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return self.answer(torch.cat([kept, age], dim=1)), (read, last)


class Attention(nn.Module):
    """A transformer layer that does not look at padding."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.answer = nn.Linear(9, CLASSES)

    def forward(self, ids, mask, age):
        read = self.layer(self.words(ids), src_key_padding_mask=~mask)
        kept = (read * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return {"logits": self.answer(torch.cat([kept, age], dim=1)), "read": read}


MODULES = {"lstm": Reader, "transformer": Attention}


def some(random, count):
    mask = np.arange(LENGTH) < random.integers(1, LENGTH + 1, size=count)[:, None]
    x = {
        "ids": np.where(mask, random.integers(WORDS, size=(count, LENGTH)), 0),
        "mask": mask,
        "age": random.normal(size=(count, 1)),
    }
    return x, random.integers(CLASSES, size=count)


@pytest.fixture
def data():
    random = np.random.default_rng(0)
    clients = [(f"c{k}", *some(random, n)) for k, n in enumerate(SIZES)]
    return fv.FederatedData.from_clients(clients, test=some(random, 12), classes=CLASSES)


SLOW = pytest.mark.slow


@pytest.fixture(params=[pytest.param(m, marks=SLOW) if m == "transformer" else m for m in MODULES])
def task(request):
    torch.manual_seed(1)
    return fv.Task(MODULES[request.param](), fv.cross_entropy, {"accuracy": fv.correct})


def trained(task, data, work=SGD, **options):
    plan = fv.central(
        fv.samplers.Everyone(),
        data.clients,
        fv.clips.Fixed(0.5),
        rounds=2,
        budget=FREE,
        multiplier=0.5,
    )
    training = fv.Training(task, data, plan, work, **{"workers": 1, **options})
    start = task.parameters.clone()
    metrics = list(fv.train(training))[-1].metrics
    learnt = task.parameters.clone()
    task.parameters.copy_(start)
    return learnt, metrics


@pytest.mark.slow
def test_both_modes_and_processes_learn_the_same(task, data):
    (looped, one), (vectorised, other) = (trained(task, data, mode=mode) for mode in Mode)
    assert not torch.equal(looped, task.parameters)
    torch.testing.assert_close(looped, vectorised, rtol=1e-5, atol=1e-5)
    assert one == pytest.approx(other, rel=1e-4)
    shared, _ = trained(task, data, mode=Mode.LOOPED, workers=2, chunk=2)
    torch.testing.assert_close(looped, shared, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", Mode)
def test_every_example_is_clipped_by_itself(task, data, mode):
    cohort, clip = CohortData(data, np.arange(data.clients)), Clip(0.3)
    longest = max(SIZES)
    mask = (torch.arange(longest) < torch.tensor(SIZES)[:, None]).float()
    batch = Batch(torch.arange(longest).expand(len(SIZES), -1), mask)
    walk = gradients_of(task, mode, data).trajectory(task.parameters, cohort, spanned=False)
    assert isinstance(walk, VmappedTrajectory) == (mode is Mode.VECTORISED)
    found = walk.clipped_sum(None, batch, clip)
    expected = torch.zeros_like(found)
    for k, size in enumerate(SIZES):
        for i in range(size):
            x = {name: value[k, i : i + 1] for name, value in cohort.x.items()}
            leaves = {n: v.clone().requires_grad_() for n, v in task.named(task.parameters).items()}
            loss = task.losses(leaves, x, cohort.y[k, i : i + 1]).sum()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            gradient = task.flattened(dict(zip(leaves, gradients, strict=True)))
            expected[k] += gradient * (clip.value / gradient.norm()).clamp_max(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_padding_repeats_a_client_s_own_records_in_every_input(data):
    cohort = CohortData(data, np.array([3, 0, 1]))
    assert (cohort.longest, list(cohort.x)) == (4, ["ids", "mask", "age"])
    for name, values in cohort.x.items():
        for k, client in enumerate(cohort.ids):
            own = data.x[name][data.offsets[client] : data.offsets[client + 1]]
            rows = np.minimum(np.arange(4), len(own) - 1)
            np.testing.assert_array_equal(values[k].numpy(), own[rows])


def test_clients_of_memory_maps_are_the_same(data, tmp_path):
    data.save(tmp_path / "saved")
    opened = fv.FederatedData.open(tmp_path / "saved")
    ids = np.array([2, 0])
    for name, value in CohortData(opened, ids).x.items():
        assert torch.equal(value, CohortData(data, ids).x[name])


@SLOW
def test_modes_are_timed_and_the_test_split_is_measured(task, data):
    assert set(timings(task, data, SGD, 512)) == set(Mode)
    found = evaluate(task, task.parameters, data, batch=5)
    x = {name: torch.tensor(value) for name, value in data.test_x.items()}
    expected = task.measure_batch(task.parameters, x, torch.tensor(data.test_y)).per_example
    assert found == pytest.approx({n: float(v.mean()) for n, v in expected.items()}, rel=1e-5)


@pytest.mark.slow
def test_a_run_predicts_from_named_inputs(data, tmp_path):
    torch.manual_seed(1)
    module = Attention()
    settings = {"rounds": 1, "sample.size": 2}
    run = fv.run("fedavg", model=module, data=data, out=tmp_path / "run", set=settings, quiet=True)
    learnt = fv.open_run(tmp_path / "run", model=module)
    found = learnt.evaluate({**data.test_x, "y": data.test_y})
    assert found == pytest.approx(run.result["metrics"], rel=1e-5)
    assert len(learnt.predict(data.test_x)["prediction"]) == 12
    with pytest.raises(BadInput, match="has no column 'mask'"):
        learnt.predict({"ids": data.test_x["ids"], "age": data.test_x["age"]})
    with pytest.raises(BadInput, match=r"takes one array per record .* \(ids, mask, age\)"):
        fv.run("fedavg", data=data, out=tmp_path / "zoo", set={"model.name": "mlp"})


class Lengths(nn.Module):
    """The word at the end of a text, whose length is a number of its own."""

    def __init__(self, ends):
        super().__init__()
        self.words, self.answer, self.ends = nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES), ends

    def forward(self, ids, length):
        end = (torch.arange(LENGTH) == self.ends(length)[..., None] - 1).to(torch.float32)
        return self.answer(torch.einsum("btd,bt->bd", self.words(ids), end.expand(len(ids), -1)))


def lengths(test_lengths):
    random = np.random.default_rng(0)

    def part(lengths):
        ids = random.integers(WORDS, size=(len(lengths), LENGTH))
        return {"ids": ids, "length": np.array(lengths)}, np.arange(len(lengths)) % CLASSES

    clients = [(f"c{k}", *part([1 + k, 5, 2])) for k in range(3)]
    return fv.FederatedData.from_clients(clients, test=part(test_lengths), classes=CLASSES)


@SLOW
def test_numbers_of_a_record_s_own_are_inputs(tmp_path):
    data, module = lengths([3] * 20 + [4, 5]), Lengths(lambda length: length)
    task = fv.Task(module, fv.cross_entropy)
    looped, vectorised = (trained(task, data, mode=mode)[0] for mode in Mode)
    torch.testing.assert_close(looped, vectorised, rtol=1e-5, atol=1e-5)
    settings = {"rounds": 1, "sample.size": 2}
    fv.run("fedavg", model=module, data=data, out=tmp_path / "r", set=settings, quiet=True)
    learnt = fv.open_run(tmp_path / "r", model=module)
    assert len(learnt.predict(data.test_x)["prediction"]) == 22


@pytest.mark.slow
def test_records_that_see_each_other_s_length_alone_are_found():
    """The test records differ in their words at once, and in their lengths only later."""
    data, task = lengths([3] * 20 + [4, 5]), fv.Task(Lengths(lambda n: n.amax()), fv.cross_entropy)
    with pytest.raises(BadInput, match="records of a batch see each other"):
        trained(task, data, mode=Mode.VECTORISED)


def test_rows_to_try_a_module_on_differ_in_every_input_that_is_no_real_number():
    same, late = np.zeros((30, 2), int), np.repeat([0, 1], [20, 10])
    assert _differing_rows(same).tolist() == [0]
    assert _differing_rows({"a": np.arange(30), "b": late}).tolist() == [0, 1, 2, 20]
    assert _differing_rows({"a": same, "b": late}).tolist() == [0, 20]
    assert _differing_rows({"a": same, "b": np.zeros((30, 1), np.float32)}).tolist() == [0]
    assert _differing_rows(np.zeros((30, 1), np.float32)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Lengths(lambda length: length), r"does not fit records of shape \{.*argument"),
        (nn.Linear(LENGTH, CLASSES), r"does not fit records of shape \{.*argument"),
    ],
)
def test_a_module_without_these_arguments_gets_one_line(data, module, words):
    with pytest.raises(BadInput, match=words) as refusal:
        trained(fv.Task(module, fv.cross_entropy), data)
    assert "\n" not in str(refusal.value)


class Bag(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.words, self.answer = nn.EmbeddingBag(WORDS, 4, mode=mode), nn.Linear(4, CLASSES)

    def forward(self, ids):
        return self.answer(self.words(ids))


@pytest.mark.parametrize(
    "kind", ["mean", pytest.param("sum", marks=SLOW), pytest.param("max", marks=SLOW)]
)
def test_bags_learn_the_same_in_both_modes_or_are_looped(kind):
    random = np.random.default_rng(0)

    def part(count):
        ids = random.integers(WORDS, size=(count, LENGTH))
        return {"ids": ids}, random.integers(CLASSES, size=count)

    clients = [(f"c{k}", *part(n)) for k, n in enumerate(SIZES)]
    data = fv.FederatedData.from_clients(clients, test=part(8), classes=CLASSES)
    task = fv.Task(Bag(kind), fv.cross_entropy)
    looped, _ = trained(task, data, mode=Mode.LOOPED)
    if Mode.VECTORISED in timings(task, data, SGD, 512):
        vectorised, _ = trained(task, data, mode=Mode.VECTORISED)
        torch.testing.assert_close(looped, vectorised, rtol=1e-5, atol=1e-5)
    measured, _ = trained(task, data)
    torch.testing.assert_close(looped, measured, rtol=1e-5, atol=1e-5)


def test_backdoors_refuse_inputs_by_name_in_one_line(data):
    with pytest.raises(BadInput, match=r"inputs by name \(ids, mask, age\): backdoors are for"):
        BackdoorAttack.of(data, PixelTrigger(target=0))
