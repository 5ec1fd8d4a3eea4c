"""`[data]` and `[model]`."""

from typing import Literal

from pydantic import Field

from fedveil.runs.sections.section import Section


class DataSection(Section):
    """`[data]`."""

    name: str = Field(
        description="The data set. digits and diabetes come with scikit-learn, saved is a folder "
        "that FederatedData.save wrote; all others are read from --data or FEDVEIL_DATA."
    )
    clients: int | None = Field(
        default=None,
        description="How many clients the training records are divided among; of natural clients, "
        "how many are kept, chosen at random. Left out: all natural clients; every other partition "
        "needs it.",
    )
    partition: Literal["iid", "shards", "dirichlet", "natural"] | None = Field(
        default=None,
        description="How records are divided: 'iid' at random, 'shards' sorted by target, "
        "'dirichlet' by a label mix of each client's own, 'natural' one client per owner. "
        "Left out: 'iid'.",
    )
    alpha: float | None = Field(
        default=None,
        description="Parameter of the Dirichlet distribution that label mixes are drawn from: the "
        "smaller, the fewer labels a client has. For partition 'dirichlet'. Left out: only for "
        "other partitions.",
    )
    shards_per_client: int | None = Field(
        default=None,
        description="Shards that each client gets: one each goes in order of the target, several "
        "are dealt at random. For partition 'shards'. Left out: 1.",
    )
    grades: bool | None = Field(
        default=None,
        description="Whether the features have what the lender fixed together with the interest "
        "rate: grade, sub-grade and installment. For lending-club. Left out: true.",
    )
    min_records: int | None = Field(
        default=None,
        description="Writers with fewer training records are left out. For femnist. Left out: 20.",
    )
    resample: int | None = Field(
        default=None,
        description="How many training records are drawn, with replacement, before they are "
        "divided. Claims say so, and DP-SGD refuses it. Left out: every record is there once.",
    )
    most_records: int | None = Field(
        default=None,
        description="The most records that a client keeps, chosen at random. Left out: all.",
    )
    test: Literal["by-client", "records"] | None = Field(
        default=None,
        description="Whose records the model is measured on: 'by-client' holds about a fifth of "
        "the clients out; 'records' takes the source's split, in which clients have records, so "
        "that claims say so and secure noise refuses it. For partition 'natural'. Left out: "
        "'by-client'.",
    )
    statistics: Literal["public", "held-out"] | None = Field(
        default=None,
        description="Where the means, scales and categories of fitted features come from: "
        "'held-out' fits them on the test split, 'public' declares them known from elsewhere. For "
        "lending-club, diabetes and saved data that name them. Left out: from all clients' records "
        "in the clear, which claims say and secure noise refuses.",
    )
    seed: int | None = Field(
        default=None,
        description="Decides how records are drawn and divided. Seeded runs that share a ledger "
        "have it in common. Left out: the recipe's seed.",
    )
    path: str | None = Field(
        default=None,
        description="The folder that FederatedData.save wrote. For name 'saved'. Left out: only "
        "for other data sets.",
    )


class ModelSection(Section):
    """`[model]`."""

    name: str = Field(
        description="The model. linear predicts a number, mlp a number or a label, all others "
        "labels; fu-cnn and small-cnn take images of 28 x 28, vgg of 32 x 32."
    )
    hidden: list[int] | None = Field(
        default=None,
        description="Widths of the hidden layers, in units. For name 'mlp'. Left out: [200].",
    )
    digest: str | None = Field(
        default=None,
        description="What a run records of a module that came from Python, so that no other "
        "continues it. Not for authors. Left out: the run fills it in.",
    )
