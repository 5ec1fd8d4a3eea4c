"""Short runs on the embedded digits."""

import shutil
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

from .endings import Crash, at, stop_after

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
    "priv-unit": (*SMALL, *TURNS, "budget.delta=1e-4"),
    "sites": ("rounds=4", "engine.workers=1", *NOISY),
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

    def started(name="central", *settings, out="run", shared=None):
        return Run.start(short(name, *settings), tmp_path / out, None, shared)

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


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Runs to be damaged, each as a directory of the same name: `run`.

    whole: to the end; cut: interrupted after round 3 of 4; torn: as a crash after round 3 leaves
    it, with charges in the write-ahead log only; other: cut, of another seed.
    """
    root = tmp_path_factory.mktemp("made")

    def start(name, *settings):
        recipe = load_recipe("ldp-sgd", (*BASE["ldp-sgd"], *settings))
        return Run.start(recipe, root / name / "run", None)

    start("whole").execute()
    start("cut").execute(stop_after(3))
    start("other", "seed=2").execute(stop_after(3))
    torn = start("torn")

    def tear():
        shutil.copytree(torn.folder, root / "copy")
        raise Crash

    with pytest.raises(Crash):
        torn.execute(at(3, tear))
    shutil.rmtree(torn.folder)
    (root / "copy").rename(torn.folder)
    return root


@pytest.fixture
def copy(made, tmp_path):
    def copied(name, where="here"):
        return shutil.copytree(made / name / "run", tmp_path / where / "run")

    return copied
