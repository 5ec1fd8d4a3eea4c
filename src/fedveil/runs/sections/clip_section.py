"""`[clip]`: how long what a client sends may be."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedveil.base import checks
from fedveil.base.errors import BadInput
from fedveil.runs.sections.section import Section, in_keys, setting

if TYPE_CHECKING:
    from fedveil.privacy.clip_schedules import ClipSchedule, Fixed, Poly
    from fedveil.privacy.ranges import Ranges
    from fedveil.runs.sections.noise_section import PlanInputs

_FIRST_CLIP = setting(
    checks.CLIP, description="Clip of the first round: the largest L2 norm of a client's update."
)


class _NormKeys(Section):
    """The last keys of a clip whose norm is chosen, and which may be on gradients."""

    norm: Literal["l1", "l2"] = "l2"
    """The norm that lengths are measured in: 'l1' for Laplace noise, 'l2' for all other."""
    each: Literal["update", "gradient"] = "update"
    """What is clipped: the whole 'update', or every local 'gradient', for client.kind 'sgd' with
    steps and optimizer 'sgd', without momentum, weight_decay and proximal."""


class _FixedClipKeys(Section):
    """The first keys of `[clip]` of kind "fixed"."""

    kind: Literal["fixed"]
    """The same clip in every round."""
    value: float = setting(checks.CLIP)
    """The largest norm of a client's update or local gradient (see each); under DP-SGD, of each
    example's gradient."""


class FixedClipSection(_NormKeys, _FixedClipKeys):
    """`[clip]` of kind "fixed": the same clip in every round."""

    def build(self, inputs: "PlanInputs") -> "ClipSchedule":
        """Build the clip schedule with the same clip in every round.

        Raises BadInput if `each` is "gradient" and clients do anything but plain local steps.
        """
        from fedveil.privacy.clip import Norm
        from fedveil.privacy.clip_schedules import Fixed

        with in_keys("clip"):
            schedule = Fixed(self.value, Norm(self.norm))
            return schedule if self.each == "update" else _per_gradient(schedule, inputs)


class _PolyClipKeys(Section):
    """The first keys of `[clip]` of kind "poly"."""

    kind: Literal["poly"]
    """A clip that decays by itself: value (1 - (t - 1) / T)^power in round t of T."""
    value: float = setting(checks.CLIP)
    """Clip of the first round: the largest norm of a client's update or local gradient (see
    each)."""
    power: float = setting(checks.NOT_NEGATIVE)
    """How fast the clip decays; 0: it does not."""
    floor: float | None = setting(checks.CLIP_FLOOR, None)
    """The clip never falls below it. Default: a thousandth of value."""


class PolyClipSection(_NormKeys, _PolyClipKeys):
    """`[clip]` of kind "poly": a clip that decays by a polynomial."""

    def build(self, inputs: "PlanInputs") -> "ClipSchedule":
        """Build the clip schedule value (1 - (t - 1) / T)^power in round t of T, at least `floor`.

        Raises BadInput if `each` is "gradient" and clients do anything but plain local steps.
        """
        from fedveil.privacy.clip import Norm
        from fedveil.privacy.clip_schedules import Poly

        floor = self.value / 1000 if self.floor is None else self.floor
        with in_keys("clip", rounds="rounds"):
            schedule = Poly(self.value, self.power, inputs.rounds, floor, Norm(self.norm))
        return schedule if self.each == "update" else _per_gradient(schedule, inputs)


class QuantileClipSection(Section):
    """`[clip]` of kind "quantile": a clip that follows a quantile of update norms."""

    kind: Literal["quantile"]
    """A clip that follows a quantile of the clients' update norms: with b the noisy share of
    updates within it, it is multiplied by exp(-lr (b - quantile)) every round."""
    value: float = _FIRST_CLIP
    quantile: float = setting(checks.QUANTILE, 0.5)
    """Share of updates that are to be within the clip."""
    lr: float = setting(checks.POSITIVE, 0.2)
    """How fast the clip moves; see kind."""
    bit_noise: float | None = setting(checks.NOT_NEGATIVE, None)
    """Standard deviation of the Gaussian noise on the number of updates within the clip, in
    clients; added by the server or, where clients add their own, a trusted curator. With [sum]
    clients add it in parts, and there is no curator. Default: a
    twentieth of the clients per round, or none where bit_epsilon is given."""
    bit_epsilon: float | None = setting(checks.BIT_EPSILON, None)
    """Epsilon of the randomised response by which each client tells, in each of its turns, whether
    its update was within the clip. Only where clients add the noise. Default: bit_noise protects
    it."""

    def build(self, inputs: "PlanInputs") -> "ClipSchedule":
        """Build the clip schedule that follows a noisy quantile of update norms."""
        from fedveil.privacy.clip_schedules import Quantile

        noise = self.bit_noise
        if noise is None and self.bit_epsilon is None:
            noise = inputs.sampler.expected(inputs.clients) / 20
        with in_keys(
            "clip", target="clip.quantile", noise="clip.bit_noise", flip="clip.bit_epsilon"
        ):
            return Quantile(
                self.value, self.quantile, self.lr, noise=noise or 0.0, flip=self.bit_epsilon or 0.0
            )


