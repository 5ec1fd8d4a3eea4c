"""LDP-FL: what the paper publishes, and the studies that stand for it here.

A study is one data set at one scale. What the paper leaves open, and where a scale departs from it,
is described for the pages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.papers.reproduction import Experiment, read_tables

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


_TABLES = read_tables("ldp_fl")
TEXTS: dict[str, Any] = _TABLES["texts"]
PAPER = {name: PublishedTable(name, **fields) for name, fields in _TABLES["published"].items()}


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
    def client_overrides(self) -> list[str]:
        """Return the overrides `key=value` that set the study's number of clients.

        They are data.clients and shuffle.minimum, and data.most_records unless all records are
        used.
        """
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
    every = []
    for name, paper in PAPER.items():
        fields: dict[str, Any] = {"clients": paper.clients, "rounds": paper.rounds}
        fields |= {"epsilons": _TABLES[name]["epsilons"], **_TABLES[name][experiment.scale]}
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        every.append(Study(paper, **fields | lists))
    return every
