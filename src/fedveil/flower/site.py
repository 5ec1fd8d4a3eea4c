"""`Site`: a client with its own records, its copy of the recipe, its ledger and its policy.

A site answers a server that it does not trust. It derives clip, noise and charges from its own copy
of the recipe. Of the server's message only the model and the adaptive state are used, and both are
checked. The proof note is docs/proofs/site.md.
"""

import json
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedveil.base.checks import TABLE, shown
from fedveil.base.errors import BadInput, one_line
from fedveil.base.inputs import mapped, taken
from fedveil.base.platforms import one_thread
from fedveil.base.software import installed_software, software_digest
from fedveil.data.federated import FederatedData
from fedveil.data.provenance import PUBLIC
from fedveil.flower.certificates import read_signing_key
from fedveil.flower.federation_files import (
    MixerSection,
    SiteFile,
    check_recipe,
    read_policy,
    read_site_file,
    signs_answers,
    with_absolute_paths,
)
from fedveil.flower.held_out import HeldOutPeople
from fedveil.flower.kept_answer import KeptAnswer
from fedveil.flower.ledger_tail import LedgerTail
from fedveil.flower.messages import (
    LONGEST_REASON,
    Answer,
    Forms,
    HeadAsk,
    HeadReply,
    MaskedAsk,
    MetricsAnswer,
    MetricsAsk,
    Refusal,
    RehearsalAsk,
    Reply,
    RoundAsk,
    ServerMessage,
    SumStep,
    ask_forms,
    bytes_tensor,
    plan_digest,
)
from fedveil.flower.policy import Objection, Policy, build_for_plan, local_steps, terms_of
from fedveil.flower.site_heads import HeadRefused, SiteHeads
from fedveil.flower.site_ledger import LOG, Declined, SiteLedger
from fedveil.flower.site_log import SiteLog
from fedveil.flower.site_sums import SiteSums
from fedveil.flower.sum_terms import sum_ask_forms
from fedveil.masking.sum_messages import MessageRefused
from fedveil.mixing.protocol import Refused, round_number
from fedveil.privacy.accounting.claims import Unit
from fedveil.privacy.clip import Clipped
from fedveil.privacy.ledger.signed_head import SignedHead, key_line
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Round
from fedveil.privacy.releases.two_point import Shuffler
from fedveil.runs.build import unit_counts
from fedveil.runs.recipe import Recipe, load_recipe
from fedveil.runs.sections.client_section import client_cap
from fedveil.training.agreement import check_units
from fedveil.training.cohort import CohortData
from fedveil.training.exchange import client_report
from fedveil.training.gradients.modes import Looped, Mode, gradients_of
from fedveil.training.gradients.trajectories import Gradients
from fedveil.training.reports import ClientBatch, ClientReports, Rows
from fedveil.training.session import Training

OTHER_PLAN = "the plan is not that of this site's own copy of the recipe"
_UNUSABLE = "the site's ledger cannot be used: its owner was told why"
_UNREHEARSED = "the round could not be rehearsed: the site's owner was told why"
_FAILED = "the round was charged and could not be computed: the site's owner was told why"


