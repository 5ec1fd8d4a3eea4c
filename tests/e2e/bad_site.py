"""A site that misbehaves: its own `flower-superexec`, which answers honestly and then spoils it.

bad_site.py nan | short | replay | bomb | die ...arguments of flower-superexec
bad_site.py nan | short | replay | bomb | die
"""

import os
import pickle
import signal
import sys
from dataclasses import replace
from pathlib import Path

KEPT = Path("kept.pickle")


def nan(answer):
    return replace(answer, report=answer.report * float("nan"))


def short(answer):
    return replace(answer, report=answer.report[:-1])


def replay(answer):
    """The first answer of a run again, whatever is asked."""
    if answer.round == 1:
        KEPT.write_bytes(pickle.dumps(answer))
    return pickle.loads(KEPT.read_bytes())


def bomb(answer):
    """The same, but what is sent says that it has 400 million numbers: one chunk, 3052 times."""
    from flwr.app import Array, ArrayRecord, RecordDict
    from flwr.app.message.arraychunk import ArrayChunk

    from fedveil.flower import flower_apps

    chunk, honest = ArrayChunk(memoryview(bytes(1 << 19))), flower_apps.to_records
    sliced = Array.slice_array

    def slices(array):
        return [(chunk.object_id, chunk)] * 3052 if array.data == b"bomb" else sliced(array)

    def records(message):
        content = honest(message)
        arrays = dict(content["arrays"])
        arrays["report"] = Array("float32", (400_000_000,), "numpy.ndarray", b"bomb")
        return RecordDict({"fedveil": content["fedveil"], "arrays": ArrayRecord(arrays)})

    Array.slice_array, flower_apps.to_records = slices, records
    return answer


def die(answer):
    """The SuperNode and all that belongs to it are gone, charged and not answered."""
    os.killpg(0, signal.SIGKILL)


SPOILT = {"nan": nan, "short": short, "replay": replay, "bomb": bomb, "die": die}


def main():
    """Be SuperExec, or without arguments its fork server."""
    from fedveil.flower.flwr_private import fork_server

    program, kind, *arguments = sys.argv
    if arguments:
        fork_server.run_superexec(arguments, (sys.executable, program, kind))
        return
    from fedveil.flower.site import Site

    honest = Site.answer
    Site.answer = lambda site, ask: SPOILT[kind](honest(site, ask))
    fork_server.serve_forks()


if __name__ == "__main__":
    main()
