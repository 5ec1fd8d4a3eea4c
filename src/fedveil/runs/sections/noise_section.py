"""`[noise]`, `[budget]` and `[shuffle]`: what protects clients, and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from fedveil.base.checks import (
    BUDGET,
    DELTA,
    MULTIPLIER,
    POSITIVE,
    REPORT_EPSILON,
    SUM_BITS,
    Each,
    whole,
)
from fedveil.base.errors import BadInput
from fedveil.runs.sections.client_section import ClientSection, DpSgdSection
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
    description="Where randomness comes from: 'seeded' for streams that can be repeated, in "
    "simulations; 'secure' for the operating system, for anything that is published.",
)
_AT_CLIENTS = setting(default="client", description="Who adds the noise: always the client.")


@dataclass(frozen=True)
class PlanInputs:
    """The recipe and the parts of a training from which its privacy plan is built.

    Attributes:
        recipe: All of the recipe, whose sections have been checked against each other.
        sampler: Who takes part in a round.
        clients: The number of clients.
        work: What a client computes; None for DP-SGD, which is made from the plan.
        task: The model.
        metrics: Priced metrics of the clients themselves, which their claim has to cover, or None.
        rounds: The number of rounds planned.
        records: The number of records, or of people if they are sampled, of all clients.
    """

    recipe: Recipe
    sampler: Sampler
    clients: int
    work: ClientWork | None
    task: Task
    metrics: PricedMetrics | None
    rounds: int
    records: int

    def single_budget(self, why: str) -> Budget:
        """Build the one budget of all clients.

        Raises BadInput if budget.as_published or budget.epsilons is set. `why` is a predicate that
        ends the message, such as "have no meaning for dp-sgd". AssertionError without a [budget].
        """
        section = self.recipe.budget
        if section is None:
            raise AssertionError("sections were checked")
        if section.as_published or section.epsilons:
            raise BadInput(f"budget.as_published and budget.epsilons {why}")
        return section.build(self.recipe.noise.source)

    def build_schedule(self) -> ClipSchedule:
        """Build the clip schedule. AssertionError without a [clip], or with one of kind "range"."""
        clip = self.recipe.clip
        if clip is None or isinstance(clip, RangeClipSection):
            raise AssertionError("sections were checked")
        return clip.build(self)


class NoNoiseSection(Section):
    """`[noise]` of kind "none": no noise, and no claim."""

    where: ClassVar[str] = ""
    source: ClassVar[Literal["seeded", "secure"]] = "seeded"
    claim: ClassVar[bool] = False

    kind: Literal["none"]
    """No noise, and no claim."""

    def build(self, inputs: PlanInputs) -> PrivacyPlan:
        """Build the plan without noise and without a claim, clipped if the recipe has a [clip]."""
        from fedveil.privacy.plan import unprotected

        unclipped = inputs.recipe.clip is None
        schedule = None if unclipped else inputs.build_schedule()
        return unprotected(inputs.sampler, inputs.clients, rounds=inputs.rounds, schedule=schedule)


class GaussianSection(Section):
    """`[noise]` of kind "gaussian": at the server, at the clients, or in DP-SGD."""

    kind: Literal["gaussian"]
    """Gaussian noise, on sums at the server or on what clients send or compute."""
    where: Literal["server", "client", "training", "site"] = "server"
    """Who adds it: a trusted 'server' to the sum, every 'client' to its report, every client in
    'training', to each step of DP-SGD, or every 'site' to the sum of its records' gradients. With
    [sum], clients add the noise of the 'server' themselves, each a part of it."""
    share: Literal["whole", "part"] | None = None
    """How much of the noise a site adds: the 'whole' that the claim needs, against a server that
    sees every site's sum, or a 'part', which adds up with the others' under a secure sum, as
    [sum] has it; without [sum] all sites have to answer. For where 'site', and 'part' for where
    'server' with [sum]. Default: 'part' with [sum], otherwise 'whole'."""
    multiplier: float | None = setting(MULTIPLIER, None)
    """Standard deviation in sensitivities: the clip, or twice the clip where neighbours replace
    each other. Default: the least with which all rounds fit budget.epsilon."""
    source: Literal["seeded", "secure"] = _SOURCE
    claim: bool = True
    """Whether the noise is part of a claim. false is a defence without a claim, for noise.where
    'server' with a multiplier and without a budget."""
    c2: float | None = setting(POSITIVE, None)
    """The constant in Fu's published formula, for which the paper gives no value; 1.0 is common.
    Needed for budget.as_published with clip.each 'gradient'. Default: that formula is not used."""

    def build(self, inputs: PlanInputs) -> PrivacyPlan:
        """Build the plan of Gaussian noise at the server, at the clients, or in DP-SGD.

        Raises BadInput if it does not fit the clip, the sampler or the budget.
        """
        from fedveil.privacy.noise.mechanisms import GaussianMechanism
        from fedveil.privacy.plan import PrivacyPlan
        from fedveil.privacy.releases.central import CentralNoise, central
        from fedveil.privacy.releases.central_sum import central_sum

        section = inputs.recipe.sum
        of_clients = self.where == "server" and section is not None
        if self.share is not None and self.where != "site" and not of_clients:
            raise BadInput(f"noise.share is {self.share!r} and is for noise.where = 'site'")
        if self.where == "training":
            return self._dp_sgd_plan(inputs)
        if self.where == "site":
            return self._sites_plan(inputs)
        if self.where == "client":
            return _client_noise_plan(inputs, self.multiplier, c2=self.c2)
        sampler, schedule = inputs.sampler, inputs.build_schedule()
        if not self.claim:
            return PrivacyPlan(
                sampler=sampler,
                population=inputs.clients,
                rounds=inputs.rounds,
                clip_schedule=schedule,
                release=CentralNoise(GaussianMechanism(self.multiplier or 0.0), sampler.relation),
            )
        budget = inputs.single_budget("are for noise at the clients")
        if section is not None:
            return central_sum(
                sampler,
                inputs.clients,
                schedule,
                rounds=inputs.rounds,
                budget=budget,
                multiplier=self.multiplier,
                **section.settings(inputs.clients),
            )
        return central(
            sampler,
            inputs.clients,
            schedule,
            rounds=inputs.rounds,
            budget=budget,
            multiplier=self.multiplier,
            metrics=inputs.metrics,
        )

    def _sites_plan(self, inputs: PlanInputs) -> PrivacyPlan:
        """Build the plan of sites' noisy sums.

        Raises BadInput for any but a fixed L2 clip of records' gradients.

        The sampler draws each site's records. All sites take part in every round.
        """
        from fedveil.privacy.releases.sites import sites
        from fedveil.privacy.sampling import Everyone, Poisson

        clip, sampler = inputs.recipe.clip, inputs.sampler
        if not isinstance(clip, FixedClipSection) or clip.norm != "l2" or clip.each != "update":
            raise BadInput(
                "noise.where 'site' clips each record's gradient in L2: use clip.kind 'fixed' and "
                "leave out clip.norm and clip.each"
            )
        if not isinstance(sampler, Poisson | Everyone):
            raise BadInput(
                "noise.where 'site' draws each site's records by sample.kind 'poisson' with "
                "sample.rate, or takes 'all'"
            )
        section, share = inputs.recipe.sum, self.share or "whole"
        secure_sum: dict[str, Any] = {}
        if section is not None:
            share, secure_sum = "part", section.settings(inputs.clients)
            secure_sum["bits"] = section.bits
        return sites(
            inputs.clients,
            clip.value,
            records=inputs.records,
            rate=sampler.rate if isinstance(sampler, Poisson) else 1.0,
            share=share,
            rounds=inputs.rounds,
            budget=inputs.single_budget("have no meaning for noise at the sites"),
            multiplier=self.multiplier,
            parameters=inputs.task.size,
            **_persons(inputs.recipe.client),
            **secure_sum,
        )

    def _dp_sgd_plan(self, inputs: PlanInputs) -> PrivacyPlan:
        """Build the plan of DP-SGD, whose fixed clip is on each example's gradient, in L2.

        Raises BadInput unless client.kind is "dp-sgd" and clip.kind "fixed", and if clip.norm or
        clip.each is set to anything else.
        """
        from fedveil.privacy.releases.dp_sgd import dp_sgd

        clip, client = inputs.recipe.clip, inputs.recipe.client
        if not isinstance(clip, FixedClipSection) or not isinstance(client, DpSgdSection):
            raise BadInput("client.kind 'dp-sgd' takes a fixed clip per example and Gaussian noise")
        if clip.norm != "l2" or clip.each != "update":
            raise BadInput(
                "under dp-sgd clip.value clips each example's gradient in L2: leave out "
                "clip.norm and clip.each"
            )
        return dp_sgd(
            inputs.sampler,
            inputs.clients,
            clip.value,
            rate=client.rate,
            steps=client.steps,
            nominal=client.nominal,
            rounds=inputs.rounds,
            budget=inputs.single_budget("have no meaning for dp-sgd"),
            multiplier=self.multiplier,
            **_persons(client),
        )


def _persons(client: ClientSection) -> dict[str, Any]:
    """Return the arguments `unit` and `cap` of a plan, for the keys of a [client]."""
    from fedveil.privacy.accounting.claims import Unit

    unit, cap = (getattr(client, key, None) for key in ("unit", "cap"))
    return {"unit": Unit(unit or "record"), "cap": cap}


class LaplaceSection(Section):
    """`[noise]` of kind "laplace": added by every client."""

    kind: Literal["laplace"]
    """Laplace noise that every client adds to its report, which is clipped in L1."""
    where: Literal["client"] = _AT_CLIENTS
    multiplier: float | None = setting(MULTIPLIER, None)
    """Scale of the noise in sensitivities: twice the clip, as published the clip. Default: the
    least with which all rounds fit budget.epsilon."""
    source: Literal["seeded", "secure"] = _SOURCE
    claim: ClassVar[bool] = True

    def build(self, inputs: PlanInputs) -> PrivacyPlan:
        """Build the plan of Laplace noise that every client adds to its report.

        Raises BadInput if it does not fit the clip, the sampler or the budget.
        """
        return _client_noise_plan(inputs, self.multiplier, laplace=True)


class TwoPointSection(Section):
    """`[noise]` of kind "two-point": every weight is reported as one of two values (LDP-FL)."""

    kind: Literal["two-point"]
    """Every client reports each weight as one of two values (LDP-FL); for clip.kind 'range'."""
    epsilon: float = setting(REPORT_EPSILON)
    """Epsilon of one weight in one report."""
    where: Literal["client"] = _AT_CLIENTS
    source: Literal["seeded", "secure"] = _SOURCE
    claim: ClassVar[bool] = True

    def build(self, inputs: PlanInputs) -> PrivacyPlan:
        """Build the plan of two-valued reports (LDP-FL), behind a shuffler if there is one."""
        from fedveil.privacy.releases.two_point import two_point

        clip, shuffle = inputs.recipe.clip, inputs.recipe.shuffle
        if not isinstance(clip, RangeClipSection):
            raise AssertionError("sections were checked")
        return two_point(
            inputs.sampler,
            inputs.clients,
            clip.build(inputs),
            epsilon=self.epsilon,
            rounds=inputs.rounds,
            budget=inputs.single_budget(
                "have no effect: the published epsilon of one weight is always printed"
            ),
            shuffled=0 if shuffle is None else shuffle.minimum,
            dishonest=0 if shuffle is None else shuffle.dishonest,
        )


class PrivUnitSection(Section):
    """`[noise]` of kind "priv-unit": every report is a private vector (PrivUnitG)."""

    kind: Literal["priv-unit"]
    """Every client reports its clipped update as one private vector (PrivUnitG)."""
    epsilon: float | None = setting(REPORT_EPSILON, None)
    """Epsilon of one report. Default: the largest with which all turns of a client fit
    budget.epsilon."""
    where: Literal["client"] = _AT_CLIENTS
    source: Literal["seeded", "secure"] = _SOURCE
    claim: ClassVar[bool] = True

    def build(self, inputs: PlanInputs) -> PrivacyPlan:
        """Build the plan of PrivUnitG reports.

        Raises BadInput if they do not fit the clip, the sampler or the budget.
        """
        from fedveil.privacy.releases.priv_unit import priv_unit

        schedule = inputs.build_schedule()
        return priv_unit(
            inputs.sampler,
            inputs.clients,
            schedule,
            parameters=inputs.task.size,
            epsilon=self.epsilon,
            rounds=inputs.rounds,
            budget=inputs.single_budget("have no meaning for noise.kind 'priv-unit': omit them"),
        )


NoiseSection = Annotated[
    NoNoiseSection | GaussianSection | LaplaceSection | TwoPointSection | PrivUnitSection,
    Field(discriminator="kind"),
]


class BudgetSection(Section):
    """`[budget]`: the epsilon and the delta that a run may spend."""

    epsilon: float = setting(BUDGET, float("inf"))
    """The epsilon that a run may spend. No round that would exceed it is run. Noise that is not
    given is chosen to fit. inf: no limit."""
    epsilons: list[float] | None = setting(Each(BUDGET), None)
    """Several epsilons, dealt to the clients in turn, in place of epsilon. For noise.where
    'client'. Default: epsilon is everyone's."""
    delta: float = setting(DELTA)
    """Delta of every claim; below 1 / number of clients."""
    as_published: bool = False
    """Whether noise follows from the paper's own formula: that claim is labelled as no guarantee,
    and the strict one stands beside it. For noise.where 'client'."""

    def build(
        self, source: str, epsilon: float | None = None, delta: float | None = None
    ) -> Budget:
        """Build the budget of this section, or of another `epsilon` or `delta` if not None.

        `source` is the noise source. If it is "secure", what secure noise costs is subtracted.
        """
        from fedveil.privacy.accounting.budget import Budget
        from fedveil.privacy.secure import planned_for

        budget = Budget(self.epsilon if epsilon is None else epsilon, delta or self.delta)
        return planned_for(budget) if source == "secure" else budget


