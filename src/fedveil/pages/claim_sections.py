"""The claim on a page: first a sentence, then what it means, then every reading in full."""

from collections.abc import Sequence

from fedveil.pages.html import (
    TEXTS,
    Content,
    Markup,
    bullet_list,
    capitalize_first,
    definition_list,
    section,
    table,
    tag,
)
from fedveil.privacy.accounting.claims import PrivacyClaim, Unit
from fedveil.privacy.accounting.meaning import Meaning, Strength, counting, right_guesses


def claim_box(meaning: Meaning) -> Markup:
    """Return a box with the claim as a sentence, its strength, its warnings and its terms."""
    weak = meaning.strength in (Strength.NONE, Strength.NOTHING, Strength.WEAK)
    parts: list[Content] = [tag("p", meaning.sentence)]
    if meaning.worth:
        parts.append(tag("p", meaning.worth, class_="warn" if weak else None))
    parts += [tag("p", warning) for warning in meaning.warnings]
    if meaning.claim is not None:
        parts.append(tag("p", f"In full: {meaning.claim}.", class_="sub"))
    return tag("div", *parts, class_="claim weak" if weak else "claim")


def claim_tiles(claim: PrivacyClaim | None) -> list[tuple[str, str]]:
    """Return the tiles (value, label) of a claim: epsilon, delta, unit, and whom one trusts.

    Without a claim, two tiles say that nothing is promised and that everybody has to be trusted.
    """
    if claim is None:
        return [("nothing", "is promised: there is no epsilon"), ("everybody", "has to be trusted")]
    label = "epsilon as published, not a guarantee" if claim.as_published else "epsilon, at most"
    if claim.covers != "updates":
        label += f", of {claim.covers}"
    whose = "" if claim.holds_for == "everyone" else f", {claim.holds_for}"
    return [
        (claim.rounded_epsilon, label),
        (f"{claim.delta:g}", "delta"),
        (f"one {claim.unit}", f"is protected{whose} (neighbours: {claim.neighbours})"),
        (TEXTS["trusted"][claim.trust], f"has to be trusted ({claim.trust} trust)"),
    ]


def meaning_section(meaning: Meaning, outside: Sequence[str]) -> Markup:
    """Return the section "What this means": whom the claim protects, from whom and on what terms.

    Args:
        meaning: The meaning of the run's claims.
        outside: Sentences on numbers of this page that the claim does not cover.
    """
    claim = meaning.claim
    if claim is None:
        return section("What this means", tag("p", meaning.trusted), id="meaning")
    pairs: dict[str, Content] = {
        "Whom it is about": meaning.unit,
        "Whom one has to trust": meaning.trusted,
        "What an attacker tries to find out": f"{capitalize_first(meaning.worlds)}.",
    }
    if meaning.factor:
        pairs["How far at most"] = meaning.factor
    parts: list[Content] = []
    if meaning.odds:
        parts.append(table(meaning.odds, "What an attacker can find at most", numbers=True))
    # the epsilon for several units of one person is not that of one times their number
    several = meaning.several()
    if several:
        terms = f"at delta {claim.delta:g} for several {meaning.units_name}"
        caption = f"Epsilon {terms} ({claim.neighbours}, {claim.trust} trust)"
        parts.append(tag("h3", f"Several {meaning.units_name}"))
        parts.append(table(several, caption, numbers=True))
    elif meaning.several_unknown:
        parts.append(tag("p", meaning.several_unknown))
    return section(
        "What this means",
        definition_list(pairs),
        *parts,
        tag("h3", "It holds under these conditions"),
        bullet_list(claim.assumptions),
        tag("h3", "It does not cover"),
        bullet_list([*meaning.uncovered, *outside]),
        id="meaning",
    )


def readings_section(claims: Sequence[PrivacyClaim]) -> Markup | None:
    """Return the section with one row per claim: its trust, what it covers, and its standing.

    None without claims."""
    if not claims:
        return None
    first = counting(claims)
    rows: list[dict[str, Content]] = []
    for claim in claims:
        guesses, standing = "no bound", "not vouched for"
        if claim.as_published:
            standing = "as published, not a guarantee"
        elif claim.vouched:
            share = 100 * right_guesses(claim)
            guesses = f"{share:.4g} in 100" if share < 99.995 else "100 in 100"
            standing = "a guarantee, and the one that counts" if claim is first else "a guarantee"
            if claim.condition:
                standing = "smaller, on a condition"
        rows.append(
            {
                "reading": f"{claim}",
                "whom one trusts": TEXTS["trusted"][claim.trust],
                "holds for": claim.holds_for,
                "covers": claim.covers,
                "right guesses at most": guesses,
                "standing": standing,
            }
        )
    several = len({(claim.trust, claim.unit) for claim in claims}) > 1
    note = None
    if several and any(claim.unit is Unit.WEIGHT for claim in claims):
        note = tag("p", TEXTS["readings"].format(count=len(claims)))
    full = table(rows, "Every account of what was released", wide=True)
    return section("The claim in full", note, full, id="claims")
