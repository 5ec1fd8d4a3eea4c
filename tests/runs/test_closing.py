"""What an officer reads is covered: `--verify` names the file that is not what the run left."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import safetensors.torch

from fedveil.privacy.ledger import hash_chain
from fedveil.privacy.ledger.file import read_about, read_closing, read_runs
from fedveil.privacy.ledger.hash_chain import read_links, verify
from fedveil.privacy.ledger.statement import statements
from fedveil.runs import run as runs
from fedveil.runs.evidence import _claim_differences, file_digests, record_report
from fedveil.runs.ledgers import SharedLedger
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from fedveil.runs.run_directory import write_atomic

from .conftest import BASE


class Crash(Exception):
    """The process dies."""


def begin(folder, *settings, recipe="central", shared=None):
    chosen = load_recipe(recipe, (*BASE[recipe], "data.seed=1", *settings))
    return Run.start(chosen, folder, None, shared)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """own: a run with its own ledger; other: one of another seed; two, three: on a shared one."""
    root = tmp_path_factory.mktemp("made")
    begin(root / "own").execute()
    begin(root / "other", "seed=2").execute()
    begin(root / "nothing", recipe="fedsgd").execute()
    shared = SharedLedger(root / "shared.db", 20.0)
    for seed in (2, 3):
        begin(root / f"shared {seed}", f"seed={seed}", shared=shared).execute()
    return root


@pytest.fixture
def copy(made, tmp_path):
    def copied(name, where="here"):
        folder = shutil.copytree(made / name, tmp_path / where)
        pointer = folder / "ledger.json"
        if pointer.exists():
            shutil.copy(made / "shared.db", tmp_path / "shared.db")
            stored = json.loads(pointer.read_text())
            pointer.write_text(json.dumps({**stored, "path": str(tmp_path / "shared.db")}))
        return folder

    return copied


def ledger_of(folder):
    pointer = folder / "ledger.json"
    return json.loads(pointer.read_text())["path"] if pointer.exists() else folder / "ledger.db"


def alter(folder, *statements):
    with closing(sqlite3.connect(ledger_of(folder))) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def replace(name, old, new):
    def damage(folder, other):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return damage


def smaller_epsilon(folder, other):
    result = json.loads((folder / "result.json").read_text())
    result["claims"][0]["epsilon"] = 0.5
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")


def another_model(folder, other):
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    changed = {name: tensor + 1e-7 for name, tensor in tensors.items()}
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(changed))


def take(name):
    return lambda folder, other: shutil.copy(other / name, folder / name)


def remove(name):
    return lambda folder, other: (folder / name).unlink()


def better_metrics(folder, other):
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["accuracy"] = 0.999
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def sql(*statements):
    return lambda folder, other: alter(folder, *statements)


def swap_closing(folder, other):
    """The end of another run, as it is in that one's ledger."""
    with closing(sqlite3.connect(other / "ledger.db")) as db:
        row = db.execute("SELECT files, closed_at, hash FROM closings").fetchone()
    with closing(sqlite3.connect(folder / "ledger.db")) as db:
        db.execute("UPDATE closings SET files = ?, closed_at = ?, hash = ?", row)
        db.commit()


def forge(folder, other):
    """A result with a smaller epsilon, and an end that vouches for it, hash and all."""
    smaller_epsilon(folder, other)
    path = folder / "ledger.db"
    *_, (_, before), (entry, _) = read_links(path, read_about(path)["salt"])
    files = json.dumps(file_digests(folder), sort_keys=True)
    forged = hash_chain.next_hash(
        before, hash_chain.Closing(entry.run, files, entry.closed_at, entry.runs)
    )
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE closings SET files = ?, hash = ?", (files, forged))
        db.commit()
    (folder / "head.json").write_text(json.dumps({"head": forged, "length": 5}))


