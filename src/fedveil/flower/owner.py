"""`Owner`: the folder of a site's owner, which outlives every federation.

    owner.toml      the site's name, where its records are, and where the ledger's witness is
    policy.toml     what the owner agrees to, for all federations together; empty, it refuses all
    node, node.pub  the key pair of the site; the private half never leaves
    ledger/         the charges of all runs in which these people took part
    federations/    one folder for each federation that was joined

One ledger is for the people whose records these are. It does not matter in which file the records
are, how many there are, or which federation asks.
"""

import os
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fedveil.base.checks import shown
from fedveil.base.errors import BadInput
from fedveil.flower.certificates import write_node_key
from fedveil.flower.federation_files import fingerprint, read_policy
from fedveil.flower.messages import check_site_name
from fedveil.flower.policy import Policy, policy_text
from fedveil.flower.site_ledger import SiteLedger
from fedveil.runs.recipe import explain_error, to_toml
from fedveil.runs.run_directory import write_atomic
from fedveil.runs.sections.section import Section, forms_of

_FILE, _POLICY, _KEY, _LEDGER = "owner.toml", "policy.toml", "node", "ledger"
_EMPTY_POLICY = (
    "# What this site's owner agrees to, for all federations together. Empty, it refuses all of\n"
    "# them. fedveil site join adds what a federation costs, once the owner has accepted it.\n"
)


class OwnerFile(Section):
    """`owner.toml`. Paths are relative to its folder."""

    name: str
    """The site's name."""
    records: str | list[str]
    """The records: .csv or .parquet files, or a folder that FederatedData.save wrote."""
    witness: str
    """A file outside this folder which remembers the ledger's end, so that a ledger that was put
    back from a backup of the folder is noticed."""


@dataclass(frozen=True)
class Owner:
    """A site's owner: name, records, key, ledger and policy, in one folder.

    Attributes:
        folder: The folder.
        file: Its `owner.toml`, with absolute paths.
    """

    folder: Path
    file: OwnerFile

    @classmethod
    def make(
        cls, folder: Path, name: str, records: list[str], witness: Path | None = None
    ) -> "Owner":
        """Make a new owner's folder, with a new key and a policy that refuses everything.

        Its ledger is an empty folder. The witness is only named: the first charge writes it. Paths
        in owner.toml are relative to its folder. Returns the owner, with absolute paths.

        Args:
            folder: A folder that is new or empty.
            name: The site's name.
            records: The paths of the records, relative to the current directory.
            witness: The file that will remember the ledger's end. None: FOLDER.head.json beside it.

        | edge | behaviour |
        |---|---|
        | a name that no site may have | BadInput |
        | the folder is not empty | BadInput |
        | a file or folder of the records is missing | BadInput |
        | a witness inside the folder, or one that exists | BadInput |
        | something cannot be written | what was made is removed, and the error is raised |
        """
        check_site_name(name)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{folder} exists and is not empty: name a new folder")
        for path in records:
            if not Path(path).exists():
                raise BadInput(f"records: {shown(path)} does not exist: name a table, or a folder")
        place = folder.resolve()
        head = place.with_name(f"{place.name}.head.json") if witness is None else witness.resolve()
        if head.is_relative_to(place):
            raise BadInput(f"witness {head} is inside {folder}, and would go back with it")
        if head.exists():
            raise BadInput(
                f"witness {head} exists and remembers the ledger of another folder: restore that "
                "one, or name another witness"
            )
        made = not folder.exists()
        folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        try:
            folder.chmod(0o700)
            write_node_key(folder, name)
            (folder / _POLICY).write_text(_EMPTY_POLICY, encoding="utf-8", newline="\n")
            paths = [os.path.relpath(Path(path).resolve(), place) for path in records]
            file = {
                "name": name,
                "records": paths[0] if len(paths) == 1 else paths,
                "witness": os.path.relpath(head, place),
            }
            text = to_toml(file)
            (folder / _FILE).write_text(text, encoding="utf-8", newline="\n")
            (folder / _LEDGER).mkdir(mode=0o700)
            owner = cls.open(folder)
        except BaseException:
            for part in folder.iterdir():
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            if made:
                folder.rmdir()
            raise
        return owner

    @classmethod
    def open(cls, folder: Path) -> "Owner":
        """Return the owner whose folder this is. Raises BadInput if `make` did not make it."""
        path = folder / _FILE
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise BadInput(
                f"{path} cannot be read: {e}; fedveil site init makes an owner's folder"
            ) from e
        try:
            file = OwnerFile.model_validate(raw)
        except ValidationError as e:
            raise BadInput(f"{path}: {explain_error(e, forms_of(OwnerFile))}") from e
        check_site_name(file.name)
        place = folder.resolve()
        records = [file.records] if isinstance(file.records, str) else file.records
        found = [str((place / part).resolve()) for part in records]
        update = {
            "records": found[0] if isinstance(file.records, str) else found,
            "witness": str((place / file.witness).resolve()),
        }
        return cls(place, file.model_copy(update=update))

    @property
    def policy_file(self) -> Path:
        """Return the path of policy.toml."""
        return self.folder / _POLICY

    @property
    def private_key(self) -> Path:
        """Return the path of the private key."""
        return self.folder / _KEY

    @property
    def public_key(self) -> Path:
        """Return the path of the public key."""
        return self.folder / f"{_KEY}.pub"

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the public key. Raises BadInput if it cannot be read."""
        try:
            return fingerprint(self.public_key.read_text(encoding="utf-8").strip())
        except (OSError, ValueError) as e:
            raise BadInput(f"{self.public_key} cannot be read: {e}") from e

    @property
    def ledger(self) -> SiteLedger:
        """Return the ledger of this owner's people."""
        return SiteLedger(self.folder / _LEDGER, Path(self.file.witness))

    @property
    def policy(self) -> Policy:
        """Return the policy in policy.toml."""
        return read_policy(self.policy_file)

    def write_policy(self, policy: Policy) -> None:
        """Write a policy in place of the old one, atomically."""
        text = _EMPTY_POLICY + policy_text(policy)
        write_atomic(self.policy_file, text.encode())
