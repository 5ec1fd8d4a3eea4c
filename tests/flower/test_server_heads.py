"""What sites sign of the server's ledger: never a fork, a rewrite, a gap or an older end."""

import json
import shutil
import sqlite3
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from fedveil.base.errors import BadInput
from fedveil.flower.certificates import write_node_key
from fedveil.flower.federation_files import signs_answers
from fedveil.flower.head_signatures import EVERY
from fedveil.flower.ledger_tail import MOST_HASHES, LedgerTail, most_tail_bytes
from fedveil.flower.messages import Answer, HeadAsk, HeadReply, Refusal, bytes_tensor
from fedveil.flower.site import Site
from fedveil.flower.site_heads import HeadRefused, SiteHeads
from fedveil.privacy.ledger.file import read_about
from fedveil.privacy.ledger.hash_chain import (
    Head,
    json_digest,
    next_hash,
    read_hashes,
    read_links,
    verify,
)
from fedveil.privacy.ledger.signed_head import (
    SIGNATURES,
    SignedHead,
    history_of,
    key_fingerprint,
    key_line,
    read_signatures,
)
from tests.flower.conftest import AT_SITES, FREE, NAMES, SECURE, stop_after
from tests.flower.sites import CENTRAL, LOCAL, Server, charges, hashes_of, open_site, tail_of
from tests.flower.transports import Killed, changed

RUN, PLAN, OTHER = "1" * 32, "2" * 64, "3" * 64
AT_SITE = {**LOCAL, "noise": AT_SITES, "budget": FREE, "rounds": 3}
KEY = ec.generate_private_key(ec.SECP384R1())


def tail(length: int, since: int = 0, hashes: Any = None, **signed: SignedHead) -> LedgerTail:
    found = hashes_of(length) if hashes is None else hashes
    return LedgerTail(since, found[since:], OTHER, signed)


def head(length: int, site: str = "north", hashes: Any = None, **changes: Any) -> SignedHead:
    """What a site signs of a ledger."""
    found = (hashes_of(length) if hashes is None else hashes)[: length + 1]
    place = (RUN, PLAN, site, length, found[-1], history_of("", found), OTHER, OTHER)
    return replace(SignedHead(*place), **changes).sign(KEY)


@pytest.fixture
def heads(tmp_path: Path) -> SiteHeads:
    return SiteHeads(tmp_path / "heads.db", "north", key_line(KEY.public_key()))


# the signature


def test_a_signature_is_of_every_value_and_of_its_own_key() -> None:
    signed = head(3)
    signed.check()
    assert SignedHead.from_dict(json.loads(json.dumps(signed.to_dict()))) == signed
    other = ec.generate_private_key(ec.SECP384R1())
    for name, value in signed.to_dict().items():
        changed = value + 1 if name == "length" else value[:-1] + ("0" if value[-1] != "0" else "1")
        with pytest.raises(BadInput, match=r"'north'|'nort"):
            replace(signed, **{name: changed}).check()
    for wrong in (
        replace(signed, key=key_line(other.public_key())),
        replace(signed, key=f"{signed.key} north"),
        replace(signed, signature=signed.signature.upper()),
        replace(signed, signature=""),
        replace(signed, key="ssh-rsa AAAA"),
    ):
        with pytest.raises(BadInput):
            wrong.check()


@pytest.mark.parametrize(
    "change", [{"length": "3"}, {"length": True}, {"length": -1}, {"run": 1}, {"more": "x"}, None]
)
def test_values_that_are_no_signed_head_are_refused(change: Any) -> None:
    values = None if change is None else {**head(3).to_dict(), **change}
    with pytest.raises(BadInput, match="signed head"):
        SignedHead.from_dict(values)


def test_a_history_is_of_every_hash_in_order() -> None:
    a, b, c = hashes_of(2)
    assert history_of(history_of("", [a]), [b, c]) == history_of("", [a, b, c])
    found = {history_of("", each) for each in ([a, b, c], [a, c, b], [a, b], [b, c], [a + b, c])}
    assert len(found) == 5


