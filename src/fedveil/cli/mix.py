"""`fedveil mixer`."""

from pathlib import Path
from typing import Annotated

import typer


def mixer(
    positions: Annotated[int, typer.Option(help="Weights per report.")],
    minimum: Annotated[int, typer.Option(help="Fewest reports that are handed on.")],
    expected: Annotated[int, typer.Option(help="Reports after which a round closes.")],
    rounds: Annotated[int, typer.Option(help="Rounds to serve.")] = 1,
    deadline: Annotated[float, typer.Option(help="Seconds a round stays open.")] = 60.0,
    idle: Annotated[float, typer.Option(help="Seconds a client may be silent.")] = 30.0,
    seconds: Annotated[float, typer.Option(help="Seconds after which it stops.")] = 3600.0,
    attempts: Annotated[int, typer.Option(help="Attempts at each round, at most.")] = 1,
    host: Annotated[str, typer.Option(help="IP address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: any.")] = 0,
    certificate: Annotated[str | None, typer.Option(help="Its certificate, for TLS.")] = None,
    key: Annotated[str | None, typer.Option(help="The certificate's private key.")] = None,
    clients_ca: Annotated[
        str | None, typer.Option(help="The authority that signs members' certificates.")
    ] = None,
    members: Annotated[
        Path | None, typer.Option(help="File with the members' names, one per line.")
    ] = None,
    opened: Annotated[
        str | None, typer.Option(help="File for the rounds that were opened: none opens twice.")
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option("--simulated", help="Do without members, for simulations on this machine."),
    ] = False,
) -> None:
    """Run a mixer for two-point reports: it hands on, per position, only how many were high."""
    from fedveil.mixing.mixer import MixerConfig, run_mixer

    run_mixer(
        MixerConfig(
            positions=positions,
            minimum=minimum,
            expected=expected,
            rounds=rounds,
            deadline=deadline,
            idle=idle,
            seconds=seconds,
            attempts=attempts,
            host=host,
            port=port,
            certificate=certificate,
            key=key,
            clients_ca=clients_ca,
            members=() if members is None else tuple(members.read_text().split()),
            opened=opened,
            simulated=simulated,
        )
    )
