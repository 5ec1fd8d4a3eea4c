"""`PrivateStrategy`: fedveil's plan, ledger and claim for an app of plain Flower.

It wraps a strategy of the app's own. Who takes part is drawn by the plan's sampler, every round is
charged before anybody is asked, what comes back is accepted, clipped and summed as in a simulation,
and only the private mean reaches the strategy. Needs the extra `flower`. docs/flower.md.
"""

import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedveil.base.errors import BadInput
from fedveil.flower.model_vector import flat, moved, shaped
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.privacy.clip_schedules import Lengths
from fedveil.privacy.ledger.ledger import Ledger
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.round import Round
from fedveil.privacy.rows import row_norms
from fedveil.training.exchange import Sent, server_sum
from fedveil.training.reports import Rows
from fedveil.training.round import begin, end
from fedveil.training.server import ServerState, SgdServer
from fedveil.training.sums import CohortSum

LOG = logging.getLogger("flwr")

_LOOK = 1.0


class PrivateStrategy(Strategy):
    """A strategy whose models are as private as `plan` claims.

    Guarantee: that of the plan (docs/proofs/central.md, docs/proofs/local.md), for the models that
    `start` makes; the strategy inside sees the private mean and nothing else. With noise at the
    clients, these run `PrivateMod` with the same plan. Two runs share no noise; `seed` is for
    simulations that are to be repeated, on the same records.

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
            about,
            plan.every_line,
            plan.permitted,
            plan.counted_clients,
            repeats=False,
        )
        self._streams = Streams(secrets.randbits(128) if seed is None else seed, plan.secure)
        self._nodes: list[int] = []
        self._asked: dict[int, int] = {}
        self._start: ArrayRecord = ArrayRecord()
        self._round: Round | None = None
        self._state = ServerState(0, torch.zeros(0), {}, torch.zeros(0))

    @property
    def claim(self) -> PrivacyClaim:
        """The claim that counts if the run ends now, whoever ends it and why."""
        ledger = self.ledger
        claim = counting(self.plan.claims(ledger.charged(), ledger.counts(), ledger.extra_attempts))
        if claim is None:
            raise AssertionError("a plan that claims nothing was refused")
        return claim

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw who takes part and charge for it; the messages are those of the strategy inside."""
        if self.ledger.refusal is not None:
            return []
        if server_round <= self.ledger.charged():
            raise BadInput(
                f"round {server_round} was charged already: a strategy and its ledger are for one "
                "run; make new ones"
            )
        self._begin(arrays, grid)
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
        self._round = begin(self.plan, self._streams, self.ledger, self._state)
        if self._round is None:
            LOG.warning("%s", self.ledger.refusal)
            return []
        self._asked = {self._nodes[client]: int(client) for client in self._round.ids}
        return [offered[node] for node in self._asked if node in offered]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The private mean, as the one reply that the strategy inside gets."""
        round, plan = self._round, self.plan
        if round is None or round.number != server_round:
            return None, None
        self._round = None  # a second sum of one round would be a release that nobody charged
        total = CohortSum.zero(len(round.start), plan.width, noisy=False)
        rows = self._rows(replies)
        for client in sorted(rows):
            asked = replace(round, ids=np.array([client], dtype=np.int64))
            sent = self._sent(rows[client], asked)
            server_sum([(total, slice(None))], plan, asked, sent, torch.ones(1).double())
        result = end(plan, SgdServer(), self.ledger, self._state, round, total)
        self._state = result.state
        weight = str(getattr(self.strategy, "weighted_by_key", "num-examples"))
        content = RecordDict(
            {
                "arrays": shaped(result.state.params, self._start),
                "metrics": MetricRecord({weight: 1.0}),
            }
        )
        found, _ = self.strategy.aggregate_train(server_round, [Message(content, 0, "train")])
        spent = result.spent()
        LOG.info("round %d: %s", server_round, "" if spent is None else spent.short)
        return found, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody: what a model comes to on clients' records is a release that nothing accounts."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Nothing."""
        return None

    def summary(self) -> None:
        """Log the plan, and the strategy inside."""
        LOG.info("\t├──> %s", self.plan)
        self.strategy.summary()

    def _begin(self, arrays: ArrayRecord, grid: Grid) -> None:
        """Note the round's model and, once, which nodes are the plan's clients."""
        start, plan = flat(arrays), self.plan
        if plan.parameters is not None and plan.parameters != len(start):
            raise BadInput(
                f"the plan accounts for {plan.parameters:,} parameters and the model has "
                f"{len(start):,}: make the plan for this model"
            )
        self._start = arrays
        first = self._state.params.numel() == 0
        moving = plan.start(start) if first else self._state.moving
        self._state = replace(self._state, params=start, moving=moving)
        until = time.monotonic() + self._wait
        while not self._nodes:
            found = sorted(grid.get_node_ids())
            if len(found) > plan.population or (
                len(found) < plan.population and time.monotonic() >= until
            ):
                raise BadInput(
                    f"the plan is for {plan.population} clients and {len(found)} nodes are there: "
                    "make it for that number, or start as many"
                )
            if len(found) == plan.population:
                self._nodes = found
            else:
                time.sleep(_LOOK)

    def _rows(self, replies: Iterable[Message]) -> dict[int, torch.Tensor]:
        """What each client that was asked has sent first, as a vector."""
        rows: dict[int, torch.Tensor] = {}
        for reply in replies:
            client = self._asked.get(reply.metadata.src_node_id)
            if client is None or client in rows or reply.has_error():
                continue
            records = list(reply.content.array_records.values())
            rows[client] = moved(records[0], self._start) if len(records) == 1 else torch.zeros(0)
        return rows

    def _sent(self, row: torch.Tensor, asked: Round) -> Sent:
        """A row as a block of one client; the server itself sees what an adaptive clip watches."""
        rows, no = Rows.of([row], len(asked.start)), torch.zeros(1, dtype=torch.bool)
        clipped = no
        if asked.clip is not None and self.plan.watched is not None:
            norms = row_norms(rows.rows, asked.clip.norm)
            clipped = ~(norms <= asked.clip.value)
            watched = self.plan.watch(Lengths(norms, clipped), asked)
        else:
            watched = torch.zeros(1, self.plan.width, dtype=torch.float64)
        return Sent(rows, watched, clipped, no)


def check_plan(plan: PrivacyPlan) -> None:
    """Refuse a plan that cannot be kept by looking at replies alone."""
    plan.check_lines()
    release = plan.release
    if not plan.private:
        raise BadInput("the plan claims nothing: make one with central or client_noise")
    if plan.metrics is not None:
        raise BadInput("this strategy measures nothing: make the plan without metrics")
    if release.counted and (not release.additive or plan.watched is not None):
        raise BadInput(
            "this plan asks more of clients than noise on what they reply: use a recipe, which "
            "fedveil's own apps run"
        )
