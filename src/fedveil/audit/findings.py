"""Results of attacks: a `Finding` bounds epsilon, a `Leak` measures what was learnt.

Measures of membership scores are AUC, balanced accuracy, and TPR at a low FPR, with intervals at
95 % over records, for the models as they were trained.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import ROUND_FLOOR
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from scipy.optimize import brentq
from scipy.special import ndtri
from scipy.stats import rankdata

from fedveil.audit.bounds import Evidence, Scores, least, most
from fedveil.base.checks import whole
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim, rendered
from fedveil.tuning.figures import SOFT, canvas, line_style, name_axes, offset_transform, stroke

SHOWN = 0.05
"""Lower bounds are shown at 95 %."""

CANARY_COUNT = whole(50, "at least 50 are needed")
"""The limits of the number of canaries."""

ALARM = 1e-4
"""The probability of a false alarm: one audit in ten thousand."""


OnStep = Callable[[int, int], None]
"""Called with the progress of an attack: (steps done, steps in all)."""


def ignore(done: int, of: int) -> None:
    """Ignore progress."""


class Attack(StrEnum):
    """The attacks of an audit, by the names that `--attacks` takes, in the order they run."""

    RANDOMISER = "randomiser"
    SENSITIVITY = "sensitivity"
    STATISTICS = "statistics"
    CANARIES = "canaries"
    ONE_RUN = "one-run"
    MEMBERSHIP = "membership"
    WHITE_BOX = "white-box"
    PROPERTY = "property"
    INVERSION = "inversion"


class Verdict(StrEnum):
    """The verdict of an attack on a claim. No attack proves a claim."""

    NOT_VIOLATED = "not violated"
    CHANCE = "above, which chance explains"
    VIOLATED = "violated"


@dataclass(frozen=True)
class Finding:
    """A lower bound on epsilon beside the claim about the same release.

    Attributes:
        attack: The name of the attack.
        what: The target of the attack, in words.
        claim: The claim that the bound is compared with.
        evidence: The counts or scores that the bound follows from.
        alarm: The probability of a false alarm that this finding is allowed.
        estimate: The likeliest epsilon, without confidence. None if the attack has none.
    """

    attack: str
    what: str
    claim: PrivacyClaim
    evidence: Evidence
    alarm: float = ALARM
    estimate: float | None = None

    @cached_property
    def lower(self) -> float:
        """Return the lower bound on epsilon at 95 %."""
        return self.evidence.lower_bound(SHOWN)

    @cached_property
    def verdict(self) -> Verdict:
        """Return the verdict on the claim.

        VIOLATED only if the bound with error probability `alarm` exceeds the claim. CHANCE if only
        the bound at 95 % does, which is wrong once in twenty audits. NOT_VIOLATED otherwise.
        """
        if self.evidence.lower_bound(self.alarm) > self.claim.epsilon:
            return Verdict.VIOLATED
        return Verdict.CHANCE if self.lower > self.claim.epsilon else Verdict.NOT_VIOLATED

    @property
    def violated(self) -> bool:
        """Return whether the verdict is VIOLATED."""
        return self.verdict is Verdict.VIOLATED

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values.

        Keys: attack, what, claim (that of `PrivacyClaim.to_dict`), lower_bound (at 95 %),
        confidence (0.95), estimate (or None), draws, how (the kind of bound) and verdict. `alarm`
        is left out.
        """
        return {
            "attack": self.attack,
            "what": self.what,
            "claim": self.claim.to_dict(),
            "lower_bound": self.lower,
            "confidence": 1 - SHOWN,
            "estimate": self.estimate,
            "draws": self.evidence.draws,
            "how": self.evidence.bound_name,
            "verdict": str(self.verdict),
        }

    def row(self) -> dict[str, str]:
        """Return texts by column for a table of findings. "estimate" is "" if there is none."""
        estimate = "" if self.estimate is None else rendered(self.estimate, ROUND_FLOOR)
        return {
            "attack": self.attack,
            "about": self.what,
            "claim": self.claim.short,
            "at least (95 %)": rendered(self.lower, ROUND_FLOOR),
            "estimate": estimate,
            "draws": f"{self.evidence.draws:,}",
            "by": self.evidence.bound_name,
            "claim is": str(self.verdict),
        }


@dataclass(frozen=True)
class Measure:
    """A measure of an attack, with its 95 % interval.

    `low` and `high` are None without an interval. `str()` gives the value with four digits, and
    "(low to high)" after it if there is an interval.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class Leak:
    """The success of an attack. It does not bound epsilon, so it refutes no claim.

    Attributes:
        attack: The name of the attack.
        what: The target of the attack, in words.
        measures: Measures of the field, such as AUC or PSNR.
        claim: The claim that covers this attacker. None if nothing is claimed.
    """

    attack: str
    what: str
    measures: tuple[Measure, ...]
    claim: PrivacyClaim | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values.

        Keys: attack, what, claim (of `PrivacyClaim.to_dict`, or None), and measures, by name
        {"value", "low", "high"}. Without an interval, low and high are None.
        """
        return {
            "attack": self.attack,
            "what": self.what,
            "claim": None if self.claim is None else self.claim.to_dict(),
            "measures": {
                m.name: {"value": m.value, "low": m.low, "high": m.high} for m in self.measures
            },
        }

    def row(self) -> dict[str, str]:
        """Return texts by column for a table: attack, about, claim, and one column per measure."""
        claim = "nothing claimed" if self.claim is None else self.claim.short
        measures = {measure.name: str(measure) for measure in self.measures}
        return {"attack": self.attack, "about": self.what, "claim": claim, **measures}


