"""The glossary at the end of a page: as much of it as the page's claims use."""

from collections.abc import Sequence

from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.runs.glossary import terms_of
from fedveil.web.html import Markup
from fedveil.web.page import facts, section


def words_section(claims: Sequence[PrivacyClaim]) -> Markup | None:
    """What the words of the claims mean; None if nothing is claimed."""
    used = terms_of(claims)
    if not used:
        return None
    return section("The words used here", facts({t.name: t.means for t in used}), id="words")