# what a site has seen


def test_a_ledger_that_grows_is_kept_and_the_same_again_changes_nothing(heads: SiteHeads) -> None:
    assert heads.extend(RUN, tail(2), None) == (hashes_of(2)[-1], history_of("", hashes_of(2)))
    assert heads.extend(RUN, tail(2), None)[0] == hashes_of(2)[-1]
    assert heads.extend(RUN, tail(5, 2), None)[1] == history_of("", hashes_of(5))
    assert heads.extend(RUN, tail(7, 1), None)[1] == history_of("", hashes_of(7))  # some again
    assert heads.known(RUN) == dict(enumerate(hashes_of(7)))
    assert heads.extend("4" * 32, tail(1), None)[0] == hashes_of(1)[-1]  # another run


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (tail(4), "entry 5 .* cut off|has 4 entries, and this site has seen 5"),
        (tail(7, 6), "missing"),
        (tail(6, 0, [*hashes_of(4), OTHER, OTHER]), "entry 5 .* rewritten"),
        (tail(6, 0, [OTHER, *hashes_of(6)[1:]]), "entry 0 .* rewritten"),
        (tail(6, 5, [*hashes_of(4), OTHER, OTHER]), "entry 5 .* rewritten"),
        (tail(5, 0, [*hashes_of(4), OTHER]), "entry 5 .* rewritten"),
    ],
    ids=["shorter", "gap", "rewritten", "another beginning", "another last", "fork"],
)
def test_a_ledger_that_is_another_is_refused_and_nothing_changes(
    heads: SiteHeads, sent: LedgerTail, words: str
) -> None:
    heads.extend(RUN, tail(5), None)
    for act in (lambda: heads.check(RUN, sent), lambda: heads.extend(RUN, sent, None)):
        with pytest.raises(HeadRefused, match=words):
            act()
    assert heads.known(RUN) == dict(enumerate(hashes_of(5)))
    heads.check(RUN, tail(6, 5))


def test_the_first_ask_of_a_run_begins_at_the_first_entry(heads: SiteHeads) -> None:
    with pytest.raises(HeadRefused, match="begins after entry 1, and this site has seen 0"):
        heads.check(RUN, tail(3, 1))
    heads.check(RUN, tail(0))


def test_a_file_that_was_put_back_is_noticed_by_the_server_s_copy(heads: SiteHeads) -> None:
    """The whole folder and the witness, from a backup: only the server knows a later head."""
    heads.extend(RUN, tail(3), None)
    backup = heads.file_path.with_name("backup")
    shutil.copy(heads.file_path, backup)
    heads.extend(RUN, tail(5), None)
    later = tail(6, north=head(5))
    heads.check(RUN, later)
    shutil.copy(backup, heads.file_path)
    with pytest.raises(HeadRefused, match="signature at entry 5, and this site remembers 3"):
        heads.check(RUN, later)
    heads.file_path.unlink()
    with pytest.raises(HeadRefused, match=r"remembers 0: .* lost or put back"):
        heads.extend(RUN, later, None)
    heads.note_accepted(Head(OTHER, 1))
    assert heads.extend(RUN, later, None)[1] == history_of("", hashes_of(6))
    heads.check(RUN, tail(7, north=head(6)))
    heads.file_path.unlink()
    heads.note_accepted(Head(OTHER, 1))
    assert heads.extend(RUN, tail(6, 5, north=head(5)), None)[0] == hashes_of(6)[-1]
    assert heads.known(RUN) == {5: hashes_of(5)[-1], 6: hashes_of(6)[-1]}
    heads.check(RUN, tail(7, 4, north=head(5)))
    with pytest.raises(HeadRefused, match=r"entry 5 .* rewritten"):
        heads.check(RUN, tail(7, 4, [*hashes_of(4), OTHER, OTHER, OTHER]))


