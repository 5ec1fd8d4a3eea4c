"""`fedveil deploy`."""

import signal
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.cli.loading import loading
from fedveil.cli.options import Data, Set, check_path
from fedveil.errors import BadInput

if TYPE_CHECKING:  # it needs torch
    from fedveil.flower.deployment import Deployment

_MOST = 20


def deploy(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe or a .toml file.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    sites: Annotated[
        str | None, typer.Option(help="Names of the sites, in order: north,south,east.")
    ] = None,
    demo: Annotated[
        int | None,
        typer.Option(help="Divide the recipe's data among so many sites, and run it all here."),
    ] = None,
    divide: Annotated[
        bool, typer.Option("--divide", help="Divide the recipe's data among the sites.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Of SuperLink; default: 127.0.0.1:9092."),
    ] = None,
    mixer: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Of the mixer, for a recipe with [shuffle]."),
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds that a round waits; default: 600, in a demo 60.")
    ] = None,
    set_: Set = None,
    data: Data = None,
) -> int:
    """Write a recipe as a Flower app: its server, its sites, their keys, how to start them."""
    names = _names(sites, demo)
    check_path("DIR", folder)
    with loading(quiet=False):
        from fedveil.flower.deployment import Address, Deployment, deployed_recipe

        chosen = deployed_recipe(recipe, set_ or (), len(names))
        place = Address() if address is None else Address.parse(address)
        if demo is not None and address is None:
            from fedveil.flower.local import free_ports

            port, mixing, *own = free_ports(2 + demo)
            place = Address(port=port, sites=tuple(own))
            mixer = mixer or f"127.0.0.1:{mixing}"
        shared = None
        if divide or demo is not None:
            from fedveil.runs.records import data_of

            shared = data_of(chosen, data)
        if deadline is None:
            deadline = 600.0 if demo is None else 60.0
        mixed = None if mixer is None else Address.parse(mixer)
        deployment = Deployment(chosen, names, place, shared, deadline, mixed)
        deployment.write(folder)
    print(f"written: {folder}/README.md says how to start server and sites")
    if deployment.steady:
        print(f"note: a round takes all of its {deadline:g} s, so that nobody learns who was asked")
    return 0 if demo is None else _demonstrate(deployment, folder)


def _names(sites: str | None, demo: int | None) -> tuple[str, ...]:
    if (sites is None) == (demo is None):
        raise BadInput("name the sites (--sites north,south,east), or ask for a --demo of 3")
    if sites is not None:
        return tuple(name.strip() for name in sites.split(","))
    if not 1 <= (demo or 0) <= _MOST:
        raise BadInput(f"--demo is {demo}: 1 to {_MOST} sites on one machine")
    return tuple(f"site-{number + 1}" for number in range(demo or 0))


def _demonstrate(deployment: "Deployment", folder: Path) -> int:
    from rich.console import Console

    from fedveil.console import print_result
    from fedveil.flower.demonstration import demonstrate
    from fedveil.flower.local import LocalFederation
    from fedveil.interrupts import listen

    listen()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all is stopped then too
    with closing(demonstrate(deployment, folder)) as events:
        for event in events:
            print(event, flush=True)
    result = LocalFederation(folder).result()
    assert result is not None
    print_result(Console(markup=False, emoji=False), result)
    return 0