class Site:
    """A site as its owner has set it up.

    Guarantee: docs/proofs/site.md. Whatever a server sends, in whatever order and how often, what
    this site lets out in a run is at most what its own copy of the recipe claims for its own turns,
    each charged durably before the work began, and within the owner's policy.

    | edge | behaviour |
    |---|---|
    | the recipe protects persons | at most `client.cap` records of a person are ever used |
    | it does, and nobody says whose the site's records are | BadInput |

    Attributes:
        found: The site's records as they were loaded.
        records: Those that count: all, or at most `client.cap` of a person.
        units: How many units may join a round: people, or records that count.
        held_out: The people on whom this site measures models, None if it measures nothing.
    """

    def __init__(self, file: SiteFile, recipe: Recipe, records: FederatedData) -> None:
        self.file, self.recipe, self.found = file, recipe, records
        cap = client_cap(recipe.client)
        self.records = records if cap is None else records.capped(cap)
        self.name = file.name
        self.policy = read_policy(Path(file.policy))
        self.units = sum(unit_counts(recipe, self.records))
        sizes, here = file.sizes or [self.units] * file.clients, Path(file.recipe).parent
        self.training = site_training(recipe, self.records, sizes, here, allow_code=file.allow_code)
        self.plan = self.training.plan
        check_units(self.plan, self.records)
        _check_size(self.training, self.units)
        if file.rehearsal is not None and self.records.records > file.rehearsal:
            raise BadInput(
                f"there are {self.records.records:,} records and rounds are long enough for "
                f"{file.rehearsal:,}: ask the operator to deploy with a larger --rehearsal"
            )
        self.digest = plan_digest(recipe, file.clients)
        self.terms = terms_of(self.plan, file.number, self.policy.repeats)
        self.ledger = SiteLedger.from_site_file(file)
        self._key = None if file.key is None else read_signing_key(Path(file.key))
        public = "" if self._key is None else key_line(self._key.public_key())
        self.heads = SiteHeads(self.ledger.heads_file, self.name, public)
        self.mixer = _checked_mixer(file, self.plan)
        self.sums = SiteSums.of_site(file, self.plan, self.digest, self.training.task.size)
        self.held_out = HeldOutPeople.of_site(self.records, self.training)
        self.log = SiteLog(self.ledger.folder / "log.jsonl")
        self._kept = KeptAnswer(self.ledger.folder / "answer.safetensors")
        self.training.keep_no_copy()
        self._first, self._lock = self.training.task.parameters, threading.Lock()
        self._moving_values = self.plan.first_state(self._first).numel()

    @classmethod
    def open(cls, path: Path | str) -> "Site":
        """Return the site that a `site.toml` describes.

        Raises BadInput if a file is refused, the plan has no terms for this site, or the ledger is
        not what its witness remembers.
        """
        file = read_site_file(Path(path))
        if not file.recipe.endswith(".toml"):
            raise BadInput(f"recipe is {file.recipe!r}: name the owner's own copy, a .toml file")
        recipe = load_recipe(file.recipe)
        check_recipe(recipe)
        site = cls(file, recipe, _load_records(file, recipe))
        site.ledger.check_whole()
        return site

    def __repr__(self) -> str:
        return f"Site({self.name!r}, {self.recipe.name!r}, {self.plan.target})"

    def objections(self) -> Iterator[Objection]:
        """Yield the reasons why the policy forbids the recipe, whatever was spent.

        Nothing if it does not.
        """
        return self.objections_of(self.policy)

    def objections_of(self, policy: Policy) -> Iterator[Objection]:
        """Yield the reasons why another policy would forbid the recipe, whatever was spent."""
        steps = local_steps(self.training.work, self.records.records)
        return policy.objections(self.recipe.name, self.digest, self.plan, self.terms, steps)

    @property
    def ask_forms(self) -> Forms:
        """Return the forms of the vectors in an ask, which follow from the site's own plan."""
        forms = ask_forms(self._first.numel(), self._moving_values, self.file.clients)
        return forms if self.sums is None else {**forms, **sum_ask_forms(self.file.clients)}

    def prepare(self) -> None:
        """Make now what the first answer would make: a process that is forked does it once."""
        if isinstance(self._gradients, Looped) and not self._gradients.forks:
            _ = self._gradients.examples.layout
        if self.file.rehearsal is not None:
            _ = self._made_up

    def answer(self, ask: ServerMessage) -> Reply:
        """Return the site's report of a round, charged before it is computed, or a refusal.

        With a secure sum the report is masked, and the later steps of the sum are answered too. An
        ask for metrics is answered by `_metrics_answer`. An ask for a signature of the server's
        ledger gets that alone.

        Never raises, whatever a server sends. A refusal reveals nothing about the site's records.

        | edge | behaviour |
        |---|---|
        | another plan than that of the site's own copy | Refusal |
        | a round beyond the plan, a model of another size, a clip out of reach | Refusal |
        | the very ask that was answered last | the same answer, bit for bit, not charged |
        | asked before, out of order, beyond the budget or the policy | Refusal, not charged |
        | the server's ledger does not extend the one that this site knows | Refusal, not charged |
        | the ledger is lost, was put back or cannot be written | Refusal, the owner is told |
        | training diverges | the report is a randomised zero, where the site adds noise |
        | the work fails | the same; where the site does not randomise reports, Refusal |
        | reports go to a mixer | an answer without a report, once the mixer has counted it |
        | the mixer does not count it, or is not who it should be | Refusal, the charge stays |
        | the plan has a secure sum and the ask no roster, or the reverse | Refusal, not charged |
        | a roster that the protocol refuses | Refusal, not charged |
        | an ask under a secure sum for the second time | Refusal: a vector is sent once |
        """
        if isinstance(ask, SumStep | HeadAsk):
            return self._step(ask)
        if isinstance(ask, MetricsAsk):
            return self._metrics_answer(ask)
        if isinstance(ask, RehearsalAsk):
            return self._rehearsal_answer(ask)
        turn, began = (ask.run, ask.round, ask.attempt), time.monotonic()
        event, place = "answered", {"run": ask.run, "round": ask.round, "attempt": ask.attempt}
        try:
            with self._lock:
                self._check(ask)
                tail = self._server_ledger(ask)
                kept = None if self.sums else self._kept.read(ask, self.name)
                if kept is not None:
                    self.ledger.check_whole()
                    signature = self._signature(ask, tail, sign=signs_answers(self.plan))
                    self.log.write("answered again", **place)
                    return replace(kept, signature=signature)
                about = self._about
                if self.sums is not None and isinstance(ask, MaskedAsk):
                    self.sums.join_round(ask)
                self.ledger.charge(*turn, about=about, terms=self.terms, policy=self.policy)
                signature = self._signature(ask, tail, sign=signs_answers(self.plan))
                report, statistic = self._report(ask)
                answer: Reply
                if self.sums is not None and isinstance(ask, MaskedAsk):
                    clip = self.plan.clip(ask.moving, ask.round)
                    whole = torch.cat([report, statistic])
                    answer = self.sums.masked_report(ask, whole, clip)
                else:
                    answer = Answer(*turn, self.name, report, statistic, signature=signature)
                    self._kept.write(ask, answer)
        except (Declined, Refused, MessageRefused) as e:
            event, reason = "declined", str(e)[:LONGEST_REASON]
        except Exception as e:  # a full disk, a ledger that was changed: nothing to tell a server
            LOG.error("round %d of run %s: %s: %s", ask.round, ask.run, type(e).__name__, e)
            event, reason = "error", _UNUSABLE
            place |= {"error": f"{type(e).__name__}: {one_line(e)}"}
        else:
            seconds = round(time.monotonic() - began, 3)
            self.log.write(event, **place, seconds=seconds, **self._spent(ask.run))
            return answer
        self.log.write(event, **place, reason=reason)
        return Refusal(*turn, self.name, reason)

    @property
    def _about(self) -> dict[str, str]:
        """Return what the ledger notes of a run, beside its name and cost."""
        return {
            "site": self.name,
            "recipe": self.digest,
            "data": self.records.fingerprint,
            "noise": "secure" if self.plan.secure else "seeded",
            "seed": "",
        }

    def _metrics_answer(self, ask: MetricsAsk) -> Reply:
        """Return noisy sums over the held-out people, charged before they are computed.

        Never raises.

        | edge | behaviour |
        |---|---|
        | another plan than that of the site's own copy | Refusal |
        | the site measures nothing, or not after that round | Refusal, not charged |
        | the very ask again, or an older one | Refusal, not charged: sums are sent once |
        | as many measurements as the plan has were charged | Refusal |
        | the ledger is lost, was put back or cannot be written | Refusal, the owner is told |
        | the measurement fails | zeros with noise |
        """
        turn = (ask.run, ask.round, ask.attempt)
        place = {"run": ask.run, "round": ask.round, "attempt": ask.attempt}
        try:
            with self._lock:
                self._check_plan(ask)
                if self.held_out is None or ask.round not in self.held_out.site_metrics.rounds:
                    raise Declined(f"the plan has no measurement after round {ask.round}")
                terms, policy = self.terms, self.policy
                self.ledger.charge(
                    *turn, about=self._about, terms=terms, policy=policy, metrics=True
                )
                streams = Streams(secrets.randbits(128), self.plan.secure)
                sums = self.held_out.noisy_sums(ask.params, ask.round, streams)
        except Declined as e:
            event, reason = "declined", str(e)[:LONGEST_REASON]
        except Exception as e:  # a full disk, a ledger that was changed: nothing to tell a server
            LOG.error("round %d of run %s: %s: %s", ask.round, ask.run, type(e).__name__, e)
            event, reason = "error", _UNUSABLE
            place |= {"error": f"{type(e).__name__}: {one_line(e)}"}
        else:
            costs = [] if self.terms.measurements is None else self.terms.measurements.turn_costs
            self.log.write("measured", **place, at_most=[claim.short for claim in costs])
            return MetricsAnswer(*turn, self.name, sums)
        self.log.write(event, **place, reason=reason)
        return Refusal(*turn, self.name, reason)

    def _rehearsal_answer(self, ask: RehearsalAsk) -> Reply:
        """Return zeros, after a round's work on records that are made up. Never raises.

        Nothing is noted or charged: nothing of the records enters. So the time that it takes is
        public, but for what else the machine does.
        """
        turn = (ask.run, ask.round, ask.attempt)
        try:
            self._check(ask)
            if self.file.rehearsal is None:
                raise Declined("this site's site.toml has no rehearsal")
        except Declined as e:
            return Refusal(*turn, self.name, str(e)[:LONGEST_REASON])
        try:
            self._work_on(ask, *self._made_up)
        except Exception as e:
            LOG.error("a rehearsal of run %s: %s: %s", ask.run, type(e).__name__, e)
            return Refusal(*turn, self.name, _UNREHEARSED)
        self.log.write("rehearsed", run=ask.run)
        kind = torch.float64 if self.plan.release.wide else torch.float32
        watched = torch.zeros(self.plan.width, dtype=torch.float64)
        return Answer(*turn, self.name, torch.zeros(ask.params.numel(), dtype=kind), watched)

    @cached_property
    def _made_up(self) -> tuple[FederatedData, Gradients]:
        """Return made-up records, `rehearsal` of them, and the way to compute their gradients.

        They have the form of this site's records, and nothing else of them. All are the same one,
        so that they take the memory of one.
        """
        count = self.file.rehearsal or 1
        x, y = without_test(self.records).examples(1)

        def repeated(part: np.ndarray) -> np.ndarray:
            """Return `count` views of an array's only row."""
            return np.broadcast_to(part[0], (count, *part.shape[1:]))

        data = self.records.with_clients(mapped(repeated, x), repeated(y), np.array([0, count]))
        return data, self._gradients_of(data)

    def _server_ledger(self, ask: RoundAsk | HeadAsk) -> LedgerTail:
        """Return the end of the server's ledger in an ask.

        Raises Declined unless it extends the ledger that this site knows. No head is written.
        """
        try:
            tail = LedgerTail.from_bytes(ask.ledger_tail.numpy().tobytes())
        except BadInput as e:
            raise Declined(str(e)) from e
        try:
            self.heads.check(ask.run, tail)
        except HeadRefused as e:
            LOG.error("round %d of run %s: %s", ask.round, ask.run, e)
            raise Declined(str(e)) from e
        return tail

    def _signature(self, ask: RoundAsk | HeadAsk, tail: LedgerTail, *, sign: bool) -> torch.Tensor:
        """Keep the server's ledger durably, then return this site's signature of its head.

        Empty without a key, and unless it is to `sign`. Raises Declined as `_server_ledger`.
        """
        try:
            hash, history = self.heads.extend(ask.run, tail, self.ledger.current_head())
        except HeadRefused as e:
            raise Declined(str(e)) from e
        if self._key is None or not sign:
            return bytes_tensor(b"")
        place = (ask.run, self.digest, self.name, tail.length, hash, history)
        own = software_digest(installed_software())
        head = SignedHead(*place, tail.software, own).sign(self._key)
        self.heads.keep(head)
        return bytes_tensor(json.dumps(head.to_dict()).encode())

    def _step(self, step: SumStep | HeadAsk) -> Reply:
        """Return the site's answer to a message that asks for no report, or a refusal.

        It is a signature, or a later step of a secure sum. Never raises. Nothing is charged: what a
        step opens is the sum that the vectors were charged for.
        """
        turn = (step.run, step.round, step.attempt)
        place = {"run": step.run, "round": step.round, "attempt": step.attempt}
        event = "secure sum"
        reply: Reply
        try:
            if step.plan != self.digest:
                raise Declined(OTHER_PLAN)
            if isinstance(step, HeadAsk):
                with self._lock:
                    tail = self._server_ledger(step)
                    self.ledger.check_whole()
                    signature = self._signature(step, tail, sign=True)
                event = "signed" if len(signature) else "ledger seen"
                what = f"entry {tail.length} of the server's ledger"
                reply = HeadReply(*turn, self.name, signature)
            elif self.sums is None:
                raise Declined(OTHER_PLAN)
            else:
                for objection in self.objections():
                    raise Declined(objection.reason)
                what, reply = self.sums.reply_to(step)
        except (Declined, MessageRefused) as e:
            reason = str(e)[:LONGEST_REASON]
            self.log.write("declined", **place, reason=reason)
            return Refusal(*turn, self.name, reason)
        except Exception as e:
            LOG.error("round %d of run %s: %s: %s", step.round, step.run, type(e).__name__, e)
            self.log.write("error", **place, error=f"{type(e).__name__}: {one_line(e)}")
            return Refusal(*turn, self.name, _UNUSABLE)
        self.log.write(event, **place, step=what)
        return reply

    def _spent(self, run: str) -> dict[str, Any]:
        """Return what a run has cost, as the log says it: turns, claims now and at most.

        Keys: "turns", "permitted", "spent" and "at_most". {} if that cannot be read.
        """
        try:
            turns = self.ledger.turn_count(run)
            lines = [line for line in self.terms.charged_lines if turns]
            return {
                "turns": turns,
                "permitted": self.terms.permitted_turns,
                "spent": [line.claims(turns)[0].short for line in lines],
                "at_most": [claim.short for claim in self.terms.costs],
            }
        except Exception as e:  # the answer was paid for, and is not lost for a line in a log
            LOG.error("what run %s has cost cannot be read: %s", run, e)
            return {}

    def _check(self, ask: RoundAsk) -> None:
        """Raise Declined if an ask does not fit the site's own plan and policy.

        Nothing is written or charged. The owner's log has the details.
        """
        self._check_plan(ask)
        if isinstance(ask, MaskedAsk) != (self.sums is not None):
            what = "has no" if self.sums is None else "has a"
            raise Declined(f"the site's own recipe {what} secure sum, and the ask differs from it")
        if not self.plan.reachable(ask.moving, ask.params, self._first, ask.round):
            raise Declined("the clip or the ranges cannot be what they are in that round")

    def _check_plan(self, ask: RoundAsk | MetricsAsk) -> None:
        """Raise Declined for another plan, round or size of the model, or if the policy objects."""
        if ask.plan != self.digest:
            raise Declined(OTHER_PLAN)
        for objection in self.objections():
            LOG.warning("round %d of run %s: %s", ask.round, ask.run, objection)
            raise Declined(objection.reason)
        plan = self.plan
        if ask.round > plan.permitted or ask.attempt > plan.rounds:
            raise Declined(
                f"round {ask.round}, attempt {ask.attempt}, is beyond the plan's {plan.permitted} "
                "rounds"
            )
        if ask.params.shape != self._first.shape:
            raise Declined(
                f"the model has {ask.params.numel()} parameters and this site's "
                f"{self._first.numel()}"
            )

    def _report(self, ask: RoundAsk) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the report [P] for the server, and the statistic [W] of an adaptive clip.

        With a mixer, the report is sent there, and the one returned is empty. Raises Refused if the
        mixer does not count it. The simulator's own function computes the report, with randomness
        that no other answer has.
        """
        sent, round = self._work_on(ask, self.records, self._gradients)
        if not isinstance(sent.reports, Rows):
            raise AssertionError("one client's report is a row")
        rows, channel = sent.reports.rows, self.plan.release.channel
        if self.mixer is None:
            return rows[0], sent.statistic_values[0]
        if not isinstance(channel, Shuffler):
            raise AssertionError("a mixer is for shuffled reports")
        number = round_number(ask.round, ask.attempt, self.plan.rounds)
        self.mixer.send_report(number, channel.messages(rows, round)[0], channel.minimum)
        return rows[0, :0], sent.statistic_values[0]

    def _work_on(
        self, ask: RoundAsk, records: FederatedData, gradients: Gradients
    ) -> tuple[ClientReports, Round]:
        """Do a round's work on records: (what a client sends, the round)."""
        streams = Streams(secrets.randbits(128), self.plan.secure)
        ids = np.array([self.file.number or 0])
        cohort = CohortData(records, ids, np.zeros(1, dtype=np.int64))
        clip = self.plan.clip(ask.moving, ask.round)
        round = Round(ask.round, ids, ask.params, clip, ask.moving, streams, ask.attempt)
        with one_thread():
            return self._client_report(ClientBatch.from_round(round, cohort, gradients)), round

    def _client_report(self, clients: ClientBatch) -> ClientReports:
        """Train, clip and randomise. If the work fails, the report is a randomised zero.

        Raises Declined if the work fails and the site adds no noise to reports.
        """
        try:
            return client_report(self.training.work, self.plan, clients)
        except Exception as e:
            LOG.exception("round %d could not be computed", clients.round.number)
            if not self.plan.release.adds_noise:
                raise Declined(_FAILED) from e
            return client_report(_ZeroWork(), self.plan, clients)  # type: ignore[arg-type]

    @cached_property
    def _gradients(self) -> Gradients:
        """Return the way to compute gradients of the site's records, in the looped mode."""
        return self._gradients_of(self.records)

    def _gradients_of(self, records: FederatedData) -> Gradients:
        """Return the way to compute gradients of records, in the looped mode."""
        training = self.training
        return gradients_of(
            training.task,
            Mode.LOOPED,
            records,
            mixes=training.mixes,
            private=training.plan.noisy_steps is not None,
        )


