"""Short runs on the embedded digits."""

import sys

import pytest

from fedveil.cli import main as commands
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run

SHORT = ("rounds=4", "data.clients=20", "client.epochs=1", "engine.workers=1")
NOISY = ("budget.epsilon=inf", "budget.delta=1e-4", "noise.multiplier=2.0")
SMALL = ("rounds=4", "data.clients=20", "engine.workers=1")
TURNS = ("sample.size=10", "sample.max_participations=4")
BASE = {
    "central": (*SHORT, *NOISY),
    "fedsgd": (*SMALL, "sample.size=10"),
    "dp-sgd": (*SMALL, *NOISY, *TURNS),
    "ldp-sgd": (*SMALL, *NOISY, *TURNS),
    "dp-fedavg": (*SMALL, *NOISY, "sample.size=10"),
    "dp-fedavg-gaussian": (*SMALL, *NOISY, "sample.size=10"),
    "ldp-fl": (*SHORT, "budget.delta=1e-4", "shuffle.minimum=18"),
}


@pytest.fixture
def cli(monkeypatch, capsys):
    """The command line in this process: exit code, standard output, standard error."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedveil", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return ended.value.code, *capsys.readouterr()

    return called


@pytest.fixture
def short():
    """A shipped recipe, made short: no calibration, few clients, few rounds."""

    def made(name="central", *settings):
        return load_recipe(name, (*BASE.get(name, (*SHORT, "sample.size=10")), *settings))

    return made


@pytest.fixture
def start(short, tmp_path):
    """A new run, not yet executed."""

    def started(name="central", *settings, out="run"):
        return Run.start(short(name, *settings), tmp_path / out, None)

    return started


@pytest.fixture
def make_claim():
    """A client's claim under central trust, changed by keyword."""

    def made(**changes):
        settings = {
            "epsilon": 1.0,
            "delta": 1e-5,
            "unit": Unit.CLIENT,
            "neighbours": Relation.ZERO_OUT,
            "trust": Trust.CENTRAL,
            "accountant": Accountant.PLD,
            "noise": NoiseSource.SEEDED,
        }
        return PrivacyClaim(**{**settings, **changes})

    return made
