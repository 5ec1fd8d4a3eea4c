"""What a long audit keeps: whole arrays, of this audit and no other, one process at a time."""

import importlib.metadata

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedveil.audit import audit_folder
from fedveil.audit.audit_folder import AuditCache
from fedveil.base.errors import BadInput

IDENTITY = {"recipe": "abc", "seed": 0}


def test_an_array_comes_back_as_it_was(tmp_path):
    values = np.random.default_rng(0).normal(size=(3, 4))
    with AuditCache.locked_in(tmp_path / "a" / "b", IDENTITY) as cache:
        assert cache.load_array("losses") is None
        cache.save_array("losses", values)
    with AuditCache.locked_in(tmp_path / "a" / "b", IDENTITY) as cache:
        np.testing.assert_array_equal(cache.load_array("losses"), values)


@pytest.mark.parametrize("content", [b"", b"torn", b"\x93NUMPY\x01\x00v\x00{'descr'"])
def test_a_torn_array_counts_as_none(tmp_path, content):
    with AuditCache.locked_in(tmp_path, IDENTITY) as cache:
        (tmp_path / "losses.npy").write_bytes(content)
        assert cache.load_array("losses") is None


def test_without_a_folder_nothing_is_kept_or_drawn():
    def draw():
        raise AssertionError("nobody looks at it")

    with AuditCache.locked_in(None, IDENTITY) as cache:
        cache.save_array("losses", np.zeros(2))
        cache.save_figure("roc", draw)
        assert cache.load_array("losses") is None


def test_what_was_said_comes_back_unless_it_is_torn(tmp_path):
    with AuditCache.locked_in(tmp_path, IDENTITY) as cache:
        assert cache.load_json("row") is None
        cache.save_json("row", {"cells": ["a", "b"]})
        assert cache.load_json("row") == {"cells": ["a", "b"]}
        (tmp_path / "row.json").write_text('{"cells": [')
        assert cache.load_json("row") is None
    AuditCache().save_json("row", {})
    assert AuditCache().load_json("row") is None


def test_a_picture_is_a_file(tmp_path):
    with AuditCache.locked_in(tmp_path, IDENTITY) as cache:
        cache.save_figure("roc", Figure)
    assert (tmp_path / "roc.png").read_bytes().startswith(b"\x89PNG")


def test_another_audit_is_refused_and_left_alone(tmp_path):
    with AuditCache.locked_in(tmp_path, IDENTITY) as cache:
        cache.save_array("losses", np.zeros(2))
    before = (tmp_path / "audit.json").read_bytes()
    with (
        pytest.raises(BadInput, match="its seed is 0, not 1"),
        AuditCache.locked_in(tmp_path, {**IDENTITY, "seed": 1}),
    ):
        pass
    assert (tmp_path / "audit.json").read_bytes() == before


def test_arrays_of_other_code_are_refused(tmp_path, monkeypatch):
    """A version number is the same for two states of the source: the source itself is told."""
    with AuditCache.locked_in(tmp_path, IDENTITY) as cache:
        cache.save_array("losses", np.zeros(2))
    for name in ("fedveil", "torch"):
        assert f"{name} {importlib.metadata.version(name)}" in audit_folder.code()
    monkeypatch.setattr(audit_folder, "code", lambda: "other code")
    words = "its code is .*, not 'other code'"
    with pytest.raises(BadInput, match=words), AuditCache.locked_in(tmp_path, IDENTITY):
        pass


def test_every_file_of_the_source_decides_about_the_code(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    for name in ("__init__.py", "inner/one.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(audit_folder.fedveil, "__file__", str(tmp_path / "__init__.py"))
    told = [audit_folder.code.__wrapped__()]
    (tmp_path / "inner" / "one.py").write_text("x = 1")
    told.append(audit_folder.code.__wrapped__())
    (tmp_path / "inner" / "one.py").rename(tmp_path / "inner" / "two.py")
    told.append(audit_folder.code.__wrapped__())
    assert len(set(told)) == 3


def test_other_folders_are_refused(tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    with (
        pytest.raises(BadInput, match=r"holds model\.safetensors and no audit"),
        AuditCache.locked_in(tmp_path, IDENTITY),
    ):
        pass
    (tmp_path / "audit.json").write_text("[1]")
    with (
        pytest.raises(BadInput, match="is not an audit's"),
        AuditCache.locked_in(tmp_path, IDENTITY),
    ):
        pass
    with (
        pytest.raises(BadInput, match="is a file"),
        AuditCache.locked_in(tmp_path / "model.safetensors", IDENTITY),
    ):
        pass


def test_one_process_at_a_time(tmp_path):
    with (
        AuditCache.locked_in(tmp_path, IDENTITY),
        pytest.raises(BadInput, match="in use by another process"),
        AuditCache.locked_in(tmp_path, IDENTITY),
    ):
        pass
