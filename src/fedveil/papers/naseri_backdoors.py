"""Naseri et al. 2022, backdoors: which defences keep an attacker's backdoor out, and at what cost.

The paper's question in sizes of our own: its result tables were not readable, so no number of it
stands here. One boosted attacker is in every round; rows are defences, columns what the main task
and the backdoor come to. Later work found attacks that comply with DP and pass (Ring, 2026): a low
number here is about these attacks, not about all.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure

from fedveil.attacks.certificate import BASE_RATE, in_words
from fedveil.papers import naseri
from fedveil.papers.naseri import TEXTS, UNPUBLISHED, WEAK, Defence, PaperFederation, privacy
from fedveil.papers.reproduction import Experiment, Item, Page, PaperStatement
from fedveil.papers.sweep_results import claim_of, learning_curve, meaning, percent
from fedveil.tuning.figures import PERCENT, Panel, Series, claim_terms, draw, stroke
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import Mean
from fedveil.tuning.sweep import Sweep

EPSILONS = ("1", "4", "20")
WORKS, LOST, LESS = 80.0, 5.0, 10.0
"""A backdoor works from this percentage of triggered records on. An attack may cost the main task
fewer points than the second number. A defence works if it takes more points than the third."""

MAIN, BACKDOOR = "accuracy", "backdoor"
_POINTS = 5

NOBODY, UNDEFENDED, BOUND, CENTRAL = "nobody attacks", "no defence", "norm bound", "central DP"
LOCAL = "DP-SGD in clients, attacker: "
NOISES = ("comply", "skip", "hide")
"""How attackers treat the noise that they should add."""
ATTACKERS, BOOST = 4, 1000.0
"""The number of attackers and their boost where every report is noised: one would be lost."""
GRADIENTS = f"LDP-SGD, {ATTACKERS} attackers: "


@dataclass(frozen=True)
class Attacker:
    """The training and boost of the attacker in a round.

    Attributes:
        lr, epochs: Learning rate and passes. None trains as honest clients do.
        share: The share of its records that teach the backdoor.
        boost: The factor on its update. None is the factor that replaces the model.
    """

    lr: float | None = None
    epochs: int | None = None
    share: float = 0.5
    boost: float | None = None

    def recipe_overrides(self, *, complying: bool = False) -> list[str]:
        """Return the overrides `attack.key=value` of the recipe. Fields that are None are left out.

        With `complying`, `lr` and `epochs` are left out too.
        """
        own = {"lr": self.lr, "epochs": self.epochs}
        always = {"share": self.share, "boost": self.boost}
        pairs = (always if complying else own | always).items()
        return [f"attack.{key}={value}" for key, value in pairs if value is not None]

    def __str__(self) -> str:
        rate = "" if self.lr is None else f" at learning rate {self.lr:g}"
        passes = "" if self.epochs is None else f", {self.epochs} passes over its records"
        times = (
            "the number of clients per round over the server's learning rate, which replaces the "
            "model if everybody else stands still"
            if self.boost is None
            else f"{self.boost:g}"
        )
        return (
            f"{self.share:.0%} of what it learns from teaches the backdoor; the rest are its own "
            f"honest records. It trains {f'{rate}{passes}'.strip(' ,') or 'as honest clients do'}, "
            f"and sends its update times {times}"
        )


@dataclass(frozen=True)
class Arena:
    """A federation and a backdoor in it.

    Attributes:
        name: The name of the item, without "backdoor-".
        title: The title of the page.
        paper_federation: Data, model and training.
        backdoor_text: The backdoor in words.
        attack_keys: The backdoor as overrides of the recipe.
        attacker: How the attacker trains.
        left_out: Names of defences that are not run here, to save time.
    """

    name: str
    title: str
    paper_federation: PaperFederation
    backdoor_text: str
    attack_keys: tuple[str, ...]
    attacker: Attacker = Attacker()
    left_out: tuple[str, ...] = ()


def arena(name: str, experiment: Experiment) -> Arena:
    """Return the arena `name` of naseri.toml at the experiment's scale."""
    fields = naseri.TABLES["arenas"][name]
    return Arena(
        name,
        fields["title"],
        naseri.federation(fields["federation"], experiment),
        fields["backdoor_text"],
        tuple(fields["attack_keys"]),
        Attacker(**fields.get("attacker", {})),
        tuple(fields.get("left_out", ())),
    )


ARENAS: dict[str, Callable[[Experiment], Arena]] = {
    name: partial(arena, name) for name in naseri.TABLES["arenas"]
}
"""Functions that return an arena at the scale of an experiment, by the name of the arena."""


class Rates(NamedTuple):
    """The main task's test accuracy, and the share of triggered records misled, in percent."""

    main: Mean
    backdoor: Mean


