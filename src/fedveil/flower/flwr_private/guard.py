"""The guard of a site: it runs the ClientApp that is installed, never one that was sent.

`flwr run` sends a Flower app to every SuperNode, which unpacks it and runs its code beside the
site's records. A site's promises would then hold only while the server is honest.
"""

import hashlib
import importlib
import io
import os
import select
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Never

from fedveil.flower.flwr_private import (
    SOON,
    check_flower_version,
    flower_name,
    replace_flower_name,
)

GUARDED = "flwr-clientapp"
"""The command for a message to a ClientApp."""

REFUSED = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-serverapp", "flwr-simulation")
"""The other commands that SuperExec could be made to start."""

_RUNTIME = "flwr.supernode.runtime.run_clientapp"
_INFLATE = "pull_and_inflate_object_from_tree"
_PASSED = b"passed"
_CANARY_SECONDS = 60.0


def answer_message(arguments: Sequence[str]) -> None:
    """Run `flwr-clientapp` with the ClientApp that is installed, never with one that was sent.

    A guarded site has this program first in its PATH: the app that arrives is neither unpacked nor
    imported, and `fedveil.flower.flower_apps` answers its messages.
    """
    sys.argv = [GUARDED, *arguments]
    guard()
    from flwr.supernode.cli import flwr_clientapp

    flwr_clientapp()


