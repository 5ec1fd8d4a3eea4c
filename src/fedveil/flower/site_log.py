"""`SiteLog`: what a site was asked, what it answered and what that cost, as lines of JSON."""

import json
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_LONGEST = 10_000_000  # bytes, after which a new file is begun


@dataclass(frozen=True)
class SiteLog:
    """The log of a site, for its owner: a file that nobody else can read, and standard error.

    A line has "time" (UTC), "event" and what belongs to the event. Nothing in it comes from
    records, but for what a line of "error" says of what went wrong. A log that cannot be written
    keeps nobody from answering: what was charged is in the ledger.

    Attributes:
        file_path: The file. When it is 10 MB long it is renamed, in place of the one before.
    """

    file_path: Path

    def write(self, event: str, **about: Any) -> None:
        """Write a line on an event. Never raises for a file that cannot be written."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **about}) + "\n"
        try:
            sys.stderr.write(line)
            sys.stderr.flush()
            self.file_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.file_path.exists() and self.file_path.stat().st_size > _LONGEST:
                self.file_path.replace(self.file_path.with_suffix(".old"))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            descriptor = os.open(self.file_path, flags, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except (OSError, ValueError):  # ValueError: standard error is closed
            return