TAMPERED = {
    "epsilon in the result": (smaller_epsilon, "result.json is not the one that the run left"),
    "a byte of the model": (another_model, "model.safetensors is not the one"),
    "another run's model": (take("model.safetensors"), "model.safetensors is not the one"),
    "secure noise in the recipe": (
        replace("recipe.toml", 'source = "seeded"', 'source = "secure"'),
        "recipe.toml: noise.source is 'secure' and 'seeded' in the ledger",
    ),
    "more noise in the recipe": (
        replace("recipe.toml", "multiplier = 2.0", "multiplier = 9.0"),
        "recipe.toml is not the recipe that the run was started with",
    ),
    "a comment in the recipe": (
        replace("recipe.toml", "# resolved by", "# audited, resolved by"),
        "recipe.toml is not the one that the run left",
    ),
    "a recipe of noise": (replace("recipe.toml", "rounds", "\x00"), "recipe.toml cannot be read"),
    "accuracy in the metrics": (better_metrics, "metrics.jsonl is not the one"),
    "a line of the metrics removed": (take("metrics.jsonl"), "metrics.jsonl is not the one"),
    "no model": (remove("model.safetensors"), "model.safetensors, which the run left"),
    "no result": (remove("result.json"), "result.json, which the run left"),
    "no recipe": (remove("recipe.toml"), "recipe.toml, which the run left"),
    "the end removed": (sql("DELETE FROM closings"), "4 entries, and there were 5"),
    "the end of another run": (swap_closing, r"entry 5 (the end of own) does not follow"),
    "the end taken back": (
        sql("UPDATE closings SET files = '{}'"),
        "entry 5 (the end of own) does not follow",
    ),
    "the tail cut off": (
        sql("DELETE FROM closings", "DELETE FROM charges WHERE seq = 4"),
        "3 entries, and there were 5",
    ),
    "a forged result with a forged end": (forge, "claims are not what the charges"),
}


def error(outcome):
    code, _, err = outcome
    assert code == 2, outcome
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize("how", TAMPERED)
def test_what_was_changed_is_named(copy, cli, how):
    damage, told = TAMPERED[how]
    folder = copy("own")
    damage(folder, copy("other", "there"))
    assert told in error(cli("ledger", folder, "--verify"))


CHAIN_ONLY = ("the end of another run", "the end taken back")


@pytest.mark.parametrize("how", [how for how in TAMPERED if how not in CHAIN_ONLY])
def test_plain_reading_warns_of_it(copy, cli, how):
    damage, told = TAMPERED[how]
    folder = copy("own")
    damage(folder, copy("other", "there"))
    code, out, err = cli("ledger", folder)
    assert (code, "epsilon" in out) == (0, True)
    assert any(line.startswith("warning: ") and told in line for line in err.splitlines())
    code, out, _ = cli("ledger", folder, "--json")
    assert (code, any(told in text for text in json.loads(out)["warnings"])) == (0, True)


@pytest.mark.parametrize("name", ["own", "nothing", "shared 2", "shared 3"])
def test_an_honest_run_is_whole_and_warns_of_nothing(copy, cli, name):
    folder = copy(name)
    code, out, err = cli("ledger", folder, "--verify")
    assert (code, err) == (0, "")
    assert "recipe, metrics, model and result are those that the run left" in out
    assert cli("ledger", folder)[::2] == (0, "")


@pytest.mark.parametrize("name", ["nothing", "shared 2"])
@pytest.mark.parametrize("damage", [another_model, better_metrics])
def test_runs_of_every_kind_are_covered(copy, cli, name, damage):
    folder = copy(name)
    damage(folder, None)
    assert "is not the one that the run left" in error(cli("ledger", folder, "--verify"))


def test_a_shared_ledger_has_an_end_for_each_run(made):
    path = made / "shared.db"
    for run, folder in zip(read_runs(path), ("shared 2", "shared 3"), strict=True):
        assert read_closing(path, run) == file_digests(made / folder)
    assert verify(path).length == 10


def test_a_pointer_to_another_run_is_found(copy, made, cli):
    folder = copy("shared 2")
    other = json.loads((made / "shared 3" / "ledger.json").read_text())
    pointer = folder / "ledger.json"
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), "run": other["run"]}))
    assert "recipe.toml is not the recipe" in error(cli("ledger", folder, "--verify"))
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), "run": "nobody"}))
    assert "does not know the run 'nobody'" in error(cli("ledger", folder, "--verify"))


