"""`fedveil evidence` and `verify`: what nobody can change in a bundle without being found."""

import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.base.errors import BadInput
from fedveil.flower.certificates import read_signing_key
from fedveil.flower.evidence_check import canonical_json, verify_evidence, zipped
from fedveil.flower.evidence_pack import pack_evidence
from fedveil.privacy.ledger.hash_chain import Closing, Entry, json_digest, next_hash
from fedveil.privacy.ledger.signed_head import (
    SIGNATURES,
    SignedHead,
    history_of,
    key_fingerprint,
)
from tests.flower.conftest import AT_SITES, FREE, NAMES, SECURE, stop_after, three_sites
from tests.flower.sites import CENTRAL, LOCAL, open_site

AT_SITE = {**LOCAL, "noise": AT_SITES, "budget": FREE, "rounds": 3}
POOLED = {**CENTRAL, "noise": SECURE, "budget": FREE, "rounds": 3}
FILES = ["ledger.json", "plan.json", "recipe.toml", "result.json", "signatures.json"]
FILES = [*FILES, "software.json"]
Parts = dict[str, bytes]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that has ended, and that all three sites have signed."""
    three = three_sites(tmp_path_factory.mktemp("ended"), POOLED, sign=True)
    three.server().serve()
    return three


@pytest.fixture(scope="module")
def bundle(ended: Any) -> Path:
    path = ended.folder / "bundle.zip"
    assert pack_evidence(ended.folder / "run", path).endswith("signed by north, south, west")
    return path


def parts_of(path: Path) -> Parts:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def changed_json(name: str, change: Callable[[Any], Any]) -> Callable[[Parts], Parts]:
    """Changes the value in a file, and writes it as fedveil would."""

    def changed(parts: Parts) -> Parts:
        value = json.loads(parts[name])
        other = change(value)
        return {**parts, name: canonical_json(value if other is None else other)}

    return changed


def refused(path: Path, words: str = ".", **options: Any) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        verify_evidence(path, **options)
    assert "\n" not in str(caught.value)


def test_a_bundle_says_what_it_proves_and_what_it_cannot(ended: Any, bundle: Path) -> None:
    text = verify_evidence(bundle)
    result = json.loads((ended.folder / "run" / "result.json").read_text())
    assert f"epsilon {result['claims'][0]['epsilon']:.3f}"[:12] in text
    assert "4 entries" in text
    assert "cannot be told from the bundle alone" in text
    assert text.count("the same software") == 3
    for name in NAMES:
        assert f"key {key_fingerprint(ended.keys[name])}" in text
        seen = verify_evidence(bundle, ended.folder / name / "ledger")
        assert "none missing at the end of the 4 entries" in seen
    assert [*parts_of(bundle)] == FILES


def test_nothing_private_is_in_a_bundle(ended: Any, bundle: Path) -> None:
    """No salt, no fingerprint of data, no cohort, and nothing on who answered."""
    from fedveil.privacy.ledger.file import read_about

    parts = parts_of(bundle)
    content = b"".join(value for name, value in parts.items() if name != "software.json")
    run = ended.folder / "run"
    assert read_about(run / "ledger.db")["salt"].encode() not in content
    assert ended.server().run.training.data.fingerprint.encode() not in content
    assert b"answered" not in content
    assert b"asking" not in content
    heads = [head for _, _, head in json.loads(parts["signatures.json"])["sites"]]
    assert {head["length"] for head in heads} == {4}
    assert all(entry.get("ids", "") == "" for entry in json.loads(parts["ledger.json"])["entries"])


def places(content: bytes, count: int) -> list[int]:
    """Places in a file: both ends, and some between."""
    rng = np.random.default_rng(len(content))
    return sorted({0, len(content) - 1, *rng.integers(len(content), size=count).tolist()})


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_of_any_file_is_found(bundle: Path, tmp_path: Path, name: str) -> None:
    """The archive around it is made to fit, as somebody who hides a change would."""
    parts = parts_of(bundle)
    for place in places(parts[name], 12):
        content = bytearray(parts[name])
        content[place] ^= 1
        path = tmp_path / "changed.zip"
        path.write_bytes(zipped({**parts, name: bytes(content)}))
        refused(path)


def test_a_changed_byte_around_the_files_is_found(bundle: Path, tmp_path: Path) -> None:
    content = bundle.read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        begin = archive.start_dir
        heads = [info.header_offset + k for info in archive.infolist() for k in range(0, 30, 4)]
    path = tmp_path / "changed.zip"
    for place in [*heads, *range(begin, len(content), 7)]:
        other = bytearray(content)
        other[place] ^= 1
        path.write_bytes(other)
        refused(path)
    for other in (
        content + b"\0",
        b"\0" + content,
        content[:-1],
        b"",
        content[: len(content) // 2],
    ):
        path.write_bytes(other)
        refused(path)


@pytest.mark.slow
def test_every_changed_byte_is_found(bundle: Path, tmp_path: Path) -> None:
    parts, path = parts_of(bundle), tmp_path / "changed.zip"
    parts["software.json"] = parts["software.json"]
    for name in FILES:
        for place in range(0, len(parts[name]), 1 if name != "software.json" else 37):
            content = bytearray(parts[name])
            content[place] ^= 1 << (place % 7)
            path.write_bytes(zipped({**parts, name: bytes(content)}))
            refused(path)


def _drop(number: int) -> Callable[[Any], None]:
    return lambda ledger: ledger["entries"].__delitem__(number)


def _swap(ledger: Any) -> None:
    entries = ledger["entries"]
    entries[0], entries[1] = entries[1], entries[0]


def _set(*keys: Any, to: Any) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed_json("ledger.json", _drop(0)), "signed entry 4 and the ledger has 3"),
        (changed_json("ledger.json", _drop(1)), "end was cut off"),
        (changed_json("ledger.json", _drop(3)), "end was cut off"),
        (changed_json("ledger.json", _swap), "changed, removed, inserted or moved"),
        (changed_json("ledger.json", lambda v: v["entries"].insert(1, v["entries"][1])), "moved"),
        (changed_json("ledger.json", lambda v: v["entries"].append(v["entries"][0])), "no site"),
        (changed_json("ledger.json", _set("entries", 1, "event", to="{}")), "moved"),
        (changed_json("ledger.json", _set("entries", 1, "round", to=1)), "moved"),
        (changed_json("ledger.json", _set("entries", 2, "charged_at", to="2001-01-01")), "moved"),
        (changed_json("ledger.json", _set("first", to="0" * 64)), "moved"),
        (changed_json("ledger.json", _set("runs", 0, to="{}")), "ledger.json was changed"),
        (changed_json("ledger.json", _set("runs", to=[])), "ledger.json was changed"),
        (changed_json("ledger.json", _set("more", to=1)), "ledger.json was changed"),
        (changed_json("plan.json", _set("recipe", "rounds", to=2)), "not the plan that north"),
        (changed_json("plan.json", _set("clients", to=4)), "3 sites and the plan 4: one is left"),
        (changed_json("signatures.json", lambda v: v["sites"].__delitem__(2)), "one is left out"),
        (changed_json("signatures.json", _set("sites", 0, 2, to=None)), "north has signed nothing"),
        (changed_json("signatures.json", _set("run", to="0" * 32)), "another site, run or key"),
        (changed_json("signatures.json", _set("sites", 0, 1, to="SHA256:" + "0" * 43)), "or key"),
        (changed_json("signatures.json", _set("sites", 0, 0, to="other")), "another site"),
        (changed_json("signatures.json", _set("sites", 1, 0, to="north")), "the name or the key"),
        (changed_json("software.json", _set("versions", "fedveil", to="9")), "not what the server"),
        (lambda p: {**p, "result.json": p["result.json"] + b"\n"}, "result.json is not the one"),
        (lambda p: {**p, "recipe.toml": b"# " + p["recipe.toml"]}, "recipe.toml is not the one"),
        (lambda p: {**p, "more.json": b"{}"}, "other files"),
        (lambda p: {k: v for k, v in p.items() if k != "plan.json"}, "other files"),
        (lambda p: {k: v for k, v in p.items() if k != "result.json"}, "do not belong together"),
        (lambda p: {**p, "plan.json": p["plan.json"] + b" "}, "not written as fedveil writes it"),
        (lambda p: {**p, "plan.json": b"["}, "plan.json was changed"),
    ],
)
def test_what_an_operator_changes_is_found(
    bundle: Path, tmp_path: Path, change: Callable[[Parts], Parts], words: str
) -> None:
    path = tmp_path / "changed.zip"
    path.write_bytes(zipped(change(parts_of(bundle))))
    refused(path, words)


def forged(ended: Any, bundle: Path, hand: tuple[str, ...], **recipe: Any) -> Parts:
    """A bundle whose operator has the keys of the sites in `hand`, and charges half the rounds.

    Result and closing entry are made to fit; other sites keep their signature up to the fork.
    """
    parts = parts_of(bundle)
    ledger = json.loads(parts["ledger.json"])
    *charges, closing = ledger["entries"]
    entries = [charges[0], charges[1], {**charges[2], "charged_at": "2001-01-01"}, closing]
    ledger["entries"] = entries
    hashes = [ledger["first"]]
    for values in entries:
        link = (Closing if "files" in values else Entry)(**values)
        hashes.append(next_hash(hashes[-1], link))
    signatures = json.loads(parts["signatures.json"])
    for row in signatures["sites"]:
        head, key = SignedHead.from_dict(row[2]), read_signing_key(ended.folder / row[0] / "node")
        length = 4 if row[0] in hand else 2  # the last that the honest ones saw of both
        history = history_of("", hashes[: length + 1])
        values = {"length": length, "hash": hashes[length], "history": history}
        row[2] = replace(head, **values).sign(key).to_dict()
    return {
        **parts,
        "ledger.json": canonical_json(ledger),
        "signatures.json": canonical_json(signatures),
    }


@pytest.mark.parametrize("name", ["ledger.json", "signatures.json", "plan.json", "software.json"])
@pytest.mark.parametrize("value", [None, [], {}, 3, "x", [[]], {"entries": 3}, [None, None, None]])
def test_files_with_other_values_are_one_line(
    bundle: Path, tmp_path: Path, name: str, value: Any
) -> None:
    path = tmp_path / "odd.zip"
    path.write_bytes(zipped({**parts_of(bundle), name: canonical_json(value)}))
    refused(path)


def test_entries_that_sites_signed_and_no_ledger_has_are_one_line(
    ended: Any, bundle: Path, tmp_path: Path
) -> None:
    """Sites see hashes: what an entry says is for whoever checks the bundle."""
    path = tmp_path / "odd.zip"
    for number, key, value in (
        (0, "event", "no event"),
        (0, "event", "[]"),
        (0, "round", None),
        (1, "round", [3]),
        (3, "files", "{"),
        (3, "files", "[]"),
    ):
        ledger = json.loads(parts_of(bundle)["ledger.json"])
        ledger["entries"][number][key] = value
        path.write_bytes(zipped(signed_anew(ended, bundle, ledger)))
        refused(path)


def signed_anew(ended: Any, bundle: Path, ledger: Any, **files: bytes) -> Parts:
    """A bundle with this ledger, whose end all sites have signed."""
    parts = {**parts_of(bundle), **files}
    hashes = [ledger["first"]]
    for values in ledger["entries"]:
        link = (Closing if "files" in values else Entry)(**values)
        hashes.append(next_hash(hashes[-1], link))
    signatures = json.loads(parts["signatures.json"])
    for row in signatures["sites"]:
        key = read_signing_key(ended.folder / row[0] / "node")
        new = {"length": len(hashes) - 1, "hash": hashes[-1], "history": history_of("", hashes)}
        row[2] = replace(SignedHead.from_dict(row[2]), **new).sign(key).to_dict()
    parts["ledger.json"] = canonical_json(ledger)
    return {**parts, "signatures.json": canonical_json(signatures)}


def test_a_fork_is_found_as_long_as_one_site_is_honest(
    ended: Any, bundle: Path, tmp_path: Path
) -> None:
    path = tmp_path / "forged.zip"
    path.write_bytes(zipped(forged(ended, bundle, NAMES)))
    verify_evidence(path)  # nobody is honest
    for honest in NAMES:
        hand = tuple(name for name in NAMES if name != honest)
        path.write_bytes(zipped(forged(ended, bundle, hand)))
        refused(path, f"{honest} has signed entry 2 of 4 entries, so that a fork")
        assert "relies" not in verify_evidence(path, absent=[honest])
        with pytest.raises(BadInput, match="rewritten, or is a fork"):
            verify_evidence(path, ended.folder / honest / "ledger", [honest])
        parts = forged(ended, bundle, hand)
        kept = json.loads(parts["signatures.json"])
        mine = json.loads(parts_of(bundle)["signatures.json"])
        rows = zip(kept["sites"], mine["sites"], strict=True)
        kept["sites"] = [b if b[0] == honest else a for a, b in rows]  # what it really signed
        path.write_bytes(zipped({**parts, "signatures.json": canonical_json(kept)}))
        refused(path, f"not the one whose entry 4 {honest} has signed.*fork")


def test_a_head_with_another_past_is_no_signature_of_this_ledger(
    ended: Any, bundle: Path, tmp_path: Path
) -> None:
    """A site sees no entries: it was sent the hashes of one ledger, and then the end of another."""
    parts = parts_of(bundle)
    signatures = json.loads(parts["signatures.json"])
    row = signatures["sites"][1]
    head = SignedHead.from_dict(row[2])
    past = history_of("", ["0" * 64] * head.length)
    key = read_signing_key(ended.folder / row[0] / "node")
    row[2] = replace(head, history=history_of(past, [head.hash])).sign(key).to_dict()
    path = tmp_path / "past.zip"
    path.write_bytes(zipped({**parts, "signatures.json": canonical_json(signatures)}))
    refused(path, f"entry 4 {row[0]} has signed.*fork")


def test_a_key_of_the_operator_s_own_has_another_fingerprint(bundle: Path, tmp_path: Path) -> None:
    """All a bundle can do is print the keys: whose they are, its reader has to know."""
    parts = parts_of(bundle)
    signatures = json.loads(parts["signatures.json"])
    row, other = signatures["sites"][0], ec.generate_private_key(ec.SECP384R1())
    head = SignedHead.from_dict(row[2]).sign(other)
    row[2] = head.to_dict()
    path = tmp_path / "other.zip"
    path.write_bytes(zipped({**parts, "signatures.json": canonical_json(signatures)}))
    refused(path, "another site, run or key")
    row[1] = key_fingerprint(head.key)
    path.write_bytes(zipped({**parts, "signatures.json": canonical_json(signatures)}))
    assert row[1] in verify_evidence(path)


def test_claims_that_the_charges_do_not_come_to_are_found(
    ended: Any, bundle: Path, tmp_path: Path
) -> None:
    """A server that lied in its result, before the sites signed the digest of it."""
    from fedveil.privacy.ledger.hash_chain import digest

    parts = parts_of(bundle)
    result = json.loads(parts["result.json"])
    result["claims"][0]["epsilon"] /= 2
    parts["result.json"] = json.dumps(result).encode()
    ledger = json.loads(parts["ledger.json"])
    closing = ledger["entries"][-1]
    files = {**json.loads(closing["files"]), "result.json": digest(parts["result.json"])}
    closing["files"] = json.dumps(files, sort_keys=True)
    path = tmp_path / "lie.zip"
    lie = {"result.json": parts["result.json"]}
    path.write_bytes(zipped(signed_anew(ended, bundle, ledger, **lie)))
    refused(path, "not what the charges come to")


def test_a_missing_tail_is_found_with_a_site_s_own_ledger_alone(
    ended: Any, bundle: Path, tmp_path: Path
) -> None:
    """The bundle of an earlier moment, when all had signed: whole, and not the end."""
    parts = parts_of(bundle)
    ledger = json.loads(parts["ledger.json"])
    ledger["entries"] = ledger["entries"][:2]
    body = parts["recipe.toml"].split(b"\n", 1)[1]
    parts = signed_anew(ended, bundle, ledger, **{"recipe.toml": body})
    del parts["result.json"]
    path = tmp_path / "early.zip"
    path.write_bytes(zipped(parts))
    text = verify_evidence(path)
    assert "the run is open" in text
    assert "cannot be told from the bundle alone" in text
    refused(path, "2 entries, and .* has seen 4: the end is missing", own=ended.folder / "north")
    refused(path, "the end is missing", own=ended.folder / "north" / "ledger")


@pytest.fixture(autouse=True)
def owners(ended: Any) -> None:
    """North's folder looks like an owner's."""
    (ended.folder / "north" / "owner.toml").write_text("")


def test_a_ledger_of_somebody_else_is_named(ended: Any, bundle: Path, tmp_path: Path) -> None:
    stranger = open_site(tmp_path / "stranger")
    for own in (tmp_path, stranger.ledger.folder):
        refused(bundle, "knows nothing of the ledger of run", own=own)
    (tmp_path / "heads.db").write_bytes(b"no database" * 100)
    refused(bundle, "cannot be read", own=tmp_path)
    refused(bundle, "--absent is 'nobody': the sites are north, south, west", absent=["nobody"])


def test_a_run_on_its_way_is_packed_as_far_as_it_is_signed(tmp_path: Path) -> None:
    three = three_sites(tmp_path, AT_SITE, sign=True)
    server, run = three.server(), three.folder / "run"
    with pytest.raises(BadInput, match="no run of a federation"):
        pack_evidence(run, tmp_path / "none.zip")
    server.serve(stop_after(2))
    said = pack_evidence(run, tmp_path / "early.zip")
    assert "2 entries, the last signed by north, south, west; 1 later entries" in said
    text = verify_evidence(tmp_path / "early.zip")
    assert "the run is open" in text
    parts = parts_of(tmp_path / "early.zip")
    for name in parts:
        for place in places(parts[name], 3):
            content = bytearray(parts[name])
            content[place] ^= 1
            (tmp_path / "changed.zip").write_bytes(zipped({**parts, name: bytes(content)}))
            refused(tmp_path / "changed.zip")
    three.transport.away = {"west"}
    three.server().serve()
    said = pack_evidence(run, tmp_path / "late.zip")
    assert "signed by north, south and not by west" in said
    refused(tmp_path / "late.zip", "west has signed entry 2 of 6 entries")
    assert "west: has signed entry 2" in verify_evidence(tmp_path / "late.zip", absent=["west"])
    early = tmp_path / "early.zip"
    refused(early, "the end is missing", own=tmp_path / "south" / "ledger")
    with pytest.raises(BadInput, match="exists"):
        pack_evidence(run, tmp_path / "late.zip")


def test_what_was_changed_at_the_server_is_not_packed(ended: Any, tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "bundle.zip"
    for name, words in (
        ("result.json", "is not the one that sites have signed"),
        ("recipe.toml", "is not the one that sites have signed"),
        ("parties.json", "not of the plan"),
        (SIGNATURES, "no site has signed"),
    ):
        shutil.copytree(ended.folder / "run", run)
        text = (run / name).read_text()
        if name == "parties.json":
            text = text.replace('"clients": 3', '"clients": 4')
        (run / name).write_text("" if name == SIGNATURES else text + " ")
        with pytest.raises(BadInput, match=words):
            pack_evidence(run, target)
        shutil.rmtree(run)
    assert not target.exists()


def test_verify_is_quick_needs_no_torch_and_ends_with_2(bundle: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv = ['fedveil', 'verify', *sys.argv[1:]]\n"
        "import fedveil.cli.main as main\n"
        "try:\n    main.main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program]
    began = time.monotonic()
    done = subprocess.run([*command, str(bundle)], capture_output=True, text=True)
    seconds = time.monotonic() - began
    assert (done.returncode, done.stderr) == (0, "")
    assert "none changed" in done.stdout
    assert seconds < 20.0  # on a machine that may be very busy
    wrong = tmp_path / "wrong.zip"
    wrong.write_bytes(bundle.read_bytes()[:-1])
    done = subprocess.run([*command, str(wrong)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_the_same_files_are_the_same_archive() -> None:
    files = {"b": b"2", "a": b"1"}
    assert zipped(files) == zipped(dict(reversed(files.items())))
    with zipfile.ZipFile(BytesIO(zipped(files))) as archive:
        assert archive.namelist() == ["a", "b"]
    assert json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1})
