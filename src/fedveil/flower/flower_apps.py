"""fedveil's apps on Flower: messages as Flower's records, the ClientApp and the ServerApp.

Needs the extra `flower`.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, FedveilError, one_line
from fedveil.flower.federation_files import (
    Federation,
    fingerprint,
    read_federation,
    takes_whole_deadline,
)
from fedveil.flower.federation_server import Outcome, Server
from fedveil.flower.flwr_private.app_process import end_with_parent, separate_flower_random
from fedveil.flower.flwr_private.arrays import bound_arrays, pull_soon
from fedveil.flower.messages import (
    ASKS,
    LONGEST_REASON,
    Arrival,
    Forms,
    Refusal,
    Reply,
    RoundAsk,
    ServerMessage,
    SiteMessage,
    check_version,
    from_parts,
    to_parts,
)
from fedveil.flower.prepared_site import SITE, open_site
from fedveil.flower.site import OTHER_PLAN
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run_directory import write_atomic

ASKING = "train"
"""The type of Flower's messages that carry asks and answers."""

LOG = logging.getLogger("flwr")

OUTCOME = "outcome.txt"
"""The file, in the folder that SuperLink was started in, with how the server's program ended."""

_VALUES, _ARRAYS, _ENCODING = "fedveil", "arrays", "numpy.ndarray"
_POLL_SECONDS = 0.1
_LONGEST_PAUSE = 0.5
_PULL_SECONDS = 0.01  # of SuperLink's time that asking for one answer takes
_AWAY = (3, 5)  # Flower's codes: parts of a message did not come in time, the node is away
_LOST = "lost"
_MOST_AGAIN = 10
_LOOK_SECONDS = 1.0  # from one look at who is online to the next, while nobody answers
_UNKNOWN_ERROR = 0  # Flower's code for errors that have no other


def to_records(message: SiteMessage) -> RecordDict:
    """Return a message as Flower's records: its values in one, its arrays in the other.

    The first is a ConfigRecord with the key "fedveil", the second an ArrayRecord with "arrays".
    """
    values, arrays = to_parts(message)
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return RecordDict({_VALUES: ConfigRecord(dict(values)), _ARRAYS: record})


def from_records(content: RecordDict, forms: Forms) -> SiteMessage:
    """Return the message in Flower's records, whose vectors have the forms of the plan.

    Types, shapes and encoded lengths are compared with `forms` before anything is decoded.

    | edge | behaviour |
    |---|---|
    | other records than the two of `to_records`, a metric among them | BadInput |
    | an array of another name, type, shape, length or encoding, or pickled | BadInput |
    | anything that `from_parts` refuses | BadInput |
    """
    values, arrays = values_of(content), {}
    for name, array in content.array_records[_ARRAYS].items():
        if name not in forms or array.stype != _ENCODING:
            raise BadInput(
                f"an array {shown(name)} that the message has not, or in another encoding"
            )
        arrays[name] = forms[name].unpack(name, array.dtype, tuple(array.shape), array.data)
    return from_parts(values, arrays)


def values_of(content: RecordDict) -> dict[str, Any]:
    """Return the values in Flower's records. Raises BadInput for other records than fedveil's."""
    configs, records = content.config_records, content.array_records
    if set(content) != {_VALUES, _ARRAYS} or {*configs} != {_VALUES} or {*records} != {_ARRAYS}:
        raise BadInput("a message with other records than fedveil's")
    return dict(configs[_VALUES])


