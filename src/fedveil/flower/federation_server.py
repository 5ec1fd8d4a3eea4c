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
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedveil.base.errors import BadInput, FedveilError
from fedveil.data.federated import FederatedData
from fedveil.flower.federation_files import (
    Federation,
    MixerSection,
    check_recipe,
    signs_answers,
    takes_whole_deadline,
)
from fedveil.flower.head_signatures import HeadSignatures, collects
from fedveil.flower.messages import (
    Answer,
    MetricsAsk,
    Refusal,
    RehearsalAsk,
    RoundAsk,
    Transport,
    answer_forms,
    bytes_tensor,
    fault_of,
    new_run_id,
    plan_content,
)
from fedveil.flower.metrics_round import ask_for_metrics
from fedveil.flower.round_deadline import deadline_after, rehearsal_line, rehearse_round
from fedveil.flower.sum_rounds import SumRounds
from fedveil.flower.sum_terms import sum_terms
from fedveil.mixing.protocol import round_number
from fedveil.privacy.ledger.hash_chain import json_digest
from fedveil.privacy.release import Round
from fedveil.privacy.releases.secure_sum import SecureSum, report_grid
from fedveil.privacy.releases.two_point import Shuffler
from fedveil.privacy.site_metrics import SiteMetrics
from fedveil.runs.ending import RESUMABLE
from fedveil.runs.recipe import Recipe
from fedveil.runs.run import OnRound, Run
from fedveil.runs.run_directory import write_atomic
from fedveil.training.engines.engine import Job
from fedveil.training.evaluate import evaluate
from fedveil.training.exchange import server_sum
from fedveil.training.reports import ClientReports, CohortSum, Rows
from fedveil.training.round import Unfinished
from fedveil.training.server import ServerState, Weights

# assumptions of every claim of a federation
CARRIED = (
    "whatever carries messages between sites and server counts as the server: it sees who is asked "
    "and what they send"
)
ABSENT = "whether and when a site answers does not depend on its records"

_IDENTITY = "federation.json"
_ONLINE_POLL = 1.0  # seconds from one check of who is online to the next


class TooFewSites(FedveilError):
    """Raised when not enough sites are online. Nothing was charged for the next round."""


