"""Models of 120 MB and adapters over the wire: memory, bytes, cut links, killed SuperNodes.

`pytest -s -m slow tests/e2e/test_flower_large.py -k memory` prints the figures of docs/flower.md.
"""

import hashlib
import json
import re
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedveil.data.federated import FederatedData
from fedveil.flower.deployment import Address, load_for_sites
from fedveil.flower.local_federation import LocalFederation, free_ports
from fedveil.flower.one_machine import write_trial
from tests.e2e.federations import PATIENCE, QUICK, Live, processes_of, wait_for
from tests.e2e.measured_sites import MIB, Memory, relay

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NAMES = ("north", "south")
WIDE, SMALL, DEPTH = 2450, 1037, 5
CHUNK = 5 * MIB
NET = """
from torch import nn

def make(width):
    layers = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))
"""
LORA = """
import peft
from torch import nn
from transformers import BertConfig, BertModel

import fedveil as fv

class Rows(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.embed, self.base, self.head = nn.Linear(8, 128), base, nn.Linear(128, 10)

    def forward(self, x):
        rows = self.embed(x.reshape(len(x), 8, 8))
        return self.head(self.base(inputs_embeds=rows).last_hidden_state.mean(1))

def make():
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    base = BertModel(BertConfig(hidden_size=128, vocab_size=2, **sizes))
    lora = peft.LoraConfig(r=2, target_modules=["query", "value"])
    return fv.Task(Rows(peft.get_peft_model(base, lora)), fv.cross_entropy)
"""
LOCAL = ("sample.kind=all", "sample.size=none", "sample.max_participations=none")
NEW = ["*lora_*", "embed.*", "head.*"]


def parameters(width):
    return 65 * width + DEPTH * (width + 1) * width + 10 * width + 10


@contextmanager
def federation(folder, recipe, *settings, code):
    """Two sites with eight records each; north reaches SuperLink through a relay."""
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 8, 64)).astype(np.float32)
    y = random.integers(10, size=(3, 8))
    clients = [(name, x[k], y[k]) for k, name in enumerate(NAMES)]
    data = FederatedData.from_clients(clients, test=(x[2], y[2]), classes=10)
    data.save(folder / "data")
    (folder / "net.py").write_text(code)
    own = ("data.name=saved", f"data.path={folder / 'data'}", "data.clients=none")
    net = ("data.partition=none", "model.name=code", f"model.path={folder / 'net.py'}:make")
    chosen = load_for_sites(recipe, (*own, *net, *settings), len(NAMES), divided=True)
    port, operators, *ports = free_ports(2 + len(NAMES))
    address = Address(port=port, site_ports=tuple(ports), operator_port=operators)
    place = folder / "federation"
    options = {"superlink": address, "deadline": PATIENCE, "allow_code": True}
    write_trial(place, chosen, chosen.load_data(), NAMES, **options)
    with relay(port) as wire, LocalFederation(place, **QUICK) as running:
        found = Live(place, NAMES, address, running)
        running.start_superlink(found.url)
        running.register()
        script = found.site("north") / "supernode.sh"
        script.write_text(
            script.read_text().replace(f"127.0.0.1:{port} ", f"127.0.0.1:{wire.port} ")
        )
        for name in NAMES:
            policy = found.owner(name) / "policy.toml"  # which allows several runs
            text = re.sub(r"epsilon.client = .*", "epsilon.client = 99.0", policy.read_text())
            policy.write_text(re.sub(r"(?m)^delta = .*", "delta = 0.01", text))
            running.start_site(name)
        running.wait_until_connected()
        wait_for(lambda: all(len(site_processes(found, name)) == 2 for name in NAMES), "opened")
        yield found, wire
    wait_for(lambda: not processes_of(place), "all ended")


def site_processes(found, name):
    """The fork server of a site, and the process that has opened the site."""
    return [pid for pid, program in processes_of(found.site(name)) if program == "fork-server"]


def measured(folder, width):
    """What two rounds take at north and at the server, of a model of that width."""
    settings = (*LOCAL, f"model.options.width={width}", "rounds=2", "budget.epsilon=15")
    with federation(folder, "ldp-sgd", *settings, code=NET) as (found, wire):
        up, down = wire.up, wire.down
        with Memory(found.site("north")) as site, Memory(found.server) as server:
            result = found.run("run")
        assert (result["rounds"], result["stopped"]) == (2, "rounds")
        outcomes = found.outcomes("run")
        assert all(line["answered"] == [*NAMES] for line in outcomes)
        each = (wire.up - up) / 2, (wire.down - down) / 2
    shutil.rmtree(folder)
    return site, server, each, [line["seconds"] for line in outcomes]