class _ZeroWork:
    """Replaces work that failed by a zero update. That it failed may depend on the records."""

    def updates(self, clients: ClientBatch) -> Clipped:
        """Return one row of zeros, which no clip has met."""
        rows = torch.zeros(1, clients.round.start.shape[-1])
        none = torch.zeros(1, dtype=torch.bool)
        return Clipped(rows, torch.zeros(1, dtype=torch.float64), none)


def _checked_mixer(file: SiteFile, plan: PrivacyPlan) -> MixerSection | None:
    """Return the mixer of site.toml, None if reports go to the server.

    Raises BadInput if the recipe has [shuffle] and there is no mixer, or the reverse.
    """
    shuffled = isinstance(plan.release.channel, Shuffler)
    if shuffled and file.mixer is None:
        raise BadInput(
            "the recipe has [shuffle], but site.toml has no [mixer]: add one, or use a recipe "
            "without [shuffle], whose trust is local"
        )
    if file.mixer is not None and not shuffled:
        raise BadInput("[mixer] is for recipes with [shuffle]: omit it")
    return file.mixer


def _load_records(file: SiteFile, recipe: Recipe) -> FederatedData:
    """Load the site's records, as the data of one client.

    Raises BadInput if there are several clients, or records are held back and nobody measures.
    """
    section, test = file.data, file.data.test
    if isinstance(test, float) and recipe.evaluate.where != "site":
        raise BadInput(
            f"data.test is {shown(test)}, which would hold rows back, and this site measures "
            "nothing: omit it, so that every row is used"
        )
    if section.name == TABLE and section.client is None and section.clients is None:
        alone = {"clients": 1, "partition": section.partition or "iid"}  # several files as well
        section = section.model_copy(update=alone)
    data = section.divide(section.load(None), recipe.seed)
    if data.clients != 1:
        raise BadInput(
            f"data has {data.clients} clients: a site is one; leave data.client out, or give it "
            "the records of one"
        )
    if (data.owners_of_test != PUBLIC).any() and recipe.evaluate.where != "site":
        raise BadInput(
            f"{section.path} holds back {len(data.test_y)} test records of this site's own, which "
            "nobody measures: save the data without a test split, so that every record is used, or "
            "let sites measure (evaluate.where = 'site')"
        )
    data.check()
    return data


