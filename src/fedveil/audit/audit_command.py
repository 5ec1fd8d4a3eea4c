"""`fedveil audit`: attack a finished run, built again from its recipe. The run is only read."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_FLOOR
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedveil.audit.audit_folder import FOUND, AuditCache, audited_digest
from fedveil.audit.canary_clients import CANARIES, Canaries
from fedveil.audit.canary_records import OneRunAudit
from fedveil.audit.client_views import claimed
from fedveil.audit.findings import ALARM, AUC, SHOWN, Attack, Finding, Leak, Measure, tpr_at
from fedveil.audit.inversion import InversionAudit, side_by_side
from fedveil.audit.membership import REFERENCES, Membership
from fedveil.audit.noiseless_checks import sensitivity_findings, statistics_findings
from fedveil.audit.property_attack import PropertyAudit
from fedveil.audit.property_labels import PLANTED
from fedveil.audit.randomisers import DRAWS, Randomiser
from fedveil.audit.white_box import WhiteBox
from fedveil.base.checks import check_workers, shown
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim, rendered
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.build import build, check_given
from fedveil.runs.evidence import charged_lines, check_charged
from fedveil.runs.opened_run import OpenedRun
from fedveil.runs.recipe_file import on_this_machine
from fedveil.training.engines.on_ray.cluster import RayCluster
from fedveil.training.session import Training

ATTACKS = tuple(Attack)
BOUNDS, LEAKS = ATTACKS[:5], ATTACKS[5:]
"""Attacks that bound epsilon from below, and so need a claim, and attacks that measure leaks."""

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
    draws: int = DRAWS
    canaries: int = CANARIES
    references: int = REFERENCES
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
        case Attack.RANDOMISER:
            findings = list(settings.randomiser.findings(training.plan))
            on_step(1, 1)
        case Attack.SENSITIVITY:
            findings = list(sensitivity_findings(training, settings.seed))
            on_step(1, 1)
        case Attack.STATISTICS:
            findings = list(statistics_findings(training))
            on_step(1, 1)
        case Attack.CANARIES:
            findings = list(settings.clients.findings(training, on_step))
        case Attack.ONE_RUN:
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
        case Attack.MEMBERSHIP:
            yield from replace(settings.members, cache=cache).leaks(training, claim, on_step)
        case Attack.WHITE_BOX:
            inside = WhiteBox(settings.seed, settings.workers, cache, settings.cluster)
            yield from inside.leaks(training, claim, on_step)
        case Attack.PROPERTY:
            yield from settings.properties.leaks(training, on_step)
        case Attack.INVERSION:
            inversion_audit = replace(settings.inversion, seed=settings.seed)
            pairs = list(inversion_audit.reconstructions(training, on_step))
            views = {images.view: images for images, _ in pairs}
            cache.save_figure(attack, lambda: side_by_side(views))
            yield from (leak for _, leak in pairs)
        case _:
            raise AssertionError(f"{attack} is no attack on records or clients")


FEW_ALARMS = 0.001
NOTHING = "-"
COLUMNS = (
    "membership AUC",
    "membership TPR",
    "white-box AUC",
    "property AUC",
    "inversion PSNR",
    "at least (95 %)",
    "claim",
)
_ALIKE = 1e-9


def summary(
    findings: Sequence[Finding], leaks: Sequence[Leak], claim: PrivacyClaim | None
) -> dict[str, str]:
    """One row with `COLUMNS`: the best of each kind of attack, within what the claim covers.

    An attacker that the claim trusts is left out where there is another. The empirical epsilon is
    the largest lower bound among findings about this very claim: not about a part of it, nor about
    a client that is known to take part, whose epsilon is another. They share the 5 %. TPR is at
    0.1 % FPR.
    """
    covered = list(_covered(leaks, claim))
    return {
        COLUMNS[0]: _best(covered, Attack.MEMBERSHIP, AUC),
        COLUMNS[1]: _best(covered, Attack.MEMBERSHIP, tpr_at(FEW_ALARMS)),
        COLUMNS[2]: _best(covered, Attack.WHITE_BOX, AUC),
        COLUMNS[3]: _best(covered, Attack.PROPERTY, AUC),
        COLUMNS[4]: _best(covered, Attack.INVERSION, "PSNR", " dB"),
        COLUMNS[5]: _empirical(findings, claim),
        COLUMNS[6]: "nothing claimed" if claim is None else claim.short,
    }


def _covered(leaks: Sequence[Leak], claim: PrivacyClaim | None) -> Iterable[Leak]:
    """The leaks that the claim covers. All leaks of an attack where it covers none."""
    for attack in dict.fromkeys(leak.attack for leak in leaks):
        of = [leak for leak in leaks if leak.attack == attack]
        yield from [leak for leak in of if (leak.claim is None) == (claim is None)] or of


def _best(leaks: Iterable[Leak], attack: str, name: str, unit: str = "") -> str:
    found = [_named(leak)[name] for leak in leaks if leak.attack == attack and name in _named(leak)]
    if not found:
        return NOTHING
    best = max(found, key=lambda measure: measure.value)
    return f"{best}{unit}"


def _named(leak: Leak) -> Mapping[str, Measure]:
    return {measure.name: measure for measure in leak.measures}


def _empirical(findings: Sequence[Finding], claim: PrivacyClaim | None) -> str:
    about = [each for each in findings if claim is not None and _same(each.claim, claim)]
    if not about:
        return NOTHING
    bounds = [(each.evidence.epsilon(SHOWN / len(about)), each.attack) for each in about]
    most, attack = max(bounds, key=lambda bound: bound[0])
    return f"{rendered(most, ROUND_FLOOR)} ({attack})" if most > 0 else "0"


def _same(one: PrivacyClaim, other: PrivacyClaim) -> bool:
    """Whether two claims make the same promise to the same units."""
    terms = [(c.delta, c.unit, c.neighbours, c.trust) for c in (one, other)]
    return terms[0] == terms[1] and math.isclose(one.epsilon, other.epsilon, rel_tol=_ALIKE)


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit: the run, its plan, and what the attacks found.

    Attributes:
        results: Bounds on epsilon, and what other attacks learn.
    """

    run: OpenedRun
    plan: PrivacyPlan
    results: AttackResults

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.results.findings

    @property
    def leaks(self) -> tuple[Leak, ...]:
        return self.results.leaks

    @property
    def violated(self) -> bool:
        return any(finding.violated for finding in self.findings)

    @property
    def row(self) -> dict[str, str]:
        """The metrics of the run and the summary of the attacks, in one row."""
        metrics = {name: _number(value) for name, value in self.run.result["metrics"].items()}
        return {**metrics, **summary(self.findings, self.leaks, claimed(self.plan))}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run_dir": str(self.run.folder),
            "recipe": self.run.recipe.name,
            "metrics": self.run.result["metrics"],
            "findings": [finding.to_dict() for finding in self.findings],
            "leaks": [leak.to_dict() for leak in self.leaks],
            "left_out": list(self.results.left_out),
            "violated": self.violated,
        }