@dataclass(frozen=True, eq=False)
class GridTransport:
    """A transport through Flower's grid. A site is the node that authenticated with its key.

    SuperLink checks that a node holds its private key, and reports the public key. Nodes with other
    keys are ignored, and so is what a node says about itself.
    """

    grid: Grid
    federation: Federation

    def online(self) -> frozenset[str]:
        """Return the names of the sites whose nodes are online."""
        return frozenset(self._nodes())

    def ask(
        self, sites: Sequence[str], ask: RoundAsk, seconds: float, forms: Forms
    ) -> Iterator[Arrival]:
        """Ask the sites that are online, and yield their answers as they arrive: see `send`."""
        return self.send(dict.fromkeys(sites, ask), seconds, forms)

    def send(
        self, messages: Mapping[str, ServerMessage], seconds: float, forms: Forms
    ) -> Iterator[Arrival]:
        """Send sites their messages, and yield their answers as they arrive.

        It ends when all of them have answered or `seconds` are over. Later answers are never
        pulled: Flower drops them when their time to live is over. An unreadable answer comes as a
        text. Answers are pulled one by one, each by a thread of its own: Flower waits for minutes
        for an answer that a site has announced and not sent, and others would be late.

        A SuperNode that was started again, or was away for long, has lost its ask or the rest of
        its answer. It is sent the very same again once it is online: Flower moves the chunks that
        are missing, and a site that has answered gives that answer. The steps of a secure sum are
        sent once.
        """
        until, nodes = time.monotonic() + seconds, self._nodes()
        asked = {site: message for site, message in messages.items() if site in nodes}
        bound_arrays(sum(form.encoded_length for form in forms.values()))
        pull_soon(seconds)
        pulls = _Pulls(self.grid, until, max(_POLL_SECONDS, len(asked) * _PULL_SECONDS))
        sent = pulls.start(asked, nodes, seconds)
        waiting = {site: nodes[site].last_activated_at for site in sent}
        again = {site: _MOST_AGAIN for site in asked if type(messages[site]) is RoundAsk}
        try:
            while waiting and (left := until - time.monotonic()) > 0:
                try:
                    site, reply = pulls.pulled.get(timeout=min(left, _LOOK_SECONDS))
                except Empty:
                    self._ask_again(pulls, asked, waiting, again)
                    continue
                if site not in waiting:
                    continue
                if again.get(site) and _is_lost(reply):
                    waiting[site] = _LOST
                    continue
                del waiting[site]
                yield Arrival(site, _read_reply(reply, nodes[site].node_id, forms))
        finally:
            pulls.ended.set()

    def _ask_again(
        self,
        pulls: "_Pulls",
        asked: Mapping[str, ServerMessage],
        waiting: dict[str, str],
        again: dict[str, int],
    ) -> None:
        """Send their messages again to sites that came online since they were sent them.

        Args:
            pulls: Sends, and pulls the replies.
            asked: The messages of all sites that were asked.
            waiting: When the node of each site without a reply came online, as of its message. It
                is updated.
            again: How often a site may be sent its message again. It is counted down.
        """
        try:
            nodes = self._nodes()
            back = {
                site: asked[site]
                for site, since in waiting.items()
                if again.get(site) and site in nodes and nodes[site].last_activated_at != since
            }
            for site in pulls.start(back, nodes, pulls.until - time.monotonic()):
                waiting[site] = nodes[site].last_activated_at
                again[site] -= 1
        except Exception as e:
            if not _is_disconnected(e):
                raise

    def _nodes(self) -> dict[str, Any]:
        """Return the node of each site that is online, by name."""
        known = {fingerprint(site.key): site.name for site in self.federation.sites}
        nodes = [(known.get(key_of(node.public_key)), node) for node in self.grid.get_nodes()]
        return {name: node for name, node in nodes if name is not None}


class _Pulls:
    """Messages to sites, and threads that pull their replies.

    Args:
        grid: Flower's grid.
        until: When the threads end.
        pause: Seconds before a thread looks for the second time.
    """

    def __init__(self, grid: Grid, until: float, pause: float) -> None:
        self._grid, self.until, self._pause = grid, until, pause
        self.pulled, self.ended = SimpleQueue[tuple[str, Message | Exception]](), threading.Event()

    def start(
        self, messages: Mapping[str, ServerMessage], nodes: Mapping[str, Any], seconds: float
    ) -> list[str]:
        """Send sites their messages, and start to pull. Returns the sites that they were sent.

        Messages and replies live for `seconds`.
        """
        if not messages or seconds <= 0:
            return []
        content, sent = {id(message): to_records(message) for message in messages.values()}, []
        for site, ask in messages.items():
            made = Message(
                content[id(ask)],
                nodes[site].node_id,
                ASKING,
                ttl=seconds,
                group_id=f"{ask.round}.{ask.attempt}",
            )
            sent.append(made)
        pushed = self._grid.push_messages(sent)
        waiting = {site: one for one, site in zip(pushed, messages, strict=False) if one}
        for site, one in waiting.items():
            pull = partial(self._pull, site, one, self._pause)
            threading.Thread(target=pull, daemon=True, name=f"answer of {site}").start()
        return [*waiting]

    def _pull(self, site: str, message: str, pause: float) -> None:
        """Pull a site's reply to a message, and put it, or what Flower raised, into `pulled`.

        Ends at the deadline, or when `ended` is set. A connection that fails is tried again.
        """
        while not self.ended.is_set() and time.monotonic() < self.until:
            try:
                replies = list(self._grid.pull_messages([message]))
            except Exception as e:  # whatever a reader of what somebody else wrote may raise
                if not _is_disconnected(e):
                    self.pulled.put((site, e))
                    return
                replies = []
            if replies:
                self.pulled.put((site, replies[0]))
                return
            self.ended.wait(pause)
            pause = max(pause, min(1.3 * pause, _LONGEST_PAUSE))


