"""Pages, and the Markdown they become."""

import pytest
from matplotlib.figure import Figure

from fedveil.papers.reproduction import Page, PaperStatement, TextTable


def test_a_table_is_markdown():
    table = TextTable(("epsilon", "loss"), (("1", "2.5 +- 0.1"), ("a|b", "two\nlines")), "Losses:")
    assert table.markdown() == (
        "Losses:\n\n| epsilon | loss |\n| --- | --- |\n| 1 | 2.5 +- 0.1 |\n| a\\|b | two lines |"
    )
    assert TextTable(("x",), (("1",),)).markdown() == "| x |\n| --- |\n| 1 |"


def test_a_row_must_fit_its_headers():
    with pytest.raises(AssertionError, match="does not fit"):
        TextTable(("a", "b"), (("1", "2"), ("3",)))


def test_a_finding_says_whether_it_was_seen():
    assert PaperStatement("It grows.", True, "From 1 to 2.").markdown() == (
        "- **confirmed**: It grows. From 1 to 2."
    )
    assert PaperStatement("It grows.", False, "It fell.").markdown() == (
        "- **not confirmed**: It grows. It fell."
    )


def test_a_page_has_everything_in_order():
    page = Page(
        "Table I",
        setting_names=["Some data."],
        left_open=[("learning rate", "0.1")],
        tables=[TextTable(("x",), (("1",),))],
        statements=[PaperStatement("A.", True, "B."), PaperStatement("C.", False, "D.")],
        page_notes=["A note."],
        figures={"one.png": Figure()},
    )
    assert page.markdown() == (
        "## Table I\n\nSome data.\n\n"
        "Left open by the paper, chosen here:\n\n- learning rate: 0.1\n\n"
        "| x |\n| --- |\n| 1 |\n\n![Table I](one.png)\n\n"
        "- **confirmed**: A. B.\n- **not confirmed**: C. D.\n\nA note.\n"
    )


def test_an_empty_page_is_its_title():
    assert Page("Nothing").markdown() == "## Nothing\n"


def test_choices_are_filled_in() -> None:
    page = Page("Fig. 1")
    page.add_left_open(
        [["learning rate", "{rate:g}, of {count}"], ["batch", "all"]], rate=0.5, count=3
    )
    assert page.left_open == [("learning rate", "0.5, of 3"), ("batch", "all")]
