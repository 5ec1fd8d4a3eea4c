"""One measurement over a federation: sites are asked, and their noisy sums are combined."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fedveil.flower.federation_files import Federation
from fedveil.flower.messages import (
    MetricsAnswer,
    MetricsAsk,
    Refusal,
    Transport,
    fault_of,
    metrics_forms,
)
from fedveil.privacy.site_metrics import SiteMetrics


@dataclass
class Measured:
    """The answers of the sites to one ask for metrics.

    Attributes:
        sums_by_site: The noisy sums of each site.
        rejected: By site, the reason why its sums do not count.
        declined: By site, its reason to take no part.
    """

    sums_by_site: dict[str, torch.Tensor] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)

    def to_dict(self, ask: MetricsAsk, names: list[str]) -> dict[str, Any]:
        """Return the outcome as a line of `sites.jsonl`.

        Keys: "measured" (the round), "attempt", "answered", "declined", "refused" and "absent".
        """
        known = {*self.sums_by_site, *self.rejected, *self.declined}
        return {
            "measured": ask.round,
            "attempt": ask.attempt,
            "answered": list(self.sums_by_site),
            "declined": self.declined,
            "refused": self.rejected,
            "absent": [name for name in names if name not in known],
        }


def ask_for_metrics(
    ask: MetricsAsk,
    metrics: SiteMetrics,
    federation: Federation,
    transport: Transport,
    clock: Callable[[], float],
) -> Measured:
    """Ask all sites to measure a model, and return the first valid answer of each.

    Guarantee: every site is asked, whoever took part in the round, so that being asked tells
    nothing about a cohort. An answer counts at most once, only if it was asked for, from the site
    itself and before the deadline, and only if people can have such metrics.
    """
    found, until = Measured(), clock() + federation.deadline
    names, forms = federation.site_names, metrics_forms(metrics.width)
    messages = dict.fromkeys(names, ask)
    for arrival in transport.send(messages, federation.deadline, forms):
        known = {*found.sums_by_site, *found.declined}
        site, message = arrival.site, arrival.message
        reason = fault_of(arrival, ask, names, known, late=clock() > until)
        if not reason and isinstance(message, MetricsAnswer):
            reason = metrics.refusal(message.noisy_sums)
            if not reason:
                found.sums_by_site[site] = message.noisy_sums
        elif not reason and isinstance(message, Refusal):
            found.declined[site] = message.reason
        elif not reason:
            reason = "it did not answer with metrics"
        if reason:
            found.rejected[site] = reason
    return found
