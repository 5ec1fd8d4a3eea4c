"""The `fedveil` command: Ctrl-C ends it with one word from the first import on."""

import sys

from fedveil.base.interrupts import end_at_once


def main() -> None:
    """Load the command line and run it."""
    end_at_once()
    try:
        from fedveil.cli.main import main as run

        run()
    except SystemExit as e:
        _leave(e.code)
    except BaseException as e:
        if not _by_ctrl_c(e):
            raise
        print("interrupted", file=sys.stderr)
        _leave(1)


def _by_ctrl_c(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or what an import that it hit has made of it."""
    seen = 0
    while error is not None and seen < 100:
        if isinstance(error, KeyboardInterrupt):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _leave(code: str | int | None) -> None:
    """End with that exit code.

    Python remembers an interrupt of code that was made from a string, as dataclasses are, although
    it was caught, and would end by the signal instead: executing another string resets that.
    """
    exec("")
    sys.exit(code)


if __name__ == "__main__":
    main()
