"""Auditors: reading, verifying and exporting write nothing, and need no right to write."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from fedveil.base.errors import BadInput
from fedveil.runs.evidence import export_ledger, statements_of, verify_ledger
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run

from .conftest import BASE

SERVER = 65534
KINDS = ("whole", "torn")


class Crash(Exception):
    """The process dies."""


@pytest.fixture(scope="module")
def made():
    """whole: a run that has ended; torn: a killed one, with charges in the log only.

    In a folder that everybody may enter, with names that an URI would take for something else.
    """
    root = Path(tempfile.mkdtemp(prefix="fedveil ?mode=rwc#%41 é"))
    root.chmod(0o755)

    def start(name):
        return Run.start(load_recipe("central", BASE["central"]), root / name, None)

    start("whole").execute()
    torn = start("tearing")

    def tear(line):
        if line["round"] == 3:
            shutil.copytree(torn.folder, root / "torn")
            raise Crash

    with pytest.raises(Crash):
        torn.execute(tear)
    (root / "torn" / "ledger.db-shm").unlink()
    assert (root / "torn" / "ledger.db-wal").stat().st_size > 0
    yield root
    shutil.rmtree(root)


@pytest.fixture
def copy(made):
    """A directory that nobody may write, with files that nobody may write."""
    copies = Path(tempfile.mkdtemp(prefix="copies", dir=made))
    copies.chmod(0o755)

    def copied(name):
        folder = shutil.copytree(made / name, copies / name)
        for path in (*folder.rglob("*"), folder):
            path.chmod(0o555 if path.is_dir() else 0o444)
        return folder

    yield copied
    for path in copies.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(copies)


def seen(folder):
    """Every file with its content, mode and time."""
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in (folder, *folder.rglob("*"))
    }


def look(folder, target):
    """All that an auditor does; returns what is told."""
    told = statements_of(folder)
    export_ledger(folder, target)
    file = folder / "ledger.db"
    return [len(told.runs[0].charges), verify_ledger(folder, None), verify_ledger(file, None)]


def check(folder, found):
    charges, told, alone = found
    if folder.name == "whole":
        assert charges == 4
        assert "those that the run left" in told
    else:
        assert charges == 3
        assert "the run is open" in told
    assert "none changed" in alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writable", [True, False])
def test_looking_changes_nothing(copy, tmp_path, kind, writable):
    folder = copy(kind)
    if writable:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
    before = seen(folder)
    check(folder, look(folder, tmp_path / "export.json"))
    assert seen(folder) == before


def as_nobody(work, told):
    """Do `work` in a child of another user; what it returns goes through the file `told`."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(SERVER)
            os.setuid(SERVER)
            os.environ["HOME"] = "/"
            told.write_text(json.dumps(work()))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return json.loads(told.read_text())


@pytest.fixture
def outbox():
    """A folder that everybody may write."""
    folder = Path(tempfile.mkdtemp(prefix="outbox"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


not_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")


@not_root
@pytest.mark.parametrize("kind", KINDS)
def test_another_user_may_look(copy, outbox, tmp_path, kind):
    folder = copy(kind)
    look(folder, tmp_path / "warm.json")  # imports what is imported late
    before = seen(folder)
    check(folder, as_nobody(lambda: look(folder, outbox / "export.json"), outbox / "told"))
    assert seen(folder) == before


def refusal(folder):
    """The one line that says why nothing can be read."""
    try:
        verify_ledger(folder, None)
    except BadInput as e:
        return str(e)
    return "none"


@not_root
@pytest.mark.parametrize(
    ("kind", "locked", "told"),
    [
        ("whole", "ledger.db", "ledger.db: the ledger cannot be opened (permission denied)"),
        ("torn", "ledger.db", "Permission denied"),
        ("torn", "ledger.db-wal", "Permission denied"),
        ("whole", ".", "Permission denied"),
        ("whole", "result.json", "result.json cannot be read: [Errno 13] Permission denied"),
    ],
)
def test_the_real_reason_is_told(copy, outbox, kind, locked, told):
    folder = copy(kind)
    (folder / locked).chmod(0)
    line = as_nobody(lambda: refusal(folder), outbox / "told")
    assert told in line
    assert "not a fedveil ledger" not in line
    assert "\n" not in line


def test_other_reasons_are_told(copy):
    folder = copy("whole")
    assert "there is no ledger here" in refusal(folder / "nothing.db")
    assert "file is not a database" in refusal(folder / "result.json")


SCRIPT = """
import json, sys
from pathlib import Path
from fedveil.runs.evidence import export_ledger, statements_of, verify_ledger
folder, target = Path(sys.argv[1]), Path(sys.argv[2])
try:
    (folder / "new").write_text("x")
    sys.exit("it is not read-only")
except OSError as e:
    assert e.errno == 30, e
told = statements_of(folder)
export_ledger(folder, target)
file = folder / "ledger.db"
found = [len(told.runs[0].charges), verify_ledger(folder, None), verify_ledger(file, None)]
print(json.dumps(found))
"""
MOUNT = (
    'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77; '
    'exec "$3" -c "$4" "$1" "$2"'
)


@pytest.mark.slow
def test_a_read_only_mount_may_be_looked_at(copy, made, tmp_path):
    folders = copy("whole").parent
    copy("torn")
    before = seen(folders)
    for kind in KINDS:
        folder, target = folders / kind, tmp_path / f"{kind}.json"
        command = ["sh", "-c", MOUNT, "sh", folder, target, sys.executable, SCRIPT]
        if shutil.which("unshare") is None:
            pytest.skip("there is no unshare on this machine")
        done = subprocess.run(
            ["unshare", "-rm", *map(str, command)], capture_output=True, text=True, check=False
        )
        if done.returncode == 77 or "unshare:" in done.stderr:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        check(folder, json.loads(done.stdout))
    assert seen(folders) == before
