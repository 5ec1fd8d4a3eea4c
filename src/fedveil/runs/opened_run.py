"""A finished run, opened from its directory: claims, history, result, model, predictions."""

import csv
import hashlib
import html
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import nn

from fedveil.base.checks import OWN
from fedveil.base.errors import BadInput
from fedveil.base.forks import one_thread
from fedveil.base.identity import identity
from fedveil.base.inputs import Inputs, Target, count, join_inputs, mapped, taken
from fedveil.data.columns import Column
from fedveil.data.data_files import UNREADABLE, warnings_as_errors
from fedveil.data.federated import Array, FederatedData
from fedveil.data.schema import TableSchema
from fedveil.data.tables import SUFFIXES
from fedveil.data.vocabulary import lines_of
from fedveil.models.task import Task
from fedveil.privacy.accounting.claims import PrivacyClaim
from fedveil.privacy.accounting.meaning import counting
from fedveil.runs.evidence import unchanged_file
from fedveil.runs.modules import METADATA_KEY, Model, add_metrics, note_claims, own_task
from fedveil.runs.recipe import Recipe, recipe_in
from fedveil.runs.run_directory import read_metrics
from fedveil.runs.sections.model_section import ModelSection
from fedveil.training.cohort import tensors
from fedveil.training.evaluate import BATCH, evaluate
from fedveil.training.session import Training


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A trained model with all that a prediction needs.

    Attributes:
        tensors: The trainable weights by name.
        model: The recipe's [model] section.
        record_shape: The shape of a record, or of each input by name.
        record_type: The type of a record likewise, "" in older files.
        target: What is predicted.
        claims: What the run claims.
        layers_text: A digest of the module's layers as they print, and of its frozen weights.
        schema: How rows of a table become records. Records that were arrays are a column "x", or
            one column per input.
    """

    tensors: dict[str, torch.Tensor]
    model: ModelSection
    record_shape: Inputs[tuple[int, ...]]
    record_type: Inputs[str]
    target: Target
    claims: tuple[PrivacyClaim, ...]
    layers_text: str
    schema: TableSchema

    @classmethod
    def from_training(
        cls,
        model: ModelSection,
        training: Training,
        params: torch.Tensor,
        claims: tuple[PrivacyClaim, ...],
    ) -> "StoredModel":
        """The model of a training with the parameters `params`."""
        task, data = training.task, training.data
        tensors = {name: value.clone() for name, value in task.named(params).items()}
        layers = layers_of(task)
        schema, types = data.schema or array_schema(data), mapped(lambda x: str(x.dtype), data.x)
        return cls(tensors, model, data.record_shape, types, data.target, claims, layers, schema)

    def inputs(self, rows: object) -> Inputs[Array]:
        """The records of a table, in the shape and type that the model was trained on."""
        encoded = self.schema.encode(rows)
        if not self.record_type:
            return encoded

        def cast(parts: list[Any]) -> Array:
            array, shape, kind = parts
            records: Array = array.reshape(len(array), *shape).astype(kind, copy=False)
            return records

        return join_inputs([encoded, self.record_shape, self.record_type], cast)

    def check_layers(self, task: Task, where: Path) -> None:
        """Refuse weights for another module than the one they were trained in."""
        shapes = {name: tuple(v.shape) for name, v in task.named(task.parameters).items()}
        wanted = {name: tuple(value.shape) for name, value in self.tensors.items()}
        for name in {**wanted, **shapes}:
            if shapes.get(name) != wanted.get(name):
                raise BadInput(
                    f"{name!r} of the module is {shapes.get(name, 'missing')}, and "
                    f"{wanted.get(name, 'missing')} in {where}: give the module that was trained"
                )
        if layers_of(task) != self.layers_text:
            raise BadInput(
                f"the module has the parameters of {where} beside other layers, such as another "
                "activation, or other frozen weights: give the module that was trained"
            )

    def to_bytes(self) -> bytes:
        """A safetensors file. The same model always gives the same bytes."""
        about = {
            "model": self.model.model_dump(),
            "record_shape": mapped(list, self.record_shape),
            "record_type": self.record_type,
            "target": asdict(self.target),
            "claims": [claim.to_dict() for claim in self.claims],
            "layers": self.layers_text,
            "schema": self.schema.to_dict(),
        }
        return safetensors.torch.save(self.tensors, {METADATA_KEY: json.dumps(about)})

    @classmethod
    def read(cls, path: Path) -> "StoredModel":
        """Read the file that a run left."""
        if not path.is_file():
            raise BadInput(f"{path} is missing: the run has not ended (fedveil run --resume)")
        try:
            with safetensors.safe_open(path, framework="pt") as f:
                about: dict[str, Any] = json.loads(f.metadata()[METADATA_KEY])
                tensors = {name: f.get_tensor(name) for name in list(f.keys())}
            # Older files have the number of labels only.
            target = about.get("target") or {"classes": about["classes"]}
            return cls(
                tensors,
                ModelSection.model_validate(about["model"]),
                mapped(lambda shape: tuple(map(int, shape)), about["record_shape"]),
                about.get("record_type", ""),
                Target(
                    int(target["classes"]),
                    tuple(target.get("shape", ())),
                    bool(target.get("several")),
                ),
                tuple(map(PrivacyClaim.from_dict, about["claims"])),
                str(about["layers"]),
                TableSchema.from_dict(about["schema"]),
            )
        except (OSError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as e:
            raise BadInput(
                f"{path} is not a model that a run left: {' '.join(str(e).split())}"
            ) from e


def layers_of(task: Task) -> str:
    """A digest of the layers as they print, and of the frozen weights."""
    return hashlib.sha256(identity((str(task.module), task.frozen)).encode()).hexdigest()


def array_schema(data: FederatedData) -> TableSchema:
    """The schema of records that are arrays: as they are, with labels called by their numbers."""
    columns = []
    for name, array in (data.x if isinstance(data.x, dict) else {"x": data.x}).items():
        if array.ndim == 1:
            columns.append(Column(name, mean=0.0, std=1.0))
        else:
            whole = array.dtype.kind in "iu"
            columns.append(Column(name, shape=tuple(array.shape[1:]), whole=whole))
    return TableSchema(tuple(columns), Column.of_target("y", data.target), isinstance(data.x, dict))


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
        path = unchanged_file(path)
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
        return read_metrics(self.folder / "metrics.jsonl")[0]

    @cached_property
    def stored(self) -> StoredModel:
        """The run's model file: weights, and all that a prediction needs."""
        return StoredModel.read(unchanged_file(self.folder / "model.safetensors"))

    @cached_property
    def task(self) -> Task:
        """The trained module with its loss and metrics."""
        stored = self.stored
        if stored.model.name != OWN:
            words = (stored.schema.vocabulary_size or stored.model.words) or 0
            task = stored.model.build(
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
        add_metrics(task, self.recipe.evaluate.metrics, self.model)
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


def measure_run(run: OpenedRun, source: Path | None) -> dict[str, float]:
    """Metrics on a table with targets, or on the test split of the run's own data."""
    if source is not None and source.suffix in SUFFIXES:
        _check_takes_tables(run, source)
        return run.evaluate(source)
    if run.recipe.data.name == OWN:
        raise BadInput(
            f"{run.folder} was trained on data from Python, which no file holds: give a table with "
            "--data, or use fedveil.open_run(folder).evaluate"
        )
    data = run.recipe.load_data(source)
    data.check_tested("measuring a run on its own data")
    if run.recipe.evaluate.epsilon is not None:
        raise BadInput(
            f"the metrics of {run.folder} have a price (evaluate.epsilon), and measuring again "
            "would show them without noise: result.json has them, --data measures on other rows"
        )
    if data.test_of_clients and getattr(run.recipe.noise, "source", "seeded") == "secure":
        data.check_secure()
    return evaluate(run.task, run.task.parameters, data)


def predictions_csv(run: OpenedRun, source: Path) -> str:
    """Predictions as CSV: a header, and one line per row or per non-blank line of text."""
    features = run.stored.schema.feature_columns
    if source.suffix in SUFFIXES:
        _check_takes_tables(run, source)
        predictions = run.predict(source)
    elif source.suffix == ".npy":
        predictions = run.predict(_records(source))
    elif source.suffix == ".txt" and features[0].text is not None:
        predictions = run.predict({features[0].name: lines_of(source)})
    else:
        known = ", ".join(SUFFIXES if features[0].text is None else (*SUFFIXES, ".txt"))
        raise BadInput(f"{source} is no input: name a {known} or .npy file")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(predictions)
    columns = [column.tolist() for column in predictions.values()]
    writer.writerows(zip(*columns, strict=True))
    return out.getvalue()


def _check_takes_tables(run: OpenedRun, source: Path) -> None:
    schema = run.stored.schema
    if any(column.shape and column.text is None for column in schema.feature_columns):
        way_out = "use fedveil.open_run(folder).predict" if schema.by_name else "give them as .npy"
        raise BadInput(
            f"{source} is a table and the records of {run.folder} are arrays of shape "
            f"{schema.record_shape}: {way_out}"
        )


def _records(path: Path) -> Array:
    try:
        with warnings_as_errors():
            records = np.load(path, allow_pickle=False)
    except UNREADABLE as e:
        raise BadInput(f"{path} cannot be read: {' '.join(str(e).split())}") from e
    if not isinstance(records, np.ndarray):
        raise BadInput(f"{path} holds no array: write one with numpy.save")
    return records
