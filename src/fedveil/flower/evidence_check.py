"""`fedveil verify`: what an evidence bundle proves, without the run and without PyTorch.

    ledger.json       the ledger's entries, and what the run registered with; no salt, no cohort
    plan.json         what the plan's digest covers, which every site compares with its own copy
    recipe.toml       the recipe with every choice filled in
    result.json       the result with its claims, if the run has ended
    signatures.json   the sites, their public keys, and the last head that each has signed
    software.json     digests of the server's installed files, and versions

The proof note is docs/proofs/evidence.md.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput, one_line
from fedveil.base.software import software_digest
from fedveil.flower.site_heads import SiteHeads
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.privacy.ledger.file import Charge
from fedveil.privacy.ledger.hash_chain import (
    Closing,
    Entry,
    Link,
    digest,
    json_digest,
    next_hash,
)
from fedveil.privacy.ledger.signed_head import SignedHead, history_of, key_fingerprint
from fedveil.privacy.ledger.statement import charged_of, same_claims

LEDGER, PLAN, RECIPE, RESULT = "ledger.json", "plan.json", "recipe.toml", "result.json"
SIGNED, SOFTWARE = "signatures.json", "software.json"
_ALWAYS = (LEDGER, PLAN, RECIPE, SIGNED, SOFTWARE)
_LARGEST = 1 << 28


def zipped(files: Mapping[str, bytes]) -> bytes:
    """Return files as a zip archive, whose bytes follow from their names and contents alone."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system, info.external_attr = 3, 0o644 << 16
            archive.writestr(info, files[name])
    return written.getvalue()


def canonical_json(value: object) -> bytes:
    """Return JSON as the files of a bundle have it: one form for one value."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class SignedLedger:
    """A server's ledger as it stands in a bundle.

    Attributes:
        source: The bundle, for messages.
        registered: What each run registered with, as text, in order.
        links: The entries, in order.
        hashes: The hash before the first entry, then one for each.
    """

    source: Path
    registered: list[str]
    links: list[Link]
    hashes: list[str]

    @classmethod
    def from_json(cls, path: Path, raw: Any) -> "SignedLedger":
        """Return the ledger in `ledger.json`, whose hashes are computed anew.

        Raises BadInput if a part is missing or of another type, or an entry was written for other
        runs than those that had registered.
        """
        try:
            if set(raw) != {"first", "runs", "entries"}:
                raise ValueError("it has other parts")
            runs = [str(text) for text in raw["runs"]]
            after = [int(json.loads(text)["after"]) for text in runs]
            links, hashes = list[Link](), [str(raw["first"])]
            for number, values in enumerate(raw["entries"], 1):
                kind = Closing if "files" in values else Entry
                if set(values) != {field.name for field in fields(kind)}:
                    raise ValueError(f"entry {number} has other parts")
                link = kind(**values)
                known = [text for text, begins in zip(runs, after, strict=True) if begins < number]
                if link.runs != json_digest(known):
                    raise ValueError(f"entry {number} is of other runs than those in the bundle")
                links.append(link)
                hashes.append(next_hash(hashes[-1], link))
            if any(begins >= len(links) for begins in after) or not runs:
                raise ValueError("a run in it has no entry")
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            raise BadInput(f"{path}: {LEDGER} was changed, or has a gap: {one_line(e)}") from e
        return cls(path, runs, links, hashes)

    @property
    def length(self) -> int:
        """Return the number of entries."""
        return len(self.links)

    @property
    def about(self) -> dict[str, str]:
        """Return what the first run registered with. A federation's ledger has no other."""
        return dict(json.loads(self.registered[0]))

    @property
    def closing_files(self) -> dict[str, str]:
        """Return the digests of the run's files when it ended. {} if it is open."""
        closings = [link for link in self.links if isinstance(link, Closing)]
        return dict(json.loads(closings[-1].files)) if closings else {}

    def check_head(self, head: SignedHead) -> None:
        """Raise BadInput unless a signed head is one of this ledger."""
        if head.length > self.length:
            raise BadInput(
                f"{self.source}: {head.site} has signed entry {head.length} and the ledger has "
                f"{self.length}: its end was cut off"
            )
        history = history_of("", self.hashes[: head.length + 1])
        if (head.hash, head.history) != (self.hashes[head.length], history):
            raise BadInput(
                f"{self.source}: the ledger is not the one whose entry {head.length} {head.site} "
                "has signed: an entry was changed, removed, inserted or moved, or it is a fork"
            )

    def charged_claims(self) -> tuple[PrivacyClaim, ...] | None:
        """Return the claims that the charges come to.

        None if they depend on how often each client took part: the bundle does not say that.
        Raises BadInput for charges that are not those of the run's lines.
        """
        about = self.about
        if about.get("clients") != "0":
            return None
        charges = []
        for link in self.links:
            if isinstance(link, Entry):
                event = dict(json.loads(link.event))
                place = (link.round, link.attempt, link.covers)
                charges.append(Charge(*place, event, link.charged_at, link.run))
        charges.sort(key=lambda charge: (charge.round, charge.attempt, charge.covers))
        return charged_of(self.source, about["run"], about, charges, None).claims()


