"""Damaged, lost and swapped files: one clear line, or an older state and a remark.

Whatever happens, nobody sees a traceback, no charge is lost, and a run that goes on ends at the
model it would have ended at.
"""

import json
import re
import shutil
import sqlite3
from contextlib import closing

import pytest

from fedveil.base.errors import BadInput
from fedveil.privacy.ledger.file import query, read_charges
from fedveil.runs.evidence import verify_ledger

from .endings import model_of, one_line

TABLES = ("about", "runs", "charges", "cohorts", "closings")


def rows_of(path):
    return {table: sorted(query(path, f"SELECT * FROM {table}")) for table in TABLES}


# --- ways to damage a run directory ---


def write(name, content):
    return lambda run, other: (run / name).write_bytes(content)


def cut(name, keep):
    def damage(run, other):
        path = run / name
        content = path.read_bytes()
        path.write_bytes(content[: int(keep * len(content))])

    return damage


def cut_before(name, text):
    def damage(run, other):
        before, found, _ = (run / name).read_text().partition(text)
        assert found
        (run / name).write_text(before)

    return damage


def remove(*names):
    def damage(run, other):
        for name in names:
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def flip(name, place):
    """Change one byte, `place` of the way through."""

    def damage(run, other):
        path = run / name
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 0x5A
        path.write_bytes(bytes(content))

    return damage


def swap(name):
    """Take another run's file."""

    def damage(run, other):
        source, target = other / name, run / name
        if target.is_dir():
            shutil.rmtree(target)
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)

    return damage


def edit(name, old, new):
    def damage(run, other):
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new, 1))

    return damage


def sql(*statements):
    def damage(run, other):
        with closing(sqlite3.connect(run / "ledger.db")) as db:
            for statement in statements:
                db.execute(statement)
            db.commit()

    return damage


def both(*damages):
    def damage(run, other):
        for one in damages:
            one(run, other)

    return damage


LAST, BEFORE = (f"checkpoint/round-0000000{n}.safetensors" for n in (3, 2))
LEDGER = "not a fedveil ledger|damaged|changed|there is no ledger"

