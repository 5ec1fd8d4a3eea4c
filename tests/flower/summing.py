"""Sites of a secure sum in one process, each with its own keeper of masking keys, and a server."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec

import fedveil as fv
from fedveil.flower.certificates import public_line
from fedveil.flower.federation_files import Federation, RegisteredSite, SiteFile
from fedveil.flower.federation_server import Server
from fedveil.flower.masking_keeper import MaskingKeeper
from fedveil.flower.messages import SumStep
from fedveil.flower.site import Site
from fedveil.flower.site_sums import SiteSums
from fedveil.masking.sum_messages import MAGIC, Kind
from fedveil.runs.recipe import load_recipe, to_toml
from tests.flower.conftest import described, lines
from tests.flower.sites import CLASSES, FEATURES, LOCAL, write_policy
from tests.flower.transports import Behaviour, InProcess

RECORDS = 12
SUMMED: dict[str, Any] = {
    **LOCAL,
    "name": "summed",
    "rounds": 4,
    "sample": {"kind": "poisson", "rate": 0.5},
    "client": {"kind": "gradient"},
    "noise": {"kind": "gaussian", "where": "site", "source": "secure", "multiplier": 3.0},
    "sum": {"kind": "secure"},
    "budget": {"epsilon": 8.0, "delta": 1e-4},
}
POLICY: dict[str, Any] = {
    "epsilon": {"record": 100.0},
    "delta": 1e-3,
    "trust": ["local", "secure-sum"],
    "repeats": 4,
}
NAMES = ("north", "south", "west", "east", "centre", "far", "near")


def kind_of(message: object) -> Kind | None:
    """The kind of a secure sum's step. None for keys that are asked for, and other messages."""
    if not isinstance(message, SumStep) or not len(message.content):
        return None
    return Kind(message.encoded[len(MAGIC)])


@dataclass
class Summing:
    """A federation of a secure sum, whose sites remember what was charged and how."""

    folder: Path
    recipe: dict[str, Any]
    count: int
    keys: list[ec.EllipticCurvePrivateKey] = field(default_factory=list)
    outcomes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(self.count)]
        self.names = NAMES[: self.count]
        self.recipe = described(self.folder, self.recipe)
        self.data = self.records_of_all()
        self.data.save(self.folder / "sums")
        self.recipe["data"] = {"name": "saved", "path": str(self.folder / "sums")}
        self.transport = InProcess({name: self.open(name) for name in self.names})

    def records_of_all(self) -> fv.FederatedData:
        rng = np.random.default_rng(5)
        centres = rng.normal(size=(CLASSES, FEATURES))

        def some(count: int) -> tuple[Any, Any]:
            y = np.arange(count) % CLASSES
            return (centres[y] + rng.normal(size=(count, FEATURES))).astype(np.float32), y

        own = [(name, *some(RECORDS)) for name in NAMES[: self.count]]
        return fv.FederatedData.from_clients(own, test=some(30), classes=CLASSES)

    def open(self, name: str, policy: dict[str, Any] | None = None, **keys: Any) -> Site:
        """A site whose process has just begun: its masking keys are new."""
        number, folder = self.names.index(name), self.folder / name
        folder.mkdir(exist_ok=True)
        rows = slice(*self.data.offsets[number : number + 2])
        assert isinstance(self.data.x, np.ndarray)
        own = (name, self.data.x[rows], self.data.y[rows])
        shape = (self.data.test_x[:0], self.data.test_y[:0])
        if not (folder / "records").exists():
            fv.FederatedData.from_clients([own], test=shape, classes=CLASSES).save(
                folder / "records"
            )
            (folder / "node").write_bytes(private_key(self.keys[number]))
        (folder / "recipe.toml").write_text(to_toml(self.recipe))
        write_policy(folder, POLICY if policy is None else policy)
        file = {
            "name": name,
            "recipe": "recipe.toml",
            "clients": self.count,
            "number": number,
            "sizes": [RECORDS] * self.count,
            "data": {"name": "saved", "path": "records"},
            "sum_keys": {"key": "node", "public_keys": [public_line(key) for key in self.keys]},
            **keys,
        }
        (folder / "site.toml").write_text(to_toml({k: v for k, v in file.items() if v is not None}))
        site = Site.open(folder / "site.toml")
        if site.sums is not None:
            keeper = MaskingKeeper()
            site.sums = replace(site.sums, keeper=lambda: keeper)
        return site

    def restart(self, name: str) -> Site:
        site = self.open(name)
        self.transport.sites[name] = site
        return site

    def server(self, name: str = "run", **keys: Any) -> Server:
        known = {"deadline": 60.0, "minimum": self.count // 2 + 1, "wait": 5.0}
        sites = [
            RegisteredSite(name=name, key=public_line(self.keys[k]), records=RECORDS)
            for k, name in enumerate(self.names)
        ]
        return Server.start_or_resume(
            load_recipe(self.recipe),
            Federation(sites=sites, **{**known, **keys}),
            self.transport,
            self.folder / name,
            on_outcome=self.outcomes.append,
            clock=self.transport.clock,
            sleep=self.transport.sleep,
        )

    def lines(self, name: str = "run") -> list[Any]:
        """The outcomes in a run's sites.jsonl."""
        return [line for line in lines(self.folder / name) if "answered" in line]


def private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )


__all__ = ["Behaviour", "SiteFile", "SiteSums", "Summing", "kind_of"]