def _is_lost(reply: Message | Exception) -> bool:
    """Return whether a reply says that a node is away, or that its answer did not all arrive."""
    return isinstance(reply, Message) and reply.has_error() and reply.error.code in _AWAY


def key_of(public_key: bytes) -> str:
    """Return the fingerprint of a node's public key in PEM form. "" if it cannot be read."""
    try:
        line = serialization.load_pem_public_key(public_key).public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return ""
    return fingerprint(line.decode())


def _is_disconnected(error: Exception) -> bool:
    """Return whether an error is of the connection: Flower's client is not for apps to import."""
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    return isinstance(error, OSError) or "Transport" in kinds


def _read_reply(reply: Message | Exception, node: int, forms: Forms) -> Reply | str:
    """Return the answer or refusal in a reply of `node`, or one line on why there is none."""
    if isinstance(reply, Exception):
        return f"its answer cannot be read: {one_line(reply)}"[:LONGEST_REASON]
    if reply.has_error():
        return f"its app failed: {one_line(ValueError(reply.error.reason))}"[:LONGEST_REASON]
    if reply.metadata.src_node_id != node:
        return "its answer came from another node"
    try:
        if values_of(reply.content).get("kind") in ASKS[:-1]:
            return "it asked, and was to answer"
        return from_records(reply.content, forms)  # type: ignore[return-value]
    except BadInput as e:
        return one_line(e)[:LONGEST_REASON]


client_app = ClientApp()
"""The ClientApp: a site that answers as its owner has set it up.

The environment variable FEDVEIL_SITE has the path of the owner's site.toml. The answer follows from
the site's own copy of the recipe, its policy and its ledger, and from nothing in the app that the
server sent.
"""

server_app = ServerApp()
"""The ServerApp: a recipe over the sites of a federation, started by `flwr run`.

Its configuration, `[tool.flwr.app.config]`: `recipe`, `federation` and `run-directory` are paths on
the server's machine, `data` the folder of the data sets; `allow-code` says that code which the
recipe names may be run. A run directory that holds a run is resumed.
"""


@client_app.lifespan()
@server_app.lifespan()
def prepare_process(context: Context) -> Iterator[None]:
    """Give Flower its own random generator, and let this process end with its parent.

    A generator that yields once, for Flower's lifespan. It runs in the process of an app, which is
    not always the one that imported this module.
    """
    separate_flower_random()
    end_with_parent()
    yield


