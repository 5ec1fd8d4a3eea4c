"""A site that misbehaves: its own `flwr-clientapp`, which answers honestly and then spoils it.

bad_site.py nan | short | replay | die ...arguments of flwr-clientapp
"""

import os
import pickle
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch

from fedveil.flower import guard
from fedveil.flower.site import Site

KEPT = Path("kept.pickle")


def nan(answer):
    return replace(answer, report=torch.full_like(answer.report, torch.nan))


def short(answer):
    return replace(answer, report=answer.report[:-1])


def replay(answer):
    """The first answer again, whatever is asked."""
    if not KEPT.exists():
        KEPT.write_bytes(pickle.dumps(answer))
    return pickle.loads(KEPT.read_bytes())


def die(answer):
    """The SuperNode and all that belongs to it are gone, charged and not answered."""
    os.killpg(0, signal.SIGKILL)


def main():
    _, kind, *arguments = sys.argv
    sys.argv = ["flwr-clientapp", *arguments]
    honest, spoilt = Site.answer, {"nan": nan, "short": short, "replay": replay, "die": die}[kind]
    Site.answer = lambda site, ask: spoilt(honest(site, ask))
    guard.guard()
    from flwr.supernode.cli import flwr_clientapp

    flwr_clientapp()


if __name__ == "__main__":
    main()
