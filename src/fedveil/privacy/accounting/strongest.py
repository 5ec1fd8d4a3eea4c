"""Which of several claims is the strongest promise, in one sentence, or why that cannot be said."""

from collections.abc import Mapping

from fedveil.privacy.accounting.claims import PrivacyClaim

_DIFFERENCES = {
    "unit": "the epsilons protect different units",
    "neighbours": "the epsilons use different definitions of neighbouring data sets",
    "trust": "the runs trust different parties",
    "delta": "the epsilons are at different deltas",
    "holds_for": "the epsilons hold for different clients",
    "covers": "the epsilons cover different releases",
    "noise": "a run with seeded noise is a simulation",
}
"""Why claims that differ in an attribute cannot be compared, the most important first."""


def strongest_promise(claims: Mapping[str, PrivacyClaim | None]) -> str:
    """Return a sentence on which claim is the strongest promise, or on why that cannot be said.

    Epsilons are compared only if all claims are guarantees with the same unit, neighbours, trust,
    delta and source of noise, for the same clients and releases. The smallest is then the
    strongest.

    Args:
        claims: The headline claim of each of two or more runs by name, None if it claims nothing.
    """
    guarantees = {
        name: claim
        for name, claim in claims.items()
        if claim is not None and claim.vouched and not claim.as_published
    }
    if not guarantees:
        return "None of these runs gives a guarantee, so no promise is the strongest."
    if len(guarantees) == 1:
        return f"Only {next(iter(guarantees))} gives a guarantee: its promise is the strongest."
    reason = _why_not_comparable(claims, guarantees)
    if reason:
        return f"The promises cannot be compared: {reason}."
    ranked = sorted(guarantees, key=lambda name: guarantees[name].epsilon)
    first, others = guarantees[ranked[0]], ranked[1:]
    equal = [name for name in others if guarantees[name].rounded_epsilon == first.rounded_epsilon]
    if len(equal) == len(others):
        return f"The promises are equally strong: {first.short} each."
    weaker = [name for name in others if name not in equal]
    rest = " and ".join(f"{guarantees[name].rounded_epsilon} of {name}" for name in weaker)
    if equal:
        names = " and ".join([ranked[0], *equal])
        return f"{names} make the strongest promise: {first.short}, against {rest}."
    degree = "stronger" if len(others) == 1 else "strongest"
    return f"{ranked[0]} makes the {degree} promise: {first.short}, against {rest}."


def _why_not_comparable(
    claims: Mapping[str, PrivacyClaim | None], guarantees: Mapping[str, PrivacyClaim]
) -> str:
    """Return why epsilons cannot be compared, with the values that differ, or ""."""
    for name, claim in claims.items():
        if claim is None:
            return f"{name} claims nothing"
        if name not in guarantees:
            return f"the epsilon of {name} is not a guarantee"
    for attribute, reason in _DIFFERENCES.items():
        values = dict.fromkeys(str(getattr(claim, attribute)) for claim in guarantees.values())
        if len(values) > 1:
            return f"{reason} ({' and '.join(values)})"
    return ""
