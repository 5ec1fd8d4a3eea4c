"""`[noise]`, `[budget]` and `[shuffle]`: what protects clients, and what it may cost."""

from typing import Annotated, Literal

from pydantic import Field

from fedveil.checks import BUDGET, DELTA, MULTIPLIER, POSITIVE, REPORT_EPSILON, Each, whole
from fedveil.runs.sections.section import Section

_SOURCE = (
    "Where randomness comes from: 'seeded' streams that can be repeated, for simulations, or the "
    "operating system, 'secure', for what is published."
)
_ONLY_SEEDED = "Where randomness comes from; 'secure' is refused: reports are floats."
_AT_CLIENTS = "Who adds the noise: always the client."


class NoNoiseSection(Section):
    """`[noise]` of nobody."""

    kind: Literal["none"] = Field(description="No noise, and no claim.")


class GaussianSection(Section):
    """`[noise]` of Gauss."""

    kind: Literal["gaussian"] = Field(
        description="Gaussian noise, on sums at the server or on what clients send or compute."
    )
    where: Literal["server", "client", "training"] = Field(
        default="server",
        description="Who adds it: a trusted 'server' to the sum, every 'client' to its report, or "
        "every client in 'training', to each step of DP-SGD.",
    )
    multiplier: Annotated[float | None, MULTIPLIER] = Field(
        default=None,
        description="Standard deviation in sensitivities: the clip, or twice the clip where "
        "neighbours replace each other. Left out: the least with which all rounds fit "
        "budget.epsilon.",
    )
    source: Literal["seeded", "secure"] = Field(default="seeded", description=_SOURCE)
    claim: bool = Field(
        default=True,
        description="Whether the noise is claimed. false is a defence without a claim, for where "
        "'server' with a multiplier and without a budget.",
    )
    c2: Annotated[float | None, POSITIVE] = Field(
        default=None,
        description="The constant that Fu's published formula leaves open; 1.0 is common. For "
        "budget.as_published, which needs it with clip.each 'gradient'. Left out: that formula is "
        "not used.",
    )


class LaplaceSection(Section):
    """`[noise]` of Laplace."""

    kind: Literal["laplace"] = Field(
        description="Laplace noise that every client adds to its report, which is clipped in L1."
    )
    where: Literal["client"] = Field(default="client", description=_AT_CLIENTS)
    multiplier: Annotated[float | None, MULTIPLIER] = Field(
        default=None,
        description="Scale of the noise in sensitivities: twice the clip, as published the clip. "
        "Left out: the least with which all rounds fit budget.epsilon.",
    )
    source: Literal["seeded", "secure"] = Field(default="seeded", description=_SOURCE)


class TwoPointSection(Section):
    """`[noise]` of LDP-FL."""

    kind: Literal["two-point"] = Field(
        description="Every client reports each weight as one of two values (LDP-FL); for clip.kind "
        "'range'."
    )
    epsilon: Annotated[float, REPORT_EPSILON] = Field(
        description="Epsilon of one weight in one report."
    )
    where: Literal["client"] = Field(default="client", description=_AT_CLIENTS)
    source: Literal["seeded", "secure"] = Field(default="seeded", description=_SOURCE)


class PrivUnitSection(Section):
    """`[noise]` of PrivUnitG."""

    kind: Literal["priv-unit"] = Field(
        description="Every client reports its clipped update as one private vector (PrivUnitG)."
    )
    epsilon: Annotated[float | None, REPORT_EPSILON] = Field(
        default=None,
        description="Epsilon of one report. Left out: the largest with which all turns of a client "
        "fit budget.epsilon.",
    )
    where: Literal["client"] = Field(default="client", description=_AT_CLIENTS)
    source: Literal["seeded", "secure"] = Field(default="seeded", description=_ONLY_SEEDED)


NoiseSection = Annotated[
    NoNoiseSection | GaussianSection | LaplaceSection | TwoPointSection | PrivUnitSection,
    Field(discriminator="kind"),
]


class BudgetSection(Section):
    """`[budget]`."""

    epsilon: Annotated[float, BUDGET] = Field(
        default=float("inf"),
        description="Epsilon beyond which no round runs; noise that is not given is found from it. "
        "inf: no limit.",
    )
    epsilons: Annotated[list[float] | None, Each(BUDGET)] = Field(
        default=None,
        description="Several epsilons, dealt to the clients in turn, in place of epsilon. For "
        "noise.where 'client'. Left out: epsilon is everyone's.",
    )
    delta: Annotated[float, DELTA] = Field(
        description="Delta of every claim; below 1 / number of clients."
    )
    as_published: bool = Field(
        default=False,
        description="Whether noise follows from the paper's own formula: that claim is labelled as "
        "no guarantee, and the strict one stands beside it. For noise.where 'client'.",
    )


class ShuffleSection(Section):
    """`[shuffle]`."""

    minimum: Annotated[int, whole(1, "at least 1 report is needed")] = Field(
        description="Honest reports per weight that the claim counts on; with fewer reports the "
        "shuffler hands nothing on."
    )
    dishonest: Annotated[int, whole(0, "0 or more clients are needed")] = Field(
        default=0,
        description="How many clients may side with the server: the shuffler waits for so many "
        "reports more than the minimum.",
    )
