"""Naseri, Hayes, De Cristofaro, "Local and Central Differential Privacy for Robustness and Privacy
in Federated Learning" (NDSS 2022, arXiv 2009.03561): what the defences cost in accuracy, and what
attackers learn from each. Its backdoors are in `naseri_backdoors.py`.

The paper's grid of defences, in sizes and epsilons of our own: its result tables were not readable,
so no number of it stands here. Its "local" DP protects a record from the server and its central DP
a client from everyone who sees the models, so their epsilons cannot be compared. Privacy is
measured with today's attacks (membership, properties, gradient inversion) and an empirical epsilon.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedveil.audit.audit_command import BOUNDS, COLUMNS, AuditSettings, run_attacks, summary
from fedveil.audit.audit_folder import AuditCache, audited_digest
from fedveil.audit.findings import AUC, Attack
from fedveil.audit.inversion import InversionAudit
from fedveil.audit.observations import strict_claim
from fedveil.papers.reproduction import Experiment, Item, Page, PaperStatement, read_tables
from fedveil.papers.sweep_results import claim_of, meaning, percent
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.runs.build import build
from fedveil.runs.recipe import load_recipe
from fedveil.tuning.figures import PERCENT, Panel, draw, series_of_means
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import Mean

EPSILONS, ATTACKED_EPSILONS = ("0.5", "1", "4", "20"), ("1", "8")
"""Epsilons of the budgets whose utility is measured, and of those that are attacked."""
DELTA = 1e-5
WEAK = 0.1
NEAR = 2.0
"""Points of accuracy that count as no difference."""
REMEMBERS, LOST = 0.65, 0.03
"""Membership is found above the first AUC, and hidden where the AUC is this close to 1/2."""
UNPUBLISHED = "not readable / not available"

NONE, BOUND, WEAK_DP, LOCAL, CENTRAL = "no defence", "norm bound", "weak DP", "local", "central"


@dataclass(frozen=True)
class PaperFederation:
    """Data, model and training, the same for all defences.

    Attributes:
        data, title, partition: The data set in recipes, its title, and how clients share it.
        clients, cohort: Clients in all, and in a round.
        rounds: The number of rounds.
        records: The most records of a client. None keeps all.
        model_name: The model's name.
        steps, batch, lr: Plain local steps, their batch size (0: all records), learning rate.
        private_steps, rate, private_lr: Steps of DP-SGD (0: as many as plain ones), the share of
            the records in each, learning rate.
        bound, clip: The clip of an update, and of an example's gradient in DP-SGD.
        more: Further overrides of the recipe.
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
        """Return the most rounds of a client under local DP: 1.5 times the mean, rounded up."""
        return -(-3 * self.cohort * self.rounds // (2 * self.clients))

    @property
    def shared(self) -> list[str]:
        """Return the overrides `key=value` of data, model and rounds."""
        most = "none" if self.records is None else self.records
        keys = (
            f"data.name={self.data} data.partition={self.partition} data.clients={self.clients} "
            f"data.most_records={most} model.name={self.model_name} rounds={self.rounds}"
        )
        return [*keys.split(), *self.more]

    @property
    def dp_steps(self) -> int:
        """Return the number of steps of DP-SGD in a client's turn."""
        return self.private_steps or self.steps

    @property
    def share(self) -> float:
        """Return the share of the clients in a round."""
        return self.cohort / self.clients

    def __str__(self) -> str:
        own = "all their records" if self.records is None else f"at most {self.records} records"
        taken = f"batches of {self.batch}" if self.batch else "all records"
        return str(TEXTS["federation"].format(self=self, own=own, taken=taken))


@dataclass(frozen=True)
class Defence:
    """A row of a table.

    Attributes:
        name: The name of the defence.
        recipe: The shipped recipe.
        recipe_overrides: Overrides `key=value` of the recipe, without the epsilon.
        private: Whether the defence runs at every epsilon. Otherwise it runs once.
    """

    name: str
    recipe: str
    recipe_overrides: tuple[str, ...]
    private: bool = False


TABLES = read_tables("naseri")
"""Federations and arenas by name, which `federation` and `naseri_backdoors.arena` read."""
TEXTS: dict[str, Any] = TABLES["texts"]


def federation(name: str, experiment: Experiment) -> PaperFederation:
    """Return the federation `name` of naseri.toml at the experiment's scale."""
    fields = dict(TABLES["federations"][name])
    scales = [fields.pop(scale, {}) for scale in ("quick", "paper")]
    fields |= scales[experiment.choose(0, 1)]
    return PaperFederation(**fields | {"more": tuple(fields.get("more", ()))})


def federations(experiment: Experiment) -> list[PaperFederation]:
    """Return the federations of the utility table: FEMNIST by writer, and the embedded digits."""
    return [federation(name, experiment) for name in ("femnist", "digits")]


def defence_rows(
    table: str, where: PaperFederation, parts: Mapping[str, Sequence[str]] | None = None
) -> list[Defence]:
    """Return the rows of a table of naseri.toml, with their overrides for a federation.

    Each of a row's `keys` is an override, or the name of several: of those in `parts`, of the
    federation's `shared` ones, or of those in the file's table `keys`.
    """
    named = {**TABLES["keys"], "shared": where.shared, **(parts or {})}
    rows = []
    for row in TABLES[table]:
        keys = [key for name in row["keys"] for key in named.get(name, [name])]
        overrides = tuple(key.format(where=where, weak=WEAK, delta=DELTA) for key in keys)
        rows.append(Defence(row["name"], row["recipe"], overrides, row.get("private", False)))
    return rows


def defences(where: PaperFederation) -> list[Defence]:
    """Return the five rows of the paper's grid: three without a claim, local DP and central DP."""
    return defence_rows("defences", where)


def harmless(title: str, accuracies: Mapping[str, float]) -> PaperStatement:
    """Judge whether norm bounding and weak DP lose at most `NEAR` points.

    `accuracies` are in percent, by the names `NONE`, `BOUND` and `WEAK_DP`.
    """
    lost = {name: accuracies[NONE] - accuracies[name] for name in (BOUND, WEAK_DP)}
    return PaperStatement(
        f"{title}: norm bounding and weak DP do not hurt the main task (Sun et al. 2019, whose "
        "defences these are).",
        all(points <= NEAR for points in lost.values()),
        f"Rule: at most {NEAR:g} points below no defence. Here {_as_text(lost)}.",
    )


def varying_cost(
    title: str, none: float, local: Sequence[float], central: Sequence[float]
) -> PaperStatement:
    """Judge whether both kinds of DP cost accuracy, to varying degrees.

    Args:
        title: The data set.
        none: The accuracy without a defence, in percent.
        local, central: Accuracies in percent, in the order of `EPSILONS`.
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
        f"by more than that over the grid. Here {_as_text(lost)}.",
    )


def utility(experiment: Experiment) -> Page:
    """Run every defence at every epsilon, and return the page of test accuracies."""
    page, repetitions = Page("Utility: what the defences cost"), experiment.repetitions(3, 5)
    cases = federations(experiment)
    page.setting_names += [
        TEXTS["utility"].format(weak=WEAK, repetitions=repetitions),
        "\n".join(f"- {where}" for where in cases),
    ]
    page.add_left_open(TEXTS["utility_left_open"], unpublished=UNPUBLISHED, delta=DELTA)
    panels = [_add_utility(experiment, page, where, repetitions) for where in cases]
    title, text = "What the defences cost: test accuracy by epsilon", TEXTS["utility_figure"]
    page.figures["naseri-utility.png"] = draw(title, [text], panels, len(panels))
    turns = ", ".join(f"{f.max_turns} ({f.title})" for f in cases)
    page.page_notes += [TEXTS["utility_units"], TEXTS["turns"].format(turns=turns)]
    return page


def _add_utility(
    experiment: Experiment, page: Page, where: PaperFederation, repetitions: int
) -> Panel:
    """Run a federation's grid, add its table and statements to the page, and return its panel.

    Args:
        experiment: Directory and scale.
        page: The page, whose settings, tables and statements are extended.
        where: The federation.
        repetitions: Trainings of each cell.
    """
    rows: list[tuple[str, ...]] = []
    lines: dict[str, list[Mean]] = {}
    claims: dict[str, PrivacyClaim] = {}
    for defence in defences(where):
        axes = [Axis("budget.epsilon", EPSILONS)] if defence.private else []
        name = f"naseri-{defence.recipe}-{where.data}"
        sweep = experiment.sweep(name, defence.recipe, defence.recipe_overrides, axes, repetitions)
        lines[defence.name] = [percent(sweep, c) for c in range(len(sweep.cells))]
        if defence.private:
            claims[defence.name] = claim_of(sweep)
        for c, mean in enumerate(lines[defence.name]):
            lost = "-" if defence.name == NONE else f"{lines[NONE][0].value - mean.value:.2f}"
            claim, cells = sweep.prepared[c].headline_claim, ("nothing claimed", "-", "-", "-", "-")
            if claim is not None:
                parties = str(claim.unit), str(claim.trust), str(claim.neighbours)
                cells = (claim.rounded_epsilon, f"{claim.delta:g}", *parties)
            rows.append((defence.name, *cells, UNPUBLISHED, str(mean), lost))
    terms = ("epsilon", "delta", "unit", "trust", "neighbours")
    headers = ("defence", *terms, "accuracy, paper", "accuracy, here", "below no defence")
    page.add_table(headers, rows, f"{where.title}:")
    single = {name: line[0].value for name, line in lines.items() if name not in (LOCAL, CENTRAL)}
    local, central = ([mean.value for mean in lines[name]] for name in (LOCAL, CENTRAL))
    page.statements += [
        harmless(where.title, single),
        varying_cost(where.title, single[NONE], local, central),
    ]
    page.setting_names.append(f"{where.title}. {meaning(*claims.values())}")
    places = [float(epsilon) for epsilon in EPSILONS]
    named = {f"{name}: epsilon {claim.terms}": lines[name] for name, claim in claims.items()}
    return Panel(
        series_of_means(named, places),
        "epsilon (for whom: see the legend)",
        "test accuracy (%)",
        where.title,
        levels={name: means[0].value for name, means in lines.items() if name not in claims},
        log_x=True,
        within=PERCENT,
    )


@dataclass(frozen=True)
class PrivacyRow:
    """A row of the privacy table: a defence's accuracy and the results of attacks on it.

    Attributes:
        defence: The name of the defence.
        epsilon: The epsilon of its budget, "" if it has none.
        mean_accuracy: The accuracy on the test split, in percent.
        attack_cells: The cells under `COLUMNS`.
        best_auc: The best AUC of each attack that is measured by it.
    """

    defence: str
    epsilon: str
    mean_accuracy: Mean
    attack_cells: tuple[str, ...]
    best_auc: Mapping[str, float]


def attacked_federations(experiment: Experiment) -> list[PaperFederation]:
    """Return the federations of the privacy table: Location30, and the digits in 20 rounds."""
    return [federation("location30", experiment), replace(federations(experiment)[1], rounds=20)]


def rows_of(where: PaperFederation) -> list[tuple[Defence, str]]:
    """Return pairs (defence, epsilon), the rows of the privacy table.

    They are the paper's defences, and LDP-SGD. The epsilon is "" for a defence without a budget.
    """
    rows = [
        (defence, epsilon)
        for defence in defences(where)
        for epsilon in (ATTACKED_EPSILONS if defence.private else ("",))
    ]
    return [*rows, *((one, ATTACKED_EPSILONS[-1]) for one in defence_rows("attacked", where))]


def audit_settings(experiment: Experiment, where: PaperFederation) -> AuditSettings:
    """Return the attacks on a federation and their sizes.

    The digits get all attacks that fit the training. Other data get no property attack and no
    inversion.
    """
    sizes = TABLES["attacks"][experiment.scale]
    of_records = (*BOUNDS, Attack.MEMBERSHIP, Attack.WHITE_BOX)
    return AuditSettings(
        None if where.data == "digits" else of_records,
        **sizes["audit"],
        workers=experiment.workers,
        inversion=InversionAudit(**sizes["inversion"]),
        cluster=experiment.cluster,
    )


def privacy(experiment: Experiment) -> Page:
    """Run all attacks on every defence and epsilon, and return their page, a table per federation.

    Trainings and attacks are saved below `experiment.out`.
    """
    page, repetitions = Page("Privacy: what attackers learn"), experiment.repetitions(3, 5)
    cases = attacked_federations(experiment)
    audit = audit_settings(experiment, cases[0])
    page.setting_names.append(
        TEXTS["attacks"].format(unpublished=UNPUBLISHED, repetitions=repetitions, audit=audit)
    )
    page.add_left_open(TEXTS["privacy_left_open"], delta=DELTA)
    for where in cases:
        rows = [privacy_row(experiment, where, *row, repetitions) for row in rows_of(where)]
        page.setting_names.append(f"- {where}")
        lines = [(row.defence, str(row.mean_accuracy), *row.attack_cells) for row in rows]
        page.add_table(("defence", "accuracy, %", *COLUMNS), lines, f"{where.title}:")
        page.statements += privacy_statements(where.title, rows)
    page.page_notes.append(TEXTS["privacy_units"])
    return page


def privacy_statements(title: str, rows: list[PrivacyRow]) -> list[PaperStatement]:
    """Judge three statements about membership from one federation's table.

    KeyError if a row of no defence, local or central DP is missing.
    """
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
            f"the smallest epsilon. Here {_as_text(inside, '.3f')}.",
        ),
    ]


ITEMS: dict[str, Item] = {"utility": utility}


def privacy_row(
    experiment: Experiment, where: PaperFederation, defence: Defence, epsilon: str, repetitions: int
) -> PrivacyRow:
    """Train a defence `repetitions` times, attack it once, and return its row of the privacy table.

    Trainings and attacks are saved below `experiment.out`, and not done again for the same
    settings.

    Args:
        experiment: Directory and scale.
        where: The federation.
        defence: The defence.
        epsilon: The epsilon of the budget, "" for a defence without one.
        repetitions: The number of trainings.
    """
    audit = audit_settings(experiment, where)
    settings = (*defence.recipe_overrides, *([f"budget.epsilon={epsilon}"] if epsilon else []))
    name = f"naseri-privacy-{where.data}-{defence.recipe}{f'-{epsilon}' if epsilon else ''}"
    sweep = experiment.sweep(name, defence.recipe, settings, [], repetitions)
    recipe = load_recipe(defence.recipe, settings)
    training = replace(build(recipe, experiment.root), workers=1)
    digest = audited_digest(sweep.cells[0].recipe)
    identity = {"recipe": digest, "data": training.data.fingerprint, "seed": audit.seed}

    def on_step(attack: str, done: int, of: int) -> None:
        """Report the progress of an attack as that of a trial."""
        experiment.on_trial(f"{name}, {attack}", done, of, "")

    folder = experiment.out / f"{name}-{experiment.scale}-audit"
    with AuditCache.locked_in(folder, identity) as cache:
        saved, sizes = cache.load_json("row"), repr(replace(audit, workers=0))
        if saved is None or saved["asked"] != sizes:
            results = run_attacks(training, audit, cache, on_step)
            row = summary(results.findings, results.leaks, strict_claim(training.plan))
            best: dict[str, float] = {}
            for leak in results.leaks:
                aucs = [measure.value for measure in leak.measures if measure.name == AUC]
                if aucs:
                    best[leak.attack] = max(*aucs, best.get(leak.attack, 0.0))
            saved = {"asked": sizes, "cells": list(row.values()), "best": best}
            cache.save_json("row", saved)
    cells = tuple(saved["cells"])
    return PrivacyRow(defence.name, epsilon, percent(sweep, 0), cells, saved["best"])


def _as_text(values: Mapping[str, float], digits: str = ".2f") -> str:
    """Return "number (name)" for each, separated by commas. `digits` is the format of numbers."""
    return ", ".join(f"{value:{digits}} ({name})" for name, value in values.items())
