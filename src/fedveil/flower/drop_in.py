"""fedveil's plan, ledger and claim for apps of plain Flower: `PrivateStrategy` and `PrivateMod`.

`PrivateStrategy` wraps a strategy of the app's own. Who takes part is drawn by the plan's sampler,
every round is charged before anybody is asked, what comes back is accepted, clipped and summed as
in a simulation, and only the private mean reaches the strategy.

`PrivateMod` is for local privacy, kept by the client itself. It stands around the app's own
training, as a mod of its ClientApp: every turn is charged on the client's ledger before the
training begins, and what leaves is the clipped update with noise, and nothing else.

Needs the extra `flower`. docs/flower.md.
"""

import logging
import math
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from pydantic import ValidationError

from fedveil.base.errors import BadInput, one_line
from fedveil.flower.policy import Policy, Terms, terms_of
from fedveil.flower.site_ledger import Declined, SiteLedger
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.privacy.clip import row_norms
from fedveil.privacy.clip_schedules import Lengths
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.release import Round
from fedveil.training.exchange import server_sum
from fedveil.training.participants import Participants
from fedveil.training.reports import ClientReports, CohortSum, Rows, accept
from fedveil.training.round import begin, end
from fedveil.training.server import ServerState, SgdServer


def flatten(record: ArrayRecord) -> torch.Tensor:
    """Return all arrays of a model, in their order, as one vector, float32 [P].

    Raises BadInput if an array does not hold floating-point numbers.
    """
    parts = []
    for name, array in record.items():
        values = array.numpy()
        if values.dtype.kind != "f":
            raise BadInput(
                f"the model's array {name!r} is {values.dtype}: only real numbers can be "
                "protected; leave counters and other buffers out of what is sent"
            )
        parts.append(torch.tensor(values.astype(np.float32).reshape(-1)))
    return torch.cat(parts) if parts else torch.zeros(0)


def unflatten(vector: torch.Tensor, like: ArrayRecord) -> ArrayRecord:
    """Return a vector [P] as arrays with the names, shapes and types of `like`."""
    arrays, begin = dict[str, Array](), 0
    for name, array in like.items():
        size = math.prod(array.shape)
        part = vector[begin : begin + size].numpy().reshape(array.shape)
        arrays[name] = Array(part.astype(array.dtype))
        begin += size
    return ArrayRecord(arrays)


def model_update(record: ArrayRecord, start: ArrayRecord) -> torch.Tensor:
    """Return the difference of a model from the model `start`, float32 [P].

    The vector is empty if names or shapes differ or an array cannot be read. `accept` refuses it
    then, for its length.
    """
    forms = [[(name, array.shape) for name, array in each.items()] for each in (record, start)]
    if forms[0] != forms[1]:
        return torch.zeros(0)
    try:
        return flatten(record) - flatten(start)
    except Exception:  # whatever a reader of files that somebody else wrote may raise
        return torch.zeros(0)


LOG = logging.getLogger("flwr")

_UNKNOWN_ERROR = 0  # Flower's code for errors that have no other

_NODE_POLL = 1.0  # seconds from one check of the nodes to the next


