"""What-if accounting: central DP with Poisson sampling, from its settings, without training.

An answer comes in two steps. `quick` is an upper bound in a fraction of a second: by RDP, and by
PLD on a coarse grid. `refined` is the claim that a run of these settings ends with, what the budget
permits, and what the same client-rounds cost when they are spread over other rounds. Both are
cached, so that a slider that is moved back is answered at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import central_line, least_noise
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.composition import FINE, rounds_within
from fedveil.runs.recipe_file import load_recipe, to_toml

_COARSE = 10 * FINE
_SPREAD = (1 / 16, 1 / 4, 1 / 2, 1, 2, 4, 16)
"""How many times the rounds the same client-rounds are spread over."""

_DIGITS = (1, 1.1, 1.2, 1.35, 1.5, 1.7, 2, 2.2, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9)

_CACHED = 512


@dataclass(frozen=True)
class Knob:
    """A setting of the page: its range, its first value, and its label."""

    name: str
    low: float
    high: float
    start: float
    label: str
    note: str
    whole: bool = False

    @property
    def values(self) -> list[float]:
        """The values of its slider, about evenly spaced on a logarithmic scale."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        every = {float(f"{digits}e{power}") for power in powers for digits in _DIGITS}
        within = {value for value in every if self.low <= value <= self.high}
        values = within | {self.low, self.high, self.start}
        return sorted(value for value in values if not self.whole or value == int(value))

    def read(self, text: str | None) -> float:
        """Parse a value of a query. One that is outside the slider's range is refused."""
        try:
            value = float(text) if text is not None else self.start
        except ValueError:
            value = math.nan
        if not self.low <= value <= self.high or (self.whole and value != int(value)):
            kind = "a whole number" if self.whole else "a number"
            raise BadInput(
                f"{self.name} is {text!r:.40}: {kind} from {self.low:g} to {self.high:g}"
            )
        return value


KNOBS = (
    Knob("clients", 10, 1e7, 100, "clients", "in the whole population", whole=True),
    Knob("rate", 1e-4, 1, 0.5, "rate", "probability that a client joins a round"),
    Knob("rounds", 1, 1e5, 40, "rounds", "that are trained", whole=True),
    Knob("noise", 0.3, 100, 2, "noise multiplier", "std of the sum's noise / clip norm"),
    Knob("delta", 1e-10, 1e-2, 1e-5, "delta", "of the claim; below 1 / clients"),
    Knob("epsilon", 0.1, 100, 8, "budget", "epsilon at which a run stops, by the claim below"),
    Knob("parameters", 10, 1e9, 650, "parameters", "of the model", whole=True),
)


@dataclass(frozen=True)
class Settings:
    """The settings of a run that is accounted for."""

    clients: int
    rate: float
    rounds: int
    noise: float
    delta: float
    epsilon: float
    parameters: int

    @classmethod
    def read(cls, query: Mapping[str, str]) -> "Settings":
        """Parse a query. A setting that it lacks has its slider's first value."""
        values = {knob.name: knob.read(query.get(knob.name)) for knob in KNOBS}
        whole = {knob.name: int(values[knob.name]) for knob in KNOBS if knob.whole}
        return cls(**{**values, **whole})  # type: ignore[arg-type]

    @property
    def line(self) -> BudgetLine:
        return central_line(self.rate, self.noise, Budget(self.epsilon, self.delta))

    @property
    def cohort(self) -> float:
        """The expected number of clients in a round."""
        return self.rate * self.clients

    @property
    def client_rounds(self) -> float:
        """The expected number of participations, over all clients and rounds."""
        return self.cohort * self.rounds

    @property
    def noise_of_mean(self) -> float:
        """Std of the noise on a coordinate of the mean update, in clip norms."""
        return self.noise / self.cohort

    @property
    def signal_to_noise(self) -> float:
        """Norm of the mean update over the norm of its noise, at best.

        It assumes that all updates point in one direction and are as long as the clip norm.
        """
        return self.cohort / (self.noise * math.sqrt(self.parameters))


@dataclass(frozen=True)
class Spread:
    """The same client-rounds over another number of rounds, and what they cost."""

    settings: Settings
    claim: PrivacyClaim


@dataclass(frozen=True)
class Refined:
    """The claims of a run, and what the budget permits.

    Attributes:
        claims: One per accountant, PLD first.
        permitted: The number of rounds within the budget.
        needed: The noise multiplier with which all rounds fit, or None if none is enough.
        splits: What the same client-rounds cost over other numbers of rounds.
    """

    claims: tuple[PrivacyClaim, ...]
    permitted: int
    needed: float | None
    splits: tuple[Spread, ...]


@lru_cache(_CACHED)
def quick(settings: Settings) -> tuple[PrivacyClaim, ...]:
    """Upper bounds by PLD, on a coarse grid, and by RDP."""
    return settings.line.claims(settings.rounds, interval=_COARSE)


@lru_cache(_CACHED)
def refined(settings: Settings) -> Refined:
    """The claim as a run ends with it, and what the budget permits."""
    line, budget = settings.line, settings.line.budget
    try:
        needed: float | None = least_noise(
            lambda noise: central_line(settings.rate, noise, budget).event,
            settings.rounds,
            budget,
            line.relation,
        )
    except BadInput:
        needed = None
    return Refined(
        claims=line.claims(settings.rounds),
        permitted=rounds_within(line.event, budget.epsilon, budget.delta, line.relation),
        needed=needed,
        splits=_splits(settings),
    )


def _splits(settings: Settings) -> tuple[Spread, ...]:
    spreads = []
    for times in _SPREAD:
        rounds = round(settings.rounds * times)
        rate = settings.rate * settings.rounds / max(rounds, 1)
        if rounds >= 1 and rate <= 1:
            other = Settings(**{**vars(settings), "rounds": rounds, "rate": rate})
            claim = other.line.claims(rounds, interval=_COARSE)[0]
            spreads.append(Spread(other, claim))
    return tuple(spreads)


def recipe_text(settings: Settings) -> str:
    """A recipe with these settings, and with the data and model of `central`."""
    recipe = load_recipe(
        "central",
        {
            "name": "what-if",
            "rounds": settings.rounds,
            "data.clients": settings.clients,
            "sample.rate": settings.rate,
            "noise.multiplier": settings.noise,
            "budget.epsilon": settings.epsilon,
            "budget.delta": settings.delta,
        },
    )
    return (
        "# written by fedveil watch, what if; data, model and clip are placeholders for yours\n"
        '# a simulation: for a release, noise.source is "secure"\n'
        f"{to_toml(recipe.model_dump())}"
    )
