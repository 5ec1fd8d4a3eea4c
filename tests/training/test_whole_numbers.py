"""Records of whole numbers, such as words: kept as they are, tried and trained on in every mode."""

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.training.engines.mode_choice import timings
from fedveil.training.gradients.modes import Mode

WORDS, LENGTH = 5, 3
SGD = fv.ClientSgd(fv.Batches(0, steps=3), lr=0.5)


class Reader(nn.Module):
    """The mean of a sentence's words, centred over the batch if asked to."""

    def __init__(self, centred=False):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.answer, self.centred = nn.Embedding(WORDS, 4), nn.Linear(4, 2), centred

    def forward(self, sentences):
        read = self.words(sentences).mean(dim=1)
        return self.answer(read - read.mean(dim=0) if self.centred else read)


def texts(test=None):
    random = np.random.default_rng(0)

    def some(count):
        return random.integers(WORDS, size=(count, LENGTH)), random.integers(2, size=count)

    clients = [(f"phone-{k}", *some(3 + k)) for k in range(4)]
    return fv.FederatedData.from_clients(clients, test=test or some(10), classes=2)


def trained(data, module, **options):
    task = fv.Task(module, fv.cross_entropy, {"accuracy": fv.correct})
    plan = fv.central(
        fv.samplers.Everyone(),
        data.clients,
        fv.clips.Fixed(1.0),
        rounds=2,
        budget=fv.Budget(8, 1e-3),
    )
    training = fv.Training(task, data, plan, SGD, workers=1, **options)
    for _ in fv.train(training):
        pass
    return training


@pytest.mark.slow
def test_both_modes_learn_the_same_from_words():
    data = texts()
    looped, vectorised = (
        trained(data, Reader(), mode=mode).task.parameters.clone() for mode in Mode
    )
    assert data.x.dtype == np.int64
    assert not torch.equal(looped, Reader().words.weight.new_zeros(len(looped)))
    torch.testing.assert_close(looped, vectorised, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_modes_are_timed_on_words_that_exist():
    task = fv.Task(Reader(), fv.cross_entropy)
    assert set(timings(task, texts(), SGD, 512)) == set(Mode)


@pytest.mark.parametrize("alike", [0, 6, 200])
def test_records_that_see_each_other_are_found_though_the_first_are_alike(alike):
    x = np.concatenate([np.zeros((alike, LENGTH), int), np.arange(12).reshape(4, 3) % WORDS])
    data = texts(test=(x, np.arange(len(x)) % 2))
    assert trained(data, Reader(centred=True)).mode is Mode.LOOPED
    with pytest.raises(BadInput, match="'vectorised' and"):
        trained(data, Reader(centred=True), mode=Mode.VECTORISED)


def test_a_module_that_needs_floats_gets_one_line():
    with pytest.raises(
        BadInput,
        match=r"^records of shape \(3,\) are whole numbers \(torch.int64\) and the model computes "
        r"with real ones: give them as floats, or begin with an embedding$",
    ):
        trained(texts(), nn.Linear(LENGTH, 2))


def test_a_word_that_the_embedding_does_not_have_is_no_question_of_floats():
    data = texts(test=([[WORDS] * LENGTH], [0]))
    data.x[:] = WORDS
    with pytest.raises(BadInput, match=r"the model does not fit records of shape .*out of range"):
        trained(data, Reader())
