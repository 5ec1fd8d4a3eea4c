"""`model.weights`, `model.new`, `model.freeze` and `model.batch_norm`."""

import math
from weakref import WeakKeyDictionary

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Target
from fedveil.models import lineage
from fedveil.models.lineage import earlier_claims
from fedveil.runs.modules import read_weights_
from fedveil.runs.sections.model_section import ModelSection

SHAPE = (1, 8, 8)


def section(**keys):
    return ModelSection.model_validate({"name": "mlp", "hidden": [3], **keys})


def task(**keys):
    return section(**keys).build(SHAPE, Target(10), seed=1, allow_code=True)


@pytest.fixture
def base(tmp_path):
    """The weights of an MLP, and the file that they are in."""
    torch.manual_seed(9)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10))
    tensors = {name: value.clone() for name, value in module.state_dict().items()}
    save_file(tensors, tmp_path / "base.safetensors")
    return tensors, str(tmp_path / "base.safetensors")


def test_weights_are_read_by_name(base):
    tensors, path = base
    found = task(weights=path).module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_new_weights_keep_what_was_drawn(base):
    tensors, path = base
    drawn, found = task().module.state_dict(), task(weights=path, new=["3.*"]).module.state_dict()
    for name in tensors:
        assert torch.equal(found[name], (drawn if name[0] == "3" else tensors)[name])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("3.bias"), r"has no '3.bias', which the model has: list it in model.new"),
        (lambda t: t.update(extra=torch.ones(2)), r"has 'extra', which the model does not have"),
        (
            lambda t: t.update({"1.bias": torch.ones(4)}),
            r"'1.bias' has shape \(4,\) in .* and \(3,\) in the model",
        ),
        (
            lambda t: t.update({"1.bias": torch.full((3,), math.nan)}),
            r"'1.bias' in .* holds a number that is not finite",
        ),
    ],
)
def test_other_names_and_shapes_are_refused_unless_they_are_new(base, change, told):
    tensors, path = base
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(BadInput, match=told):
        task(weights=path)
    task(weights=path, new=["1.*", "3.*", *(["extra"] if "extra" in tensors else [])])


def test_a_refused_file_leaves_the_module_as_it_is(base):
    tensors, path = base
    save_file({**tensors, "3.bias": torch.ones(4)}, path)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10))
    before = module[1].weight.clone()
    with pytest.raises(BadInput):
        read_weights_(module, path, [])
    assert torch.equal(module[1].weight, before)


def test_one_tensor_of_two_names_may_have_either(tmp_path):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    save_file({"1.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, tmp_path / "tied")
    read_weights_(module, str(tmp_path / "tied"), [])
    assert torch.equal(module[0].weight.detach(), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"weights": "none.safetensors"}, "there is no such file"),
        ({"weights": __file__}, "is no safetensors file"),
        ({"new": ["3.*"]}, r"model.new says what model.weights leaves out"),
        ({"freeze": ["head.*"]}, r"model.freeze has 'head.\*', which is no name of the model"),
        ({"freeze": ["*"]}, "no parameters that learn, they are all frozen"),
        ({"digest": "ab"}, r"model.digest is what a run records"),
    ],
)
def test_bad_keys_are_refused(keys, told):
    with pytest.raises(BadInput, match=told) as error:
        task(**keys)
    assert "\n" not in str(error.value)


def test_a_pattern_of_new_that_names_nothing_is_refused(base):
    with pytest.raises(BadInput, match=r"model.new has 'head.\*'"):
        task(weights=base[1], new=["head.*"])


def test_frozen_parameters_do_not_learn_and_claims_say_so():
    found = task(freeze=["1.*"])
    assert found.size == 3 * 10 + 10
    assert set(found.frozen) == {"1.weight", "1.bias"}
    assert "40 of 235 parameters are trained" in found.assumptions[1]


def test_weights_of_a_module_with_batch_norm_fit_the_one_with_group_norm(tmp_path):
    code = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Conv2d(1, 4, 3), "
    code += "nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))\n"
    (tmp_path / "net.py").write_text(code)
    keys = {"name": "code", "hidden": None, "path": f"{tmp_path / 'net.py'}:make"}
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    module[1].weight.data.uniform_(1, 2)
    save_file(module.state_dict(), tmp_path / "base")
    with pytest.raises(BadInput, match="BatchNorm2d"):
        task(**keys)
    found = task(**keys, batch_norm="group", weights=str(tmp_path / "base")).module
    assert isinstance(found[1], nn.GroupNorm)
    assert torch.equal(found[1].weight, module[1].weight)


def test_a_run_is_resumed_with_the_same_weights_only(base, tmp_path):
    tensors, path = base
    settings = {"rounds": 2, "sample.rate": 0.5, "data.clients": 20, "engine.workers": 1}
    settings |= {"model.name": "mlp", "model.hidden": [3], "model.weights": path}
    settings |= {"noise.multiplier": 0.5, "budget.epsilon": math.inf, "model.freeze": ["1.*"]}

    def stop(line):
        if line["round"] == 1:
            raise KeyboardInterrupt

    ran = fv.run("central", out=tmp_path / "run", set=settings, on_round=stop, quiet=True)
    assert any("first weights are public" in line for line in ran.claims[0].assumptions)
    assert torch.equal(ran.module.state_dict()["1.weight"], tensors["1.weight"])
    save_file({**tensors, "1.bias": torch.zeros(3)}, path)
    with pytest.raises(BadInput, match="is not the one that the run was started with"):
        fv.resume(tmp_path / "run", quiet=True)
    with pytest.raises(BadInput, match="other frozen weights"):
        _ = fv.open_run(tmp_path / "run").module
    save_file(tensors, path)
    assert fv.resume(tmp_path / "run", quiet=True).result["rounds"] == 2


def test_weights_of_a_run_of_ours_name_its_claim_and_those_before_it(tmp_path, monkeypatch):
    settings = {"rounds": 2, "sample.rate": 0.5, "data.clients": 20, "engine.workers": 1}
    settings |= {"noise.multiplier": 2.0, "budget.epsilon": math.inf, "model.name": "softmax"}

    def ran(name, seed, **more):
        return fv.run(
            "central", out=tmp_path / name, quiet=True, set={**settings, "seed": seed, **more}
        )

    first = ran("first", 1)
    weights = str(first.folder / "model.safetensors")
    second = ran("second", 2, **{"rounds": 3, "model.weights": weights})
    monkeypatch.setattr(lineage, "_TENSORS", {})  # as in another process
    monkeypatch.setattr(lineage, "_TRAININGS", WeakKeyDictionary())
    third = ran("third", 3, **{"model.weights": str(second.folder / "model.safetensors")})
    assert named(second) == {str(first.claims[0])}
    assert named(third) == {str(first.claims[0]), str(second.claims[0])}


def named(run):
    return set(earlier_claims(run.claims[0].assumptions))
