"""Naseri, Hayes, De Cristofaro, "Local and Central Differential Privacy for Robustness and Privacy
in Federated Learning" (NDSS 2022, arXiv 2009.03561): what the defences cost in accuracy, and what
attackers learn from each. Its backdoors are in `naseri_backdoors.py`.

The paper's grid of defences, in sizes and epsilons of our own: its result tables were not readable,
so no number of it stands here. Its "local" DP protects a record from the server and its central DP
a client from everyone who sees the models, so their epsilons cannot be compared. Privacy is
measured with today's attacks (membership, properties, gradient inversion) and an empirical epsilon.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedveil.audit.audit_command import BOUNDS, COLUMNS, AuditSettings, run_attacks, summary
from fedveil.audit.audit_folder import AuditCache
from fedveil.audit.findings import AUC, Attack, Leak
from fedveil.audit.inversion import InversionAudit
from fedveil.audit.observations import claimed
from fedveil.papers.reproduction import (
    Experiment,
    Item,
    Page,
    PaperStatement,
    claim_of,
    meaning,
    percent,
)
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.tuning.figures import PERCENT, Panel, Series, draw, stroke
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import Mean

EPSILONS, ATTACKED_EPSILONS = ("0.5", "1", "4", "20"), ("1", "8")
"""Of the budgets whose utility is measured, and of those that are attacked."""
DELTA = 1e-5
WEAK = 0.1
NEAR = 2.0
"""Points of accuracy that count as no difference."""
REMEMBERS, LOST = 0.65, 0.03
"""The AUC from which membership is found, and how far from 1/2 it may be where nothing is left."""
UNPUBLISHED = "not readable / not available"

NONE, BOUND, WEAK_DP, LOCAL, CENTRAL = "no defence", "norm bound", "weak DP", "local", "central"
GRADIENTS = "LDP-SGD"


@dataclass(frozen=True)
class PaperFederation:
    """Data, model and training that all defences share.

    Attributes:
        data, title, partition: The data set, its name for people, and the division among clients.
        clients, cohort: Clients in all, and in a round.
        rounds: The number of rounds.
        records: The most records of a client, None for all of its own.
        model_name: The model's name.
        steps, batch, lr: Plain local steps, on so many records (0: all of them), at this rate.
        private_steps, rate, private_lr: Steps of DP-SGD (0: as many as plain ones), each on this
            share of the records, at this rate.
        bound, clip: The bounds of an update, and of an example's gradient in DP-SGD.
        more: Further keys of the recipe.
    """

    data: str
    title: str
    partition: str
    clients: int
    cohort: int
    rounds: int
    records: int | None = None
    model_name: str = "softmax"
    steps: int = 10
    lr: float = 1.0
    bound: float = 0.5
    rate: float = 0.5
    private_lr: float = 1.0
    clip: float = 1.0
    batch: int = 0
    private_steps: int = 0
    more: tuple[str, ...] = ()

    @property
    def max_turns(self) -> int:
        """How often a client may take part under local DP: half as often again as the mean."""
        return -(-3 * self.cohort * self.rounds // (2 * self.clients))

    @property
    def shared(self) -> list[str]:
        """The recipe's keys of data, model and length."""
        most = "none" if self.records is None else self.records
        keys = (
            f"data.name={self.data} data.partition={self.partition} data.clients={self.clients} "
            f"data.most_records={most} model.name={self.model_name} rounds={self.rounds}"
        )
        return [*keys.split(), *self.more]

    @property
    def plain(self) -> list[str]:
        """The keys of plain local training."""
        batch = f"client.batch={self.batch}"
        return ["client.kind=sgd", f"client.steps={self.steps}", batch, f"client.lr={self.lr}"]

    @property
    def inside(self) -> list[str]:
        """The keys of DP-SGD in clients."""
        return (
            f"sample.max_participations={self.max_turns} client.rate={self.rate} "
            f"client.steps={self.private_steps or self.steps} client.lr={self.private_lr} "
            f"clip.value={self.clip}"
        ).split()

    @property
    def fixed(self) -> list[str]:
        """The keys of a random cohort of fixed size."""
        return ["sample.kind=fixed", f"sample.size={self.cohort}"]

    @property
    def gradients(self) -> list[str]:
        """The keys of LDP-SGD, gradients that clients protect from everybody."""
        keys = f"sample.max_participations={self.max_turns} clip.value=0.05 server.lr=40.0"
        return keys.split()

    def __str__(self) -> str:
        own = "all their records" if self.records is None else f"at most {self.records} records"
        taken = f"batches of {self.batch}" if self.batch else "all records"
        return (
            f"{self.title}: {self.clients} clients ({self.partition}) with {own}, {self.cohort} "
            f"a round, {self.rounds} rounds, model {self.model_name}. In its turn a client takes "
            f"{self.steps} plain steps on {taken} at learning rate {self.lr:g}, or "
            f"{self.private_steps or self.steps} of DP-SGD, each on {self.rate:.0%} of its records "
            f"at {self.private_lr:g}. The bound on an update is {self.bound:g}, that on an "
            f"example's gradient in DP-SGD {self.clip:g}"
        )