@dataclass(frozen=True)
class DefenceResult:
    """A defence and its finished sweep, with one cell for each epsilon, or one without epsilons."""

    defence: Defence
    sweep: Sweep

    def at_end(self, metric: str) -> list[Mean]:
        """Return the final mean of a test metric in percent, one for each epsilon.

        A defence without epsilons has one.
        """
        return [percent(self.sweep, cell, metric) for cell in range(len(self.sweep.cells))]

    @property
    def cell_rates(self) -> list[Rates]:
        """Return the final rates, one for each epsilon. A defence without epsilons has one."""
        return list(map(Rates, self.at_end(MAIN), self.at_end(BACKDOOR)))


def backdoor(arena_of: Callable[[Experiment], Arena], experiment: Experiment) -> Page:
    """Run every defence of one arena against its backdoor, and return their page.

    `arena_of` returns the arena at the experiment's scale.
    """
    arena, repetitions = arena_of(experiment), experiment.repetitions(3, 5)
    page, results = Page(arena.title), _run_defences(experiment, arena, repetitions)
    claims = [claim_of(one.sweep) for one in results.values() if one.defence.private]
    page.setting_names += [*settings_text(arena, repetitions), meaning(*claims)]
    rows = []
    for name, result in results.items():
        for prepared, rates in zip(result.sweep.prepared, result.cell_rates, strict=True):
            claimed = "; ".join(c.short for c in prepared.shown_claims) or "nothing claimed"
            rows.append((name, claimed, str(rates.main), str(rates.backdoor)))
    page.add_table(("defence", "claim", "accuracy, main task", "backdoor"), rows)
    page.statements += findings(
        results[NOBODY].cell_rates[0],
        results[UNDEFENDED].cell_rates[0],
        results[BOUND].cell_rates[0],
        results[CENTRAL].cell_rates,
        {how: results[f"{GRADIENTS}{how}"].cell_rates[0] for how in NOISES},
    )
    page.figures[f"naseri-backdoor-{arena.name}.png"] = _figure(arena, results)
    certificates = [
        in_words(prepared.headline_claim, BASE_RATE, drawn=True)
        for prepared in results[CENTRAL].sweep.prepared
    ]
    page.page_notes += notes(certificates)
    return page


def settings_text(arena: Arena, repetitions: int) -> list[str]:
    """Return Markdown paragraphs on federation, backdoor, attacker, rows and columns.

    `repetitions` is the number of trainings of each cell.
    """
    left_out = TEXTS["left_out"].format(names="; ".join(arena.left_out)) if arena.left_out else ""
    values = {"arena": arena, "attackers": ATTACKERS, "left_out": left_out}
    values |= {"rows": "\n".join(f"- {line}" for line in legend(arena))}
    values |= {"repetitions": repetitions, "unpublished": UNPUBLISHED}
    return [text.format(**values) for text in TEXTS["settings"]]


def notes(certificates: Sequence[str]) -> list[str]:
    """Return Markdown paragraphs on the certificates of central DP, and on the table's limits.

    `certificates` are sentences, one for each epsilon.
    """
    texts = "\n".join(f"- {text}" for text in certificates)
    return [TEXTS["certificates"].format(base_rate=BASE_RATE, certificates=texts), TEXTS["limits"]]


def findings(
    nobody: Rates,
    undefended: Rates,
    bound: Rates,
    central: Sequence[Rates],
    noises: Mapping[str, Rates],
) -> list[PaperStatement]:
    """Judge three statements about the backdoor.

    Args:
        nobody: Rates without an attacker.
        undefended: Rates without a defence.
        bound: Rates with a norm bound.
        central: Rates with central DP, in the order of `EPSILONS`.
        noises: Rates with LDP-SGD, by how attackers treat the noise.
    """
    works, gradients = undefended.backdoor.value, {h: r.backdoor for h, r in noises.items()}
    lost = nobody.main.value - undefended.main.value
    stopped = (bound, *central)

    def cost(rates: Rates) -> str:
        """Return "RATE % for N points": the backdoor's rate, and points lost by the main task."""
        points = nobody.main.value - rates.main.value
        return f"{rates.backdoor.value:.1f} % for {points:.1f} points"

    return [
        PaperStatement(
            "Undefended, one boosted attacker brings the backdoor in and leaves the main task.",
            works > WORKS and lost < LOST,
            f"Rule: above {WORKS:g} %, less than {LOST:g} points lost. Here {works:.1f} % "
            f"({nobody.backdoor.value:.1f} % without an attacker), {lost:.1f} points lost.",
        ),
        PaperStatement(
            "Norm bounding and central DP bring it down.",
            max(rates.backdoor.value for rates in stopped) < works - LESS,
            f"Rule: by more than {LESS:g} points each. Here {cost(bound)} of the main task with "
            "the bound; with central DP "
            + ", ".join(f"{cost(c)} at epsilon {e}" for c, e in zip(central, EPSILONS, strict=True))
            + ".",
        ),
        PaperStatement(
            "Noise that clients add does not hold those who omit it: under LDP-SGD, attackers "
            "that skip it do better than those that comply.",
            gradients["skip"].value > gradients["comply"].value + LESS,
            f"Rule: by more than {LESS:g} points. Here {gradients['skip']} % against "
            f"{gradients['comply']} %; those that hide in it have {gradients['hide']} %.",
        ),
    ]