RATES = (0.001, 0.01)
"""The false positive rates at which the TPR is reported."""

AUC, BALANCED = "AUC", "balanced accuracy"
_ALPHA = 0.05
_SIGMAS = float(ndtri(1 - _ALPHA / 2))


def tpr_at(rate: float) -> str:
    """Return the name of the measure TPR at a false positive rate.

    >>> tpr_at(0.001)
    'TPR at 0.1 % FPR'
    """
    return f"TPR at {100 * rate:g} % FPR"


@dataclass(frozen=True, eq=False)
class Roc:
    """Scores of members and of other records. The attacker guesses "in" for high scores.

    Attributes:
        member_scores: Scores of records that were trained on.
        others: Scores of other records.
        paired: Whether the k-th scores of both are of the same record, once in and once out.

    | edge | behaviour |
    |---|---|
    | fewer than two scores of either | BadInput |
    | a score that is not finite | BadInput |
    | pairs of unequal number | BadInput |
    """

    member_scores: Scores
    others: Scores
    paired: bool = False

    def __post_init__(self) -> None:
        sizes = f"{len(self.member_scores)} members and {len(self.others)} others"
        if min(len(self.member_scores), len(self.others)) < 2:
            raise BadInput(f"{sizes}: two of each are needed")
        if not (np.isfinite(self.member_scores).all() and np.isfinite(self.others).all()):
            raise BadInput("a score is not finite: nothing can be told from it")
        if self.paired and len(self.member_scores) != len(self.others):
            raise BadInput(f"{sizes} in pairs")

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Return AUC, balanced accuracy, and TPR at each FPR of `RATES`, in that order."""
        return (self.auc, self.balanced, *(self.hits(rate) for rate in RATES))

    @cached_property
    def auc(self) -> Measure:
        """Return the AUC: the chance that a member scores above another, ties counting half.

        Its interval is DeLong's (1988). For pairs it is that of Obuchowski (1997), in which the two
        scores of a record are one observation.
        """
        below = _placements(self.member_scores, self.others)
        above = _placements(-self.others, -self.member_scores)
        value = float(below.mean())
        if self.paired:
            variance = float((below + above - 2 * value).var(ddof=1)) / len(below)
        else:
            variance = float(below.var(ddof=1)) / len(below) + float(above.var(ddof=1)) / len(above)
        return _with_interval(AUC, value, variance)

    @cached_property
    def balanced(self) -> Measure:
        """Return the balanced accuracy of guesses at a threshold chosen on other records.

        Each half of the records (even and odd positions) is guessed at the threshold that is best
        on the other half.
        """
        halves = [(self.member_scores[k::2], self.others[k::2]) for k in (0, 1)]
        rights = [0, 0]
        for there, here in (halves, halves[::-1]):
            threshold = _best_threshold(*there)
            rights[0] += int((here[0] >= threshold).sum())
            rights[1] += int((here[1] < threshold).sum())
        counts = len(self.member_scores), len(self.others)
        shares = [rights[0] / counts[0], rights[1] / counts[1]]
        variance = sum(s * (1 - s) / (4 * n) for s, n in zip(shares, counts, strict=True))
        return _with_interval(BALANCED, sum(shares) / 2, variance)

    def hits(self, rate: float) -> Measure:
        """Return the TPR at an FPR of at most `rate`, with its interval by Clopper and Pearson.

        It is the share of members that reach `threshold(rate)`.
        """
        threshold = self.score_threshold(rate)
        found, of = int((self.member_scores >= threshold).sum()), len(self.member_scores)
        low, high = (float(end(found, of, _ALPHA / 2)) for end in (least, most))
        return Measure(tpr_at(rate), found / of, low, high)

    def score_threshold(self, rate: float) -> float:
        """Return the lowest threshold that at most a share `rate` of the others reaches."""
        allowed = int(np.floor(rate * len(self.others) * (1 + 1e-12)))
        highest = np.sort(self.others)[::-1]
        return float(np.nextafter(highest[min(allowed, len(highest) - 1)], np.inf))

    @property
    def curve(self) -> tuple[Scores, Scores]:
        """Return (false positive rates, true positive rates), both rising, one of each per score.

        Equal scores have one entry.
        """
        thresholds = np.unique(np.concatenate([self.member_scores, self.others]))[::-1]
        rates = [
            1 - np.searchsorted(np.sort(each), thresholds) / len(each)
            for each in (self.others, self.member_scores)
        ]
        return rates[0], rates[1]


def roc_figure(curves: Mapping[str, Roc], what: str, claim: PrivacyClaim | None) -> Figure:
    """Draw ROC curves by name on log axes, with intervals of the TPR at low false positive rates.

    `what` is the target of the attack in words, for the subtitle. `claim` is that of the run, None
    if the run claims nothing. Returns the figure and writes no file.
    """
    lowest = min(1 / len(roc.others) for roc in curves.values())
    rates, ends = [rate for rate in RATES if rate >= lowest], (lowest / 1.2, 1.2)
    looks = {
        f"{name}, AUC {roc.auc.value:.3f} ({roc.auc.low:.3f} to {roc.auc.high:.3f})": stroke(i)
        for i, (name, roc) in enumerate(curves.items())
    }
    said = [
        f"{what}. Whiskers, and numbers in brackets: 95 % intervals. Dotted: guessing.",
        "The run claims nothing." if claim is None else f"The run claims {claim.short}.",
    ]
    title = "Membership: telling records that were trained on from others"
    figure = canvas(title, said, (6.4, 4.2), looks)
    at = figure.subplots()
    name_axes(at, "false positives (share of others)", "true positives (share of members)")
    at.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for i, (name, roc) in enumerate(zip(looks, curves.values(), strict=True)):
        look, moved = looks[name], offset_transform(at, figure, i, len(looks))
        style = line_style(look)
        at.plot(*roc.curve, label=name, drawstyle="steps-post", **style | {"marker": ""})
        hits = [roc.hits(rate) for rate in rates]
        low = [max(ends[0], hit.low or 0.0) for hit in hits]
        high = [hit.high or 1.0 for hit in hits]
        at.vlines(rates, low, high, color=look.colour, linewidth=1.1, transform=moved)
        style |= {"linestyle": "none", "transform": moved}
        at.plot(rates, [hit.value for hit in hits], **style)
    at.plot(ends, ends, ":", color=SOFT, linewidth=1.2)
    for axis in (at.xaxis, at.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda rate, _: f"{100 * rate:g} %"))
    return figure


def _with_interval(name: str, value: float, variance: float) -> Measure:
    """Return a measure with its 95 % interval by the normal law, cut to [0, 1]."""
    half = _SIGMAS * float(np.sqrt(variance))
    return Measure(name, value, max(0.0, value - half), min(1.0, value + half))


def _placements(scores: Scores, others: Scores) -> Scores:
    """Return for each score the share of `others` below it, ties counting half."""
    ranked = np.sort(others)
    both = np.searchsorted(ranked, scores, "left") + np.searchsorted(ranked, scores, "right")
    return np.asarray(both / (2 * len(ranked)))


def _best_threshold(members: Scores, others: Scores) -> float:
    """Return the threshold with the best balanced accuracy on these records.

    Scores at the threshold or above are guessed "in".
    """
    thresholds = np.unique(np.concatenate([members, others]))
    hits = 1 - np.searchsorted(np.sort(members), thresholds) / len(members)
    rejected = np.searchsorted(np.sort(others), thresholds) / len(others)
    return float(thresholds[np.argmax(hits + rejected)])


_NEAR = 1e-9


def auc(scores: Scores, has: npt.NDArray[np.bool_]) -> float:
    """Return the probability that a record in the mask `has` scores above one outside, ties half.

    Both kinds of records are needed, otherwise ZeroDivisionError.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, False, True, True]))
    0.875
    """
    count = int(has.sum())
    above = float(rankdata(scores)[has].sum()) - count * (count + 1) / 2
    return above / (count * (len(has) - count))


def auc_interval(area: float, with_: int, without: int, confidence: float) -> tuple[float, float]:
    """Return (low, high) of the confidence interval of the AUC `area`.

    The interval holds all values that `area` does not contradict. Hanley and McNeil's variance is
    taken at the value in question, not at the estimate, with both numbers of cases replaced by
    their mean less one (Newcombe 2006, method 5). So an area of 1 still has an interval. Holds for
    independent cases.

    Args:
        area: The estimated AUC.
        with_: The number of positives.
        without: The number of negatives.
        confidence: The probability that the interval holds the true AUC, such as 0.95.
    """
    reach = float(ndtri((1 + confidence) / 2))
    most = max((with_ + without) / 2 - 1, 0.0)

    def gap(true: float, side: int) -> float:
        """Return how far `area` is outside the interval around `true`, negative inside.

        Side 1 is above the interval, and side -1 below.
        """
        ahead, behind = (1 - true) / (2 - true), true / (1 + true)
        variance = true * (1 - true) * (1 + most * (ahead + behind)) / (with_ * without)
        return side * (area - true) - reach * math.sqrt(variance)

    low, high = 0.0, 1.0
    under, over = max(area - _NEAR, 0.0), min(area + _NEAR, 1.0)  # at 0 and 1 nothing varies
    if gap(under, 1) < 0 < gap(0.0, 1):
        low = float(brentq(gap, 0.0, under, args=(1,)))
    if gap(over, -1) < 0 < gap(1.0, -1):
        high = float(brentq(gap, over, 1.0, args=(-1,)))
    return low, high