@dataclass
class Outcome:
    """The answers of the sites that were asked in one round.

    Attributes:
        round: The round, from 1.
        attempt: The attempt at the round, from 0.
        invited: The names of the sites that were asked.
        answered: The names of the sites whose answers counted, also if their report was refused.
            With a secure sum, those whose vectors are in it.
        rejected: By site, the reason why its answer or report was refused.
        declined: By site, its reason to take no part.
        enough: False if too few sites answered. The model then stays as it was.
        seconds: When the last answer came, after the ask. A deadline should be longer.
        lost: Why a secure sum was not opened, "" if it was, or there is none.
    """

    round: int
    attempt: int
    invited: list[str]
    answered: list[str] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    enough: bool = True
    seconds: float = 0.0
    lost: str = ""

    @property
    def absent(self) -> list[str]:
        """Return the names of the invited sites that sent nothing in time."""
        known = {*self.answered, *self.declined, *self.rejected}
        return [name for name in self.invited if name not in known]

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as a line of `sites.jsonl`.

        Keys: "round", "attempt", "seconds", "answered", "declined", "refused" (`rejected`),
        "absent" and "enough", and "lost" if a secure sum was not opened. `invited` is left out.
        """
        keys = ("round", "attempt", "seconds", "answered", "declined")
        line = {key: getattr(self, key) for key in keys}
        line |= {"refused": self.rejected, "absent": self.absent, "enough": self.enough}
        return line | ({"lost": self.lost} if self.lost else {})

    def __str__(self) -> str:
        """Return the outcome as one line: numbers, the reason of each site, and who is absent."""
        parts = [f"{len(self.answered)} of {len(self.invited)} sites answered"]
        parts += [f"{name} declined: {reason}" for name, reason in self.declined.items()]
        parts += [f"{name} was refused: {reason}" for name, reason in self.rejected.items()]
        if self.absent:
            parts.append(f"absent: {', '.join(self.absent)}")
        if self.lost:
            parts.append(f"the sum was not opened ({self.lost}): the model and the charge stay")
        elif not self.enough:
            parts.append("too few: the model stays as it was, and the charge stays")
        return f"round {self.round}: " + "; ".join(parts)


@dataclass(frozen=True)
class RoundLog:
    """`sites.jsonl` of a run directory: the sites that were asked in each round, and their answers.

    The file is private, as the server's ledger is: under central DP nobody else may know who was
    asked. Claims depend on the file in one respect: an ask is written durably before it is sent, so
    that no two asks of a run have the same number.
    """

    folder: Path

    def attempts(self, round: int) -> int:
        """Return how many asks for `round` the file has, 0 without a file."""
        path, attempts = self.folder / "sites.jsonl", 0
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # a line that a crash cut off was never followed by an ask
                attempts += json.loads(line).get("asking") == round
        return attempts

    def unfinished(self, round: int) -> dict[str, Any] | None:
        """Return the line of the last ask for `round`, None if it has an outcome or there is none.

        Without an outcome no report of that attempt was summed, and no noise was drawn for it.
        """
        path, last = self.folder / "sites.jsonl", None
        for text in path.read_text().splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:  # cut off: an ask that was never sent, or else perhaps the outcome
                last = last if text.startswith('{"asking"') else None
                continue
            if line.get("asking") == round:
                last = line
            elif line.get("round") == round:
                last = None
        return last

    def append(self, line: dict[str, Any]) -> None:
        """Append a line, as JSON, to the file, readable by its owner alone.

        It is on disk on return, on a line of its own even if a crash cut the last one off. Raises
        OSError if the disk is full.
        """
        path, flags = self.folder / "sites.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        before = path.read_bytes() if path.exists() else b""
        cut_off = bool(before) and not before.endswith(b"\n")
        content = (("\n" if cut_off else "") + json.dumps(line) + "\n").encode()
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            while content:
                content = content[file.write(content) or 0 :]
            os.fsync(file.fileno())


@dataclass(frozen=True)
class RunIdentity:
    """The id of a run in its federation, and the digest of its plan.

    The id also separates the run's noise from that of every other run.

    Attributes:
        run_id: 32 hexadecimal digits.
        plan_digest: The digest of recipe and number of sites (`plan_digest` in messages.py).
    """

    run_id: str
    plan_digest: str

    @classmethod
    def read_or_make(cls, folder: Path, plan_digest: str) -> "RunIdentity":
        """Return the identity in a run directory, or a new one if the directory has no run.

        Raises BadInput if the directory holds a run of another plan, or a run without a readable
        identity. Nothing is written.
        """
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
        """Write the identity into a run directory as federation.json, in place of an older one."""
        text = json.dumps({"run": self.run_id, "plan": self.plan_digest}, indent=2)
        write_atomic(folder / _IDENTITY, (text + "\n").encode())


@dataclass(frozen=True, eq=False)
class RemoteEngine:
    """An engine that asks the sites of a cohort for their reports, and adds these up.

    Guarantee: docs/proofs/flower.md. Whatever arrives, a site's answer counts at most once in a
    round, only if it was asked for by this run, round and attempt, only from the site itself, and
    only before the deadline; all that counts goes through `server_sum`. Nothing about the noise,
    the divisor or the charge depends on who answered. Where the cohort is secret, nothing that
    others can see does either: a round with secure noise takes the whole deadline, and too few
    answers do not end it. An attempt that a crash cut off before its answers were summed goes on
    with the same ask, which sites that have answered it answer again, bit for bit.

    | what arrives | what is done |
    |---|---|
    | NaN, infinity | counts as zero, named |
    | another length, type or encoding | not decoded; the same |
    | an answer to another round, attempt or run; late; twice; not asked for | dropped, named |
    | an answer under another site's name | dropped, and its sender named |
    | a refusal | kept with its reason; the site counts as absent |
    | nothing | the site is absent: its report is zero |
    | fewer answers than `minimum`, cohort public | the model stays, and so does the charge |
    | with a mixer: it hands on nothing in time | the same |
    | with a secure sum: fewer sites than its threshold, at any step | the same |
    """

    job: Job
    federation: Federation
    transport: Transport
    identity: RunIdentity
    round_log: RoundLog
    head_signatures: HeadSignatures
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        """Raise BadInput unless a mixer and `minimum` fit the plan."""
        self.federation.check_plan(self.job.plan)
        object.__setattr__(self, "deadline", self.federation.deadline)

    def run(self, round: Round) -> CohortSum:
        """Ask a round's clients, and return the sum of their answers in the order of clients.

        The ask is logged durably before it is sent, and the outcome after the deadline. It carries
        the server's ledger, with the charge of this round. Answers have signatures of it, or these
        are collected from all sites beforehand, in rounds that do not depend on who takes part.
        `on_outcome` is called with the outcome. `enough` of the sum is False if too few sites
        answered.
        """
        site_names = self.federation.site_names
        if collects(self.job.plan, round.number):
            self.head_signatures.collect(self.transport, round.number, round.attempt)
        began = self.clock()
        invited, going_on = [site_names[k] for k in round.ids], self._going_on(round)
        attempt = round.attempt
        if not going_on:
            attempt = max(attempt, self.round_log.attempts(round.number))
        tail = self.head_signatures.tail()
        ask = self._ask(round.number, attempt, round.start, round.adaptive_state)
        ask = replace(ask, ledger_tail=bytes_tensor(tail.to_bytes()))
        outcome = Outcome(round.number, attempt, invited)
        if not going_on:
            asking = {"asking": round.number, "attempt": attempt, "sites": invited}
            self.round_log.append({**asking, "ask": ask.digest})
        if self._sum_rounds is not None:
            total = self._masked_sum(self._sum_rounds, round, ask, outcome)
            self.round_log.append(outcome.to_dict())
            self.on_outcome(outcome)
            return replace(total, clipping_known=False, enough=outcome.enough)
        answers = self._answers(ask, outcome, began)
        for name, answer in answers.items() if signs_answers(self.job.plan) else ():
            self.head_signatures.add_signature(name, answer.signature.numpy().tobytes(), tail)
        if takes_whole_deadline(self.job.plan):
            self.sleep(max(0.0, began + self.deadline - self.clock()))
        outcome.answered = [name for name in outcome.invited if name in answers]
        secret = self.job.plan.secret_cohort
        outcome.enough = secret or len(answers) >= self.federation.minimum
        if self.federation.mixer is None:
            total = self._sum(round, answers, outcome)
        else:
            total = self._collect(self.federation.mixer, round, ask, outcome, began)
        self.round_log.append(outcome.to_dict())
        self.on_outcome(outcome)
        return replace(total, clipping_known=False, enough=outcome.enough)

    def unfinished(self, state: ServerState) -> Unfinished | None:
        """Return the attempt at the round after `state` that a crash cut off before its sum.

        None if there is none, or it began from another model. A mixer hands a round on once, and
        sites of a secure sum mask once, so that with one of these there is none either.
        """
        number = state.round + 1
        line = None if self._once else self.round_log.unfinished(number)
        if line is None or not {*line["sites"]} <= {*self.federation.site_names}:
            return None
        attempt = int(line["attempt"])
        ask = self._ask(number, attempt, state.params, state.adaptive_state)
        if line.get("ask") != ask.digest:
            return None
        ids = [self.federation.site_names.index(name) for name in line["sites"]]
        return Unfinished(attempt, np.array(ids, dtype=np.int64))

    def _ask(
        self, number: int, attempt: int, params: torch.Tensor, adaptive_state: torch.Tensor
    ) -> RoundAsk:
        """Return the ask of an attempt at a round, with its model and adaptive state."""
        run_id, plan = self.identity.run_id, self.identity.plan_digest
        return RoundAsk(run_id, number, attempt, plan, params, adaptive_state)

    def _going_on(self, round: Round) -> bool:
        """Return whether a round is one that `unfinished` has returned."""
        line = None if self._once else self.round_log.unfinished(round.number)
        if line is None or line["attempt"] != round.attempt:
            return False
        ask = self._ask(round.number, line["attempt"], round.start, round.adaptive_state)
        invited = [self.federation.site_names[k] for k in round.ids]
        return bool(line.get("ask") == ask.digest and line["sites"] == invited)

    def evaluate(self, params: torch.Tensor) -> dict[str, float]:
        """Return loss and metrics over the server's test split, by name. {} without a test split.

        No site takes part.
        """
        return evaluate(self.job.task, params, self.job.data)

    def site_metrics(self, params: torch.Tensor, round: int, attempt: int) -> dict[str, float]:
        """Return the metrics that sites have measured on their held-out people, by name.

        They were charged before this is called. {} if too few people were measured. The outcome is
        logged.
        """
        metrics, federation = self.job.plan.metrics, self.federation
        if not isinstance(metrics, SiteMetrics):
            raise AssertionError("the plan has no metrics that sites measure")
        run_id, plan = self.identity.run_id, self.identity.plan_digest
        ask = MetricsAsk(run_id, round, attempt, plan, params)
        found = ask_for_metrics(ask, metrics, federation, self.transport, self.clock)
        self.round_log.append(found.to_dict(ask, federation.site_names))
        most = {site.name: site.records for site in federation.sites}
        return metrics.combined(
            [*found.sums_by_site.values()], [most[name] for name in found.sums_by_site]
        )

    def close(self) -> None:
        """Do nothing, since the maker of the transport closes it."""

    def _answers(self, ask: RoundAsk, outcome: Outcome, began: float) -> dict[str, Answer]:
        """Ask the invited sites, and return the first valid answer of each, by name.

        Refusals are added to `outcome.declined`, and anything that does not count to
        `outcome.rejected`. `began` is when the deadline began.
        """
        answers: dict[str, Answer] = {}
        if not outcome.invited:
            return answers
        until = began + self.deadline
        size = 0 if self.federation.mixer else self.job.task.size
        wide = self.job.plan.release.wide
        forms = answer_forms(size, self.job.plan.width, wide=wide)
        for arrival in self.transport.ask(outcome.invited, ask, self.deadline, forms):
            known = {*answers, *outcome.declined}
            site, message = arrival.site, arrival.message
            reason = fault_of(arrival, ask, outcome.invited, known, late=self.clock() > until)
            if reason:
                outcome.rejected[site] = reason
            elif isinstance(message, Refusal):
                outcome.declined[site] = message.reason
            elif isinstance(message, Answer):
                answers[site] = message
                outcome.seconds = round(self.clock() - began, 3)
        return answers

    def rehearse(self, state: ServerState) -> None:
        """Let all sites rehearse a round, and set the deadline of all rounds by how long it took.

        Does nothing without `rehearsal` in the federation. Sites rehearse twice, and the first time
        does not count: programs start then. No record and no cohort has a part in it.
        """
        federation, plan = self.federation, self.job.plan
        if federation.rehearsal is None:
            return
        forms = answer_forms(self.job.task.size, plan.width, wide=plan.release.wide)
        for _ in range(2):
            ask = RehearsalAsk(
                new_run_id(), 1, 0, self.identity.plan_digest, state.params, state.adaptive_state
            )
            found = rehearse_round(ask, forms, federation, self.transport, self.clock)
        object.__setattr__(self, "deadline", deadline_after(found, federation.deadline))
        self.round_log.append(dict(rehearsal_line(found, self.deadline)))

    @property
    def _once(self) -> bool:
        """Return whether an attempt cannot go on after a crash: some of it happens only once."""
        return self.federation.mixer is not None or self._sum_rounds is not None

    @cached_property
    def _sum_rounds(self) -> SumRounds | None:
        """Return the secure sums of the run, None if its plan has none."""
        channel, identity = self.job.plan.release.channel, self.identity
        if not isinstance(channel, SecureSum):
            return None
        keys, words = [site.key for site in self.federation.sites], self._words
        terms = sum_terms(channel, keys, identity.plan_digest, identity.run_id, words)
        names = self.federation.site_names
        return SumRounds(terms, names, identity.plan_digest, self.transport, self.clock)

    @property
    def _words(self) -> int:
        """Return the number of words of a masked vector: parameters and a clip's statistic."""
        return self.job.task.size + self.job.plan.width

    def _masked_sum(
        self, sums: SumRounds, round: Round, ask: RoundAsk, outcome: Outcome
    ) -> CohortSum:
        """Return the sum that the sites' masked vectors open to, not decoded.

        Zero, and `outcome.enough` False, if there is none, or none that its plan has room for.
        """
        job, size, channel = self.job, self.job.task.size, self.job.plan.release.channel
        total = CohortSum.zero(size, job.plan.width, noisy=False)
        steps = sums.opened_sum(ask, outcome, self.federation.deadline)
        rotated = channel.rotated if isinstance(channel, SecureSum) else None
        if steps is not None and rotated is not None and not rotated.plausible(steps):
            outcome.lost = f"the sum is spread over all of 2^{rotated.bits} steps"
            steps = None
        outcome.enough = steps is not None
        if steps is None:
            return total
        grid = report_grid(job.plan, round.clip, size)
        whole = grid.dequantise(torch.from_numpy(steps))
        total.total.copy_(whole[:size])
        total.statistic_values.copy_(whole[size:])
        total.clients = len(outcome.answered)
        total.weight = float(total.clients)
        return total

    def _sum(self, round: Round, answers: dict[str, Answer], outcome: Outcome) -> CohortSum:
        """Return the weighted sum of the answers' reports, accepted and added in client order.

        `answers` are by site name. Weights are the sites' numbers of records if the job weighs by
        examples, else 1. A site whose report is not accepted counts as zero, with weight 0, and
        `outcome.rejected` gets the reason under its name.
        """
        job, plan = self.job, self.job.plan
        total = CohortSum.zero(job.task.size, plan.width, noisy=False, keep=job.keeps_updates)
        for client in round.ids:
            answer = answers.get(self.federation.site_names[client])
            if answer is None:
                continue
            alone = replace(round, ids=np.array([client], dtype=np.int64))
            records = job.data.sizes[client] if job.weights is Weights.EXAMPLES else 1
            weight = torch.full((1,), float(records), dtype=torch.float64)
            before = len(total.refused)
            server_sum([(total, slice(None))], plan, alone, self._client_report(answer), weight)
            if len(total.refused) > before:
                outcome.rejected[answer.site] = "its report is not finite, or not of this model"
        return total

    def _collect(
        self, mixer: MixerSection, round: Round, ask: RoundAsk, outcome: Outcome, began: float
    ) -> CohortSum:
        """Return the sum of the shuffled reports that the mixer has collected from the sites.

        A site's answer has no report then. It only shows that the mixer has counted one. If nobody
        answered, or the mixer has nothing at the deadline, the sum is zero and `outcome.enough`
        becomes False.
        """
        size, plan = self.job.task.size, self.job.plan
        total, channel = CohortSum.zero(size, plan.width, noisy=False), plan.release.channel
        multisets = None
        if outcome.answered:
            number = round_number(ask.round, ask.attempt, plan.rounds)
            until = began + self.federation.deadline
            multisets = mixer.collect(number, size, channel.minimum, until, self.clock, self.sleep)
        if multisets is None or not isinstance(channel, Shuffler):
            outcome.enough = False
        else:
            channel.add_multisets_(total.total, multisets, round)
            total.weight, total.clients = float(multisets.report_counts[0]), len(round.ids)
        return total

    def _client_report(self, answer: Answer) -> ClientReports:
        """Return an answer as the reports of one client.

        If a tensor has the wrong type or the statistic the wrong shape, the report becomes empty,
        which `server_sum` refuses.
        """
        nobody, width = torch.zeros(1, dtype=torch.bool), self.job.plan.width
        report, watched = answer.report, answer.watched
        form = (report.dtype, watched.dtype, watched.shape)
        wide = self.job.plan.release.wide
        kind = torch.float64 if wide else torch.float32
        if form != (kind, torch.float64, (width,)):
            report, watched = torch.zeros(0), torch.zeros(width, dtype=torch.float64)
        rows = Rows.from_reports(report[None], self.job.task.size, wide=wide)
        return ClientReports(rows, watched.reshape(1, width), nobody, nobody)


