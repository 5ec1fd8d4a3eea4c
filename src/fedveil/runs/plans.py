"""From a recipe to its privacy plan: which of the papers' compositions a recipe is."""

import math

import numpy as np
import numpy.typing as npt

from fedveil.data.federated import FederatedData
from fedveil.errors import BadInput
from fedveil.models.task import Task
from fedveil.privacy.accounting.budget import Budget
from fedveil.privacy.accounting.claims import Relation, Unit
from fedveil.privacy.clip_schedules import ClipSchedule, Fixed, Median, PerGradient, Poly, Quantile
from fedveil.privacy.noise.mechanisms import GaussianMechanism
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.priced_metrics import PricedMetrics, measured_rounds, priced_metrics
from fedveil.privacy.ranges import Perturb, Ranges
from fedveil.privacy.releases.central import CentralNoise, central
from fedveil.privacy.releases.client_noise import Published, client_noise
from fedveil.privacy.releases.dp_sgd import dp_sgd
from fedveil.privacy.releases.none import unprotected
from fedveil.privacy.releases.priv_unit import priv_unit
from fedveil.privacy.releases.two_point import two_point
from fedveil.privacy.rows import Norm
from fedveil.privacy.sampling import Sampler
from fedveil.privacy.secure import planned_for, secured
from fedveil.runs.recipe import Recipe
from fedveil.runs.sections.client_section import DpSgdSection
from fedveil.runs.sections.clip_section import (
    FixedClipSection,
    MedianClipSection,
    PolyClipSection,
    QuantileClipSection,
    RangeClipSection,
)
from fedveil.runs.sections.noise_section import (
    BudgetSection,
    GaussianSection,
    LaplaceSection,
    NoNoiseSection,
    PrivUnitSection,
    TwoPointSection,
)
from fedveil.training.owner_means import measured_owners, priced_names
from fedveil.training.work import ClientSgd, ClientWork


def plan_of(
    recipe: Recipe,
    sampler: Sampler,
    clients: int,
    work: ClientWork | None,
    task: Task,
    metrics: PricedMetrics | None = None,
) -> PrivacyPlan:
    """The plan a recipe describes; sections that do not go together are refused.

    `work` is None for DP-SGD, which is made from the plan rather than the other way round.
    `metrics` are those of `priced_of`.
    """
    _check_sections(recipe)
    beside = metrics if metrics is not None and metrics.of_clients else None
    plan = _plan_of(recipe, sampler, clients, work, task, beside)
    if metrics is not None:
        plan = plan.measuring(metrics, recipe.evaluate.every)
    if recipe.data.resample is not None:
        plan = plan.assuming(_RESAMPLED)
    if not is_secure(recipe) or not plan.private:
        return plan
    return secured(plan, task.size, diagnostics=bool(recipe.evaluate.diagnostics))


def priced_of(
    recipe: Recipe, sampler: Sampler, data: FederatedData, task: Task
) -> PricedMetrics | None:
    """What `evaluate.epsilon` pays for, over all planned rounds; None if it is left out."""
    section = recipe.evaluate
    if section.epsilon is None:
        for key in ("delta", "loss_clip"):
            if getattr(section, key) is not None:
                raise BadInput(f"evaluate.{key} has no effect without evaluate.epsilon")
        return None
    if recipe.budget is None:
        raise BadInput(
            "evaluate.epsilon is given and nothing is claimed of the training: leave it out, or "
            "add noise that is claimed, and a [budget]"
        )
    names, owners = priced_names(task), measured_owners(data)
    loss_clip = section.loss_clip
    if loss_clip is None:
        if not data.classes:
            raise BadInput(
                "evaluate.loss_clip is missing: for numbers nobody knows in advance how large a "
                "loss may be; give what a record's loss counts as at most"
            )
        loss_clip = 2 * math.log(max(data.classes, 2))
    budget = Budget(section.epsilon, section.delta or recipe.budget.delta)
    return priced_metrics(
        names,
        len(owners),
        budget=planned_for(budget) if is_secure(recipe) else budget,
        rounds=measured_rounds(recipe.total_rounds, section.every),
        loss_clip=loss_clip,
        of_clients=owners.of_clients,
        relation=sampler.relation if owners.of_clients else Relation.ZERO_OUT,
        unit=Unit.RECORD if owners.records else Unit.CLIENT,
    )


