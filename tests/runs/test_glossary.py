"""One text for each word: in the terminal, in reports and in docs/glossary.md."""

import math
import re
from itertools import product
from pathlib import Path

import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.claims import (
    Accountant,
    NoiseSource,
    PrivacyClaim,
    Relation,
    Trust,
    Unit,
)
from fedveil.privacy.accounting.meaning import right_guesses
from fedveil.runs.glossary import find_term, look_up, page, terms, terms_line, terms_of

DOCS = Path(__file__).parents[2] / "docs"
WRITE = "python -m fedveil.runs.glossary > docs/glossary.md"


def claim(**changed):
    told = {
        "epsilon": 8.0,
        "delta": 1e-5,
        "unit": Unit.CLIENT,
        "neighbours": Relation.ZERO_OUT,
        "trust": Trust.CENTRAL,
        "accountant": Accountant.PLD,
        "noise": NoiseSource.SEEDED,
    }
    return PrivacyClaim(**{**told, **changed})


def test_the_page_in_docs_is_the_one_that_is_written():
    written = (DOCS / "glossary.md").read_text(encoding="utf-8")
    assert written == page(), f"docs/glossary.md is out of date: run {WRITE}"
    assert WRITE in written


def test_every_term_is_there_once_with_pages_that_exist():
    names = [name.lower() for term in terms() for name in (term.name, *term.also)]
    assert len(names) == len(set(names))
    for term in terms():
        assert term.means.isascii()
        assert term.means.endswith(".")
        assert all((DOCS / name).is_file() for name in term.see), term.name


def test_every_word_of_every_claim_has_a_term():
    for unit, relation, trust, accountant, noise in product(
        Unit, Relation, Trust, Accountant, NoiseSource
    ):
        published = accountant is Accountant.PUBLISHED
        told = claim(
            unit=unit,
            neighbours=relation,
            trust=trust,
            accountant=accountant,
            noise=noise,
            as_published=published,
        )
        names = [term.name for term in terms_of([told])]
        counted = "as published" if published else accountant
        wanted = {"epsilon", "delta", unit, relation, f"{trust} trust", counted, f"{noise} noise"}
        assert {name.lower() for name in names} == wanted


def test_a_label_has_a_term_too():
    names = [term.name for term in terms_of([claim(vouched=False)])]
    assert "not vouched for" in names


def test_a_line_without_claims_is_empty():
    assert terms_line([]) == terms_line(["nothing is claimed"]) == ""


def test_the_shares_of_right_guesses_are_those_of_the_claims():
    """Rounded up, as everywhere."""
    means = find_term("epsilon").means
    said = re.findall(r"(\d+\.\d+)(?: times in 100)? at (?:epsilon )?(\d)", means)
    assert len(said) == 3
    for share, epsilon in said:
        exact = 100 * right_guesses(claim(epsilon=float(epsilon), delta=0.0))
        digits = len(share.partition(".")[2])
        assert math.isclose(float(share), math.ceil(exact * 10**digits) / 10**digits)


def test_the_table_of_what_epsilon_means_is_that_of_the_claims():
    text = (DOCS / "epsilon.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.,]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 9
    for epsilon, factor, guesses in rows:
        exact = 100 * right_guesses(claim(epsilon=float(epsilon), delta=0.0))
        assert exact <= float(guesses) <= exact + 0.1
        odds = float(factor.replace(",", ""))
        assert math.exp(float(epsilon)) <= odds < 1.01 * math.exp(float(epsilon))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("zero-out", "zero-out"),
        ("Zero Out", "zero-out"),
        ("pld", "PLD"),
        ("LOCAL", "local trust"),
        ("privacy_loss_distribution", "PLD"),
    ],
)
def test_a_term_is_found_however_it_is_spelt(name, found):
    term, part = look_up(name)
    assert (term.name, part) == (found, None)


def test_a_word_that_is_a_term_and_a_section_is_both():
    term, part = look_up("client")
    assert (term.name, part.section) == ("client", "client")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("zeroout", "'zeroout' is no term: did you mean zero-out?"),
        ("clpi", "unknown key clpi: did you mean clip?"),
        ("zzz", "unknown key zzz: fedveil explain lists all sections"),
        ("", "unknown key '': fedveil explain lists all sections"),
    ],
)
def test_what_is_no_word_is_refused_with_the_nearest(name, error):
    with pytest.raises(BadInput) as refused:
        look_up(name)
    assert str(refused.value) == error


def test_a_report_defines_the_words_of_its_claims_and_no_others():
    terms = {term.name for term in terms_of([claim()])}
    assert "zero-out" in terms
    assert "replace" not in terms
    assert terms_of([]) == []
