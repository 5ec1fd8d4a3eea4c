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
from fedveil.audit.findings import ALARM, AUC, SHOWN, Attack, Finding, Leak, OnStep, tpr_at
from fedveil.audit.inversion import InversionAudit, side_by_side
from fedveil.audit.membership import REFERENCES, Membership, ShadowRunner
from fedveil.audit.observations import strict_claim
from fedveil.audit.property_attack import PropertyAudit
from fedveil.audit.property_labels import PLANTED
from fedveil.audit.randomisers import DRAWS, Randomiser
from fedveil.audit.record_audits import OneRunAudit, sensitivity_findings, standardisation_findings
from fedveil.audit.white_box import WhiteBox
from fedveil.base.checks import check_workers, shown
from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim, rendered
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.build import build, check_own_parts
from fedveil.runs.evidence import charged_lines, check_same_lines
from fedveil.runs.opened_run import OpenedRun
from fedveil.runs.recipe import on_this_machine
from fedveil.training.engines.ray_cluster import RayCluster
from fedveil.training.session import Training

ATTACKS = tuple(Attack)
BOUNDS, LEAKS = ATTACKS[:5], ATTACKS[5:]
"""Attacks that bound epsilon from below, which need a claim, and attacks that measure leaks."""

OnAttackStep = Callable[[str, int, int], None]
"""Progress of an audit: (attack, steps done, steps in all)."""


