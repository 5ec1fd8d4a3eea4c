"""The way in from Python: the same runs as `fedveil run`, with a module and data of one's own."""

from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

from rich.console import Console

from fedveil.base.checks import check_ledger_epsilon
from fedveil.console import Line, in_notebook, notebook_progress, progress_line
from fedveil.data.federated import FederatedData
from fedveil.runs.build import BuildOptions
from fedveil.runs.ledgers import SharedLedger
from fedveil.runs.logs import check_logs
from fedveil.runs.modules import Model
from fedveil.runs.opened_run import OpenedRun
from fedveil.runs.recipe import DEFAULT, Overrides, load_recipe
from fedveil.runs.run import Run


def run(
    recipe: str | Mapping[str, Any] = DEFAULT,
    *,
    model: Model | None = None,
    data: FederatedData | None = None,
    out: Path | str | None = None,
    set: Overrides = (),
    data_root: Path | str | None = None,
    ledger: Path | str | None = None,
    ledger_epsilon: float | None = None,
    allow_code: bool = False,
    log: str | Iterable[str] = (),
    on_round: Callable[[Line], None] | None = None,
    quiet: bool = False,
) -> OpenedRun:
    """Train to the end of the plan or of the budget, in a run directory that can be resumed.

    `recipe` is a shipped one by name, a file by path, or a dict; `set` overrides its keys. `model`
    is an `nn.Module` (labels are learnt by cross-entropy, numbers by squared error) or a `Task`
    with a loss and metrics of its own; a copy is trained, and the caller's keeps its weights. Left
    out, model and data are the recipe's. `out` is a new directory (default: one under `runs`).
    `ledger` is a file in which runs on the same data share a budget, `ledger_epsilon` that budget
    when it is new. `allow_code` says that the code which the recipe names (`model.path`) may be
    run. `log` names experiment trackers ("tensorboard", "mlflow", "wandb"), which get what
    metrics.jsonl gets; `on_round` is called with the same.

    Ctrl-C ends the run after its round and returns it: its result says "interrupted", and `resume`
    continues it. So does an error in `on_round`, which is raised then. The button of `fedveil
    watch` does the same, and the result says "request". A run that was killed is continued by
    `resume` as well.
    """
    own: BuildOptions = {"model": model, "data": data, "allow_code": allow_code}
    prepared = _start_run(recipe, set, out, data_root, ledger, ledger_epsilon, log, **own)
    return _execute(prepared, model, allow_code, on_round, quiet=quiet)


def resume(
    folder: Path | str,
    *,
    model: Model | None = None,
    data: FederatedData | None = None,
    data_root: Path | str | None = None,
    allow_code: bool = False,
    log: str | Iterable[str] = (),
    on_round: Callable[[Line], None] | None = None,
    quiet: bool = False,
) -> OpenedRun:
    """Continue an interrupted run to the result it would have had, bit for bit.

    Own parts are given again. Others than those it was started with are refused: a module is known
    by its layers, loss, metrics and first weights, data by all their records. A run that is
    complete stays as it is.
    """
    kinds = _check_kinds(log)
    prepared = Run.resume(
        Path(folder), _as_path(data_root), model=model, data=data, allow_code=allow_code
    )
    prepared.logs = kinds
    return _execute(prepared, model, allow_code, on_round, quiet=quiet)


def rounds(
    recipe: str | Mapping[str, Any] = DEFAULT,
    *,
    out: Path | str,
    model: Model | None = None,
    data: FederatedData | None = None,
    set: Overrides = (),
    data_root: Path | str | None = None,
    ledger: Path | str | None = None,
    ledger_epsilon: float | None = None,
    allow_code: bool = False,
    log: str | Iterable[str] = (),
) -> Generator[Line, None, None]:
    """Yield each round's line of metrics while training: `for line in rounds(...)`.

    Arguments are those of `run`. The directory is created at once, training begins with the loop.
    Leaving the loop ends the run in its directory, which `open_run` opens and `resume` continues.
    """
    own: BuildOptions = {"model": model, "data": data, "allow_code": allow_code}
    prepared = _start_run(recipe, set, out, data_root, ledger, ledger_epsilon, log, **own)
    return prepared.metric_lines()


def open_run(
    folder: Path | str, *, model: Model | None = None, allow_code: bool = False
) -> OpenedRun:
    """Open a run by its directory. `model` is needed if the run had a module of the user's.

    `allow_code` says that the code which its recipe names may be run.
    """
    return OpenedRun.at(folder, model, allow_code=allow_code)


def _start_run(
    recipe: str | Mapping[str, Any],
    settings: Overrides,
    out: Path | str | None,
    data_root: Path | str | None,
    ledger: Path | str | None,
    epsilon: float | None,
    log: str | Iterable[str],
    **options: Unpack[BuildOptions],
) -> Run:
    """Create the run directory of a recipe, ready to train. Arguments are those of `run`."""
    kinds = _check_kinds(log)
    check_ledger_epsilon("ledger_epsilon", epsilon, ledger)
    own = [name for name in ("model", "data") if options.get(name) is not None]
    path = _as_path(ledger)
    prepared = Run.start(
        load_recipe(recipe, settings, own),
        _as_path(out),
        _as_path(data_root),
        None if path is None else SharedLedger(path, epsilon),
        **options,
    )
    prepared.logs = kinds
    return prepared


def _execute(
    prepared: Run,
    model: Model | None,
    allow_code: bool,
    on_round: Callable[[Line], None] | None,
    *,
    quiet: bool,
) -> OpenedRun:
    """Train a prepared run to its end, and open it.

    Each round is shown on a terminal or in a notebook unless `quiet`, then passed to `on_round`.
    """
    console = Console(stderr=True, quiet=quiet, markup=False, emoji=False)
    notebook = in_notebook()
    shown = not quiet and (notebook or console.is_terminal)
    with notebook_progress(prepared) if notebook else progress_line(console, prepared) as show:

        def both(line: Line) -> None:
            if shown:
                show(line)
            if on_round is not None:
                on_round(line)

        prepared.execute(both)
    if prepared.already_complete:
        console.print(f"{prepared.folder} is already complete: nothing was changed")
    return OpenedRun(prepared.folder, prepared.recipe, model, allow_code)


def _as_path(given: Path | str | None) -> Path | None:
    """Return a path or text as a Path, and None as None."""
    return None if given is None else Path(given)


def _check_kinds(log: str | Iterable[str]) -> tuple[str, ...]:
    """Return one tracker or several as a tuple. Raises BadInput if one is unknown or missing."""
    kinds = (log,) if isinstance(log, str) else tuple(log)
    check_logs(kinds)
    return kinds
