"""The claim on a page: first a sentence, then what it means, then every reading in full."""

from collections.abc import Sequence

from fedveil.privacy.accounting.claims import PrivacyClaim, Trust, Unit
from fedveil.privacy.accounting.meaning import Meaning, Strength, counting, right_guesses
from fedveil.runs.glossary import terms_of
from fedveil.web.html import Content, Markup, tag
from fedveil.web.layout import facts, listed, section, table

_READINGS = (
    "The same reports, read in {count} ways. Which one is yours depends on whom you trust and whom "
    "it is about. The first that is a guarantee counts; the epsilon of one weight in one round is "
    "the number that the paper publishes, and protects nobody."
)

_TRUSTED = {
    Trust.CENTRAL: "the server",
    Trust.LOCAL: "nobody",
    Trust.CURATOR: "a curator",
    Trust.SHUFFLED: "a shuffler",
}


def claim_box(meaning: Meaning) -> Markup:
    """The sentence, how much of a promise it is, and the claim in the field's own words."""
    weak = meaning.strength in (Strength.NONE, Strength.NOTHING, Strength.WEAK)
    said: list[Content] = [tag("p", meaning.sentence)]
    if meaning.worth:
        said.append(tag("p", meaning.worth, class_="warn" if weak else None))
    said += [tag("p", warning) for warning in meaning.warnings]
    if meaning.claim is not None:
        said.append(tag("p", f"In full: {meaning.claim}.", class_="sub"))
    return tag("div", *said, class_="claim weak" if weak else "claim")


def meaning_section(meaning: Meaning, outside: Sequence[str]) -> Markup:
    """Whom it protects, from whom, under which conditions, and what it leaves open.

    `outside` is what this page itself shows and the claim does not cover.
    """
    if meaning.claim is None:
        return section("What this means", tag("p", meaning.trusted), id="meaning")
    pairs: dict[str, Content] = {
        "Whom it is about": meaning.unit,
        "Whom one has to trust": meaning.trusted,
        "What an attacker tries to find out": f"{meaning.worlds[:1].upper()}{meaning.worlds[1:]}.",
    }
    if meaning.factor:
        pairs["How far at most"] = meaning.factor
    odds = None
    if meaning.odds:
        odds = table(meaning.odds, "What an attacker can find at most", numbers=True)
    return section(
        "What this means",
        facts(pairs),
        odds,
        *_several(meaning),
        tag("h3", "It holds under these conditions"),
        listed(meaning.claim.assumptions),
        tag("h3", "It does not cover"),
        listed([*meaning.uncovered, *outside]),
        id="meaning",
    )


def _several(meaning: Meaning) -> list[Content]:
    """The epsilon for several units of one person, which is not that of one times their number."""
    claim, rows = meaning.claim, meaning.several()
    if claim is None or not rows:
        return [tag("p", meaning.several_unknown)] if meaning.several_unknown else []
    caption = (
        f"Epsilon at delta {claim.delta:g} for several {claim.unit}s of one person "
        f"({claim.neighbours}, {claim.trust} trust)"
    )
    return [tag("h3", f"Several {claim.unit}s of one person"), table(rows, caption, numbers=True)]


def readings_section(claims: Sequence[PrivacyClaim]) -> Markup | None:
    """All claims side by side, each with everything that its epsilon means nothing without."""
    if not claims:
        return None
    first = counting(claims)
    rows: list[dict[str, Content]] = [
        {
            "reading": f"{claim}",
            "whom one trusts": _TRUSTED[claim.trust],
            "holds for": claim.holds_for,
            "covers": claim.covers,
            "right guesses at most": _guesses(claim),
            "standing": _standing(claim, counts=claim is first),
        }
        for claim in claims
    ]
    several = len({(claim.trust, claim.unit) for claim in claims}) > 1
    note = tag("p", _READINGS.format(count=len(claims))) if _weights(claims) and several else None
    full = table(rows, "Every account of what was released", wide=True)
    return section("The claim in full", note, full, id="claims")


def words_section(claims: Sequence[PrivacyClaim]) -> Markup | None:
    """The glossary's terms in these claims, or None if nothing is claimed."""
    used = terms_of(claims)
    if not used:
        return None
    return section("The words used here", facts({t.name: t.means for t in used}), id="words")


def _weights(claims: Sequence[PrivacyClaim]) -> bool:
    return any(claim.unit is Unit.WEIGHT for claim in claims)


def _guesses(claim: PrivacyClaim) -> str:
    if claim.as_published or not claim.vouched:
        return "no bound"
    share = 100 * right_guesses(claim)
    return f"{share:.4g} in 100" if share < 99.995 else "100 in 100"


def _standing(claim: PrivacyClaim, *, counts: bool) -> str:
    if claim.as_published:
        return "as published, not a guarantee"
    if not claim.vouched:
        return "not vouched for"
    if claim.condition:
        return "smaller, on a condition"
    return "a guarantee, and the one that counts" if counts else "a guarantee"
