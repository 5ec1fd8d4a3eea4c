"""What-if accounting: central DP with Poisson sampling, from its settings, without training.

An answer comes in two steps. `quick_claims` are upper bounds in a fraction of a second: by RDP, and
by PLD on a coarse grid. `full_answer` has the claim that a run of these settings ends with, what
the budget permits, and what the same client-rounds cost when they are spread over other rounds.
Both are cached, so that a slider that is moved back is answered at once.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from fedveil.base.errors import BadInput
from fedveil.pages.charts import Chart, Line, chart_rows, figure
from fedveil.pages.claim_sections import claim_box
from fedveil.pages.html import TEXTS, Content, Markup, number_tiles, section, table, tag, value_text
from fedveil.privacy.accounting.budget import Budget, BudgetLine
from fedveil.privacy.accounting.calibration import central_line, least_noise
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.composition import FINE, rounds_within
from fedveil.privacy.accounting.meaning import Meaning
from fedveil.runs.recipe import load_recipe, to_toml
from fedveil.watch.live_pages import served_page

_COARSE = 10 * FINE
_SPREAD = (1 / 16, 1 / 4, 1 / 2, 1, 2, 4, 16)
"""How many times the rounds the same client-rounds are spread over."""

_DIGITS = (1, 1.1, 1.2, 1.35, 1.5, 1.7, 2, 2.2, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9)

_CACHED = 512


@dataclass(frozen=True)
class Knob:
    """A slider of the page.

    Attributes:
        name: The name in queries.
        smallest, largest: The range.
        initial: The first value.
        label, note: Texts beside and below the slider.
        whole: Whether values are whole numbers.
    """

    name: str
    smallest: float
    largest: float
    initial: float
    label: str
    note: str
    whole: bool = False

    @property
    def slider_values(self) -> list[float]:
        """Return the values of the slider, ascending, about evenly spaced on a logarithmic scale.

        The ends of the range and the initial value are among them.
        """
        powers = range(
            math.floor(math.log10(self.smallest)), math.ceil(math.log10(self.largest)) + 1
        )
        every = {float(f"{digits}e{power}") for power in powers for digits in _DIGITS}
        within = {value for value in every if self.smallest <= value <= self.largest}
        values = within | {self.smallest, self.largest, self.initial}
        return sorted(value for value in values if not self.whole or value == int(value))

    def parse(self, text: str | None) -> float:
        """Return the number in `text`, the initial value for None.

        Raise BadInput if it is no number, off the range, or not whole where whole numbers are
        needed.
        """
        try:
            value = float(text) if text is not None else self.initial
        except ValueError:
            value = math.nan
        if not self.smallest <= value <= self.largest or (self.whole and value != int(value)):
            kind = "a whole number" if self.whole else "a number"
            raise BadInput(
                f"{self.name} is {text!r:.40}: {kind} from {self.smallest:g} to {self.largest:g}"
            )
        return value


KNOBS = tuple(Knob(**fields) for fields in TEXTS["knobs"])


@dataclass(frozen=True)
class Settings:
    """The settings of the run to account for, named as the sliders."""

    clients: int
    rate: float
    rounds: int
    noise: float
    delta: float
    epsilon: float
    parameters: int

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> "Settings":
        """Return the settings of a query. Missing ones get their initial value, others are ignored.

        Raise BadInput off a range.
        """
        values = {knob.name: knob.parse(query.get(knob.name)) for knob in KNOBS}
        whole = {knob.name: int(values[knob.name]) for knob in KNOBS if knob.whole}
        return cls(**{**values, **whole})  # type: ignore[arg-type]

    @property
    def line(self) -> BudgetLine:
        """Return the budget line: Poisson-sampled Gaussian noise under central trust."""
        return central_line(self.rate, self.noise, Budget(self.epsilon, self.delta))

    @property
    def cohort(self) -> float:
        """Return the expected number of clients in a round."""
        return self.rate * self.clients

    @property
    def client_rounds(self) -> float:
        """Return the expected number of participations, over all clients and rounds."""
        return self.cohort * self.rounds

    @property
    def noise_of_mean(self) -> float:
        """Return the std of the noise on a coordinate of the mean update, in clip norms."""
        return self.noise / self.cohort

    @property
    def signal_to_noise(self) -> float:
        """Return cohort / (noise x sqrt(parameters)): norm of mean update / norm of its noise.

        It assumes the best case: all updates point in one direction and are as long as the clip.
        """
        return self.cohort / (self.noise * math.sqrt(self.parameters))


@dataclass(frozen=True)
class FullAnswer:
    """The exact account of settings: the claims of a run, and what the budget permits.

    Attributes:
        claims: One per accountant, PLD first.
        permitted: The number of rounds within the budget.
        needed: The noise multiplier with which all rounds fit, or None if none is enough.
        splits: (settings, claim) of the same client-rounds over other numbers of rounds.
    """

    claims: tuple[PrivacyClaim, ...]
    permitted: int
    needed: float | None
    splits: tuple[tuple[Settings, PrivacyClaim], ...]


@lru_cache(_CACHED)
def quick_claims(settings: Settings) -> tuple[PrivacyClaim, ...]:
    """Return two upper bounds of the claim: by PLD on a coarse grid, then by RDP. Cached."""
    return settings.line.claims(settings.rounds, interval=_COARSE)


@lru_cache(_CACHED)
def full_answer(settings: Settings) -> FullAnswer:
    """Return the claims, the rounds and noise that fit the budget, and the splits. Cached.

    The splits' claims are on a coarse grid. Splits with a sampling rate above 1 are left out.
    """
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
    splits = []
    for times in _SPREAD:
        rounds = round(settings.rounds * times)
        rate = settings.rate * settings.rounds / max(rounds, 1)
        if rounds >= 1 and rate <= 1:
            other = Settings(**{**vars(settings), "rounds": rounds, "rate": rate})
            splits.append((other, other.line.claims(rounds, interval=_COARSE)[0]))
    return FullAnswer(
        claims=line.claims(settings.rounds),
        permitted=rounds_within(line.event, budget.epsilon, budget.delta, line.relation),
        needed=needed,
        splits=tuple(splits),
    )


def recipe_text(settings: Settings) -> str:
    """Return a recipe with these settings as TOML, with the data and model of `central`."""
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


def what_if_page() -> bytes:
    """Return the HTML page, as bytes, with every slider at its first value and no answers yet."""
    button = {"type": "button", "id": "fit", "class_": "quiet"}
    fit = tag("button", "Take the noise that fits the budget", **button, disabled=True)
    recipe = tag("a", "The recipe of these settings", id="recipe", href="./recipe")
    answers = [tag("div", id=f"answer-{name}") for name in ("claim", "numbers", "budget", "splits")]
    return served_page(
        "What if",
        "./what-if",
        tag("h1", "What if"),
        tag("p", TEXTS["about"], class_="sub"),
        tag("div", *map(_slider, KNOBS), class_="knobs", id="knobs"),
        tag("p", recipe, ", for fedveil run what-if.toml. ", fit),
        tag("p", "", id="trouble", role="status", class_="warn"),
        tag("div", *answers, id="answer"),
        script="what_if.js",
    )


def answer_parts(settings: Settings, *, exact: bool) -> str:
    """Return the answer as JSON text {"parts": HTML by element id, "needed": noise or null}.

    Parts are "answer-claim" and, with `exact`, "answer-budget" and "answer-splits", otherwise
    "answer-numbers".

    Args:
        settings: The settings.
        exact: Whether the claims are those that a run ends with, which takes seconds. "needed" is
            then the noise multiplier that fits the budget, null if none does. Otherwise the claim
            is a quick upper bound, and "needed" is null.
    """
    parts: dict[str, Markup] = {}
    needed: float | None = None
    if exact:
        answer = full_answer(settings)
        needed = answer.needed
        others = f"By other accountants: {'; '.join(map(str, answer.claims[1:]))}"
        box = claim_box(Meaning(answer.claims))
        parts["answer-claim"] = tag("div", box, tag("p", others, class_="note"))
        parts["answer-budget"] = _budget_section(settings, answer)
        parts["answer-splits"] = _splits_section(settings, answer)
    else:
        meaning = Meaning(quick_claims(settings))
        parts["answer-claim"] = tag(
            "div", claim_box(meaning), tag("p", TEXTS["soon"], class_="note")
        )
        parts["answer-numbers"] = _round_numbers(settings)
    texts = {name: part.text for name, part in parts.items()}
    return json.dumps({"parts": texts, "needed": needed})


def _slider(knob: Knob) -> Markup:
    """Return the slider of a knob with its label, value and note."""
    values = knob.slider_values
    at = min(range(len(values)), key=lambda k: abs(values[k] - knob.initial))
    texts = [value_text(value) for value in values]
    return tag(
        "div",
        tag("label", knob.label, tag("output", texts[at], for_=knob.name), for_=knob.name),
        tag(
            "input",
            type="range",
            id=knob.name,
            min=0,
            max=len(values) - 1,
            step=1,
            value=at,
            aria_valuetext=texts[at],
            aria_describedby=f"{knob.name}-note",
            data_values=" ".join(map(repr, values)),
            data_texts=" ".join(texts),
        ),
        tag("p", knob.note, class_="note", id=f"{knob.name}-note"),
        class_="knob",
    )


def _round_numbers(settings: Settings) -> Markup:
    """Return noise, signal and participations, with a warning if delta is at least 1 / clients."""
    numbers = (
        (settings.noise_of_mean, "clip norms: std of the noise on a coordinate of the mean update"),
        (settings.signal_to_noise, "signal to noise of a round, at most"),
        (settings.cohort, "clients in a round, as expected"),
        (settings.client_rounds, "client-rounds in all, as expected"),
    )
    warning = None
    if settings.delta >= 1 / settings.clients:
        text = TEXTS["large_delta"].format(settings=settings)
        warning = tag("p", text, class_="warn")
    return tag("div", warning, number_tiles(numbers), tag("p", TEXTS["best_signal"], class_="note"))


def _budget_section(settings: Settings, answer: FullAnswer) -> Markup:
    """Return the section on the rounds and the noise that fit the budget."""
    claim, limit = answer.claims[0], settings.epsilon
    if claim.epsilon <= limit:
        text = f"All {settings.rounds:,} rounds fit: {claim.left_of(limit)} would be left."
    elif answer.permitted:
        text = f"The budget ends the run after {answer.permitted:,} of {settings.rounds:,} rounds."
    else:
        text = "Not even one round fits the budget: fedveil run refuses this."
    words = tag("p", text, class_=None if claim.epsilon <= limit else "warn")
    noise = "No noise multiplier meets the budget over all rounds."
    if answer.needed is not None:
        noise = f"A noise multiplier of {answer.needed:.4g} meets it over all {settings.rounds:,}."
    rounds = f"With this noise it permits {answer.permitted:,} rounds."
    return section("The budget", words, tag("p", noise, " ", rounds))


def _splits_section(settings: Settings, answer: FullAnswer) -> Markup:
    """Return the section with epsilon over the number of rounds: a table and a chart."""
    terms = answer.claims[0].full_terms
    rows: list[dict[str, Content]] = [
        {
            "rounds": split.rounds,
            "clients in a round": split.cohort,
            f"epsilon {terms}": claim.rounded_epsilon,
            "noise on a coordinate, in clip norms": split.noise_of_mean,
            "signal to noise, at most": split.signal_to_noise,
        }
        for split, claim in answer.splits
    ]
    points = [(float(split.rounds), claim.epsilon) for split, claim in answer.splits]
    chart = Chart(
        id="split",
        title=f"Epsilon of the same client-rounds {terms}",
        x_label="rounds that they are spread over",
        y_label="epsilon spent",
        lines=[Line("epsilon spent", points)],
        levels=[("the budget", settings.epsilon)],
        log_x=len(points) > 1,
        from_zero=True,
    )
    numbers = table(rows, f"{value_text(settings.client_rounds)} client-rounds", wide=True)
    charts = chart_rows([figure(chart)], tag("p", TEXTS["splits"]))
    return section("What these client-rounds cost", charts, numbers)
