"""A federation of three sites in one process, and the same clients in the simulator."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import fedveil as fv
from fedveil.flower.certificates import write_node_key
from fedveil.flower.federation_files import Federation, RegisteredSite
from fedveil.flower.federation_server import Server
from fedveil.flower.messages import (
    Answer,
    HeadAsk,
    HeadReply,
    Reply,
    RoundAsk,
    ServerMessage,
)
from fedveil.flower.site import Site
from fedveil.runs.evidence import statements_of
from fedveil.runs.recipe import load_recipe
from fedveil.runs.run import Run
from tests.flower.sites import CLASSES, FEATURES, open_site
from tests.flower.transports import InProcess

NAMES = ("north", "south", "west")
FREE = {"delta": 1e-5}
SEEDED = {"kind": "gaussian", "where": "server", "multiplier": 2.0}
SECURE = {**SEEDED, "source": "secure"}
AT_SITES = {"kind": "gaussian", "where": "client", "multiplier": 2.0, "source": "secure"}
POLICY = {
    "epsilon": {"client": 1e12, "record": 1e12},
    "trust": ["local", "central"],
    "seeded": True,
    "unprotected": True,
    "repeats": 10,
}


def lines(folder: Path, name: str = "sites.jsonl") -> list[Any]:
    """What a file of a run directory holds, line by line."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def proven(three: "Trio", name: str = "run") -> float:
    """The epsilon that a run's ledger proves by itself."""
    (statement,) = statements_of(three.folder / name).runs
    return statement.claims[0].epsilon


def stop_after(round: int) -> Callable[[dict[str, Any]], None]:
    """Interrupts a run."""

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == round:
            raise KeyboardInterrupt

    return stop


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
    """Three sites, or as many as a test wants, and whoever asks them."""

    folder: Path
    recipe: dict[str, Any]
    transport: InProcess
    outcomes: list[Any]
    keys: dict[str, str] = field(default_factory=dict)

    def server(
        self, name: str = "run", recipe: dict[str, Any] | None = None, **keys: Any
    ) -> Server:
        known = {"deadline": 60.0, "minimum": 1, "wait": 5.0}
        sites = [
            RegisteredSite(
                name=name, key=self.keys.get(name, f"SHA256:{k:043d}"), records=12 + 3 * k
            )
            for k, name in enumerate(self.transport.sites)
        ]
        return Server.start_or_resume(
            load_recipe(recipe or self.recipe),
            Federation(sites=sites, **{**known, **keys}),
            self.transport,
            self.folder / name,
            on_outcome=self.outcomes.append,
            clock=self.transport.clock,
            sleep=self.transport.sleep,
        )

    def simulated(self) -> dict[str, Any]:
        run = Run.start(load_recipe(self.recipe), self.folder / "simulated", None)
        return run.execute()

    def model(self, name: str) -> torch.Tensor:
        """The parameters in a run's newest checkpoint."""
        path = max((self.folder / name / "checkpoint").glob("*.safetensors"))
        return safetensors.torch.load_file(path)["params"]


class StandIn:
    """Answers a server as a site does, with a report that is as long as it is told to be."""

    def __init__(self, name: str, number: int, width: int = 0, length: float = 0.1) -> None:
        self.name, self.number, self.width, self.length = name, number, width, length

    def answer(self, ask: ServerMessage) -> Reply:
        if isinstance(ask, HeadAsk):
            nothing = torch.zeros(0, dtype=torch.uint8)
            return HeadReply(ask.run, ask.round, ask.attempt, self.name, nothing)
        assert isinstance(ask, RoundAsk)
        report = torch.zeros_like(ask.params)
        report[self.number % len(report)] = self.length
        bits = torch.full((self.width,), 0.5, dtype=torch.float64)
        return Answer(ask.run, ask.round, ask.attempt, self.name, report, bits)


Make = Callable[..., Trio]


def described(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with the records of all three, which are saved."""
    if not (folder / "all").exists():
        records_of_all().save(folder / "all")
    data = {"name": "saved", "path": str(folder / "all")}
    return {"engine": {"mode": "looped", "workers": 1}, **recipe, "data": data}


def three_sites(folder: Path, recipe: dict[str, Any], *, sign: bool = False) -> Trio:
    """Three sites of a recipe, whose data section is added, with keys of their own if they sign."""
    data, said = records_of_all(), described(folder, recipe)
    sites, keys = dict[str, Site](), dict[str, str]()
    for k, name in enumerate(NAMES):
        place = folder / name
        place.mkdir(exist_ok=True)
        if sign:
            keys[name] = write_node_key(place, name)
        own = {"name": name, "number": k, **({"key": "node"} if sign else {})}
        sites[name] = open_site(place, said, POLICY, alone(data, k), **own)
    return Trio(folder, said, InProcess(dict(sites)), [], keys)


@pytest.fixture
def trio(tmp_path: Path) -> Make:
    """Makes three sites of a recipe, whose data section is added."""
    return partial(three_sites, tmp_path)


@pytest.fixture
def signing_trio(tmp_path: Path) -> Make:
    """The same three sites with keys, with which they sign the server's ledger."""
    return partial(three_sites, tmp_path, sign=True)


@pytest.fixture
def stand_ins(tmp_path: Path) -> Make:
    """The same with stand-ins for the sites, where only the server is looked at."""

    def make(recipe: dict[str, Any], names: Sequence[str] = NAMES, **keys: Any) -> Trio:
        sites = {name: StandIn(name, k, **keys) for k, name in enumerate(names)}
        return Trio(tmp_path, described(tmp_path, recipe), InProcess(dict(sites)), [])

    return make
