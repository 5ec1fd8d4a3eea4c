"""The ledger that a run charges: its own, in its directory, or one shared with other runs."""

import json
import math
import os
import secrets
from dataclasses import dataclass, replace
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
from fedveil.runs.evidence import ledger_path, ledger_run_name
from fedveil.runs.run_directory import write_atomic
from fedveil.training.session import Training


@dataclass(frozen=True)
class SharedLedger:
    """A ledger that several runs share, and their common epsilon.

    The first run makes the ledger.

    Attributes:
        file: The ledger's file.
        epsilon: The common epsilon. None takes that of an existing ledger, or for a new ledger the
            budget of the first run.
    """

    file: Path
    epsilon: float | None = None

    def check(self, training: Training) -> None:
        """Raise BadInput, before anything is written, if the ledger cannot take this run.

        An existing ledger must be shared, unbroken, and for the same data, promise and number of
        counted clients, and no run on it may have the same seed of noise. The folder of a new one
        must exist. The plan's noise must be of a kind that shared ledgers can add up.
        """
        plan, data = training.plan, training.data.fingerprint
        if not self.file.exists():
            _ = self.common_terms(plan.every_line, data, None).filter
            if not self.file.resolve().parent.is_dir():
                raise BadInput(f"--ledger {self.file}: its directory does not exist; make it")
        else:
            stored = common_of(self.file)
            if stored is None:
                raise BadInput(f"--ledger {self.file} is a run's own ledger: name another file")
            check_common(self.file, self.common_terms(plan.every_line, data, stored))
            seed = "" if training.plan.secure else str(training.seed)
            check_company(self.file, read_runs(self.file), seed, plan.counted_clients)
            verify(self.file)
        renyi_curve(plan.lines[0].event, plan.lines[0].relation)

    def common_terms(
        self, lines: tuple[BudgetLine, ...], data: str, stored: Common | None
    ) -> Common:
        """Return the terms of this run, which every run on the ledger must share.

        They are unit, relation, trust, epsilon, delta, data and noise source. `check_common`
        compares them with those of the ledger. Raises BadInput unless the run has exactly one
        strict claim.

        Args:
            lines: The budget lines of this run.
            data: The fingerprint of its data.
            stored: The terms of an existing ledger, None for a new one. They give the epsilon if
                this object has none. Without both, the budget of the run does.
        """
        epsilon = self.epsilon
        if epsilon is None:
            epsilon = stored.epsilon if stored else lines[0].budget.epsilon if lines else math.inf
        return Common.from_lines(lines, data, float(epsilon))

    def write_pointer(self, folder: Path) -> None:
        """Write ledger.json in a run directory: the ledger's path, and a new name for the run."""
        name = f"{folder.resolve().name}-{secrets.token_hex(4)}"
        text = json.dumps({"path": str(self.file.resolve()), "run": name}, indent=2) + "\n"
        write_atomic(folder / "ledger.json", text.encode())


def open_ledger(folder: Path, run: LedgerRun, shared: SharedLedger | None) -> Ledger:
    """Create, join or reopen the ledger of the run in `folder`. The caller closes it.

    Raises BadInput if the run has begun and its ledger, or its entry in a shared one, is missing.

    Args:
        folder: The run directory.
        run: What the ledger records about the run, except its name.
        shared: The ledger that a new run shares with others. None for a run's own ledger, and for a
            run that is resumed.
    """
    path = ledger_path(folder)
    # A round may have been charged, since metrics are written before the first.
    begun = any((folder / name).exists() for name in ("checkpoint", "metrics.jsonl"))
    if begun and not path.exists():
        raise BadInput(f"{path} is missing: what this run has spent is unknown; start over")
    if shared is None and not (folder / "ledger.json").exists():
        # A ledger without tables is left by a crash while it was made: nothing was charged.
        tables = "SELECT 1 FROM sqlite_master LIMIT 1"
        if not path.exists() or (not begun and not query(path, tables)):
            about = {"run": folder.resolve().name, **run.about}
            return Ledger.create(path, replace(run, about=about))
        return Ledger.reopen(path, _begun_run(folder, run))
    name = ledger_run_name(folder)
    run = replace(run, about={"run": name, **run.about})
    if not path.exists():
        if shared is None:
            raise BadInput(
                f"{path} is missing, which this run shares with others: restore it; if it was "
                "never made, start this run over"
            )
        common = shared.common_terms(run.lines, run.about["data"], None)
        _make_shared(path, replace(run, common=common))
    shared = shared or SharedLedger(path)
    common = shared.common_terms(run.lines, run.about["data"], common_of(path))
    if name in read_runs(path):
        return Ledger.reopen(path, replace(run, common=common))
    if begun:
        raise BadInput(
            f"{path} does not know the run {name!r}: what it has spent is unknown; "
            "restore the ledger it was started with, or start over"
        )
    return Ledger.join(path, replace(run, common=common))


def check_ledger_of(folder: Path, run: LedgerRun) -> None:
    """Raise LedgerMismatch if the ledger of the run in `folder` belongs to something else.

    Writes nothing. Arguments are as in `open_ledger`.
    """
    Ledger.check_same(ledger_path(folder), _begun_run(folder, run))


def _begun_run(folder: Path, run: LedgerRun) -> LedgerRun:
    """Return the run in `folder`, which has begun, by its name in its own or a shared ledger."""
    path = ledger_path(folder)
    if (folder / "ledger.json").exists():
        common = SharedLedger(path).common_terms(run.lines, run.about["data"], common_of(path))
        about = {"run": ledger_run_name(folder), **run.about}
        return replace(run, about=about, common=common)
    name = next(iter(read_runs(path)), "")  # the directory may have been renamed since
    return replace(run, about={"run": name, **run.about})


def _make_shared(path: Path, run: LedgerRun) -> None:
    """Create the file of a shared ledger with this run in it, atomically.

    If another process has created the file meanwhile, that file stays and this run is not in it.
    """
    new = path.with_name(f".{path.name}.{run.about['run']}.tmp")
    Ledger.create(new, run).close()
    try:
        os.link(new, path)
    except FileExistsError:
        pass
    finally:
        new.unlink()
