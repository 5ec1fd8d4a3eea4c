"""`fedveil mixer`."""

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
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0: any.")] = 0,
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
            port=port,
        )
    )
