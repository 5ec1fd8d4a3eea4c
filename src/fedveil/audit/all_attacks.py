"""All attacks on one training, one after the other: which of them, how large, and what they found.

A training is run_attacks as its recipe says, whether a run was made of it or not.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from fedveil.audit import (
    canaries,
    fitted_statistics,
    inversion,
    membership,
    randomisers,
    record_canaries,
    sensitivity,
    white_box,
)
from fedveil.audit import property as properties
from fedveil.audit.audit_cache import AuditCache
from fedveil.audit.canaries import Canaries
from fedveil.audit.findings import ALARM, Finding, Leak
from fedveil.audit.inversion import InversionAudit, side_by_side
from fedveil.audit.membership import Membership
from fedveil.audit.property import PropertyAudit
from fedveil.audit.property_labels import PLANTED
from fedveil.audit.randomisers import Randomiser
from fedveil.audit.record_canaries import OneRunAudit
from fedveil.audit.seen import claimed
from fedveil.audit.white_box import WhiteBox
from fedveil.checks import check_workers, shown
from fedveil.errors import BadInput
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.session import Training

BOUNDS = (
    *(randomisers.ATTACK, sensitivity.ATTACK, fitted_statistics.ATTACK),
    *(canaries.ATTACK, record_canaries.ATTACK),
)
"""Attacks that bound epsilon from below, and so need a claim."""

LEAKS = (membership.ATTACK, white_box.ATTACK, properties.ATTACK, inversion.ATTACK)
"""Attacks that say how much they learn, whether anything is claimed or not."""

ATTACKS = (*BOUNDS, *LEAKS)

OnStep = Callable[[str, int, int], None]
"""(attack, steps done, of how many)."""


@dataclass(frozen=True)
class AuditSettings:
    """Which attacks, how many draws of each input, canaries and reference models, and their seed.

    `attacks` None is all that fit. `property` is what is asked of clients (`PropertyAudit`).
    `workers` are the processes that train reference models, 0 one per core, of the `cluster` if
    there is one and else of this machine. `inversion` says how long images are looked for; its seed
    is the settings's.

    | edge | behaviour |
    |---|---|
    | an attack that is unknown, or named twice | BadInput |
    | fewer than 100 draws, fewer than 50 canaries | BadInput |
    | reference models that are fewer than four, or odd | BadInput |
    """

    attacks: tuple[str, ...] | None = None
    draws: int = randomisers.DRAWS
    canaries: int = canaries.CANARIES
    references: int = membership.REFERENCES
    property: str = PLANTED
    seed: int = 0
    workers: int = 0
    inversion: InversionAudit = field(default_factory=InversionAudit)
    cluster: RayCluster | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        named = self.attacks if self.attacks is not None else ATTACKS
        for name in named:
            if name not in ATTACKS:
                raise BadInput(f"--attacks {shown(name)}: use one or more of {', '.join(ATTACKS)}")
        if not named or len(set(named)) < len(named):
            raise BadInput(f"--attacks {','.join(named)!r}: name each attack once")
        check_workers("--workers", self.workers)
        _ = self.randomiser, self.clients, self.members, self.properties

    @cached_property
    def randomiser(self) -> Randomiser:
        return Randomiser(self.draws, self.seed)

    @cached_property
    def clients(self) -> Canaries:
        return Canaries(self.canaries, self.seed)

    @cached_property
    def members(self) -> Membership:
        return Membership(self.references, self.seed, self.workers, cluster=self.cluster)

    @cached_property
    def properties(self) -> PropertyAudit:
        return PropertyAudit(self.property, seed=self.seed)


@dataclass(frozen=True)
class AttackResults:
    """What attacks found, and why some were left out that nobody asked for by name."""

    findings: tuple[Finding, ...]
    leaks: tuple[Leak, ...]
    left_out: tuple[str, ...] = ()


def run_attacks(
    training: Training,
    settings: AuditSettings,
    cache: AuditCache | None = None,
    on_step: OnStep = lambda attack, done, of: None,
) -> AttackResults:
    """Attack a training; what it would charge or release is not touched.

    All findings together have one false alarm in ten thousand. Attacks that bound epsilon are for
    trainings that claim something. An attack that does not fit the training is refused where it was
    asked for by name, and otherwise left out.
    """
    findings: list[Finding] = []
    leaks: list[Leak] = []
    left_out: list[str] = []
    bounds = BOUNDS if claimed(training.plan) is not None else ()
    for attack in settings.attacks or ATTACKS:
        try:
            if attack in bounds:
                findings += _findings(attack, training, settings, partial(on_step, attack))
            elif attack in LEAKS:
                some = _leaks(
                    attack, training, settings, cache or AuditCache(), partial(on_step, attack)
                )
                leaks += some
        except BadInput as e:
            if settings.attacks is not None:
                raise
            left_out.append(f"{attack}: {e}")
    sure = tuple(replace(each, alarm=ALARM / len(findings)) for each in findings)
    return AttackResults(sure, tuple(leaks), tuple(left_out))


def _findings(
    attack: str, training: Training, settings: AuditSettings, on_step: Callable[[int, int], None]
) -> list[Finding]:
    match attack:
        case randomisers.ATTACK:
            found = list(settings.randomiser.findings(training.plan))
            on_step(1, 1)
        case sensitivity.ATTACK:
            found = list(sensitivity.findings(training, settings.seed))
            on_step(1, 1)
        case fitted_statistics.ATTACK:
            found = list(fitted_statistics.findings(training))
            on_step(1, 1)
        case canaries.ATTACK:
            found = list(settings.clients.findings(training, on_step))
        case record_canaries.ATTACK:
            few = max(50, min(settings.canaries, 25 * training.data.clients))
            found = list(OneRunAudit(few, settings.seed).findings(training, on_step))
        case _:
            raise AssertionError(f"{attack} bounds nothing")
    return found


def _leaks(
    attack: str,
    training: Training,
    settings: AuditSettings,
    cache: AuditCache,
    on_step: Callable[[int, int], None],
) -> Iterator[Leak]:
    claim = claimed(training.plan)
    match attack:
        case membership.ATTACK:
            yield from replace(settings.members, cache=cache).leaks(training, claim, on_step)
        case white_box.ATTACK:
            inside = WhiteBox(settings.seed, settings.workers, cache, settings.cluster)
            yield from inside.leaks(training, claim, on_step)
        case properties.ATTACK:
            yield from settings.properties.leaks(training, on_step)
        case inversion.ATTACK:
            looking = replace(settings.inversion, seed=settings.seed)
            pairs = list(looking.seen(training, on_step))
            views = {found.view: found for found, _ in pairs}
            cache.save_figure(attack, lambda: side_by_side(views))
            yield from (leak for _, leak in pairs)
        case _:
            raise AssertionError(f"{attack} is no attack on records or clients")