def verify_evidence(path: Path, own: Path | None = None, absent: Sequence[str] = ()) -> str:
    """Check an evidence bundle, and return what it proves as lines of text.

    Guarantee: docs/proofs/evidence.md. If nothing is raised, and the owner of one of the keys that
    have signed the last entry is honest, the bundle has the ledger as this site saw it grow, from
    its first entry to the last of the bundle, and the recipe, plan and claims that belong to it.

    | what is wrong | found |
    |---|---|
    | a byte of any file, or of the archive around them | BadInput |
    | an entry was changed, removed, inserted or moved; the ledger is a fork | BadInput |
    | a signature of another head, run, plan or key | BadInput |
    | entries that no site has signed | BadInput |
    | a site that has not signed the last entry, and is not `absent` | BadInput |
    | claims that are not what the charges come to | BadInput, unless turns are counted |
    | entries after the last of the bundle | only with `own`, which has seen them |
    | keys that are not those of the sites | no: compare the fingerprints that are printed |

    Args:
        path: The bundle.
        own: A site's own ledger folder, or its owner's, to look for missing entries at the end.
        absent: Sites that need not have signed the last entry, such as those that left.
    """
    try:
        return _verified(path, own, absent)
    except BadInput:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise BadInput(f"{path} has something that fedveil does not write: {one_line(e)}") from e


def _verified(path: Path, own: Path | None, absent: Sequence[str]) -> str:
    """Do what `verify_evidence` does. Values of other types than fedveil writes may raise more."""
    files = _read(path)
    parsed = {name: _parsed(path, name, files[name]) for name in _ALWAYS if name != RECIPE}
    ledger = SignedLedger.from_json(path, parsed[LEDGER])
    heads, keys, run = _heads(path, parsed[SIGNED], parsed[PLAN])
    for head in heads.values():
        head.check()
        if head.plan != json_digest(parsed[PLAN]):
            raise BadInput(f"{path}: {PLAN} is not the plan that {head.site} has signed")
        ledger.check_head(head)
    signers = [name for name, head in heads.items() if head.length == ledger.length]
    _check_signers(path, ledger, heads, keys, signers, absent)
    software = software_digest(parsed[SOFTWARE])
    for name in signers:
        if heads[name].server_software != software:
            raise BadInput(f"{path}: {SOFTWARE} is not what the server stated to {name}")
    claims = _check_files(path, ledger, files)
    lines = [
        f"{path}: {ledger.length} entries of the ledger of run {run}, none changed, removed, "
        "inserted or moved, if one of the sites that signed the last one is honest"
    ]
    for name, key in keys.items():
        seen = heads[name].length if name in heads else None
        what = "has signed nothing" if seen is None else f"has signed entry {seen}"
        if seen is not None:
            same = heads[name].software == software
            what += f", and runs {'the same' if same else 'other'} software as the server"
        lines.append(f"{name}: {what}; key {key}: compare it with what the site's owner tells")
    return "\n".join([*lines, *claims, _tail_verdict(ledger, run, own)])


def _read(path: Path) -> dict[str, bytes]:
    """Return the files in a bundle by name. Raises BadInput if the archive is not as written."""
    try:
        if path.stat().st_size > _LARGEST:
            raise BadInput(f"{path} is longer than {_LARGEST} bytes: no bundle is")
        content = path.read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(info.file_size > len(content) for info in archive.infolist()):
                raise BadInput(f"{path}: a file in it is longer than it: it was changed")
            files = {name: archive.read(name) for name in archive.namelist()}
    except (OSError, ValueError, NotImplementedError, RuntimeError, EOFError) as e:
        raise BadInput(f"{path} is no evidence bundle: {one_line(e)}") from e
    except zipfile.BadZipFile as e:
        raise BadInput(f"{path} is no evidence bundle, or was changed: {one_line(e)}") from e
    except Exception as e:  # zlib and lzma have errors of their own
        raise BadInput(f"{path} cannot be unpacked: {one_line(e)}") from e
    if set(files) - {RESULT} != {*_ALWAYS}:
        raise BadInput(f"{path} has other files than an evidence bundle: {shown(sorted(files))}")
    if zipped(files) != content:
        raise BadInput(f"{path}: bytes around its files were changed")
    return files


def _parsed(path: Path, name: str, content: bytes) -> Any:
    """Return the value of a JSON file. BadInput unless it is written as fedveil writes it."""
    try:
        value = json.loads(content)
        same = canonical_json(value) == content
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{path}: {name} was changed: {one_line(e)}") from e
    if not same:
        raise BadInput(f"{path}: {name} was changed: it is not written as fedveil writes it")
    return value


