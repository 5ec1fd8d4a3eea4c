"""The folder of a mixer, and what sites and the server need to reach it.

It has an authority of its own: whoever could sign a certificate for the mixer could take its place,
and the server is the one who must not. All sites share one certificate, which shows that somebody
belongs to the federation and not who. The server's own lets it collect and not report: with reports
of its own making beside those of one site, it would know that site's.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from fedveil.flower.certificates import Authority
from fedveil.mixing.tls import COLLECTOR
from fedveil.runs.toml import dumps

ATTEMPTS = 10
"""How often a round may be asked for before its mixer refuses."""

_MEMBER, _CA = "member", "mixer-ca.crt"


@dataclass(frozen=True)
class MixerFiles:
    """What was written into a folder for a mixer at `host`:`port`."""

    folder: Path
    host: str
    port: int

    @classmethod
    def write(cls, folder: Path, host: str, port: int) -> "MixerFiles":
        """Make its authority, its certificate, that of the server and the one of all sites."""
        folder.mkdir(mode=0o700)
        authority = Authority.new("fedveil mixer authority")
        authority.save(folder)
        authority.server(host, folder, "mixer")
        for name in (_MEMBER, COLLECTOR):
            authority.caller(folder, name)
        return cls(folder, host, port)

    def give_to_site(self, folder: Path) -> str:
        """Copy what a site needs to report into its folder; return its `[mixer]` section."""
        return self._give(folder, _MEMBER)

    def give_to_server(self, folder: Path) -> str:
        """Copy what the server needs to collect into its folder; return its `[mixer]` section."""
        return self._give(folder, COLLECTOR)

    def _give(self, folder: Path, name: str) -> str:
        certificate, key = f"{name}.crt", f"{name}.key"
        for source, copy in (("ca.crt", _CA), (certificate, certificate), (key, key)):
            shutil.copy(self.folder / source, folder / copy)  # with the mode that it has
        section = {"host": self.host, "port": self.port, "ca": _CA}
        return dumps({"mixer": {**section, "certificate": certificate, "key": key}}).lstrip()
