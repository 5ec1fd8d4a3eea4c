"""The what-if page: sliders, and the account of their settings."""

import json
from pathlib import Path

from fedveil.pages.charts import Chart, Line, figure
from fedveil.pages.claim_sections import claim_box
from fedveil.pages.html import Content, Markup, file_text, number_text, section, table, tag, tiles
from fedveil.privacy.accounting.meaning import Meaning
from fedveil.watch.pages import served
from fedveil.watch.what_if import KNOBS, Knob, Refined, Settings, quick, refined

_HERE = Path(__file__).parent
_ABOUT = (
    "Central DP with Gaussian noise: each client joins a round with the probability that is set, "
    "its update is clipped, and a trusted server adds the noise. Nothing is trained and no data "
    "are read: this is accounting alone."
)
_SOON = "A quick upper bound; the exact account follows."
_SNR = (
    "Signal to noise is shown at its best: every update as long as the clip norm, all of them in "
    "one direction. A run does worse; below 1 the noise of a round is longer than what is learnt."
)
_SPLITS = (
    "The same expected client-rounds, over fewer or more rounds with the same noise multiplier. "
    "More rounds of fewer clients cost less epsilon, and every round has more noise."
)


def what_if_page() -> bytes:
    """The page, with every slider where it begins."""
    return served(
        "What if",
        "./what-if",
        tag("h1", "What if"),
        tag("p", _ABOUT, class_="sub"),
        tag("div", *map(_knob, KNOBS), class_="knobs", id="knobs"),
        tag(
            "p",
            tag("a", "The recipe of these settings", id="recipe", href="./recipe"),
            ", for fedveil run what-if.toml. ",
            tag(
                "button",
                "Take the noise that fits the budget",
                type="button",
                id="fit",
                class_="quiet",
                disabled=True,
            ),
        ),
        tag("p", "", id="trouble", role="status", class_="warn"),
        tag(
            "div",
            *(tag("div", id=f"answer-{name}") for name in ("claim", "numbers", "budget", "splits")),
            id="answer",
        ),
        script=file_text(_HERE / "what_if.js"),
    )


def answer_parts(settings: Settings, *, fine: bool) -> str:
    """The parts of the page as JSON: the quick ones, or with `fine` those that take longer."""
    parts: dict[str, Markup] = {}
    needed: float | None = None
    if fine:
        answer = refined(settings)
        needed = answer.needed
        parts["answer-claim"] = tag(
            "div", claim_box(Meaning.from_claims(answer.claims)), _others(answer)
        )
        parts["answer-budget"] = _budget(settings, answer)
        parts["answer-splits"] = _splits(settings, answer)
    else:
        meaning = Meaning.from_claims(quick(settings))
        parts["answer-claim"] = tag("div", claim_box(meaning), tag("p", _SOON, class_="note"))
        parts["answer-numbers"] = _numbers(settings)
    texts = {name: part.text for name, part in parts.items()}
    return json.dumps({"parts": texts, "needed": needed})


def _knob(knob: Knob) -> Markup:
    values = knob.values
    at = min(range(len(values)), key=lambda k: abs(values[k] - knob.start))
    texts = [number_text(value) for value in values]
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


def _numbers(settings: Settings) -> Markup:
    numbers = (
        (settings.noise_of_mean, "clip norms: std of the noise on a coordinate of the mean update"),
        (settings.signal_to_noise, "signal to noise of a round, at most"),
        (settings.cohort, "clients in a round, as expected"),
        (settings.client_rounds, "client-rounds in all, as expected"),
    )
    warning = None
    if settings.delta >= 1 / settings.clients:
        warning = tag(
            "p",
            f"A delta of {settings.delta:g} permits publishing one of {settings.clients:,} clients "
            "outright: fedveil run refuses it.",
            class_="warn",
        )
    return tag("div", warning, tiles(numbers), tag("p", _SNR, class_="note"))


def _others(answer: Refined) -> Markup:
    return tag("p", "By other accountants: ", "; ".join(map(str, answer.claims[1:])), class_="note")


def _budget(settings: Settings, answer: Refined) -> Markup:
    claim, limit = answer.claims[0], settings.epsilon
    if claim.epsilon <= limit:
        said = f"All {settings.rounds:,} rounds fit: {claim.left_of(limit)} would be left."
    elif answer.permitted:
        said = f"The budget ends the run after {answer.permitted:,} of {settings.rounds:,} rounds."
    else:
        said = "Not even one round fits the budget: fedveil run refuses this."
    words = tag("p", said, class_=None if claim.epsilon <= limit else "warn")
    noise = "No noise multiplier meets the budget over all rounds."
    if answer.needed is not None:
        noise = f"A noise multiplier of {answer.needed:.4g} meets it over all {settings.rounds:,}."
    rounds = f"With this noise it permits {answer.permitted:,} rounds."
    return section("The budget", words, tag("p", noise, " ", rounds))


def _splits(settings: Settings, answer: Refined) -> Markup:
    terms = answer.claims[0].full_terms
    rows: list[dict[str, Content]] = [
        {
            "rounds": split.settings.rounds,
            "clients in a round": split.settings.cohort,
            f"epsilon {terms}": split.claim.value,
            "noise on a coordinate, in clip norms": split.settings.noise_of_mean,
            "signal to noise, at most": split.settings.signal_to_noise,
        }
        for split in answer.splits
    ]
    points = [(float(s.settings.rounds), s.claim.epsilon) for s in answer.splits]
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
    numbers = table(rows, f"{number_text(settings.client_rounds)} client-rounds", wide=True)
    return section(
        "What these client-rounds cost",
        tag("p", _SPLITS),
        numbers,
        tag("div", figure(chart), class_="pair"),
    )
