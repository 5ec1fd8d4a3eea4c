"""Panels: where intervals end, what marks at the frame mean, and levels that keep apart."""

import io
import math

import pytest
from matplotlib.markers import CARETDOWN
from matplotlib.text import Text

from fedveil.tuning.figures import (
    COLOURS,
    PERCENT,
    Panel,
    Series,
    canvas,
    draw,
    series_of_means,
    stroke,
)
from fedveil.tuning.repetitions import Mean


def series(*means, name="a", number=0):
    return Series(name, [float(k + 1) for k in range(len(means))], means, stroke(number))


def said(figure):
    return figure.texts[1].get_text().replace("\n", " ")


def marks(at, marker):
    return [
        tuple(map(tuple, line.get_xydata())) for line in at.lines if line.get_marker() == marker
    ]


def whiskers(at):
    return [[tuple(map(float, spot)) for spot in part] for part in at.collections[0].get_segments()]


def test_an_interval_ends_where_its_numbers_do():
    panel = Panel([series(Mean(90.0, 30.0, 3), Mean(50.0, 5.0, 3))], "x", "%", within=PERCENT)
    (at,) = draw("Title", [], [panel]).axes
    assert whiskers(at) == [[(1.0, 60.0), (1.0, 100.0)], [(2.0, 45.0), (2.0, 55.0)]]
    assert at.get_ylim()[1] < 105


def test_an_interval_below_a_log_axis_has_an_arrow_at_the_frame_and_the_figure_says_so():
    panel = Panel([series(Mean(10.0, 20.0, 3), Mean(100.0, 5.0, 3))], "x", "y", log_y=True)
    figure = draw("Title", [], [panel])
    (at,) = figure.axes
    bottom = at.get_ylim()[0]
    assert 0 < bottom < 10
    assert whiskers(at)[0] == [(1.0, bottom), (1.0, 30.0)]
    assert ((1.0, bottom),) in marks(at, CARETDOWN)
    assert "Arrow: the interval goes on below the axis." in said(figure)


def test_what_diverged_is_a_cross_at_the_top_and_no_point():
    panel = Panel([series(Mean(1.0, 0.1, 2), Mean(math.inf, math.nan, 2, 1))], "x", "y")
    figure = draw("Title", [], [panel])
    (at,) = figure.axes
    assert ((2.0, at.get_ylim()[1]),) in marks(at, "x")
    assert math.isnan(next(line for line in at.lines if line.get_label() == "a").get_ydata()[1])
    assert said(figure).endswith("95 % interval. Cross at the top: diverged.")


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((1, 1), "One run each: nothing is known of the spread."),
        ((3, 3), "Means of 3 repetitions; whiskers: 95 % interval."),
        ((3, 5), "Means of 3 or 5 repetitions; whiskers: 95 % interval."),
    ],
)
def test_a_figure_says_how_often_it_was_repeated(counts, words):
    means = [Mean(1.0, math.nan if count == 1 else 0.1, count) for count in counts]
    assert (
        said(draw("Title", ["Setting."], [Panel([series(*means)], "x", "y")]))
        == f"Setting. {words}"
    )


def test_names_of_near_levels_share_a_place_and_others_do_not():
    levels = {"one": 50.0, "two": 50.1, "three": 90.0}
    (at,) = draw("T", [], [Panel([series(Mean(0.0, 1.0, 2))], "x", "y", levels=levels)]).axes
    shares = [at.transLimits.transform((0.0, level))[1] for level in (50.05, 90.0)]
    assert [text.get_text() for text in at.texts] == ["two,\none", "three"]
    assert [text.xy[1] for text in at.texts] == pytest.approx(shares)
    assert sum(tuple(line.get_xdata()) == (0, 1) for line in at.lines) == 3


def test_one_line_needs_no_legend_and_thirteen_can_be_told_apart_in_grey():
    looks = {f"line {k}": stroke(k) for k in range(13)}
    assert not canvas("T", [], (4.0, 3.0), {"only": stroke(0)}).legends
    (legend,) = canvas("T", [], (6.4, 3.0), looks).legends
    assert [text.get_text() for text in legend.get_texts()] == list(looks)
    assert len({look.marker for look in looks.values()}) == 13
    assert len({stroke(k).colour for k in range(8)}) == len(COLOURS) == 8


def test_dollars_are_no_formula():
    """A recipe's name is a figure's title, and values of an axis name its lines."""
    name = r"$\frac{$ and $x^"
    means = [Mean(0.0, 1.0, 2)]
    lines = [series(*means, name=f"{name} {k}", number=k) for k in range(2)]
    figure = draw(name, [name], [Panel(lines, name, name, name, levels={name: 0.5})])
    figure.savefig(io.BytesIO(), format="png", dpi=20)
    shown = [text for text in figure.findobj(Text) if name in text.get_text().replace("\n", " ")]
    assert len(shown) == 8
    assert not any(text.get_parse_math() for text in shown)


def test_lines_by_name_have_strokes_of_their_own():
    found = series_of_means({"a": [Mean(1.0, 0.1, 2)], "b": [Mean(2.0, 0.1, 2)]}, [1.0])
    assert [line.look for line in found] == [stroke(0), stroke(1)]