def _check_size(training: Training, units: int) -> None:
    """Raise BadInput if the site has more units than the plan can add up with secure noise.

    With a nominal number (DP-SGD) these are that many, and where sites send sums, as many as all
    sites declare together.
    """
    plan = training.plan
    if not plan.secure or plan.noisy_steps is None:
        return
    most, what = plan.noisy_steps.nominal, "client.nominal"
    if plan.release.requires.sends_sum:
        most, what = training.data.records, "the declared number of all sites"
    if most is not None and units > most:
        several = "people" if plan.noisy_steps.unit is Unit.PERSON else "records"
        raise BadInput(
            f"there are {units} {several} and {what} is {most}: secure noise is prepared for no "
            "more; declare more"
        )


def site_training(
    recipe: Recipe, data: FederatedData, sizes: Sequence[int], folder: Path, *, allow_code: bool
) -> Training:
    """Return the recipe's training over all sites as a site builds it: for plan and checks only.

    It has no test split. Metrics are priced only if sites measure them. Raises BadInput for a
    recipe that is refused.

    Args:
        recipe: The owner's copy of the recipe.
        data: Records of the form that all sites have. Only the form is used.
        sizes: The public number of records of each site, or of people where these are sampled.
        folder: Where files that the recipe names are looked for.
        allow_code: Whether the code that the recipe names may be run.
    """
    model = with_absolute_paths(recipe.model, folder, "path", "weights")
    evaluate = recipe.evaluate
    if evaluate.where != "site":
        free = {"epsilon": None, "delta": None, "loss_clip": None}
        evaluate = evaluate.model_copy(update=free)
    recipe = recipe.model_copy(update={"model": model, "evaluate": evaluate})
    everyone = data.at_sites([str(number) for number in range(len(sizes))], sizes)
    return build_for_plan(recipe, without_test(everyone), allow_code=allow_code)


def without_test(data: FederatedData) -> FederatedData:
    """Return the data without a test split."""
    none: dict[str, Any] = {"test_owners": None, "test_persons": None}
    return replace(data, test_x=taken(data.test_x, slice(0)), test_y=data.test_y[:0], **none)
