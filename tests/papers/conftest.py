"""What several papers' tests need."""

import re

import pytest

TERMS = r"at delta \S+ per (client|record|weight)[^()]*\([a-z-]+, [a-z]+ trust"


@pytest.fixture(scope="session")
def check_epsilons():
    """No epsilon of a page is bare: headings say what theirs mean, the page what the rest do."""

    def check(page):
        for table in page.tables:
            for header in table.headers:
                if "epsilon" in header and "delta" not in table.headers:
                    assert re.search(rf"epsilon\b.* {TERMS}", header), header
        if re.search(rf"epsilon (= |> |< )?\d(?!\S* {TERMS})", page.markdown()):
            assert any(re.search(rf"[Ee]psilon.* {TERMS}", said) for said in page.setting_names)

    return check