def test_memory_and_bytes_of_a_model_of_thirty_million_parameters(tmp_path):
    """Memory is beyond that of the same processes with a model of 16,510 parameters.

    The most is needed while the site is opened, when its model is tried.
    """
    small = measured(tmp_path / "small", 50)
    large = measured(tmp_path / "large", WIDE)
    model = 4 * parameters(WIDE)
    assert model > 120e6
    at_site, at_server = (
        (b.peak - a.peak) / model for a, b in zip(small[:2], large[:2], strict=True)
    )
    up, down = (size / model for size in large[2])
    print(f"\n{model / 1e6:.1f} MB: a site takes {at_site:.1f} models, the server {at_server:.1f}")
    print(f"a round and site: {up:.3f} models up, {down:.3f} down; seconds {large[3]}")
    for name, size in sorted(large[0].parts.items()):
        print(f"    {name.split()[0]}: {size / 1e6:.0f} MB")
    assert at_site <= 8.5
    assert 1 <= up < 1.02
    assert 1 <= down < 1.02


@pytest.fixture(scope="module")
def twenty_megabytes(tmp_path_factory):
    """A federation whose model is sent in five chunks."""
    settings = (*LOCAL, f"model.options.width={SMALL}", "rounds=1", "budget.epsilon=15")
    folder = tmp_path_factory.mktemp("wire")
    with federation(folder, "ldp-sgd", *settings, code=NET) as (found, wire):
        assert 4 * CHUNK < 4 * parameters(SMALL) < 5 * CHUNK
        yield found, wire


def started_until_cut(found, wire, directory):
    """Start a run whose link to north is cut after half of its answer. Returns bytes before."""
    before = wire.up
    wire.limit = before + 2 * CHUNK + 2 * MIB
    process = found.federation.start_run(directory)
    wait_for(lambda: wire.is_cut, "the link was cut")
    return process, before


def test_an_answer_goes_on_where_the_link_was_cut(twenty_megabytes):
    """What had arrived is kept: less is sent than three whole answers."""
    found, wire = twenty_megabytes
    process, before = started_until_cut(found, wire, "cut")
    charged = len(found.charges("north"))
    wire.mend()
    process.wait(PATIENCE)
    assert found.federation.read_result("cut")["rounds"] == 1
    assert [line["answered"] for line in found.outcomes("cut")] == [[*NAMES]]
    assert len(found.charges("north")) == charged
    assert wire.up - before < 3 * 4 * parameters(SMALL)


def test_an_answer_goes_on_after_its_supernode_was_killed(twenty_megabytes):
    """It is asked again, answers what it has kept, and sends the chunks that are missing."""
    found, wire = twenty_megabytes
    process, before = started_until_cut(found, wire, "killed")
    charged = len(found.charges("north"))
    kept = (found.owner("north") / "ledger" / "answer.safetensors").read_bytes()
    found.federation.sites["north"].kill()
    wire.mend()
    found.federation.start_site("north")
    process.wait(PATIENCE)
    assert found.federation.read_result("killed")["rounds"] == 1
    assert [line["answered"] for line in found.outcomes("killed")] == [[*NAMES]]
    assert [line["asking"] for line in found.asks("killed") if "asking" in line] == [1]
    assert len(found.charges("north")) == charged
    assert (found.owner("north") / "ledger" / "answer.safetensors").read_bytes() == kept
    log = (found.owner("north") / "ledger" / "log.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in log]
    assert [e for e in events if e.startswith("answered")][-2:] == ["answered", "answered again"]
    assert wire.up - before < 4 * parameters(SMALL) + 2 * CHUNK + MIB


def test_adapters_cross_the_wire_and_their_base_does_not(tmp_path):
    """The base is in the bundles, by its digest, and learns nothing."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    names = {}
    exec(compile(LORA, "net.py", "exec"), names)
    torch.manual_seed(3)
    module = names["make"]().module
    base = {
        name: value.clone()
        for name, value in module.state_dict().items()
        if not any(re.fullmatch(each.replace("*", ".*"), name) for each in NEW)
    }
    save_file(base, tmp_path / "base.safetensors")
    learning = sum(p.numel() for p in module.parameters() if p.requires_grad)
    size = (tmp_path / "base.safetensors").stat().st_size
    assert size > 20 * 4 * learning

    new = f"model.new={json.dumps(NEW)}"
    weights = (f"model.weights={tmp_path / 'base.safetensors'}", new)
    settings = (*LOCAL, *weights, "rounds=2", "budget.epsilon=15")
    with federation(tmp_path, "ldp-sgd", *settings, code=LORA) as (found, wire):
        digest = hashlib.sha256((tmp_path / "base.safetensors").read_bytes()).hexdigest()
        for name in NAMES:
            bundle = found.folder / "bundles" / name
            assert f'weights = "{digest}"' in (bundle / "recipe.toml").read_text()
            assert (
                json.loads((bundle / "bundle.json").read_text())["files"]["base.safetensors"]
                == digest
            )
        up, down = wire.up, wire.down
        assert found.run("run")["rounds"] == 2
        assert wire.up - up + wire.down - down < size / 2
        kept = load_file(found.owner("north") / "ledger" / "answer.safetensors")["report"]
        assert len(kept) == learning
        model = load_file(found.server / "run" / "model.safetensors")
    # The base is stored with the recipe, and the model has what learns alone.
    learns = {name for name, value in module.named_parameters() if value.requires_grad}
    assert set(model) == learns
    assert model["head.weight"].shape == (10, 128)