# --- runs that have not ended ---


def stop(line):
    if line["round"] == 2:
        raise KeyboardInterrupt


def crash_in(monkeypatch, name):
    """Crash in a function of the run, or when it writes a file of that name."""

    def die(path, *_, **__):
        if name != "head.json" or path.name == name:
            raise Crash
        return write_atomic(path, *_)

    monkeypatch.setattr(runs, "write_atomic" if name == "head.json" else name, die)


@pytest.mark.parametrize("where", ["report_html", "file_digests", "head.json"])
@pytest.mark.parametrize("again", [False, True])
def test_a_crash_at_the_end_leaves_a_run_that_is_open_or_whole(
    tmp_path, monkeypatch, cli, where, again
):
    """Before the entry it is open, also where it had ended once before; after it it is whole."""
    run = begin(tmp_path / "run")
    if again:
        run.execute(stop)
        run = Run.resume(run.folder, None)
    crash_in(monkeypatch, where)
    with pytest.raises(Crash):
        run.execute()
    code, out, err = cli("ledger", run.folder, "--verify")
    assert (code, err) == (0, "")
    assert ("the run is open" in out) is (where != "head.json")
    told = cli("ledger", run.folder)[2]
    assert ("warning: the run is open" in told) is (where != "head.json")
    monkeypatch.undo()
    Run.resume(run.folder, None).execute()
    code, out, _ = cli("ledger", run.folder, "--verify")
    assert (code, "those that the run left" in out) == (0, True)


def test_an_open_run_still_answers_for_its_recipe_and_its_claims(tmp_path, monkeypatch, cli):
    run = begin(tmp_path / "run")
    crash_in(monkeypatch, "file_digests")
    with pytest.raises(Crash):
        run.execute()
    kept = (run.folder / "result.json").read_bytes()
    smaller_epsilon(run.folder, None)
    assert "claims are not what" in error(cli("ledger", run.folder, "--verify"))
    (run.folder / "result.json").write_bytes(kept)
    replace("recipe.toml", 'source = "seeded"', 'source = "secure"')(run.folder, None)
    assert "noise.source is 'secure'" in error(cli("ledger", run.folder, "--verify"))


@pytest.mark.parametrize("smaller", [False, True])
def test_a_result_of_an_earlier_version_is_compared_by_the_keys_it_has(
    tmp_path, monkeypatch, cli, smaller
):
    run = begin(tmp_path / "run")
    crash_in(monkeypatch, "file_digests")
    with pytest.raises(Crash):
        run.execute()
    path = run.folder / "result.json"
    result = json.loads(path.read_text())
    for claim in result["claims"]:
        del claim["units"], claim["composed"]
        claim["epsilon"] *= 0.9 if smaller else 1
    path.write_text(json.dumps(result))
    _, out, err = cli("ledger", run.folder, "--verify")
    assert ("claims are not what" in out + err) is smaller


@pytest.mark.parametrize("key", ["units", "composed"])
def test_what_was_composed_is_compared_with_the_ledger(tmp_path, monkeypatch, cli, key):
    run = begin(tmp_path / "run")
    crash_in(monkeypatch, "file_digests")
    with pytest.raises(Crash):
        run.execute()
    path = run.folder / "result.json"
    result = json.loads(path.read_text())
    result["claims"][0][key] = 2 if key == "units" else None
    path.write_text(json.dumps(result))
    assert "claims are not what" in error(cli("ledger", run.folder, "--verify"))


def test_a_run_that_goes_on_is_open_meanwhile(tmp_path, cli):
    run, seen = begin(tmp_path / "run"), []
    run.execute(stop)
    assert "those that the run left" in cli("ledger", run.folder, "--verify")[1]
    again = Run.resume(run.folder, None)
    again.execute(lambda line: seen.append(cli("ledger", run.folder, "--verify")))
    assert [(code, "the run is open" in out) for code, out, _ in seen] == [(0, True)] * 2
    assert "those that the run left" in cli("ledger", run.folder, "--verify")[1]


