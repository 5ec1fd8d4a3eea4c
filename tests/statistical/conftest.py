"""Whole runs, watched from outside: recipe in; checkpoints, metrics and ledger out."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import safetensors.torch

from fedveil.privacy.ledger.file import read_charges, read_runs
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.training.round import RoundResult
from fedveil.training.session import Training, train

FALSE_ALARM = 1e-6
DROWNED = ("noise.multiplier=50.0", "budget.epsilon=inf")
FEW = ("data.clients=40", "rounds=15")
SOURCES = ("seeded", "secure")


@dataclass(frozen=True)
class Seen:
    """What a run released, round by round, and what its ledger was charged for it.

    `steps` [R, P] is how far each round moved the model; `charges` the event of each round on the
    first line; `lines` what the ledger promises.
    """

    steps: np.ndarray
    metrics: list[dict]
    charges: list[dict]
    lines: list[dict]
    result: dict
    sizes: np.ndarray

    def clips(self):
        """The clip in force in each round, as reported."""
        return np.array([line["clip"] for line in self.metrics])

    def cohorts(self):
        """How many clients took part in each round, as reported."""
        return np.array([line["clients"] for line in self.metrics])

    def multiplier(self):
        """Noise over sensitivity, as charged."""
        (found,) = {_multiplier(event) for event in self.charges}
        return found

    def reach(self):
        """How many rows a neighbour moves a sum by, under the relation that was promised."""
        return 2.0 if self.lines[0]["relation"] == "replace" else 1.0


def _multiplier(event):
    return event["multiplier"] if "multiplier" in event else _multiplier(event["event"])


@dataclass(frozen=True)
class Trained:
    """A training and its rounds: for what needs many of them, whose epsilons nobody asks for."""

    training: Training
    results: list[RoundResult]

    @property
    def event(self):
        """What a round is charged for."""
        return self.training.plan.lines[0].event

    def clips(self):
        """The clip in force in each round."""
        return np.array([result.clip for result in self.results])

    def cohorts(self):
        """How many clients took part in each round."""
        return np.array([result.clients for result in self.results])


@pytest.fixture
def follow():
    """Train a recipe with `section.key=value` settings, and keep every round."""

    def followed(name, *settings):
        fixed = ("engine.workers=1", "evaluate.every=1000")
        training = build(load_recipe(name, (*fixed, *settings)))
        return Trained(training, list(train(training)))

    return followed


@pytest.fixture
def watch(tmp_path):
    """Run a recipe with `section.key=value` settings, and watch; `start` is called before it."""

    def watched(name, *settings, out="run", start=lambda: None):
        fixed = ("engine.workers=1", "evaluate.every=1000", "evaluate.diagnostics=true")
        run = Run.start(load_recipe(name, (*fixed, *settings)), tmp_path / out, None)
        models, metrics = [run.training.start().params.double().numpy()], []

        def noted(line):
            newest = max((run.folder / "checkpoint").glob("*.safetensors"))
            models.append(safetensors.torch.load_file(newest)["params"].double().numpy())
            metrics.append(line)

        start()
        result = run.execute(noted)
        ledger = run.folder / "ledger.db"
        (about,) = read_runs(ledger).values()
        lines = json.loads(about["lines"])
        charges = [c.event for c in read_charges(ledger) if c.covers == lines[0]["covers"]]
        return Seen(
            np.diff(models, axis=0), metrics, charges, lines, result, run.training.data.sizes
        )

    return watched
