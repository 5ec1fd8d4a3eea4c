"""`[noise]`, `[budget]` and `[shuffle]`: what protects clients, and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from fedveil.base.checks import BUDGET, DELTA, MULTIPLIER, POSITIVE, REPORT_EPSILON, Each, whole
from fedveil.base.errors import BadInput
from fedveil.runs.sections.client_section import DpSgdSection
from fedveil.runs.sections.clip_section import FixedClipSection, RangeClipSection
from fedveil.runs.sections.section import Section, setting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fedveil.models.task import Task
    from fedveil.privacy.accounting.budget import Budget
    from fedveil.privacy.clip_schedules import ClipSchedule
    from fedveil.privacy.plan import PrivacyPlan
    from fedveil.privacy.priced_metrics import PricedMetrics
    from fedveil.privacy.sampling import Sampler
    from fedveil.runs.recipe import Recipe
    from fedveil.training.work import ClientWork

_SOURCE = setting(
    default="seeded",
    description="Where randomness comes from: 'seeded' streams that can be repeated, for "
    "simulations, or the operating system, 'secure', for what is published.",
)
_AT_CLIENTS = setting(default="client", description="Who adds the noise: always the client.")


@dataclass(frozen=True)
class PlanInputs:
    """What a recipe's noise and clip become a privacy plan with.

    Attributes:
        recipe: All of the recipe, whose sections have been checked against each other.
        sampler: Who takes part in a round.
        clients: How many clients there are.
        work: What a client computes; None for DP-SGD, which is made from the plan.
        task: The model.
        metrics: Metrics of the clients themselves, which their claim has to cover.
        rounds: How many rounds are planned.
    """

    recipe: Recipe
    sampler: Sampler
    clients: int
    work: ClientWork | None
    task: Task
    metrics: PricedMetrics | None
    rounds: int

    @property
    def section(self) -> BudgetSection:
        """`[budget]`, which every claim has."""
        if self.recipe.budget is None:
            raise AssertionError("sections were checked")
        return self.recipe.budget

    def build_budget(self, epsilon: float | None = None) -> Budget:
        return self.section.build(self.recipe.noise.source, epsilon)

    def schedule(self) -> ClipSchedule | None:
        """The clip schedule, None if nothing is clipped or reports are clamped to ranges."""
        clip = self.recipe.clip
        return None if clip is None or isinstance(clip, RangeClipSection) else clip.build(self)


class NoNoiseSection(Section):
    """`[noise]` of nobody."""

    where: ClassVar[str] = ""
    source: ClassVar[Literal["seeded", "secure"]] = "seeded"
    claim: ClassVar[bool] = False

    kind: Literal["none"]
    """No noise, and no claim."""

    def build(self, inputs: PlanInputs) -> PrivacyPlan:
        from fedveil.privacy.plan import unprotected

        return unprotected(
            inputs.sampler, inputs.clients, rounds=inputs.rounds, schedule=inputs.schedule()
        )


class GaussianSection(Section):
    """`[noise]` of Gauss."""

    kind: Literal["gaussian"]
    """Gaussian noise, on sums at the server or on what clients send or compute."""
    where: Literal["server", "client", "training"] = "server"
    """Who adds it: a trusted 'server' to the sum, every 'client' to its report, or every client in
    'training', to each step of DP-SGD."""
    multiplier: float | None = setting(MULTIPLIER, None)
    """Standard deviation in sensitivities: the clip, or twice the clip where neighbours replace
    each other. Left out: the least with which all rounds fit budget.epsilon."""
    source: Literal["seeded", "secure"] = _SOURCE
    claim: bool = True
    """Whether the noise is claimed. false is a defence without a claim, for where 'server' with a
    multiplier and without a budget."""
    c2: float | None = setting(POSITIVE, None)
    """The constant that Fu's published formula leaves open; 1.0 is common. For budget.as_published,
    which needs it with clip.each 'gradient'. Left out: that formula is not used."""

    def build(self, inputs: PlanInputs) -> PrivacyPlan:
        from fedveil.privacy.noise.mechanisms import GaussianMechanism
        from fedveil.privacy.plan import PrivacyPlan
        from fedveil.privacy.releases.central import CentralNoise, central

        if self.where == "training":
            return self._in_training(inputs)
        if self.where == "client":
            return _at_clients(inputs, self.multiplier, c2=self.c2)
        sampler, schedule = inputs.sampler, inputs.schedule()
        if schedule is None:
            raise AssertionError("sections were checked")
        if not self.claim:
            return PrivacyPlan(
                sampler=sampler,
                population=inputs.clients,
                rounds=inputs.rounds,
                schedule=schedule,
                release=CentralNoise(GaussianMechanism(self.multiplier or 0.0), sampler.relation),
            )
        inputs.section.refuse_others("are for noise at the clients")
        return central(
            sampler,
            inputs.clients,
            schedule,
            rounds=inputs.rounds,
            budget=inputs.build_budget(),
            multiplier=self.multiplier,
            metrics=inputs.metrics,
        )

    def _in_training(self, inputs: PlanInputs) -> PrivacyPlan:
        from fedveil.privacy.releases.dp_sgd import dp_sgd

        clip, client = inputs.recipe.clip, inputs.recipe.client
        if not isinstance(clip, FixedClipSection) or not isinstance(client, DpSgdSection):
            raise BadInput("client.kind 'dp-sgd' takes a fixed clip per example and Gaussian noise")
        if clip.norm != "l2" or clip.each != "update":
            raise BadInput(
                "under dp-sgd clip.value clips each example's gradient in L2: leave out "
                "clip.norm and clip.each"
            )
        inputs.section.refuse_others("have no meaning for dp-sgd")
        return dp_sgd(
            inputs.sampler,
            inputs.clients,
            clip.value,
            rate=client.rate,
            steps=client.steps,
            nominal=client.nominal,
            rounds=inputs.rounds,
            budget=inputs.build_budget(),
            multiplier=self.multiplier,
        )


class LaplaceSection(Section):
    """`[noise]` of Laplace."""

    kind: Literal["laplace"]
    """Laplace noise that every client adds to its report, which is clipped in L1."""
    where: Literal["client"] = _AT_CLIENTS
    multiplier: float | None = setting(MULTIPLIER, None)
    """Scale of the noise in sensitivities: twice the clip, as published the clip. Left out: the
    least with which all rounds fit budget.epsilon."""
    source: Literal["seeded", "secure"] = _SOURCE
    claim: ClassVar[bool] = True

    def build(self, inputs: PlanInputs) -> PrivacyPlan:
        return _at_clients(inputs, self.multiplier, laplace=True)


class TwoPointSection(Section):
    """`[noise]` of LDP-FL."""

    kind: Literal["two-point"]
    """Every client reports each weight as one of two values (LDP-FL); for clip.kind 'range'."""
    epsilon: float = setting(REPORT_EPSILON)
    """Epsilon of one weight in one report."""
    where: Literal["client"] = _AT_CLIENTS
    source: Literal["seeded", "secure"] = _SOURCE
    claim: ClassVar[bool] = True

    def build(self, inputs: PlanInputs) -> PrivacyPlan:
        from fedveil.privacy.releases.two_point import two_point

        clip, shuffle = inputs.recipe.clip, inputs.recipe.shuffle
        if not isinstance(clip, RangeClipSection):
            raise AssertionError("sections were checked")
        if inputs.section.as_published or inputs.section.epsilons:
            raise BadInput("the published epsilon of one weight is always printed: leave both out")
        return two_point(
            inputs.sampler,
            inputs.clients,
            clip.build(inputs),
            epsilon=self.epsilon,
            rounds=inputs.rounds,
            budget=inputs.build_budget(),
            shuffled=0 if shuffle is None else shuffle.minimum,
            dishonest=0 if shuffle is None else shuffle.dishonest,
        )


class PrivUnitSection(Section):
    """`[noise]` of PrivUnitG."""

    kind: Literal["priv-unit"]
    """Every client reports its clipped update as one private vector (PrivUnitG)."""
    epsilon: float | None = setting(REPORT_EPSILON, None)
    """Epsilon of one report. Left out: the largest with which all turns of a client fit
    budget.epsilon."""
    where: Literal["client"] = _AT_CLIENTS
    source: Literal["seeded", "secure"] = "seeded"
    """Where randomness comes from; 'secure' is refused: reports are floats."""
    claim: ClassVar[bool] = True

    def build(self, inputs: PlanInputs) -> PrivacyPlan:
        from fedveil.privacy.releases.priv_unit import priv_unit

        schedule = inputs.schedule()
        if schedule is None:
            raise AssertionError("sections were checked")
        inputs.section.refuse_others("have no meaning for noise.kind 'priv-unit': leave them out")
        return priv_unit(
            inputs.sampler,
            inputs.clients,
            schedule,
            parameters=inputs.task.size,
            epsilon=self.epsilon,
            rounds=inputs.rounds,
            budget=inputs.build_budget(),
        )


NoiseSection = Annotated[
    NoNoiseSection | GaussianSection | LaplaceSection | TwoPointSection | PrivUnitSection,
    Field(discriminator="kind"),
]


class BudgetSection(Section):
    """`[budget]`."""

    epsilon: float = setting(BUDGET, float("inf"))
    """Epsilon beyond which no round runs; noise that is not given is found from it. inf: no
    limit."""
    epsilons: list[float] | None = setting(Each(BUDGET), None)
    """Several epsilons, dealt to the clients in turn, in place of epsilon. For noise.where
    'client'. Left out: epsilon is everyone's."""
    delta: float = setting(DELTA)
    """Delta of every claim; below 1 / number of clients."""
    as_published: bool = False
    """Whether noise follows from the paper's own formula: that claim is labelled as no guarantee,
    and the strict one stands beside it. For noise.where 'client'."""

    def build(
        self, source: str, epsilon: float | None = None, delta: float | None = None
    ) -> Budget:
        """A budget of this or another epsilon and delta, less what secure noise needs of it."""
        from fedveil.privacy.accounting.budget import Budget
        from fedveil.privacy.secure import planned_for

        budget = Budget(self.epsilon if epsilon is None else epsilon, delta or self.delta)
        return planned_for(budget) if source == "secure" else budget

    def refuse_others(self, why: str) -> None:
        """Refuse the keys that are for noise at the clients alone."""
        if self.as_published or self.epsilons:
            raise BadInput(f"budget.as_published and budget.epsilons {why}")