class SumSection(Section):
    """`[sum]`: the secure sum, behind which the server sees the sum of all sites and no more.

    Where clients are the unit, as in the recipe `central`, a site is a client.
    """

    kind: Literal["secure"]
    """Masks hide what a site sends, and cancel in the sum (Bonawitz et al. 2017). For noise.where
    'site' and 'server'; with 'server' and sample.kind 'poisson' each site flips a coin of its own.
    With noise.where 'client', for the bits or norms of an adaptive clip, in simulations."""
    threshold: int | None = setting(whole(1, "at least 1 site is needed"), None)
    """The least number of sites in a sum that the server gets. Each site adds enough noise for the
    smallest number of honest sites that such a sum can contain. Default: the smallest that
    protects, which is more than half of the sites if all are honest."""
    honest: int | None = setting(whole(1, "at least 1 site is needed"), None)
    """How many sites the claim takes to be honest. Default: all of them."""
    masks: bool = False
    """Whether the simulation goes through the protocol's messages, masks included, which changes no
    sum. For noise.source 'secure'."""

    bits: int = setting(SUM_BITS, 64)
    """Bits of each number that is sent. With 16 to 32, rows are rotated and rounded, and Skellam
    noise takes about a tenth more at the same epsilon. For noise.source 'secure'."""

    def settings(self, sites: int) -> dict[str, Any]:
        """Return the arguments of `sites` that follow from this section, for so many sites."""
        from fedveil.privacy.releases.secure_sum import least_threshold

        honest = sites if self.honest is None else self.honest
        threshold = least_threshold(sites, honest) if self.threshold is None else self.threshold
        return {"threshold": threshold, "honest": honest, "masks": self.masks}


