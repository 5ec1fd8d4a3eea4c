"""`fedveil evidence`: pack what sites have signed of a run, for whoever wants to check it."""

import json
from pathlib import Path

from fedveil.base.errors import BadInput
from fedveil.flower.evidence_check import (
    LEDGER,
    PLAN,
    RECIPE,
    RESULT,
    SIGNED,
    SOFTWARE,
    SignedLedger,
    canonical_json,
    zipped,
)
from fedveil.flower.head_signatures import PARTIES
from fedveil.privacy.ledger.file import ledger_snapshot, query, read_about
from fedveil.privacy.ledger.hash_chain import digest, json_digest, read_links, verify
from fedveil.privacy.ledger.signed_head import SIGNATURES, SignedHead, read_signatures
from fedveil.runs.evidence import ledger_path
from fedveil.runs.run_directory import write_new


def pack_evidence(folder: Path, target: Path) -> str:
    """Pack the evidence of a federation's run into a new file, and return what is in it.

    The ledger goes as far as at least one site has signed it. Nothing that is private goes in: no
    salt, no cohort, no fingerprint of data in the clear, and of each site its last signature alone.

    | edge | behaviour |
    |---|---|
    | no run directory of a federation | BadInput |
    | no site has signed yet | BadInput |
    | the ledger is damaged, or is not the one that a site has signed | BadInput |
    | recipe or result are not those that the signed ledger has | BadInput |
    | later entries that nobody has signed | left out, and counted in the sentence |
    | the target exists or cannot be written | BadInput |
    """
    try:
        parties = json.loads((folder / PARTIES).read_text())
        run = str(json.loads((folder / "federation.json").read_text())["run"])
        plan, software = parties["plan"], parties["software"]
        sites = [(str(name), str(key)) for name, key in parties["sites"]]
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise BadInput(
            f"{folder} is no run of a federation whose sites sign its ledger: use fedveil ledger "
            f"--export ({e})"
        ) from e
    heads = read_signatures(folder / SIGNATURES, run)
    heads = {name: heads[name] for name, _ in sites if name in heads}
    if not heads:
        raise BadInput(f"{folder}: no site has signed the ledger yet")
    end = max(head.length for head in heads.values())
    if not end:
        raise BadInput(f"{folder}: the ledger had no entries yet when sites signed it")
    with ledger_snapshot(ledger_path(folder)):
        ledger, length = _signed_ledger(folder, end)
    for head in heads.values():
        head.check()
        ledger.check_head(head)
        if head.plan != json_digest(plan):
            raise BadInput(f"{folder / PARTIES} is not of the plan that {head.site} has signed")
    signatures = [
        [name, key, heads[name].to_dict() if name in heads else None] for name, key in sites
    ]
    files = {
        LEDGER: canonical_json(_content(ledger)),
        PLAN: canonical_json(plan),
        SOFTWARE: canonical_json(software),
        SIGNED: canonical_json({"run": run, "sites": signatures}),
        **_files(folder, ledger),
    }
    write_new(target, zipped(files))
    return _sentence(target, ledger, heads, [name for name, _ in sites], length)


def _signed_ledger(folder: Path, end: int) -> tuple[SignedLedger, int]:
    """Return the first `end` entries of a run's ledger, and how many there are.

    Raises BadInput if the ledger is damaged or shorter.
    """
    file = ledger_path(folder)
    length, about = verify(file).length, read_about(file)
    if length < end:
        raise BadInput(f"{file}: {length} entries, and a site has signed {end}: the end is missing")
    links = [link for link, _ in read_links(file, about["salt"])][:end]
    texts = [str(text) for (text,) in query(file, "SELECT about FROM runs ORDER BY rowid")]
    texts = [text for text in texts if int(json.loads(text)["after"]) < end]
    content = {
        "first": json_digest(about),
        "runs": texts,
        "entries": [vars(link) for link in links],
    }
    return SignedLedger.from_json(file, content), length


def _content(ledger: SignedLedger) -> dict[str, object]:
    """Return the content of ledger.json."""
    entries = [vars(link) for link in ledger.links]
    return {"first": ledger.hashes[0], "runs": ledger.registered, "entries": entries}


def _files(folder: Path, ledger: SignedLedger) -> dict[str, bytes]:
    """Return recipe and result as the signed ledger has them, the result only of an ended run.

    The first line of the recipe, with versions and machine, is covered by the end alone. BadInput
    if a file was changed.
    """
    closed, files = ledger.closing_files, dict[str, bytes]()
    for name in (RECIPE, RESULT) if closed else (RECIPE,):
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as e:
            raise BadInput(f"{folder / name} cannot be read: {e.strerror}") from e
        if closed and digest(files[name]) != closed.get(name):
            raise BadInput(
                f"{folder / name} is not the one that sites have signed: it was changed, or the "
                "run went on; start the server again, so that they sign the end"
            )
    if not closed:
        files[RECIPE] = files[RECIPE].split(b"\n", 1)[-1]
    return files


def _sentence(
    target: Path,
    ledger: SignedLedger,
    heads: dict[str, SignedHead],
    sites: list[str],
    length: int,
) -> str:
    """Return what was packed, who has signed its last entry, and what is not in it."""
    signers = [name for name in sites if name in heads and heads[name].length == ledger.length]
    others = [name for name in sites if name not in signers]
    text = f"written: {target}, {ledger.length} entries, the last signed by {', '.join(signers)}"
    if others:
        text += f" and not by {', '.join(others)}"
    if length > ledger.length:
        text += (
            f"; {length - ledger.length} later entries, which no site has signed, are not in it: "
            "start the server again while sites are online"
        )
    return text