@dataclass(frozen=True)
class Defence:
    """A recipe and its keys. A `private` one is run at every epsilon."""

    name: str
    recipe: str
    recipe_keys: tuple[str, ...]
    private: bool = False


def federations(experiment: Experiment) -> list[PaperFederation]:
    """FEMNIST by writer, tested on writers held out, and the embedded digits."""
    quick = experiment.is_quick
    femnist = PaperFederation(
        "femnist",
        "FEMNIST",
        "natural",
        clients=340,
        cohort=85,
        rounds=experiment.choose(20, 100),
        records=50 if quick else None,
        model_name="softmax" if quick else "small-cnn",
        steps=5,
        lr=1.0 if quick else 0.3,
        bound=2.0,
        rate=0.2,
        private_lr=0.5 if quick else 0.2,
    )
    digits = PaperFederation("digits", "Digits", "iid", 100, 50, rounds=40, bound=1.0)
    return [femnist, digits]


def defences(federation: PaperFederation) -> list[Defence]:
    """The rows of the grid."""
    shared, plain, fixed = federation.shared, federation.plain, federation.fixed
    bound = f"clip.value={federation.bound}"
    delta = f"budget.delta={DELTA}"
    share = f"sample.rate={federation.cohort / federation.clients}"
    return [
        Defence(NONE, "fedavg", (*shared, *plain, *fixed)),
        Defence(BOUND, "norm-bound", (*shared, *plain, *fixed, bound)),
        Defence(WEAK_DP, "weak-dp", (*shared, *plain, *fixed, bound, f"noise.multiplier={WEAK}")),
        Defence(LOCAL, "dp-sgd", (*shared, *fixed, *federation.inside, delta), private=True),
        Defence(CENTRAL, "central", (*shared, *plain, share, bound, delta), private=True),
    ]


def harmless(title: str, accuracies: Mapping[str, float]) -> PaperStatement:
    """Whether norm bounding and weak DP stay near the undefended model."""
    lost = {name: accuracies[NONE] - accuracies[name] for name in (BOUND, WEAK_DP)}
    return PaperStatement(
        f"{title}: norm bounding and weak DP do not hurt the main task (Sun et al. 2019, whose "
        "defences these are).",
        all(points <= NEAR for points in lost.values()),
        f"Rule: at most {NEAR:g} points below no defence. Here {_listed(lost)}.",
    )


def varying_cost(
    title: str, none: float, local: Sequence[float], central: Sequence[float]
) -> PaperStatement:
    """Whether both kinds of DP cost accuracy, and not always the same.

    Accuracies are in the order of `EPSILONS`.
    """
    lost = {
        f"{name} at epsilon {epsilon}": none - accuracy
        for name, line in ((LOCAL, local), (CENTRAL, central))
        for epsilon, accuracy in zip(EPSILONS, line, strict=True)
    }
    costly = all(none - line[0] > NEAR for line in (local, central))
    return PaperStatement(
        f"{title}: local and central DP both cost utility, to varying degrees.",
        costly and max(lost.values()) - min(lost.values()) > NEAR,
        f"Rule: both lose more than {NEAR:g} points at the smallest epsilon, and the losses differ "
        f"by more than that over the grid. Here {_listed(lost)}.",
    )