def is_secure(recipe: Recipe) -> bool:
    """Whether the recipe's randomness is to be the operating system's."""
    return getattr(recipe.noise, "source", "seeded") == "secure"


def _budget(recipe: Recipe, epsilon: float) -> Budget:
    """A budget of the recipe's delta, less what secure noise needs of it."""
    budget = Budget(epsilon, _section(recipe).delta)
    return planned_for(budget) if is_secure(recipe) else budget


def _plan_of(
    recipe: Recipe,
    sampler: Sampler,
    clients: int,
    work: ClientWork | None,
    task: Task,
    metrics: PricedMetrics | None,
) -> PrivacyPlan:
    """`metrics` are those of the clients themselves, which their claim has to cover."""
    rounds, noise = recipe.total_rounds, recipe.noise
    if metrics is not None and getattr(noise, "where", "") != "server":
        raise BadInput(
            "evaluate.epsilon would measure the clients themselves, and whoever measures sees "
            "records that this recipe keeps from everybody but their client: hold owners out "
            "(data.test = 'by-client'), or leave it out"
        )
    if isinstance(recipe.clip, RangeClipSection):
        return _two_point_plan(recipe, recipe.clip, sampler, clients, task)
    if isinstance(recipe.client, DpSgdSection):
        return _dp_sgd_plan(recipe, recipe.client, sampler, clients)
    schedule = _schedule(recipe, sampler, clients, work)
    if isinstance(noise, NoNoiseSection):
        return unprotected(sampler, clients, rounds=rounds, schedule=schedule)
    if schedule is not None and isinstance(noise, PrivUnitSection):
        return _priv_unit_plan(recipe, noise, schedule, sampler, clients, task)
    if schedule is None or not isinstance(noise, GaussianSection | LaplaceSection):
        raise AssertionError(f"no plan is made of noise.kind {noise.kind!r}")
    if isinstance(noise, GaussianSection) and not noise.claim:
        return PrivacyPlan(
            sampler=sampler,
            population=clients,
            rounds=rounds,
            schedule=schedule,
            release=CentralNoise(GaussianMechanism(noise.multiplier or 0.0), sampler.relation),
        )
    budget = _section(recipe)
    if noise.where == "server":
        if budget.as_published or budget.epsilons:
            raise BadInput("budget.as_published and budget.epsilons are for noise at the clients")
        return central(
            sampler,
            clients,
            schedule,
            rounds=rounds,
            budget=_budget(recipe, budget.epsilon),
            multiplier=noise.multiplier,
            metrics=metrics,
        )
    epsilons = budget.epsilons or [budget.epsilon]
    return client_noise(
        sampler,
        clients,
        schedule,
        laplace=isinstance(noise, LaplaceSection),
        rounds=rounds,
        budgets=tuple(_budget(recipe, e) for e in epsilons),
        group_of=_dealt(clients, len(epsilons), recipe.seed),
        multiplier=noise.multiplier,
        published=_published(recipe),
    )


_RESAMPLED = (
    "records were drawn with replacement: one may be several clients' own, and the claim is about "
    "one client's copy of it"
)


