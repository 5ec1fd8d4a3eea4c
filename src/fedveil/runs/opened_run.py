"""A finished run, opened from its directory: claims, history, result, and the model."""

import html
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedveil.base.checks import OWN
from fedveil.base.errors import BadInput
from fedveil.base.inputs import Inputs, count, taken
from fedveil.data.federated import Array, FederatedData
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.runs import metrics_file
from fedveil.runs.evidence import left
from fedveil.runs.first_weights import note_claims
from fedveil.runs.models import task_of
from fedveil.runs.own import Model, asked_of, own_task
from fedveil.runs.recipe import Recipe, recipe_in
from fedveil.runs.stored_model import StoredModel
from fedveil.training.cohort import tensors
from fedveil.training.engines.housekeeping import one_thread
from fedveil.training.evaluate import BATCH, evaluate


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """What a run left in its directory.

    Files are read on first use. A file that was changed since the run ended is refused if the run's
    ledger is there.

    Attributes:
        folder: The run directory.
        recipe: The recipe that was trained.
        model: For a run of the user's own module, a module with the same layers and any weights.
        allow_code: Whether code that the recipe names may be run.
    """

    folder: Path
    recipe: Recipe = field(repr=False)
    model: Model | None = field(default=None, repr=False)
    allow_code: bool = field(default=False, repr=False)

    @classmethod
    def at(
        cls, folder: Path | str, model: Model | None = None, *, allow_code: bool = False
    ) -> "OpenedRun":
        """The run in a directory."""
        folder = Path(folder)
        return cls(folder, recipe_in(folder), model, allow_code)

    @cached_property
    def result(self) -> dict[str, Any]:
        """What result.json holds: metrics, claims, budget, timing, notes."""
        path = self.folder / "result.json"
        if not path.is_file():
            raise BadInput(
                f"{path} is missing: the run has not ended; fedveil.resume, or fedveil run "
                f"--resume {self.folder}, ends it"
            )
        path = left(path)
        try:
            result: dict[str, Any] = json.loads(path.read_text())
            return result
        except (OSError, ValueError) as e:
            raise BadInput(f"{path} cannot be read: {e}") from e

    @property
    def claims(self) -> tuple[PrivacyClaim, ...]:
        """Everything that is claimed for the model, by every line and accountant."""
        return tuple(map(PrivacyClaim.from_dict, self.result["claims"]))

    @property
    def claim(self) -> PrivacyClaim | None:
        """The claim that counts, or None if nothing is claimed."""
        return counting(self.claims)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row per round, as in metrics.jsonl. Round 0 is before training."""
        return metrics_file.read(self.folder / "metrics.jsonl")[0]

    @cached_property
    def stored(self) -> StoredModel:
        """The weights and what belongs to them."""
        return StoredModel.read(left(self.folder / "model.safetensors"))

    @cached_property
    def task(self) -> Task:
        """The trained module with its loss and metrics."""
        stored = self.stored
        if stored.model.name != OWN:
            words = (stored.schema.words or stored.model.words) or 0
            task = task_of(
                stored.model,
                stored.record_shape,
                stored.target,
                self.recipe.seed,
                words,
                allow_code=self.allow_code,
            )
        elif self.model is None:
            raise BadInput(
                f"{self.folder} holds the weights of a module of its own, and not its code: "
                "open it with the module, fedveil.open_run(folder, model=...)"
            )
        else:
            task = own_task(self.model, stored.target)
        asked_of(task, self.recipe.evaluate.metrics, self.model)
        stored.check_layers(task, self.folder)
        for name, value in task.named(task.parameters).items():
            value.copy_(stored.tensors[name])
        note_claims(task.module, str(self.folder), stored.claims)
        return task

    @property
    def module(self) -> nn.Module:
        """The trained module, in eval mode."""
        return self.task.module.eval()

    def predict(self, rows: object) -> dict[str, Array]:
        """Predictions by column: "prediction", and "p(LABEL)" for every label.

        `rows` is a table as people write it (a .csv or .parquet file, a data frame, a dict of
        columns), or an array of records where the run was trained on arrays, or a dict of them
        where it was trained on inputs by name.
        """
        schema = self.stored.schema
        x = self.stored.inputs(_table(rows))
        pieces = [taken(x, slice(a, a + BATCH)) for a in range(0, max(1, count(x)), BATCH)]
        parts = [schema.decode(self._outputs(piece), piece) for piece in pieces]
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def evaluate(self, rows: object) -> dict[str, float]:
        """Loss and metrics on rows with a target.

        Arrays are given as {"x": records, "y": targets}, or with inputs by their names beside "y".
        The metrics have no noise: publishing them is outside every claim.
        """
        schema, rows = self.stored.schema, _table(rows)
        x, y = self.stored.inputs(rows), schema.targets(rows)
        if not len(y):
            raise BadInput("there are no rows: nothing can be measured")
        one = np.array([0, 1], dtype=np.int64)
        data = FederatedData(taken(x, slice(1)), y[:1], one, x, y, self.stored.target.classes)
        return evaluate(self.task, self.task.parameters, data)

    def _outputs(self, x: Inputs[Array]) -> Array:
        task = self.task
        with torch.inference_mode(), one_thread():
            return task.answers(task.parameters, tensors(x)).numpy()

    def __repr__(self) -> str:
        path = self.folder / "result.json"
        if not path.is_file():
            return f"OpenedRun({str(self.folder)!r}, not ended)"
        try:
            _ = self.result
        except BadInput as e:
            return f"OpenedRun({str(self.folder)!r}, {e})"
        claim = "nothing is claimed" if self.claim is None else self.claim.short
        return f"OpenedRun({str(self.folder)!r}, {self._measured}, {claim})"

    @property
    def _measured(self) -> str:
        measured: Mapping[str, float | None] = self.result["metrics"]
        numbers = {name: math.nan if v is None else v for name, v in measured.items()}
        return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())

    def _repr_html_(self) -> str:
        """For notebooks: what was learnt, and the claims in full."""
        try:
            result = self.result
        except BadInput:
            return html.escape(repr(self))
        summary = f"<b>{html.escape(result['recipe'])}</b>: {result['rounds']} rounds, "
        summary += f"{html.escape(self._measured)}; stopped by {html.escape(result['stopped'])}; "
        summary += f"<code>{html.escape(str(self.folder))}</code>"
        claims = "".join(claim._repr_html_() for claim in self.claims) or "nothing is claimed"
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in result["notes"])
        return f"<p>{summary}</p>{claims}" + (f"<ul>{notes}</ul>" if notes else "")


def _table(rows: object) -> object:
    """An array is the one column of its table."""
    return {"x": rows} if isinstance(rows, np.ndarray | torch.Tensor) else rows
