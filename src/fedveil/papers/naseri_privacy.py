"""Naseri et al. 2022, privacy: what attackers learn from each defence, beside what it claims.

The paper's settings (membership and property inference under local and central DP) with today's
attacks, gradient inversion and an empirical epsilon, in sizes of our own: its result tables were
not readable, so no number of it stands here.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedveil.audit.audit_command import BOUNDS, COLUMNS, AuditSettings, run_attacks, summary
from fedveil.audit.audit_folder import AuditCache
from fedveil.audit.client_views import claimed
from fedveil.audit.findings import AUC, Attack, Leak
from fedveil.audit.inversion import InversionAudit
from fedveil.papers.experiment import Experiment, Item
from fedveil.papers.naseri import (
    CENTRAL,
    DELTA,
    LOCAL,
    NONE,
    UNPUBLISHED,
    Defence,
    PaperFederation,
    defences,
    federations,
)
from fedveil.papers.paper_page import Page, PaperStatement, TextTable
from fedveil.runs.build import build
from fedveil.runs.recipe_file import load_recipe
from fedveil.training.session import Training
from fedveil.tuning.repetitions import Mean, mean_of

EPSILONS = ("1", "8")
GRADIENTS = "LDP-SGD"
REMEMBERS, LOST = 0.65, 0.03
"""The AUC from which membership is found, and how far from 1/2 it may be where nothing is left."""

_HEADERS = ("defence", "accuracy, %", *COLUMNS)


@dataclass(frozen=True)
class PrivacyRow:
    """A defence at one epsilon, or without any: its accuracy, and what attackers found.

    Attributes:
        defence: Its name.
        epsilon: Of the budget, "" without one.
        accuracy: On the test split, in percent.
        cells: The cells of the table from `COLUMNS` on.
        best: The best AUC of each attack that has one.
    """

    defence: str
    epsilon: str
    accuracy: Mean
    cells: tuple[str, ...]
    best: Mapping[str, float]

    @property
    def line(self) -> tuple[str, ...]:
        return (self.defence, str(self.accuracy), *self.cells)


def attacked_federations(experiment: Experiment) -> list[PaperFederation]:
    """Location30, on which models remember, and the embedded digits, which are images."""
    location = PaperFederation(
        "location30",
        "Location30",
        "iid",
        clients=40,
        cohort=20,
        records=None,
        model="softmax",
        rounds=experiment.choose(20, 60),
        steps=10,
        lr=1.0,
        bound=2.0,
        rate=0.2,
        private_lr=1.0,
        clip=1.0,
    )
    _, digits = federations(experiment)
    return [location, replace(digits, rounds=20)]


def rows_of(where: PaperFederation) -> list[tuple[Defence, str]]:
    """(defence, epsilon): the paper's, and gradients that clients protect from everybody."""
    gradients = (
        *(*where.shared, *where.fixed, "client.kind=gradient", f"budget.delta={DELTA}"),
        f"sample.max_participations={where.cap}",
        "clip.value=0.05",
        "server.lr=40.0",
    )
    found = [
        (defence, epsilon)
        for defence in defences(where)
        for epsilon in (EPSILONS if defence.private else ("",))
    ]
    return [*found, (Defence(GRADIENTS, "ldp-sgd", gradients, private=True), EPSILONS[-1])]


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
        table = tuple(row.line for row in rows)
        page.tables.append(TextTable(_HEADERS, table, f"{where.title}:"))
        page.findings += findings(where.title, rows)
    page.notes.append(
        "Epsilons of different units and trust are not comparable: a record's privacy from the "
        "server, a client's from everybody but the server, and a client's from everybody. "
        "Membership is about records: a claim per client covers all records of a client at once, "
        "one per record says nothing about a client's properties."
    )
    return page


def findings(title: str, rows: list[PrivacyRow]) -> list[PaperStatement]:
    """What is to be seen in a table."""
    by = {(row.defence, row.epsilon): row for row in rows}
    none, inside_none = (by[NONE, ""].best[a] for a in (Attack.MEMBERSHIP, Attack.WHITE_BOX))
    least = EPSILONS[0]
    record, client = (by[name, least].best[Attack.MEMBERSHIP] for name in (LOCAL, CENTRAL))
    inside = {name: by[name, least].best[Attack.WHITE_BOX] for name in (LOCAL, CENTRAL)}
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
            f"the smallest epsilon. Here {_listed(inside)}.",
        ),
    ]


ITEMS: dict[str, Item] = {"privacy": privacy}


def _row(
    experiment: Experiment,
    where: PaperFederation,
    defence: Defence,
    epsilon: str,
    repeat: int,
) -> PrivacyRow:
    audit = audit_settings(experiment, where)
    settings = (*defence.settings, *([f"budget.epsilon={epsilon}"] if epsilon else []))
    name = f"naseri-privacy-{where.data}-{defence.recipe}{f'-{epsilon}' if epsilon else ''}"
    sweep = experiment.sweep(name, defence.recipe, settings, [], repeat)
    training = _training(experiment, defence.recipe, settings)
    accuracy = mean_of([100 * outcome.test_metrics["accuracy"] for outcome in sweep.outcomes(0)])
    recipe = hashlib.sha256(sweep.cells[0].recipe.model_dump_json().encode()).hexdigest()
    identity = {"recipe": recipe, "data": training.data.fingerprint, "seed": audit.seed}

    def on_step(attack: str, done: int, of: int) -> None:
        experiment.on_trial(f"{name}, {attack}", done, of, "")

    with AuditCache.in_folder(
        experiment.out / f"{name}-{experiment.scale}-audit", identity
    ) as cache:
        saved, sizes = cache.load_json("row"), repr(replace(audit, workers=0))
        if saved is None or saved["asked"] != sizes:
            results = run_attacks(training, audit, cache, on_step)
            claim = claimed(training.plan)
            cells = summary(results.findings, results.leaks, claim)
            saved = {"asked": sizes, "cells": list(cells.values()), "best": _best(results.leaks)}
            cache.save_json("row", saved)
    return PrivacyRow(defence.name, epsilon, accuracy, tuple(saved["cells"]), saved["best"])


def _training(experiment: Experiment, recipe: str, settings: tuple[str, ...]) -> Training:
    return replace(build(load_recipe(recipe, settings), experiment.root), workers=1)


def _best(leaks: Sequence[Leak]) -> dict[str, float]:
    """The best AUC of each attack that is measured by it, whoever the attacker is."""
    found: dict[str, float] = {}
    for leak in leaks:
        for measure in leak.measures:
            if measure.name == AUC:
                found[leak.attack] = max(measure.value, found.get(leak.attack, 0.0))
    return found


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.3f} ({name})" for name, value in values.items())
