"""Randomness of Flower's own, so that its threads draw nothing from what models are watched by."""

import random
import sys


def separate_draws() -> None:
    """Give Flower's modules a generator of their own in the place of Python's common one.

    Its threads (heartbeats, retries) draw from that at any time, while fedveil looks whether a
    module does: a draw of theirs in between would be taken for the module's, and that refused.
    """
    own = random.Random()
    for name, module in tuple(sys.modules.items()):
        if name.split(".")[0] == "flwr" and getattr(module, "random", None) is random:
            module.random = own  # type: ignore[attr-defined]
