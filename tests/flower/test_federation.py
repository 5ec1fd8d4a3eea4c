"""federation.toml: which sites there are, and how they are known."""

import pytest

from fedveil.base.errors import BadInput
from fedveil.flower.federation_files import fingerprint, read_federation

KEY = "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBA== owner@north"
PRINT = "SHA256:" + "A" * 43


def written(tmp_path, text):
    path = tmp_path / "federation.toml"
    path.write_text(text)
    return read_federation(path)


def site(name="north", key=KEY, more=""):
    return f'[[sites]]\nname = "{name}"\nkey = "{key}"\n{more}\n'


def test_sites_keep_their_order_and_whole_seconds_will_do(tmp_path):
    text = "deadline = 5\nminimum = 2\n" + site("b") + site("a", PRINT, "records = 12")
    found = written(tmp_path, text)
    assert found.site_names == ["b", "a"]
    assert [s.records for s in found.sites] == [0, 12]
    assert (found.deadline, found.minimum, len(found.sites)) == (5.0, 2, 2)


def test_a_key_and_its_fingerprint_are_the_same_site():
    told = fingerprint(KEY)
    assert told.startswith("SHA256:")
    assert fingerprint(told) == told
    assert fingerprint(KEY.rsplit(" ", 1)[0]) == told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "sites"),
        ("sites = []", "no sites"),
        (site() + site("north", PRINT), "the name 'north'"),
        (site() + site("south"), "the key"),
        (site() + site("south", fingerprint(KEY)), "the key"),
        (site("a b"), "site is"),
        (site(key="SHA256:short"), "ssh-keygen"),
        (site(key="ssh-rsa no!base64"), "ssh-keygen"),
        (site(key=""), "ssh-keygen"),
        (site(more="records = -1"), "-1 records"),
        (site(more="records = 1.5"), "records"),
        ("minimum = 2\n" + site(), "minimum is 2"),
        ("minimum = 0\n" + site(), "minimum is 0"),
        ("deadline = 0\n" + site(), "deadline is 0"),
        ("deadline = nan\n" + site(), "deadline is nan"),
        ("wait = 1e9\n" + site(), "wait is"),
        ("dead_line = 3\n" + site(), "dead_line"),
        (site(more='colour = "red"'), "colour"),
        ("not toml", "cannot be read"),
    ],
)
def test_what_is_no_federation_is_refused_in_one_line(tmp_path, text, words):
    with pytest.raises(BadInput, match=words) as e:
        written(tmp_path, text)
    assert "\n" not in str(e.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        read_federation(tmp_path / "federation.toml")
