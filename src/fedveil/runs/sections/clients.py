"""`[sample]` and `[client]`: who takes part in a round, and what a client computes in it."""

from typing import Annotated, Literal

from pydantic import Field

from fedveil.runs.sections.section import Section


class PoissonSection(Section):
    """`[sample]` of independent clients."""

    kind: Literal["poisson"] = Field(
        description="Every client joins a round independently of all others, with probability rate."
    )
    rate: float = Field(description="Probability that a client joins a round.")


class FixedSection(Section):
    """`[sample]` of a fixed number."""

    kind: Literal["fixed"] = Field(description="A random cohort of exactly size clients.")
    size: int = Field(description="Clients per round.")
    max_participations: int | None = Field(
        default=None,
        description="How many rounds a client takes part in at most: afterwards it is not drawn. "
        "Only where clients protect themselves (noise.where 'client' or 'training'). Left out: no "
        "limit.",
    )


class RoundRobinSection(Section):
    """`[sample]` in turn."""

    kind: Literal["round-robin"] = Field(
        description="size clients at a time, in turn, around a random order that never changes."
    )
    size: int = Field(description="Clients per round.")


class EveryoneSection(Section):
    """`[sample]` of everyone."""

    kind: Literal["all"] = Field(description="All clients in every round.")


SampleSection = Annotated[
    PoissonSection | FixedSection | RoundRobinSection | EveryoneSection,
    Field(discriminator="kind"),
]


class GradientSection(Section):
    """`[client]` of FedSGD."""

    kind: Literal["gradient"] = Field(
        description="One gradient on all of a client's records (FedSGD); the learning rate is "
        "server.lr."
    )


class SgdSection(Section):
    """`[client]` of FedAvg."""

    kind: Literal["sgd"] = Field(description="Local SGD from the round's model (FedAvg).")
    epochs: int | None = Field(
        default=None,
        description="Passes over a client's records per round. Left out: steps is needed.",
    )
    steps: int | None = Field(
        default=None,
        description="Local steps per round, whatever the number of records. Left out: epochs is "
        "needed.",
    )
    batch: int = Field(
        default=0, description="Records per local step; 0: all records of the client."
    )
    lr: float | None = Field(
        default=None,
        description="Learning rate, the same in every local step. Left out: mu and gamma are "
        "needed.",
    )
    mu: float | None = Field(
        default=None,
        description="Makes the learning rate 2 / (mu (k + gamma)) in local step k, counted over "
        "all rounds. With gamma and steps, without lr. Left out: lr decides.",
    )
    gamma: float | None = Field(
        default=None,
        description="Local steps by which the decaying learning rate is shifted; see mu. Left out: "
        "lr decides.",
    )
    momentum: float = Field(
        default=0.0, description="Momentum of the local steps; every round starts without any."
    )
    weight_decay: float = Field(
        default=0.0, description="This times the model is added to every local gradient."
    )


class DpSgdSection(Section):
    """`[client]` of DP-SGD."""

    kind: Literal["dp-sgd"] = Field(
        description="DP-SGD on Poisson batches of the client's own records; with noise.where "
        "'training' and a fixed clip of each example's gradient."
    )
    rate: float = Field(description="Probability that a record joins a local step.")
    steps: int = Field(description="Local steps per round.")
    lr: float = Field(description="Learning rate of the local steps.")
    nominal: int | None = Field(
        default=None,
        description="One number of records for all clients, by which sums are divided, so that the "
        "claim covers how many a client has. With server.weights 'uniform'. Left out: each "
        "client's own number, which is then public.",
    )


ClientSection = Annotated[GradientSection | SgdSection | DpSgdSection, Field(discriminator="kind")]
