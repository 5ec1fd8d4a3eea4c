"""Clip decay: which schedule of the clip suits LDP-SGD (LINE, "A Study on Hyperparameter Tuning of
Local Differential Privacy Mechanisms in Federated Learning").

The paper gives findings in words and figures without numbers; whether they are seen here is decided
by rules on the measured curves, which stand in `decay_effect` and the functions after it. Schedules
share their random numbers, so they are compared repetition by repetition.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from fedveil.papers.reproduction import Experiment, Item, Page, PaperStatement, read_tables
from fedveil.papers.sweep_results import claim_of
from fedveil.tuning import figures
from fedveil.tuning.figures import Panel, Series, Stroke
from fedveil.tuning.recipe_grid import Axis
from fedveil.tuning.repetitions import mean_of
from fedveil.tuning.sweep import Sweep
from fedveil.tuning.trials import TrialOutcome

RATES = ("0.03", "0.1", "0.3", "1")
TEXTS: dict[str, Any] = read_tables("clip_decay")

GROUPS: dict[str, list[str]] = TEXTS["groups"]
"""Schedules by the column of the figure in which they are drawn."""

CLIPS = ("0.01", "0.05")
POWERS = ("0.5", "1", "2")
EPSILON, DELTA = 30.0, 1e-5

BASELINE = "baseline"
PUBLISHED: dict[str, str] = TEXTS["published"]
"""By the paper's names of schedules: its result in words."""

Line = npt.NDArray[np.float64]
"""A metric, one row per repetition, one column per measured round."""