def guard() -> None:
    """Replace Flower's loading of a sent app by the installed ClientApp.

    Exits if this version of Flower has moved one of the functions that are replaced: the site
    answers nothing rather than run code that was sent.
    """

    def unpack_nothing(*_: object, **__: object) -> None:
        """Do nothing, in place of unpacking the app that was sent."""

    def load_installed(*_: object, **__: object) -> Callable[..., Any]:
        """Return a function that imports the installed ClientApp, in place of the one sent."""
        return lambda *_: importlib.import_module("fedveil.flower.flower_apps").client_app

    pull = flower_name(_RUNTIME, "pull_task_input")

    def pull_or_end(client: Any) -> Any:
        """Pull a message. If it cannot be read, end this process at once.

        SuperNode answers for an app that is gone, after a minute. For one that fails in order it
        waits for ever.
        """
        try:
            return pull(client)
        except Exception as e:
            print(f"error: a message cannot be read: {type(e).__name__}: {e}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)

    for name, own in {
        "install_from_fab": unpack_nothing,
        "get_load_client_app_fn": load_installed,
        "pull_task_input": pull_or_end,
        _INFLATE: partial(flower_name(_RUNTIME, _INFLATE), initial_backoff=SOON),
    }.items():
        if not callable(flower_name(_RUNTIME, name)):
            sys.exit(f"error: this version of Flower has no {name} where it is guarded")
        replace_flower_name(_RUNTIME, name, own)


def run_canary() -> None:
    """Check that this site does not run an app that a server sends. Exit if it might.

    Guarantee: on return, in a fork of this process, Flower's own program was handed an app whose
    import writes a file. It wrote none, nothing was unpacked, and what Flower sent back is what the
    installed ClientApp says of a message that is not fedveil's. So the names that the guard
    replaces are those that this version of Flower calls.

    | edge | behaviour |
    |---|---|
    | a version of Flower that is not tested | exits before anything is tried |
    | Flower calls other names than those that are replaced | exits |
    | the canary fails for another reason, or is killed | exits |
    | the canary takes over a minute | exits |
    """
    import flwr

    check_flower_version(flwr.__version__)
    folder = Path(tempfile.mkdtemp(prefix="fedveil-canary-"))
    readable, writable = os.pipe()
    try:
        process = os.fork()
        if process == 0:
            os.close(readable)
            _be_canary(folder, writable)
        os.close(writable)
        with os.fdopen(readable, "rb") as pipe:
            if not select.select([pipe], [], [], _CANARY_SECONDS)[0]:
                os.kill(process, signal.SIGKILL)
            said = pipe.read()
        os.waitpid(process, 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if said != _PASSED:
        reason = said.decode(errors="replace") or "it ended without a result"
        sys.exit(f"error: this site is not guarded against code that a server sends: {reason}")


def _be_canary(folder: Path, pipe: int) -> Never:
    """Answer the canary's message with Flower's program, write the verdict to `pipe`, and exit."""
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.environ["FLWR_HOME"] = str(folder)
    written = folder / "canary-was-run"
    runtime: Any = importlib.import_module(_RUNTIME)
    exchange = _CanaryExchange(f"open({str(written)!r}, 'w').close()\napp = None\n")
    verdict = b"it ended without a result"
    try:
        guard()
        runtime.RuntimeHttpClient = exchange
        with suppress(SystemExit):
            runtime.run_clientapp("127.0.0.1:9", "canary", insecure=True)
        left = [path.name for path in folder.glob("apps/*")]
        if written.exists():
            verdict = b"an app that was sent has been run"
        elif left:
            verdict = f"an app that was sent has been unpacked: {left[0]}".encode()
        elif "the site cannot read the ask" not in exchange.answer:
            verdict = f"the installed app did not answer: {exchange.answer[:200]!r}".encode()
        else:
            verdict = _PASSED
    except BaseException as e:
        verdict = f"{type(e).__name__}: {e}".encode()[:500]
    finally:
        os.write(pipe, verdict)
        os._exit(0)


class _CanaryExchange:
    """A SuperNode's Runtime API that hands out one message and one app, and keeps the answer.

    Args:
        code: The code of the app.
    """

    def __init__(self, code: str) -> None:
        from flwr.app import ConfigRecord, Context, Message, RecordDict
        from flwr.common.serde import (
            context_to_proto,
            fab_to_proto,
            message_to_proto,
            run_to_proto,
        )
        from flwr.proto import runtime_pb2
        from flwr.supercore.fab import Fab
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
        )
        from flwr.supercore.run import Run
        from flwr.supercore.task_identity import TaskIdentity

        self.answer = ""
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        content = _fab(code)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        run = Run.create_empty(1)
        run.fab_id, run.fab_version, run.fab_hash = "fedveil/canary", "1.0.0", fab.hash_str
        self._protocol = runtime_pb2
        self._input = runtime_pb2.PullTaskInputResponse(
            context=context_to_proto(Context(1, 1, {}, RecordDict(), {})),
            run=run_to_proto(run),
            fab=fab_to_proto(fab),
            task_id=1,
        )
        message = Message(RecordDict({"canary": ConfigRecord({"is": "one"})}), 1, "train")
        message.metadata.__dict__["_message_id"] = message.object_id
        self._objects = {
            name: found.deflate() for name, found in get_all_nested_objects(message).items()
        }
        self._messages = runtime_pb2.PullAppMessagesResponse(
            messages_list=[message_to_proto(message)],
            message_object_trees=[get_object_tree(message)],
        )

    def from_server_address(self, **_: object) -> "_CanaryExchange":
        """Return itself, in place of a client of SuperNode."""
        return self

    def PullTaskInput(self, _request: object) -> Any:  # noqa: N802
        return self._input

    def PullMessages(self, _request: object) -> Any:  # noqa: N802
        return self._messages

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        from flwr.proto.message_pb2 import PullObjectResponse

        content = self._objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def PushMessages(self, request: Any) -> Any:  # noqa: N802
        self.answer = request.messages_list[0].error.reason
        return self._protocol.PushAppMessagesResponse()

    def ConfirmMessageReceived(self, _request: object) -> object:  # noqa: N802
        return object()

    def PushTaskOutput(self, _request: object) -> object:  # noqa: N802
        return object()

    def SendTaskHeartbeat(self, _request: object) -> Any:  # noqa: N802
        return self._protocol.SendTaskHeartbeatResponse(success=True)

    def close(self) -> None:
        """Do nothing: there is no connection."""


def _fab(code: str) -> bytes:
    """Return a Flower app with this code as its ClientApp, as `flwr run` would send it."""
    project = """[project]
name = "canary"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fedveil"

[tool.flwr.app.components]
serverapp = "canary:app"
clientapp = "canary:app"
"""
    files = {"pyproject.toml": project, "canary.py": code}
    digests = [
        f"{name},{hashlib.sha256(text.encode()).hexdigest()},{8 * len(text.encode())}"
        for name, text in files.items()
    ]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in (*files.items(), (".info/CONTENT", "\n".join(digests))):
            archive.writestr(name, text)
    return packed.getvalue()
