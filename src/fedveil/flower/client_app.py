"""The ClientApp: a site that answers as its owner has set it up.

The environment names the owner's file: FEDVEIL_SITE=/path/of/site.toml.
What the site does follows from its own copy of the recipe, its policy and its ledger, and from
nothing in the app that the server sent. Needs the extra `flower`.
"""

import logging
import os
from collections.abc import Iterator

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedveil.base.errors import BadInput, one_line
from fedveil.flower.app_process import end_with_parent, separate_draws
from fedveil.flower.messages import Refusal, RoundAsk
from fedveil.flower.site import Site
from fedveil.flower.wire import from_records, to_records

LOG = logging.getLogger("flwr")

SITE = "FEDVEIL_SITE"
"""The environment variable with the path of the owner's file."""

_CANNOT = 0  # the code that Flower has for whatever it has no other for

app = ClientApp()


@app.lifespan()
def lifespan(context: Context) -> Iterator[None]:
    """Settle the process that answers, which is not always the one that imported this."""
    separate_draws()
    end_with_parent()
    yield


@app.train()
def train(message: Message, context: Context) -> Message:
    """Answer an ask with the site's report or its refusal. Nothing else leaves the site.

    An error at the site is logged there. The server learns that there was one, and not which.
    """
    try:
        ask = from_records(message.content)
    except BadInput as e:
        return Message(
            Error(_CANNOT, f"the site cannot read the ask: {one_line(e)}"), reply_to=message
        )
    if not isinstance(ask, RoundAsk):
        return Message(Error(_CANNOT, "the site answers asks and nothing else"), reply_to=message)
    try:
        answer = opened().answer(ask)
    except Exception as e:  # whatever it says of records or files, Flower would tell the server
        LOG.error("the site cannot answer: %s: %s", type(e).__name__, e)
        return Message(
            Error(_CANNOT, "the site is not ready: its owner was told"), reply_to=message
        )
    if isinstance(answer, Refusal):
        LOG.info("round %d was declined: %s", ask.round, answer.reason)
    return Message(to_records(answer), reply_to=message)


def opened() -> Site:
    """Open the site that the node's owner has set up.

    Its file is named by the environment and not by the node's configuration, which comes with
    messages: a forged one could name another file.
    """
    path = os.environ.get(SITE)
    if not path:
        raise BadInput(f"the node has no site: start it by its supernode.sh, or set {SITE}=PATH")
    return Site.open(path)
