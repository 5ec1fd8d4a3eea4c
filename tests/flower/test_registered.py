"""Which sites a server knows, and how many records it knows them to have."""

import pytest

from fedveil.base.errors import BadInput
from fedveil.flower.deployment import load_for_sites, public_data, registered

KEYS = ("one", "two")
TABLE = {
    "data.name": "table",
    "data.target": "well",
    "data.columns.well.values": ["no", "yes"],
    "data.columns.age.low": 0.0,
    "data.columns.age.high": 100.0,
}
NOMINAL = ("client.nominal=50", "server.weights=uniform", "sample.kind=all")


def sites(recipe, records, *settings):
    return registered(load_for_sites(recipe, settings, 2), ("a", "b"), KEYS, records)


def test_numbers_are_known_where_they_are_needed_and_nowhere_else():
    assert [s.records for s in sites("sites", {"a": 5, "b": 7})] == [5, 7]
    assert [s.records for s in sites("dp-sgd", {"b": 7}, *NOMINAL)] == [50, 7]
    assert [s.records for s in sites("central", {})] == [0, 0]
    with pytest.raises(BadInput, match="a=5, and nothing in the recipe needs"):
        sites("central", {"a": 5})
    with pytest.raises(BadInput, match="how many records 'b' has is not known"):
        sites("sites", {"a": 5})
    with pytest.raises(BadInput, match=r"--records a=N.*or use client\.nominal"):
        sites("dp-sgd", {})
    with pytest.raises(BadInput, match="names 'c', which is no site"):
        sites("sites", {"c": 5})


def test_of_a_table_the_declaration_stays():
    more = {"data.path": "mine.csv", "data.client": "site", "data.test": "none"}
    recipe = load_for_sites("central", {**TABLE, **more}, 2)
    kept = recipe.data.model_dump(exclude_none=True)
    assert kept.keys() == {"name", "target", "columns", "features"}
    assert kept["features"] == ["age"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"data.test": "by-client"}, "data.test is 'by-client', and sites hold no rows back"),
        ({"data.test": 0.2}, "data.test is 0.2"),
        ({"data.statistics": "public"}, "data.statistics is 'public'"),
        ({"data.resample": 5}, "data.resample is 5"),
        ({"data.features": ["age", "dose"]}, "nothing is declared of 'dose'"),
    ],
)
def test_what_needs_rows_in_common_is_refused(keys, words):
    with pytest.raises(BadInput, match=words):
        load_for_sites("central", {**TABLE, **keys}, 2)


def test_one_public_table_is_named_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("age,well\n30,no\n70,yes\n")
    recipe = load_for_sites("central", {**TABLE, "data.test": "t.csv"}, 2)
    sent, data = public_data(recipe, None, ["a", "b"], None)
    assert (len(data.test_y), sent.data.test) == (2, None)
    with pytest.raises(BadInput, match="leave one out"):
        public_data(recipe, "t.csv", ["a", "b"], None)
    with pytest.raises(BadInput, match="is for tables"):
        public_data(load_for_sites("central", (), 2), "t.csv", ["a", "b"], None)
