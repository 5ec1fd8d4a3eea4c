"""`fedveil audit`: attack a finished run, built again from its recipe. The run is only read."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedveil.audit.all_attacks import LEAKS, AttackResults, AuditSettings, OnStep, run_attacks
from fedveil.audit.audit_cache import FOUND, AuditCache, audited_digest
from fedveil.audit.findings import Finding, Leak
from fedveil.audit.seen import claimed
from fedveil.audit.summary import summary
from fedveil.base.errors import BadInput
from fedveil.privacy.plan import PrivacyPlan
from fedveil.runs.build import build
from fedveil.runs.evidence import charged_lines, check_charged
from fedveil.runs.opened_run import OpenedRun
from fedveil.runs.own import brought
from fedveil.runs.recipe import here
from fedveil.training.session import Training


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
    brought(run.recipe, None, None)
    charged = charged_lines(folder)
    if out is not None and folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise BadInput(f"--out {out} is in the run's own directory: an audit leaves it as it is")
    training = build(here(run.recipe), data_root, allow_code=allow_code)
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
