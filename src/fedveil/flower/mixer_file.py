"""The folder of a mixer, and what sites and the server need to reach it.

It has an authority of its own: whoever could sign a certificate for the mixer could take its place,
and the server is the one who must not. Every site has a certificate of its own, by which the mixer
counts it once per round. The server's lets it collect and not report: with reports of its own
making beside those of one site, it would know that site's.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from fedveil.base.errors import BadInput
from fedveil.flower.certificates import Authority
from fedveil.mixing.tls import COLLECTOR
from fedveil.runs.toml import dumps

ATTEMPTS = 10
"""How often a round may be asked for before its mixer refuses."""

MEMBERS = "members.txt"
"""The file with the names of the members, one per line."""

_CA = "mixer-ca.crt"


@dataclass(frozen=True)
class MixerFiles:
    """The folder of a mixer at `host`:`port`, and its authority."""

    folder: Path
    host: str
    port: int
    authority: Authority

    @classmethod
    def write(cls, folder: Path, host: str, port: int, members: tuple[str, ...]) -> "MixerFiles":
        """Make its authority, its certificate and the list of its members.

        | edge | behaviour |
        |---|---|
        | a site is named as the collector is | BadInput |
        """
        if COLLECTOR in members:
            raise BadInput(
                f"a site is named {COLLECTOR!r}, as the server is to the mixer: rename it"
            )
        folder.mkdir(mode=0o700)
        authority = Authority.new("fedveil mixer authority")
        authority.save(folder)
        authority.server(host, folder, "mixer")
        (folder / MEMBERS).write_text("".join(f"{name}\n" for name in members))
        return cls(folder, host, port, authority)

    def give_to_site(self, folder: Path, site: str) -> str:
        """Write a site's certificate into its folder, and return its `[mixer]` section."""
        return self._give(folder, "member", site)

    def give_to_server(self, folder: Path) -> str:
        """Write the collector's certificate into a folder, and return its `[mixer]` section."""
        return self._give(folder, COLLECTOR, COLLECTOR)

    def _give(self, folder: Path, file: str, name: str) -> str:
        self.authority.caller(folder, file, name)
        shutil.copy(self.folder / "ca.crt", folder / _CA)
        certificate, key = f"{file}.crt", f"{file}.key"
        section = {"host": self.host, "port": self.port, "ca": _CA}
        return dumps({"mixer": {**section, "certificate": certificate, "key": key}}).lstrip()
