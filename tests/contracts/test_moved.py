"""Where a file lies and what a class, field or member is called decides no seeded bit.

`test_identities.py` has the quick part: no such name is in an identity.
"""

import enum
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedveil
from tests.contracts.moved_package import Moved
from tests.contracts.test_identities import classes, states

pytestmark = pytest.mark.slow

SMALL = ("rounds=2", "data.clients=20", "engine.workers=1", "budget.delta=1e-4")
FREE = "budget.epsilon=inf"
NOISY = ("noise.multiplier=2.0", FREE)
TURNS = ("sample.size=10", "sample.max_participations=2")
RECIPES = {
    "central": ("client.epochs=1", *NOISY),
    "dp-sgd": (*NOISY, *TURNS),
    "ldp-sgd": (*NOISY, *TURNS),
    "dp-fedavg": (*NOISY, "sample.size=10"),
    "ldp-fl": ("client.epochs=1", "shuffle.minimum=18", FREE),
    "priv-unit": TURNS,
}
PROGRAM = """
import hashlib
import json
import sys
from dataclasses import fields

from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.training.session import train

found = {}
for name, settings in json.loads(sys.argv[1]).items():
    training = build(load_recipe(name, settings))
    params = list(train(training))[-1].state.params
    parts = training.plan.sampler, training.plan.release, training.work
    names = [type(part).__name__ for part in parts]
    names += [field.name for part in parts for field in fields(part)]
    found[name] = [names, hashlib.sha256(params.numpy().tobytes()).hexdigest()]
print(json.dumps(found))
"""
BY_NAMES = """
from fedveil.base import identity

identity._stated = lambda value: None
identity._is_ours = lambda value: False
identity._states = lambda kind: False
"""
"""Put before the program: our parts are known as a user's are, by names and code."""


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """(what writes the copy, where it is)."""
    parts = {kind for kind in classes() if states(kind)}
    enums = {kind for kind in classes() if issubclass(kind, enum.Enum)}
    names = {kind.__name__ for kind in parts | enums}
    names |= {name for kind in enums for name in kind.__members__}
    writer = Moved(Path(fedveil.__file__).parent, names, {"Training", "Task", "FederatedData"})
    return writer, writer.write(tmp_path_factory.mktemp("moved"))


def outcomes(program, moved=None, names=tuple(RECIPES)):
    """A digest of the model that each recipe ends with, by a program in a process of its own."""
    home = Path(fedveil.__file__).parents[1]
    if moved is not None:
        writer, home = moved
        program = writer.text(program)
    wanted = {name: [*SMALL, *RECIPES[name]] for name in names}
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(wanted)],
        env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for names, _ in found.values():
        renamed = [name.startswith("its_") or name.endswith("Renamed") for name in names]
        assert renamed == [moved is not None] * len(names)
    return {recipe: digest for recipe, (_, digest) in found.items()}


def test_no_seeded_bit_depends_on_places_and_names(moved):
    assert not (moved[1] / "fedveil" / "privacy" / "sampling.py").exists()
    assert outcomes(PROGRAM, moved) == outcomes(PROGRAM)


def test_names_and_places_would_be_noticed(moved):
    """The test above can fail: were our parts known by names, seeded runs would change."""
    before = outcomes(BY_NAMES + PROGRAM, names=["central"])
    assert before["central"] != outcomes(BY_NAMES + PROGRAM, moved, ["central"])["central"]
    assert before["central"] != outcomes(PROGRAM, names=["central"])["central"]