def test_one_acceptance_is_for_one_head_of_each_run(heads: SiteHeads) -> None:
    heads.note_accepted(Head(OTHER, 1))
    heads.extend(RUN, tail(6, north=head(5)), None)
    with pytest.raises(HeadRefused, match="lost or put back"):
        heads.check(RUN, tail(9, north=head(8)))
    other = "4" * 32
    heads.extend(other, tail(6, north=head(5, run=other)), None)


@pytest.mark.parametrize(
    ("signed", "words"),
    [
        (replace(head(5), hash=OTHER), "did not sign"),
        (replace(head(5), signature=""), "did not sign"),
        (head(5, run="4" * 32), "of another run"),
        (head(3, hashes=[*hashes_of(2), OTHER]), "entry 3 of another ledger"),
    ],
)
def test_a_head_that_this_site_did_not_sign_is_refused(
    heads: SiteHeads, signed: SignedHead, words: str
) -> None:
    heads.extend(RUN, tail(3), None)
    with pytest.raises(HeadRefused, match=words):
        heads.check(RUN, tail(6, north=signed))
    heads.check(RUN, tail(6, south=replace(signed, site="south")))  # another site's business


def test_a_head_that_is_signed_by_another_key_of_the_site_is_refused(heads: SiteHeads) -> None:
    heads.extend(RUN, tail(3), None)
    forged = replace(head(3)).sign(ec.generate_private_key(ec.SECP384R1()))
    with pytest.raises(HeadRefused, match="another key"):
        heads.check(RUN, tail(6, north=forged))


# what an ask carries


def test_a_tail_comes_back_as_it_was_and_is_as_long_as_said() -> None:
    sent = tail(MOST_HASHES - 1, north=head(3), south=head(2, "south"))
    back = LedgerTail.from_bytes(sent.to_bytes())
    assert back == sent
    assert back.length == MOST_HASHES - 1
    names = [f"{k}" * 64 for k in range(3)]
    whole = tail(MOST_HASHES - 1, **{name: head(9, name) for name in names})
    assert len(whole.to_bytes()) <= most_tail_bytes(3)


@pytest.mark.parametrize(
    "change",
    [
        {"since": -1},
        {"since": "0"},
        {"since": True},
        {"hashes": ""},
        {"hashes": "a" * 63},
        {"hashes": "g" * 64},
        {"hashes": "A" * 64},
        {"hashes": ["a" * 64]},
        {"hashes": "a" * 64 * (MOST_HASHES + 1)},
        {"software": "a"},
        {"software": None},
        {"signed": {"south": head(3).to_dict()}},
        {"signed": {"north": {}}},
        {"signed": []},
        {"signed": None},
    ],
)
def test_a_tail_that_is_none_is_refused(change: Any) -> None:
    raw = {**json.loads(tail(2).to_bytes()), **change}
    with pytest.raises(BadInput):
        LedgerTail.from_bytes(json.dumps(raw).encode())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 60_000, b"{}"])
def test_bytes_that_are_no_tail_are_refused(content: bytes) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        LedgerTail.from_bytes(content)


# a site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return signing_site(tmp_path)


def signing_site(folder: Path, **keys: Any) -> Site:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node").exists():
        write_node_key(folder, "north")
    return open_site(folder, key="node", **keys)


def signed_of(reply: Any) -> SignedHead:
    assert isinstance(reply, Answer | HeadReply), reply
    return SignedHead.from_dict(json.loads(reply.signature.numpy().tobytes()))


def refused(reply: Any, words: str) -> None:
    assert isinstance(reply, Refusal)
    assert words in reply.reason
    assert "\n" not in reply.reason


