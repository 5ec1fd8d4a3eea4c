"""A site is opened once per process, and anew when one of the owner's files has changed."""

import os

import pytest

from fedveil.flower.prepared_site import file_states, open_site
from fedveil.runs.recipe import to_toml
from tests.flower.sites import FEDAVG, LOCAL, POLICY, Server, records, write_site


def test_it_is_opened_once(tmp_path):
    path = write_site(tmp_path)
    first = open_site(path)
    assert open_site(path) is first
    Server(first).answer()  # its ledger, witness, log and last answer are not what it is made of
    assert open_site(path) is first


@pytest.mark.parametrize("change", ["policy", "recipe", "records", "same size"])
def test_a_changed_file_counts_at_once(tmp_path, change):
    path = write_site(tmp_path)
    first = open_site(path)
    if change == "policy":
        write_site(tmp_path, policy={**POLICY, "trust": ["central"]})
    elif change == "recipe":
        (tmp_path / "recipe.toml").write_text(to_toml(FEDAVG))
    elif change == "records":
        for file in (tmp_path / "records").iterdir():
            file.unlink()
        (tmp_path / "records").rmdir()
        records(seed=1).save(tmp_path / "records")
    else:
        policy = tmp_path / "policy.toml"
        text = policy.read_text()
        policy.write_text(text.replace("10.", "11."))
        assert policy.read_text() != text
        assert policy.stat().st_size == len(text)
    second = open_site(path)
    assert second is not first
    assert second.recipe.name == ("fedavg" if change == "recipe" else LOCAL["name"])
    assert (second.records.fingerprint == first.records.fingerprint) == (change != "records")
    assert (second.policy == first.policy) == (change in ("recipe", "records"))


def test_what_a_site_is_made_of_is_looked_at_and_its_ledger_is_not(tmp_path):
    path = write_site(tmp_path)
    seen = {os.path.relpath(name, tmp_path) for name, *_ in file_states(path)}
    assert {"site.toml", "recipe.toml", "policy.toml"} < seen
    assert any(name.startswith("records/") for name in seen)
    Server(open_site(path)).answer()
    after = {os.path.relpath(name, tmp_path) for name, *_ in file_states(path)}
    assert after == seen


def test_files_that_are_gone_or_no_toml_have_a_state(tmp_path):
    assert file_states(tmp_path / "none.toml")[-1][1:] == (0, 0, 0)
    (tmp_path / "bad.toml").write_text("= no")
    ((name, size, *_),) = file_states(tmp_path / "bad.toml")
    assert (name, size) == (str(tmp_path / "bad.toml"), 4)


def test_the_code_of_a_recipe_and_a_policy_elsewhere_count(tmp_path):
    (tmp_path / "net.py").write_text("")
    path = write_site(tmp_path, {**LOCAL, "model": {"path": "net.py:make"}})
    (tmp_path / "owner").mkdir()
    (tmp_path / "policy.toml").rename(tmp_path / "owner" / "policy.toml")
    path.write_text('policy = "owner/policy.toml"\n' + path.read_text())
    seen = {os.path.relpath(name, tmp_path) for name, *_ in file_states(path)}
    assert {"net.py", "owner/policy.toml"} < seen