def test_metrics_that_were_changed_are_remarked_on_when_a_run_goes_on(copy):
    folder = copy("own")
    better_metrics(folder, None)
    notes = Run.resume(folder, None).execute()["notes"]
    assert "metrics.jsonl was changed after the run had ended" in notes


# --- the report ---


def changed_report(folder):
    path = folder / "report.html"
    path.write_text(path.read_text() + "<p>epsilon 0.1</p>")


def noted(folder):
    return read_closing(folder / "ledger.db", next(iter(read_runs(folder / "ledger.db"))))


def test_a_report_that_was_changed_is_found_and_written_again(copy, cli):
    folder = copy("own")
    assert "report.html is the one that fedveil wrote" in cli("ledger", folder, "--verify")[1]
    changed_report(folder)
    assert "report.html was changed after fedveil wrote it" in error(
        cli("ledger", folder, "--verify")
    )
    assert cli("report", folder)[0] == 0
    assert "report.html is the one that fedveil wrote" in cli("ledger", folder, "--verify")[1]


@pytest.mark.parametrize("name", ["own", "shared 2"])
def test_a_report_with_other_content_is_recorded_again_and_nothing_else(copy, made, cli, name):
    folder = copy(name)
    before, length = file_digests(folder), verify(Path(ledger_of(folder))).length
    page = (folder / "report.html").read_bytes() + b"<!-- with an audit -->"
    record_report(folder, page)
    (folder / "report.html").write_bytes(page)
    code, out, _ = cli("ledger", folder, "--verify")
    assert (code, "report.html is the one that fedveil wrote" in out) == (0, True)
    assert verify(Path(ledger_of(folder))).length == length + 1
    run = next(iter(read_runs(Path(ledger_of(folder)))))
    now = read_closing(Path(ledger_of(folder)), run)
    assert {k for k in now if now[k] != before[k]} == {"report.html"}
    assert json.loads((folder / "head.json").read_text())["length"] == length + 1


def test_a_report_of_changed_files_is_not_vouched_for(copy, cli):
    folder = copy("own")
    before = noted(folder)
    better_metrics(folder, None)
    assert cli("report", folder)[0] == 0
    assert noted(folder) == before
    assert "metrics.jsonl is not the one" in (folder / "report.html").read_text()


def test_a_run_without_a_recorded_report_says_so(copy, cli):
    """Runs of older versions, and directories that were handed on without it."""
    folder = copy("own")
    (folder / "report.html").unlink()
    assert "there is no report.html" in cli("ledger", folder, "--verify")[1]
    path = folder / "ledger.db"
    files = {name: digest for name, digest in noted(folder).items() if name != "report.html"}
    with closing(sqlite3.connect(path)) as db, db:
        run = next(iter(read_runs(path)))
        hash_chain.append(db, hash_chain.Closing, run, json.dumps(files), "now")
    (folder / "report.html").write_text("mine")
    assert "report.html is not covered until" in cli("ledger", folder, "--verify")[1]


def test_an_export_has_the_ends(copy, cli, tmp_path):
    folder = copy("shared 3")
    assert cli("ledger", folder, "--export", tmp_path / "out.json")[0] == 0
    found = json.loads((tmp_path / "out.json").read_text())["chain"]
    ends = [json.loads(link["files"]) for link in found if "files" in link]
    assert (len(ends), ends[1]) == (2, file_digests(folder))


def test_a_result_of_an_older_version_lacks_newer_fields_and_is_whole(copy):
    folder = copy("own")
    (told,) = statements(folder / "ledger.db")
    path = folder / "result.json"
    result = json.loads(path.read_text())
    for claim in result["claims"]:
        assert claim.pop("condition") == ""
    path.write_text(json.dumps(result))
    assert _claim_differences(folder, told, ended=True) == []
    result["claims"][0]["epsilon"] *= 0.99
    path.write_text(json.dumps(result))
    assert len(_claim_differences(folder, told, ended=True)) == 1
