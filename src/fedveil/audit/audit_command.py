"""`fedveil audit`: attack a finished run, built again from its recipe. The run is only read."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_FLOOR
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedveil.audit.audit_folder import FOUND, AuditCache, audited_digest
from fedveil.audit.canary_clients import CANARIES, Canaries
from fedveil.audit.findings import ALARM, AUC, SHOWN, Attack, Finding, Leak, tpr_at
from fedveil.audit.inversion import InversionAudit, side_by_side
from fedveil.audit.membership import REFERENCES, Membership, ShadowRunner
from fedveil.audit.observations import claimed
from fedveil.audit.property_attack import PropertyAudit
from fedveil.audit.property_labels import PLANTED
from fedveil.audit.randomisers import DRAWS, Randomiser
from fedveil.audit.record_audits import OneRunAudit, sensitivity_findings, statistics_findings
from fedveil.audit.white_box import WhiteBox
from fedveil.base.checks import check_workers, shown
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim, rendered
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.build import build, check_given
from fedveil.runs.evidence import charged_lines, check_charged
from fedveil.runs.opened_run import OpenedRun
from fedveil.runs.recipe import on_this_machine
from fedveil.training.engines.ray_cluster import RayCluster
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
        # each of them refuses a size that is too small
        _ = self.randomiser, Canaries(self.canaries), Membership(self.references)

    @cached_property
    def randomiser(self) -> Randomiser:
        """The audit of a release alone."""
        return Randomiser(self.draws, self.seed)


@dataclass(frozen=True)
class AttackResults:
    """Results of the attacks that ran, and why others were left out.

    An attack that was named and does not fit is refused, not left out.
    """

    findings: tuple[Finding, ...]
    leaks: tuple[Leak, ...]
    left_out: tuple[str, ...]


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
    results: list[Finding | Leak] = []
    left_out: list[str] = []
    claims = claimed(training.plan) is not None
    for attack in settings.attacks or ATTACKS:
        step, stored = partial(on_step, attack), cache or AuditCache()
        try:
            if claims or attack in LEAKS:
                results += _results(attack, training, settings, stored, step)
        except BadInput as e:
            if settings.attacks is not None:
                raise
            left_out.append(f"{attack}: {e}")
    findings = [each for each in results if isinstance(each, Finding)]
    return AttackResults(
        tuple(replace(each, alarm=ALARM / len(findings)) for each in findings),
        tuple(each for each in results if isinstance(each, Leak)),
        tuple(left_out),
    )


def _results(
    attack: str,
    training: Training,
    settings: AuditSettings,
    cache: AuditCache,
    on_step: Callable[[int, int], None],
) -> Iterator[Finding | Leak]:
    claim, seed = claimed(training.plan), settings.seed
    runner = ShadowRunner(settings.workers, cache, settings.cluster)
    match attack:
        case Attack.RANDOMISER:
            yield from settings.randomiser.findings(training.plan)
            on_step(1, 1)
        case Attack.SENSITIVITY:
            yield from sensitivity_findings(training, seed)
            on_step(1, 1)
        case Attack.STATISTICS:
            yield from statistics_findings(training)
            on_step(1, 1)
        case Attack.CANARIES:
            yield from Canaries(settings.canaries, seed).findings(training, on_step)
        case Attack.ONE_RUN:
            few = max(50, min(settings.canaries, 25 * training.data.clients))
            yield from OneRunAudit(few, seed).findings(training, on_step)
        case Attack.MEMBERSHIP:
            membership = Membership(settings.references, seed, runner)
            yield from membership.leaks(training, claim, on_step)
        case Attack.WHITE_BOX:
            yield from WhiteBox(seed, runner).leaks(training, claim, on_step)
        case Attack.PROPERTY:
            yield from PropertyAudit(settings.property, seed=seed).leaks(training, on_step)
        case _:
            inversion = replace(settings.inversion, seed=seed)
            pairs = list(inversion.reconstructions(training, on_step))
            views = {images.view: images for images, _ in pairs}
            cache.save_figure(attack, lambda: side_by_side(views))
            yield from (leak for _, leak in pairs)


FEW_ALARMS = 0.001
NOTHING = "-"
_MEASURES = {
    "membership AUC": (Attack.MEMBERSHIP, AUC, ""),
    "membership TPR": (Attack.MEMBERSHIP, tpr_at(FEW_ALARMS), ""),
    "white-box AUC": (Attack.WHITE_BOX, AUC, ""),
    "property AUC": (Attack.PROPERTY, AUC, ""),
    "inversion PSNR": (Attack.INVERSION, "PSNR", " dB"),
}
"""Columns of a summary: the attack, its measure, and the unit of that."""

COLUMNS = (*_MEASURES, "at least (95 %)", "claim")


def summary(
    findings: Sequence[Finding], leaks: Sequence[Leak], claim: PrivacyClaim | None
) -> dict[str, str]:
    """One row with `COLUMNS`: the best of each kind of attack, within what the claim covers.

    An attacker that the claim trusts is left out where there is another. The empirical epsilon is
    the largest lower bound among findings about this very claim: not about a part of it, nor about
    a client that is known to take part, whose epsilon is another. They share the 5 %. TPR is at
    0.1 % FPR.
    """
    row = {}
    for column, (attack, name, unit) in _MEASURES.items():
        every = [leak for leak in leaks if leak.attack == attack]
        covered = [leak for leak in every if (leak.claim is None) == (claim is None)] or every
        measures = [m for leak in covered for m in leak.measures if m.name == name]
        best = max(measures, key=lambda measure: measure.value, default=None)
        row[column] = NOTHING if best is None else f"{best}{unit}"
    nothing = "nothing claimed" if claim is None else claim.short
    return {**row, COLUMNS[-2]: _empirical(findings, claim), COLUMNS[-1]: nothing}


def _empirical(findings: Sequence[Finding], claim: PrivacyClaim | None) -> str:
    about = [each for each in findings if claim is not None and _same(each.claim, claim)]
    if not about:
        return NOTHING
    bounds = [(each.evidence.lower_bound(SHOWN / len(about)), each.attack) for each in about]
    most, attack = max(bounds, key=lambda bound: bound[0])
    return f"{rendered(most, ROUND_FLOOR)} ({attack})" if most > 0 else "0"


def _same(one: PrivacyClaim, other: PrivacyClaim) -> bool:
    """Whether two claims make the same promise to the same units."""
    terms = [(c.delta, c.unit, c.neighbours, c.trust) for c in (one, other)]
    return terms[0] == terms[1] and math.isclose(one.epsilon, other.epsilon, rel_tol=1e-9)


@dataclass(frozen=True)
class AuditResult(AttackResults):
    """The result of an audit: what the attacks found, the run, and its plan."""

    audited_run: OpenedRun
    plan: PrivacyPlan

    @property
    def violated(self) -> bool:
        return any(finding.violated for finding in self.findings)

    @property
    def summary_row(self) -> dict[str, str]:
        """The metrics of the run and the summary of the attacks, in one row."""
        metrics = {
            name: "not finite" if value is None else f"{value:.4g}"
            for name, value in self.audited_run.result["metrics"].items()
        }
        return {**metrics, **summary(self.findings, self.leaks, claimed(self.plan))}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run_dir": str(self.audited_run.folder),
            "recipe": self.audited_run.recipe.name,
            "metrics": self.audited_run.result["metrics"],
            "findings": [finding.to_dict() for finding in self.findings],
            "leaks": [leak.to_dict() for leak in self.leaks],
            "left_out": list(self.left_out),
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
    # what determines the shadow models of an audit
    identity = {
        "recipe": audited_digest(run.recipe),
        "data": training.data.fingerprint,
        "seed": settings.seed,
    }
    with AuditCache.locked_in(out, identity) as cache:
        found = run_attacks(training, settings, cache, on_step)
        result = AuditResult(found.findings, found.leaks, found.left_out, run, training.plan)
        cache.save_json(Path(FOUND).stem, result.to_dict())
    if not result.findings and not result.leaks:
        target = "a run that claims nothing" if run.claim is None else run.claim.short
        raise BadInput(
            f"--attacks {','.join(settings.attacks or ())}: none of them is for {target}"
        )
    return result
