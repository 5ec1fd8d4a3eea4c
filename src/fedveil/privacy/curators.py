"""Adaptive bounds under local DP that somebody trusted watches, and what that adds to a line.

The server sees clients' reports and the bound, which a curator's noisy sums move: the line against
it is the composition of both. Neither part stands alone, since the bound that shapes later reports
depends on what was watched, and what is watched on earlier reports.
"""

import math
from dataclasses import dataclass, replace

from fedveil.errors import BadInput
from fedveil.privacy.accounting import epsilon
from fedveil.privacy.calibration import MOST_NOISE
from fedveil.privacy.central import least_noise
from fedveil.privacy.claims import Relation, Trust
from fedveil.privacy.events import Gaussian, GaussianWithCurator
from fedveil.privacy.rules import Median, Quantile, Rule
from fedveil.privacy.terms import Terms

_SEEN = (
    "a trusted curator (or an enclave) sees {what} and publishes them with noise; the server sees "
    "that and the reports, and learns from both"
)


@dataclass(frozen=True)
class Curator:
    """A Gaussian release about a client in at most `most` of its turns; `key` sets its noise."""

    release: Gaussian
    most: int
    watched: str
    seen: str
    key: str
    setting: float
    remedy: str

    def beside(self, report: Gaussian) -> GaussianWithCurator:
        """A client's turn: its own report, and its part in what the curator publishes."""
        return GaussianWithCurator(report, self.release, self.most)

    def on(self, line: Terms) -> Terms:
        """The line of reports as one of reports and what is watched, against the server."""
        first, *others = line.assumptions
        return replace(
            line,
            trust=Trust.CURATOR,
            covers=line.covers.replace("updates", f"updates and {self.watched}", 1),
            assumptions=(first, _SEEN.format(what=self.seen), *others),
        )

    def check(self, base: Terms, count: int) -> None:
        """Refuse a curator that leaves nothing of the line's budget for `count` reports."""
        budget, turns = base.budget, min(count, self.most)
        if math.isinf(budget.epsilon):
            return
        least = self.beside(Gaussian(MOST_NOISE))
        if epsilon(least, count, budget.delta, Relation.REPLACE) < budget.epsilon:
            return
        alone = epsilon(self.release, turns, budget.delta, Relation.REPLACE)
        told = replace(self.on(base), event=self.release, covers=self.watched)
        raise BadInput(
            f"{self.key} {self.setting:g} leaves nothing of budget.epsilon {budget.epsilon:g} for "
            f"the updates: its {turns} releases alone cost {told.claim(alone).short}; "
            f"{self.remedy}, or raise budget.epsilon"
        )


def curator_of(rule: Rule, base: Terms, rounds: int) -> Curator | None:
    """Who watches for a rule that has its noise, if anybody does.

    The sum of centred bits moves by at most 1 when a client is replaced, and every turn has a bit.
    Replacing a client changes two counts of a histogram by one: L2 sensitivity sqrt(2).
    """
    if type(rule) is Quantile and rule.noise:
        return Curator(
            Gaussian(rule.noise),
            base.participations(rounds),
            "bits",
            "the clients' bits (was the update within the bound?)",
            "bound.bit_noise",
            rule.noise,
            "raise it",
        )
    if type(rule) is Median:
        return Curator(
            Gaussian(rule.noise / math.sqrt(2)),
            _histograms(rule, base, rounds),
            "norms",
            "the clients' gradient norms in bins",
            "bound.epsilon",
            rule.budget.epsilon,
            "lower it",
        )
    return None


def with_noise(rule: Rule, base: Terms, rounds: int) -> Rule:
    """A median rule with the noise that keeps all its histograms within its own budget.

    No amplification, composed over all refreshes in which one client can take part.
    """
    if not isinstance(rule, Median):
        return rule
    count = _histograms(rule, base, rounds)
    multiplier = least_noise(Gaussian, count, rule.budget, Relation.REPLACE)
    return replace(rule, noise=math.sqrt(2) * multiplier)


def _histograms(rule: Median, base: Terms, rounds: int) -> int:
    """In how many histograms one client can be."""
    return replace(base, every=rule.every).participations(rounds)
