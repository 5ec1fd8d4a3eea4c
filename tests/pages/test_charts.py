"""Charts hold what they show: as a picture, in words, and as numbers."""

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fedveil.pages.charts import Chart, Line, figure
from fedveil.pages.heat_map import HeatMap, heat_figure

HOSTILE = "<b>\"x\" & 'y'</b>"


def chart(*lines, **options):
    return Chart(id="c", title="Title", x_label="round", y_label="loss", lines=lines, **options)


def parsed(markup):
    """Well-formed, as XML at that."""
    return ElementTree.fromstring(str(markup))


def paths(root, kind):
    return [e.get("d") for e in root.iter("path") if kind in e.get("class", "").split()]


def test_a_chart_is_named_described_and_has_its_numbers():
    root = parsed(figure(chart(Line("loss", [(0, 2.0), (1, 1.5), (2, 0.25)]))))
    svg = root.find("svg")
    assert svg.get("role") == "img"
    named = {e.get("id"): e.text for e in svg if e.tag in ("title", "desc")}
    assert named[svg.get("aria-labelledby")] == "Title"
    assert "from 2 to 0.25, between 0.25 and 2" in named[svg.get("aria-describedby")]
    cells = [[c.findtext("data") or c.text for c in row] for row in root.iter("tr")]
    assert cells == [["round", "loss"], ["0", "2"], ["1", "1.5"], ["2", "0.25"]]
    assert {"round", "loss"} <= {e.text for e in svg.iter("text")}


def test_a_step_rises_before_it_goes_along():
    root = parsed(
        figure(chart(Line("spent", [(0, 0.0), (1, 1.0), (2, 3.0)], "step"), from_zero=True))
    )
    (path,) = paths(root, "line")
    places = [tuple(map(float, p.split())) for p in re.findall(r"[ML]([^ML]+)", path)]
    xs, ys = zip(*places, strict=True)
    assert xs[0] == xs[1] < xs[2] == xs[3] < xs[4]
    assert ys[0] > ys[1] == ys[2] > ys[3] == ys[4]  # upwards is less


def test_several_lines_have_a_legend_other_colours_and_other_shapes():
    lines = [Line(f"run {k}", [(0, k), (1, k)]) for k in range(3)]
    root = parsed(figure(chart(*lines)))
    assert [li.find("svg").tail for li in root.iter("li")] == ["run 0", "run 1", "run 2"]
    classes = {e.get("class") for e in root.iter("path") if "line" in e.get("class", "")}
    assert classes == {"line s0", "line s1", "line s2"}
    assert parsed(figure(chart(lines[0]))).find(".//li") is None


def test_lines_of_one_name_keep_their_columns_apart():
    root = parsed(figure(chart(Line("a", [(0, 1.0)]), Line("a", [(0, 2.0)]))))
    assert [th.text for th in root.iter("th")][:3] == ["round", "a (1)", "a (2)"]


def test_an_interval_that_leaves_a_log_axis_has_no_cap_there():
    line = Line("loss", [(1, 1.0), (2, 1.0)], "line", [0.5, 2.0])
    inside, outside = paths(parsed(figure(chart(line, log_y=True))), "interval")
    assert inside.count("h8") == 2
    assert outside.count("h8") == 1
    assert "1 +- 0.5" in str(figure(chart(line)))


def test_an_axis_says_that_it_is_logarithmic_where_it_is():
    line = Line("loss", [(1, 1.0), (10, 100.0)])
    for log, names in ((True, {"round, log scale", "loss, log scale"}), (False, {"round", "loss"})):
        root = parsed(figure(chart(line, log_x=log, log_y=log)))
        assert names <= {e.text for e in root.iter("text")}


def test_an_interval_does_not_draw_a_loss_below_zero():
    wide = Line("loss", [(1, 10.0), (2, 2.0)], "line", [60.0, 1.0])
    for points, negative in (([(1, 10.0), (2, 2.0)], False), ([(1, 10.0), (2, -2.0)], True)):
        root = parsed(figure(chart(replace(wide, points=points))))
        ticks = [e.text for e in root.iter("text") if e.get("class") == "end"]
        assert any(tick.startswith("-") for tick in ticks) == negative


def test_a_level_and_places_that_are_no_numbers():
    line = Line("a", [(0, 1.0), (1, 2.0)])
    root = parsed(figure(chart(line, levels=[("budget", 4.0)], x_names=["yes", "no"])))
    texts = {e.text for e in root.iter("text")}
    assert {"budget", "yes", "no"} <= texts


def test_nothing_to_draw_is_a_sentence():
    assert "nothing to draw" in str(figure(chart(Line("a", []))))


def test_long_series_are_short_and_keep_their_extremes():
    points = [(float(x), math.sin(x)) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    text = str(figure(chart(Line("a", points))))
    assert len(text) < 150_000
    assert "<td>99</td>" in text


def test_hostile_names_are_text():
    line = Line(HOSTILE, [(0, 1.0), (1, 2.0)])
    whole = Chart(
        id="c", title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE, lines=[line, line], note=HOSTILE,
        levels=[(HOSTILE, 1.0)], x_names=[HOSTILE, "b"],
    )  # fmt: skip
    assert "<b>" not in str(figure(whole))
    parsed(figure(whole))


def heat(cells, **options):
    columns = [f"c{k}" for k in range(len(cells[0]))]
    rows = [f"r{k}" for k in range(len(cells))]
    return HeatMap(
        id="h", title="Heat", x_label="T", y_label="E", quantity="loss", column_names=columns,
        row_names=rows, cell_values=cells, **options,
    )  # fmt: skip


def test_a_heat_map_has_a_number_in_every_cell_and_marks_the_best():
    root = parsed(heat_figure(heat([[1.0, 100.0], [math.inf, math.nan]], best_cell=(0, 0))))
    texts = [e.text for e in root.find("svg").iter("text")]
    assert {"1", "100", "diverged", "c0", "r1"} <= set(texts)
    rects = list(root.iter("rect"))
    assert [r.get("class") for r in rects] == ["best", None, "blank", "blank"]
    assert rects[0].get("fill") != rects[1].get("fill")
    assert "not tried" in str(heat_figure(heat([[1.0, math.nan]])))


@pytest.mark.parametrize("cells", [[[math.nan]], [[math.inf]]])
def test_a_heat_map_of_nothing(cells):
    assert "Nothing was found" in str(heat_figure(heat(cells)))


def contrast(fill, bright):
    """Of the number on its cell, as WCAG computes it."""

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    a, b = sorted((light(fill), light("#ffffff" if bright else "#000000")), reverse=True)
    return (a + 0.05) / (b + 0.05)


def test_numbers_can_be_read_on_every_shade():
    cells = [[1 + k / 10 for k in range(60)]]
    svg = parsed(heat_figure(heat(cells))).find("svg")
    fills = [r.get("fill") for r in svg.iter("rect")]
    tones = [
        t.get("class") for t in svg.iter("text") if (t.get("class") or "").startswith("middle ")
    ]
    for fill, tone in zip(fills, tones, strict=True):
        assert contrast(fill, "bright" in tone) >= 4.5, fill
