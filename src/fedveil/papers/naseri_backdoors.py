"""Naseri et al. 2022, backdoors: which defences keep an attacker's backdoor out, and at what cost.

The paper's question in sizes of our own: its result tables were not readable, so no number of it
stands here. One boosted attacker is in every round; rows are defences, columns what the main task
and the backdoor come to. Later work found attacks that comply with DP and pass (Ring, 2026): a low
number here is about these attacks, not about all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from fedveil.attacks.certificate import BASE_RATE, in_words
from fedveil.papers.experiment import Experiment, Item
from fedveil.papers.naseri import DELTA, UNPUBLISHED, WEAK, Deployment, federations
from fedveil.papers.page import Finding, Page, TextTable
from fedveil.tuning.axes import Axis
from fedveil.tuning.figures import COLOURS, png
from fedveil.tuning.statistics import Mean, mean_of
from fedveil.tuning.sweep import Sweep

EPSILONS = ("1", "4", "20")
WORKS, LOST = 80.0, 5.0
"""Percent of held-out triggered records from which a backdoor works; points that may be lost."""

NOBODY, UNDEFENDED, BOUND, CENTRAL = "nobody attacks", "no defence", "norm bound", "central DP"
UNIFORM = "server.weights=uniform"

_LOCAL = ("comply", "skip")


@dataclass(frozen=True)
class Arena:
    """A deployment, and the backdoor that is brought into it."""

    deployment: Deployment
    backdoor: str
    attack: tuple[str, ...]


@dataclass(frozen=True)
class Defence:
    """A defence: a recipe and its keys, at every epsilon where it is private."""

    name: str
    recipe: str
    settings: tuple[str, ...]
    private: bool = False


def digits(experiment: Experiment) -> Arena:
    """Two pixels of a corner on the embedded digits."""
    _, found = federations(experiment)
    corner = ("attack.size=2", "attack.row=-2", "attack.column=-2")
    return Arena(
        found,
        "a bright square of 2 x 2 pixels in the corner makes any digit a 0",
        ("attack.kind=pixel", "attack.target=0", *corner),
    )


def femnist(experiment: Experiment) -> Arena:
    """Ten writers' 7s are to be 1s."""
    found, _ = federations(experiment)
    return Arena(
        replace(found, cohort=30),
        "the 7s of ten writers are to be 1s, of which the attacker knows one half and the other "
        "is measured; their writers are honest clients and label all of them 7",
        ("attack.kind=writers", "attack.source=7", "attack.target=1", "attack.writers=10"),
    )


def rows(arena: Arena) -> list[Defence]:
    """The defences, each against the same attacker."""
    deployment, attack = arena.deployment, arena.attack
    plain = (*deployment.shared, *deployment.plain, *deployment.fixed, *attack, UNIFORM)
    bound, delta = f"clip.value={deployment.bound}", f"budget.delta={DELTA}"
    share = f"sample.rate={deployment.cohort / deployment.clients}"
    inside = (
        *(*deployment.shared, *deployment.fixed, *attack, delta),
        f"sample.max_participations={deployment.cap}",
        f"client.rate={deployment.rate}",
        f"client.steps={deployment.steps}",
        f"client.lr={deployment.private_lr}",
        f"clip.value={deployment.clip}",
        UNIFORM,
    )
    reports = (
        *(*deployment.shared, *deployment.fixed, *attack, delta, "client.kind=gradient"),
        f"sample.max_participations={deployment.cap}",
        "clip.value=0.05",
        "server.lr=40.0",
        "budget.epsilon=50",
        "attack.boost=1000.0",
    )
    robust = [
        Defence(name, "fedavg", (*plain, f"server.aggregate={kind}"))
        for name, kind in (
            ("median", "median"),
            ("trimmed mean", "trimmed-mean"),
            ("Krum", "krum"),
            ("multi-Krum", "multi-krum"),
            ("FLAME's clusters", "flame"),
        )
    ]
    return [
        Defence(NOBODY, "fedavg", (*plain, "attack.attackers=0")),
        Defence(UNDEFENDED, "fedavg", plain),
        Defence(BOUND, "norm-bound", (*plain, bound)),
        Defence("norm bound, projected", "norm-bound", (*plain, bound, "attack.project=true")),
        Defence("weak DP", "weak-dp", (*plain, bound, f"noise.multiplier={WEAK}")),
        *robust,
        Defence(
            CENTRAL,
            "central",
            (*deployment.shared, *deployment.plain, share, bound, delta, *attack),
            private=True,
        ),
        *(
            Defence(
                f"DP-SGD in clients, attacker: {how}",
                "dp-sgd",
                (*inside, f"attack.noise={how}"),
                True,
            )
            for how in _LOCAL
        ),
        *(
            Defence(
                f"LDP-SGD, 4 attackers: {how}",
                "ldp-sgd",
                (*reports, "attack.attackers=4", f"attack.noise={how}"),
            )
            for how in (*_LOCAL, "hide")
        ),
    ]