def utility(experiment: Experiment) -> Page:
    """Test accuracy under every defence and epsilon."""
    page, repeat = Page("Utility: what the defences cost"), experiment.repetitions(3, 5)
    cases = federations(experiment)
    page.settings += [
        "The defences of the paper and an epsilon grid of our own: no defence, a bound on the norm "
        f"of updates, weak DP (the same bound and noise of {WEAK:g} times it, too little for a "
        "claim), DP-SGD inside every client (local) and noise at a trusted server (central). "
        f"Test accuracy in percent; {repeat} repetitions, mean +- half of the 95 % interval. "
        "Utility only: no attack is run here.",
        "\n".join(f"- {federation}" for federation in cases),
    ]
    page.left_open += [
        ("the paper's sizes, epsilons and accuracies", f"{UNPUBLISHED}; everything here is ours"),
        (
            "learning rates and bounds",
            "ours; those of quick scale were set by hand after a few runs on the test split, which "
            "no claim covers, those of paper scale are untried",
        ),
        ("delta", f"{DELTA:g}"),
    ]
    panels = [_measure(experiment, page, federation, repeat) for federation in cases]
    page.figures["naseri-utility.png"] = draw(
        "What the defences cost: test accuracy by epsilon",
        [
            "After Naseri et al. 2022, in our sizes. Unit and trust of the two lines differ, so "
            "that their epsilons cannot be compared."
        ],
        panels,
        len(panels),
    )
    page.page_notes += [
        "**Epsilons of different units are not comparable.** Local DP here protects one record of "
        "a client from the server, central DP a whole client from whoever sees the models, with a "
        "server that is trusted. The same epsilon is a weaker promise for a record than for a "
        "client, and trust differs as well: the two lines of a figure are not a contest.",
        "Under local DP a client is charged for every turn, at most "
        + ", ".join(f"{f.max_turns} ({f.title})" for f in cases)
        + "; nothing is gained from the server's sampling, which the server knows. Central DP "
        "samples clients independently (Poisson) and is amplified by that.",
    ]
    return page


def _measure(experiment: Experiment, page: Page, federation: PaperFederation, repeat: int) -> Panel:
    """Run a federation's grid, add its table and findings to the page, and return its lines."""
    rows: list[tuple[str, ...]] = []
    lines: dict[str, list[Mean]] = {}
    claims: dict[str, PrivacyClaim] = {}
    for defence in defences(federation):
        sweep = experiment.sweep(
            f"naseri-{defence.recipe}-{federation.data}",
            defence.recipe,
            defence.recipe_keys,
            [Axis("budget.epsilon", EPSILONS)] if defence.private else [],
            repeat,
        )
        lines[defence.name] = [percent(sweep, c) for c in range(len(sweep.cells))]
        if defence.private:
            claims[defence.name] = claim_of(sweep)
        for c, mean in enumerate(lines[defence.name]):
            lost = "-" if defence.name == NONE else f"{lines[NONE][0].value - mean.value:.2f}"
            claim, terms = sweep.prepared[c].headline_claim, ("nothing claimed", "-", "-", "-", "-")
            if claim is not None:
                parties = str(claim.unit), str(claim.trust), str(claim.neighbours)
                terms = (claim.value, f"{claim.delta:g}", *parties)
            rows.append((defence.name, *terms, UNPUBLISHED, str(mean), lost))
    page.add_table(
        (
            *("defence", "epsilon", "delta", "unit", "trust", "neighbours"),
            *("accuracy, paper", "accuracy, here", "below no defence"),
        ),
        rows,
        f"{federation.title}:",
    )
    single = {name: line[0].value for name, line in lines.items() if name not in (LOCAL, CENTRAL)}
    local, central = ([mean.value for mean in lines[name]] for name in (LOCAL, CENTRAL))
    page.statements += [
        harmless(federation.title, single),
        varying_cost(federation.title, single[NONE], local, central),
    ]
    page.settings.append(f"{federation.title}. {meaning(*claims.values())}")
    places = [float(epsilon) for epsilon in EPSILONS]
    return Panel(
        [
            Series(f"{name}: epsilon {claim.terms}", places, lines[name], stroke(i))
            for i, (name, claim) in enumerate(claims.items())
        ],
        "epsilon (for whom: see the legend)",
        "test accuracy (%)",
        federation.title,
        levels={name: means[0].value for name, means in lines.items() if name not in claims},
        log_x=True,
        within=PERCENT,
    )


