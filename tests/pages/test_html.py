"""Whatever is not markup is text, wherever it stands."""

import pytest

from fedveil.pages.html import Markup, concatenate, tag

HOSTILE = "<script>alert(1)</script>\"' onload=x & </style>"


def test_content_and_attributes_are_escaped():
    text = str(tag("p", HOSTILE, title=HOSTILE))
    assert text.count("<") == 2
    assert text.count('"') == 2
    assert "&lt;script&gt;" in text


def test_markup_stays_and_lists_are_concatenate():
    assert str(tag("ul", [tag("li", 1), [tag("li", "a"), None]])) == "<ul><li>1</li><li>a</li></ul>"
    assert str(concatenate(["<", Markup("<br>"), True])) == "&lt;<br>yes"


def test_attributes_are_left_out_or_alone():
    text = str(tag("p", class_="a", hidden=True, id=None, tabindex=0, lang=False, width=1.5))
    assert text == '<p class="a" hidden tabindex="0" width="1.5"></p>'


@pytest.mark.parametrize("name", ["script", "style", "iframe", "p onclick=x", "", "a><b", "OBJECT"])
def test_elements_that_run_something_or_are_no_words_are_refused(name):
    with pytest.raises(ValueError, match="the element"):
        tag(name)


@pytest.mark.parametrize("name", ["onclick", "ONLOAD", "style", "srcdoc", "a b", 'x"'])
def test_attributes_that_run_something_are_refused(name):
    with pytest.raises(ValueError, match="the attribute"):
        tag("p", **{name: "x"})


@pytest.mark.parametrize(
    "target",
    ["javascript:alert(1)", "https://example.org", "//x", "data:,", ".//x", "./../x", "./x://y",
     "x", "./a\njavascript:x", "/x", "../x", "./\\x"],
)  # fmt: skip
def test_links_lead_to_the_same_page_or_one_beside_it(target):
    with pytest.raises(ValueError, match="places of its own"):
        tag("a", "x", href=target)
    assert str(tag("a", "x", href="#ledger")) == '<a href="#ledger">x</a>'
    assert str(tag("a", "x", href="./run?id=a1")) == '<a href="./run?id=a1">x</a>'
    assert str(tag("a", "x", href="./")) == '<a href="./">x</a>'


@pytest.mark.parametrize("hidden", ["\0", "\x1b", "\u202e", "\u2066", "\ufeff", "\x9f", "\u200b"])
def test_what_shows_nothing_or_turns_the_writing_is_shown(hidden):
    assert str(tag("p", f"a{hidden}b")) == "<p>a\ufffdb</p>"
    assert str(tag("p", "a\tb\nc")) == "<p>a\tb\nc</p>"


def test_a_lone_surrogate_can_be_written():
    assert str(tag("p", "\ud800")).encode() == b"<p>?</p>"
