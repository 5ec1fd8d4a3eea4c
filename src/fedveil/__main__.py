"""The `fedveil` command: Ctrl-C ends it with one word from the first import on."""

import sys

from fedveil.base.interrupts import end_at_once


def main() -> None:
    """Run the command line and exit with its code. Ctrl-C prints "interrupted" and exits with 1."""
    end_at_once()
    code: str | int | None = 0
    try:
        from fedveil.cli.main import main as run

        run()
    except SystemExit as e:
        code = e.code
    except BaseException as e:
        if not _is_ctrl_c(e):
            raise
        print("interrupted", file=sys.stderr)
        code = 1
    # Python remembers an interrupt of code that was made from a string, as dataclasses are,
    # although it was caught, and would end by the signal: executing another string resets that.
    exec("")
    sys.exit(code)


def _is_ctrl_c(error: BaseException | None) -> bool:
    """Return whether an error is a KeyboardInterrupt, or has one among its causes and contexts."""
    seen = 0
    while error is not None and seen < 100:
        if isinstance(error, KeyboardInterrupt):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


if __name__ == "__main__":
    main()
