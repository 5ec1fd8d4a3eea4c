"""The sentences and labels of pages: all of them are shown somewhere, and none is missing."""

import re
from pathlib import Path

import fedveil
from fedveil.pages.html import TEXTS
from fedveil.privacy.accounting.claims import Trust


def test_every_text_is_on_a_page():
    sources = Path(fedveil.__file__).parent.rglob("*.py")
    used = {
        name for p in sources for name in re.findall(r"TEXTS\[['\"](\w+)", p.read_text("utf-8"))
    }
    assert set(TEXTS) <= used


def test_every_kind_of_trust_has_words():
    assert set(TEXTS["trusted"]) == set(Trust)
