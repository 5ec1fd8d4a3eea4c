"""The summary row of an audit: the best of each kind of attack, beside the claim."""

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_FLOOR

from fedveil.audit import inversion, membership, white_box
from fedveil.audit import property as properties
from fedveil.audit.findings import SHOWN, Finding, Leak, Measure
from fedveil.audit.roc import AUC, tpr_at
from fedveil.privacy.accounting.claims import PrivacyClaim, rendered

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
        COLUMNS[0]: _best(covered, membership.ATTACK, AUC),
        COLUMNS[1]: _best(covered, membership.ATTACK, tpr_at(FEW_ALARMS)),
        COLUMNS[2]: _best(covered, white_box.ATTACK, AUC),
        COLUMNS[3]: _best(covered, properties.ATTACK, AUC),
        COLUMNS[4]: _best(covered, inversion.ATTACK, "PSNR", " dB"),
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
