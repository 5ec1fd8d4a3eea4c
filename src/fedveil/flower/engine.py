"""`RemoteEngine`: the sum over a cohort whose clients are sites, which are asked for their reports.

The proof note is docs/proofs/flower.md.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedveil.base.errors import BadInput
from fedveil.flower.federation import Federation
from fedveil.flower.messages import Answer, Refusal, RoundAsk
from fedveil.flower.mixer_link import MixerLink
from fedveil.flower.round_log import About, Outcome, RoundLog
from fedveil.flower.transport import Arrival, Transport
from fedveil.mixing.protocol import number_of
from fedveil.privacy.releases.two_point import TwoPointReports
from fedveil.privacy.round import Round
from fedveil.training.engines.engine import Job
from fedveil.training.evaluate import evaluate
from fedveil.training.exchange import Sent, server_sum
from fedveil.training.reports import Rows
from fedveil.training.server import Weights
from fedveil.training.sums import CohortSum


@dataclass(frozen=True, eq=False)
class RemoteEngine:
    """Asks the sites of a cohort, and adds up what they send.

    Guarantee: docs/proofs/flower.md. Whatever arrives, a site's answer counts at most once in a
    round, only if it was asked for by this run, round and attempt, only from the site itself, and
    only before the deadline; all that counts goes through `server_sum`. Nothing about the noise,
    the divisor or the charge depends on who answered. Where the cohort is secret, nothing that
    others can see does either: a round with secure noise takes the whole deadline, and too few
    answers do not end it.

    | what arrives | what is done |
    |---|---|
    | NaN, infinity, another length or type | counts as zero, named |
    | an answer to another round, attempt or run; late; twice; not asked for | dropped, named |
    | an answer under another site's name | dropped, and its sender named |
    | a refusal | kept with its reason; the site counts as absent |
    | nothing | the site is absent: its report is zero |
    | fewer answers than `minimum`, cohort public | the model stays, and so does the charge |
    | with a mixer: it hands on nothing in time | the same |
    """

    job: Job
    federation: Federation
    transport: Transport
    about: About
    log: RoundLog
    told: Callable[[Outcome], None] = lambda outcome: None
    mixer: MixerLink | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        """Refuse what cannot be kept when sites are reached through a server that knows them."""
        plan = self.job.plan
        if plan.release.minimum and self.mixer is None:
            raise BadInput(
                "[shuffle] needs a mixer that sites reach by themselves: what carries these "
                "messages knows who sent what; name it in federation.toml ([mixer]), or leave "
                "[shuffle] out, so that trust is local"
            )
        if self.mixer is not None and not plan.release.minimum:
            raise BadInput("federation: [mixer] is for recipes with [shuffle]: leave it out")
        expected = plan.expected
        if not plan.secret_cohort and expected < self.federation.minimum:
            raise BadInput(
                f"federation: minimum is {self.federation.minimum} and a round asks {expected:g} "
                "sites: lower it, or ask more"
            )

    def run(self, round: Round) -> CohortSum:
        """The sum over the answers of a round's clients, in their order."""
        began, names = self.clock(), [self.federation.names[k] for k in round.ids]
        attempt = max(round.attempt, self.log.asked_before(round.number))
        about = self.about
        ask = RoundAsk(about.run, round.number, attempt, about.plan, round.start, round.moving)
        outcome = Outcome(round.number, attempt, names)
        self.log.asking(outcome)
        answers = self._answers(ask, outcome, began)
        if self.steady:
            self.sleep(max(0.0, began + self.federation.deadline - self.clock()))
        outcome.answered = [name for name in names if name in answers]
        secret = self.job.plan.secret_cohort
        outcome.enough = secret or len(answers) >= self.federation.minimum
        if self.mixer is None:
            total = self._sum(round, answers, outcome)
        else:
            total = self._mixed(self.mixer, round, ask, outcome, began)
        self.log.ended(outcome)
        self.told(outcome)
        return total

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over the test split."""
        return evaluate(self.job.task, params, self.job.data)

    def close(self) -> None:
        """Nothing is held: whoever made the transport closes it."""

    @property
    def steady(self) -> bool:
        """Whether a round takes its whole time, so that nobody learns from it who was asked."""
        return self.job.plan.secure and self.job.plan.secret_cohort

    def _answers(self, ask: RoundAsk, outcome: Outcome, began: float) -> dict[str, Answer]:
        """The first answer of each site that is one to this ask, and in time."""
        answers: dict[str, Answer] = {}
        if not outcome.asked:
            return answers
        until = began + self.federation.deadline
        for arrival in self.transport.ask(outcome.asked, ask, self.federation.deadline):
            wrong = self._wrong(arrival, ask, outcome, answers, late=self.clock() > until)
            if wrong:
                outcome.refused[arrival.site] = wrong
            elif isinstance(arrival.message, Refusal):
                outcome.declined[arrival.site] = arrival.message.reason
            elif isinstance(arrival.message, Answer):
                answers[arrival.site] = arrival.message
        return answers

    def _wrong(
        self,
        arrival: Arrival,
        ask: RoundAsk,
        outcome: Outcome,
        answers: dict[str, Answer],
        *,
        late: bool,
    ) -> str:
        """Why what arrived does not count; empty if it does."""
        message = arrival.message
        if isinstance(message, str):
            return message
        if arrival.site not in outcome.asked:
            return "it was not asked"
        if message.site != arrival.site:
            return f"it answered in the name of {message.site!r}"
        if (message.run, message.round, message.attempt) != (ask.run, ask.round, ask.attempt):
            return f"it answered attempt {message.attempt} at round {message.round}, or another run"
        if late:
            return "it answered after the deadline"
        if arrival.site in answers or arrival.site in outcome.declined:
            return "it answered twice"
        return ""

    def _sum(self, round: Round, answers: dict[str, Answer], outcome: Outcome) -> CohortSum:
        """Accept each answer and add it, whoever came first."""
        job, plan = self.job, self.job.plan
        total = CohortSum.zero(job.task.size, plan.width, noisy=False, keep=job.rows)
        for client in round.ids:
            answer = answers.get(self.federation.names[client])
            if answer is None:
                continue
            alone = np.array([client], dtype=np.int64)
            before = len(total.refused)
            part = [(total, slice(None))]
            server_sum(
                part, plan, replace(round, ids=alone), self._sent(answer), self._weight(client)
            )
            if len(total.refused) > before:
                outcome.refused[answer.site] = "its report is not finite, or not of this model"
        return replace(total, told=False, enough=outcome.enough)

    def _mixed(
        self, mixer: MixerLink, round: Round, ask: RoundAsk, outcome: Outcome, began: float
    ) -> CohortSum:
        """What the mixer hands on of the reports that sites have sent it, in place of their sum.

        An answer then says that the mixer has counted a report, and has none itself.
        """
        job, plan = self.job, self.job.plan
        number = number_of(ask.round, ask.attempt, plan.rounds)
        until = began + self.federation.deadline
        found = None
        if outcome.answered:
            size, minimum = job.task.size, plan.release.minimum
            found = mixer.collected(number, size, minimum, until, self.clock, self.sleep)
        total = CohortSum.zero(job.task.size, plan.width, noisy=False)
        if found is None or not isinstance(plan.release, TwoPointReports):
            outcome.enough = False
            return replace(total, told=False, enough=False)
        plan.release.add_multisets_(total.total, found, round)
        total.weight, total.clients = float(found.reports[0]), len(round.ids)
        return replace(total, told=False, enough=outcome.enough)

    def _sent(self, answer: Answer) -> Sent:
        """An answer as a block of one client; what is not of the right type is of no form."""
        nobody, width = torch.zeros(1, dtype=torch.bool), self.job.plan.width
        report, watched = answer.report, answer.watched
        if report.dtype is not torch.float32 or _form(watched) != (torch.float64, (width,)):
            report, watched = torch.zeros(0), torch.zeros(width, dtype=torch.float64)
        rows = Rows.of([report], self.job.task.size)
        return Sent(rows, watched.reshape(1, width), nobody, nobody)

    def _weight(self, client: int) -> torch.Tensor:
        records = self.job.data.sizes[client] if self.job.weights is Weights.EXAMPLES else 1
        return torch.full((1,), float(records), dtype=torch.float64)


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)