class ShuffleSection(Section):
    """`[shuffle]`."""

    minimum: int = setting(whole(1, "at least 1 report is needed"))
    """Honest reports per weight that the claim counts on; with fewer reports the shuffler hands
    nothing on."""
    dishonest: int = setting(whole(0, "0 or more clients are needed"), 0)
    """How many clients may side with the server: the shuffler waits for so many reports more than
    the minimum."""


def _at_clients(
    inputs: PlanInputs, multiplier: float | None, *, laplace: bool = False, c2: float | None = None
) -> PrivacyPlan:
    """The plan of Gaussian or Laplace noise that every client adds to its report."""
    from fedveil.privacy.accounting.claims import Unit
    from fedveil.privacy.releases.client_noise import Published, client_noise

    recipe, budget, schedule = inputs.recipe, inputs.section, inputs.schedule()
    if schedule is None:
        raise AssertionError("sections were checked")
    published = None
    if budget.as_published:
        per_gradient = getattr(recipe.clip, "each", "") == "gradient"
        published = Published(c2, Unit.RECORD if per_gradient else Unit.CLIENT)
    epsilons = budget.epsilons or [budget.epsilon]
    return client_noise(
        inputs.sampler,
        inputs.clients,
        schedule,
        laplace=laplace,
        rounds=inputs.rounds,
        budgets=tuple(inputs.build_budget(epsilon) for epsilon in epsilons),
        group_of=_dealt(inputs.clients, len(epsilons), recipe.seed),
        multiplier=multiplier,
        published=published,
    )


def _dealt(clients: int, groups: int, seed: int) -> npt.NDArray[np.int64] | None:
    """Which budget each client has: dealt in turn over a seeded random order."""
    import numpy as np

    from fedveil.privacy.noise.streams import Streams

    if groups == 1:
        return None
    order = Streams(seed).generator("budgets").permutation(clients)
    members = np.empty(clients, dtype=np.int64)
    members[order] = np.arange(clients) % groups
    return members