def test_an_answer_has_a_signature_of_the_ledger_in_its_ask(site: Site) -> None:
    server = Server(site)
    signed = signed_of(server.answer())
    signed.check()
    assert (signed.run, signed.plan, signed.site) == (server.run, site.digest, "north")
    assert (signed.length, signed.hash) == (1, server.hashes[1])
    assert signed.history == history_of("", server.hashes)
    assert signed.key == " ".join(
        (Path(site.file.recipe).parent / "node.pub").read_text().split()[:2]
    )


def test_a_server_that_forks_gets_no_answer_no_signature_and_no_charge(site: Site) -> None:
    server = Server(site)
    assert isinstance(server.answer(1), Answer)
    honest = [*server.hashes, OTHER]
    for ledger, words in (
        (tail_of([*honest[:1], OTHER, OTHER]), "rewritten"),
        (tail_of(honest[:1]), "cut off"),
        (tail_of([*honest, OTHER], 2), "missing"),
        (bytes_tensor(b""), "cannot be read"),
        (bytes_tensor(b"nonsense"), "cannot be read"),
    ):
        refused(server.answer(2, ledger_tail=ledger), words)
        ask = HeadAsk(server.run, 2, 0, site.digest, ledger)
        refused(site.answer(ask), words)
    assert charges(site) == 1
    assert isinstance(server.answer(2, ledger_tail=tail_of(honest)), Answer)


def test_what_was_signed_is_on_disk_before_it_is_sent(site: Site, monkeypatch: Any) -> None:
    from fedveil.flower import site as site_module

    seen: list[Any] = []
    real = site_module.SignedHead.sign

    def sign(unsigned: SignedHead, key: Any) -> SignedHead:
        seen.append(site.heads.known(unsigned.run))
        return real(unsigned, key)

    monkeypatch.setattr(site_module.SignedHead, "sign", sign)
    server = Server(site)
    reply = server.answer()
    assert seen == [dict(enumerate(server.hashes))]
    with sqlite3.connect(site.ledger.heads_file) as db:
        ((kept,),) = db.execute("SELECT head FROM signatures").fetchall()
    assert SignedHead.from_dict(json.loads(kept)) == signed_of(reply)


def test_a_charge_comes_before_the_head_is_kept(site: Site, monkeypatch: Any) -> None:
    """So that the head of the site's own ledger that goes with it has the charge."""
    server = Server(site)
    server.answer()
    assert site.heads.own_head() == site.ledger.current_head()
    assert charges(site) == 1


def test_an_answer_that_is_kept_is_signed_anew(site: Site) -> None:
    server = Server(site)
    ask = server.ask()
    first = site.answer(ask)
    longer = replace(ask, ledger_tail=tail_of([*server.hashes, OTHER]))
    again = site.answer(longer)
    assert torch.equal(first.report, again.report)
    assert (signed_of(first).length, signed_of(again).length) == (1, 2)
    signed_of(again).check()
    refused(site.answer(ask), "cut off")
    assert charges(site) == 1


def test_a_site_that_is_asked_for_a_signature_alone_is_charged_nothing(site: Site) -> None:
    ask = HeadAsk(RUN, 1, 0, site.digest, tail_of(hashes_of(4)))
    assert signed_of(site.answer(ask)).length == 4
    assert not site.ledger.file.exists()
    refused(site.answer(replace(ask, plan=PLAN)), "own copy")


def test_a_site_without_a_key_signs_nothing_and_looks_all_the_same(tmp_path: Path) -> None:
    server = Server(open_site(tmp_path))
    assert len(server.answer().signature) == 0
    refused(server.answer(2, ledger_tail=tail_of([OTHER])), "cut off")


def test_with_a_secret_cohort_an_answer_has_no_signature(tmp_path: Path) -> None:
    """It would show who takes part. The same site signs when all are asked."""
    free = {**CENTRAL, "budget": {"epsilon": 100.0, "delta": 1e-5}}
    policy = {"epsilon": {"client": 1e6}, "trust": ["central"]}
    folder = tmp_path / "north"
    site = signing_site(folder, recipe=free, policy=policy)
    assert not signs_answers(site.plan)
    server = Server(site)
    assert len(server.answer().signature) == 0
    refused(server.answer(2, ledger_tail=tail_of([OTHER])), "cut off")
    ask = HeadAsk(server.run, 2, 0, site.digest, tail_of(server.hashes))
    assert signed_of(site.answer(ask)).length == len(server.hashes) - 1


