"""The folder of a mixer, and what sites and the server need to reach it.

It has an authority of its own: whoever could sign a certificate for the mixer could take its place,
and the server is the one who must not. All members share one certificate, which shows that somebody
belongs to the federation and not who.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from fedveil.flower.certificates import Authority
from fedveil.runs.toml import dumps

ATTEMPTS = 10
"""How often a round may be asked for before its mixer refuses."""

_FILES = ("mixer-ca.crt", "member.crt", "member.key")


@dataclass(frozen=True)
class MixerFiles:
    """What was written into a folder for a mixer at `host`:`port`."""

    folder: Path
    host: str
    port: int

    @classmethod
    def write(cls, folder: Path, host: str, port: int) -> "MixerFiles":
        """Make its authority, its certificate, and the one that all members share."""
        folder.mkdir(mode=0o700)
        authority = Authority.new("fedveil mixer authority")
        authority.save(folder)
        authority.server(host, folder, "mixer")
        authority.member(folder, "member")
        return cls(folder, host, port)

    def give_to(self, member: Path) -> str:
        """Copy what a member needs into its folder; return its `[mixer]` section."""
        for name, source in zip(_FILES, ("ca.crt", "member.crt", "member.key"), strict=True):
            shutil.copy(self.folder / source, member / name)  # with the mode that it has
        ca, certificate, key = _FILES
        section = {"host": self.host, "port": self.port, "ca": ca}
        return dumps({"mixer": {**section, "certificate": certificate, "key": key}}).lstrip()
