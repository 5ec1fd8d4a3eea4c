"""`KeptAnswer`: the last answer of a site, for a server that asks the very same thing again."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fedveil.flower.messages import Answer, RoundAsk
from fedveil.runs.run_directory import write_atomic

_ALIGNMENT = 8
_TYPES = {torch.float32: "F32", torch.float64: "F64"}


@dataclass(frozen=True)
class KeptAnswer:
    """The last answer of a site, in a file that only its owner can read.

    A server that crashed between its ask and the answers asks again, and gets what was paid for.

    Guarantee: `read` returns an answer only to an ask with the digest of the one that the answer
    was computed for: run, round, attempt, plan, model and adaptive state. It is that answer, bit
    for bit, so that nothing is released a second time.

    | edge | behaviour |
    |---|---|
    | any part of the ask differs | None |
    | no file, a damaged one, another site's name | None |
    | a crash while an answer is written | None, or the answer before |
    """

    file_path: Path

    def write(self, ask: RoundAsk, answer: Answer) -> None:
        """Remove the answer before and write the answer to `ask`, which is on disk on return.

        A crash in between leaves none.
        """
        with suppress(FileNotFoundError):
            self.file_path.unlink()
        before = os.umask(0o077)
        try:
            write_atomic(self.file_path, _parts_of(answer, ask.digest))
        finally:
            os.umask(before)

    def read(self, ask: RoundAsk, site: str) -> Answer | None:
        """Return the answer that was given to this very ask, None if there is none."""
        try:
            with safe_open(self.file_path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("ask") != ask.digest or about.get("site") != site:
                    return None
                report, watched = (torch.clone(file.get_tensor(n)) for n in ("report", "watched"))
        except (OSError, SafetensorError):
            return None
        return Answer(ask.run, ask.round, ask.attempt, site, report, watched)


def _parts_of(answer: Answer, digest: str) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file with an answer, part by part, of which none copies a vector."""
    parts = {"report": answer.report, "watched": answer.watched}
    vectors = {name: vector.detach().contiguous() for name, vector in parts.items()}
    head: dict[str, object] = {"__metadata__": {"ask": digest, "site": answer.site}}
    start = 0
    for name, vector in vectors.items():
        stop = start + vector.nbytes
        form = {"dtype": _TYPES[vector.dtype], "shape": [*vector.shape]}
        head[name] = form | {"data_offsets": [start, stop]}
        start = stop
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for vector in vectors.values():
        if vector.numel():
            yield vector.numpy().data.cast("B")
