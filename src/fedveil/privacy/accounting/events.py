"""Events: what was released, as data. They say nothing about epsilon; accountants read them.

Rules of evolution, since ledgers outlive versions: an event is never removed and never changes
its meaning; an event that an accountant does not know is refused.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, get_args

from fedveil.base.errors import BadArgument, BadInput


@dataclass(frozen=True)
class _Noise:
    """Noise of `multiplier` times the sensitivity. A multiplier of 0 is a release without noise."""

    multiplier: float

    def __post_init__(self) -> None:
        """Raise BadArgument unless the multiplier is finite and not negative."""
        if not 0 <= self.multiplier < math.inf:
            raise BadArgument(
                f"{{multiplier}} is {self.multiplier}: a number >= 0 is needed", "multiplier"
            )


@dataclass(frozen=True)
class Gaussian(_Noise):
    """Gaussian noise of standard deviation `multiplier` times the L2 sensitivity.

    The sensitivity is the one under the claim's own relation: S for add-remove and zero-out,
    2 S for replacement. A multiplier of 0 is a release without noise.
    """


@dataclass(frozen=True)
class Skellam(_Noise):
    """Integer noise, the difference of two Poisson variables, on sums of integer rows.

    Its standard deviation is `multiplier` times the L2 sensitivity, which is `sensitivity` steps
    under the claim's own relation.
    """

    sensitivity: float

    def __post_init__(self) -> None:
        """Raise BadInput for a multiplier that `_Noise` refuses, or a sensitivity below 1."""
        super().__post_init__()
        if not 1 <= self.sensitivity < math.inf:
            raise BadInput(
                f"the sensitivity of integer rows is {self.sensitivity} steps: at least 1 is needed"
            )


@dataclass(frozen=True)
class Laplace(_Noise):
    """Laplace noise of scale `multiplier` times the L1 sensitivity under the claim's relation."""


@dataclass(frozen=True)
class FuGaussian(_Noise):
    """Gaussian noise of `multiplier` sensitivities, read as Fu et al. do, with their constant c_2.

    Their formula borrows a theorem outside its conditions: it is kept to reproduce their figures.
    """

    c2: float

    def __post_init__(self) -> None:
        """Raise BadInput for a multiplier that `_Noise` refuses, or a c2 that is not positive."""
        super().__post_init__()
        if not 0 < self.c2 < math.inf:
            raise BadInput(f"c2 is {self.c2}: a positive number is needed")


@dataclass(frozen=True)
class _Report:
    """A report of which any two inputs' probabilities differ by at most e^epsilon."""

    epsilon: float

    def __post_init__(self) -> None:
        """Raise BadInput unless epsilon is positive and finite."""
        if not 0 < self.epsilon < math.inf:
            raise BadInput(f"epsilon of a report is {self.epsilon}: a positive number is needed")


@dataclass(frozen=True)
class TwoPoint(_Report):
    """One two-valued report whose probabilities differ by at most e^epsilon between any inputs."""


@dataclass(frozen=True)
class PureReport(_Report):
    """One report, of whatever form, that is `epsilon`-DP by itself.

    The probability of any set of reports differs by at most e^epsilon between any two inputs.
    """


@dataclass(frozen=True)
class Shuffled:
    """The multiset of `reports` two-valued reports of one position, their senders hidden."""

    event: TwoPoint
    reports: int

    def __post_init__(self) -> None:
        """Raise BadInput for fewer than one report."""
        if self.reports < 1:
            raise BadInput(f"{self.reports} shuffled reports: at least one is needed")


@dataclass(frozen=True)
class GaussianWithBit:
    """A Gaussian release and a two-valued report together, about the same unit."""

    gaussian: Gaussian
    bit: TwoPoint


@dataclass(frozen=True)
class GaussianWithCurator:
    """A Gaussian release and, with at most `most` of them, a curator's about the same unit."""

    gaussian: Gaussian
    curator: Gaussian
    most: int

    def __post_init__(self) -> None:
        """Raise BadInput for fewer than one release of the curator."""
        if self.most < 1:
            raise BadInput(f"{self.most} releases of a curator: at least one is needed")


@dataclass(frozen=True)
class PoissonSampled:
    """`event` on a cohort that every unit joins independently with probability `rate`."""

    rate: float
    event: Gaussian | Skellam

    def __post_init__(self) -> None:
        """Raise BadInput for a rate outside (0, 1]."""
        if not 0 < self.rate <= 1:
            raise BadInput(f"rate is {self.rate}: a probability in (0, 1] is needed")