def _heads(path: Path, raw: Any, plan: Any) -> tuple[dict[str, SignedHead], dict[str, str], str]:
    """Return the signed heads by site, the fingerprints of all sites' keys, and the run's id.

    Raises BadInput unless there are as many sites as the plan has, each with a name and a key of
    its own, and each head is of its site, its key and this run.
    """
    try:
        if set(raw) != {"run", "sites"}:
            raise ValueError("it has other parts")
        run, heads, keys = str(raw["run"]), dict[str, SignedHead](), dict[str, str]()
        for name, key, head in raw["sites"]:
            if name in keys or key in keys.values():
                raise ValueError(f"two sites have the name or the key of {name!r}")
            keys[str(name)] = str(key)
            if head is None:
                continue
            heads[name] = SignedHead.from_dict(head)
            found = (heads[name].site, heads[name].run, key_fingerprint(heads[name].key))
            if found != (name, run, key):
                raise ValueError(f"the head of {name!r} is of another site, run or key")
        clients = plan["clients"]
    except (ValueError, LookupError, TypeError) as e:
        raise BadInput(f"{path}: {SIGNED} was changed: {one_line(e)}") from e
    if len(keys) != clients:
        raise BadInput(f"{path}: it has {len(keys)} sites and the plan {clients}: one is left out")
    return heads, keys, run


def _check_signers(
    path: Path,
    ledger: SignedLedger,
    heads: Mapping[str, SignedHead],
    keys: Mapping[str, str],
    signers: Sequence[str],
    absent: Sequence[str],
) -> None:
    """Raise BadInput unless every site has signed the last entry. Absent sites are excepted."""
    for name in absent:
        if name not in keys:
            raise BadInput(f"--absent is {name!r}: the sites are {', '.join(keys)}")
    if not signers:
        last = max((head.length for head in heads.values()), default=0)
        raise BadInput(f"{path}: entries after {last} are signed by no site")
    for name in keys:
        if name not in signers and name not in absent:
            has = f"entry {heads[name].length}" if name in heads else "nothing"
            raise BadInput(
                f"{path}: {name} has signed {has} of {ledger.length} entries, so that a fork could "
                f"be hidden from it: let it sign the end, or use --absent {name} to rely on "
                f"{', '.join(signers)}"
            )


def _check_files(path: Path, ledger: SignedLedger, files: Mapping[str, bytes]) -> list[str]:
    """Check recipe, result and claims against the ledger, and return sentences about them."""
    closed, recipe = ledger.closing_files, files[RECIPE]
    if closed and digest(recipe) != closed.get(RECIPE):
        raise BadInput(f"{path}: {RECIPE} is not the one that the run left")
    body = recipe.split(b"\n", 1)[1] if closed and b"\n" in recipe else recipe
    if digest(body) != ledger.about.get("recipe"):
        raise BadInput(f"{path}: {RECIPE} is not the one that the run was started with")
    if bool(closed) != (RESULT in files):
        raise BadInput(f"{path}: {RESULT} and the end of the run do not belong together")
    claims = ledger.charged_claims()
    if not closed:
        counted = counting(claims or ())
        spent = "" if counted is None else f"; spent so far: {counted}"
        return [f"the run is open: there is no result{spent}"]
    if digest(files[RESULT]) != closed.get(RESULT):
        raise BadInput(f"{path}: {RESULT} is not the one that the run left")
    try:
        recorded = json.loads(files[RESULT])["claims"]
        headline = counting([PrivacyClaim.from_dict(raw) for raw in recorded])
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise BadInput(f"{path}: the claims in {RESULT} cannot be read: {one_line(e)}") from e
    if claims is not None and not same_claims(recorded, claims):
        raise BadInput(f"{path}: the claims in {RESULT} are not what the charges come to")
    how = "which is what the charges come to"
    if claims is None:
        how = "as the run left it; only the private ledger says how often each client took part"
    claim = "nothing is claimed" if headline is None else f"{headline}, {how}"
    return [f"recipe, plan and result are those that the run left: {claim}"]


def _tail_verdict(ledger: SignedLedger, run: str, own: Path | None) -> str:
    """Return what is known of entries after the last of the bundle, compared with a site's ledger.

    Raises BadInput if the site has seen later entries, others, or none of this run.
    """
    if own is None:
        return (
            "whether entries are missing after the last one cannot be told from the bundle alone: "
            "compare it with a site's own ledger (--site)"
        )
    folder = own / "ledger" if (own / "owner.toml").is_file() else own
    file = folder if folder.is_file() else folder / "heads.db"
    known = SiteHeads(file).known(run)
    if not known:
        raise BadInput(f"{own} knows nothing of the ledger of run {run}: name the ledger of a site")
    for length, seen in sorted(known.items()):
        if length <= ledger.length and ledger.hashes[length] != seen:
            raise BadInput(
                f"{ledger.source}: entry {length} is not the one that {own} has seen: the ledger "
                "was rewritten, or is a fork"
            )
    last = max(known)
    if last > ledger.length:
        raise BadInput(
            f"{ledger.source}: {ledger.length} entries, and {own} has seen {last}: the end is "
            "missing"
        )
    return f"none missing at the end of the {last} entries that {own} has seen"