class PrivateStrategy(Strategy):
    """A strategy that wraps another one and makes its models as private as `plan` claims.

    Guarantee: that of the plan (docs/proofs/central.md, docs/proofs/local.md), for the models that
    `start` makes. The wrapped strategy sees the private mean and nothing else. With noise at the
    clients, these run `PrivateMod` with the same plan. Two runs share no noise, unless both have
    the same `seed`, which is for simulations that are repeated on the same records.

    Args:
        strategy: The app's own strategy.
        plan: The privacy plan.
        ledger: The file of a new ledger.
        seed: The seed of a simulation. None draws one.
        wait: Seconds to wait for the plan's number of nodes.

    | edge | behaviour |
    |---|---|
    | fewer nodes than the plan has clients | waits `wait` seconds, then BadInput |
    | more of them | BadInput: the plan is for another number |
    | a node that goes away | stays a client: divisor, noise and charge do not change |
    | a reply that is an error, of another model, not finite, twice, or not asked for | zero |
    | metrics in replies, evaluation at clients | not looked at, not asked for: they are releases |
    | a strategy that samples by itself | BadInput: use fraction_train = 1.0 |
    | the budget is used up | nobody is asked any more, and the model stays |
    | a plan that claims nothing, or whose clients do more than add noise | BadInput |
    | a ledger that is there already, a second `start` | BadInput: one for each run |
    """

    def __init__(
        self,
        strategy: Strategy,
        plan: PrivacyPlan,
        ledger: Path | str,
        *,
        seed: int | None = None,
        wait: float = 3600.0,
    ) -> None:
        check_plan(plan)
        super().__init__()
        self.strategy, self.plan, self._wait = strategy, plan, wait
        if Path(ledger).exists():
            raise BadInput(f"{ledger} exists: every run has a ledger of its own; name another")
        about = {"run": Path(ledger).stem, "noise": "secure" if plan.secure else "seeded"}
        self.ledger = Ledger.create(
            Path(ledger),
            LedgerRun(about, plan.every_line, plan.permitted, plan.counted_clients, repeats=False),
        )
        self._streams = Streams(secrets.randbits(128) if seed is None else seed, plan.secure)
        self._nodes: list[int] = []
        self._asked: dict[int, int] = {}
        self._start: ArrayRecord = ArrayRecord()
        self._round: Round | None = None
        self._state = ServerState(0, torch.zeros(0), {}, torch.zeros(0))

    @property
    def claim(self) -> PrivacyClaim:
        """Return the claim that holds if the run ends now, for whatever reason."""
        ledger = self.ledger
        claim = counting(self.plan.claims(ledger.charged(), ledger.counts(), ledger.extra_attempts))
        if claim is None:
            raise AssertionError("a plan that claims nothing was refused")
        return claim

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's clients, charge the ledger, and return the wrapped strategy's messages.

        Only messages to these clients are returned, [] if the budget is used up. In the first round
        it waits for the plan's number of nodes. Raises BadInput for a round that was charged
        already, a strategy that samples by itself, or a model or number of nodes that is not the
        plan's.
        """
        if self.ledger.refusal is not None:
            return []
        if server_round <= self.ledger.charged():
            raise BadInput(
                f"round {server_round} was charged already: a strategy and its ledger are for one "
                "run; make new ones"
            )
        self._set_model_and_nodes(arrays, grid)
        offered = {
            message.metadata.dst_node_id: message
            for message in self.strategy.configure_train(server_round, arrays, config, grid)
        }
        for node in set(grid.get_node_ids()) & set(self._nodes):
            if node not in offered:
                raise BadInput(
                    "the strategy asks some of the nodes only, and who takes part is drawn by the "
                    "plan: use fraction_train = 1.0"
                )
        self._state = replace(self._state, round=server_round - 1)
        self._round = begin(self.plan, self._streams, self.ledger, self._state, Participants())
        if self._round is None:
            LOG.warning("%s", self.ledger.refusal)
            return []
        self._asked = {self._nodes[client]: int(client) for client in self._round.ids}
        return [offered[node] for node in self._asked if node in offered]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return (the model that the wrapped strategy makes of the private mean, None).

        Adds the server's noise, if the plan has it there. The private mean is the only reply that
        the wrapped strategy gets. (None, None) if the round was not configured, or was aggregated
        already.
        """
        round, plan = self._round, self.plan
        if round is None or round.number != server_round:
            return None, None
        self._round = None  # a second sum of one round would be a release that nobody charged
        total = CohortSum.zero(len(round.start), plan.width, noisy=False)
        rows = self._updates(replies)
        for client in sorted(rows):
            asked = replace(round, ids=np.array([client], dtype=np.int64))
            sent = self._client_report(rows[client], asked)
            server_sum([(total, slice(None))], plan, asked, sent, torch.ones(1).double())
        result = end(plan, SgdServer(), self.ledger, self._state, round, total)
        self._state = result.state
        weight = str(getattr(self.strategy, "weighted_by_key", "num-examples"))
        mean, metrics = unflatten(result.state.params, self._start), MetricRecord({weight: 1.0})
        content = RecordDict({"arrays": mean, "metrics": metrics})
        found, _ = self.strategy.aggregate_train(server_round, [Message(content, 0, "train")])
        spent = result.spent()
        LOG.info("round %d: %s", server_round, "" if spent is None else spent.short)
        return found, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return []: client metrics would be releases outside the plan."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return None, since no client was asked."""
        return None

    def summary(self) -> None:
        """Log the plan and the summary of the wrapped strategy."""
        LOG.info("\t├──> %s", self.plan)
        self.strategy.summary()

    def _set_model_and_nodes(self, arrays: ArrayRecord, grid: Grid) -> None:
        """Set the round's model and, in the first round, the nodes that are the plan's clients.

        Raises BadInput if the model has another size than the plan accounts for or numbers that are
        not floating-point, at once if there are more nodes than the plan's clients, and after
        `wait` seconds if there are fewer.
        """
        start, plan = flatten(arrays), self.plan
        if plan.parameters is not None and plan.parameters != len(start):
            raise BadInput(
                f"the plan accounts for {plan.parameters:,} parameters and the model has "
                f"{len(start):,}: make the plan for this model"
            )
        self._start = arrays
        first = self._state.params.numel() == 0
        moving = plan.first_state(start) if first else self._state.adaptive_state
        self._state = replace(self._state, params=start, adaptive_state=moving)
        until = time.monotonic() + self._wait
        while not self._nodes:
            nodes = sorted(grid.get_node_ids())
            if len(nodes) == plan.population:
                self._nodes = nodes
            elif len(nodes) > plan.population or time.monotonic() >= until:
                raise BadInput(
                    f"the plan is for {plan.population} clients and {len(nodes)} nodes are there: "
                    "make it for that number, or start as many"
                )
            else:
                time.sleep(_NODE_POLL)

    def _updates(self, replies: Iterable[Message]) -> dict[int, torch.Tensor]:
        """Return the update in the first reply of each client that was asked, by client number.

        Replies with an error, and those of nodes that were not asked, are left out. One without
        exactly one model has an empty update.
        """
        rows: dict[int, torch.Tensor] = {}
        for reply in replies:
            client = self._asked.get(reply.metadata.src_node_id)
            if client is None or client in rows or reply.has_error():
                continue
            records = list(reply.content.array_records.values())
            one = len(records) == 1
            rows[client] = model_update(records[0], self._start) if one else torch.zeros(0)
        return rows

    def _client_report(self, row: torch.Tensor, asked: Round) -> ClientReports:
        """Return an update as the report of one client, with the statistic of an adaptive clip.

        A row of another length than the model becomes NaN, which `server_sum` refuses.
        """
        rows, no = Rows.from_reports([row], len(asked.start)), torch.zeros(1, dtype=torch.bool)
        clipped = no
        if asked.clip is not None and self.plan.statistic is not None:
            norms = row_norms(rows.rows, asked.clip.norm)
            clipped = ~(norms <= asked.clip.value)
            statistic = self.plan.client_statistic(Lengths(norms, clipped), asked)
        else:
            statistic = torch.zeros(1, self.plan.width, dtype=torch.float64)
        return ClientReports(rows, statistic, clipped, no)