@dataclass(frozen=True)
class DecaySetting:
    """The federation of one scale.

    Attributes:
        data: The data set.
        clients, cohort: Clients in all, and in a round.
        rounds: The number of rounds.
        refresh: Rounds between two histograms of the adaptive schedule.
        tried: Rounds in which a learning rate is tried.
    """

    data: str
    clients: int
    cohort: int
    rounds: int
    refresh: int
    tried: int

    @property
    def max_turns(self) -> int:
        """Return the most rounds of one client: a fifth more than the mean, rounded up."""
        return -(-6 * self.cohort * self.rounds // (5 * self.clients))

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of the recipe that all runs share, as texts `key=value`."""
        return (
            f"data.name={self.data} data.clients={self.clients} data.partition=iid "
            f"model.name=softmax sample.kind=fixed sample.size={self.cohort} "
            f"server.weights=uniform evaluate.every={max(1, self.rounds // 60)}"
        ).split()

    def private(self, rate: str) -> list[str]:
        """Return the overrides `key=value` of runs with clip and noise, at learning rate `rate`.

        The shared ones are among them.
        """
        keys = (
            f"rounds={self.rounds} sample.max_participations={self.max_turns} "
            f"budget.epsilon={EPSILON} budget.delta={DELTA} server.lr={rate}"
        )
        return [*self.overrides, *keys.split()]


@dataclass(frozen=True)
class Curve:
    """Test accuracy and loss of a schedule in the measured rounds.

    Attributes:
        rounds: The measured rounds, ascending.
        accuracy: Shares of records, [repetitions, measured rounds].
        loss: Losses of the same form. A diverged loss is infinite.
    """

    rounds: tuple[int, ...]
    accuracy: Line
    loss: Line

    @property
    def ends(self) -> Line:
        """Return the accuracy of each repetition after the last round, [repetitions]."""
        return self.accuracy[:, -1]

    @property
    def early(self) -> Line:
        """Return the mean accuracy over the first tenth of the rounds, [repetitions].

        The first measured round always counts.
        """
        last = max(self.rounds[-1] / 10, self.rounds[0])
        return np.asarray(self.accuracy[:, np.array(self.rounds) <= last].mean(axis=1))


Curves = Mapping[str, Curve]


def setting(experiment: Experiment, data: str) -> DecaySetting:
    """Return the federation on the data set `data` at the experiment's scale.

    Each image of the training split is a client.
    """
    rounds = experiment.choose(3000, 5000)
    return DecaySetting(data, clients=60_000, cohort=100, rounds=rounds, refresh=1000, tried=1000)


def families(refresh: int) -> dict[str, tuple[str, tuple[Axis, ...], list[str]]]:
    """Return the clip schedules of the paper, and two from a larger clip, by family.

    Each family is (overrides of the clip separated by spaces, axes, names of the cells in the order
    of the grid). `refresh` is the number of rounds between two histograms of the adaptive schedule.
    """
    return {
        family: (
            fields["overrides"].format(refresh=refresh),
            tuple(Axis(key, tuple(values)) for key, values in fields["axes"].items()),
            fields["schedules"],
        )
        for family, fields in TEXTS["families"].items()
    }


def decay_effect(curves: Curves, clip: str) -> PaperStatement:
    """Judge from final accuracies whether decay helps the clip 0.05, or hurts the clip 0.01.

    `clip` is one of `CLIPS`. Confirmed if it does at every power, in every repetition.
    """
    helps, constant = clip == CLIPS[1], curves[f"clip{clip}"].ends
    decayed = [curves[f"poly({clip}){power}"].ends for power in POWERS]
    effect, size = ("helps", "large") if helps else ("hurts", "small")
    end, order = ("above", "higher") if helps else ("below", "lower")
    return PaperStatement(
        f"Decay {effect} a {size} clip: poly({clip}) ends {end} clip{clip}.",
        all(_higher(d, constant) if helps else _higher(constant, d) for d in decayed),
        f"Rule: the accuracy after the last round is {order} at every power, in every repetition. "
        + f"{_ends(curves, GROUPS[f'From {clip}'][1:])}.",
    )


def adaptive_fades(curves: Curves) -> PaperStatement:
    """Judge whether adaptive0.01 leads both constants early and ends below both.

    Confirmed if it does in every repetition.
    """
    adaptive, constants = curves["adaptive0.01"], [curves[name] for name in _CONSTANTS]
    leads = all(_higher(adaptive.early, constant.early) for constant in constants)
    lower = all(_higher(constant.ends, adaptive.ends) for constant in constants)
    shown = ("adaptive0.01", *_CONSTANTS)
    early = ", ".join(f"{name} {mean_of(curves[name].early)}" for name in shown)
    return PaperStatement(
        "adaptive0.01 leads early and ends lower than the constants.",
        leads and lower,
        "Rule: in every repetition its accuracy, averaged over the first tenth of the rounds, is "
        "above both constants', and below both after the last round. "
        f"Early: {early} ({_met(leads)}). At the end: {_ends(curves, shown)} ({_met(lower)}).",
    )


def adaptive_loss_rises(curves: Curves) -> PaperStatement:
    """Judge whether the loss of adaptive0.05 climbs from its lowest to above that of clip0.05.

    Confirmed if it does in every repetition.
    """
    adaptive, constant = curves["adaptive0.05"], curves["clip0.05"]
    last, lowest, other = adaptive.loss[:, -1], adaptive.loss.min(axis=1), constant.loss[:, -1]
    above, rises = _higher(last, other), _higher(last, lowest)
    return PaperStatement(
        "The loss of adaptive0.05 rises above that of clip0.05.",
        above and rises,
        "Rule: in every repetition its loss after the last round is above clip0.05's and above "
        f"its own lowest. It ends at {mean_of(last)}, its lowest is "
        f"{mean_of(lowest)} ({_met(rises)}); clip0.05 ends at {mean_of(other)} "
        f"({_met(above)}).",
    )


def quantile_fails(curves: Curves) -> PaperStatement:
    """Judge whether both quantiles end below half the accuracy of the worse constant.

    Confirmed if they do in every repetition.
    """
    limit = np.minimum(*(curves[name].ends for name in _CONSTANTS)) / 2
    names = [name for name in curves if name.startswith("quantile")]
    return PaperStatement(
        "Following a quantile does not train, at 10 % or at 50 %.",
        all(_higher(limit, curves[name].ends) for name in names),
        "Rule: the accuracy after the last round is less than half of the lower constant's, at "
        f"both quantiles and in every repetition. Half of it is {mean_of(limit)}; here "
        f"{_ends(curves, names)}.",
    )


FINDINGS: tuple[Callable[[Curves], PaperStatement], ...] = (
    *(partial(decay_effect, clip=clip) for clip in reversed(CLIPS)),
    *(adaptive_fades, adaptive_loss_rises, quantile_fails),
)
"""Judges of the paper's statements, each from curves by name of the schedule."""

_CONSTANTS = ("clip0.01", "clip0.05")


def schedules_page(experiment: Experiment, data: str, title: str) -> Page:
    """Choose a learning rate without noise, run all schedules, and return their page.

    Sweeps are saved below `experiment.out`, and finished ones are not run again.

    Args:
        experiment: Directory and scale.
        data: The data set in recipes.
        title: The data set for readers.
    """
    here, repetitions = setting(experiment, data), experiment.repetitions(2, 10)
    name, shared = f"clip-decay-{here.data}", here.overrides
    settings, axis = [*shared, f"rounds={here.tried}"], Axis("server.lr", RATES)
    losses, ends = experiment.try_choices(f"{name}-rate", "fedsgd", settings, axis, "loss")
    rate = RATES[losses.index(min(losses))]
    settings = [*shared, f"rounds={here.rounds}", f"server.lr={rate}"]
    run = experiment.sweep(f"{name}-{BASELINE}", "fedsgd", settings, [], repetitions, curves=True)
    curves, sweeps = {BASELINE: curve_of(run.outcomes(0))}, {}
    for family, (keys, axes, schedules) in families(here.refresh).items():
        settings = [*here.private(rate), *keys.split()]
        sweep = experiment.sweep(
            f"{name}-{family}", "ldp-sgd", settings, axes, repetitions, curves=True
        )
        sweeps[family] = sweep
        curves |= {n: curve_of(sweep.outcomes(c)) for c, n in enumerate(schedules)}
    page = Page(f"{title}: schedules of the clip under LDP-SGD")
    values: dict[str, Any] = {"here": here, "repetitions": repetitions}
    values |= {"second": here.refresh + 1, "third": 2 * here.refresh + 1}
    values |= {"bit_noise": here.cohort / 20}
    page.setting_names.append(TEXTS["settings"].format(**values))
    plan = sweeps["constant"].prepared[0].plan
    multiplier = plan.release.settings(plan.clip_schedule)["multiplier"]
    values |= {"sigma": 2 * multiplier, "multiplier": multiplier, "rate": rate, "ends": ends}
    page.add_left_open(TEXTS["left_open"], short=claim_of(sweeps["constant"]).short, **values)
    page.add_table(
        ("schedule", "published (in words, no numbers)", "accuracy, here", "loss, here"),
        [
            (n, text, *(str(mean_of(v)) for v in (curves[n].ends, curves[n].loss[:, -1])))
            for n, text in PUBLISHED.items()
        ],
        "Test accuracy and loss after the last round:",
    )
    # of the reports and what is watched, together
    claims = [(n, "; ".join(map(str, s.prepared[0].shown_claims))) for n, s in sweeps.items()]
    rows = [(BASELINE, "nothing"), *claims]
    page.add_table(("schedule", "claim"), rows, "What is claimed, strictly:")
    page.figures[f"clip-decay-{data}.png"] = _figure(curves, title, here, sweeps)
    page.statements += [finding(curves) for finding in FINDINGS]
    page.page_notes += [_larger(curves), *TEXTS["notes"]]
    return page


ITEMS: dict[str, Item] = {
    "mnist": partial(schedules_page, data="mnist", title="MNIST"),
    "fashion-mnist": partial(schedules_page, data="fashion-mnist", title="Fashion-MNIST"),
}


def curve_of(outcomes: list[TrialOutcome]) -> Curve:
    """Return the curve of a cell from its repetitions' outcomes, which must have test curves."""
    rounds = tuple(round for round, _ in outcomes[0].test_curve)
    accuracy, loss = (
        np.array([[metrics[metric] for _, metrics in one.test_curve] for one in outcomes])
        for metric in ("accuracy", "loss")
    )
    return Curve(rounds, accuracy, np.where(np.isnan(loss), math.inf, loss))


def _higher(higher: Line, lower: Line) -> bool:
    """Return whether the first metric is higher than the second in every repetition."""
    return bool((higher > lower).all())


def _ends(curves: Curves, names: Sequence[str]) -> str:
    """Return final accuracies as text, "schedule mean +- half interval", separated by commas."""
    return ", ".join(f"{name} {mean_of(curves[name].ends)}" for name in names)


def _met(held: bool) -> str:
    """Return "met" or "not met"."""
    return "met" if held else "not met"


def _larger(curves: Curves) -> str:
    """Return a paragraph on what decay does to a clip of 0.25."""
    constant, decayed = "clip0.25", "poly(0.25)1"
    by = mean_of(100 * (curves[decayed].ends - curves[constant].ends))
    ends = [mean_of(curves[name].ends) for name in (decayed, constant)]
    return str(TEXTS["larger"].format(decayed=decayed, constant=constant, by=by, ends=ends))


def _figure(curves: Curves, title: str, here: DecaySetting, sweeps: Mapping[str, Sweep]) -> Figure:
    """Draw accuracy above and loss below, a column for each group of schedules.

    `title` is the data set, and `sweeps` are those of the families, whose claims are shown.
    """
    said = TEXTS["figure"].format(here=here)
    claims = [claim for sweep in sweeps.values() for claim in sweep.prepared[0].shown_claims]
    panels = []
    for metric, up in _UPS.items():
        accuracy = metric == "accuracy"
        for group, names in GROUPS.items():
            series = []
            for n in names:
                line: Line = getattr(curves[n], metric)
                means = [mean_of(column) for column in line.T]
                series.append(Series(n, curves[n].rounds, means, Stroke(*TEXTS["looks"][n])))
            head, within = (group, figures.SHARE) if accuracy else ("", figures.ANYWHERE)
            panels.append(Panel(series, "rounds done", up, head, log_y=not accuracy, within=within))
    what = f"Schedules of the clip bound on {title}: test accuracy and loss during training"
    return figures.draw(what, [said, *figures.claim_terms(claims)], panels, columns=len(GROUPS))


_UPS = {"accuracy": "test accuracy\n(share of records)", "loss": "test loss\n(cross-entropy, nats)"}
