"""Which runs are found under a folder, and which are not."""

import pytest

from fedveil.watch import followed_runs as module
from fedveil.watch.followed_runs import RunsFolder, State


def names(found):
    return [status.name for status in found.statuses()]


def test_runs_that_appear_and_go(root, copied, holding):
    folder = RunsFolder(root)
    assert folder.statuses() == []
    copied("ended")
    copied("open", "later")
    assert set(names(folder)) == {"ended", "later"}
    holding(root / "later")
    assert names(folder)[0] == "later"
    assert folder.statuses()[0].state is State.RUNNING
    before = {status.name: status for status in folder.statuses()}
    assert folder.statuses()[1] is before["ended"]


def test_a_folder_that_does_not_exist_yet_holds_nothing(root):
    assert names(RunsFolder(root / "none")) == []


def test_one_run_s_own_directory(root, copied):
    copied("ended")
    assert names(RunsFolder(root / "ended")) == ["ended"]


def test_runs_in_folders_of_their_own_but_not_in_runs(root, made, copied):
    import shutil

    shutil.copytree(made / "ended", root / "a" / "b" / "deep")
    shutil.copytree(made / "ended", root / "a" / "b" / "c" / "too-deep")
    shutil.copytree(made / "ended", root / "a" / "b" / "deep" / "inside")
    assert names(RunsFolder(root)) == ["a/b/deep"]


def test_links_are_not_followed(root, made, copied):
    copied("ended")
    (root / "linked").symlink_to(made / "ended")
    (root / "around").symlink_to(root)
    (root / "file").write_text("x")
    assert names(RunsFolder(root)) == ["ended"]


def test_a_run_that_was_removed_is_not_found_any_more(root, copied):
    import shutil

    folder = RunsFolder(root)
    copied("ended")
    (one,) = folder.statuses()
    assert folder.find(one.id).name == "ended"
    shutil.rmtree(root / "ended")
    assert folder.find(one.id) is None
    assert folder.statuses() == []


@pytest.mark.parametrize(("limit", "value"), [("_MAX_RUNS", 2), ("_MAX_FOLDERS", 3)])
def test_there_is_an_end_to_it(root, made, monkeypatch, limit, value):
    for name in "abcdef":
        (root / name).mkdir()
        (root / name / "recipe.toml").write_text("")
    monkeypatch.setattr(module, limit, value)
    assert len(names(RunsFolder(root))) == 2