REFUSED = {
    # the ledger
    "ledger removed": ("cut", remove("ledger.db"), "ledger.db is missing"),
    "ledger empty": ("cut", write("ledger.db", b""), LEDGER),
    "ledger of noise": ("cut", write("ledger.db", b"\x07" * 5000), LEDGER),
    "ledger cut to half": ("cut", cut("ledger.db", 0.5), LEDGER),
    "ledger cut by a page": ("cut", cut("ledger.db", 0.9), LEDGER),
    "ledger a directory": (
        "cut",
        both(remove("ledger.db"), lambda run, _: (run / "ledger.db").mkdir()),
        LEDGER,
    ),
    "ledger's first byte": ("cut", flip("ledger.db", 0.0), LEDGER),
    "ledger of another run": ("cut", swap("ledger.db"), "recipe is .* in the ledger"),
    "ledger of another format": (
        "cut",
        sql("UPDATE about SET value = '99' WHERE key = 'format'"),
        "ledger format '99', this fedveil reads",
    ),
    "ledger without a format": ("cut", sql("DELETE FROM about"), "ledger format None"),
    "ledger without a table": ("cut", sql("DROP TABLE charges"), "ledger"),
    "ledger without its run": ("cut", sql("DELETE FROM runs"), "there is no run ''"),
    "run of the ledger unreadable": ("cut", sql("UPDATE runs SET about = '{'"), "ledger"),
    "charge removed": ("cut", sql("DELETE FROM charges WHERE round = 2"), "entry 2 is missing"),
    "charge changed": (
        "cut",
        sql("UPDATE charges SET charged_at = 'now' WHERE round = 2"),
        "entry 2 .* does not follow",
    ),
    "last charge removed": (
        "cut",
        sql("DELETE FROM charges WHERE round = 3", "DELETE FROM cohorts WHERE round = 3"),
        "has 2 charged rounds and the checkpoint 3",
    ),
    "last charge and checkpoints removed": (
        "cut",
        both(
            sql("DELETE FROM charges WHERE round = 3", "DELETE FROM cohorts WHERE round = 3"),
            remove("checkpoint"),
        ),
        "has 2 charged rounds and the metrics 3",
    ),
    "last charge, checkpoints and metrics removed": (
        "cut",
        both(
            sql("DELETE FROM charges WHERE round = 3", "DELETE FROM cohorts WHERE round = 3"),
            remove("checkpoint", "metrics.jsonl"),
        ),
        "entry 3 is missing",
    ),
    "cohort removed": ("cut", sql("DELETE FROM cohorts WHERE round = 2"), "entry 2"),
    "cohort changed": (
        "cut",
        sql("UPDATE cohorts SET ids = x'00000000' WHERE round = 1"),
        "entry 1",
    ),
    "ledger removed, and checkpoints": (
        "cut",
        remove("ledger.db", "checkpoint"),
        "ledger.db is missing",
    ),
    "log left behind": ("torn", remove("ledger.db-wal", "ledger.db-shm"), LEDGER + "|missing"),
    "log cut": ("torn", cut("ledger.db-wal", 0.6), LEDGER + "|missing"),
    "log damaged": ("torn", flip("ledger.db-wal", 0.5), LEDGER + "|missing"),
    # the recipe
    "recipe removed": ("cut", remove("recipe.toml"), "has no recipe.toml"),
    "recipe empty": ("cut", write("recipe.toml", b""), "recipe"),
    "recipe of noise": ("cut", write("recipe.toml", b"\xff\xfe\x00"), "cannot be read"),
    "recipe cut": (
        "cut",
        cut_before("recipe.toml", "[noise]"),
        "sample.max_participations is for local DP, where turns are counted",
    ),
    "recipe cut in a line": ("cut", cut_before("recipe.toml", "_participations"), "is not TOML"),
    "recipe of another run": ("cut", swap("recipe.toml"), "recipe is .* in the ledger"),
    "more rounds": ("cut", edit("recipe.toml", "rounds = 4", "rounds = 8"), "recipe is"),
    "less noise": ("cut", edit("recipe.toml", "multiplier = 2.0", "multiplier = 1.0"), "recipe is"),
    "other noise": ("cut", edit("recipe.toml", '"seeded"', '"secure"'), "noise.source is 'secure'"),
    "other data": ("cut", edit("recipe.toml", '"iid"', '"shards"'), "recipe is"),
    "unknown key": (
        "cut",
        edit("recipe.toml", "rounds = 4", "rounds = 4\nround = 4"),
        "unknown key round",
    ),
    "a trigger that takes charges back": (
        "cut",
        sql("CREATE TRIGGER t AFTER INSERT ON charges BEGIN DELETE FROM charges; END"),
        "tables are not as fedveil makes them",
    ),
    # files of other runs
    "checkpoints of another run": ("cut", swap("checkpoint"), "not the one that was seen"),
    "result of another run": ("cut", swap("result.json"), "not the one that was seen"),
    # a pointer to a shared ledger
    "pointer to nowhere": (
        "cut",
        write("ledger.json", b'{"path": "/nowhere/ledger.db", "run": "run"}'),
        "/nowhere/ledger.db is missing",
    ),
    "pointer to nothing": ("cut", write("ledger.json", b"{}"), "ledger.json cannot be read"),
    "pointer of noise": ("cut", write("ledger.json", b"\xff\x00"), "ledger.json cannot be read"),
    "pointer with a number": ("cut", write("ledger.json", b'{"path": 5}'), "cannot be read"),
}

