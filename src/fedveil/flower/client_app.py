"""The ClientApp: a site that answers as its owner has set it up.

The node's configuration names the owner's file: `--node-config 'site="/path/of/site.toml"'`.
Nothing of the app that the server sent decides what the site does: its own copy of the recipe, its
policy and its ledger do. Needs the extra `flower`.
"""

import logging
from collections.abc import Iterator

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedveil.errors import BadInput, one_line
from fedveil.flower.messages import Refusal, RoundAsk
from fedveil.flower.own_draws import separate_draws
from fedveil.flower.parent import end_with_parent
from fedveil.flower.site import Site
from fedveil.flower.wire import from_records, to_records

LOG = logging.getLogger("flwr")

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
    """The site's report of a round, or why there is none; nothing else ever leaves.

    What goes wrong at the site is logged there. The server is told that it did, and not what.
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
        answer = opened(context).answer(ask)
    except Exception as e:  # whatever it says of records or files, Flower would tell the server
        LOG.error("the site cannot answer: %s: %s", type(e).__name__, e)
        return Message(
            Error(_CANNOT, "the site is not ready: its owner was told"), reply_to=message
        )
    if isinstance(answer, Refusal):
        LOG.info("round %d was declined: %s", ask.round, answer.reason)
    return Message(to_records(answer), reply_to=message)


def opened(context: Context) -> Site:
    """The site that the node's owner has configured."""
    path = context.node_config.get("site")
    if not isinstance(path, str) or not path:
        raise BadInput("the node has no site: start it with --node-config 'site=\"PATH\"'")
    return Site.open(path)