@client_app.train()
def answer(message: Message, context: Context) -> Message:
    """Return the reply to an ask: the site's report or its refusal, or an error.

    The environment variable FEDVEIL_SITE names the site's file. The node's configuration does not,
    because it comes with messages: a forged one could name another file. Errors of the site are
    logged there, and the server learns only that there was one. Never raises.
    """

    def failed(reason: str) -> Message:
        """Return an error reply with this reason."""
        return Message(Error(_UNKNOWN_ERROR, reason), reply_to=message)

    try:
        values = values_of(message.content)
        check_version(values)
    except BadInput as e:
        LOG.warning("an ask cannot be read: %s", one_line(e))
        return failed(f"the site cannot read the ask: {one_line(e)}")
    if values.get("kind") not in ASKS:
        return failed("the site answers asks and nothing else")
    try:
        path = os.environ.get(SITE)
        if not path:
            raise BadInput(
                f"the node has no site: start it by its supernode.sh, or set {SITE}=PATH"
            )
        site = open_site(Path(path))
        try:
            ask = from_records(message.content, site.ask_forms)
            message.content[_ARRAYS].clear()  # the ask has the one copy of the model
        except BadInput as e:
            other = values.get("plan") != site.digest
            LOG.warning("an ask cannot be read: %s", one_line(e))
            return failed(f"the site cannot read the ask: {OTHER_PLAN if other else one_line(e)}")
        reply = site.answer(ask)  # type: ignore[arg-type]
    except Exception as e:  # whatever it says of records or files, Flower would tell the server
        LOG.error("the site cannot answer: %s: %s", type(e).__name__, e)
        return failed("the site is not ready: its owner was told")
    if isinstance(reply, Refusal):
        LOG.info("round %d was declined: %s", reply.round, reply.reason)
    return Message(to_records(reply), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Train over the federation's sites, to the end of the plan or of the budget.

    The app's configuration names the files (`server_app`). The run directory is written, and
    resumed if it holds a run. What is refused, or cannot go on, is one line in the log: for an
    exception Flower would log thirty. The file `OUTCOME` says how it ended, for run.sh.
    """
    write_outcome(1, "the server's program was ended before the run was")
    try:
        end = _train(grid, context)
    except FedveilError as e:
        line = " ".join(str(e).split())
        write_outcome(2 if isinstance(e, BadInput) else 1, line)
        LOG.error("error: %s", line)
        return
    except Exception as e:
        write_outcome(1, f"{type(e).__name__}: {one_line(e)}")
        raise
    write_outcome(0, end)
    LOG.info("%s", end)


def write_outcome(code: int, line: str) -> None:
    """Write an exit code, and one line that says why, into the file `OUTCOME`."""
    write_atomic(Path(OUTCOME).absolute(), f"{code}\n{line}\n".encode())


def _train(grid: Grid, context: Context) -> str:
    """Train with the files that the app's configuration names, and return in words how it ended.

    A run that is already in the run directory is resumed. Raises FedveilError if the run is refused
    or cannot go on.
    """
    config = context.run_config
    federation = read_federation(Path(_config_path(config, "federation")))

    def log_outcome(outcome: Outcome) -> None:
        """Log who answered, unless the cohort is secret: logs go to whoever called `flwr run`."""
        if not takes_whole_deadline(server.run.training.plan):
            LOG.info("%s", outcome)

    server = Server.start_or_resume(
        load_recipe(_config_path(config, "recipe")),
        federation,
        GridTransport(grid, federation),
        Path(_config_path(config, "run-directory")),
        Path(_config_path(config, "data")) if config.get("data") else None,
        allow_code=bool(config.get("allow-code", False)),
        on_outcome=log_outcome,
    )
    LOG.info("%s", server.run.describe())
    result = server.serve(lambda line: LOG.info("%s", _round_text(server, line)))
    claim = counting([PrivacyClaim.from_dict(raw) for raw in result["claims"]])
    signers = ", ".join(server.head_signatures.signers) or "no site"
    text = f"{claim or 'Nothing is claimed'}. {result['why']} Files: {result['run_dir']}"
    return f"{text}; the ledger's end is signed by {signers}"


def _config_path(config: Any, key: str) -> str:
    """Return the text under a key of the app's configuration.

    Raise BadInput if it is missing or empty.
    """
    path = config.get(key)
    if not isinstance(path, str) or not path:
        raise BadInput(f"the app's configuration has no {key!r}: name it in [tool.flwr.app.config]")
    return path


def _round_text(server: Server, line: dict[str, Any]) -> str:
    """Return a round in words, such as "round 3: loss 0.41, accuracy 0.86, (claim) spent".

    `line` is the round's line of the metrics file. "no claim" stands where nothing is claimed.
    """
    training = server.run.training
    names = ("loss", *training.task.measures)
    parts = [f"{name} {line[name]:.4g}" for name in names if name in line]
    promise = training.plan.promise
    if promise is None:
        parts.append("no claim")
    else:
        parts.append(f"{replace(promise, epsilon=line['epsilon']).short} spent")
    return f"round {line['round']}: {', '.join(parts)}"
