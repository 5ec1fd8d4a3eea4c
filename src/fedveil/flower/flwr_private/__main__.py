"""`python -m fedveil.flower.flwr_private PROGRAM [ARGUMENTS]`. It imports nothing heavy.

Flower starts another program for a message if one has not reported within half a minute, which is
short on a busy machine.
"""

import sys
from collections.abc import Callable, Sequence

from fedveil.flower.flwr_private.fork_server import (
    SUPEREXEC,
    print_canary,
    run_superexec,
    serve_forks,
)
from fedveil.flower.flwr_private.guard import GUARDED, answer_message
from fedveil.flower.flwr_private.superlink import (
    OPERATOR,
    OPERATOR_PROGRAMS,
    SUPERLINK,
    run_for_operator,
    run_superlink,
)
from fedveil.flower.flwr_private.supernode import SUPERNODE, run_supernode

PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    SUPERLINK: run_superlink,
    SUPERNODE: run_supernode,
    SUPEREXEC: run_superexec,
    GUARDED: answer_message,
    "canary": lambda _arguments: print_canary(),
    "fork-server": lambda _arguments: serve_forks(),
}


def main() -> None:
    """Run the program that the command line names first, or exit with an error if it is refused."""
    _, program, *arguments = sys.argv
    operators = program.removeprefix(OPERATOR)
    if program in PROGRAMS:
        PROGRAMS[program](arguments)
    elif operators != program and operators in OPERATOR_PROGRAMS:
        run_for_operator(operators, arguments)
    else:
        sys.exit(f"error: this site runs no {program}: it answers rounds, and nothing else")


if __name__ == "__main__":
    main()
