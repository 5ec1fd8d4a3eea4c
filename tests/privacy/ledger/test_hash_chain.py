"""Hashes in a row: what each of them covers."""

from dataclasses import fields, replace

import pytest

from fedveil.privacy.ledger import hash_chain
from fedveil.privacy.ledger.hash_chain import Entry, Head

FIRST = hash_chain.json_digest({"format": "5"})


def entries(count=5):
    return [
        Entry("run", n, 0, "updates", "{}", f"at {n}", f"ids {n}", "runs") for n in range(count)
    ]


def linked(found, first=FIRST):
    links, before = [], first
    for entry in found:
        before = hash_chain.next_hash(before, entry)
        links.append((entry, before))
    return links


def test_a_chain_that_was_left_alone_is_whole():
    assert hash_chain.first_broken_entry(FIRST, linked(entries())) is None
    assert hash_chain.first_broken_entry(FIRST, []) is None


@pytest.mark.parametrize("field", [field.name for field in fields(Entry)])
def test_a_change_of_any_field_breaks_the_chain_there(field):
    links = linked(entries())
    entry, found = links[2]
    value = getattr(entry, field)
    links[2] = (
        replace(entry, **{field: value + 1 if isinstance(value, int) else f"{value} "}),
        found,
    )
    assert hash_chain.first_broken_entry(FIRST, links) == 3


def test_removing_inserting_moving_and_repeating_break_it():
    links = linked(entries())
    assert hash_chain.first_broken_entry(FIRST, links[:1] + links[2:]) == 2
    assert hash_chain.first_broken_entry(FIRST, [*links[:2], links[1], *links[2:]]) == 3
    assert hash_chain.first_broken_entry(FIRST, [links[1], links[0], *links[2:]]) == 1
    assert hash_chain.first_broken_entry(FIRST, links[1:]) == 1


def test_a_cut_tail_leaves_a_whole_chain():
    """This is why the head is kept elsewhere as well."""
    assert hash_chain.first_broken_entry(FIRST, linked(entries())[:3]) is None


def test_another_beginning_breaks_it():
    other = hash_chain.json_digest({"format": "5", "common epsilon": "9"})
    assert hash_chain.first_broken_entry(other, linked(entries())) == 1


def test_fields_do_not_run_into_each_other():
    a = Entry("ab", 1, 0, "c", "", "", "", "")
    b = Entry("a", 1, 0, "bc", "", "", "", "")
    assert hash_chain.next_hash("", a) != hash_chain.next_hash("", b)
    assert hash_chain.json_digest(["ab", "c"]) != hash_chain.json_digest(["a", "bc"])
    assert hash_chain.json_digest(["a", "b"]) != hash_chain.json_digest(["b", "a"])
    assert hash_chain.next_hash("", replace(a, round=1)) != hash_chain.next_hash(
        "", replace(a, round="1")
    )


def test_a_seal_confirms_no_guess_without_the_salt():
    assert hash_chain.seal("salt", b"1, 2") == hash_chain.seal("salt", "1, 2")
    assert hash_chain.seal("salt", b"1, 2") != hash_chain.seal("other", b"1, 2")
    assert hash_chain.seal("salt", b"1, 2") not in (
        hash_chain.seal("", b"1, 2"),
        hash_chain.digest(b"1, 2"),
    )
    assert hash_chain.seal("salt", b"1, 2") != hash_chain.seal("salt", b"1, 3")


def test_the_first_hash_does_not_depend_on_the_order_of_rows():
    assert hash_chain.json_digest({"a": "1", "b": "2"}) == hash_chain.json_digest(
        {"b": "2", "a": "1"}
    )


def test_the_hash_is_the_published_one():
    """Anybody can compute it: SHA-256 of a JSON list. A change would orphan ledgers on disk."""
    entry = Entry("r", 1, 0, "updates", "{}", "now", "", "")
    text = '["", "r", 1, 0, "updates", "{}", "now", "", ""]'
    assert hash_chain.next_hash("", entry) == hash_chain.digest(text)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert hash_chain.digest(b"") == empty


def test_a_head_as_json():
    assert Head("ab", 3).to_dict() == {"head": "ab", "length": 3}
