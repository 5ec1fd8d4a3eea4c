"""LoRA adapters around a Hugging Face model from a folder: the base is frozen and nobody's copy."""

import math

import numpy as np
import pytest
import torch

import fedveil as fv

pytestmark = pytest.mark.slow  # transformers take seconds to import

WORDS, CLIENTS, EACH = 30, 12, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT as `save_pretrained` leaves it."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": WORDS}
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("bert")
    model = BertForSequenceClassification(BertConfig(num_labels=2, **sizes, **layers))
    model.save_pretrained(place)
    return place


def adapted(folder):
    from peft import LoraConfig, get_peft_model
    from transformers import BertForSequenceClassification

    torch.manual_seed(1)
    base = BertForSequenceClassification.from_pretrained(folder, local_files_only=True)
    kind = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return Logits(get_peft_model(base, kind))


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens).logits


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    x = random.integers(WORDS, size=(CLIENTS + 1, EACH, 6))
    y = (x[..., 0] > WORDS // 2).astype(np.int64)
    clients = [(str(k), x[k], y[k]) for k in range(CLIENTS)]
    return fv.FederatedData.from_clients(clients, test=(x[-1], y[-1]), classes=2)


def trained(module, data, mode):
    plan = fv.central(
        *(fv.samplers.Everyone(), CLIENTS, fv.clips.Fixed(0.5)),
        rounds=2,
        budget=fv.Budget(math.inf, 1e-3),
        multiplier=0.3,
    )
    task, work = fv.Task(module, fv.cross_entropy), fv.ClientSgd(fv.Batches(0, steps=2), lr=0.5)
    training = fv.Training(task, data, plan, work, mode=mode, workers=1)
    *_, last = fv.train(training)
    return task, last


def test_adapters_learn_under_central_dp_in_both_modes(folder, data):
    both = {mode: trained(adapted(folder), data, mode) for mode in fv.engines.Mode}
    (task, one), (_, other) = both.values()
    assert torch.allclose(one.state.params, other.state.params, atol=1e-5)
    first = fv.Task(adapted(folder), fv.cross_entropy).parameters
    assert (one.state.params - first).abs().max() > 1e-3
    learning = [name for name, p in task.module.named_parameters() if p.requires_grad]
    assert all("lora_" in name or "classifier" in name for name in learning)


def test_the_base_is_shared_and_stays_as_it_is(folder, data):
    module = adapted(folder)
    base = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in base.items()}
    task, last = trained(module, data, fv.engines.Mode.VECTORISED)
    total = sum(p.numel() for p in module.parameters())
    assert len(last.state.params) == task.size == 2 * 2 * 2 * 2 * 16 + 2 * 16 + 2
    assert 10 * task.size < total
    for name, (place, value) in before.items():
        run_with = task.named_layers[name.rpartition(".")[0]].get_parameter(name.rpartition(".")[2])
        assert task.frozen[name].data_ptr() == run_with.data_ptr() == place
        assert torch.equal(run_with.detach(), value)
    assumed = "\n".join(task.assumptions)
    assert f"{task.size:,} of {total:,} parameters are trained" in assumed
    assert "taken as public" in assumed