@dataclass(frozen=True)
class AuditSettings:
    """Which attacks to run, and how large they are.

    Attributes:
        attacks: Names of attacks. None runs all that fit the training.
        draws: Draws of each input of a randomiser.
        canaries: The number of canary clients or canary records.
        references: Reference models of the membership attack.
        property: The property that is inferred of clients (`PropertyAudit`).
        seed: The seed of the audit's own draws.
        workers: Processes that train reference models, 0 for one per core.
        inversion: How images are reconstructed. Its seed is replaced by `seed`.
        cluster: The Ray cluster that trains reference models. None trains on this machine.

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
        """Return the audit of a release alone, with these draws and this seed."""
        return Randomiser(self.draws, self.seed)


@dataclass(frozen=True)
class AttackResults:
    """Results of the attacks that ran, and texts "attack: reason" for those that were left out."""

    findings: tuple[Finding, ...]
    leaks: tuple[Leak, ...]
    left_out: tuple[str, ...]


def run_attacks(
    training: Training,
    settings: AuditSettings,
    cache: AuditCache | None = None,
    on_step: OnAttackStep = lambda attack, done, of: None,
) -> AttackResults:
    """Attack a training, and return the results. Nothing is charged to a ledger on disk.

    Without named attacks, all that fit run. An attack that does not fit is BadInput if the settings
    name it, and otherwise an entry of `left_out`. Attacks that bound epsilon are skipped, without
    an entry, if the plan makes no claim. The probability of a false alarm is one in ten thousand
    over all findings together.

    Args:
        training: The training. It runs again, with other draws, and is not changed.
        settings: Which attacks, and how large.
        cache: Where arrays and figures are saved and loaded. None saves nothing.
        on_step: Called with (attack, steps done, steps in all).

    Raises BadInput for sums of fewer than 64 bits, which no attack decodes.
    """
    noisy = training.plan.noisy_steps
    if noisy is not None and noisy.rotated is not None:
        raise BadInput(
            f"sum.bits is {noisy.rotated.bits}: audits know sums of 64 bits only; run the same "
            "recipe without sum.bits, and audit that"
        )
    results: list[Finding | Leak] = []
    left_out: list[str] = []
    claim = strict_claim(training.plan)
    for attack in settings.attacks or ATTACKS:
        step, stored = partial(on_step, attack), cache or AuditCache()
        try:
            if claim is not None or attack in LEAKS:
                results += _run_attack(attack, training, settings, stored, step)
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


def _run_attack(
    attack: str, training: Training, settings: AuditSettings, cache: AuditCache, on_step: OnStep
) -> Iterator[Finding | Leak]:
    """Run one attack, and yield its findings or leaks. Arrays and figures are saved in `cache`.

    An attack that does not fit the training raises BadInput, or yields nothing.
    """
    claim, seed = strict_claim(training.plan), settings.seed
    runner = ShadowRunner(settings.workers, cache, settings.cluster)
    match attack:
        case Attack.RANDOMISER:
            yield from settings.randomiser.findings(training.plan)
            on_step(1, 1)
        case Attack.SENSITIVITY:
            yield from sensitivity_findings(training, seed)
            on_step(1, 1)
        case Attack.STATISTICS:
            yield from standardisation_findings(training)
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
"""By column of a summary: the attack, the name of its measure, and the unit."""

COLUMNS = (*_MEASURES, "at least (95 %)", "claim")


def summary(
    findings: Sequence[Finding], leaks: Sequence[Leak], claim: PrivacyClaim | None
) -> dict[str, str]:
    """Return a row of texts by `COLUMNS`, "-" where no attack has that measure.

    Of each kind of attack the row has the largest measure, from attackers that the claim covers if
    there are any, otherwise from all. TPR is at 0.1 % FPR. "at least (95 %)" is the largest lower
    bound on epsilon, with the attack's name, among findings about exactly `claim`. These findings
    share the 5 %. Findings about a part of the claim, or about a client that is known to take part,
    have another epsilon and do not count. Without a claim, the last two columns are "-" and
    "nothing claimed".
    """
    row = {}
    for column, (attack, name, unit) in _MEASURES.items():
        every = [leak for leak in leaks if leak.attack == attack]
        covered = [leak for leak in every if (leak.claim is None) == (claim is None)] or every
        measures = [m for leak in covered for m in leak.measures if m.name == name]
        best = max(measures, key=lambda measure: measure.value, default=None)
        row[column] = NOTHING if best is None else f"{best}{unit}"
    row[COLUMNS[-2]], row[COLUMNS[-1]] = NOTHING, "nothing claimed"
    if claim is not None:
        row[COLUMNS[-1]] = claim.short
        about = [each for each in findings if _same_promise(each.claim, claim)]
        bounds = [(each.evidence.lower_bound(SHOWN / len(about)), each.attack) for each in about]
        if bounds:
            most, strongest = max(bounds, key=lambda bound: bound[0])
            row[COLUMNS[-2]] = f"{rendered(most, ROUND_FLOOR)} ({strongest})" if most > 0 else "0"
    return row


def _same_promise(one: PrivacyClaim, other: PrivacyClaim) -> bool:
    """Return whether two claims have the same epsilon, delta, unit, neighbours and trust."""
    terms = [(c.delta, c.unit, c.neighbours, c.trust) for c in (one, other)]
    return terms[0] == terms[1] and math.isclose(one.epsilon, other.epsilon, rel_tol=1e-9)


@dataclass(frozen=True)
class AuditResult(AttackResults):
    """The result of an audit of a run: results of attacks, the run, and its plan."""

    audited_run: OpenedRun
    plan: PrivacyPlan

    @property
    def summary_row(self) -> dict[str, str]:
        """Return one row of texts: the run's metrics by name, then `COLUMNS` of `summary`."""
        metrics = {
            name: "not finite" if value is None else f"{value:.4g}"
            for name, value in self.audited_run.result["metrics"].items()
        }
        return {**metrics, **summary(self.findings, self.leaks, strict_claim(self.plan))}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON values of found.json.

        Keys: run_dir, recipe (its name), metrics, findings, leaks, left_out, violated (whether any
        finding refutes its claim).
        """
        return {
            "run_dir": str(self.audited_run.folder),
            "recipe": self.audited_run.recipe.name,
            "metrics": self.audited_run.result["metrics"],
            "findings": [finding.to_dict() for finding in self.findings],
            "leaks": [leak.to_dict() for leak in self.leaks],
            "left_out": list(self.left_out),
            "violated": any(finding.violated for finding in self.findings),
        }


def audit(
    folder: Path,
    settings: AuditSettings,
    data_root: Path | None = None,
    *,
    out: Path | None = None,
    allow_code: bool = False,
    on_step: OnAttackStep = lambda attack, done, of: None,
) -> AuditResult:
    """Attack a finished run, rebuilt from its recipe. Nothing in its directory is changed.

    Noise and coins are drawn anew. The probability of a false alarm is one in ten thousand over all
    findings together.

    Args:
        folder: The directory of the run.
        settings: Which attacks, and how large.
        data_root: Where data sets are stored.
        out: Directory for found.json, figures and the arrays of attacks. An interrupted audit
            resumes there. None saves nothing.
        allow_code: Whether code that the recipe names may run.
        on_step: Called with (attack, steps done, steps in all).

    | edge | behaviour |
    |---|---|
    | the run has not ended, or a file of it was changed | BadInput |
    | its ledger was charged for other noise than this version builds from the recipe | BadInput |
    | its private ledger is missing | files and noise are not compared with it |
    | a named attack does not fit the training | BadInput |
    | `out` holds other files or another audit, or is in use | BadInput |
    | the run has records or a module of its own, which no file holds | BadInput |
    | the run claims nothing, and only attacks on claims are named | BadInput |
    | a secure sum of fewer than 64 bits | BadInput |
    | no attack has a result | BadInput, after found.json is written |
    | `out` is, or is in, the directory of the run | BadInput |
    """
    run = OpenedRun.at(folder, allow_code=allow_code)
    if not run.claims and not set(settings.attacks or LEAKS) & set(LEAKS):
        raise BadInput(
            f"{folder} claims nothing: there is no claim to hold an attack against; "
            f"use --attacks {','.join(LEAKS)}"
        )
    check_own_parts(run.recipe, None, None)
    charged = charged_lines(folder)
    if out is not None and folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise BadInput(f"--out {out} is in the run's own directory: an audit leaves it as it is")
    training = build(on_this_machine(run.recipe), data_root, allow_code=allow_code)
    check_same_lines(folder, charged, training.plan.every_line)
    training = replace(training, workers=1, plan=replace(training.plan, metrics=None))
    digest, data = audited_digest(run.recipe), training.data.fingerprint
    identity = {"recipe": digest, "data": data, "seed": settings.seed}  # of shadow models
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