def test_ledger_and_witness_put_back_together_are_noticed_by_the_site_s_own_signature(
    site: Site, tmp_path: Path
) -> None:
    """The file with the heads was not in the backup: it remembers the ledger's end."""
    server = Server(site)
    server.answer(1)
    witness = site.ledger.witness_path
    for file in (site.ledger.file, witness):
        shutil.copy(file, tmp_path / f"{file.name}.backup")
    server.answer(2)
    for file in (site.ledger.file, witness):
        shutil.copy(tmp_path / f"{file.name}.backup", file)
    for log in site.ledger.folder.glob("ledger.db-*"):
        log.unlink()
    refused(server.answer(3), "cannot be used")
    with pytest.raises(BadInput, match="the end was cut off"):
        Site.open(tmp_path / "site.toml")
    shutil.rmtree(site.ledger.folder / "none", ignore_errors=True)
    site.ledger.file.unlink()
    witness.unlink()
    with pytest.raises(BadInput, match=r"heads\.db remembers it"):
        Site.open(tmp_path / "site.toml")


def test_a_backup_of_everything_is_noticed_by_the_server_s_copy(site: Site, tmp_path: Path) -> None:
    server = Server(site)
    server.signed["north"] = signed_of(server.answer(1))
    shutil.copytree(site.ledger.folder, tmp_path / "backup")
    shutil.copy(site.ledger.witness_path, tmp_path / "head.backup")
    server.signed["north"] = signed_of(server.answer(2))
    shutil.rmtree(site.ledger.folder)
    shutil.copytree(tmp_path / "backup", site.ledger.folder)
    shutil.copy(tmp_path / "head.backup", site.ledger.witness_path)
    Site.open(tmp_path / "site.toml")  # by itself it notices nothing
    refused(server.answer(3), "signature at entry 2, and this site remembers 1")
    assert charges(site) == 1
    site.ledger.accept()
    assert isinstance(server.answer(3), Answer)


def test_a_damaged_file_of_heads_is_the_owner_s_matter(site: Site) -> None:
    server = Server(site)
    server.answer()
    site.ledger.heads_file.write_bytes(b"no database" * 100)
    refused(server.answer(2), "its owner was told why")


# the server


def kept(three: Any, name: str = "run") -> dict[str, SignedHead]:
    folder = three.folder / name
    run = json.loads((folder / "federation.json").read_text())["run"]
    return read_signatures(folder / SIGNATURES, run)


def hashes(three: Any) -> list[str]:
    return read_hashes(three.folder / "run" / "ledger.db")


def all_signed(three: Any) -> bool:
    """Whether every site has signed the whole ledger, as it is."""
    found, now = kept(three), hashes(three)
    for name, signed in found.items():
        signed.check()
        assert key_fingerprint(signed.key) == key_fingerprint(three.keys[name])
        assert signed.hash == now[signed.length]
        assert signed.history == history_of("", now[: signed.length + 1])
    return {name: signed.length for name, signed in found.items()} == dict.fromkeys(
        NAMES, len(now) - 1
    )


def test_every_answer_signs_the_charge_of_its_round_and_the_end_is_signed_too(
    signing_trio: Any,
) -> None:
    three = signing_trio(AT_SITE)
    server, lengths = three.server(), []
    server.serve(lambda line: lengths.append({n: head.length for n, head in kept(three).items()}))
    assert lengths == [dict.fromkeys(NAMES, k) for k in (1, 2, 3)]
    assert all_signed(three)
    assert [name for name, _ in three.transport.head_asks] == list(NAMES)  # the end alone
    file = three.folder / "run" / SIGNATURES
    assert file.stat().st_mode & 0o777 == 0o600
    three.server().serve()  # nothing is left to sign
    assert len(three.transport.head_asks) == 3


