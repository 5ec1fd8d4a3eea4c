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
from fedveil.papers.naseri import DELTA, UNPUBLISHED, WEAK, Defence, privacy
from fedveil.papers.naseri_arenas import ARENAS, Arena
from fedveil.papers.reproduction import (
    Experiment,
    Item,
    Page,
    PaperStatement,
    claim_of,
    learning_curve,
    meaning,
    percent,
)
from fedveil.tuning.figures import PERCENT, Panel, Series, draw, promises, stroke
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import Mean
from fedveil.tuning.sweep import Sweep

EPSILONS = ("1", "4", "20")
WORKS, LOST, LESS = 80.0, 5.0, 10.0
"""Percent of held-out triggered records from which a backdoor works; points that may be lost;
points by which a defence brings it down at least."""

MAIN, BACKDOOR = "accuracy", "backdoor"
_POINTS = 5

NOBODY, UNDEFENDED, BOUND, CENTRAL = "nobody attacks", "no defence", "norm bound", "central DP"
LOCAL = "DP-SGD in clients, attacker: "
NOISES = ("comply", "skip", "hide")
"""What attackers do about the noise that they are to add."""
LOCAL_EPSILON = 50.0
ATTACKERS, BOOST = 4, 1000.0
"""Where every client's report is noised: one attacker alone is lost among the others."""
GRADIENTS = f"LDP-SGD, {ATTACKERS} attackers: "

_UNIFORM = "server.weights=uniform"
_ROBUST = (
    ("median", "median"),
    ("trimmed mean", "trimmed-mean"),
    ("Krum", "krum"),
    ("multi-Krum", "multi-krum"),
    ("FLAME's clusters", "flame"),
)


class Rates(NamedTuple):
    """In percent: test records answered rightly, triggered ones answered as the attacker wants."""

    main: Mean
    backdoor: Mean


@dataclass(frozen=True)
class DefenceResult:
    """What a defence came to: its sweep, one cell for each epsilon."""

    defence: Defence
    sweep: Sweep

    def at_end(self, metric: str) -> list[Mean]:
        """In percent, for each cell."""
        return [percent(self.sweep, cell, metric) for cell in range(len(self.sweep.cells))]

    @property
    def cell_rates(self) -> list[Rates]:
        """For each cell."""
        return list(map(Rates, self.at_end(MAIN), self.at_end(BACKDOOR)))


Table = Mapping[str, DefenceResult]
"""By the name of the defence."""


def backdoor(arena_of: Callable[[Experiment], Arena], experiment: Experiment) -> Page:
    """One arena: every defence against its backdoor."""
    arena, repeat = arena_of(experiment), experiment.repetitions(3, 5)
    page, results = Page(arena.title), _measured(experiment, arena, repeat)
    claims = [claim_of(one.sweep) for one in results.values() if one.defence.private]
    page.settings += [*settings_text(arena, repeat), meaning(*claims)]
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


def settings_text(arena: Arena, repeat: int) -> list[str]:
    """What was done: federation, backdoor, attacker, and what rows and columns are."""
    short = (
        "\n\nLeft out here, so that the task takes minutes: "
        + "; ".join(arena.left_out)
        + ". The tasks digits and femnist have all rows."
    )
    return [
        f"**Federation.** {arena.federation}.",
        f"**Backdoor.** {arena.backdoor_text}.",
        f"**Attacker.** One, in every round beside the clients that are drawn. {arena.attacker}. "
        "In the rows of LDP-SGD, DP-FedAvg and LDP-FL, where each report is protected by itself, "
        f"there are {ATTACKERS}, who learn as honest clients do from records half of which teach "
        "the backdoor.",
        "**Rows.**\n\n"
        + "\n".join(f"- {line}" for line in legend(arena))
        + (short if arena.left_out else ""),
        "**Columns.** Accuracy on the test records, and the share of triggered test records that "
        f"are answered as the attacker wants; in percent, mean of {repeat} repetitions +- half of "
        "the 95 % interval (Student's t, so wide with few of them). The paper's numbers are "
        f"{UNPUBLISHED}.",
    ]


def notes(certificates: Sequence[str]) -> list[str]:
    """What central DP certifies at each epsilon, and what the table does not say."""
    return [
        "**What the claims of central DP certify by themselves**, whatever the attack, if the "
        f"backdoor works for {BASE_RATE:.0%} of records without attackers. This is about attackers "
        "that take part only when they are drawn; those above are in every round, which no claim "
        "covers.\n\n" + "\n".join(f"- {text}" for text in certificates),
        "**What this does not say.** These are numbers about one simple attacker. Attackers that "
        "adapt to a defence, or that comply with the noise and cooperate, have been published "
        "since and do better: a low number in this table is no defence.",
    ]


