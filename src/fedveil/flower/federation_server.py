"""The server of a federation: a run like `fedveil run`, whose clients are sites.

Recipe, ledger, checkpoints and result are the same, only the engine differs: `RemoteEngine` asks
sites for their reports. A server that is started again with the same run directory resumes. The
proof note is docs/proofs/flower.md.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedveil.base.errors import BadInput, FedveilError
from fedveil.data.federated import FederatedData
from fedveil.flower.federation_files import Federation, MixerSection, takes_whole_deadline
from fedveil.flower.messages import (
    Answer,
    Arrival,
    Refusal,
    RoundAsk,
    Transport,
    new_run_id,
    plan_digest,
)
from fedveil.mixing.protocol import round_number
from fedveil.privacy.release import Round
from fedveil.privacy.releases.two_point import Shuffler
from fedveil.runs.recipe import Recipe
from fedveil.runs.run import OnRound, Run
from fedveil.runs.run_directory import write_atomic
from fedveil.training.engines.engine import Job
from fedveil.training.evaluate import evaluate
from fedveil.training.exchange import server_sum
from fedveil.training.reports import ClientReports, CohortSum, Rows
from fedveil.training.server import Weights

CARRIED = (
    "whatever carries messages between sites and server counts as the server: it sees who is asked "
    "and what they send"
)
ABSENT = "whether and when a site answers does not depend on its records"

_IDENTITY = "federation.json"
_ONLINE_POLL = 1.0  # seconds from one check of who is online to the next


class TooFewSites(FedveilError):
    """Not enough sites are online. Nothing was charged for the next round."""


@dataclass
class Outcome:
    """The answers of the sites that were asked in one round.

    Attributes:
        round: The round.
        attempt: The attempt at it, from 0.
        invited: The names of the sites that were asked.
        answered: Those whose reports were accepted.
        rejected: Those whose reports were refused, with the reason.
        declined: Those that declined, with the reason.
        enough: False if too few answered. The model then stays as it was.
    """

    round: int
    attempt: int
    invited: list[str]
    answered: list[str] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    enough: bool = True

    @property
    def absent(self) -> list[str]:
        """The sites that sent nothing in time."""
        known = {*self.answered, *self.declined, *self.rejected}
        return [name for name in self.invited if name not in known]

    def __str__(self) -> str:
        parts = [f"{len(self.answered)} of {len(self.invited)} sites answered"]
        parts += [f"{name} declined: {reason}" for name, reason in self.declined.items()]
        parts += [f"{name} was refused: {reason}" for name, reason in self.rejected.items()]
        if self.absent:
            parts.append(f"absent: {', '.join(self.absent)}")
        if not self.enough:
            parts.append("too few: the model stays as it was, and the charge stays")
        return f"round {self.round}: " + "; ".join(parts)


@dataclass(frozen=True)
class RoundLog:
    """`sites.jsonl` of a run directory: the sites that were asked in each round, and their answers.

    The file is private, as the server's ledger is: under central DP nobody else may know who was
    asked. A claim depends on it in one respect: an ask is written durably before it is sent, so
    that no two asks of a run have the same number.
    """

    folder: Path

    def attempts(self, round: int) -> int:
        """How many times `round` was asked for."""
        path, attempts = self.folder / "sites.jsonl", 0
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # a line that a crash cut off was never followed by an ask
                attempts += json.loads(line).get("asking") == round
        return attempts

    def write_ask(self, outcome: Outcome) -> None:
        """Write that sites are asked, before they are."""
        self._write({"asking": outcome.round, "attempt": outcome.attempt, "sites": outcome.invited})

    def write_outcome(self, outcome: Outcome) -> None:
        """Write how they answered."""
        line = {key: getattr(outcome, key) for key in ("round", "attempt", "answered", "declined")}
        others = {"refused": outcome.rejected, "absent": outcome.absent, "enough": outcome.enough}
        self._write(line | others)

    def _write(self, line: dict[str, Any]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(self.folder / "sites.jsonl", flags, 0o600)
        try:
            os.write(descriptor, (json.dumps(line) + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class RunIdentity:
    """The run's id in its federation, and the digest of its plan.

    The id also separates the run's noise from that of every other run.
    """

    run_id: str
    plan_digest: str

    @classmethod
    def read_or_make(cls, folder: Path, plan_digest: str) -> "RunIdentity":
        """Read it from the run directory, or make it for a new run. Refuses another plan."""
        path = folder / _IDENTITY
        if not path.exists():
            if (folder / "recipe.toml").exists():
                raise BadInput(f"{path} is missing: restore it, or start over")
            return cls(new_run_id(), plan_digest)
        try:
            stored = json.loads(path.read_text())
            identity = cls(str(stored["run"]), str(stored["plan"]))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BadInput(f"{path} cannot be read: {e}") from e
        if identity.plan_digest != plan_digest:
            raise BadInput(
                f"{folder} is a run of another recipe, or of another number of sites: resume with "
                "those that it was started with, or name a new run directory"
            )
        return identity

    def write(self, folder: Path) -> None:
        """Write it into a run directory."""
        text = json.dumps({"run": self.run_id, "plan": self.plan_digest}, indent=2)
        write_atomic(folder / _IDENTITY, (text + "\n").encode())


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
    identity: RunIdentity
    round_log: RoundLog
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        """Refuse what cannot be kept when sites are reached through a server that knows them."""
        plan = self.job.plan
        if plan.release.channel.minimum and self.federation.mixer is None:
            raise BadInput(
                "[shuffle] needs a mixer that sites reach by themselves: what carries these "
                "messages knows who sent what; name it in federation.toml ([mixer]), or leave "
                "[shuffle] out, so that trust is local"
            )
        if self.federation.mixer is not None and not plan.release.channel.minimum:
            raise BadInput("federation: [mixer] is for recipes with [shuffle]: leave it out")
        expected = plan.expected
        if not plan.secret_cohort and expected < self.federation.minimum:
            raise BadInput(
                f"federation: minimum is {self.federation.minimum} and a round asks {expected:g} "
                "sites: lower it, or ask more"
            )

    def run(self, round: Round) -> CohortSum:
        """The sum over the answers of a round's clients, in their order."""
        began, site_names = self.clock(), self.federation.site_names
        attempt = max(round.attempt, self.round_log.attempts(round.number))
        run_id, plan = self.identity.run_id, self.identity.plan_digest
        ask = RoundAsk(run_id, round.number, attempt, plan, round.start, round.adaptive_state)
        outcome = Outcome(round.number, attempt, [site_names[k] for k in round.ids])
        self.round_log.write_ask(outcome)
        answers = self._answers(ask, outcome, began)
        if takes_whole_deadline(self.job.plan):
            self.sleep(max(0.0, began + self.federation.deadline - self.clock()))
        outcome.answered = [name for name in outcome.invited if name in answers]
        secret = self.job.plan.secret_cohort
        outcome.enough = secret or len(answers) >= self.federation.minimum
        if self.federation.mixer is None:
            total = self._sum(round, answers, outcome)
        else:
            total = self._mixed(self.federation.mixer, round, ask, outcome, began)
        self.round_log.write_outcome(outcome)
        self.on_outcome(outcome)
        return total

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Loss and metrics over the test split."""
        return evaluate(self.job.task, params, self.job.data)

    def close(self) -> None:
        """Do nothing: whoever made the transport closes it."""

    def _answers(self, ask: RoundAsk, outcome: Outcome, began: float) -> dict[str, Answer]:
        """The first answer of each site that is one to this ask, and in time."""
        answers: dict[str, Answer] = {}
        if not outcome.invited:
            return answers
        until = began + self.federation.deadline
        for arrival in self.transport.ask(outcome.invited, ask, self.federation.deadline):
            known = {*answers, *outcome.declined}
            site, message = arrival.site, arrival.message
            reason = _fault(arrival, ask, outcome.invited, known, late=self.clock() > until)
            if reason:
                outcome.rejected[site] = reason
            elif isinstance(message, Refusal):
                outcome.declined[site] = message.reason
            elif isinstance(message, Answer):
                answers[site] = message
        return answers

    def _sum(self, round: Round, answers: dict[str, Answer], outcome: Outcome) -> CohortSum:
        """Accept each answer and add it, whoever came first."""
        job, plan = self.job, self.job.plan
        total = CohortSum.zero(job.task.size, plan.width, noisy=False, keep=job.keeps_updates)
        for client in round.ids:
            answer = answers.get(self.federation.site_names[client])
            if answer is None:
                continue
            alone = np.array([client], dtype=np.int64)
            before = len(total.refused)
            part = [(total, slice(None))]
            server_sum(
                part, plan, replace(round, ids=alone), self._sent(answer), self._weight(client)
            )
            if len(total.refused) > before:
                outcome.rejected[answer.site] = "its report is not finite, or not of this model"
        return replace(total, clipping_known=False, enough=outcome.enough)

    def _mixed(
        self, mixer: MixerSection, round: Round, ask: RoundAsk, outcome: Outcome, began: float
    ) -> CohortSum:
        """What the mixer hands on of the reports that sites have sent it, in place of their sum.

        An answer then says that the mixer has counted a report, and has none itself.
        """
        job, plan = self.job, self.job.plan
        number = round_number(ask.round, ask.attempt, plan.rounds)
        until = began + self.federation.deadline
        found = None
        if outcome.answered:
            size, minimum = job.task.size, plan.release.channel.minimum
            found = mixer.collect(number, size, minimum, until, self.clock, self.sleep)
        total = CohortSum.zero(job.task.size, plan.width, noisy=False)
        channel = plan.release.channel
        if found is None or not isinstance(channel, Shuffler):
            outcome.enough = False
            return replace(total, clipping_known=False, enough=False)
        channel.add_multisets_(total.total, found, round)
        total.weight, total.clients = float(found.report_counts[0]), len(round.ids)
        return replace(total, clipping_known=False, enough=outcome.enough)

    def _sent(self, answer: Answer) -> ClientReports:
        """An answer as a block of one client. A report of the wrong type gets no length."""
        nobody, width = torch.zeros(1, dtype=torch.bool), self.job.plan.width
        report, watched = answer.report, answer.watched
        form = (report.dtype, watched.dtype, watched.shape)
        if form != (torch.float32, torch.float64, (width,)):
            report, watched = torch.zeros(0), torch.zeros(width, dtype=torch.float64)
        rows = Rows.from_reports([report], self.job.task.size)
        return ClientReports(rows, watched.reshape(1, width), nobody, nobody)

    def _weight(self, client: int) -> torch.Tensor:
        records = self.job.data.sizes[client] if self.job.weights is Weights.EXAMPLES else 1
        return torch.full((1,), float(records), dtype=torch.float64)


def _fault(
    arrival: Arrival, ask: RoundAsk, invited: list[str], known: set[str], *, late: bool
) -> str:
    """Why what arrived does not count, or an empty string if it does.

    Args:
        arrival: The message and its sender.
        ask: What the sites were asked.
        invited: The sites that were asked.
        known: The sites that have answered or declined.
        late: Whether the deadline is over.
    """
    message = arrival.message
    if isinstance(message, str):
        return message
    if arrival.site not in invited:
        return "it was not asked"
    if message.site != arrival.site:
        return f"it answered in the name of {message.site!r}"
    if (message.run, message.round, message.attempt) != (ask.run, ask.round, ask.attempt):
        return f"it answered attempt {message.attempt} at round {message.round}, or another run"
    if late:
        return "it answered after the deadline"
    return "it answered twice" if arrival.site in known else ""


@dataclass
class Server:
    """One run over a federation. Make it with `start_or_resume`, then call `serve`."""

    run: Run
    federation: Federation
    transport: Transport
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def start_or_resume(
        cls,
        recipe: Recipe,
        federation: Federation,
        transport: Transport,
        folder: Path,
        data_root: Path | None = None,
        *,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
        allow_code: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> "Server":
        """Start a run in `folder`, or resume the one that is there.

        `on_outcome` is called with each round's outcome. It names sites, which only the server may
        see.
        """
        federation.check()
        if recipe.attack is not None:
            raise BadInput("[attack] is for simulations: leave it out")
        if recipe.engine.checkpoint != 1:
            raise BadInput(
                f"engine.checkpoint is {recipe.engine.checkpoint}: over a federation every round "
                "that is lost is charged again, so a checkpoint is written after each; leave it out"
            )
        identity = RunIdentity.read_or_make(folder, plan_digest(recipe, len(federation.sites)))
        own: dict[str, Any] = {
            "data": data_without_records(recipe, federation, data_root, identity.run_id),
            "allow_code": allow_code,
            "make_engine": lambda job: RemoteEngine(
                job, federation, transport, identity, RoundLog(folder), on_outcome, clock, sleep
            ),
        }
        if (folder / "recipe.toml").exists():
            run = Run.resume(folder, data_root, **own)
        else:
            (folder / _IDENTITY).unlink(missing_ok=True)  # of a start that went no further
            run = Run.start(recipe, folder, data_root, **own)
            identity.write(folder)
        _ = run.training.engine  # made now, so that it refuses before anything is charged
        return cls(run, federation, transport, clock, sleep)

    def serve(self, on_round: OnRound = lambda line: None) -> dict[str, Any]:
        """Train like `Run.execute`, and return the result.

        A round is charged only when `minimum` sites are online. If they do not come, the run ends
        as after Ctrl-C, and `TooFewSites` is raised.
        """
        last = self.run.training.plan.permitted

        def next_round(line: dict[str, Any]) -> None:
            on_round(line)
            if line["round"] < last:
                self._wait_for_sites()

        self._wait_for_sites()
        return self.run.execute(next_round)

    def _wait_for_sites(self) -> None:
        """Wait until enough of all sites are online, whoever will be asked."""
        until = self.clock() + self.federation.wait
        names = set(self.federation.site_names)
        while len(online := names & self.transport.online()) < self.federation.minimum:
            if self.clock() >= until:
                raise TooFewSites(
                    f"of {len(names)} sites {len(online)} are online "
                    f"({', '.join(sorted(online)) or 'none'}), and federation minimum is "
                    f"{self.federation.minimum}: nothing more was charged; start the sites, then "
                    f"use {self.run.how_to_resume}"
                )
            self.sleep(_ONLINE_POLL)


def data_without_records(
    recipe: Recipe, federation: Federation, data_root: Path | None, run_id: str
) -> FederatedData:
    """The test split, with the federation's sites as clients and without any records.

    The data's fingerprint has the run's id in it. The server cannot know whether sites have the
    same records as in another run, and noise that two runs share would cancel in the difference of
    their models.
    """
    if federation.data is not None:
        recipe = recipe.model_copy(update={"data": federation.data})
    records = [site.records for site in federation.sites]
    data = recipe.load_data(data_root).at_sites(federation.site_names, records, run_id)
    return replace(data, remarks=(*data.remarks, CARRIED, ABSENT))