@dataclass(frozen=True)
class PrivacyRow:
    """A defence at one epsilon, or without any: its accuracy, and what attackers found.

    Attributes:
        defence: Its name.
        epsilon: Of the budget, "" without one.
        mean_accuracy: On the test split, in percent.
        attack_cells: The cells of the table from `COLUMNS` on.
        best_auc: The best AUC of each attack that has one.
    """

    defence: str
    epsilon: str
    mean_accuracy: Mean
    attack_cells: tuple[str, ...]
    best_auc: Mapping[str, float]


def attacked_federations(experiment: Experiment) -> list[PaperFederation]:
    """Location30, on which models remember, and the embedded digits, which are images."""
    rounds = experiment.choose(20, 60)
    location = PaperFederation(
        "location30", "Location30", "iid", 40, 20, rounds=rounds, bound=2.0, rate=0.2
    )
    return [location, replace(federations(experiment)[1], rounds=20)]


def rows_of(where: PaperFederation) -> list[tuple[Defence, str]]:
    """(defence, epsilon): the paper's, and gradients that clients protect from everybody."""
    local = ("client.kind=gradient", f"budget.delta={DELTA}", *where.gradients)
    gradients = Defence(GRADIENTS, "ldp-sgd", (*where.shared, *where.fixed, *local), private=True)
    rows = [
        (defence, epsilon)
        for defence in defences(where)
        for epsilon in (ATTACKED_EPSILONS if defence.private else ("",))
    ]
    return [*rows, (gradients, ATTACKED_EPSILONS[-1])]


def audit_settings(experiment: Experiment, where: PaperFederation) -> AuditSettings:
    """Which attacks, and how large they are: properties and inversion are asked of images."""
    of_records = (*BOUNDS, Attack.MEMBERSHIP, Attack.WHITE_BOX)
    return AuditSettings(
        None if where.data == "digits" else of_records,
        draws=experiment.choose(20_000, 100_000),
        canaries=experiment.choose(200, 1000),
        references=experiment.choose(10, 64),
        workers=experiment.workers,
        inversion=InversionAudit(
            steps=experiment.choose(200, 600), restarts=experiment.choose(1, 2)
        ),
        cluster=experiment.cluster,
    )


def privacy(experiment: Experiment) -> Page:
    """Every defence and epsilon, and every attack on it, as one table for each federation."""
    page, repeat = Page("Privacy: what attackers learn"), experiment.repetitions(3, 5)
    cases = attacked_federations(experiment)
    audit = audit_settings(experiment, cases[0])
    page.settings += [
        f"The numbers of the paper are {UNPUBLISHED}; all of these are ours. Accuracy on the test "
        f"split, {repeat} repetitions, mean +- half of the 95 % interval. Membership: the best of "
        f"LiRA and RMIA against final models, {audit.references} reference models, each record "
        "once in and once not, TPR at 0.1 % FPR; white box: the best attacker inside the training "
        "whom the claim does not trust. Of images also: a property, half of the clients' records "
        "being dimmed, and inversion of one record's update by cosine and total variation, "
        f"{audit.inversion.steps} steps from {audit.inversion.restarts} guess(es). In brackets "
        'intervals at 95 %. "At least" is an empirical epsilon: a lower bound in the terms of '
        "the claim beside it, from "
        f"{audit.draws:,} draws of a randomiser and {audit.canaries:,} canaries.",
    ]
    page.left_open += [("sizes, epsilons, attacks", "ours"), ("delta", f"{DELTA:g}")]
    for where in cases:
        rows = [_row(experiment, where, *row, repeat) for row in rows_of(where)]
        page.settings.append(f"- {where}")
        lines = [(row.defence, str(row.mean_accuracy), *row.attack_cells) for row in rows]
        page.add_table(("defence", "accuracy, %", *COLUMNS), lines, f"{where.title}:")
        page.statements += privacy_statements(where.title, rows)
    page.page_notes.append(
        "Epsilons of different units and trust are not comparable: a record's privacy from the "
        "server, a client's from everybody but the server, and a client's from everybody. "
        "Membership is about records: a claim per client covers all records of a client at once, "
        "one per record says nothing about a client's properties."
    )
    return page


