"""`flwr-clientapp` for sites: runs the ClientApp that is installed, never one that was sent.

`flwr run` sends a Flower app to every SuperNode, which unpacks it and runs its code beside the
site's records. A site's promises would then hold only while the server is honest. A guarded site
has this program first in its PATH as `flwr-clientapp`: the app that arrives is neither unpacked nor
imported, and `fedveil.flower.client_app` answers its messages.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SUPEREXEC = "flower-superexec"
"""The command that a site starts beside its SuperNode, and that starts the others."""

GUARDED = "flwr-clientapp"
"""The command for a message to a ClientApp."""

REFUSED = (*("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-serverapp", "flwr-simulation"),)
"""The other commands that it could be made to start."""

_PROGRAM = '#!/bin/sh\nexec python3 -m fedveil.flower.{module} "$@"\n'


def write_programs(folder: Path) -> None:
    """Write the commands of a guarded site into a folder that comes first in its PATH."""
    folder.mkdir()
    modules = {SUPEREXEC: "executor"} | {name: f"guard {name}" for name in (GUARDED, *REFUSED)}
    for command, module in modules.items():
        path = folder / command
        path.write_text(_PROGRAM.format(module=module))
        path.chmod(0o755)


def main() -> None:
    """Run a command of Flower's with the installed ClientApp, or refuse it."""
    _, command, *arguments = sys.argv
    if command != GUARDED:
        sys.exit(f"error: this site runs no {command}: it answers rounds, and nothing else")
    answer(arguments)


def answer(arguments: Sequence[str]) -> None:
    """Run `flwr-clientapp` with these arguments: answer one message."""
    sys.argv = [GUARDED, *arguments]
    guard()
    from flwr.supernode.cli import flwr_clientapp

    flwr_clientapp()


def guard() -> None:
    """Replace Flower's loading of a sent app by the installed ClientApp.

    Exits if this version of Flower has moved one of the two functions that are replaced: the site
    answers nothing rather than run code that was sent.
    """
    from flwr.supernode.runtime import run_clientapp as runtime

    for name, own in (("install_from_fab", _unpack_nothing), ("get_load_client_app_fn", _ours)):
        if not callable(getattr(runtime, name, None)):
            sys.exit(f"error: this version of Flower has no {name} where it is guarded")
        setattr(runtime, name, own)


def _unpack_nothing(*_: object, **__: object) -> None:
    """Replaces the unpacking of an app."""


def _ours(*_: object, **__: object) -> Callable[..., Any]:
    """Replaces the import of an unpacked app.

    Heavy imports wait until here: Flower starts another program for the message if this one has not
    reported within half a minute, which is short on a busy machine.
    """

    def load(*_: object) -> Any:
        from fedveil.flower.client_app import app

        return app

    return load


if __name__ == "__main__":
    main()