def findings(
    nobody: Rates,
    undefended: Rates,
    bound: Rates,
    central: Sequence[Rates],
    noises: Mapping[str, Rates],
) -> list[PaperStatement]:
    """What is to be seen: `central` in the order of `EPSILONS`, LDP-SGD by what attackers do."""
    works, gradients = undefended.backdoor.value, {h: r.backdoor for h, r in noises.items()}
    lost = nobody.main.value - undefended.main.value
    stopped = (bound, *central)

    def cost(rates: Rates) -> str:
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
            "Noise that clients add does not hold those who leave it out: under LDP-SGD, attackers "
            "that skip it do better than those that comply.",
            gradients["skip"].value > gradients["comply"].value + LESS,
            f"Rule: by more than {LESS:g} points. Here {gradients['skip']} % against "
            f"{gradients['comply']} %; those that hide in it have {gradients['hide']} %.",
        ),
    ]


def defences(arena: Arena) -> list[Defence]:
    """The rows of an arena's table, each against the same backdoor."""
    every = [*_plain(arena), *_private(arena), *_at_clients(arena)]
    return [row for row in every if row.name not in arena.left_out]


def legend(arena: Arena) -> list[str]:
    """What the rows are, in words."""
    where = arena.federation
    return [
        f"*{NOBODY}*: the same training without an attacker, so what the model does by itself.",
        f"*{UNDEFENDED}*: the server takes the mean of the updates.",
        f"*{BOUND}*: an update longer than {where.bound:g} is scaled down to that length. "
        "*projected*: the attacker knows the bound, trains within it and loses nothing to it. "
        f"*weak DP*: the bound, and Gaussian noise of {WEAK:g} times it on the sum, too little for "
        "a claim.",
        "*median*, *trimmed mean*, *Krum*, *multi-Krum*, *FLAME's clusters*: what the server takes "
        "instead of the mean. They look at single updates, so they cannot be combined with noise "
        "for the sum.",
        f"*{CENTRAL}*: clients are drawn independently, the server applies the same bound to all "
        "updates, the attacker's too, and adds noise for the claim.",
        "*DP-SGD in clients*: each client trains by DP-SGD, which protects its records from the "
        "server and puts no bound on its update. An attacker that *complies* does the same and "
        "multiplies what comes out; one that *skips* trains without clip and noise.",
        "*LDP-SGD*: each client clips one gradient and adds noise to it. Attackers multiply "
        f"theirs by {BOOST:g}. Those that *comply* clip and add noise after that; those that "
        "*skip* do neither; those that *hide* clip, and by twos add the same noise with opposite "
        "signs: each report looks as it should, and in the sum the noise is gone.",
        "*DP-FedAvg*, *LDP-FL*: each client protects what it sends, with Gaussian noise on its "
        "update or by sending one of two values for each weight. Whoever *skips* sends the value "
        "that is on its side.",
    ]


def _plain(arena: Arena) -> list[Defence]:
    """The defences without a claim."""
    where = arena.federation
    training = (*where.shared, *where.plain, *where.fixed)
    plain = (*training, *arena.attack_keys, *arena.attacker.recipe_keys(), _UNIFORM)
    bounded = (*plain, f"clip.value={where.bound}")
    return [
        Defence(NOBODY, "fedavg", (*plain, "attack.attackers=0")),
        Defence(UNDEFENDED, "fedavg", plain),
        Defence(BOUND, "norm-bound", bounded),
        Defence("norm bound, projected", "norm-bound", (*bounded, "attack.project=true")),
        Defence("weak DP", "weak-dp", (*bounded, f"noise.multiplier={WEAK}")),
        *(Defence(name, "fedavg", (*plain, f"server.aggregate={kind}")) for name, kind in _ROBUST),
    ]


def _private(arena: Arena) -> list[Defence]:
    """The paper's two, at every epsilon."""
    where, delta = arena.federation, f"budget.delta={DELTA}"
    own = (*arena.attack_keys, *arena.attacker.recipe_keys())
    complying = (
        *arena.attack_keys,
        *arena.attacker.recipe_keys(complying=True),
        "attack.noise=comply",
    )
    sampled = (f"sample.rate={where.cohort / where.clients}", f"clip.value={where.bound}")
    central = (*where.shared, *where.plain, *own, delta, *sampled)
    inside = (*where.shared, *where.fixed, *where.inside, delta, _UNIFORM)
    return [
        Defence(CENTRAL, "central", central, private=True),
        Defence(f"{LOCAL}comply", "dp-sgd", (*inside, *complying), private=True),
        Defence(f"{LOCAL}skip", "dp-sgd", (*inside, *own, "attack.noise=skip"), private=True),
    ]


