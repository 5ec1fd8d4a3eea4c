"""Small sites for the tests: a folder with site.toml, a recipe, and records of one client."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedveil as fv
from fedveil.flower.ledger_tail import LedgerTail
from fedveil.flower.messages import RoundAsk, bytes_tensor, new_run_id, plan_digest
from fedveil.flower.site import Site
from fedveil.privacy.ledger.hash_chain import digest
from fedveil.privacy.ledger.signed_head import SignedHead
from fedveil.runs.recipe import load_recipe, to_toml

RECORDS, FEATURES, CLASSES, CLIENTS = 24, 4, 3, 3

LOCAL: dict[str, Any] = {
    "name": "local",
    "rounds": 4,
    "data": {"name": "digits", "clients": CLIENTS},
    "model": {"name": "softmax"},
    "sample": {"kind": "all"},
    "client": {"kind": "gradient"},
    "clip": {"kind": "fixed", "value": 0.5},
    "noise": {"kind": "gaussian", "where": "client", "source": "secure"},
    "budget": {"epsilon": 6.0, "delta": 1e-5},
}
CENTRAL: dict[str, Any] = {
    **LOCAL,
    "name": "central",
    "sample": {"kind": "poisson", "rate": 0.5},
    "client": {"kind": "sgd", "epochs": 2, "lr": 0.1},
    "noise": {"kind": "gaussian", "where": "server", "source": "secure", "multiplier": 1.08},
}
TWO_POINT: dict[str, Any] = {
    **LOCAL,
    "name": "two-point",
    "clip": {"kind": "range", "radius": 0.15, "adaptive": False, "perturb": "update"},
    "noise": {"kind": "two-point", "epsilon": 0.2, "source": "secure"},
    "budget": {"delta": 1e-5},
}
DP_SGD: dict[str, Any] = {
    **LOCAL,
    "name": "dp-sgd",
    "client": {"kind": "dp-sgd", "rate": 0.5, "steps": 2, "lr": 0.1},
    "noise": {"kind": "gaussian", "where": "training", "multiplier": 2.0},
}
QUANTILE: dict[str, Any] = {
    **LOCAL,
    "name": "quantile",
    "clip": {"kind": "quantile", "value": 0.5, "bit_epsilon": 0.2},
    "noise": {**LOCAL["noise"], "multiplier": 2.0},
}
FEDAVG: dict[str, Any] = {
    key: value for key, value in CENTRAL.items() if key not in ("noise", "budget", "clip")
} | {"name": "fedavg", "sample": {"kind": "all"}}

POLICY: dict[str, Any] = {
    "epsilon": {"client": 10.0, "record": 10.0},
    "trust": ["local", "central"],
}


def records(seed: int = 0, size: int = RECORDS) -> fv.FederatedData:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size + 8, FEATURES)).astype(np.float32)
    y = np.arange(size + 8) % CLASSES
    return fv.FederatedData.from_clients(
        [("own", x[:size], y[:size])], test=(x[size:], y[size:]), classes=CLASSES
    )


def write_site(
    folder: Path,
    recipe: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    data: fv.FederatedData | None = None,
    **keys: Any,
) -> Path:
    """A site in `folder`; returns its site.toml."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = recipe or LOCAL
    (folder / "recipe.toml").write_text(to_toml(recipe))
    if not (folder / "records").exists():
        (data or records()).save(folder / "records")
    site = {
        "name": "north",
        "recipe": "recipe.toml",
        "clients": CLIENTS,
        **keys,
        "data": {"name": "saved", "path": "records"},
    }
    write_policy(folder, POLICY if policy is None else policy)
    path = folder / "site.toml"
    path.write_text(to_toml(site))
    return path


def write_policy(folder: Path, keys: dict[str, Any]) -> None:
    """The owner's policy.toml in `folder`."""
    (folder / "policy.toml").write_text(to_toml(keys))


def open_site(folder: Path, *args: Any, **keys: Any) -> Site:
    return Site.open(write_site(folder, *args, **keys))


_ledgers: dict[str, list[str]] = {}


def hashes_of(length: int) -> list[str]:
    """The hashes of some server's ledger with so many entries."""
    return [digest(f"entry {k}") for k in range(length + 1)]


def tail_of(hashes: list[str], since: int = 0, signed: Any = None) -> torch.Tensor:
    """A server's ledger with these hashes, as an ask carries it."""
    tail = LedgerTail(since, hashes[since:], "0" * 64, signed or {})
    return bytes_tensor(tail.to_bytes())


class Server:
    """Somebody who asks; honest unless told otherwise."""

    def __init__(self, site: Site, run: str | None = None) -> None:
        self.site, self.run = site, run or new_run_id()
        self.hashes = _ledgers.setdefault(self.run, [digest(self.run)])
        self.signed: dict[str, SignedHead] = {}

    def ask(self, round: int = 1, attempt: int = 0, **changes: Any) -> RoundAsk:
        start = self.site.training.start()
        self.hashes.append(digest(self.hashes[-1]))  # the charge of this round
        plan = plan_digest(load_recipe(self.site.file.recipe), self.site.file.clients)
        said = {
            "run": self.run,
            "plan": plan,
            "params": start.params,
            "moving": start.adaptive_state,
            "ledger_tail": tail_of(self.hashes, 0, self.signed),
        }
        return RoundAsk(**{**said, "round": round, "attempt": attempt, **changes})

    def answer(self, round: int = 1, attempt: int = 0, **changes: Any) -> Any:
        return self.site.answer(self.ask(round, attempt, **changes))


def is_answer(answer: Any) -> bool:
    return isinstance(getattr(answer, "report", None), torch.Tensor)


def charges(site: Site) -> int:
    from fedveil.privacy.ledger.file import read_charges

    return len(read_charges(site.ledger.file)) if site.ledger.file.exists() else 0


def witness(site: Site) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(site.ledger.witness_path.read_text())
    return found