def check_plan(plan: PrivacyPlan) -> None:
    """Raise BadInput for a plan that apps of plain Flower cannot keep.

    It must claim something, price no metrics, and ask of clients no more than additive noise.
    """
    plan.check_lines()
    release = plan.release
    if not plan.private:
        raise BadInput("the plan claims nothing: make one with central or client_noise")
    if plan.metrics is not None:
        raise BadInput("this strategy measures nothing: make the plan without metrics")
    if release.local and (not release.additive or plan.statistic is not None):
        raise BadInput(
            "this plan asks more of clients than noise on what they reply: use a recipe, which "
            "fedveil's own apps run"
        )


class PrivateMod:
    """A Flower mod that clips and randomises a client's replies, as a local `plan` says.

    Guarantee: docs/proofs/local.md. A reply is a clipped update with the plan's noise, drawn for it
    alone, and its turn was charged durably before the app's training began. A client that is asked
    twice for a round declines the second time.

    Args:
        plan: The privacy plan, with noise at the clients.
        ledger: The folder of the client's ledger. Its witness is written beside it.
        policy: The keys of the client's policy.
        weighted_by: The metric by which the server's strategy weights replies.

    | edge | behaviour |
    |---|---|
    | a plan whose noise is not the client's | BadInput |
    | a plan that the policy objects to (trust, seeded noise, too little noise) | BadInput |
    | a policy with a number out of range, or a key that is for recipes | BadInput |
    | the plan's turns, its budget or the policy are used up | an error reply; nothing is trained |
    | a round out of the plan, a model of another size, or not finite | an error reply |
    | a message that asks for anything but training, such as evaluation | an error reply |
    | the app's training fails, diverges or returns another model | a randomised zero |
    | metrics | one, of weight 1, so that strategies weight all alike |
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        ledger: Path | str,
        policy: Mapping[str, Any],
        weighted_by: str = "num-examples",
    ) -> None:
        check_plan(plan)
        if not plan.release.local:
            raise BadInput("the plan's noise is the server's: use PrivateStrategy, and no mod")
        self.plan, self.terms, self._weight = plan, terms_of(plan, None, 0), weighted_by
        self.policy = _checked_policy(policy, plan, self.terms)
        folder = Path(ledger)
        self.ledger = SiteLedger(folder, folder.with_name(f"{folder.name}.head.json"))

    def __call__(self, msg: Message, ctxt: Context, call_next: ClientAppCallable) -> Message:
        """Charge a turn, let the app train, and return a reply with start + clipped noisy update.

        An ask that is declined gets an error reply, and nothing is trained. If the training fails,
        the update is a randomised zero. Never raises for what the server sent.
        """
        try:
            asked = self._read_ask(msg)
            run, round = f"{msg.metadata.run_id:032x}", asked.number
            about = {"noise": "secure" if self.plan.secure else "seeded"}
            self.ledger.charge(run, round, 0, about=about, terms=self.terms, policy=self.policy)
        except Declined as e:
            return Message(Error(_UNKNOWN_ERROR, f"declined: {e}"), reply_to=msg)
        except Exception as e:  # Flower would tell the server what it says
            LOG.error("round declined: %s", one_line(e))
            return Message(Error(_UNKNOWN_ERROR, "declined: the client was told why"), reply_to=msg)
        key, start = next(iter(msg.content.array_records.items()))
        row = torch.zeros_like(asked.start)
        try:
            reply = call_next(msg, ctxt)
            records = [] if reply.has_error() else list(reply.content.array_records.values())
            row = model_update(records[0], start) if len(records) == 1 else row
        except Exception as e:  # that it failed may be a matter of the records: nobody else is told
            LOG.error("the training failed, and a randomised zero is sent: %s", one_line(e))
        rows = Rows.from_reports([row], len(asked.start))
        accept(rows, asked.clip)
        self.plan.release.randomise_(rows.rows, asked)
        sent, metrics = asked.start + rows.rows[0], MetricRecord({self._weight: 1.0})
        content = RecordDict({key: unflatten(sent, start), "metrics": metrics})
        return Message(content, reply_to=msg)

    def _read_ask(self, msg: Message) -> Round:
        """Return the round that a message asks for, with its model and fresh randomness.

        Clip and noise come from the plan, whatever the message contains. Raises Declined if the
        message does not ask for training, or its round or model is not the plan's, and BadInput for
        arrays that are not floating-point.
        """
        if msg.metadata.message_type.split(".")[0] != "train":
            raise Declined("only training is private: what else leaves a client, nothing accounts")
        arrays, configs = msg.content.array_records, msg.content.config_records
        if len(arrays) != 1 or len(configs) != 1:
            raise Declined("a message with one model and one configuration is needed")
        round = next(iter(configs.values())).get("server-round")
        if type(round) is not int or not 1 <= round <= self.plan.rounds:
            raise Declined(f"the round is none of the plan's {self.plan.rounds}")
        start = flatten(next(iter(arrays.values())))
        if self.plan.parameters not in (None, len(start)) or not bool(torch.isfinite(start).all()):
            raise Declined("the model is not the plan's, or not finite")
        moving = self.plan.first_state(start)
        streams = Streams(secrets.randbits(128), self.plan.secure)
        alone = np.zeros(1, dtype=np.int64)
        return Round(round, alone, start, self.plan.clip(moving, round), moving, streams)


def _checked_policy(keys: Mapping[str, Any], plan: PrivacyPlan, terms: Terms) -> Policy:
    """Return the policy with these keys. Raise BadInput if a key is wrong or it forbids the plan.

    Keys that are about a recipe are refused: there is none here.
    """
    try:
        policy = Policy.model_validate(dict(keys))
    except ValidationError as e:
        raise BadInput(f"policy: {one_line(e)}") from e
    policy.check_values("policy")  # a limit that is no number would limit nothing
    for key in ("recipes", "steps", "repeats"):
        if key in policy.model_fields_set:
            raise BadInput(f"policy.{key} is for sites that have a recipe: omit it")
    for objection in policy.objections_to_plan(plan, terms):
        raise BadInput(f"policy and plan contradict each other: {objection}")
    return policy
