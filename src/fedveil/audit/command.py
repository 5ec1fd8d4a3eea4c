"""`fedveil audit`: a finished run, attacked again from its recipe; the run itself is only read."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.audit import canaries, membership, randomisers, records, sensitivity, white_box
from fedveil.audit.canaries import Canaries
from fedveil.audit.finding import ALARM, Finding
from fedveil.audit.kept import Kept
from fedveil.audit.leak import Leak
from fedveil.audit.membership import Membership
from fedveil.audit.randomisers import Randomiser
from fedveil.audit.records import OneRunAudit
from fedveil.audit.white_box import WhiteBox
from fedveil.checks import check_workers, shown
from fedveil.errors import BadInput
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.runs.build import build
from fedveil.runs.opened import OpenedRun
from fedveil.runs.own import brought
from fedveil.training.session import Training

BOUNDS = (randomisers.ATTACK, sensitivity.ATTACK, canaries.ATTACK, records.ATTACK)
"""Attacks that bound epsilon from below, and so need a claim."""

LEAKS = (membership.ATTACK, white_box.ATTACK)
"""Attacks that say how much they learn, whether anything is claimed or not."""

ATTACKS = (*BOUNDS, *LEAKS)

OnStep = Callable[[str, int, int], None]
"""(attack, steps done, of how many)."""


@dataclass(frozen=True)
class Question:
    """Which attacks, how many draws of each input, canaries and reference models, and their seed.

    `workers` are the processes that train reference models, 0 one per core.

    | edge | behaviour |
    |---|---|
    | an attack that is unknown, or named twice | BadInput |
    | fewer than 100 draws, fewer than 50 canaries | BadInput |
    | reference models that are fewer than four, or odd | BadInput |
    """

    attacks: tuple[str, ...] = ATTACKS
    draws: int = randomisers.DRAWS
    canaries: int = canaries.CANARIES
    references: int = membership.REFERENCES
    seed: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        for name in self.attacks:
            if name not in ATTACKS:
                raise BadInput(f"--attacks {shown(name)}: use one or more of {', '.join(ATTACKS)}")
        if not self.attacks or len(set(self.attacks)) < len(self.attacks):
            raise BadInput(f"--attacks {','.join(self.attacks)!r}: name each attack once")
        check_workers("--workers", self.workers)
        _ = self.randomiser, self.clients, self.members

    @property
    def randomiser(self) -> Randomiser:
        return Randomiser(self.draws, self.seed)

    @property
    def clients(self) -> Canaries:
        return Canaries(self.canaries, self.seed)

    @property
    def members(self) -> Membership:
        return Membership(self.references, self.seed, self.workers)


@dataclass(frozen=True)
class Audited:
    """What was found about a run: bounds on epsilon, and what other attacks learn."""

    run: OpenedRun
    findings: tuple[Finding, ...]
    leaks: tuple[Leak, ...] = ()

    @property
    def violated(self) -> bool:
        return any(finding.violated for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run_dir": str(self.run.folder),
            "recipe": self.run.recipe.name,
            "metrics": self.run.result["metrics"],
            "findings": [finding.to_dict() for finding in self.findings],
            "leaks": [leak.to_dict() for leak in self.leaks],
            "violated": self.violated,
        }


def audit(
    folder: Path,
    question: Question,
    data_root: Path | None = None,
    *,
    out: Path | None = None,
    allow_code: bool = False,
    on_step: OnStep = lambda attack, done, of: None,
) -> Audited:
    """Attack what the recipe of a finished run does; nothing of the run is charged or changed.

    Its plan, its model and its clients are built again; noise and coins are the audit's own. All
    findings together have one false alarm in ten thousand audits. `out` is where trained models'
    losses and figures are kept, so that an audit which was interrupted goes on.

    | edge | behaviour |
    |---|---|
    | the run has not ended, or a file of it was changed | BadInput |
    | the run has records or a module of its own, which no file holds | BadInput |
    | none of the attacks fits what the run claims, or does not | BadInput |
    | `out` is, or is in, the directory of the run | BadInput |
    """
    run = OpenedRun.at(folder, allow_code=allow_code)
    claims = run.claims
    if not claims and not set(question.attacks) & set(LEAKS):
        raise BadInput(
            f"{folder} claims nothing: there is no claim to hold an attack against; "
            f"use --attacks {','.join(LEAKS)}"
        )
    brought(run.recipe, None, None)
    if out is not None and folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise BadInput(f"--out {out} is in the run's own directory: an audit leaves it as it is")
    training = replace(build(run.recipe, data_root, allow_code=allow_code), workers=1)
    with Kept.at(out, _identity(run, training, question)) as kept:
        leaks = _leaks(training, question, claims, kept, on_step)
        findings = _findings(training, question, on_step) if claims else []
    if not findings and not leaks:
        raise BadInput(
            f"--attacks {','.join(question.attacks)}: none of them is for {claims[0].short}"
        )
    sure = tuple(replace(each, alarm=ALARM / len(findings)) for each in findings)
    return Audited(run, sure, tuple(leaks))


def _identity(run: OpenedRun, training: Training, question: Question) -> dict[str, Any]:
    """What the trained models of an audit follow from."""
    recipe = hashlib.sha256(run.recipe.model_dump_json().encode()).hexdigest()
    return {"recipe": recipe, "data": training.data.fingerprint, "seed": question.seed}


def _findings(training: Training, question: Question, on_step: OnStep) -> list[Finding]:
    found: list[Finding] = []
    for attack in question.attacks:
        on_training = partial(on_step, attack)
        match attack:
            case randomisers.ATTACK:
                found += question.randomiser.findings(training.plan)
                on_step(attack, 1, 1)
            case sensitivity.ATTACK:
                found += sensitivity.findings(training, question.seed)
                on_step(attack, 1, 1)
            case canaries.ATTACK:
                found += question.clients.findings(training, on_training)
            case records.ATTACK:
                few = min(question.canaries, 25 * training.data.clients)
                one_run = OneRunAudit(max(50, few), question.seed)
                found += one_run.findings(training, on_training)
    return found


def _leaks(
    training: Training,
    question: Question,
    claims: tuple[PrivacyClaim, ...],
    kept: Kept,
    on_step: OnStep,
) -> list[Leak]:
    found: list[Leak] = []
    claim = claims[0] if claims else None
    for attack in question.attacks:
        on_training = partial(on_step, attack)
        match attack:
            case membership.ATTACK:
                members = replace(question.members, kept=kept)
                found += members.leaks(training, claim, on_training)
            case white_box.ATTACK:
                inside = WhiteBox(question.seed, question.workers, kept)
                found += inside.leaks(training, claim, on_training)
    return found