class ShuffleSection(Section):
    """`[shuffle]`: the shuffler between clients and server."""

    minimum: int = setting(whole(1, "at least 1 report is needed"))
    """Honest reports per weight that the claim counts on; with fewer reports the shuffler hands
    nothing on."""
    dishonest: int = setting(whole(0, "0 or more clients are needed"), 0)
    """How many clients may side with the server: the shuffler waits for so many reports more than
    the minimum."""


def _client_noise_plan(
    inputs: PlanInputs, multiplier: float | None, *, laplace: bool = False, c2: float | None = None
) -> PrivacyPlan:
    """Build the plan of Gaussian or Laplace noise that every client adds to its report.

    Raises BadInput if it does not fit the clip, the sampler or the budget.

    Args:
        inputs: The recipe and the parts built so far.
        multiplier: The noise multiplier. None takes the least that fits the budget.
        laplace: Whether the noise is Laplace.
        c2: The constant of Fu's published formula, None if it is not used.
    """
    from fedveil.privacy.accounting.claims import Unit
    from fedveil.privacy.releases.client_noise import Published, client_noise
    from fedveil.privacy.releases.secure_sum import SecureSum
    from fedveil.privacy.sampling import Poisson

    recipe, budget, schedule = inputs.recipe, inputs.recipe.budget, inputs.build_schedule()
    if budget is None:
        raise AssertionError("sections were checked")
    published = None
    if budget.as_published:
        per_gradient = getattr(recipe.clip, "each", "") == "gradient"
        published = Published(c2, Unit.RECORD if per_gradient else Unit.CLIENT)
    epsilons = budget.epsilons or [budget.epsilon]
    secure_sum, section = None, recipe.sum
    if section is not None:
        if isinstance(inputs.sampler, Poisson):
            raise BadInput(
                "[sum] with noise.where 'client' needs cohorts of one size: use sample.kind "
                "'fixed', 'round-robin' or 'all'"
            )
        count = int(inputs.sampler.expected(inputs.clients))
        secure_sum = SecureSum(count, **section.settings(count))
    return client_noise(
        inputs.sampler,
        inputs.clients,
        schedule,
        laplace=laplace,
        rounds=inputs.rounds,
        budgets=tuple(budget.build(recipe.noise.source, epsilon) for epsilon in epsilons),
        group_of=_budget_groups(inputs.clients, len(epsilons), recipe.seed),
        multiplier=multiplier,
        published=published,
        secure_sum=secure_sum,
    )


def _budget_groups(clients: int, groups: int, seed: int) -> npt.NDArray[np.int64] | None:
    """Return the index of each client's budget, [clients], dealt in turn over a random order.

    The order follows from `seed`. None if there is only one budget (`groups` 1).
    """
    import numpy as np

    from fedveil.privacy.noise.streams import Streams

    if groups == 1:
        return None
    order = Streams(seed).generator("budgets").permutation(clients)
    members = np.empty(clients, dtype=np.int64)
    members[order] = np.arange(clients) % groups
    return members