def privacy_statements(title: str, rows: list[PrivacyRow]) -> list[PaperStatement]:
    """What is to be seen in a table."""
    by = {(row.defence, row.epsilon): row for row in rows}
    none, inside_none = (by[NONE, ""].best_auc[a] for a in (Attack.MEMBERSHIP, Attack.WHITE_BOX))
    least = ATTACKED_EPSILONS[0]
    record, client = (by[name, least].best_auc[Attack.MEMBERSHIP] for name in (LOCAL, CENTRAL))
    inside = {name: by[name, least].best_auc[Attack.WHITE_BOX] for name in (LOCAL, CENTRAL)}
    return [
        PaperStatement(
            f"{title}: undefended, membership is found, and by an attacker inside the training "
            "more surely.",
            REMEMBERS < none < inside_none,
            f"Rule: both AUC above {REMEMBERS:g}, the second above the first. Here {none:.3f} "
            f"black box and {inside_none:.3f} white box.",
        ),
        PaperStatement(
            f"{title}: both kinds of DP take membership away from who sees the models.",
            max(abs(record - 0.5), abs(client - 0.5)) <= LOST,
            f"Rule: the best AUC within {LOST:g} of 1/2 at the smallest epsilon. Here {record:.3f} "
            f"(local) and {client:.3f} (central).",
        ),
        PaperStatement(
            f"{title}: central DP does not protect from the server it trusts; local DP does.",
            inside[CENTRAL] > inside[LOCAL],
            "Rule: the best white-box AUC, the server's included, is higher under central DP at "
            f"the smallest epsilon. Here {_listed(inside, '.3f')}.",
        ),
    ]


ITEMS: dict[str, Item] = {"utility": utility}


def _row(
    experiment: Experiment,
    where: PaperFederation,
    defence: Defence,
    epsilon: str,
    repeat: int,
) -> PrivacyRow:
    audit = audit_settings(experiment, where)
    settings = (*defence.recipe_keys, *([f"budget.epsilon={epsilon}"] if epsilon else []))
    name = f"naseri-privacy-{where.data}-{defence.recipe}{f'-{epsilon}' if epsilon else ''}"
    sweep = experiment.sweep(name, defence.recipe, settings, [], repeat)
    recipe = load_recipe(defence.recipe, settings)
    training = replace(build(recipe, experiment.root), workers=1)
    digest = hashlib.sha256(sweep.cells[0].recipe.model_dump_json().encode()).hexdigest()
    identity = {"recipe": digest, "data": training.data.fingerprint, "seed": audit.seed}

    def on_step(attack: str, done: int, of: int) -> None:
        experiment.on_trial(f"{name}, {attack}", done, of, "")

    folder = experiment.out / f"{name}-{experiment.scale}-audit"
    with AuditCache.locked_in(folder, identity) as cache:
        saved, sizes = cache.load_json("row"), repr(replace(audit, workers=0))
        if saved is None or saved["asked"] != sizes:
            results = run_attacks(training, audit, cache, on_step)
            claim = claimed(training.plan)
            found = summary(results.findings, results.leaks, claim)
            saved = {"asked": sizes, "cells": list(found.values()), "best": _best(results.leaks)}
            cache.save_json("row", saved)
    return PrivacyRow(
        defence.name, epsilon, percent(sweep, 0), tuple(saved["cells"]), saved["best"]
    )


def _best(leaks: Sequence[Leak]) -> dict[str, float]:
    """The best AUC of each attack that is measured by it, whoever the attacker is."""
    found: dict[str, float] = {}
    for leak in leaks:
        for measure in leak.measures:
            if measure.name == AUC:
                found[leak.attack] = max(measure.value, found.get(leak.attack, 0.0))
    return found


def _listed(values: Mapping[str, float], digits: str = ".2f") -> str:
    return ", ".join(f"{value:{digits}} ({name})" for name, value in values.items())
