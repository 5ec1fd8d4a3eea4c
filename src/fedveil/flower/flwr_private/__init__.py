"""Flower's programs as a federation runs them. Only this package uses Flower's private names.

    python -m fedveil.flower.flwr_private PROGRAM [ARGUMENTS]

| program | what it does |
|---|---|
| flower-superlink | runs SuperLink with separate sockets for sites and operators (`superlink`) |
| operator-PROGRAM | runs a program of the server, which shows the operators' token (`superlink`) |
| flower-supernode | runs SuperNode, which looks for messages often during a run (`supernode`) |
| flower-superexec | runs SuperExec of a site, which forks for each message (`fork_server`) |
| fork-server | imports everything once, and forks for each message (`fork_server`) |
| flwr-clientapp | answers one message with the installed ClientApp (`guard`) |
| any other | is refused: a site answers rounds, and nothing else |

A program exits rather than run without a protection: if a version of Flower lacks a name in
`REPLACED`, or does not call what replaces it. `canary` shows the latter at every start of a site.
"""

import importlib
import sys
from typing import Any

REPLACED = (
    ("flwr.superlink.cli.flower_superlink", "uvicorn", "serves sites and operators apart"),
    ("flwr.superlink.config_loader", "ObjectStoreFactory", "keeps messages in memory"),
    ("flwr.supercore.protobuf.client", "ProtobufClient", "shows the token; bounds, explains"),
    ("flwr.supernode.runtime.run_clientapp", "install_from_fab", "unpacks nothing"),
    ("flwr.supernode.runtime.run_clientapp", "get_load_client_app_fn", "loads our ClientApp"),
    ("flwr.supernode.runtime.run_clientapp", "pull_task_input", "ends at what it cannot read"),
    ("flwr.supernode.runtime.run_clientapp", "pull_and_inflate_object_from_tree", "soon again"),
    ("flwr.superlink.grid.http_grid", "pull_objects", "looks again soon, and not for long"),
    ("flwr.app.message.array", "Array", "joins no more chunks than the plan needs"),
    ("flwr.supercore.superexec.executor.subprocess_executor", "subprocess", "forks"),
    ("flwr.supernode.fleet_http_client", "FleetHttpClient", "is let in again after it was killed"),
    ("flwr.supernode.start_client_internal", "time", "polls often during a run"),
    ("flwr.supernode.start_client_internal", "pull_objects", "pulls no more than the plan needs"),
)
"""Every private name of Flower's that is replaced: (module, name, what the replacement does)."""

SOON = 0.05
"""Seconds after which an object is looked for again that has been announced: Flower waits one."""

TESTED = ("1.41",)
"""The minor versions of Flower that are tested, and which the extra allows."""


def flower_name(module: str, name: str) -> Any:
    """Return what Flower has under a name of `REPLACED`. Exits if it has nothing there."""
    known = {(module, name) for module, name, _ in REPLACED}
    if (module, name) not in known:
        raise AssertionError(f"{module}.{name} is not among the names that are replaced")
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        sys.exit(f"error: this version of Flower has no {name} in {module}, which is replaced")
    return found


def replace_flower_name(module: str, name: str, own: object) -> None:
    """Put `own` in the place of a name of Flower's. Exits if Flower has nothing there."""
    flower_name(module, name)
    vars(importlib.import_module(module))[name] = own


def check_flower_version(version: str) -> None:
    """Exit unless a version of Flower, such as "1.41.0", is one of the minor versions `TESTED`."""
    if ".".join(version.split(".")[:2]) not in TESTED:
        sys.exit(
            f"error: Flower {version} is installed, and this version of fedveil is tested with "
            f"{', '.join(TESTED)}: pip install 'fedveil[flower]'"
        )