def _at_clients(arena: Arena) -> list[Defence]:
    """The defences in which every report is noised by its client, against a few attackers."""
    where = arena.federation
    few = (*arena.attack_keys, f"attack.attackers={ATTACKERS}")
    delta, epsilon = f"budget.delta={DELTA}", f"budget.epsilon={LOCAL_EPSILON}"
    local = ("client.kind=gradient", *where.gradients, f"attack.boost={BOOST}")
    gradients = (*where.shared, *where.fixed, *few, delta, epsilon, *local)
    in_turn = ("sample.kind=round-robin", f"sample.size={where.cohort}", "clip.value=0.1")
    steps = (*where.shared, *where.plain, *few, delta, epsilon, *in_turn)
    honest = where.cohort - ATTACKERS
    shuffle = (f"shuffle.minimum={honest}", f"shuffle.dishonest={ATTACKERS}")
    two_point = (*where.shared, *where.plain, *where.fixed, *few, delta, *shuffle)
    skipping = (*two_point, "attack.noise=skip")
    return [
        *(
            Defence(f"{GRADIENTS}{how}", "ldp-sgd", (*gradients, f"attack.noise={how}"))
            for how in NOISES
        ),
        Defence(f"DP-FedAvg, {ATTACKERS} attackers: comply", "dp-fedavg-gaussian", steps),
        Defence(f"LDP-FL, {ATTACKERS} attackers: comply", "ldp-fl", two_point),
        Defence(f"LDP-FL, {ATTACKERS} attackers: skip", "ldp-fl", skipping),
    ]


ITEMS: dict[str, Item] = {
    f"backdoor-{name}": partial(backdoor, arena)
    for name, arena in zip(
        ("digits", "femnist", "writers", "cifar10", "red-cars", "reddit", "sentiment140"),
        ARENAS,
        strict=True,
    )
} | {"privacy": privacy}


def _measured(experiment: Experiment, arena: Arena, repeat: int) -> dict[str, DefenceResult]:
    every = f"evaluate.every={-(-arena.federation.rounds // _POINTS)}"
    return {
        row.name: DefenceResult(
            row,
            experiment.sweep(
                f"naseri-{arena.name}-{_folder(row)}",
                row.recipe,
                (*row.recipe_keys, every),
                [Axis("budget.epsilon", EPSILONS)] if row.private else [],
                repeat,
                curves=True,
            ),
        )
        for row in defences(arena)
    }


def _folder(row: Defence) -> str:
    """The defence's name in letters, digits and hyphens."""
    return "-".join(re.findall(r"[a-z0-9]+", row.name.lower()))


def _figure(arena: Arena, results: Table) -> Figure:
    """Both metrics over rounds where nothing is claimed, and over epsilon where something is."""
    panels = [panel(results, up) for up in _UPS for panel in (_over_rounds, _over_epsilon)]
    claims = [claim_of(one.sweep) for one in results.values() if one.defence.private]
    said = "One attacker in every round; after Naseri et al. 2022, in our sizes."
    return draw(f"{arena.title}, by defence", [said, *promises(claims)], panels, columns=2)


def _over_rounds(results: Table, metric: str) -> Panel:
    shown = [one for one in results.values() if not one.sweep.prepared[0].shown_claims]
    lines = []
    for i, one in enumerate(shown):
        rounds, means = learning_curve(one.sweep, 0, metric, 100)
        lines.append(Series(one.defence.name, rounds, means, stroke(i)))
    title = "Defences that claim nothing" if metric == MAIN else ""
    return Panel(lines, "rounds done", _UPS[metric], title, within=PERCENT)


def _over_epsilon(results: Table, metric: str) -> Panel:
    claimless = sum(not one.sweep.prepared[0].shown_claims for one in results.values())
    private = [one for one in results.values() if one.defence.private]
    places = [float(epsilon) for epsilon in EPSILONS]
    return Panel(
        [
            Series(_named(one), places, one.at_end(metric), stroke(claimless + i))
            for i, one in enumerate(private)
        ],
        "epsilon (for whom: see the legend)",
        _UPS[metric],
        "Defences with a claim, at the end" if metric == MAIN else "",
        levels={"no\ndefence": results[UNDEFENDED].at_end(metric)[0].value},
        log_x=True,
        within=PERCENT,
    )


def _named(one: DefenceResult) -> str:
    if one.defence.name == CENTRAL:
        return f"{CENTRAL}, per client"
    return f"DP-SGD, {one.defence.name.removeprefix(LOCAL)}, per record"


_UPS = {MAIN: "main task:\ntest accuracy (%)", BACKDOOR: "backdoor: triggered\nrecords misled (%)"}
