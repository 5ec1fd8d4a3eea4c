"""Naseri, Hayes, De Cristofaro, "Local and Central Differential Privacy for Robustness and Privacy
in Federated Learning" (NDSS 2022, arXiv 2009.03561): what the defences cost in accuracy.

The paper's grid of defences and epsilons, utility only, in sizes of our own: its result tables were
not readable, so no number of it stands here. Its "local" DP protects a record from the server and
its central DP a client from everyone who sees the models, so their epsilons cannot be compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedveil.papers.experiment import Experiment, ExperimentScale, Item, claim_of, meaning
from fedveil.papers.paper_page import Page, PaperStatement, TextTable
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.tuning.figures import PERCENT, Panel, Series, draw, stroke
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import Mean, mean_of
from fedveil.tuning.sweep import Sweep

EPSILONS = ("0.5", "1", "4", "20")
DELTA = 1e-5
WEAK = 0.1
NEAR = 2.0
"""Points of accuracy that count as no difference."""
UNPUBLISHED = "not readable / not available"

NONE, BOUND, WEAK_DP, LOCAL, CENTRAL = "no defence", "norm bound", "weak DP", "local", "central"


@dataclass(frozen=True)
class PaperFederation:
    """Data, model and training that all defences share.

    A client has at most `records` records, None all of its own. In its turn it takes `steps` plain
    steps on `batch` of its records, 0 all of them, at `lr`, or `private_steps` of DP-SGD, 0 as many
    as plain ones, on a `rate` of them at `private_lr`. `bound` is that of an update, `clip` that of
    an example's gradient in DP-SGD. `more` are further keys of the recipe.
    """

    data: str
    title: str
    partition: str
    clients: int
    cohort: int
    records: int | None
    model: str
    rounds: int
    steps: int
    lr: float
    bound: float
    rate: float
    private_lr: float
    clip: float
    batch: int = 0
    private_steps: int = 0
    more: tuple[str, ...] = ()

    @property
    def cap(self) -> int:
        """How often a client may take part under local DP: half as often again as the mean."""
        return -(-3 * self.cohort * self.rounds // (2 * self.clients))

    @property
    def shared(self) -> list[str]:
        """The recipe's keys of data, model and length."""
        return [
            f"data.name={self.data}",
            f"data.partition={self.partition}",
            f"data.clients={self.clients}",
            f"data.most_records={'none' if self.records is None else self.records}",
            f"model.name={self.model}",
            f"rounds={self.rounds}",
            *self.more,
        ]

    @property
    def plain(self) -> list[str]:
        """Those of plain local training."""
        return [
            "client.kind=sgd",
            f"client.steps={self.steps}",
            f"client.batch={self.batch}",
            f"client.lr={self.lr}",
        ]

    @property
    def inside(self) -> list[str]:
        """Those of DP-SGD in clients."""
        return [
            f"sample.max_participations={self.cap}",
            f"client.rate={self.rate}",
            f"client.steps={self.private_steps or self.steps}",
            f"client.lr={self.private_lr}",
            f"clip.value={self.clip}",
        ]

    @property
    def fixed(self) -> list[str]:
        """Those of a random cohort of fixed size."""
        return ["sample.kind=fixed", f"sample.size={self.cohort}"]

    def __str__(self) -> str:
        own = "all their records" if self.records is None else f"at most {self.records} records"
        taken = f"batches of {self.batch}" if self.batch else "all records"
        return (
            f"{self.title}: {self.clients} clients ({self.partition}) with {own}, {self.cohort} "
            f"a round, {self.rounds} rounds, model {self.model}. In its turn a client takes "
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
    settings: tuple[str, ...]
    private: bool = False


def federations(experiment: Experiment) -> list[PaperFederation]:
    """FEMNIST by writer, tested on writers held out, and the embedded digits."""
    quick = experiment.scale is ExperimentScale.QUICK
    femnist = PaperFederation(
        "femnist",
        "FEMNIST",
        "natural",
        clients=340,
        cohort=85,
        records=50 if quick else None,
        model="softmax" if quick else "small-cnn",
        rounds=experiment.choose(20, 100),
        steps=5,
        lr=1.0 if quick else 0.3,
        bound=2.0,
        rate=0.2,
        private_lr=0.5 if quick else 0.2,
        clip=1.0,
    )
    digits = PaperFederation(
        "digits",
        "Digits",
        "iid",
        clients=100,
        cohort=50,
        records=None,
        model="softmax",
        rounds=40,
        steps=10,
        lr=1.0,
        bound=1.0,
        rate=0.5,
        private_lr=1.0,
        clip=1.0,
    )
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
    page.notes += [
        "**Epsilons of different units are not comparable.** Local DP here protects one record of "
        "a client from the server, central DP a whole client from whoever sees the models, with a "
        "server that is trusted. The same epsilon is a weaker promise for a record than for a "
        "client, and trust differs as well: the two lines of a figure are not a contest.",
        "Under local DP a client is charged for every turn, at most "
        + ", ".join(f"{f.cap} ({f.title})" for f in cases)
        + "; nothing is gained from the server's sampling, which the server knows. Central DP "
        "samples clients independently (Poisson) and is amplified by that.",
    ]
    return page


ITEMS: dict[str, Item] = {"utility": utility}

_HEADERS = (
    "defence",
    "epsilon",
    "delta",
    "unit",
    "trust",
    "neighbours",
    "accuracy, paper",
    "accuracy, here",
    "below no defence",
)


def _measure(experiment: Experiment, page: Page, federation: PaperFederation, repeat: int) -> Panel:
    """Run a federation's grid, add its table and findings to the page, and return its lines."""
    rows: list[tuple[str, ...]] = []
    lines: dict[str, list[Mean]] = {}
    claims: dict[str, PrivacyClaim] = {}
    for defence in defences(federation):
        sweep = experiment.sweep(
            f"naseri-{defence.recipe}-{federation.data}",
            defence.recipe,
            defence.settings,
            [Axis("budget.epsilon", EPSILONS)] if defence.private else [],
            repeat,
        )
        lines[defence.name] = [_percent(sweep, c) for c in range(len(sweep.cells))]
        if defence.private:
            claims[defence.name] = claim_of(sweep)
        for c, mean in enumerate(lines[defence.name]):
            lost = "-" if defence.name == NONE else f"{lines[NONE][0].value - mean.value:.2f}"
            rows.append((defence.name, *_claim(sweep, c), UNPUBLISHED, str(mean), lost))
    page.tables.append(TextTable(_HEADERS, tuple(rows), f"{federation.title}:"))
    single = {name: line[0].value for name, line in lines.items() if name not in (LOCAL, CENTRAL)}
    local, central = ([mean.value for mean in lines[name]] for name in (LOCAL, CENTRAL))
    page.findings += [
        harmless(federation.title, single),
        varying_cost(federation.title, single[NONE], local, central),
    ]
    page.settings.append(f"{federation.title}. {meaning(*claims.values())}")
    return _panel(federation.title, lines, claims)


def _claim(sweep: Sweep, cell: int) -> tuple[str, ...]:
    """Epsilon and delta with the unit, the trust and the neighbours they hold for."""
    claim = sweep.prepared[cell].headline_claim
    if claim is None:
        return "nothing claimed", "-", "-", "-", "-"
    unit, trust, neighbours = str(claim.unit), str(claim.trust), str(claim.neighbours)
    return claim.value, f"{claim.delta:g}", unit, trust, neighbours


def _panel(
    title: str, lines: Mapping[str, list[Mean]], claims: Mapping[str, PrivacyClaim]
) -> Panel:
    places = [float(epsilon) for epsilon in EPSILONS]
    return Panel(
        [
            Series(f"{name}: epsilon {claim.terms}", places, lines[name], stroke(i))
            for i, (name, claim) in enumerate(claims.items())
        ],
        "epsilon (for whom: see the legend)",
        "test accuracy (%)",
        title,
        levels={name: means[0].value for name, means in lines.items() if name not in claims},
        log_x=True,
        within=PERCENT,
    )


def _percent(sweep: Sweep, cell: int) -> Mean:
    return mean_of([100 * outcome.test_metrics["accuracy"] for outcome in sweep.outcomes(cell)])


def _listed(lost: Mapping[str, float]) -> str:
    return ", ".join(f"{points:.2f} ({name})" for name, points in lost.items())
