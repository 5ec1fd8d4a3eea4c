"""A page is one file that permits its own script and style, and nothing else."""

import base64
import hashlib
import re

from fedveil.pages.html import bullet_list, definition_list, page, section, table


def hash_of(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_policy_has_the_hashes_of_what_is_there():
    text = page("A <title>", "content").decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1].replace(
        "&#x27;", "'"
    )
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert policy.startswith("default-src 'none'; ")
    assert f"style-src '{hash_of(style)}'" in policy
    assert f"script-src '{hash_of(script)}'" in policy
    assert "unsafe" not in policy
    assert "<title>A &lt;title&gt;</title>" in text


def test_nothing_is_asked_of_a_network():
    text = page("x", section("s", bullet_list(["a"]), definition_list({"b": "c"}))).decode()
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bfetch\b|XMLHttp", text)
    assert len(text) < 20_000


def test_tables_have_headings_for_both_directions_and_can_be_reached_by_keyboard():
    text = str(table([{"a": 1, "b": "<"}, {"a": 2}], "Some"))
    assert '<th scope="col">a</th>' in text
    assert '<th scope="row">1</th><td>&lt;</td>' in text
    assert 'tabindex="0"' in text
    assert str(table([], "Some")) == "<p>Some: nothing</p>"