@dataclass
class Server:
    """One run over a federation. Make it with `start_or_resume`, then call `serve`.

    Attributes:
        run: The run and its directory.
        federation: The sites, and how long to wait for them.
        transport: Reaches the sites.
        head_signatures: The signatures that sites give the ledger.
        clock: Returns the time in seconds.
        sleep: Waits for a number of seconds.
    """

    run: Run
    federation: Federation
    transport: Transport
    head_signatures: HeadSignatures
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
        """Start a run in the directory `folder`, or resume the one that is there.

        The run directory is written, and nothing is charged yet. Raises BadInput for a federation,
        recipe or directory that is refused.

        Args:
            recipe: What to train. Attacks, and checkpoints that skip rounds, are refused.
            federation: The sites.
            transport: Reaches the sites.
            folder: The run directory.
            data_root: The folder with published data sets.
            on_outcome: Called with each round's outcome. It names sites, which only the server may
                see.
            allow_code: Whether code that the recipe names may be run.
            clock: Returns the time in seconds.
            sleep: Waits for a number of seconds.
        """
        federation.check()
        check_recipe(recipe)
        plan = plan_content(recipe, len(federation.sites))
        identity = RunIdentity.read_or_make(folder, json_digest(plan))
        heads = HeadSignatures(folder, identity.run_id, plan, federation, clock)
        log = RoundLog(folder)
        own: dict[str, Any] = {
            "data": data_without_records(recipe, federation, data_root, identity.run_id),
            "allow_code": allow_code,
            "make_engine": lambda job: RemoteEngine(
                job, federation, transport, identity, log, heads, on_outcome, clock, sleep
            ),
        }
        if (folder / "recipe.toml").exists():
            run = Run.resume(folder, data_root, **own)
        else:
            (folder / _IDENTITY).unlink(missing_ok=True)  # of a start that went no further
            run = Run.start(recipe, folder, data_root, **own)
            identity.write(folder)
        _ = run.training.engine  # made now, so that it refuses before anything is charged
        return cls(run, federation, transport, heads, clock, sleep)

    def serve(self, on_round: OnRound = lambda line: None) -> dict[str, Any]:
        """Train to the end of the plan or the budget, and return the result as `Run.execute` does.

        Where the federation has a rehearsal, it comes first, also of a run that is resumed.
        `on_round` is called with each round's line of metrics. A round is charged only when
        `minimum` sites are online. If they do not come, the run ends as after Ctrl-C, and
        TooFewSites is raised. After the last round the sites that are online sign the ledger's end.
        """
        last = self.run.training.plan.permitted

        def next_round(line: dict[str, Any]) -> None:
            """Call `on_round` with a round's metrics, and wait for sites if there is another round.

            Raises TooFewSites if too few sites come online."""
            on_round(line)
            if line["round"] < last:
                self._wait_for_sites()

        self._wait_for_sites()
        engine, training = self.run.training.engine, self.run.training
        if isinstance(engine, RemoteEngine):
            engine.rehearse(training.start())
        result = self.run.execute(next_round, self.head_signatures.write_parties)
        if result["stopped"] not in RESUMABLE:
            self.head_signatures.collect(self.transport, max(1, result["rounds"]), 0)
        return result

    def _wait_for_sites(self) -> None:
        """Wait until at least `federation.minimum` sites are online.

        Raises TooFewSites after `federation.wait` seconds.
        """
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
    """Return the recipe's test split, with the federation's sites as clients without records.

    The test split is that of `federation.data`, if given. The data's fingerprint has the run's id
    in it: the server cannot know whether sites have the same records as in another run, and noise
    that two runs share would cancel in the difference of their models.
    """
    if federation.data is not None:
        recipe = recipe.model_copy(update={"data": federation.data})
    records = [site.records for site in federation.sites]
    data = recipe.load_data(data_root).at_sites(federation.site_names, records, run_id)
    return replace(data, remarks=(*data.remarks, CARRIED, ABSENT))
