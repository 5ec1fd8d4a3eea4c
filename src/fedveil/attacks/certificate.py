"""The certificate of client-level DP against poisoning: k attackers are a group of k clients.

Whoever changes k clients changes the distribution of the released model by at most what group
privacy says, so the expected value of anything between 0 and 1, such as the rate at which a
backdoor works, differs by at most that from what it is without them (Xie et al. 2023).
"""

import math

from fedveil.privacy.accounting.claims import PrivacyClaim, Trust, Unit

BASE_RATE = 0.01
"""The share of records on which a backdoor is assumed to work without attackers, if that was not
measured."""

_USEFUL = 0.99
_MOST = 1000


def group(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """(epsilon, delta) for a group of `size` = k neighbours, by group privacy.

    The epsilon is k eps, the delta delta (e^(k eps) - 1) / (e^eps - 1), at most 1.

    >>> group(0.5, 1e-5, 1)
    (0.5, 1e-05)
    """
    if epsilon == 0:
        return 0.0, min(1.0, size * delta)
    if size * epsilon > 700:
        return size * epsilon, 1.0
    return size * epsilon, min(1.0, delta * math.expm1(size * epsilon) / math.expm1(epsilon))


def bound(claim: PrivacyClaim, size: int, rate: float) -> float:
    """The largest expected rate, such as a backdoor's, that `size` attackers can reach. At most 1.

    `claim` must be about whole clients, which is not checked. `rate` is the expected rate without
    attackers. With the (eps, d) of a group of `size`, both directions of DP are used: rate' <=
    exp(eps) rate + d, and 1 - rate' >= (1 - rate - d) exp(-eps).
    """
    epsilon, delta = group(claim.epsilon, claim.delta, size)
    if epsilon > 700:
        return 1.0
    up = math.exp(epsilon) * rate + delta
    down = 1 - max(0.0, (1 - rate - delta) * math.exp(-epsilon))
    return min(1.0, up, down)


def certificate(claim: PrivacyClaim | None, rate: float) -> tuple[int, float] | None:
    """(The largest number of attackers, up to 1000, whose bound is 0.99 or less, and this bound).

    None if one attacker already reaches more, without a claim, and for claims that are not about
    whole clients or are as published, which are no guarantee. `rate` is the rate without attackers.
    """
    if claim is None or claim.unit is not Unit.CLIENT or claim.as_published:
        return None
    found = None
    for size in range(1, _MOST + 1):
        most = bound(claim, size, rate)
        if most > _USEFUL:
            break
        found = size, most
    return found


def in_words(claim: PrivacyClaim | None, rate: float, *, drawn: bool) -> str:
    """The certificate as a sentence, or the reason why nothing is certified. No full stop.

    `rate` is the rate without attackers. `drawn` is whether attackers take part only when they are
    drawn, as the claim assumes.
    """
    if claim is None:
        return "nothing is claimed, so nothing is certified against poisoning"
    if claim.unit is not Unit.CLIENT or claim.as_published:
        return "no claim about whole clients, so nothing is certified against poisoning"
    if not drawn:
        return (
            "attackers join rounds uninvited, which no claim about sampled clients covers: nothing "
            "is certified against them (attack.present = false attacks when drawn)"
        )
    found = certificate(claim, rate)
    noise = "" if claim.trust is Trust.CENTRAL else " that add their own noise"
    if found is None:
        return (
            f"{claim.short} certifies nothing against poisoning: even one attacker may raise an "
            f"expected rate of {rate:.2f} to {bound(claim, 1, rate):.2f}"
        )
    attackers, most = found
    some = "1 attacker" if attackers == 1 else f"{attackers} attackers"
    return (
        f"{claim.short} certifies something for at most {some}{noise}: an expected rate of "
        f"{rate:.2f} without them is at most {most:.2f} with them"
    )
