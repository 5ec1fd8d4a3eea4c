"""Nothing of a secure run's files and words depends on anybody's records but through a mechanism.

Mechanisms are replaced by ones that answer the same whatever they are given, and the operating
system's entropy by a constant. What then still differs, between two runs whose data differ in one
client or one held-out owner, went around them. Of the ledger's seals, which have a secret salt, it
is only compared that they are there.
"""

import contextlib
import io
import re

import numpy as np
import pytest
import safetensors
from rich.console import Console

import fedveil as fv
from fedveil.console import print_result, progress_line
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run

OWNERS = 12
SETS = {
    "rounds": 4,
    "model.name": "softmax",
    "client.epochs": 1,
    "budget.epsilon": 6.0,
    "budget.delta": 1e-3,
    "noise.source": "secure",
    "engine.workers": 1,
}


def rows_of(seed, count, scale=1.0):
    random = np.random.default_rng(seed)
    x = (scale * random.normal(size=(count, 4))).astype(np.float32)
    return x, random.integers(3, size=count)


def data_of(where, *, client=None, owner=None):
    """30 clients; test records of 12 held-out owners, public ones, clients' own, or none.

    `client` and `owner` are the records of the first of either, where they are given.
    """
    clients = [(f"c{k}", *rows_of(k, 3)) for k in range(30)]
    if client is not None:
        clients[0] = ("c0", *client)
    if where == "none":
        return fv.FederatedData.from_clients(clients, classes=3)
    tested = [rows_of(100 + k, 2) for k in range(OWNERS)]
    if owner is not None:
        tested[0] = owner
    names = {"held-out": "h", "own": "c"}.get(where)
    owners = [f"{names}{k}" for k, (_, y) in enumerate(tested) for _ in y]
    x, y = (np.concatenate(part) for part in zip(*tested, strict=True))
    return fv.FederatedData.from_clients(
        clients, test=(x, y), test_owners=owners if names else None, classes=3
    )


@pytest.fixture
def closed(monkeypatch):
    """Mechanisms that say nothing, and randomness that does not change."""

    def silent(rows, scales, grid_of, draw):
        rows.zero_()

    def words(self, count):
        return np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)

    monkeypatch.setattr("fedveil.privacy.noise.mechanisms._add_on_grid_", silent)
    monkeypatch.setattr("fedveil.privacy.noise.secure_random.SecureRandom.words", words)


def left(folder, data, **sets):
    """Everything that a run leaves but its ledger, and all that it says on the way."""
    folder.parent.mkdir()
    recipe = load_recipe("central", {**SETS, **sets}, own=["data"])
    run, said = Run.start(recipe, folder, None, data=data), io.StringIO()
    console = Console(file=said, width=300)
    with contextlib.redirect_stderr(said), progress_line(console, run) as show:
        result = run.execute(show, lambda: console.print(run.describe()))
    print_result(console, result)
    found = {"console": said.getvalue().encode()}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("ledger.db"):
            found[str(path.relative_to(folder))] = _content(path)
    place = str(folder).encode()
    return {
        name: re.sub(rb"[0-9a-f]{64}", b"SEAL", content.replace(place, b"HERE"))
        for name, content in found.items()
    }


def _content(path):
    """A file's bytes; of tensors, whose metadata have no order, all that they hold, in order."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    with safetensors.safe_open(path, framework="np") as file:
        held = [(name, file.get_tensor(name).tolist()) for name in sorted(file.keys())]
        return repr((sorted(file.metadata().items()), held)).encode()


HUGE = (np.full((9, 4), 3e38, dtype=np.float32), np.zeros(9, dtype=int))
OTHER = rows_of(999, 7, scale=30.0)
PRICED = {"evaluate.epsilon": 2.0}

CASES = {
    "public test, client": ("public", "client", {}),
    "no test, client": ("none", "client", {}),
    "held-out, client": ("held-out", "client", PRICED),
    "held-out, owner": ("held-out", "owner", PRICED),
    "clients priced, client": ("none", "client", PRICED),
    "clients' own test priced, their test records": ("own", "owner", PRICED),
}


@pytest.mark.parametrize("records", [OTHER, HUGE], ids=["other", "huge"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_goes_around_the_mechanisms(closed, tmp_path, case, records):
    where, who, sets = CASES[case]
    before = left(tmp_path / "one" / "run", data_of(where), **sets)
    after = left(tmp_path / "two" / "run", data_of(where, **{who: records}), **sets)
    assert before.keys() == after.keys()
    assert {"metrics.jsonl", "result.json", "recipe.toml", "model.safetensors"} < before.keys()
    assert [name for name in before if before[name] != after[name]] == []


OPEN = {
    "diagnostics, which the claim then names": ("public", "client", {"evaluate.diagnostics": True}),
    "held-out owners in the clear, whom the claim counts": ("held-out", "owner", {}),
}


@pytest.mark.parametrize("case", OPEN)
def test_what_the_claim_names_is_seen_to_differ(closed, tmp_path, case):
    """So that the test above would notice."""
    where, who, sets = OPEN[case]
    before = left(tmp_path / "one" / "run", data_of(where), **sets)
    after = left(tmp_path / "two" / "run", data_of(where, **{who: HUGE}), **sets)
    assert before["metrics.jsonl"] != after["metrics.jsonl"]
    word = b"were recorded as asked for" if where == "public" else b"owners are held out of"
    assert word in before["result.json"]


def test_trainings_whose_metrics_differ_share_no_noise():
    """The same draw times two noises would give the number itself away."""

    def seed(**sets):
        chosen = load_recipe("central", {**SETS, "noise.source": "seeded", **sets}, own=["data"])
        return build(chosen, data=data_of("held-out")).streams.seed

    priced = {"evaluate.epsilon": 2.0}
    others = [{}, {"evaluate.epsilon": 1.0}, {**priced, "evaluate.every": 2}]
    others += [{**priced, "evaluate.loss_clip": 3.0}, {**priced, "evaluate.delta": 1e-4}]
    seeds = [seed(**priced), *(seed(**sets) for sets in others)]
    assert len(set(seeds)) == len(seeds)
    assert seed(**priced) == seeds[0]
