"""Dishonest clients in a simulation: who they are, what they send, and backdoors."""

from fedveil.attacks.adversary import (
    Adversary,
    AttackContext,
    AttackerNoise,
    BackdoorAttack,
    ReportAttack,
    When,
)
from fedveil.attacks.backdoors import (
    Backdoor,
    ColourBackdoor,
    PhraseBackdoor,
    PixelTrigger,
    SentenceBackdoor,
    WritersBackdoor,
)
from fedveil.training.participants import Participants

__all__ = [
    "Adversary",
    "AttackContext",
    "AttackerNoise",
    "Backdoor",
    "BackdoorAttack",
    "ColourBackdoor",
    "Participants",
    "PhraseBackdoor",
    "PixelTrigger",
    "ReportAttack",
    "SentenceBackdoor",
    "When",
    "WritersBackdoor",
]