MENDED = {
    "nothing": ("cut", lambda run, other: None, "^$"),
    "a crash": ("torn", lambda run, other: None, "^$"),
    "checkpoint empty": ("cut", write(LAST, b""), "00003.* cannot be read.*from round 2"),
    "checkpoint cut": ("cut", cut(LAST, 0.7), "00003.* cannot be read.*from round 2"),
    "checkpoint's header": ("cut", flip(LAST, 0.01), "00003.* cannot be read.*from round 2"),
    "checkpoint's weights": ("cut", flip(LAST, 0.6), "changed after it was written.*round 2"),
    "checkpoint's last byte": ("cut", flip(LAST, 1.0), "changed after it was written.*round 2"),
    "checkpoint removed": ("cut", remove(LAST), "^$"),
    "both checkpoints empty": (
        "cut",
        both(write(LAST, b""), write(BEFORE, b"")),
        "00003.* cannot be read.*00002.* cannot be read.*from round 0",
    ),
    "all checkpoints removed": ("cut", remove("checkpoint"), "was resumed from round 0"),
    "checkpoint of an older round in its place": (
        "cut",
        lambda run, other: shutil.copy(run / BEFORE, run / LAST),
        "^$",
    ),
    "model removed": ("cut", remove("model.safetensors"), "^$"),
    "model of noise": ("cut", write("model.safetensors", b"\x01" * 99), "^$"),
    "result removed": ("cut", remove("result.json"), "^$"),
    "result empty": ("cut", write("result.json", b""), "result.json cannot be read"),
    "result of noise": ("cut", write("result.json", b"\xff{"), "result.json cannot be read"),
    "result without a head": ("cut", write("result.json", b"{}"), "result.json cannot be read"),
    "result with a huge number": (
        "cut",
        write("result.json", b'{"ledger": {"head": "a", "length": 1e999}}'),
        "result.json cannot be read",
    ),
    "metrics removed": ("cut", remove("metrics.jsonl"), "lacks rounds 1 to 3"),
    "metrics empty": ("cut", write("metrics.jsonl", b""), "lacks rounds 1 to 3"),
    "metrics cut": ("cut", cut("metrics.jsonl", 0.6), "metrics.jsonl was damaged after"),
    "metrics of noise": ("cut", write("metrics.jsonl", b"\xff\n"), "damaged after 0 lines"),
    "metrics of other things": ("cut", write("metrics.jsonl", b"[1]\n5\n"), "damaged after 0"),
    "metrics without keys": ("cut", write("metrics.jsonl", b'{"round": 2}\n'), "damaged after 0"),
    "metrics with words": (
        "cut",
        write("metrics.jsonl", b'{"round": 0, "epsilon": 0.0, "loss": "low"}\n'),
        "damaged after 0",
    ),
    "lock removed": ("cut", remove("lock"), "^$"),
    "a temporary file left": ("cut", write(".recipe.toml.tmp", b"half"), "^$"),
    "other versions": (
        "cut",
        edit("recipe.toml", "# resolved by fedveil", "# resolved by fedveil 0.0.9, was"),
        "was resumed by fedveil .*repeats to about 1e-5, not to the last bit",
    ),
    "versions removed": ("cut", edit("recipe.toml", "# resolved by", "#"), "about 1e-5"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_trusted_is_refused_with_one_line(copy, cli, how):
    name, damage, told = REFUSED[how]
    folder = copy(name)
    damage(folder, copy("other", "there"))
    line = one_line(cli("run", "--resume", folder, "--quiet"))
    assert re.search(told, line), line
    code, out, err = cli("ledger", folder, "--verify")
    assert (code, len((out + err).splitlines())) in ((0, 1), (2, 1))


@pytest.mark.parametrize("how", MENDED)
def test_what_can_be_mended_goes_on_and_says_so(made, copy, cli, how):
    name, damage, told = MENDED[how]
    folder = copy(name)
    damage(folder, copy("other", "there"))
    code, out, err = cli("run", "--resume", folder, "--quiet", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    first = json.loads((made / "whole" / "run" / "result.json").read_text())
    notes = " ".join(note for note in result["notes"] if note not in first["notes"])
    assert re.search(told, notes), notes
    assert (result["rounds"], result["stopped"]) == (4, "rounds")
    assert model_of(folder) == model_of(made / "whole" / "run")
    assert [charge.round for charge in read_charges(folder / "ledger.db")] == [1, 2, 3, 4]
    assert result["claims"] == first["claims"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rounds = [json.loads(line)["round"] for line in lines]
    assert (rounds[0], rounds[-1]) == (0, 4)
    assert rounds == sorted(set(rounds))
    assert cli("ledger", folder, "--verify")[0] == 0


@pytest.mark.parametrize("stretch", [pytest.param(97, marks=pytest.mark.slow), 307])
def test_a_byte_anywhere_in_the_ledger_is_found_or_changes_nothing(copy, stretch):
    """A byte in every stretch: unused space says nothing, everything else is covered."""
    folder = copy("cut")
    path = folder / "ledger.db"
    whole, rows = path.read_bytes(), rows_of(path)
    found = 0
    for place in range(0, len(whole), stretch):
        content = bytearray(whole)
        content[place] ^= 0x21
        path.write_bytes(bytes(content))
        try:
            verify_ledger(folder, None)
        except BadInput:
            found += 1
        else:
            assert rows_of(path) == rows, place
    assert found > 2000 // stretch
