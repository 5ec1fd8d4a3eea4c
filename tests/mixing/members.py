"""A mixer with members: certificates of their own, and what they send."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedveil.mixing.mixer import MixerConfig
from fedveil.mixing.protocol import COLLECTOR, client_tls, collect, send_report
from tests.mixing.certificates import Authority
from tests.mixing.loopback import HOST, POSITIONS

HIGH = np.arange(POSITIONS) % 2 == 0


@dataclass
class Federation:
    """Names that an authority has signed, and the mixer that counts them."""

    folder: Path
    names: tuple[str, ...] = ("north", "south", "east")

    @cached_property
    def authority(self):
        return Authority(self.folder / "authority")

    def config(self, **changes):
        certificate, key = self.authority.sign("mixer")
        parts = {
            "positions": POSITIONS,
            "minimum": 2,
            "expected": len(self.names),
            "rounds": 3,
            "certificate": certificate,
            "key": key,
            "clients_ca": str(self.authority.file),
            "members": self.names,
            "opened": str(self.folder / "opened.txt"),
        }
        return MixerConfig(**{**parts, **changes})

    def tls(self, name):
        """A new certificate in a name."""
        return client_tls(self.authority.file, *self.authority.sign(name))

    def send(self, port, name, high=HIGH, round=1, **options):
        parts = {"minimum": 1, "tls": options.get("tls") or self.tls(name), **options}
        return send_report(HOST, port, round, high, **parts)

    def collect(self, port, round=1, name=COLLECTOR, **options):
        parts = {"minimum": 1, "tls": options.get("tls") or self.tls(name), **options}
        return collect(HOST, port, round, POSITIONS, **parts)