@pytest.mark.parametrize("end", [KeyboardInterrupt, Killed])
def test_a_server_that_was_killed_goes_on_with_the_same_ledger(signing_trio: Any, end: Any) -> None:
    """North has signed, and its signature was lost with the server."""
    three = signing_trio(AT_SITE)
    three.transport.stop, three.transport.end = (2, "south"), end
    with suppress(Killed):
        three.server().serve()
    assert {name: head.length for name, head in kept(three).items()} == dict.fromkeys(NAMES, 1)
    assert max(three.transport.sites["north"].heads.known(kept(three)["north"].run)) == 2
    three.transport.stop = None
    assert three.server().serve()["rounds"] == 3
    assert [outcome.answered for outcome in three.outcomes] == [[*NAMES]] * 3
    assert all_signed(three)


def test_a_ledger_that_the_operator_rewrites_gets_nothing_more(
    signing_trio: Any, monkeypatch: Any
) -> None:
    three = signing_trio(AT_SITE)
    three.server().serve(stop_after(2))
    rewrite(three.folder / "run")
    monkeypatch.setattr("fedveil.runs.run.verify", lambda *known: None)  # the operator's program
    run = three.server()
    run.serve()
    reasons = three.outcomes[-1].declined
    assert {*reasons} == {*NAMES}
    assert all("rewritten" in reason for reason in reasons.values())
    assert all("rewritten" in reason for reason in run.head_signatures.declined.values())
    assert {head.length for head in kept(three).values()} == {2}


def rewrite(folder: Path) -> None:
    """What an operator could always do: another date, and all hashes anew."""
    file = folder / "ledger.db"
    about = read_about(file)
    with sqlite3.connect(file) as db:
        db.execute("UPDATE charges SET charged_at = '2001-01-01' WHERE seq = 2")
        before = json_digest(about)
        for number, (link, _) in enumerate(read_links(file, about["salt"]), 1):
            if number == 2:
                link = replace(link, charged_at="2001-01-01")
            before = next_hash(before, link)
            for table in ("charges", "closings"):
                db.execute(f"UPDATE {table} SET hash = ? WHERE seq = ?", (before, number))
    db.close()
    verify(file)


def test_with_a_secret_cohort_all_sites_sign_in_the_same_rounds(signing_trio: Any) -> None:
    """Who takes part is drawn; what the sites sign, and when, is the same whoever is drawn."""
    recipe = {**CENTRAL, "noise": SECURE, "budget": FREE, "rounds": 2 * EVERY + 2}
    recipe["sample"] = {"kind": "fixed", "size": 1}
    three = signing_trio(recipe)
    lengths = []
    three.server().serve(
        lambda line: lengths.append({n: head.length for n, head in kept(three).items()})
    )
    expected = [EVERY * ((k - 1) // EVERY) + 1 for k in range(1, 2 * EVERY + 3)]
    assert lengths == [dict.fromkeys(NAMES, k) for k in expected]
    assert all_signed(three)
    assert {len(outcome.answered) for outcome in three.outcomes} == {1}
    assert all(len(a.signature) == 0 for sent in three.transport.sent.values() for a in sent)
    tails = [
        LedgerTail.from_bytes(ask.ledger_tail.numpy().tobytes()) for ask in three.transport.asks
    ]
    for before, found in zip(lengths, tails, strict=True):
        assert {name: head.length for name, head in found.last_signed.items()} == before


def test_a_site_that_was_away_is_brought_up_to_date(signing_trio: Any) -> None:
    three = signing_trio(AT_SITE)
    three.transport.away = {"south"}
    three.server().serve(stop_after(2))
    assert {*kept(three)} == {"north", "west"}
    three.transport.away = set()
    server = three.server()
    server.serve()
    assert all_signed(three)
    assert server.head_signatures.signers == [*NAMES]
    assert three.outcomes[-1].answered == [*NAMES]  # no gap for south, nothing new for others


def test_a_site_that_is_very_far_behind_signs_in_several_steps(
    signing_trio: Any, monkeypatch: Any
) -> None:
    from fedveil.flower import head_signatures

    monkeypatch.setattr(head_signatures, "MOST_HASHES", 3)
    three = signing_trio({**AT_SITE, "rounds": 5})
    three.transport.away = {"south"}
    three.server().serve(stop_after(4))
    three.transport.away = set()
    three.server().serve()
    assert all_signed(three)
    assert [name for name, _ in three.transport.head_asks].count("south") > 1


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (changed(signature=lambda a: bytes_tensor(b"nonsense")), "cannot be checked"),
        (
            changed(signature=lambda a: bytes_tensor(json.dumps(head(3).to_dict()).encode())),
            "other",
        ),
    ],
)
def test_a_signature_that_is_none_is_not_kept_and_the_answer_counts(
    signing_trio: Any, behaviour: Any, words: str
) -> None:
    three = signing_trio(AT_SITE)
    three.transport.behaviour["west"] = behaviour
    assert three.server().serve(stop_after(2))["rounds"] == 2
    assert {*kept(three)} == {"north", "south"}
    assert three.outcomes[0].answered == [*NAMES]


