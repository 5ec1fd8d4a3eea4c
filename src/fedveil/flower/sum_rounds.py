"""`SumRounds`: the server's side of secure sums over a federation's transport."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedveil.flower.messages import (
    MaskedAsk,
    Refusal,
    RoundAsk,
    ServerMessage,
    SumStep,
    Transport,
    bytes_tensor,
    fault_of,
)
from fedveil.flower.sum_terms import step_forms
from fedveil.masking.masks import Steps
from fedveil.masking.sum_messages import MessageRefused, Place, SumTerms
from fedveil.masking.sum_server import SumServer
from fedveil.privacy.noise.grid import LARGEST_SUM

if TYPE_CHECKING:
    from fedveil.flower.federation_server import Outcome

KEY_SECONDS = 30.0
"""The most seconds that a round waits for the keys of sites that are online and have sent none."""


@dataclass(eq=False)
class SumRounds:
    """The secure sums of a run, as the server goes through them with the sites.

    Guarantee: that of `SumServer`. A sum is of all sites whose vectors came in time, if these are
    at least as many as the threshold, and if so many of them open it. A site that is missing from
    a round is not asked to mask again before it has sent its keys anew.

    | edge | behaviour |
    |---|---|
    | a site without keys | is asked for them before the round |
    | a site that drops out, at whichever step | the sum is opened without it |
    | an answer that the protocol refuses, or of another run, round, attempt or site | named |
    | fewer sites than the threshold at any step, a sum beyond its limit | no sum: `Outcome.lost` |

    Attributes:
        terms: The terms.
        site_names: The names of the sites, in the order of their numbers.
        plan: The digest of the plan.
        transport: Reaches the sites.
        clock: Returns the time in seconds.
    """

    terms: SumTerms
    site_names: list[str]
    plan: str
    transport: Transport
    clock: Callable[[], float] = time.monotonic
    _known: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._server = SumServer(self.terms)

    def opened_sum(self, ask: RoundAsk, outcome: "Outcome", deadline: float) -> Steps | None:
        """Return the sum of the sites' vectors, int64 [P], None if there is none.

        `outcome` gets who answered, declined or was refused, and why there is no sum.

        Args:
            ask: The ask of the round.
            outcome: The outcome of the round. Its `invited` sites are in the roster, no others.
            deadline: Seconds to wait for vectors, and again for each later step.
        """
        began, server = self.clock(), self._server
        try:
            self._collect_keys(ask, outcome, min(deadline, KEY_SECONDS))
            invited = [self.site_names.index(name) for name in outcome.invited]
            roster = server.open(Place(ask.round, ask.attempt), invited)
            places = (ask.run, ask.round, ask.attempt, ask.plan, ask.params, ask.moving)
            masked = MaskedAsk(*places, bytes_tensor(roster), ledger_tail=ask.ledger_tail)
            asked = [name for name in outcome.invited if name in self._known]
            steps = dict.fromkeys(asked, masked)
            sent = self._exchange(steps, outcome, deadline, server.add_masked, None)
            for name in {*asked} - sent:
                self._forget(name)
            outcome.seconds = round(self.clock() - began, 3)
            closings = server.close()
            outcome.answered = [self.site_names[site] for site in closings]
            self._open(ask, closings, outcome, deadline)
            return server.sum(int(LARGEST_SUM))
        except MessageRefused as e:
            outcome.lost = str(e)
            return None

    def _open(
        self, ask: RoundAsk, closings: Mapping[int, bytes], outcome: "Outcome", deadline: float
    ) -> None:
        """Collect the shares that open the sum: at once, or once enough sites have agreed."""
        server, needed = self._server, self.terms.threshold
        steps = {
            self.site_names[site]: self._step(ask, site, each) for site, each in closings.items()
        }
        if server.needs_agreement:
            self._exchange(steps, outcome, deadline, server.add_agreed, needed)
            certificate = server.certify()
            steps = {self.site_names[site]: self._step(ask, site, certificate) for site in closings}
        self._exchange(steps, outcome, deadline, server.add_reveal, needed)

    def _collect_keys(self, ask: RoundAsk, outcome: "Outcome", seconds: float) -> None:
        """Ask the sites that are online for keys that the server does not have.

        Sites that are not online are left out of the round.
        """
        online = self.transport.online() & {*self.site_names}
        for name in self._known - online:
            self._forget(name)
        missing = [name for name in self.site_names if name in online - self._known]
        steps = {name: self._step(ask, self.site_names.index(name), b"") for name in missing}
        self._known |= self._exchange(steps, outcome, seconds, self._server.add_advert, None)

    def _exchange(
        self,
        messages: Mapping[str, ServerMessage],
        outcome: "Outcome",
        seconds: float,
        add: Callable[[bytes], int],
        enough: int | None,
    ) -> set[str]:
        """Send messages, and hand what comes back to `add`, which returns the number of its site.

        Returns the names of the sites whose answers counted. It ends when `enough` have, None: when
        all have or time is over.
        """
        terms, counted = self.terms, set[str]()
        forms = step_forms(terms.words, terms.bits, terms.sites)
        if not messages:
            return counted
        ask = next(iter(messages.values()))
        until, refused = self.clock() + seconds, set[str]()
        for arrival in self.transport.send(messages, seconds, forms):
            site, message = arrival.site, arrival.message
            known = counted | refused
            reason = fault_of(arrival, ask, messages.keys(), known, late=self.clock() > until)
            if reason:
                outcome.rejected[site] = reason
            elif isinstance(message, Refusal):
                refused.add(site)
                outcome.declined[site] = message.reason
            elif isinstance(message, SumStep):
                try:
                    counted.add(self.site_names[add(message.encoded)])  # whoever has signed it
                except MessageRefused as e:
                    refused.add(site)
                    outcome.rejected[site] = str(e)
            if enough is not None and len(counted) >= enough:
                break
        return counted

    def _step(self, ask: RoundAsk, site: int, content: bytes) -> SumStep:
        """Return a step of a round, for a site."""
        place = (ask.run, ask.round, ask.attempt, self.plan)
        return SumStep(*place, self.site_names[site], bytes_tensor(content))

    def _forget(self, name: str) -> None:
        """Leave a site out until it has sent its keys again."""
        self._known.discard(name)
        self._server.forget(self.site_names.index(name))