def backdoor_digits(experiment: Experiment) -> Page:
    """A pixel trigger on the embedded digits."""
    return _page(experiment, "Backdoor: a pixel trigger on digits", digits(experiment), "digits")


def backdoor_femnist(experiment: Experiment) -> Page:
    """A semantic backdoor on FEMNIST."""
    return _page(experiment, "Backdoor: ten writers' 7s", femnist(experiment), "femnist")


ITEMS: dict[str, Item] = {
    "backdoor-digits": backdoor_digits,
    "backdoor-femnist": backdoor_femnist,
}


def _page(experiment: Experiment, title: str, arena: Arena, name: str) -> Page:
    page, repeat = Page(title), experiment.repetitions(3, 5)
    boosted = "clients per round over the server's learning rate"
    page.settings += [
        f"{arena.deployment}.",
        f"The backdoor: {arena.backdoor}. One attacker, in every round beside the clients that are "
        f"drawn, half of whose records teach the backdoor and who sends its update times {boosted} "
        f"(LDP-SGD: four attackers, times 1000, clipped where they comply). {repeat} repetitions, "
        "mean +- half of the 95 % interval, in percent; the paper's numbers are "
        f"{UNPUBLISHED}.",
    ]
    table: list[tuple[str, ...]] = []
    found: dict[str, tuple[list[Mean], list[Mean]]] = {}
    certificates: list[str] = []
    for number, row in enumerate(rows(arena)):
        sweep = experiment.sweep(
            f"naseri-{name}-{number}-{row.recipe}",
            row.recipe,
            row.settings,
            [Axis("budget.epsilon", EPSILONS)] if row.private else [],
            repeat,
        )
        found[row.name] = _percents(sweep, "accuracy"), _percents(sweep, "backdoor")
        for cell, (main, backdoor) in enumerate(zip(*found[row.name], strict=True)):
            claim = sweep.prepared[cell].claim
            told = "nothing claimed" if claim is None else claim.short
            table.append((row.name, told, str(main), str(backdoor)))
        if row.name == CENTRAL:
            certificates += [
                in_words(prepared.claim, BASE_RATE, drawn=True) for prepared in sweep.prepared
            ]
    headers = ("defence", "claim", "accuracy, main task", "backdoor")
    page.tables.append(TextTable(headers, tuple(table)))
    page.findings += _findings(found)
    page.figures[f"naseri-backdoor-{name}.png"] = _figure(found)
    page.notes += [
        "**What the claim itself certifies** against attackers that take part only when they are "
        "drawn (here they are in every round, which no claim covers), if the backdoor works by "
        f"itself for {BASE_RATE:.0%} of records: " + "; ".join(certificates),
        "Backdoors are measured against these attackers. Attackers that adapt to a defence, or "
        "that comply with the noise and cooperate, have been published since and do better.",
    ]
    return page


def _findings(found: dict[str, tuple[list[Mean], list[Mean]]]) -> Sequence[Finding]:
    clean, free = found[NOBODY][0][0].value, found[UNDEFENDED]
    bound, central = found[BOUND][1][0].value, [mean.value for mean in found[CENTRAL][1]]
    return [
        Finding(
            "Undefended, one boosted attacker brings the backdoor in and leaves the main task.",
            free[1][0].value > WORKS and clean - free[0][0].value < LOST,
            f"Rule: above {WORKS:g} %, less than {LOST:g} points lost. Here "
            f"{free[1][0].value:.1f} %, {clean - free[0][0].value:.1f} points.",
        ),
        Finding(
            "Norm bounding and central DP bring it down.",
            max(bound, *central) < free[1][0].value - 10,
            f"Rule: by more than 10 points each. Here {bound:.1f} % with the bound, "
            + ", ".join(f"{c:.1f} %" for c in central)
            + f" at epsilon {', '.join(EPSILONS)}.",
        ),
    ]


def _figure(found: dict[str, tuple[list[Mean], list[Mean]]]) -> bytes:
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    at = figure.subplots()
    for i, (name, (main, backdoor)) in enumerate(found.items()):
        at.plot(
            [mean.value for mean in backdoor],
            [mean.value for mean in main],
            "o-" if len(main) > 1 else "o",
            color=COLOURS[i % len(COLOURS)],
            label=name,
        )
    at.set(xlabel="backdoor, %", ylabel="accuracy of the main task, %")
    at.legend(fontsize=6, ncols=2)
    at.grid(alpha=0.3)
    return png(figure)


def _percents(sweep: Sweep, metric: str) -> list[Mean]:
    return [
        mean_of([100 * outcome.metrics[metric] for outcome in sweep.outcomes(cell)])
        for cell in range(len(sweep.cells))
    ]