def defences(arena: Arena) -> list[Defence]:
    """Return the rows of an arena's table, each against the same backdoor.

    The names in `arena.left_out` are left out.
    """
    honest = arena.paper_federation.cohort - ATTACKERS
    parts = {
        "attack": [*arena.attack_keys, *arena.attacker.recipe_overrides()],
        "complying": [
            *arena.attack_keys,
            *arena.attacker.recipe_overrides(complying=True),
            "attack.noise=comply",
        ],
        "few": [*arena.attack_keys, f"attack.attackers={ATTACKERS}"],
        "boost": [f"attack.boost={BOOST}"],
        "shuffle": [f"shuffle.minimum={honest}", f"shuffle.dishonest={ATTACKERS}"],
    }
    every = naseri.defence_rows("backdoors", arena.paper_federation, parts)
    return [row for row in every if row.name not in arena.left_out]


def legend(arena: Arena) -> list[str]:
    """Return an explanation of each kind of row, in Markdown, without list marks."""
    names = {"nobody": NOBODY, "undefended": UNDEFENDED, "bound": BOUND, "central": CENTRAL}
    values = {**names, "where": arena.paper_federation, "weak": WEAK, "boost": BOOST}
    return [text.format(**values) for text in TEXTS["legend"]]


ITEMS: dict[str, Item] = {
    **{f"backdoor-{name}": partial(backdoor, arena_of) for name, arena_of in ARENAS.items()},
    "privacy": privacy,
}


def _run_defences(
    experiment: Experiment, arena: Arena, repetitions: int
) -> dict[str, DefenceResult]:
    """Run every defence of an arena, and return results by name.

    `repetitions` is the number of trainings of each cell. Finished sweeps are not run again.
    """
    every, results = f"evaluate.every={-(-arena.paper_federation.rounds // _POINTS)}", {}
    for row in defences(arena):
        axes = [Axis("budget.epsilon", EPSILONS)] if row.private else []
        words = "-".join(re.findall(r"[a-z0-9]+", row.name.lower()))
        name, keys = f"naseri-{arena.name}-{words}", (*row.recipe_overrides, every)
        sweep = experiment.sweep(name, row.recipe, keys, axes, repetitions, curves=True)
        results[row.name] = DefenceResult(row, sweep)
    return results


def _figure(arena: Arena, results: Mapping[str, DefenceResult]) -> Figure:
    """Draw both metrics, a row each: by round without a claim, and by epsilon with one."""
    panels = [panel(results, up) for up in _UPS for panel in (_over_rounds, _over_epsilon)]
    claims = [claim_of(one.sweep) for one in results.values() if one.defence.private]
    said = "One attacker in every round; after Naseri et al. 2022, in our sizes."
    return draw(f"{arena.title}, by defence", [said, *claim_terms(claims)], panels, columns=2)


def _over_rounds(results: Mapping[str, DefenceResult], metric: str) -> Panel:
    """Return the panel of a metric during training, in percent, for defences without a claim."""
    shown = [one for one in results.values() if not one.sweep.prepared[0].shown_claims]
    lines = []
    for i, one in enumerate(shown):
        rounds, means = learning_curve(one.sweep, 0, metric, 100)
        lines.append(Series(one.defence.name, rounds, means, stroke(i)))
    title = "Defences that claim nothing" if metric == MAIN else ""
    return Panel(lines, "rounds done", _UPS[metric], title, within=PERCENT)


def _over_epsilon(results: Mapping[str, DefenceResult], metric: str) -> Panel:
    """Return the panel of a metric at the end by epsilon, in percent, for private defences."""
    claimless = sum(not one.sweep.prepared[0].shown_claims for one in results.values())
    places, series = [float(epsilon) for epsilon in EPSILONS], []
    for i, (name, one) in enumerate((n, r) for n, r in results.items() if r.defence.private):
        inside = f"DP-SGD, {name.removeprefix(LOCAL)}, per record"
        label = f"{CENTRAL}, per client" if name == CENTRAL else inside
        series.append(Series(label, places, one.at_end(metric), stroke(claimless + i)))
    return Panel(
        series,
        "epsilon (for whom: see the legend)",
        _UPS[metric],
        "Defences with a claim, at the end" if metric == MAIN else "",
        levels={"no\ndefence": results[UNDEFENDED].at_end(metric)[0].value},
        log_x=True,
        within=PERCENT,
    )


_UPS = {MAIN: "main task:\ntest accuracy (%)", BACKDOOR: "backdoor: triggered\nrecords misled (%)"}
