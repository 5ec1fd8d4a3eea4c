"""Long series lose points, and no extreme."""

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fedveil.pages.charts import thin
from fedveil.pages.run_report import RunContents

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400)


@given(values, st.integers(1, 20))
def test_every_stretch_keeps_its_extremes_and_its_ends(ys, most):
    points = list(enumerate(ys))
    kept = thin(points, most)
    assert len(kept) <= max(4 * most, len(points) if len(points) <= 4 * most else 0)
    assert kept == sorted(set(kept))
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    if len(points) > 4 * most:
        for k in range(most):
            part = points[k * len(points) // most : (k + 1) * len(points) // most]
            here = [y for x, y in kept if part[0][0] <= x <= part[-1][0]]
            heights = [y for _, y in part]
            assert (min(here), max(here)) == (min(heights), max(heights))


def test_short_series_stay_as_they_are():
    points = [(float(x), 0.0) for x in range(800)]
    assert thin(points) == points


def test_what_is_not_finite_is_not_drawn():
    rows = [(0, 1.0), (1, None), (2, math.nan), (3, math.inf), (4, 2.0)]
    history = [{"round": round, "loss": loss} for round, loss in rows]
    contents = RunContents(Path("run"), "", [*history, {"round": 5}], {})
    assert contents.points("loss") == [(0.0, 1.0), (4.0, 2.0)]
    assert contents.points("round", "loss") == [(1.0, 0), (2.0, 4)]