class MedianClipSection(Section):
    """`[clip]` of kind "median": a clip at the noisy median of gradient norms."""

    kind: Literal["median"]
    """A clip at the median of the clients' gradient norms, from noisy histograms that a trusted
    curator publishes, or with [sum] a secure sum; for client.kind 'gradient' where clients add the
    noise."""
    value: float = _FIRST_CLIP
    low: int = setting(checks.POWER)
    """The first bin of a histogram ends at 2^low."""
    high: int = setting(checks.POWER)
    """The last bin stands for 2^high; above low."""
    every: int = setting(checks.CLIP_EVERY)
    """Rounds from one histogram to the next."""
    epsilon: float = setting(checks.BUDGET)
    """Epsilon that all histograms together may cost a client; part of what the run's claim
    counts."""
    delta: float = setting(checks.DELTA)
    """Delta that belongs to that epsilon."""
    monotone: bool = False
    """Whether the clip may only fall."""
    cap: float = setting(checks.BUDGET, float("inf"))
    """The clip never rises above it; at least value."""

    def build(self, inputs: "PlanInputs") -> "ClipSchedule":
        """Build the clip schedule at the noisy median of gradient norms."""
        from fedveil.privacy.accounting.budget import Budget
        from fedveil.privacy.clip_schedules import Median

        with in_keys("clip"):
            budget = Budget(self.epsilon, self.delta)
            bins = self.low, self.high
            return Median(self.value, *bins, self.every, budget, self.monotone, self.cap)


class RangeClipSection(Section):
    """`[clip]` of kind "range": weights are clamped to ranges, layer by layer."""

    kind: Literal["range"]
    """Weights are clamped to [centre - radius, centre + radius], layer by layer; for noise.kind
    'two-point'."""
    centre: float = setting(checks.FINITE, 0.0)
    """Centre of the first ranges. For perturb 'weights'."""
    radius: float | None = setting(checks.RADIUS, None)
    """Half the width of the first ranges. Default: taken from the first model, for adaptive ranges
    of weights only."""
    adaptive: bool = True
    """Whether ranges follow the spread of each layer in the models released; otherwise they
    stay."""
    perturb: Literal["weights", "update"] = "update"
    """What clients report: their 'weights', as LDP-FL was published, or their 'update' of the
    model."""
    growth: float = setting(checks.GROWTH, 1.0)
    """The largest factor by which a radius grows from one round to the next. For adaptive
    ranges."""

    def build(self, inputs: "PlanInputs") -> "Ranges":
        """Build the ranges that weights are clamped to.

        Raises BadInput if a range given for weights excludes most of the first weights.
        """
        from fedveil.privacy.ranges import Perturb, Ranges

        what, sizes = Perturb(self.perturb), inputs.task.layer_sizes
        with in_keys("clip"):
            ranges = Ranges(self.centre, self.radius, sizes, self.adaptive, what, self.growth)
        if what is Perturb.WEIGHTS and self.radius is not None:
            distance = (inputs.task.parameters - self.centre).abs()
            outside = float((distance > self.radius).float().mean())
            if outside > 0.5:
                raise BadInput(
                    f"the range {self.centre:g} +- {self.radius:g} excludes {100 * outside:.0f} % "
                    "of the model's first weights: widen clip.radius"
                )
        return ranges


ClipSection = Annotated[
    FixedClipSection | PolyClipSection | QuantileClipSection | MedianClipSection | RangeClipSection,
    Field(discriminator="kind"),
]


def _per_gradient(schedule: "Fixed | Poly", inputs: "PlanInputs") -> "ClipSchedule":
    """Return the clip schedule of updates that are sums of gradients clipped by `schedule`.

    Raises BadInput unless clients do a fixed number of plain local steps, and for a learning rate
    that changes over the rounds beside budget.as_published.
    """
    from fedveil.privacy.clip_schedules import PerGradient
    from fedveil.training.work import ClientSgd

    work, budget = inputs.work, inputs.recipe.budget
    if not isinstance(work, ClientSgd):
        raise BadInput("clip.each = 'gradient' needs client.kind = 'sgd'")
    work.reach(1)
    if budget is not None and budget.as_published:
        if work.schedule is not None:
            raise BadInput(
                "budget.as_published takes the learning rates of the first round for all: leave "
                "client.schedule and client.warmup out"
            )
        return PerGradient(schedule, work.published_reach)
    return PerGradient(schedule, work.reach)
