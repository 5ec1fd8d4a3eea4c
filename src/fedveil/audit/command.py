"""`fedveil audit`: a finished run, attacked again from its recipe; the run itself is only read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedveil.audit import canaries, randomisers, records, sensitivity
from fedveil.audit.canaries import Canaries
from fedveil.audit.finding import ALARM, Finding
from fedveil.audit.randomisers import Randomiser
from fedveil.audit.records import OneRunAudit
from fedveil.checks import shown
from fedveil.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.opened import OpenedRun
from fedveil.runs.own import brought

ATTACKS = (randomisers.ATTACK, sensitivity.ATTACK, canaries.ATTACK, records.ATTACK)

OnStep = Callable[[str, int, int], None]
"""(attack, steps done, of how many)."""


@dataclass(frozen=True)
class Question:
    """Which attacks, how many draws of each input and how many canaries, and their seed.

    | edge | behaviour |
    |---|---|
    | an attack that is unknown, or named twice | BadInput |
    | fewer than 100 draws, fewer than 50 canaries | BadInput |
    """

    attacks: tuple[str, ...] = ATTACKS
    draws: int = randomisers.DRAWS
    canaries: int = canaries.CANARIES
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.attacks:
            if name not in ATTACKS:
                raise BadInput(f"--attacks {shown(name)}: use one or more of {', '.join(ATTACKS)}")
        if not self.attacks or len(set(self.attacks)) < len(self.attacks):
            raise BadInput(f"--attacks {','.join(self.attacks)!r}: name each attack once")
        _ = self.randomiser, self.clients

    @property
    def randomiser(self) -> Randomiser:
        return Randomiser(self.draws, self.seed)

    @property
    def clients(self) -> Canaries:
        return Canaries(self.canaries, self.seed)


@dataclass(frozen=True)
class Audited:
    """What was found about a run."""

    run: OpenedRun
    findings: tuple[Finding, ...]

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
            "violated": self.violated,
        }


def audit(
    folder: Path,
    question: Question,
    data_root: Path | None = None,
    *,
    allow_code: bool = False,
    on_step: OnStep = lambda attack, done, of: None,
) -> Audited:
    """Attack what the recipe of a finished run does; nothing of the run is charged or changed.

    Its plan, its model and its clients are built again; noise and coins are the audit's own. All
    findings together have one false alarm in ten thousand audits.

    | edge | behaviour |
    |---|---|
    | the run has not ended, or a file of it was changed | BadInput |
    | the run has records or a module of its own, which no file holds | BadInput |
    | the run claims nothing, or none of the attacks fits what it claims | BadInput |
    """
    run = OpenedRun.at(folder, allow_code=allow_code)
    if not run.claims:
        raise BadInput(f"{folder} claims nothing: there is no claim to hold an attack against")
    brought(run.recipe, None, None)
    training = replace(build(run.recipe, data_root, allow_code=allow_code), workers=1)
    found: list[Finding] = []
    for attack in question.attacks:
        match attack:
            case randomisers.ATTACK:
                found += question.randomiser.findings(training.plan)
                on_step(attack, 1, 1)
            case sensitivity.ATTACK:
                found += sensitivity.findings(training, question.seed)
                on_step(attack, 1, 1)
            case canaries.ATTACK:
                found += question.clients.findings(
                    training, lambda done, of: on_step(canaries.ATTACK, done, of)
                )
            case records.ATTACK:
                few = min(question.canaries, 25 * training.data.clients)
                found += OneRunAudit(max(50, few), question.seed).findings(
                    training, lambda done, of: on_step(records.ATTACK, done, of)
                )
    if not found:
        raise BadInput(
            f"--attacks {','.join(question.attacks)}: none of them is for {run.claims[0].short}"
        )
    return Audited(run, tuple(replace(each, alarm=ALARM / len(found)) for each in found))
