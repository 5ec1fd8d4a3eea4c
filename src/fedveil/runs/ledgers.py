"""The ledger that a run charges: its own, in its directory, or one shared with other runs."""

import json
import math
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from fedveil.base.errors import BadInput
from fedveil.privacy.accounting.budget import BudgetLine
from fedveil.privacy.ledger.file import query, read_runs
from fedveil.privacy.ledger.hash_chain import verify
from fedveil.privacy.ledger.ledger import Ledger, LedgerRun
from fedveil.privacy.ledger.shared import (
    Common,
    check_common,
    check_company,
    common_of,
    renyi_curve,
)
from fedveil.runs.evidence import file_of, name_of
from fedveil.runs.run_directory import write_atomic
from fedveil.training.session import Training


@dataclass(frozen=True)
class Shared:
    """A ledger that several runs share, and their common epsilon.

    The first run makes the ledger. An epsilon of None is that of an existing ledger, or else the
    budget of the first run.
    """

    path: Path
    epsilon: float | None = None

    def check(self, training: Training) -> None:
        """Refuse, before anything is written, a run that the ledger cannot take."""
        plan, data = training.plan, training.data.fingerprint
        if not self.path.exists():
            _ = self.common(plan.every_line, data, None).filter
            if not self.path.resolve().parent.is_dir():
                raise BadInput(f"--ledger {self.path}: its directory does not exist; make it")
        else:
            stored = common_of(self.path)
            if stored is None:
                raise BadInput(f"--ledger {self.path} is a run's own ledger: name another file")
            check_common(self.path, self.common(plan.every_line, data, stored))
            seed = "" if training.plan.secure else str(training.seed)
            check_company(self.path, read_runs(self.path), seed, plan.counted_clients)
            verify(self.path)
        renyi_curve(plan.lines[0].event, plan.lines[0].relation)

    def common(self, lines: tuple[BudgetLine, ...], data: str, stored: Common | None) -> Common:
        """What a run of these lines would have in common with others on the ledger."""
        epsilon = self.epsilon
        if epsilon is None:
            epsilon = stored.epsilon if stored else lines[0].budget.epsilon if lines else math.inf
        return Common.from_lines(lines, data, float(epsilon))

    def point(self, folder: Path) -> None:
        """Note in the run directory where its ledger is, and what it calls the run."""
        name = f"{folder.resolve().name}-{secrets.token_hex(4)}"
        text = json.dumps({"path": str(self.path.resolve()), "run": name}, indent=2) + "\n"
        write_atomic(folder / "ledger.json", text.encode())


def open_ledger(
    folder: Path, about: dict[str, str], training: Training, shared: Shared | None
) -> Ledger:
    """Create, join or reopen the ledger of the run in `folder`. A lost one is not made again.

    `about` is what the ledger notes about the run beside its name. `shared` is for new runs.
    """
    path, plan = file_of(folder), training.plan
    # A round may have been charged, since metrics are written before the first.
    begun = any((folder / name).exists() for name in ("checkpoint", "metrics.jsonl"))
    if begun and not path.exists():
        raise BadInput(f"{path} is missing: what this run has spent is unknown; start over")
    account = (plan.every_line, plan.permitted, plan.counted_clients)
    repeats = not training.data.elsewhere  # other clients may answer the next time
    if shared is None and not (folder / "ledger.json").exists():
        if not path.exists() or (not begun and _unmade(path)):
            about = {"run": folder.resolve().name, **about}
            return Ledger.create(path, LedgerRun(about, *account, repeats=repeats))
        name = next(iter(read_runs(path)), "")  # the directory may have been renamed since
        return Ledger.reopen(path, LedgerRun({"run": name, **about}, *account, repeats=repeats))
    about = {"run": name_of(folder), **about}
    rest = (about, *account)
    if not path.exists():
        if shared is None:
            raise BadInput(
                f"{path} is missing, which this run shares with others: restore it; if it was "
                "never made, start this run over"
            )
        _make_shared(path, shared, *rest)
    common = (shared or Shared(path)).common(plan.every_line, about["data"], common_of(path))
    if about["run"] in read_runs(path):
        return Ledger.reopen(path, LedgerRun(*rest, common, repeats=repeats))
    if begun:
        raise BadInput(
            f"{path} does not know the run {about['run']!r}: what it has spent is unknown; "
            "restore the ledger it was started with, or start over"
        )
    return Ledger.join(path, LedgerRun(*rest, common, repeats=repeats))


def _make_shared(
    path: Path,
    shared: Shared,
    about: dict[str, str],
    lines: tuple[BudgetLine, ...],
    permitted: int,
    clients: int,
) -> None:
    """Make a shared ledger with this run on it, atomically, unless another process was faster."""
    common = shared.common(lines, about["data"], None)
    new = path.with_name(f".{path.name}.{about['run']}.tmp")
    Ledger.create(new, LedgerRun(about, lines, permitted, clients, common)).close()
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()


def _unmade(path: Path) -> bool:
    """Whether a ledger has no tables: a crash came before it was made, and nothing was charged."""
    return not query(path, "SELECT 1 FROM sqlite_master LIMIT 1")
