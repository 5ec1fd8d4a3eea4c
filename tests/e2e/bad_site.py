"""A site that misbehaves: its own `flwr-clientapp`, which answers honestly and then spoils it.

bad_site.py nan | short | replay | die ...arguments of flwr-clientapp
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


def die(answer):
    """The SuperNode and all that belongs to it are gone, charged and not answered."""
    os.killpg(0, signal.SIGKILL)


SPOILT = {"nan": nan, "short": short, "replay": replay, "die": die}


def main():
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    from fedveil.flower import guard

    _, kind, *arguments = sys.argv
    sys.argv = ["flwr-clientapp", *arguments]
    guard.guard()
    load = runtime.get_load_client_app_fn()

    def spoilt(*_):
        from fedveil.flower.site import Site

        honest = Site.answer
        Site.answer = lambda site, ask: SPOILT[kind](honest(site, ask))
        return load()

    runtime.get_load_client_app_fn = lambda *_, **__: spoilt
    flwr_clientapp()


if __name__ == "__main__":
    main()
