"""Files that are there whole or not at all, and one process per run directory."""

import os
from pathlib import Path

import pytest

from fedveil.base.errors import BadInput
from fedveil.runs.run_directory import locked, write_atomic


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Written, synced, renamed, and the folder synced: in this order."""
    done, sync, rename = [], os.fsync, Path.replace

    def noted_sync(descriptor):
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def noted_rename(self, target):
        done.append(("rename", self.read_bytes()))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    target = tmp_path / "result.json"
    write_atomic(target, b"whole")
    assert target.read_bytes() == b"whole"
    (first, file), second, third = done
    assert (first, Path(file).parent) == ("sync", tmp_path)
    assert Path(file) != target
    assert second == ("rename", b"whole")
    assert third == ("sync", str(tmp_path))
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_is_held_by_one(tmp_path):
    told = pytest.raises(BadInput, match="in use by another process")
    with locked(tmp_path), told, locked(tmp_path):
        raise AssertionError("two hold it")
    with locked(tmp_path):
        assert (tmp_path / "lock").exists()
