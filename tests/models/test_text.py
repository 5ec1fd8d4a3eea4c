"""Models of texts: padding does not speak, records do not mix, and all ways of gradients agree."""

import pytest
import torch

import fedveil as fv
from fedveil.models.trial import mixes_records
from fedveil.models.zoo import TextLstm, TextTransformer
from fedveil.training.gradients.per_example import ClippedExamples
from fedveil.training.gradients.trajectories import example_gradients

WORDS, LENGTH = 30, 6
MODELS = ("lstm", "transformer")


def model(name, length=LENGTH, outputs=3, **options):
    torch.manual_seed(1)
    if name == "lstm":
        return TextLstm(WORDS, 8, (7, 5), outputs, **options)
    return TextTransformer(WORDS, length, 8, 2, 2, outputs, **options)


def texts(count=5):
    x = torch.randint(1, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(2))
    x[0, 3:], x[1], x[2, 5:] = 0, 0, 0
    return x


@pytest.mark.parametrize("name", MODELS)
def test_a_text_is_answered_in_the_same_way_however_far_it_is_filled_up(name):
    module, x = model(name), texts()
    with torch.no_grad():
        torch.testing.assert_close(module(x[:1]), module(x[:1, :3]))
        torch.testing.assert_close(module(x)[:1], module(x[:1]))
        changed = x.clone()
        changed[0, 2] = 1 + changed[0, 2] % (WORDS - 1)
        assert not torch.allclose(module(changed)[0], module(x)[0])


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_words_matters(name):
    module, x = model(name), texts()[3:4]
    with torch.no_grad():
        assert not torch.allclose(module(x), module(x.flip(1)), atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_texts_without_words_are_answered_and_move_no_word(name):
    x, y = torch.zeros(2, LENGTH, dtype=torch.int64), torch.tensor([0, 1])
    task = fv.Task(model(name), fv.cross_entropy)
    rows = example_gradients(task, task.parameters.clone(), x, y)
    assert torch.isfinite(rows).all()
    assert not task.named(rows)["words.weight"].any()


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_single_examples_have_gradients_by_formula_by_vmap_and_by_autograd(name, each):
    x = texts(3)
    y = torch.randint(0, 3, (len(x), LENGTH) if each else (len(x),))

    def loss(outputs, targets):
        found = torch.nn.functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(), reduction="none"
        )
        return found.view(targets.shape).flatten(1).mean(dim=1) if each else found

    task = fv.Task(model(name, each=each), loss)
    assert not mixes_records(task, x, y)
    assert ClippedExamples(task, x, y)._by_layers
    rows = example_gradients(task, task.parameters.clone(), x, y)
    for k in range(len(x)):
        module = model(name, each=each)
        loss(module(x[k : k + 1]), y[k : k + 1]).sum().backward()
        alone = torch.cat([p.grad.flatten() for p in module.parameters()])
        torch.testing.assert_close(rows[k], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_next_is_not_seen_before_it_comes(name):
    module, x = model(name, each=True), texts()[3:4]
    with torch.no_grad():
        before = module(x)
        assert before.shape == (1, LENGTH, 3)
        for place in range(LENGTH):
            changed = x.clone()
            changed[0, place] = 1 + changed[0, place] % (WORDS - 1)
            after = module(changed)
            torch.testing.assert_close(after[0, :place], before[0, :place])
            assert not torch.allclose(after[0, place], before[0, place], atol=1e-5)
