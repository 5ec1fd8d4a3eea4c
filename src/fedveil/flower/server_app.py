"""The ServerApp: a recipe over the sites of a federation, started by `flwr run`.

Its configuration, `[tool.flwr.app.config]`: `recipe`, `federation` and `run-directory` are paths on
the server's machine, `data` the folder of the data sets; `allow-code` says that code which the
recipe names may be run. A run directory that holds a run is resumed. Needs the extra `flower`.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedveil.base.errors import BadInput
from fedveil.flower.app_process import end_with_parent, separate_draws
from fedveil.flower.engine import RemoteEngine
from fedveil.flower.federation import read_federation
from fedveil.flower.round_log import Outcome
from fedveil.flower.run_server import Server
from fedveil.flower.wire import GridTransport
from fedveil.runs.recipe import load_recipe

LOG = logging.getLogger("flwr")

separate_draws()
end_with_parent()
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train over the federation's sites, to the end of the plan or of the budget."""
    config = context.run_config
    federation = read_federation(Path(_path(config, "federation")))
    server = Server.open(
        load_recipe(_path(config, "recipe")),
        federation,
        GridTransport(grid, federation),
        Path(_path(config, "run-directory")),
        Path(_path(config, "data")) if config.get("data") else None,
        allow_code=bool(config.get("allow-code", False)),
        on_outcome=lambda outcome: _log_outcome(server, outcome),
    )
    LOG.info("%s", server.run.describe())
    result = server.serve(lambda line: LOG.info("%s", _round_text(server, line)))
    LOG.info("%s; %s", result["why"], result["run_dir"])


def _path(config: Any, key: str) -> str:
    path = config.get(key)
    if not isinstance(path, str) or not path:
        raise BadInput(f"the app's configuration has no {key!r}: name it in [tool.flwr.app.config]")
    return path


def _log_outcome(server: Server, outcome: Outcome) -> None:
    """Log who answered, unless the cohort is secret: logs go to whoever called `flwr run`."""
    engine = server.run.training.engine
    if isinstance(engine, RemoteEngine) and not engine.steady:
        LOG.info("%s", outcome)


def _round_text(server: Server, line: dict[str, Any]) -> str:
    """A round in one line: the metrics on the test split, and what is claimed so far."""
    promise = server.run.training.plan.promise
    spent = None if promise is None else replace(promise, epsilon=line["epsilon"])
    measured = [
        f"{name} {line[name]:.4g}"
        for name in ("loss", *server.run.training.task.measures)
        if name in line
    ]
    claim = "no claim" if spent is None else f"{spent.short} spent"
    return f"round {line['round']}: {', '.join([*measured, claim])}"