def audit(
    folder: Path,
    settings: AuditSettings,
    data_root: Path | None = None,
    *,
    out: Path | None = None,
    allow_code: bool = False,
    on_step: OnStep = lambda attack, done, of: None,
) -> AuditResult:
    """Attack the training that the recipe of a finished run describes. The run is not changed.

    Plan, model and clients are built again. Noise and coins are drawn anew. The probability of a
    false alarm is one in ten thousand over all findings together.

    Args:
        folder: The directory of the run.
        settings: Which attacks, and how large.
        data_root: Where data sets are stored.
        out: Directory for figures and shadow models' losses. An interrupted audit resumes there.
        allow_code: Whether code that the recipe names may run.
        on_step: Called with (attack, steps done, steps in all).

    | edge | behaviour |
    |---|---|
    | the run has not ended, or a file of it was changed | BadInput |
    | its ledger says that it had other noise than this version makes of its recipe | BadInput |
    | the run has records or a module of its own, which no file holds | BadInput |
    | none of the attacks fits what the run claims, or does not | BadInput |
    | `out` is, or is in, the directory of the run | BadInput |
    """
    run = OpenedRun.at(folder, allow_code=allow_code)
    if not run.claims and not set(settings.attacks or LEAKS) & set(LEAKS):
        raise BadInput(
            f"{folder} claims nothing: there is no claim to hold an attack against; "
            f"use --attacks {','.join(LEAKS)}"
        )
    check_given(run.recipe, None, None)
    charged = charged_lines(folder)
    if out is not None and folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise BadInput(f"--out {out} is in the run's own directory: an audit leaves it as it is")
    training = build(on_this_machine(run.recipe), data_root, allow_code=allow_code)
    check_charged(folder, charged, training.plan.every_line)
    training = replace(training, workers=1, plan=replace(training.plan, metrics=None))
    with AuditCache.at(out, _identity(run, training, settings)) as cache:
        results = run_attacks(training, settings, cache, on_step)
        whole = AuditResult(run, training.plan, results)
        cache.save_json(Path(FOUND).stem, whole.to_dict())
    if not results.findings and not results.leaks:
        target = "a run that claims nothing" if run.claim is None else run.claim.short
        raise BadInput(
            f"--attacks {','.join(settings.attacks or ())}: none of them is for {target}"
        )
    return whole


def _identity(run: OpenedRun, training: Training, settings: AuditSettings) -> dict[str, Any]:
    """What determines the shadow models of an audit."""
    return {
        "recipe": audited_digest(run.recipe),
        "data": training.data.fingerprint,
        "seed": settings.seed,
    }


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
