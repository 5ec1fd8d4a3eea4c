"""A gauge says in words what it shows, and is full and empty where it should be."""

import math
import re

import pytest

from fedveil.pages.charts import gauge


def arc(share):
    text = str(gauge("g", "Left", "said", share, "3"))
    found = re.search(r'class="filled" d="M16.0 104.0A84 84 0 0 1 ([\d.]+) ([\d.]+)"', text)
    return text, None if found is None else (float(found[1]), float(found[2]))


@pytest.mark.parametrize(
    ("share", "end"), [(1.0, (184, 104)), (0.5, (100, 20)), (2.0, (184, 104)), (0.0, None),
                       (-1.0, None), (math.nan, None), (math.inf, None)],
)  # fmt: skip
def test_the_ring_goes_as_far_as_the_share(share, end):
    assert arc(share)[1] == (None if end is None else pytest.approx(end, abs=0.1))


def test_it_is_named_and_described_and_text_is_text():
    text = str(gauge("g", "<b>", "said & done", 0.5, "3", "<i>"))
    assert 'role="img" aria-labelledby="g-title" aria-describedby="g-said"' in text
    assert "said &amp; done" in text
    assert "<b>" not in text
    assert "<i>" not in text