def _check_sections(recipe: Recipe) -> None:
    """Refuse sections that contradict each other."""
    if recipe.data.resample is not None and recipe.client.kind == "dp-sgd":
        raise BadInput(
            f"data.resample is {recipe.data.resample} and the claim is about one record, of which "
            "a client may then have several copies: leave it out"
        )
    noise, clip, budget = recipe.noise, recipe.clip, recipe.budget
    claimed = noise.kind != "none" and getattr(noise, "claim", True)
    if budget is not None and not claimed:
        raise BadInput(
            "budget is given and nothing is claimed (noise.kind 'none' or noise.claim = false): "
            "leave the budget out (--set budget=none) or add noise that is claimed"
        )
    if noise.kind != "none" and clip is None:
        raise BadInput(f"noise.kind is {noise.kind!r} without a [clip]: noise protects nobody")
    if claimed and budget is None:
        raise BadInput(
            f"noise.kind is {noise.kind!r} without a [budget]: give at least budget.delta"
        )
    if (
        isinstance(noise, GaussianSection)
        and not noise.claim
        and (noise.where != "server" or noise.multiplier is None)
    ):
        raise BadInput("noise.claim = false is for noise.where = 'server' with a multiplier")
    if is_secure(recipe) and not claimed:
        raise BadInput("noise.source = 'secure' is for noise that is claimed: use 'seeded'")
    if is_secure(recipe) and budget is not None and budget.as_published:
        raise BadInput("budget.as_published is for simulations: use noise.source = 'seeded'")
    if is_secure(recipe) and recipe.engine.checkpoint != 1:
        raise BadInput(
            f"engine.checkpoint is {recipe.engine.checkpoint}: with secure noise every round that "
            "is lost is charged again, so a checkpoint is written after each; leave it out"
        )
    if (noise.kind == "two-point") != (clip is not None and clip.kind == "range"):
        raise BadInput("clip.kind 'range' and noise.kind 'two-point' go together")
    if (recipe.client.kind == "dp-sgd") != (getattr(noise, "where", "") == "training"):
        raise BadInput("client.kind 'dp-sgd' and noise.where = 'training' go together")
    if recipe.shuffle is not None and noise.kind != "two-point":
        raise BadInput("[shuffle] is for noise.kind = 'two-point'")
    if getattr(noise, "c2", None) is not None and not (budget is not None and budget.as_published):
        raise BadInput("noise.c2 is for budget.as_published = true: leave it out")
    if budget is not None and budget.epsilons is not None:
        if not math.isinf(budget.epsilon):
            raise BadInput("budget.epsilon and budget.epsilons contradict each other: give one")
        if not budget.epsilons or getattr(noise, "where", "") != "client":
            raise BadInput("budget.epsilons is a list of one or more, for noise at the clients")


def _section(recipe: Recipe) -> BudgetSection:
    if recipe.budget is None:
        raise AssertionError("sections were checked")
    return recipe.budget


def _schedule(
    recipe: Recipe, sampler: Sampler, clients: int, work: ClientWork | None
) -> ClipSchedule | None:
    match recipe.clip:
        case FixedClipSection(value=value, norm=norm, each=each):
            return _per_gradient(Fixed(value, Norm(norm)), each, work, recipe)
        case PolyClipSection(value=value, power=power, norm=norm, each=each) as section:
            floor = value / 1000 if section.floor is None else section.floor
            schedule = Poly(value, power, recipe.total_rounds, floor, Norm(norm))
            return _per_gradient(schedule, each, work, recipe)
        case QuantileClipSection() as section:
            noise = section.bit_noise
            if noise is None and section.bit_epsilon is None:
                noise = sampler.expected(clients) / 20
            return Quantile(
                section.value,
                section.quantile,
                section.lr,
                noise or 0.0,
                section.bit_epsilon or 0.0,
            )
        case MedianClipSection() as section:
            return Median(
                section.value,
                section.low,
                section.high,
                section.every,
                Budget(section.epsilon, section.delta),
                section.monotone,
                section.cap,
            )
    return None


def _per_gradient(
    schedule: Fixed | Poly, each: str, work: ClientWork | None, recipe: Recipe
) -> ClipSchedule:
    if each == "update":
        return schedule
    if not isinstance(work, ClientSgd):
        raise BadInput("clip.each = 'gradient' needs client.kind = 'sgd'")
    work.reach(1)
    if recipe.budget is not None and recipe.budget.as_published:
        if work.schedule is not None:
            raise BadInput(
                "budget.as_published takes the learning rates of the first round for all: leave "
                "client.schedule and client.warmup out"
            )
        return PerGradient(schedule, work.published_reach)
    return PerGradient(schedule, work.reach)


