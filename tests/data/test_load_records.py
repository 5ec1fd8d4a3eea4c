"""Loading by name."""

import os

import pytest

from fedveil.base.checks import DATA_SETS
from fedveil.base.errors import BadInput
from fedveil.data.load import load_records

REAL = os.environ.get("FEDVEIL_DATA")


EMBEDDED = {"digits": 1437, "diabetes": 353}


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_sets_need_no_folder(monkeypatch, name):
    monkeypatch.delenv("FEDVEIL_DATA", raising=False)
    assert len(load_records(name, None).x) == EMBEDDED[name]


def test_unknown_name_lists_the_names():
    with pytest.raises(
        BadInput, match=r"'imagenet' is unknown: use one of digits, diabetes, mnist, .*30"
    ):
        load_records("imagenet", None)
    with pytest.raises(BadInput, match=r"reddit; did you mean mnist\?$"):
        load_records("minst", None)


@pytest.mark.parametrize("name", [n for n in DATA_SETS if n not in EMBEDDED])
def test_every_other_set_looks_in_the_given_folder(tmp_path, name):
    with pytest.raises(BadInput, match=f"{tmp_path} has no {name.replace('-club', '_club')}/"):
        load_records(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"), [("mnist", "use none"), ("femnist", "use min_records")]
)
def test_unknown_option(tmp_path, name, message):
    with pytest.raises(BadInput, match=f"{name} has no option 'grades': {message}"):
        load_records(name, tmp_path, grades=True)


def test_options_reach_the_loader(tmp_path):
    with pytest.raises(BadInput, match="min_records is 0"):
        load_records("femnist", tmp_path, min_records=0)


@pytest.mark.skipif(not REAL, reason="FEDVEIL_DATA is not set")
def test_real_from_the_variable():
    records = load_records("location30")
    assert records.name == "location30"
    assert len(records.x) == len(records.y) > len(records.test_x) == len(records.test_y)