@dataclass(frozen=True)
class GroupSampled:
    """`event` on a cohort that each of one person's `size` records joins with probability `rate`.

    Every record joins independently and moves the sum by at most the sensitivity.
    """

    rate: float
    size: int
    event: Gaussian

    def __post_init__(self) -> None:
        """Raise BadInput for a rate outside (0, 1], or fewer than one record."""
        if not 0 < self.rate <= 1:
            raise BadInput(f"rate is {self.rate}: a probability in (0, 1] is needed")
        if self.size < 1:
            raise BadInput(f"{self.size} records of a person: at least one is needed")


@dataclass(frozen=True)
class FixedSampled:
    """`event` on a uniformly random cohort of exactly `size` out of `population` units."""

    size: int
    population: int
    event: Gaussian

    def __post_init__(self) -> None:
        """Raise BadInput unless 1 <= size <= population."""
        if not 1 <= self.size <= self.population:
            raise BadInput(f"a cohort of {self.size} out of {self.population} cannot be drawn")


@dataclass(frozen=True)
class WithMetrics:
    """`event`, and beside all releases of it up to `most` Gaussian ones of metrics.

    All `most` count, however often `event` was released: metrics are measured on every unit, also
    on those that took part in no round.
    """

    event: Gaussian | PoissonSampled
    metrics: Gaussian
    most: int

    def __post_init__(self) -> None:
        """Raise BadInput for fewer than one measurement."""
        if self.most < 1:
            raise BadInput(f"{self.most} measurements: at least one is needed")


Event = (
    Gaussian
    | Skellam
    | Laplace
    | FuGaussian
    | TwoPoint
    | PureReport
    | Shuffled
    | GaussianWithBit
    | GaussianWithCurator
    | PoissonSampled
    | GroupSampled
    | FixedSampled
    | WithMetrics
)

KINDS: dict[type[Event], str] = {
    Gaussian: "gaussian",
    Skellam: "skellam",
    Laplace: "laplace",
    FuGaussian: "fu-gaussian",
    TwoPoint: "two-point",
    PureReport: "pure-report",
    Shuffled: "shuffled",
    GaussianWithBit: "gaussian-with-bit",
    GaussianWithCurator: "gaussian-with-curator",
    PoissonSampled: "poisson-sampled",
    GroupSampled: "group-sampled",
    FixedSampled: "fixed-sampled",
    WithMetrics: "with-metrics",
}
"""The name of each kind of event in a ledger. Subclasses are not events and have none."""

_CLASSES = {name: event for event, name in KINDS.items()}
_WORDS = {"epsilon": "odds e^"}
_INNER = {"event", "gaussian", "curator", "bit", "metrics"}


def event_text(event: Event) -> str:
    """The event in words, for people: its kind, and its fields in brackets.

    A report's own epsilon, which is nobody's claim, is shown as odds.

    >>> event_text(GaussianWithBit(Gaussian(2.0), TwoPoint(0.5)))
    'gaussian-with-bit (gaussian (multiplier 2), two-point (odds e^0.5))'
    """
    parts = [
        event_text(value) if name in _INNER else f"{_WORDS.get(name, f'{name} ')}{value:g}"
        for name, value in vars(event).items()
    ]
    return f"{KINDS[type(event)]} ({', '.join(parts)})"


def to_dict(event: Event) -> dict[str, Any]:
    """The event as JSON values, for the ledger: "kind" and the fields. Inner events are dicts.

    >>> to_dict(PoissonSampled(0.1, Gaussian(1.0)))
    {'kind': 'poisson-sampled', 'rate': 0.1, 'event': {'kind': 'gaussian', 'multiplier': 1.0}}
    """
    values: dict[str, Any] = {"kind": KINDS[type(event)]}
    for name, value in vars(event).items():
        values[name] = to_dict(value) if name in _INNER else value
    return values


def from_dict(raw: dict[str, Any]) -> Event:
    """The event that `to_dict` wrote.

    Raises BadInput for an unknown kind, missing or other fields, and values that an event refuses.
    """
    try:
        values = dict(raw)
        kind = _CLASSES.get(values.pop("kind"))
        if kind is None:
            raise BadInput(f"event kind {raw['kind']!r} is unknown to this version of fedveil")
        types: dict[str, Any] = {field.name: field.type for field in fields(kind)}
        if values.keys() != types.keys():
            raise BadInput(f"a {raw['kind']} event has the fields {', '.join(types)}")
        for name, value in values.items():
            if name not in _INNER:
                values[name] = types[name](value)
                continue
            values[name] = from_dict(value)
            if not isinstance(values[name], types[name]):
                wanted = " or ".join(t.__name__ for t in get_args(types[name]) or (types[name],))
                raise BadInput(f"a {raw['kind']} event holds a {wanted}")
        return kind(**values)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        if isinstance(e, BadInput):
            raise
        raise BadInput(f"event {raw!r} cannot be read: {e}") from e