def _published(recipe: Recipe) -> Published | None:
    if not _section(recipe).as_published:
        return None
    per_gradient = getattr(recipe.clip, "each", "") == "gradient"
    c2 = recipe.noise.c2 if isinstance(recipe.noise, GaussianSection) else None
    return Published(c2, Unit.RECORD if per_gradient else Unit.CLIENT)


def _dealt(clients: int, groups: int, seed: int) -> npt.NDArray[np.int64] | None:
    """Which budget each client has: dealt in turn over a seeded random order."""
    if groups == 1:
        return None
    order = Streams(seed).generator("budgets").permutation(clients)
    members = np.empty(clients, dtype=np.int64)
    members[order] = np.arange(clients) % groups
    return members


def _two_point_plan(
    recipe: Recipe, section: RangeClipSection, sampler: Sampler, clients: int, task: Task
) -> PrivacyPlan:
    budget, noise = _section(recipe), recipe.noise
    if not isinstance(noise, TwoPointSection):
        raise AssertionError("sections were checked")
    if budget.as_published or budget.epsilons:
        raise BadInput("the published epsilon of one weight is always printed: leave both out")
    ranges = Ranges(
        section.centre,
        section.radius,
        task.layer_sizes,
        section.adaptive,
        Perturb(section.perturb),
        section.growth,
    )
    if ranges.perturb is Perturb.WEIGHTS and section.radius is not None:
        outside = float(((task.parameters - section.centre).abs() > section.radius).float().mean())
        if outside > 0.5:
            raise BadInput(
                f"the range {section.centre:g} +- {section.radius:g} excludes "
                f"{100 * outside:.0f} % of the model's first weights: widen clip.radius"
            )
    return two_point(
        sampler,
        clients,
        ranges,
        epsilon=noise.epsilon,
        rounds=recipe.total_rounds,
        budget=_budget(recipe, budget.epsilon),
        shuffled=0 if recipe.shuffle is None else recipe.shuffle.minimum,
        dishonest=0 if recipe.shuffle is None else recipe.shuffle.dishonest,
    )


def _priv_unit_plan(
    recipe: Recipe,
    noise: PrivUnitSection,
    schedule: ClipSchedule,
    sampler: Sampler,
    clients: int,
    task: Task,
) -> PrivacyPlan:
    budget = _section(recipe)
    if budget.as_published or budget.epsilons:
        raise BadInput(
            "budget.as_published and budget.epsilons have no meaning for noise.kind 'priv-unit': "
            "leave them out"
        )
    return priv_unit(
        sampler,
        clients,
        schedule,
        parameters=task.size,
        epsilon=noise.epsilon,
        rounds=recipe.total_rounds,
        budget=_budget(recipe, budget.epsilon),
    )


def _dp_sgd_plan(
    recipe: Recipe, client: DpSgdSection, sampler: Sampler, clients: int
) -> PrivacyPlan:
    clip, noise, budget = recipe.clip, recipe.noise, _section(recipe)
    if not isinstance(clip, FixedClipSection) or not isinstance(noise, GaussianSection):
        raise BadInput("client.kind 'dp-sgd' takes a fixed clip per example and Gaussian noise")
    if clip.norm != "l2" or clip.each != "update":
        raise BadInput(
            "under dp-sgd clip.value clips each example's gradient in L2: leave out "
            "clip.norm and clip.each"
        )
    if budget.as_published or budget.epsilons:
        raise BadInput("budget.as_published and budget.epsilons have no meaning for dp-sgd")
    return dp_sgd(
        sampler,
        clients,
        clip.value,
        rate=client.rate,
        steps=client.steps,
        nominal=client.nominal,
        rounds=recipe.total_rounds,
        budget=_budget(recipe, budget.epsilon),
        multiplier=noise.multiplier,
    )
