"""A federation of three sites in one process, and the same clients in the simulator."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.flower.federation import Federation, RegisteredSite
from fedveil.flower.server import Server
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from tests.flower.sites import CLASSES, FEATURES, open_site
from tests.flower.transports import InProcess

NAMES = ("north", "south", "west")
KEYS = tuple("SHA256:" + letter * 43 for letter in "ABC")
POLICY = {
    "epsilon": {"client": 1e6, "record": 1e6},
    "trust": ["local", "central"],
    "seeded": True,
    "unprotected": True,
    "repeats": 10,
}


def records_of_all() -> fv.FederatedData:
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(CLASSES, FEATURES))

    def some(count: int) -> tuple[Any, Any]:
        y = np.arange(count) % CLASSES
        return (centres[y] + rng.normal(size=(count, FEATURES))).astype(np.float32), y

    own = [(name, *some(12 + 3 * k)) for k, name in enumerate(NAMES)]
    return fv.FederatedData.from_clients(own, test=some(30), classes=CLASSES)


def alone(data: fv.FederatedData, client: int) -> fv.FederatedData:
    rows = slice(*data.offsets[client : client + 2])
    assert isinstance(data.x, np.ndarray)
    return fv.FederatedData.from_clients(
        [(NAMES[client], data.x[rows], data.y[rows])],
        test=(data.test_x, data.test_y),
        classes=data.classes,
    )


@dataclass
class Trio:
    """Three sites, and whoever asks them."""

    folder: Path
    recipe: dict[str, Any]
    transport: InProcess
    outcomes: list[Any]

    def server(
        self, name: str = "run", recipe: dict[str, Any] | None = None, **keys: Any
    ) -> Server:
        known = {"deadline": 60.0, "minimum": 1, "wait": 5.0}
        sites = [
            RegisteredSite(name=n, key=k, records=r)
            for n, k, r in zip(NAMES, KEYS, (12, 15, 18), strict=True)
        ]
        return Server.open(
            load_recipe(recipe or self.recipe),
            Federation(sites=sites, **{**known, **keys}),
            self.transport,
            self.folder / name,
            told=self.outcomes.append,
            clock=self.transport.clock,
            sleep=self.transport.sleep,
        )

    def simulated(self) -> dict[str, Any]:
        run = Run.start(load_recipe(self.recipe), self.folder / "simulated", None)
        return run.execute()

    def model(self, name: str) -> torch.Tensor:
        stored = fv.open_run(self.folder / name).stored
        return torch.cat([value.flatten() for value in stored.tensors.values()])


@pytest.fixture
def trio(tmp_path: Path) -> Callable[..., Trio]:
    """Makes the sites of a recipe, whose data section is added."""

    def make(recipe: dict[str, Any], **changes: Any) -> Trio:
        data = records_of_all()
        if not (tmp_path / "all").exists():
            data.save(tmp_path / "all")
        said = {**recipe, "data": {"name": "saved", "path": str(tmp_path / "all")}, **changes}
        sites = {
            name: open_site(tmp_path / name, said, POLICY, alone(data, k), name=name, number=k)
            for k, name in enumerate(NAMES)
        }
        return Trio(tmp_path, said, InProcess(sites), [])

    return make
