"""`run_attacks`: all attacks on one training, in order, with their sizes and their results.

The training is built from a recipe. It need not have been run.
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
from fedveil.base.checks import check_workers, shown
from fedveil.base.errors import BadInput
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.session import Training

BOUNDS = (
    randomisers.ATTACK,
    sensitivity.ATTACK,
    fitted_statistics.ATTACK,
    canaries.ATTACK,
    record_canaries.ATTACK,
)
"""Attacks that bound epsilon from below, and so need a claim."""

LEAKS = (membership.ATTACK, white_box.ATTACK, properties.ATTACK, inversion.ATTACK)
"""Attacks that measure what they learn, with or without a claim."""

ATTACKS = (*BOUNDS, *LEAKS)

OnStep = Callable[[str, int, int], None]
"""(attack, steps done, of how many)."""


@dataclass(frozen=True)
class AuditSettings:
    """Which attacks to run, and how large they are.

    Attributes:
        attacks: Names of attacks, None for all that fit the training.
        draws: Draws of each input of a randomiser.
        canaries: The number of canary clients or canary records.
        references: Reference models of the membership attack.
        property: The property that is inferred of clients (`PropertyAudit`).
        seed: Of all the audit's own draws.
        workers: Processes that train reference models, 0 for one per core.
        inversion: How images are reconstructed. Its seed is replaced by `seed`.
        cluster: The Ray cluster that trains reference models instead of this machine.

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
    """Results of the attacks that ran, and why others were left out.

    An attack that was named and does not fit is refused, not left out.
    """

    findings: tuple[Finding, ...]
    leaks: tuple[Leak, ...]
    left_out: tuple[str, ...] = ()


def run_attacks(
    training: Training,
    settings: AuditSettings,
    cache: AuditCache | None = None,
    on_step: OnStep = lambda attack, done, of: None,
) -> AttackResults:
    """Attack a training. Nothing is charged, and nothing of a run is changed.

    The probability of a false alarm is one in ten thousand over all findings together. Attacks that
    bound epsilon run only if the training makes a claim. An attack that does not fit the training
    is refused if it was named, and otherwise left out.
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
            findings = list(settings.randomiser.findings(training.plan))
            on_step(1, 1)
        case sensitivity.ATTACK:
            findings = list(sensitivity.findings(training, settings.seed))
            on_step(1, 1)
        case fitted_statistics.ATTACK:
            findings = list(fitted_statistics.findings(training))
            on_step(1, 1)
        case canaries.ATTACK:
            findings = list(settings.clients.findings(training, on_step))
        case record_canaries.ATTACK:
            few = max(50, min(settings.canaries, 25 * training.data.clients))
            findings = list(OneRunAudit(few, settings.seed).findings(training, on_step))
        case _:
            raise AssertionError(f"{attack} bounds nothing")
    return findings


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
            inversion_audit = replace(settings.inversion, seed=settings.seed)
            pairs = list(inversion_audit.reconstructions(training, on_step))
            views = {images.view: images for images, _ in pairs}
            cache.save_figure(attack, lambda: side_by_side(views))
            yield from (leak for _, leak in pairs)
        case _:
            raise AssertionError(f"{attack} is no attack on records or clients")
