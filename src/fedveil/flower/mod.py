"""`PrivateMod`: local privacy for an app of plain Flower, kept by the client itself.

It stands around the app's own training, as a mod of its ClientApp: every turn is charged on the
client's ledger before the training begins, and what leaves is the clipped update with noise, and
nothing else. Needs the extra `flower`. docs/flower.md.
"""

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from pydantic import ValidationError

from fedveil.base.errors import BadInput, one_line
from fedveil.flower.messages import RoundAsk
from fedveil.flower.model_vector import flat, moved, shaped
from fedveil.flower.policy import Policy
from fedveil.flower.site_file import PolicySection
from fedveil.flower.site_ledger import Declined, SiteLedger, today
from fedveil.flower.strategy import check_plan
from fedveil.flower.terms import Terms, terms_of
from fedveil.privacy.noise.streams import Streams
from fedveil.privacy.plan import PrivacyPlan
from fedveil.privacy.round import Round
from fedveil.training.reports import Rows, accept

LOG = logging.getLogger("flwr")

_CANNOT, _TRAINING = 0, "train"
_OF_RECIPES = ("recipes", "steps", "repeats")


class PrivateMod:
    """A mod that makes replies private by themselves, as `plan` says.

    Guarantee: docs/proofs/local.md. A reply is a clipped update with the plan's noise, drawn for it
    alone, and its turn was charged durably before the app's training began. Whoever is asked twice
    for a round declines the second time.

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
        if not plan.release.counted:
            raise BadInput("the plan's noise is the server's: use PrivateStrategy, and no mod")
        self.plan, self.terms, self._weight = plan, terms_of(plan, None, 0), weighted_by
        self.policy = _policy(policy, plan, self.terms)
        folder = Path(ledger)
        self.ledger = SiteLedger(folder, folder.with_name(f"{folder.name}.head.json"))

    def __call__(self, msg: Message, ctxt: Context, call_next: ClientAppCallable) -> Message:
        """Charge, let the app train, clip and randomise; what was declined is an error reply."""
        try:
            asked = self._asked(msg)
            about = {"noise": "secure" if self.plan.secure else "seeded"}
            self.ledger.charge(_ask(msg, asked.number), about, self.terms, self.policy, today())
        except Declined as e:
            return Message(Error(_CANNOT, f"declined: {e}"), reply_to=msg)
        except Exception as e:  # Flower would tell the server what it says
            LOG.error("round declined: %s", one_line(e))
            return Message(Error(_CANNOT, "declined: the client was told why"), reply_to=msg)
        key, start = next(iter(msg.content.array_records.items()))
        row = torch.zeros_like(asked.start)
        try:
            reply = call_next(msg, ctxt)
            records = [] if reply.has_error() else list(reply.content.array_records.values())
            row = moved(records[0], start) if len(records) == 1 else row
        except Exception as e:  # that it failed may be a matter of the records: nobody else is told
            LOG.error("the training failed, and a randomised zero is sent: %s", one_line(e))
        rows = Rows.of([row], len(asked.start))
        accept(rows, asked.clip)
        self.plan.release.randomise_(rows.rows, asked)
        content = RecordDict(
            {
                key: shaped(asked.start + rows.rows[0], start),
                "metrics": MetricRecord({self._weight: 1.0}),
            }
        )
        return Message(content, reply_to=msg)

    def _asked(self, msg: Message) -> Round:
        """What the server asks for, as far as it may be trusted: which round, and which model."""
        if msg.metadata.message_type.split(".")[0] != _TRAINING:
            raise Declined("only training is private: what else leaves a client, nothing accounts")
        arrays, configs = msg.content.array_records, msg.content.config_records
        if len(arrays) != 1 or len(configs) != 1:
            raise Declined("a message with one model and one configuration is needed")
        round = next(iter(configs.values())).get("server-round")
        if type(round) is not int or not 1 <= round <= self.plan.rounds:
            raise Declined(f"the round is none of the plan's {self.plan.rounds}")
        start = flat(next(iter(arrays.values())))
        if self.plan.parameters not in (None, len(start)) or not bool(torch.isfinite(start).all()):
            raise Declined("the model is not the plan's, or not finite")
        moving = self.plan.start(start)
        streams = Streams(secrets.randbits(128), self.plan.secure)
        alone = np.zeros(1, dtype=np.int64)
        return Round(round, alone, start, self.plan.clip(moving, round), moving, streams)


def _policy(said: Mapping[str, Any], plan: PrivacyPlan, terms: Terms) -> Policy:
    """The client's policy, with which the plan goes together."""
    try:
        section = PolicySection.model_validate(dict(said))
    except ValidationError as e:
        raise BadInput(f"policy: {one_line(e)}") from e
    section.check()
    for key in _OF_RECIPES:
        if key in section.model_fields_set:
            raise BadInput(f"policy.{key} is for sites that have a recipe: leave it out")
    policy = Policy(section)
    for objection in policy.to_plan(plan, terms):
        raise BadInput(f"policy and plan contradict each other: {objection.whole}")
    return policy


def _ask(msg: Message, round: int) -> RoundAsk:
    """The message as the ledger knows asks: a run of Flower is a run."""
    nothing = torch.zeros(0), torch.zeros(0, dtype=torch.float64)
    return RoundAsk(f"{msg.metadata.run_id:032x}", round, 0, "0" * 64, *nothing)
