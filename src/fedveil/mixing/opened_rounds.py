"""The rounds that a mixer has opened, in a file that outlives it."""

import fcntl
import os
from pathlib import Path

from fedveil.base.errors import BadInput


class OpenedRounds:
    """The numbers of all rounds that were ever opened: none opens twice, across restarts.

    Guarantee: when `add` returns, the number is on the disk, and every later mixer on the same
    file has it in `numbers`.

    | edge | behaviour |
    |---|---|
    | no file yet | made, readable by its owner alone |
    | another mixer uses the file | BadInput |
    | something else than whole numbers in it | BadInput |
    | a last line that was cut short | kept as the number that is left of it |
    | the disk is full | OSError, and the round does not open |
    """

    def __init__(self, path: Path | str) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as e:
            raise BadInput(f"mixer.opened is {path}: {e.strerror}") from e
        try:
            self.numbers = self._read(path)
        except BaseException:
            self.close()
            raise

    def add(self, number: int) -> None:
        """Note a round before its first report is taken."""
        line = f"{number}\n".encode()
        if os.write(self._file, line) < len(line):
            raise OSError(f"round {number} could not be noted")
        os.fsync(self._file)
        self.numbers.add(number)

    def close(self) -> None:
        """Let the next mixer use the file."""
        os.close(self._file)

    def _read(self, path: Path | str) -> set[int]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise BadInput(f"mixer.opened is {path}: another mixer uses it") from e
        text = Path(path).read_bytes()
        if text and not text.endswith(b"\n"):
            os.write(self._file, b"\n")
        words = text.split()
        if not all(word.isdigit() for word in words):
            raise BadInput(f"mixer.opened is {path}: whole numbers are needed, one per line")
        return {int(word) for word in words}