def test_a_server_keeps_no_signature_that_it_did_not_ask_for(signing_trio: Any) -> None:
    three = signing_trio(AT_SITE)
    server = three.server()
    server.serve(stop_after(2))
    heads, good = server.head_signatures, kept(three)["west"]
    asked = heads.tail("west")
    asked = replace(asked, since=0, hashes=hashes(three)[:3])
    other = ec.generate_private_key(ec.SECP384R1())
    key = three.transport.sites["west"]._key
    for wrong in (
        replace(good, run="4" * 32).sign(key),
        replace(good, plan=PLAN).sign(key),
        replace(good, site="north").sign(key),
        replace(good, length=1, hash=hashes(three)[1]).sign(key),
        replace(good, history=OTHER).sign(key),
        replace(good, hash=OTHER).sign(key),
        replace(good, server_software=OTHER).sign(key),
        replace(good).sign(other),
        replace(good, software=OTHER),
    ):
        before = (three.folder / "run" / SIGNATURES).read_bytes()
        assert heads.add_signature("west", json.dumps(wrong.to_dict()).encode(), asked)
        assert (three.folder / "run" / SIGNATURES).read_bytes() == before
    assert heads.add_signature("west", json.dumps(good.to_dict()).encode(), asked) == ""


def test_a_line_of_signatures_that_a_crash_cut_off_is_left_out(signing_trio: Any) -> None:
    three = signing_trio(AT_SITE)
    three.server().serve(stop_after(2))
    path = three.folder / "run" / SIGNATURES
    path.write_bytes(path.read_bytes()[:-40])
    assert kept(three)["west"].length == 1
    three.server().serve()
    assert all_signed(three)


def test_a_ledger_of_a_site_that_was_put_back_takes_no_part_while_the_others_go_on(
    signing_trio: Any,
) -> None:
    three = signing_trio({**AT_SITE, "rounds": 4})
    three.server().serve(stop_after(1))
    folder = three.folder / "south"
    shutil.copytree(folder, three.folder / "backup")
    three.server().serve(stop_after(2))
    shutil.rmtree(folder)
    shutil.copytree(three.folder / "backup", folder)
    three.transport.sites["south"] = Site.open(folder / "site.toml")
    server = three.server()
    assert server.serve()["rounds"] == 4
    assert "lost or put back" in three.outcomes[-1].declined["south"]
    assert "lost or put back" in server.head_signatures.declined["south"]
    assert charges(three.transport.sites["south"]) == 1
    assert three.outcomes[-1].answered == ["north", "west"]
